"""Drivers as tests open them, and choices among the checks of the contract."""

from __future__ import annotations

import contextlib
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import pytest

from stm_backends.drivers.contract import Driver
from stm_backends.testing import DriverContract, open_at
from stm_backends.testing.workbench.check import check_of


@contextlib.asynccontextmanager
async def opened(url: str, **options: Any) -> AsyncIterator[Driver]:
    """Yield a driver that is open for as long as the context lasts."""
    driver = await open_at(url, **options)
    try:
        yield driver
    finally:
        await driver.close()


def reached(
    server: tuple[str | None, int | None],
    url_at: Callable[[int], str],
    opening: Callable[..., Awaitable[Driver]] = open_at,
    **options: Any,
) -> dict[str, Any]:
    """Return a datastore's `address` and `through`; its URL is `url_at(port)` at a port of the loopback."""

    async def through(address: str) -> Driver:
        port = int(address.rpartition(":")[2])
        return await opening(url_at(port), deadline_s=2.0, **options)

    return {"address": f"{server[0]}:{server[1]}", "through": through}


def deadline_of(request: pytest.FixtureRequest) -> float:
    """Return the deadline of the drivers in a check: short where it passes, else ample for a busy machine.

    It passes in outages, and the lease of a killed pod lasts for some deadlines.
    """
    return 2.5 if re.search("outage|killed_while|past_its_deadline", request.node.name) else 30.0


def slow_checks(reason: str, *, kept: Sequence[str] = ()) -> dict[str, str]:
    """Return the slow checks of a driver, to opt out of where another class asks the same of it."""
    checks = DriverContract.checks()
    assert set(kept) <= checks.keys()
    return {
        name: reason for name, check in checks.items() if check_of(check).slow is True and name not in kept
    }
