"""Checks of the end of a record's life."""

from __future__ import annotations

from stm_backends.driver import ABSENT, ANY, KEEP, Key, Record, new_version
from stm_backends.testing.bench import Bench, names_in
from stm_backends.testing.contract import Contract, check
from stm_backends.testing.driver_checks.steps import expired, loaded


class Expiry(Contract):
    """Checks of the end of a record's life."""

    @check("driver.expiry")
    async def test_an_expired_record_is_absent_in_load(self, bench: Bench) -> None:
        driver, key = await bench.driver(), await expired(bench)
        assert await driver.load(key) is None

    @check("driver.expiry")
    async def test_an_expired_record_is_absent_in_append(self, bench: Bench) -> None:
        driver, key = await bench.driver(), await expired(bench)
        assert await driver.append(key, b"new", birth="anew", ttl=None) == 1
        assert await driver.load(key) == Record("anew", None, (b"new",))

    @check("driver.expiry")
    async def test_an_expired_record_is_absent_in_replace_absent(self, bench: Bench) -> None:
        driver, key = await bench.driver(), await expired(bench)
        assert await driver.replace(key, b"new", version="anew", expect=ABSENT, ttl=None) is True
        assert await driver.load(key) == Record("anew", b"new", ())

    @check("driver.expiry", slow=True)
    async def test_an_expired_record_is_absent_in_replace_any(self, bench: Bench) -> None:
        driver, key = await bench.driver(), await expired(bench)
        assert await driver.replace(key, b"new", version="old", expect=ANY, ttl=KEEP) is True
        assert await driver.load(key) == Record("old", b"new", ())

    @check("driver.expiry", slow=True)
    async def test_an_expired_record_is_absent_in_replace_with_its_version(self, bench: Bench) -> None:
        driver, key = await bench.driver(), await expired(bench)
        assert await driver.replace(key, b"new", version="anew", expect="old", ttl=None) is False
        assert await driver.replace(key, b"new", version="old", expect="old", ttl=None) is False
        assert await driver.load(key) is None

    @check("driver.expiry", slow=True)
    async def test_an_expired_record_is_absent_in_delete(self, bench: Bench) -> None:
        driver, key = await bench.driver(), await expired(bench)
        assert await driver.delete(key, expect="old") is False
        assert await driver.delete(key) is False

    @check("driver.expiry")
    async def test_an_expired_record_is_absent_in_scan(self, bench: Bench) -> None:
        driver, key = await bench.driver(), await expired(bench)
        await driver.append(Key(key.scope, "young"), b"a", birth="birth", ttl=None)
        assert await names_in(driver, key.scope) == ["young"]

    @check("driver.expiry")
    async def test_a_record_lives_until_its_time_has_come(self, bench: Bench) -> None:
        driver, key = await bench.driver(), bench.key()
        await driver.append(key, b"a", birth="birth", ttl=bench.tick * 4)
        await bench.pass_time(bench.tick)
        assert (await loaded(driver, key)).tail == (b"a",)

    @check("driver.expiry")
    async def test_a_new_record_is_not_mistaken_for_the_expired_one(self, bench: Bench) -> None:
        driver, key = await bench.driver(), bench.key()
        await driver.append(key, b"old", birth=new_version(), ttl=bench.tick)
        read = await loaded(driver, key)
        await bench.pass_time(bench.tick * 1.1)
        await driver.append(key, b"new", birth=new_version(), ttl=None)
        late = await driver.replace(key, b"old", version=new_version(), expect=read.version, drop=1, ttl=None)
        assert late is False, "a writer that slept through the expiry took the new record for the old one"
        record = await loaded(driver, key)
        assert (record.body, record.tail) == (None, (b"new",))

    @check("driver.lifetime", slow=True)
    async def test_an_append_sets_the_time_to_live_anew(self, bench: Bench) -> None:
        driver, key = await bench.driver(), bench.key()
        await driver.append(key, b"a", birth="birth", ttl=bench.tick)
        await driver.append(key, b"b", birth="birth", ttl=bench.tick * 6)
        await bench.pass_time(bench.tick * 1.1)
        assert (await loaded(driver, key)).tail == (b"a", b"b")
        await driver.append(key, b"c", birth="birth", ttl=bench.tick)
        await bench.pass_time(bench.tick * 1.1)
        assert await driver.load(key) is None

    @check("driver.lifetime", slow=True)
    async def test_an_append_without_a_time_to_live_makes_the_record_last(self, bench: Bench) -> None:
        driver, key = await bench.driver(), bench.key()
        await driver.append(key, b"a", birth="birth", ttl=bench.tick)
        await driver.append(key, b"b", birth="birth", ttl=None)
        await bench.pass_time(bench.tick * 1.1)
        assert (await loaded(driver, key)).tail == (b"a", b"b")

    @check("driver.lifetime", slow=True)
    async def test_a_replace_sets_the_time_to_live_anew(self, bench: Bench) -> None:
        driver, key = await bench.driver(), bench.key()
        await driver.append(key, b"a", birth="birth", ttl=None)
        await driver.replace(key, b"body", version="v2", expect="birth", ttl=bench.tick)
        await bench.pass_time(bench.tick * 1.1)
        assert await driver.load(key) is None
        await driver.replace(key, b"body", version="v3", expect=ABSENT, ttl=bench.tick)
        await driver.replace(key, b"body", version="v4", expect="v3", ttl=None)
        await bench.pass_time(bench.tick * 1.1)
        assert await driver.load(key) == Record("v4", b"body", ())

    @check("driver.lifetime")
    async def test_keep_never_lengthens_and_never_ends_a_life(self, bench: Bench) -> None:
        driver, mortal, lasting = await bench.driver(), bench.key(), bench.key()
        await driver.append(mortal, b"a", birth="birth", ttl=bench.tick)
        await driver.append(lasting, b"a", birth="birth", ttl=None)
        for key in (mortal, lasting):
            assert await driver.replace(key, b"a", version="v2", expect="birth", drop=1, ttl=KEEP) is True
            assert await driver.load(key) == Record("v2", b"a", ())
        await bench.pass_time(bench.tick * 1.1)
        assert await driver.load(mortal) is None
        assert await driver.load(lasting) == Record("v2", b"a", ())

    @check("driver.lifetime", slow=True)
    async def test_keep_on_a_record_that_was_not_there_is_for_ever(self, bench: Bench) -> None:
        driver, key = await bench.driver(), bench.key()
        assert await driver.replace(key, b"body", version="v1", expect=ABSENT, ttl=KEEP) is True
        await bench.pass_time(bench.tick * 1.1)
        assert await driver.load(key) == Record("v1", b"body", ())

    @check("driver.lifetime", slow=True)
    async def test_a_refused_write_does_not_change_the_time_to_live(self, bench: Bench) -> None:
        driver, key = await bench.driver(), bench.key()
        await driver.append(key, b"a", birth="birth", ttl=bench.tick)
        assert await driver.replace(key, b"x", version="v2", expect="other", ttl=None) is False
        assert await driver.replace(key, b"x", version="v2", expect=ABSENT, ttl=None) is False
        assert await driver.replace(key, b"x", version="v2", expect="birth", drop=2, ttl=None) is False
        await bench.pass_time(bench.tick * 1.1)
        assert await driver.load(key) is None

    @check("driver.expiry")
    async def test_a_lease_whose_holder_died_can_be_taken_when_its_time_has_come(self, bench: Bench) -> None:
        one, two, key = await bench.driver(), await bench.driver(), bench.key()
        assert await one.replace(key, b"one", version="v1", expect=ABSENT, ttl=bench.tick) is True
        assert await two.replace(key, b"two", version="v2", expect=ABSENT, ttl=bench.tick) is False
        await one.close()
        await bench.pass_time(bench.tick * 1.1)
        assert await two.replace(key, b"two", version="v3", expect=ABSENT, ttl=bench.tick * 4) is True
