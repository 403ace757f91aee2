"""Checks that a delete removes everything of its record, and nothing else."""

from __future__ import annotations

import asyncio
from typing import Final

from stm_backends.drivers.contract import ANY, KEEP, Driver, Key, Record
from stm_backends.drivers.erasing import Erasing
from stm_backends.drivers.wrapper import layer_with
from stm_backends.testing.driver_checks.samples import BESIDE, NAMES
from stm_backends.testing.driver_checks.steps import append_all, noise
from stm_backends.testing.workbench.check import Contract, check, not_asked
from stm_backends.testing.workbench.drivers import Bench, names_in
from stm_backends.testing.workbench.expectations import must_be
from stm_backends.testing.workbench.failures import Met

MANY: Final = 1_200
"""Number of entries in a record that a driver may not be able to remove in one step."""

AT_ONCE: Final = 40
"""Number of them appended concurrently."""


LARGE: Final = 12_500
"""Size of a body and an entry that a driver may store separately, if its limits allow it."""

SMALL: Final = 40
"""Number of small entries that follow, which it may store together."""

FINDS_NOTHING: Final = "`Datastore.stored` finds nothing of an existing record"


class Deleting(Contract):
    """Checks that a delete removes everything of its record, and nothing else."""

    @check("driver.delete")
    async def test_a_delete_removes_body_and_tail_and_returns_whether_it_did(self, bench: Bench) -> None:
        driver, key = await bench.driver(), bench.key()
        must_be(await driver.delete(key), False, "there is nothing to delete yet")
        await append_all(driver, key, b"a", b"b")
        await driver.replace(key, b"body", version="v2", expect="initial", ttl=None)
        must_be(await driver.delete(key), True, "the record was there")
        must_be(await driver.load(key), None, "the record was deleted")
        must_be(await driver.delete(key), False, "it was deleted before")

    @check("driver.delete")
    async def test_a_recreated_record_has_nothing_of_the_deleted_one(self, bench: Bench) -> None:
        driver, key = await bench.driver(), bench.key()
        await append_all(driver, key, b"a", b"b")
        await driver.replace(key, b"body", version="v2", expect="initial", drop=1, ttl=None)
        await driver.delete(key)
        length = await driver.append(key, b"c", initial_version="recreated", ttl=None)
        must_be(length, 1, "the tail went with the deleted record")
        must_be(await driver.load(key), Record("recreated", None, (b"c",)), "the record is a new one")

    @check("driver.delete")
    async def test_a_delete_with_a_version_removes_only_that_version(self, bench: Bench) -> None:
        driver, key = await bench.driver(), bench.key()
        must_be(await driver.delete(key, expect="v1"), False, "there is no record of any version")
        await driver.replace(key, b"body", version="v1", expect=ANY, ttl=None)
        must_be(await driver.delete(key, expect="v2"), False, "the record is of version v1")
        must_be(await driver.load(key), Record("v1", b"body", ()), "the delete was refused")
        must_be(await driver.delete(key, expect="v1"), True, "the record is of the version expected")
        must_be(await driver.load(key), None, "the record was deleted")

    @check("driver.delete")
    async def test_a_delete_leaves_what_other_records_hold(self, bench: Bench) -> None:
        """Parts are removed by a prefix that other keys share, and their names stay listed."""
        driver, scope = await bench.driver(), bench.scope()
        scopes = [scope, f"{scope}b", f"{scope}:a"]
        for other in scopes[1:]:
            bench.clean(other)
        keys = [Key(one, name) for one in scopes for name in BESIDE]
        for key in keys:
            await append_all(driver, key, b"one", repr(key).encode())
            await driver.replace(key, key.name.encode(), version="v2", expect="initial", drop=1, ttl=None)
        for gone in BESIDE[:2]:
            keys.remove(Key(scope, gone))
            must_be(await driver.delete(Key(scope, gone)), True, f"{gone!r} was not deleted before")
            found = await asyncio.gather(*map(driver.load, keys))
            held = [Record("v2", key.name.encode(), (repr(key).encode(),)) for key in keys]
            must_be(dict(zip(keys, found, strict=True)), dict(zip(keys, held, strict=True)), "they were left")

    @check("driver.delete")
    async def test_nothing_is_stored_of_a_record_that_was_deleted(self, bench: Bench) -> None:
        """A record is marked as deleted, or only its head is removed, and its entries stay forever."""
        if bench.datastore.stored is None:
            not_asked("needs `Datastore.stored`")
        driver, scope = await bench.driver(), bench.scope()
        erasing: Erasing | None = layer_with(driver, "finish_erasure")
        ways = ["with any version", "with its version", "after it was overwritten", "after it was made anew"]
        if layer_with(driver, "scan_expired") is not None:
            ways.append("after it has expired")
        for way in ways:
            key = Key(scope, f"deleted {way}")
            await _fill(driver, key)
            if way == "after it was made anew":
                await driver.delete(key)
                await _fill(driver, key)
            elif way == "after it was overwritten":
                await driver.replace(key, b"other", version="v3", expect=ANY, ttl=None)
            elif way == "after it has expired":
                await driver.append(key, b"last", initial_version="initial", ttl=bench.tick)
            if not await bench.datastore.stored(key):
                raise Met(FINDS_NOTHING, FINDS_NOTHING)
            if way == "after it has expired":
                await bench.pass_time(bench.tick * 1.1)
                must_be(await driver.delete(key), False, "an expired record is absent")
            elif way == "with its version":
                must_be(await driver.delete(key, expect="v2"), True, "it is of this version")
            else:
                must_be(await driver.delete(key), True, "the record was there")
            left = await bench.datastore.stored(key)
            if left and erasing is not None:
                await erasing.finish_erasure()
                left = await bench.datastore.stored(key)
            must_be([*left], [], f"the record was deleted {way}, so nothing of it may be stored")

    @check("driver.delete", slow=True)
    async def test_a_delete_touches_no_other_record(self, bench: Bench) -> None:
        driver, scope = await bench.driver(), bench.scope()
        for name in NAMES:
            await driver.append(Key(scope, name), name.encode(), initial_version="initial", ttl=None)
        left = set(NAMES)
        for name in NAMES:
            must_be(await driver.delete(Key(scope, name)), True, f"{name!r} was not deleted before")
            left.remove(name)
            must_be(set(await names_in(driver, scope)), left, f"only {name!r} was deleted since")

    @check("driver.delete", slow=True)
    async def test_a_record_of_many_entries_is_removed_as_a_whole(self, bench: Bench) -> None:
        """A large record is removed in steps; its last entries appear in a new record, or another is gone."""
        driver, other, scope = await bench.driver(), await bench.driver(), bench.scope()
        deleted, expired, kept = Key(scope, "deleted"), Key(scope, "expired"), Key(scope, "kept")
        await append_all(driver, kept, b"a")
        # Fewer if a record has no room for that many.
        fits = driver.traits.max_record // max(1, driver.traits.room(len(b"old"))) - 1
        rounds = min(MANY, fits) // AT_ONCE
        for key, ttl in ((deleted, None), (expired, bench.tick)):
            for _ in range(rounds):
                await asyncio.gather(
                    *(driver.append(key, b"old", initial_version="old", ttl=None) for _ in range(AT_ONCE))
                )
            length = await driver.append(key, b"old", initial_version="old", ttl=ttl)
            must_be(length, rounds * AT_ONCE + 1, "all are there")
        must_be(await driver.delete(deleted), True, "the record was there")
        await bench.pass_time(bench.tick * 1.1)
        must_be(await names_in(driver, scope), ["kept"], "one was deleted, one has expired, and one is left")
        for key in (deleted, expired):
            length = await driver.append(key, b"new", initial_version="new", ttl=None)
            must_be(length, 1, "the tail went with the old record")
        for number in range(AT_ONCE):
            await other.append(Key(scope, f"{number}"), b"", initial_version="initial", ttl=None)
        for key in (deleted, expired):
            must_be(await other.load(key), Record("new", None, (b"new",)), "the record is a new one")
        must_be(await other.load(kept), Record("initial", None, (b"a",)), "nothing was done to this record")


async def _fill(driver: Driver, key: Key) -> None:
    """Store a record of version `v2` with values that a driver may store separately: large and many small."""
    size = min(LARGE, driver.traits.max_entry // 4)
    await append_all(driver, key, b"dropped", noise(size), *(b"small %d" % number for number in range(SMALL)))
    await driver.replace(key, noise(size)[::-1], version="v2", expect="initial", drop=1, ttl=KEEP)
    await append_all(driver, key, b"one more")
