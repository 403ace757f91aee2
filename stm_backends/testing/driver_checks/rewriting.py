"""Checks of rewriting the oldest entries of a record."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Coroutine, Iterable
from typing import Any, Final

from stm_backends.drivers.contract import KEEP, Driver, Key, Record, new_version
from stm_backends.errors import TooLarge
from stm_backends.testing.driver_checks.limits import LARGEST_QUICK_RECORD, LARGEST_RECORD, NOT_STATED
from stm_backends.testing.driver_checks.steps import (
    append_all,
    assert_complete_and_in_order,
    cancelled_after,
    expired,
    full_of_largest,
    loaded,
    noise,
    take_steps,
)
from stm_backends.testing.workbench.check import Contract, check, not_asked, would_write
from stm_backends.testing.workbench.drivers import Bench
from stm_backends.testing.workbench.expectations import must_be, must_raise
from stm_backends.testing.workbench.processes import fold, ledger

_SIZES: Final = (0, 1, 100, 3_000, 10, 9_000, 2_000, 5_000)
"""Small and large entries, which some drivers store differently."""

_MOST: Final = 300
"""Number of entries that a check rewrites at once, if the driver allows it."""


class Rewriting(Contract):
    """Checks of rewriting the oldest entries of a record."""

    @check("driver.rewrite")
    async def test_a_rewrite_replaces_exactly_the_oldest_entries(self, bench: Bench) -> None:
        """The newest entries are rewritten, or the other entries are removed."""
        driver, key = await bench.driver(), bench.key()
        await append_all(driver, key, b"a", b"b", b"c")
        done = await rewrite(driver, key, "initial", b"A", b"BB", version="v2")
        must_be(done, True, "the record is of the version expected")
        must_be(await driver.load(key), Record("v2", b"body", (b"A", b"BB", b"c")), "two were rewritten")
        length = await driver.append(key, b"d", initial_version="initial", ttl=None)
        must_be(length, 4, "a rewrite does not change the number of entries")
        done = await driver.replace(key, b"A BB", version="v3", expect="v2", drop=2, ttl=None)
        must_be(done, True, "rewritten entries can be folded")
        must_be(await driver.load(key), Record("v3", b"A BB", (b"c", b"d")), "the two oldest were folded")
        done = await rewrite(driver, key, "v3", b"C", b"D", version="v4")
        must_be(done, True, "all entries can be rewritten, even after a fold")
        must_be(await driver.load(key), Record("v4", b"body", (b"C", b"D")), "both were rewritten")

    @check("driver.rewrite")
    async def test_a_rewrite_keeps_entries_appended_since_it_read(self, bench: Bench) -> None:
        """The whole tail is written back, or the rewritten entries move to the end."""
        one, two, key = await bench.driver(), await bench.driver(), bench.key()
        await append_all(one, key, b"a", b"b")
        read = await loaded(one, key)
        await two.append(key, b"c", initial_version="initial", ttl=None)
        must_be(await rewrite(one, key, read.version, b"A", b"B"), True, "an append leaves the version")
        must_be((await loaded(two, key)).tail, (b"A", b"B", b"c"), "only the entries read were rewritten")

    @check("driver.rewrite")
    async def test_a_rewrite_over_another_version_changes_nothing(self, bench: Bench) -> None:
        """The version is not compared."""
        driver, key = await bench.driver(), bench.key()
        must_be(await rewrite(driver, key, "initial", b"A"), False, "there is no record of any version")
        must_be(await driver.load(key), None, "the write was refused")
        await append_all(driver, key, b"a", b"b")
        must_be(await rewrite(driver, key, "other", b"A"), False, "the record is of another version")
        must_be(await driver.load(key), Record("initial", None, (b"a", b"b")), "the write was refused")

    @check("driver.rewrite")
    async def test_a_rewrite_longer_than_the_tail_changes_nothing(self, bench: Bench) -> None:
        """If there are too few entries, the rewritten ones are appended."""
        driver, key = await bench.driver(), bench.key()
        await append_all(driver, key, b"a", b"b")
        done = await rewrite(driver, key, "initial", b"A", b"B", b"C")
        must_be(done, False, "the tail has two entries, and three were to be rewritten")
        must_be(await driver.load(key), Record("initial", None, (b"a", b"b")), "the write was refused")

    @check("driver.rewrite")
    async def test_rewritten_entries_may_be_of_any_size(self, bench: Bench) -> None:
        """Entries are rewritten in place, and a longer one does not fit there."""
        driver, key = await bench.driver(), bench.key()
        sizes = [min(size, driver.traits.max_entry) for size in _SIZES]
        tail = [noise(size) for size in sizes]
        await append_all(driver, key, *tail)
        for turn, version in enumerate(["initial", "v1", "v2", "v3"]):
            count = len(tail) - 2 * turn
            # A different start for each size, so that each entry changes its size, and its bytes if possible.
            tail[:count] = [noise(sizes[(at + turn + 1) % len(sizes)])[::-1] for at in range(count)]
            done = await rewrite(driver, key, version, *tail[:count], version=f"v{turn + 1}")
            must_be(done, True, "the record is of the version expected")
            must_be((await loaded(driver, key)).tail, tuple(tail), f"the {count} oldest were rewritten")
        length = await driver.append(key, b"new", initial_version="initial", ttl=None)
        must_be(length, len(tail) + 1, "a rewrite does not change the number of entries")
        done = await driver.replace(key, b"", version="last", expect="v4", drop=3, ttl=None)
        must_be(done, True, "rewritten entries can be folded")
        must_be((await loaded(driver, key)).tail, (*tail[3:], b"new"), "the three oldest were folded")

    @check("driver.rewrite", slow=True)
    async def test_many_entries_can_be_rewritten_at_once(self, bench: Bench) -> None:
        """`max_drop` is larger than one statement of the datastore allows."""
        driver, key = await bench.driver(), bench.key()
        count = min(_MOST, driver.traits.max_drop)
        await append_all(driver, key, *[b"%d" % number for number in range(count)], b"last")
        entries = [b"rewritten %d" % number for number in range(count)]
        must_be(await rewrite(driver, key, "initial", *entries), True, "`max_drop` allows that many")
        must_be((await loaded(driver, key)).tail, (*entries, b"last"), "all of them were rewritten")

    @check("driver.resent")
    async def test_a_retried_rewrite_returns_true_and_is_applied_once(self, bench: Bench) -> None:
        driver, key = await bench.driver(), bench.key()
        await append_all(driver, key, b"a", b"b")
        for entry in (b"A", b"other"):
            done = await rewrite(driver, key, "initial", entry, version="v2")
            must_be(done, True, "the record carries the version of this write")
        must_be(await driver.load(key), Record("v2", b"body", (b"A", b"b")), "the rewrite is done once")

    @check("driver.expiry")
    async def test_an_expired_record_is_absent_in_a_rewrite(self, bench: Bench) -> None:
        driver, key = await bench.driver(), await expired(bench)
        must_be(await rewrite(driver, key, "old", b"new"), False, "an expired record has no version")
        must_be(await driver.load(key), None, "the record has expired, and the write was refused")

    @check("driver.lifetime")
    async def test_a_rewrite_keeps_or_resets_the_time_to_live(self, bench: Bench) -> None:
        driver, kept, shorter = await bench.driver(), bench.key(), bench.key()
        for key, before, ttl in ((kept, bench.tick, KEEP), (shorter, None, bench.tick)):
            await driver.append(key, b"a", initial_version="initial", ttl=before)
            done = await driver.replace(key, b"", version="v", expect="initial", rewrite=(b"A",), ttl=ttl)
            must_be(done, True, "the record is of the version expected")
        await bench.pass_time(bench.tick * 1.1)
        must_be(await driver.load(kept), None, "KEEP does not change when the record expires")
        must_be(await driver.load(shorter), None, "the time to live that the rewrite set has passed")

    @check("driver.limits")
    async def test_a_rewritten_entry_that_is_too_large_is_refused(self, bench: Bench) -> None:
        driver, key = await bench.driver(), bench.key()
        await append_all(driver, key, b"a", b"b")
        with must_raise(TooLarge, "the second entry is one byte longer than `max_entry`") as caught:
            await rewrite(driver, key, "initial", b"A", noise(driver.traits.max_entry + 1))
        must_be(caught.value.what, "entry", "the entry alone exceeds its limit")
        must_be(await driver.load(key), Record("initial", None, (b"a", b"b")), "nothing was written")

    @check("driver.limits", slow=True)
    async def test_a_rewrite_that_makes_a_record_too_large_is_refused(self, bench: Bench) -> None:
        """The bytes of the rewritten entries are not counted, or those of the replaced ones still are."""
        driver, key = await bench.driver(), bench.key()
        count = full_of_largest(driver.traits) or not_asked(NOT_STATED)
        if (size := count * driver.traits.max_entry) > LARGEST_RECORD:
            not_asked(would_write(size))
        entry = noise(driver.traits.max_entry)
        # Room for one large value: the body or the rewritten entry, but not both.
        large = [entry] * (count - 1)
        await append_all(driver, key, b"0", *large)
        before = await loaded(driver, key)
        with must_raise(TooLarge, "the record would hold more than `max_record` bytes") as caught:
            await rewrite(driver, key, "initial", entry, body=entry)
        must_be(caught.value.what, "record", "body and entry would each fit")
        must_be(await driver.load(key), before, "a refused rewrite changes nothing")
        changed = [b"00", *[one[::-1] for one in large[:1]]]
        must_be(await rewrite(driver, key, "initial", *changed), True, "the record has room")
        tail = (*changed, *large[1:])
        must_be(
            (await loaded(driver, key)).tail, tail, "the rewritten entries take the place of the old ones"
        )
        await append_all(driver, key, b"more")

    @check("driver.limits")
    async def test_a_full_record_can_be_rewritten_at_its_size(self, bench: Bench) -> None:
        """A record may hold more than one request to the datastore, so this rewrite always fails."""
        driver, key = await bench.driver(), bench.key()
        traits = driver.traits
        count = full_of_largest(traits) or not_asked(NOT_STATED)
        largest = LARGEST_QUICK_RECORD if bench.quick else LARGEST_RECORD
        if (size := count * traits.max_entry) > largest:
            not_asked(would_write(size))
        # One entry leaves room for the body, which takes an overhead like any value.
        sizes = [max(0, traits.max_entry - traits.overhead - len(b"body")), *[traits.max_entry] * (count - 1)]
        await append_all(driver, key, *map(noise, sizes))
        changed = [noise(size)[::-1] for size in sizes[: traits.max_drop]]
        must_be(await rewrite(driver, key, "initial", *changed), True, "no value is larger than before")
        tail = (*changed, *map(noise, sizes[len(changed) :]))
        must_be(await driver.load(key), Record("new", b"body", tail), "each entry was rewritten at its size")

    @check("driver.races")
    async def test_rewrites_never_lose_an_entry_and_are_never_seen_in_part(self, bench: Bench) -> None:
        """The entries are rewritten one by one, or in a different step from the version."""
        one, two, key = await bench.driver(), await bench.driver(), bench.key()
        acknowledged: set[str] = set()
        rewritten: dict[str, list[bytes]] = {}
        numbers = itertools.count()
        writing = True

        async def write(driver: Driver, label: str) -> None:
            for number in range(20):
                entry = f"{label}:{number}"
                await driver.append(key, entry.encode(), initial_version=new_version(), ttl=None)
                acknowledged.add(entry)
                await take_steps(number % 4)

        async def keep_rewriting(driver: Driver) -> None:
            for turn in itertools.count():
                if not writing:
                    return
                record = await driver.load(key)
                if record is not None and record.tail:
                    version, number = new_version(), next(numbers)
                    count = min(1 + turn % 7, len(record.tail))
                    # Not the version: messages may name versions, but not entries.
                    entries = [_name(entry) + b"/%d" % number for entry in record.tail[:count]]
                    rewritten[version] = entries
                    # The body, which the folds write, is kept as it was read.
                    body = record.body or b""
                    await rewrite(driver, key, record.version, *entries, version=version, body=body)
                await take_steps(1 + turn % 3)

        async def keep_folding(driver: Driver) -> None:
            for turn in itertools.count():
                if not writing:
                    return
                await fold(driver, key, 2)
                await take_steps(5 + turn % 3)

        async def keep_looking(driver: Driver) -> None:
            for turn in itertools.count():
                if not writing:
                    return
                expected = set(acknowledged)
                record = await driver.load(key)
                if record is not None:
                    tail = list(record.tail)
                    entries = rewritten.get(record.version, [])
                    must_be(tail[: len(entries)], entries, "version and entries are written at the same time")
                    names = _names([*(record.body or b"").split(), *tail])
                    assert len(names) == len(set(names)), "an entry must not be there twice"
                    assert expected <= set(names), "an entry that was acknowledged must be there"
                await take_steps(1 + turn % 5)

        async with asyncio.TaskGroup() as tasks:
            for driver in (one, two):
                tasks.create_task(keep_rewriting(driver))
                tasks.create_task(keep_looking(driver))
            tasks.create_task(keep_folding(one))
            await asyncio.gather(write(one, "a"), write(two, "b"))
            writing = False
        names = _names(entry.encode() for entry in await ledger(one, key))
        assert_complete_and_in_order(names, {"a": 20, "b": 20})

    @check("driver.races")
    async def test_of_a_rewrite_a_fold_and_a_delete_exactly_one_wins(self, bench: Bench) -> None:
        one, two, key = await bench.driver(), await bench.driver(), bench.key()
        for round_ in range(6):
            await append_all(one, key, b"a", b"b", initial_version=f"initial{round_}")
            version = (await loaded(one, key)).version
            rivals: list[Coroutine[Any, Any, bool]] = [
                rewrite(one, key, version, b"A", version=f"{round_}-rewrite"),
                two.replace(key, b"a", version=f"{round_}-fold", expect=version, drop=1, ttl=KEEP),
                two.delete(key, expect=version),
            ]
            turned = rivals[round_ % 3 :] + rivals[: round_ % 3]
            answers = await asyncio.gather(*turned)
            must_be(sum(answers), 1, "all writers expected the same version, so only one can win")
            winner = rivals.index(turned[answers.index(True)])
            left = [
                Record(f"{round_}-rewrite", b"body", (b"A", b"b")),
                Record(f"{round_}-fold", b"a", (b"b",)),
                None,
            ]
            must_be(await two.load(key), left[winner], "this writer received True")
            await one.delete(key)

    @check("driver.cancellation")
    async def test_a_cancelled_rewrite_is_applied_completely_or_not_at_all(self, bench: Bench) -> None:
        driver, key = await bench.driver(), bench.key()
        for steps in range(24):
            await append_all(driver, key, b"a", b"b")
            done = await cancelled_after(steps, rewrite(driver, key, "initial", b"A", version="v2"))
            await driver.append(key, b"c", initial_version="initial", ttl=None)
            after = Record("v2", b"body", (b"A", b"b", b"c"))
            before = Record("initial", None, (b"a", b"b", b"c"))
            found = await driver.load(key)
            if done:
                must_be(found, after, "the rewrite was acknowledged before it could be cancelled")
            assert found in (before, after), f"a rewrite cancelled {steps} steps in must be done or not"
            await driver.delete(key)


async def rewrite(
    driver: Driver, key: Key, expect: str, *entries: bytes, version: str = "new", body: bytes = b"body"
) -> bool:
    """Rewrite the oldest entries of a record with a version, and return whether it was done."""
    return await driver.replace(key, body, version=version, expect=expect, rewrite=entries, ttl=KEEP)


def _names(entries: Iterable[bytes]) -> list[str]:
    return [_name(entry).decode() for entry in entries]


def _name(entry: bytes) -> bytes:
    """Return an entry as it was appended, without the additions of a rewrite."""
    return entry.partition(b"/")[0]
