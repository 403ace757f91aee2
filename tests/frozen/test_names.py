"""The public names of each release are still there, or have warned before they went."""

from __future__ import annotations

import importlib
import json
import warnings
from pathlib import Path
from typing import Any, Final

import pytest

from tests.frozen import names

RELEASES = sorted(Path(__file__).parent.glob("release_*"))
pytestmark = pytest.mark.parametrize("release", RELEASES, ids=lambda path: path.name)

GONE: Final[dict[str, str]] = {}
"""Names that are gone, as `module.Class.member`, each with the version that warned of it first."""


def kept(release: Path) -> dict[str, Any]:
    return json.loads((release / names.FILE).read_text("utf-8"))


def found(module: str, name: str) -> object:
    """Return what a public name stands for. One that is not listed any more has to warn."""
    home = importlib.import_module(module)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        one = getattr(home, name)
    warned = any(issubclass(each.category, DeprecationWarning) for each in caught)
    assert name in home.__all__ or warned, f"{module}.{name} is no longer public, and does not warn"
    return one


def test_the_list_has_the_modules_that_are_public(release: Path) -> None:
    assert {*kept(release)} >= {"stm_backends", "stm_backends.sync", "stm_backends_redis"}
    assert "conversation" in kept(release)["stm_backends"]["Backend"]["members"]


@pytest.mark.parametrize("module", names.MODULES)
def test_every_public_name_is_there_or_warns(release: Path, module: str) -> None:
    for name in kept(release).get(module, {}):
        if f"{module}.{name}" not in GONE:
            found(module, name)


@pytest.mark.parametrize("module", names.MODULES)
def test_every_member_and_parameter_is_still_taken(release: Path, module: str) -> None:
    lost: list[str] = []
    for name, told in kept(release).get(module, {}).items():
        place = f"{module}.{name}"
        if place in GONE:
            continue
        one = found(module, name)
        if told.get("parameters") and not names.takes(one, told["parameters"]):
            lost.append(f"{place}: parameters")
        present = names.described(one).get("members", {})
        for member, taken in told.get("members", {}).items():
            if f"{place}.{member}" in GONE:
                continue
            if member not in present:
                lost.append(f"{place}.{member}")
            elif taken and not names.takes(getattr(one, member), taken):
                lost.append(f"{place}.{member}: parameters")
    assert lost == []


def test_until_a_release_is_published_the_list_has_the_present_names(release: Path) -> None:
    changes = (Path(__file__).parents[2] / "CHANGELOG.md").read_text("utf-8")
    version = release.name.removeprefix("release_").replace("_", ".") + ".0"
    if f"## [{version}] - 2" in changes:
        pytest.skip("it is published")
    assert {module: names.public(module) for module in names.MODULES} == kept(release)
