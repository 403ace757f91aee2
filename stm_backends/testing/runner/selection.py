"""The checks that a run carries out; its report lists the others with the reason."""

from __future__ import annotations

from typing import Any, Final

import pytest

from stm_backends.testing.workbench.check import Check
from stm_backends.testing.workbench.clauses import CLAUSES

SLOW: Final = "too slow for a quick run"
UNSELECTED: Final = "not selected"
UNREACHED: Final = "the run ended before it"


class Selection:
    """The checks of the contracts under test that are left out, by id.

    `left_out` has the fields of a `Result` for each, with the reason. A check that is to run is in it, too,
    because the run may end first; the report skips those with a result.
    """

    def __init__(self, config: pytest.Config) -> None:
        self._clauses: frozenset[str] = frozenset(config.getoption("stm_clause") or ())
        # A clause implies its profile.
        of_clauses = {CLAUSES[name].profile for name in self._clauses}
        self._profiles = frozenset[str](config.getoption("stm_profile") or of_clauses or ["driver"])
        self.left_out: dict[str, dict[str, Any]] = {}

    def note(self, item: pytest.Item, check: Check) -> None:
        """Note a check of a selected profile."""
        if self._concerns(item):
            self.left_out[id_of(item)] = {
                **facts_of(item, check),
                "outcome": "left out",
                "seconds": 0.0,
                "reason": UNSELECTED,
            }

    def keeps(self, item: pytest.Item, check: Check) -> bool:
        """Return whether the options of this plugin select a check."""
        if not self._concerns(item) or (self._clauses and check.clause.id not in self._clauses):
            return False
        if is_slow(item, check):
            self.left_out[id_of(item)]["reason"] = SLOW
            return False
        return True

    def _concerns(self, item: pytest.Item) -> bool:
        profile = profile_of(item)
        return not profile or bool({profile, "all"} & self._profiles)

    def begin(self, items: list[pytest.Item]) -> None:
        """Note which checks will run, after all options have selected."""
        for item in items:
            if id_of(item) in self.left_out:
                self.left_out[id_of(item)]["reason"] = UNREACHED


def profile_of(item: pytest.Item) -> str:
    """Return the profile of a check in `test_installed`, with a subject set by options; `""` for others."""
    return getattr(getattr(item, "cls", None), "profile", "")


def is_installed(name: str) -> bool:
    """Return whether the id of a check is one of `test_installed`."""
    return name.startswith(f"{__package__}.test_installed::")


def is_slow(item: pytest.Item, check: Check) -> bool:
    """Return whether a check is left out because its class runs in the quick form."""
    cls, callspec = getattr(item, "cls", None), getattr(item, "callspec", None)
    return cls is not None and cls.is_quick(item.config) and check.is_slow(getattr(callspec, "params", {}))


def id_of(item: pytest.Item) -> str:
    """Return the id that runs a check again; for an installed one, with `--pyargs`."""
    module, name = getattr(item, "module", None), item.nodeid.partition("::")[2]
    return f"{module.__name__}::{name}" if module and profile_of(item) else item.nodeid


def facts_of(item: pytest.Item, check: Check) -> dict[str, Any]:
    """Return the fields of a `Result` that are known before a check runs."""
    return {
        "id": id_of(item),
        "subject": item.parent.name if item.parent is not None else "",
        "clause": check.clause.id,
        "name": item.name,
        "sentence": check.sentence,
    }
