"""Writes that take more than one operation of a driver."""

from __future__ import annotations

from typing import Any

from stm_backends.drivers.contract import Driver, Key
from stm_backends.records import operations

KEY = Key("acme:u:memory", "chat")


async def test_only_the_first_entry_of_a_record_creates_it(driver: Driver) -> None:
    assert await operations.append(driver, KEY, b"one", ttl=None) == (1, True)
    assert await operations.append(driver, KEY, b"two", ttl=None) == (2, False)


async def test_a_creation_with_a_lost_answer_counts_despite_later_entries(driver: Driver, lose: Any) -> None:
    async def others() -> None:
        for _ in range(operations.ATTEMPTS):
            await operations.append(driver, KEY, b"theirs", ttl=None)

    lose("append", done=True, then=others)
    length, created = await operations.append(driver, KEY, b"ours", ttl=None)
    assert length > operations.ATTEMPTS
    assert created
