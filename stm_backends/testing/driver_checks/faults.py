"""Checks that must access the datastore directly, bypassing the driver, or cut it off."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, Final

from stm_backends.drivers.contract import ABSENT, ANY, KEEP, AbsentType, Driver, Key, Record
from stm_backends.drivers.wrapper import with_last
from stm_backends.errors import Corrupt, OutcomeUnknown, StorageError, Unavailable
from stm_backends.testing.driver_checks.steps import (
    append_all,
    assert_located,
    behind,
    each_fails_in_time,
    loaded,
    noise,
    recovered,
)
from stm_backends.testing.workbench.check import Contract, check, not_asked
from stm_backends.testing.workbench.drivers import Bench, names_in, no_network
from stm_backends.testing.workbench.expectations import must_be, must_raise

LOOKS: Final = 8
"""Number of times each driver reads the latest write: its reads may go to several replicas in turn."""

SIZES: Final = (5, 3_000, 9_000, 20, 700)
"""Sizes of the entries in a record that loses a part; some drivers store large ones elsewhere."""


class Faults(Contract):
    """Checks that must access the datastore directly, bypassing the driver, or cut it off."""

    @check("driver.outage")
    async def test_during_an_outage_every_operation_raises_a_typed_error_in_time(self, bench: Bench) -> None:
        """An `except` clause turns client errors into an empty answer, or there is no deadline."""
        driver, outage = await _cut_off(bench)
        key = bench.key()
        await append_all(await bench.driver(), key, b"a")
        async with outage():
            for fails in each_fails_in_time(driver, key):
                await fails()

    @check("driver.outage")
    async def test_after_an_outage_the_same_driver_works_and_nothing_is_lost(self, bench: Bench) -> None:
        """A broken connection is kept forever, or the client waits too long before it reconnects."""
        driver, outage = await _cut_off(bench)
        key = bench.key()
        await append_all(await bench.driver(), key, b"a")
        async with outage():
            with must_raise(StorageError, "the datastore cannot be reached"):
                await driver.load(key)
        found = await recovered(lambda: driver.load(key), driver.traits)
        must_be(found, Record("initial", None, (b"a",)), "the outage is over and nothing is lost")
        fold = functools.partial(driver.replace, key, b"a", version="v2", expect="initial", drop=1, ttl=None)
        must_be(await recovered(fold, driver.traits), True, "the outage is over, and no one else wrote")
        found = await recovered(lambda: driver.load(key), driver.traits)
        must_be(found, Record("v2", b"a", ()), "the fold was acknowledged")

    @check("driver.outage")
    async def test_an_error_of_the_server_is_never_an_empty_answer(self, bench: Bench) -> None:
        """Each error of an API counts as "not found": also one that says that no leader is elected."""
        if bench.datastore.refusal is None:
            not_asked("needs `Datastore.refusal`")
        driver, key = await bench.driver(), bench.key()
        await append_all(driver, key, b"a")
        async with bench.datastore.refusal():
            for fails in each_fails_in_time(driver, key, "the server answers each {} with an error"):
                await fails()
        found = await recovered(lambda: driver.load(key), driver.traits)
        must_be(found, Record("initial", None, (b"a",)), "the server has refused everything")

    @check("driver.corruption")
    async def test_a_damaged_record_raises_corrupt_and_reading_it_changes_nothing(self, bench: Bench) -> None:
        """Missing parts are treated as empty, or data that does not parse is removed."""
        if bench.datastore.damage is None:
            not_asked("needs `Datastore.damage`")
        driver, key, sound = await bench.driver(), bench.key(), bench.key()
        for each in (key, sound):
            await append_all(driver, each, b"a", b"b", b"c")
            await driver.replace(each, b"a", version="v2", expect="initial", drop=1, ttl=KEEP)
        await bench.damage(key)
        for _ in range(2):
            with must_raise(
                Corrupt, "the record's bytes are damaged, and a load does not change them"
            ) as caught:
                await driver.load(key)
            assert_located(caught.value, driver, "load", key)
        must_be((await loaded(driver, sound)).tail, (b"b", b"c"), "only another record was damaged")
        must_be(await driver.delete(key), True, "a record that cannot be read can be deleted")

    @check("driver.corruption")
    async def test_no_write_makes_a_damaged_record_look_healthy(self, bench: Bench) -> None:
        """A write adds to the remains and recounts them, or overwrites them without looking."""
        if bench.datastore.damage is None:
            not_asked("needs `Datastore.damage`")
        driver, scope = await bench.driver(), bench.scope()

        def replace(key: Key, expect: str | AbsentType, **how: Any) -> Awaitable[bool]:
            return driver.replace(key, b"body", version="v3", expect=expect, ttl=KEEP, **how)

        writes: dict[str, Callable[[Key], Awaitable[object]]] = {
            "an append": lambda key: driver.append(key, b"d", initial_version="initial", ttl=None),
            "a replace of the body": lambda key: replace(key, "v2"),
            "a fold of one entry": lambda key: replace(key, "v2", drop=1),
            "a fold of all entries": lambda key: replace(key, "v2", drop=3),
            "a rewrite of one entry": lambda key: replace(key, "v2", rewrite=(b"B",)),
            "a rewrite of all entries": lambda key: replace(key, "v2", rewrite=(b"B", b"C", b"D")),
            "a creation": lambda key: replace(key, ABSENT),
            "a retried write": lambda key: replace(key, "v3"),
        }
        for what, write in writes.items():
            key = Key(scope, what)
            await append_all(driver, key, b"a", b"b", b"c", b"d")
            await driver.replace(key, b"a", version="v2", expect="initial", drop=1, ttl=KEEP)
            await bench.damage(key)
            with contextlib.suppress(Corrupt):
                await write(key)
            with must_raise(Corrupt, f"the record is damaged, and {what} does not repair it"):
                await driver.load(key)
            must_be(await driver.delete(key), True, "a record that cannot be read can be deleted")
            must_be(await driver.load(key), None, "the record was deleted")
        key = Key(scope, "a replace of any record")
        await append_all(driver, key, b"a", b"b")
        await bench.damage(key)
        try:
            done = await driver.replace(key, b"whole", version="v3", expect=ANY, ttl=None)
        except Corrupt:
            with must_raise(Corrupt, "the record is damaged, and the replace of ANY record was refused"):
                await driver.load(key)
        else:
            must_be(done, True, "a replace of ANY record has no condition")
            whole = Record("v3", b"whole", ())
            must_be(
                await driver.load(key), whole, "the whole record was overwritten, so nothing is left of it"
            )

    @check("driver.corruption")
    async def test_a_record_of_which_a_part_was_removed_raises_corrupt(self, bench: Bench) -> None:
        """Reads skip a missing part, because the number of entries and bytes is not stored."""
        if bench.datastore.cut is None:
            not_asked("needs `Datastore.cut`")
        writer, scope = await bench.driver(), bench.scope()
        tail = [noise(min(size, writer.traits.max_entry)) for size in SIZES]

        def replace(driver: Driver, key: Key, **how: Any) -> Awaitable[bool]:
            return driver.replace(key, b"new", version="v3", expect="v2", ttl=KEEP, **how)

        calls: dict[str, Callable[[Driver, Key], Awaitable[object]]] = {
            "a load": lambda driver, key: driver.load(key),
            "an append": lambda driver, key: driver.append(key, b"d", initial_version="initial", ttl=None),
            "a fold": lambda driver, key: replace(driver, key, drop=1),
            "a rewrite": lambda driver, key: replace(driver, key, rewrite=(b"R",)),
        }
        sound = Key(scope, "sound")
        for key in (sound, *(Key(scope, what) for what in calls)):
            await append_all(writer, key, b"a", *tail)
            await writer.replace(key, b"body", version="v2", expect="initial", drop=1, ttl=KEEP)
        for what, call in calls.items():
            key = Key(scope, what)
            await bench.cut(key)
            # The writer may remember a part that never changes.
            driver = await bench.driver()
            with contextlib.suppress(Corrupt):
                await call(driver, key)
            with must_raise(Corrupt, f"a part is missing, and {what} does not bring it back") as caught:
                await driver.load(key)
            assert_located(caught.value, driver, "load", key)
            must_be(await driver.delete(key), True, "a record that cannot be read can be deleted")
            must_be(await driver.load(key), None, "the record was deleted")
        whole = Record("v2", b"body", tuple(tail))
        must_be(await writer.load(sound), whole, "only other records have lost a part")

    @check("driver.load")
    async def test_every_instance_reads_what_was_written_while_replicas_lag(self, bench: Bench) -> None:
        """Reads go to a replica, which may not have the latest acknowledged write."""
        if bench.datastore.lag is None:
            not_asked("needs `Datastore.lag`")
        one, two, key = await bench.driver(), await bench.driver(), bench.key()
        gone = Key(key.scope, "gone")
        for each in (key, gone):
            await append_all(one, each, b"a")
        async with bench.datastore.lag():
            try:
                await append_all(one, key, b"b")
                await one.delete(gone)
            except (Unavailable, OutcomeUnknown):
                not_asked("needs a `Datastore.lag` in which writes are acknowledged")
            for driver in (one, two, await bench.driver()):
                for _ in range(LOOKS):
                    record = Record("initial", None, (b"a", b"b"))
                    must_be(await driver.load(key), record, "the append was acknowledged")
                    must_be(
                        await with_last(driver).load(key, last=1), record.newest(1), "it was acknowledged"
                    )
                    must_be(await driver.load(gone), None, "the delete was acknowledged")
                    must_be(await names_in(driver, key.scope), [key.name], "the other one was deleted")

    @check("driver.load")
    async def test_acknowledged_writes_are_in_the_datastore_not_in_the_driver(self, bench: Bench) -> None:
        """Writes are batched or answered from a cache."""
        if bench.datastore.peek is None:
            not_asked("needs `Datastore.peek`")
        driver, key = await bench.driver(), bench.key()
        await append_all(driver, key, b"a", b"b")
        stored = Record("initial", None, (b"a", b"b"))
        must_be(await bench.datastore.peek(key), stored, "the appends were acknowledged")
        must_be(await driver.load(key), stored, "the appends were acknowledged")
        await driver.replace(key, b"a", version="v2", expect="initial", drop=1, ttl=KEEP)
        stored = Record("v2", b"a", (b"b",))
        must_be(await bench.datastore.peek(key), stored, "the fold was acknowledged")
        must_be(await driver.load(key), stored, "the fold was acknowledged")
        await driver.delete(key)
        must_be(await bench.datastore.peek(key), None, "the delete was acknowledged")

    @check("driver.client")
    async def test_a_client_passed_in_stays_open(self, bench: Bench) -> None:
        """`close` closes the client even if the caller made it."""
        if bench.datastore.handed_in is None:
            not_asked("needs `Datastore.handed_in`")
        handed_in = await bench.datastore.handed_in()
        try:
            driver, key = bench.adopt(handed_in.driver), bench.key()
            await append_all(driver, key, b"a")
            await driver.close()
            must_be(await handed_in.is_open(), True, "only the driver was closed, not its client")
            with must_raise(Unavailable, "the driver is closed, and only its client is open"):
                await driver.load(key)
        finally:
            await handed_in.close()

    @check("driver.client")
    async def test_a_closed_driver_leaves_nothing_on_a_client_passed_in(self, bench: Bench) -> None:
        """A subscription, a listener or a session stays on the client, and those of each driver add up."""
        if bench.datastore.handed_in is None:
            not_asked("needs `Datastore.handed_in`")
        handed_in = await bench.datastore.handed_in()
        try:
            driver, key = bench.adopt(handed_in.driver), bench.key()
            if handed_in.kept is None:
                not_asked("needs `HandedIn.kept`")
            await append_all(driver, key, b"a")
            await driver.load(key)
            await driver.close()
            kept = [type(one).__name__ for one in await handed_in.kept()]
            must_be(kept, [], "the driver is closed, and its client stays with the caller")
        finally:
            await handed_in.close()

    @check("driver.round-trips")
    async def test_one_operation_is_one_round_trip(self, bench: Bench) -> None:
        """The record is read first, to decide in Python what to write."""
        count = bench.datastore.round_trips
        if count is None:
            not_asked("needs `Datastore.round_trips`")
        driver, key, first = await bench.driver(), bench.key(), bench.key()
        # A driver may prepare a statement on first use.
        await _count_requests(driver, first, count)
        trips = await _count_requests(driver, key, count)
        must_be(trips, dict.fromkeys(trips, 1), "an operation is one request")


async def _cut_off(bench: Bench) -> tuple[Driver, Callable[[], AbstractAsyncContextManager[object]]]:
    """Return a driver and a function that cuts it off from its datastore; otherwise skip the check."""
    if bench.datastore.outage is not None:
        return await bench.driver(), bench.datastore.outage
    if bench.datastore.through is None:
        not_asked(f"needs `Datastore.outage`, or {no_network(bench.datastore).removeprefix('needs ')}")
    proxy, driver = await behind(bench)
    return driver, proxy.cut


async def _count_requests(driver: Driver, key: Key, count: Callable[[], int]) -> dict[str, int]:
    """Return the number of requests that each operation on a new record takes."""
    await append_all(driver, key, b"a")
    operations: dict[str, Callable[[], Awaitable[object]]] = {
        "append": lambda: driver.append(key, b"b", initial_version="initial", ttl=60),
        "load": lambda: driver.load(key),
        "load of the newest entry": lambda: with_last(driver).load(key, last=1),
        "replace": lambda: driver.replace(key, b"a", version="v2", expect="initial", drop=1, ttl=KEEP),
        "rewrite": lambda: driver.replace(key, b"b", version="v3", expect="v2", rewrite=(b"B",), ttl=KEEP),
        "a lost replace": lambda: driver.replace(key, b"a", version="v4", expect="no", drop=1, ttl=KEEP),
        "save": lambda: driver.replace(key, b"a", version="v5", expect=ANY, ttl=None),
        "scan": lambda: driver.scan(key.scope, limit=10),
        "delete": lambda: driver.delete(key),
    }
    trips: dict[str, int] = {}
    for name, operation in operations.items():
        before = count()
        await operation()
        trips[name] = count() - before
    return trips
