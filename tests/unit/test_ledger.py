"""Writes that take more than one operation of a driver."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from stm_backends import races
from stm_backends.drivers.contract import Driver, Key
from stm_backends.errors import OutcomeUnknown
from stm_backends.records import ledger

KEY = Key("acme:u:memory", "chat")


async def test_only_the_first_entry_of_a_record_creates_it(driver: Driver) -> None:
    assert await ledger.append(driver, KEY, b"one", ttl=None) == (1, True)
    assert await ledger.append(driver, KEY, b"two", ttl=None) == (2, False)


async def test_a_creation_with_a_lost_answer_counts_despite_later_entries(driver: Driver, lose: Any) -> None:
    async def others() -> None:
        for _ in range(races.ATTEMPTS):
            await ledger.append(driver, KEY, b"theirs", ttl=None)

    lose("append", done=True, then=others)
    length, created = await ledger.append(driver, KEY, b"ours", ttl=None)
    assert length > races.ATTEMPTS
    assert created


async def test_a_process_that_was_stopped_does_not_retry_an_append(
    driver: Driver, lose: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = asyncio.get_running_loop()
    right, stopped = loop.time, 0.0
    monkeypatch.setattr(loop, "time", lambda: right() + stopped)

    async def stop() -> None:
        nonlocal stopped
        stopped = (races.ATTEMPTS + 1) * driver.traits.deadline + 0.001

    lose("append", done=True, then=stop)
    with pytest.raises(OutcomeUnknown):
        await ledger.append(driver, KEY, b"one", ttl=None)
    record = await driver.load(KEY)
    assert record is not None
    assert record.tail == (b"one",)
