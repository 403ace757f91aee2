"""What a right driver may answer while a check holds its writes up."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest

from stm_backends.drivers.contract import Key
from stm_backends.drivers.in_memory import MemoryDriver
from stm_backends.errors import Unavailable
from stm_backends.testing.driver_checks.steps import waiting_for


async def refused() -> str:
    raise Unavailable("too many writes wait")


async def answered() -> str:
    return "done"


async def held(*writes: Any) -> list[object]:
    """Return what comes of writes, and of one that waits for the record that is held."""
    free = asyncio.Event()

    @contextlib.asynccontextmanager
    async def hold(_: Key) -> AsyncGenerator[None]:
        yield
        free.set()

    async def waits() -> str:
        await free.wait()
        return "waited"

    bench: Any = SimpleNamespace(datastore=SimpleNamespace(hold=hold), traits=MemoryDriver().traits)
    async with waiting_for(bench, Key("scope", "name"), waits, *writes) as waiting:
        pass
    return await asyncio.gather(*waiting, return_exceptions=True)


async def test_a_driver_may_refuse_a_write_while_another_one_waits() -> None:
    first, second = await held(refused)
    assert first == "waited"
    assert isinstance(second, Unavailable)


async def test_no_write_may_be_done_while_the_record_is_held() -> None:
    with pytest.raises(AssertionError, match="keeps writers to the record waiting"):
        await held(refused, answered)
