"""Checks of expiry and of times to live."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from typing import Final

from stm_backends.drivers.contract import ABSENT, ANY, KEEP, Driver, Key, Record, new_version
from stm_backends.testing.driver_checks.steps import append_all, expired, loaded
from stm_backends.testing.workbench.check import Contract, check, not_asked
from stm_backends.testing.workbench.drivers import Bench, names_in
from stm_backends.testing.workbench.expectations import must_be

COARSE_S: Final = 3.0
"""A time to live that a datastore distinguishes from a shorter one even if it counts whole seconds."""


class Expiry(Contract):
    """Checks of expiry and of times to live."""

    @check("driver.expiry")
    async def test_an_expired_record_is_absent_in_load(self, bench: Bench) -> None:
        driver, key = await bench.driver(), await expired(bench)
        must_be(await driver.load(key), None, "the record has expired")

    @check("driver.expiry")
    async def test_an_expired_record_is_absent_in_append(self, bench: Bench) -> None:
        driver, key = await bench.driver(), await expired(bench)
        length = await driver.append(key, b"new", initial_version="recreated", ttl=None)
        must_be(length, 1, "the tail ended with the expired record")
        must_be(await driver.load(key), Record("recreated", None, (b"new",)), "the record is a new one")

    @check("driver.expiry")
    async def test_an_expired_record_is_absent_in_replace_absent(self, bench: Bench) -> None:
        driver, key = await bench.driver(), await expired(bench)
        done = await driver.replace(key, b"new", version="recreated", expect=ABSENT, ttl=None)
        must_be(done, True, "an expired record is absent")
        must_be(await driver.load(key), Record("recreated", b"new", ()), "the record is a new one")

    @check("driver.expiry", slow=True)
    async def test_an_expired_record_is_absent_in_replace_any(self, bench: Bench) -> None:
        driver, key = await bench.driver(), await expired(bench)
        done = await driver.replace(key, b"new", version="old", expect=ANY, ttl=KEEP)
        must_be(done, True, "ANY is never refused")
        record = Record("old", b"new", ())
        must_be(
            await driver.load(key),
            record,
            "an expired record has neither a version nor a time to live to keep",
        )

    @check("driver.expiry", slow=True)
    async def test_an_expired_record_is_absent_in_replace_with_its_version(self, bench: Bench) -> None:
        driver, key = await bench.driver(), await expired(bench)
        for version in ("recreated", "old"):
            done = await driver.replace(key, b"new", version=version, expect="old", ttl=None)
            must_be(done, False, "an expired record has no version")
        must_be(await driver.load(key), None, "the record has expired, and both writes were refused")

    @check("driver.expiry", slow=True)
    async def test_an_expired_record_is_absent_in_delete(self, bench: Bench) -> None:
        driver, key = await bench.driver(), await expired(bench)
        must_be(await driver.delete(key, expect="old"), False, "an expired record has no version")
        # Another record: the delete may have removed the remains of the first.
        must_be(await driver.delete(await expired(bench)), False, "an expired record is absent")

    @check("driver.expiry")
    async def test_an_expired_record_is_absent_in_scan(self, bench: Bench) -> None:
        driver, key = await bench.driver(), await expired(bench)
        await driver.append(Key(key.scope, "young"), b"a", initial_version="initial", ttl=None)
        must_be(await names_in(driver, key.scope), ["young"], "the other record has expired")

    @check("driver.expiry")
    async def test_all_operations_agree_on_the_moment_of_expiry(self, bench: Bench) -> None:
        """One operation tests whether the end has passed, and another whether it is reached."""
        if bench.datastore.waits:
            not_asked("needs a `Datastore.pass_time` that stops the clock in between")
        driver, scope = await bench.driver(), bench.scope()
        keys = [Key(scope, f"record {number}") for number in range(5)]
        for key in keys:
            await driver.append(key, b"a", initial_version="old", ttl=bench.tick)
        await bench.pass_time(bench.tick)
        there = await driver.load(keys[0]) is not None
        found = {
            "a scan": bool(await names_in(driver, scope)),
            "an append": await driver.append(keys[1], b"b", initial_version="new", ttl=None) == 2,
            "a creation": not await driver.replace(keys[2], b"", version="new", expect=ABSENT, ttl=None),
            "a fold": await driver.replace(keys[3], b"", version="new", expect="old", drop=1, ttl=None),
            "a delete": await driver.delete(keys[4]),
        }
        must_be(found, dict.fromkeys(found, there), "a load at this moment has said whether records exist")

    @check("driver.expiry")
    async def test_a_record_exists_until_it_expires(self, bench: Bench) -> None:
        driver, key = await bench.driver(), bench.key()
        await driver.append(key, b"a", initial_version="initial", ttl=bench.tick * 4)
        await bench.pass_time(bench.tick)
        must_be((await loaded(driver, key)).tail, (b"a",), "only a quarter of its time to live has passed")

    @check("driver.expiry")
    async def test_a_new_record_is_not_mistaken_for_the_expired_one(self, bench: Bench) -> None:
        driver, key = await bench.driver(), bench.key()
        await driver.append(key, b"old", initial_version=new_version(), ttl=bench.tick)
        read = await loaded(driver, key)
        await bench.pass_time(bench.tick * 1.1)
        await driver.append(key, b"new", initial_version=new_version(), ttl=None)
        late = await driver.replace(key, b"old", version=new_version(), expect=read.version, drop=1, ttl=None)
        must_be(late, False, "the expected record has expired, and this is a new one")
        record = await loaded(driver, key)
        must_be((record.body, record.tail), (None, (b"new",)), "the late write was refused")

    @check("driver.expiry", slow=True)
    async def test_removing_an_expired_record_leaves_its_successor(self, bench: Bench) -> None:
        """A datastore may remove expired records late, and piece by piece."""
        driver, key = await bench.driver(), bench.key()
        for number in range(40):
            await driver.append(key, b"old %d" % number, initial_version="old", ttl=bench.tick)
        await bench.pass_time(bench.tick * 1.1)
        await driver.append(key, b"new", initial_version="recreated", ttl=None)
        # Most drivers remove expired records during later writes.
        for number in range(40):
            await driver.append(Key(key.scope, f"other {number}"), b"a", initial_version="initial", ttl=None)
        must_be(
            await loaded(driver, key), Record("recreated", None, (b"new",)), "only the old one is removed"
        )
        must_be(len(await names_in(driver, key.scope)), 41, "no other record has expired")

    @check("driver.lifetime", slow=True)
    async def test_an_append_resets_the_time_to_live(self, bench: Bench) -> None:
        driver, key = await bench.driver(), bench.key()
        await driver.append(key, b"a", initial_version="initial", ttl=bench.tick)
        await driver.append(key, b"b", initial_version="initial", ttl=bench.tick * 6)
        await bench.pass_time(bench.tick * 1.1)
        must_be((await loaded(driver, key)).tail, (b"a", b"b"), "the second append set a longer time to live")
        await driver.append(key, b"c", initial_version="initial", ttl=bench.tick)
        await bench.pass_time(bench.tick * 1.1)
        must_be(await driver.load(key), None, "the third append set a shorter time to live")

    @check("driver.lifetime")
    async def test_an_append_without_a_time_to_live_makes_the_record_permanent(self, bench: Bench) -> None:
        driver, key = await bench.driver(), bench.key()
        await driver.append(key, b"a", initial_version="initial", ttl=bench.tick)
        await driver.append(key, b"b", initial_version="initial", ttl=None)
        await bench.pass_time(bench.tick * 1.1)
        must_be(
            (await loaded(driver, key)).tail,
            (b"a", b"b"),
            "the last append set ttl=None, which never expires",
        )

    @check("driver.lifetime")
    async def test_a_replace_without_a_time_to_live_makes_the_record_permanent(self, bench: Bench) -> None:
        """The end is set where there is a time to live, and an earlier one is kept where there is none."""
        driver, folded, changed, saved = await bench.driver(), bench.key(), bench.key(), bench.key()
        for key in (folded, changed, saved):
            await driver.append(key, b"a", initial_version="initial", ttl=bench.tick)
        done = [
            await driver.replace(folded, b"A", version="v2", expect="initial", drop=1, ttl=None),
            await driver.replace(changed, b"A", version="v2", expect="initial", ttl=None),
            await driver.replace(saved, b"A", version="v2", expect=ANY, ttl=None),
        ]
        must_be(done, [True] * 3, "the records are of the version expected")
        await bench.pass_time(bench.tick * 1.1)
        held = [Record("v2", b"A", ()), Record("v2", b"A", (b"a",)), Record("v2", b"A", ())]
        found = [await driver.load(key) for key in (folded, changed, saved)]
        must_be(found, held, "each replace set ttl=None, which never expires")

    @check("driver.lifetime", slow=True)
    async def test_a_replace_resets_the_time_to_live(self, bench: Bench) -> None:
        driver, key = await bench.driver(), bench.key()
        await driver.append(key, b"a", initial_version="initial", ttl=None)
        await driver.replace(key, b"body", version="v2", expect="initial", ttl=bench.tick)
        await bench.pass_time(bench.tick * 1.1)
        must_be(await driver.load(key), None, "the time to live that the replace set has passed")
        await driver.replace(key, b"body", version="v3", expect=ABSENT, ttl=bench.tick)
        await driver.replace(key, b"body", version="v4", expect="v3", ttl=None)
        await bench.pass_time(bench.tick * 1.1)
        must_be(
            await driver.load(key),
            Record("v4", b"body", ()),
            "the last replace set ttl=None, which never expires",
        )

    @check("driver.lifetime")
    async def test_the_same_time_to_live_set_again_begins_anew(self, bench: Bench) -> None:
        """It is not set if it seems unchanged, or entries keep the lease that they were written with."""
        driver = await bench.driver()
        await _must_begin_anew(bench, driver, 3 * bench.tick)

    @check("driver.lifetime", slow=True)
    async def test_the_same_time_to_live_of_some_seconds_begins_anew(self, bench: Bench) -> None:
        """Leases count whole seconds and are renewed only if they change, or entries keep the old one."""
        driver = await bench.driver()
        await _must_begin_anew(bench, driver, max(COARSE_S, 3 * bench.tick))

    @check("driver.lifetime")
    async def test_keep_leaves_the_time_to_live_unchanged(self, bench: Bench) -> None:
        driver, mortal, lasting = await bench.driver(), bench.key(), bench.key()
        await driver.append(mortal, b"a", initial_version="initial", ttl=bench.tick)
        await driver.append(lasting, b"a", initial_version="initial", ttl=None)
        folded = Record("v2", b"a", ())
        for key in (mortal, lasting):
            done = await driver.replace(key, b"a", version="v2", expect="initial", drop=1, ttl=KEEP)
            must_be(done, True, "the record is of the version expected")
            must_be(await driver.load(key), folded, "its only entry was folded")
        await bench.pass_time(bench.tick * 1.1)
        must_be(await driver.load(mortal), None, "KEEP does not change when the record expires")
        must_be(await driver.load(lasting), folded, "KEEP does not make a permanent record expire")

    @check("driver.lifetime")
    async def test_a_time_to_live_beyond_every_calendar_is_accepted(self, bench: Bench) -> None:
        driver, key, saved = await bench.driver(), bench.key(), bench.key()
        for length in (1, 2):
            must_be(
                await driver.append(key, b"a", initial_version="initial", ttl=1e300),
                length,
                "every positive time to live is accepted",
            )
        done = await driver.replace(saved, b"body", version="v1", expect=ANY, ttl=1e300)
        must_be(done, True, "every positive time to live is accepted")
        must_be(
            await driver.load(key),
            Record("initial", None, (b"a", b"a")),
            "the record expires in the distant future",
        )
        must_be(
            await driver.load(saved), Record("v1", b"body", ()), "the record expires in the distant future"
        )
        must_be(await names_in(driver, key.scope), [key.name], "the record expires in the distant future")

    @check("driver.lifetime", slow=True)
    async def test_keep_on_a_new_record_means_no_expiry(self, bench: Bench) -> None:
        driver, key = await bench.driver(), bench.key()
        done = await driver.replace(key, b"body", version="v1", expect=ABSENT, ttl=KEEP)
        must_be(done, True, "there is no record")
        await bench.pass_time(bench.tick * 1.1)
        must_be(await driver.load(key), Record("v1", b"body", ()), "there was no time to live to keep")

    @check("driver.lifetime", slow=True)
    async def test_a_refused_write_does_not_change_the_time_to_live(self, bench: Bench) -> None:
        driver, key = await bench.driver(), bench.key()
        await driver.append(key, b"a", initial_version="initial", ttl=bench.tick)
        done = await driver.replace(key, b"x", version="v2", expect="other", ttl=None)
        must_be(done, False, "the record is of another version")
        done = await driver.replace(key, b"x", version="v2", expect=ABSENT, ttl=None)
        must_be(done, False, "there is a record")
        done = await driver.replace(key, b"x", version="v2", expect="initial", drop=2, ttl=None)
        must_be(done, False, "the tail has one entry, and two were to be dropped")
        await bench.pass_time(bench.tick * 1.1)
        must_be(await driver.load(key), None, "refused writes do not extend the time to live")

    @check("driver.lifetime")
    async def test_a_refused_write_with_a_time_to_live_changes_none(self, bench: Bench) -> None:
        """The time to live is set by a separate request, or before the condition is checked."""
        driver, ended, lasting, longer = await bench.driver(), bench.key(), bench.key(), bench.key()
        lives = {ended: (bench.tick * 2, 1_000.0), lasting: (None, 1.0), longer: (bench.tick * 6, 1.0)}
        for key, (before, ticks) in lives.items():
            await driver.append(key, b"a", initial_version="initial", ttl=before)
            ttl, two = bench.tick * ticks, (b"b", b"c")
            refused: list[Callable[[], Awaitable[bool]]] = [
                functools.partial(driver.replace, key, b"x", version="v2", expect="other", ttl=ttl),
                functools.partial(driver.replace, key, b"x", version="v2", expect=ABSENT, ttl=ttl),
                functools.partial(driver.replace, key, b"x", version="v2", expect="initial", drop=2, ttl=ttl),
                functools.partial(
                    driver.replace, key, b"x", version="v2", expect="initial", rewrite=two, ttl=ttl
                ),
            ]
            for write in refused:
                must_be(await write(), False, "it is of another version, or there, or has a single entry")
        await bench.pass_time(bench.tick * 1.1)
        for key in (lasting, longer):
            record = Record("initial", None, (b"a",))
            must_be(await driver.load(key), record, "a refused write does not shorten the time to live")
        await bench.pass_time(bench.tick * 1.1)
        must_be(await driver.load(ended), None, "a refused write does not extend the time to live")

    @check("driver.expiry")
    async def test_a_lease_can_be_taken_once_it_has_expired(self, bench: Bench) -> None:
        one, two, key = await bench.driver(), await bench.driver(), bench.key()
        taken = await one.replace(key, b"one", version="v1", expect=ABSENT, ttl=bench.tick)
        must_be(taken, True, "the lease is free")
        taken = await two.replace(key, b"two", version="v2", expect=ABSENT, ttl=bench.tick)
        must_be(taken, False, "another instance holds the lease")
        await one.close()
        await bench.pass_time(bench.tick * 1.1)
        taken = await two.replace(key, b"two", version="v3", expect=ABSENT, ttl=bench.tick * 4)
        must_be(taken, True, "the lease has expired")


async def _must_begin_anew(bench: Bench, driver: Driver, ttl: float) -> None:
    """Set a time to live twice, by an append, a save and a fold; fail if a record ends with the first."""
    __tracebackhide__ = True
    appended, saved, folded = keys = [bench.key() for _ in range(3)]
    await append_all(driver, folded, b"a", b"b")
    for number, value in enumerate((b"0", b"1")):
        await driver.append(appended, value, initial_version="initial", ttl=ttl)
        await driver.replace(saved, value, version=f"v{number}", expect=ANY, ttl=ttl)
        before = f"v{number - 1}" if number else "initial"
        await driver.replace(folded, value, version=f"v{number}", expect=before, drop=1 - number, ttl=ttl)
        await bench.pass_time(ttl * 0.7)
    held = [Record("initial", None, (b"0", b"1")), Record("v1", b"1", ()), Record("v1", b"1", (b"b",))]
    found = [await driver.load(key) for key in keys]
    must_be(found, held, f"a time to live of {ttl:g} s was set again {ttl * 0.7:g} s ago")
