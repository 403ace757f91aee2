"""A record that distinguishes a load of one moment from a mixture of two.

One writer appends the numbers 0, 1, 2 ... and folds the oldest of them. The version and the body say how many
have been folded, and the tail continues from there. The record never had any other content.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
from typing import Final

from stm_backends.drivers.contract import KEEP, Driver, Key, Record

_COPIES: Final = 4
"""Number of repetitions of a number in its value, so that a part of it, or parts of two, are recognised."""

_LONGEST_TAIL: Final = 4
_LEAST: Final = 40
"""Minimum number of numbers written, however slow the datastore is."""


async def write_numbers(driver: Driver, key: Key, *, seconds: float) -> None:
    """Append numbers and fold the oldest for some seconds; the record must have no other writer."""
    clock = asyncio.get_running_loop().time
    end, folded = clock() + seconds, 0
    for number in itertools.count():
        if number >= _LEAST and clock() >= end:
            return
        length = await driver.append(key, _value(number), initial_version=_version(0), ttl=None)
        if length >= _LONGEST_TAIL:
            drop = 1 + number % _LONGEST_TAIL
            version, expect = _version(folded + drop), _version(folded)
            body = _value(folded + drop)
            won = await driver.replace(key, body, version=version, expect=expect, drop=drop, ttl=KEEP)
            assert won, "a fold was refused although the record has no other writer"
            folded += drop
        await asyncio.sleep(0)


async def watch_numbers(
    driver: Driver,
    key: Key,
    writing: asyncio.Future[None],
    *,
    starting_s: float = 0.0,
    last: int | None = None,
) -> None:
    """Load while another task writes; fail if a record was never stored, or is older than the previous one.

    `starting_s` is the pause between loads while there is no record: a writer in another process needs the
    machine to start. With `last`, loads request that many of the newest entries.
    """
    load = functools.partial(driver.load, key)
    if last is not None:
        load = functools.partial(load, last=last)
    folded, appended, is_over = 0, 0, False
    while not is_over:
        # On a busy machine, the writer may have ended before this reader runs again.
        is_over = writing.done()
        before = folded, appended
        folded, appended = _moment(await load())
        assert before[0] <= folded, f"{before[0]} entries were folded, and a later load says {folded}"
        assert before[1] <= appended, f"{before[1]} entries were there, and a later load has only {appended}"
        await asyncio.sleep(0 if appended else starting_s)
    assert folded > 0, "loads must see the folds of another writer"


def _moment(record: Record | None) -> tuple[int, int]:
    """Return the numbers of folded and of appended values in a loaded record."""
    if record is None:
        return 0, 0
    folded = 0 if record.body is None else _number(record.body)
    assert record.version == _version(folded), (
        f"a load mixes two moments: version {record.version!r} has come with the body of {_version(folded)!r}"
    )
    numbers, first = [_number(entry) for entry in record.tail], folded + record.skipped
    assert numbers == list(range(first, first + len(numbers))), (
        f"a load mixes two moments: entries 0 to {folded - 1} are folded, {record.skipped} were "
        f"skipped, and the tail is {numbers}"
    )
    return folded, folded + record.length


def _version(folded: int) -> str:
    return f"v{folded}"


def _value(number: int) -> bytes:
    return b" ".join([b"%d" % number] * _COPIES)


def _number(value: bytes) -> int:
    first = value.partition(b" ")[0]
    assert first.isdigit(), "a load has a value that was never stored"
    assert value == _value(int(first)), "a load has a value that mixes or cuts stored values"
    return int(first)
