"""Checks of concurrent writers."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

from stm_backends.drivers.contract import ABSENT, KEEP, Driver, Key, Record, new_version
from stm_backends.errors import Corrupt, OutcomeUnknown, StorageError, TooLarge, Unavailable
from stm_backends.testing.driver_checks.steps import (
    append_all,
    assert_complete_and_in_order,
    loaded,
    noise,
    take_steps,
)
from stm_backends.testing.workbench.check import Contract, check, not_asked, too_slow
from stm_backends.testing.workbench.drivers import Bench
from stm_backends.testing.workbench.expectations import must_be
from stm_backends.testing.workbench.processes import fold, ledger

AT_ONCE: Final = 150
"""Number of concurrent appends: more than a pool has connections, or than fit into a batch."""

LARGE_ENTRY: Final = 50_000
LARGE_RECORD: Final = 400_000
"""Sizes that drivers treat as large, if their limits allow them."""


FOLDS: Final = 40
"""Number of folds made during appends."""

FOLDING_S: Final = 5.0
"""Maximum number of seconds for these folds, however slow the datastore is."""


class Races(Contract):
    """Checks of concurrent writers."""

    @check("driver.races")
    async def test_concurrent_appends_are_all_stored_in_each_writers_order(self, bench: Bench) -> None:
        drivers, key = [await bench.driver(), await bench.driver()], bench.key()
        lengths: list[int] = []

        async def write(label: int) -> None:
            for number in range(10):
                entry = f"{label}:{number}".encode()
                lengths.append(
                    await drivers[label % 2].append(key, entry, initial_version=new_version(), ttl=None)
                )

        await asyncio.gather(*(write(label) for label in range(8)))
        tail = [entry.decode() for entry in (await loaded(drivers[0], key)).tail]
        assert_complete_and_in_order(tail, {str(label): 10 for label in range(8)})
        must_be(sorted(lengths), list(range(1, 81)), "each of 80 appends made the tail longer by one")

    @check("driver.races")
    async def test_folds_never_lose_an_append_and_loads_never_see_half_a_fold(self, bench: Bench) -> None:
        one, two, key = await bench.driver(), await bench.driver(), bench.key()
        acknowledged: set[str] = set()
        writing = True

        async def write(driver: Driver, label: str) -> None:
            for number in range(30):
                await driver.append(
                    key, f"{label}:{number}".encode(), initial_version=new_version(), ttl=None
                )
                acknowledged.add(f"{label}:{number}")
                await take_steps(number % 4)

        async def keep_folding(driver: Driver) -> None:
            for turn in itertools.count():
                if not writing:
                    return
                await fold(driver, key, 3)
                await take_steps(1 + turn % 3)

        async def keep_looking(driver: Driver) -> None:
            for turn in itertools.count():
                if not writing:
                    return
                expected = set(acknowledged)
                entries = await ledger(driver, key)
                assert len(entries) == len(set(entries)), "an entry must not be in the body and in the tail"
                assert expected <= set(entries), "an entry that was acknowledged must be in body or tail"
                await take_steps(1 + turn % 5)

        async with asyncio.TaskGroup() as tasks:
            for driver in (one, two):
                tasks.create_task(keep_folding(driver))
                tasks.create_task(keep_looking(driver))
            await asyncio.gather(write(one, "a"), write(two, "b"), write(two, "c"))
            writing = False
        assert_complete_and_in_order(await ledger(one, key), {"a": 30, "b": 30, "c": 30})

    @check("driver.races")
    async def test_each_fold_of_the_only_folder_succeeds_beside_appends(self, bench: Bench) -> None:
        """A conflict with an append, which does not change the version, is reported as a lost race."""
        one, two, key = await bench.driver(), await bench.driver(), bench.key()
        clock, is_over = asyncio.get_running_loop().time, asyncio.Event()

        async def keep_appending(driver: Driver) -> None:
            while not is_over.is_set():
                # With optimistic writes, some writers may get no turn, and say so.
                with contextlib.suppress(Unavailable, OutcomeUnknown):
                    await driver.append(key, b"a", initial_version="initial", ttl=None)
                await asyncio.sleep(0)

        async def keep_folding() -> list[bool]:
            answers, until = list[bool](), clock() + FOLDING_S
            while len(answers) < FOLDS and clock() < until:
                if (record := await one.load(key)) is not None and record.tail:
                    drop = min(len(record.tail), one.traits.max_drop)
                    try:
                        fold = one.replace(
                            key, b"", version=new_version(), expect=record.version, drop=drop, ttl=KEEP
                        )
                        answers.append(await fold)
                    except Unavailable:
                        pass
                    except OutcomeUnknown:
                        # It may still be done, and another one may lose to it.
                        break
                await asyncio.sleep(0)
            return answers

        async with asyncio.TaskGroup() as tasks:
            for driver in (one, two, two):
                tasks.create_task(keep_appending(driver))
            try:
                answers = await keep_folding()
            finally:
                is_over.set()
        if not answers:
            not_asked(too_slow("needs folds that end in time, and these did not"))
        lost = answers.count(False)
        must_be(lost, 0, f"only these {len(answers)} folds have changed the version, so each must win")

    @check("driver.races")
    async def test_of_writers_that_expect_the_same_version_exactly_one_wins(self, bench: Bench) -> None:
        drivers, key = [await bench.driver(), await bench.driver()], bench.key()
        for round_ in range(5):
            await append_all(drivers[0], key, b"a", b"b", initial_version=f"initial{round_}")
            version = (await loaded(drivers[0], key)).version
            answers = await asyncio.gather(
                *(
                    drivers[number % 2].replace(
                        key,
                        b"%d" % number,
                        version=f"{round_}-{number}",
                        expect=version,
                        drop=1,
                        ttl=None,
                    )
                    for number in range(8)
                )
            )
            must_be(sum(answers), 1, "all writers expected the same version, so only one can win")
            winner = answers.index(True)
            record = Record(f"{round_}-{winner}", b"%d" % winner, (b"b",))
            must_be(await drivers[1].load(key), record, "this writer received True")
            await drivers[0].delete(key)

    @check("driver.races")
    async def test_of_concurrent_requests_for_a_lease_exactly_one_succeeds(self, bench: Bench) -> None:
        drivers, key = [await bench.driver(), await bench.driver()], bench.key()
        answers = await asyncio.gather(
            *(
                drivers[number % 2].replace(key, b"", version=f"v{number}", expect=ABSENT, ttl=60)
                for number in range(10)
            )
        )
        must_be(sum(answers), 1, "a lease has one holder")
        holder = f"v{answers.index(True)}"
        must_be((await loaded(drivers[0], key)).version, holder, "this writer received True")

    @check("driver.races")
    async def test_concurrent_first_appends_create_one_record(self, bench: Bench) -> None:
        drivers, key = [await bench.driver(), await bench.driver()], bench.key()
        initial_versions = [f"initial{number}" for number in range(10)]
        lengths = await asyncio.gather(
            *(
                drivers[n % 2].append(key, b"", initial_version=initial_version, ttl=None)
                for n, initial_version in enumerate(initial_versions)
            )
        )
        must_be(sorted(lengths), list(range(1, 11)), "each of ten appends made the tail longer by one")
        initial_version = initial_versions[lengths.index(1)]
        must_be(
            (await loaded(drivers[0], key)).version,
            initial_version,
            "this append returned 1",
        )

    @check("driver.races")
    async def test_records_of_any_size_that_are_loaded_at_once_are_whole(self, bench: Bench) -> None:
        """A driver may leave large records out of a request shared by loads, and must then load them."""
        writer, driver, scope = await bench.driver(), await bench.driver(), bench.scope()
        # A record holds at least two entries of half the largest one.
        size = min(LARGE_ENTRY, writer.traits.max_entry) // 2
        count = min(LARGE_RECORD, writer.traits.max_record) // size
        expected: list[Record] = []
        keys = [Key(scope, f"record {number}") for number in range(8)]
        for number, key in enumerate(keys):
            # The body differs from record to record.
            entries = [noise(size)] * (count - 1) if number % 4 == 1 else [noise(number)]
            await append_all(writer, key, *entries)
            await writer.replace(key, b"%d" % number, version="v", expect="initial", ttl=None)
            expected.append(Record("v", b"%d" % number, tuple(entries)))
        # A driver may remember which records are large.
        for attempt in ("the first", "the second"):
            found = await asyncio.gather(*map(driver.load, keys * 3))
            whole = [record == one for record, one in zip(found, expected * 3, strict=True)]
            must_be(whole, [True] * len(found), f"{attempt} loads at once find each record as it was stored")

    @check("driver.races")
    async def test_of_many_writes_at_once_each_succeeds_or_fails_for_itself(self, bench: Bench) -> None:
        """Concurrent writes share a transaction, and so its error, or get each other's answers."""
        driver, other, scope, damaged = await bench.driver(), await bench.driver(), bench.scope(), bench.key()
        keys = [Key(scope, f"record {number}") for number in range(5)]
        for key in (*keys, damaged):
            await append_all(other, key, b"a", b"b")
        key, too_large = keys[0], noise(driver.traits.max_entry + 1)
        others: dict[str, tuple[type | tuple[type, ...], Callable[[], Awaitable[object]]]] = {
            "a creation of what is there": (
                bool,
                lambda: driver.replace(key, b"", version="v", expect=ABSENT, ttl=None),
            ),
            "a fold of another version": (
                bool,
                lambda: driver.replace(key, b"", version="v", expect="other", drop=1, ttl=None),
            ),
            "a delete of another version": (bool, lambda: driver.delete(key, expect="other")),
            "an entry that is too large": (
                TooLarge,
                lambda: driver.append(key, too_large, initial_version="initial", ttl=None),
            ),
        }
        if bench.datastore.damage is not None:
            await bench.damage(damaged)
            # A driver may append without looking at the record.
            others["an append to a damaged record"] = (
                (Corrupt, int),
                lambda: driver.append(damaged, b"c", initial_version="initial", ttl=None),
            )
        appends = [
            functools.partial(driver.append, keys[n % 5], b"%d" % n, initial_version="initial", ttl=None)
            for n in range(AT_ONCE)
        ]
        half = AT_ONCE // 2
        calls = [*appends[:half], *(call for _, call in others.values()), *appends[half:]]
        began = time.monotonic()
        outcomes: list[Any] = await asyncio.gather(*(call() for call in calls), return_exceptions=True)
        # On a busy machine, some may exceed their deadline, or half of it in a queue.
        late: tuple[type[StorageError], ...] = ()
        if time.monotonic() - began > driver.traits.deadline / 2:
            late = (Unavailable, OutcomeUnknown)
        for what, (kind, _) in others.items():
            outcome = outcomes.pop(half)
            assert isinstance(outcome, (kind, late)), f"{what} ended with {outcome!r}"
            assert outcome is not True, f"{what} is refused"
        records = await asyncio.gather(*(loaded(driver, keys[n % 5]) for n in range(AT_ONCE)))
        must_be(records, records[:5] * (AT_ONCE // 5), "concurrent loads are answered individually, too")
        for number, outcome in enumerate(outcomes):
            if isinstance(outcome, late):
                continue
            if isinstance(outcome, BaseException):
                raise AssertionError(f"this append is valid whatever the others are; {outcome}") from outcome
            place = records[number % 5].tail[outcome - 1 : outcome]
            must_be(place, (b"%d" % number,), "an append returns the place of its entry")
        for number, record in enumerate(records[:5]):
            ends = outcomes[number::5]
            done = 2 + sum(isinstance(end, int) for end in ends)
            unknown = sum(isinstance(end, OutcomeUnknown) for end in ends)
            there = len(record.tail)
            assert done <= there <= done + unknown, f"{there} entries are there, and {done} were acknowledged"
