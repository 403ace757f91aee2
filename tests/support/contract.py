"""Choices among the checks of the contract."""

from __future__ import annotations

from collections.abc import Sequence

from stm_backends.testing import DriverContract
from stm_backends.testing.workbench.check import check_of


def slow_checks(reason: str, *, kept: Sequence[str] = ()) -> dict[str, str]:
    """Return the slow checks of a driver, to opt out of where another class asks the same of it."""
    checks = DriverContract.checks()
    assert set(kept) <= checks.keys()
    return {name: reason for name, check in checks.items() if check_of(check).slow and name not in kept}
