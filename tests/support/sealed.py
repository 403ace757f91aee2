"""Sealed drivers, as tests and their other processes open them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from stm_backends.drivers.contract import Driver
from stm_backends.sealing.driver import SealedDriver
from stm_backends.sealing.keys import Sealing, StaticKeys
from stm_backends.testing import open_at

LONGEST_ID = "k" * 32
"""With it, sealing takes exactly the room that the traits allow for."""

SEALING = Sealing(StaticKeys({LONGEST_ID: bytes(range(32))}, primary=LONGEST_ID))


kind: type[SealedDriver] = SealedDriver
"""The class of all drivers that seal in tests; the tests of mutants set a mutant."""


def sealed(
    inner: Driver, sealing: Sealing = SEALING, *, clear_met: Callable[[], None] = lambda: None
) -> SealedDriver:
    """Return a driver around another that seals."""
    return kind(inner, sealing, clear_met=clear_met)


async def open_sealed(url: str, **options: Any) -> Driver:
    """Return an open driver that seals what it stores at a URL."""
    return sealed(await open_at(url, **options))
