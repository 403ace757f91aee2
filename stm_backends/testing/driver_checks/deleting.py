"""Checks of what a delete removes, and what it leaves."""

from __future__ import annotations

from stm_backends.driver import ANY, Key, Record
from stm_backends.testing.bench import Bench, names_in
from stm_backends.testing.contract import Contract, check
from stm_backends.testing.driver_checks.samples import NAMES
from stm_backends.testing.driver_checks.steps import append_all


class Deleting(Contract):
    """Checks of what a delete removes, and what it leaves."""

    @check("driver.delete")
    async def test_a_delete_removes_body_and_tail_and_says_whether_it_did(self, bench: Bench) -> None:
        driver, key = await bench.driver(), bench.key()
        assert await driver.delete(key) is False
        await append_all(driver, key, b"a", b"b")
        await driver.replace(key, b"body", version="v2", expect="birth", ttl=None)
        assert await driver.delete(key) is True
        assert await driver.load(key) is None
        assert await driver.delete(key) is False

    @check("driver.delete")
    async def test_a_record_made_anew_has_nothing_of_the_deleted_one(self, bench: Bench) -> None:
        driver, key = await bench.driver(), bench.key()
        await append_all(driver, key, b"a", b"b")
        await driver.replace(key, b"body", version="v2", expect="birth", drop=1, ttl=None)
        await driver.delete(key)
        assert await driver.append(key, b"c", birth="anew", ttl=None) == 1
        assert await driver.load(key) == Record("anew", None, (b"c",))

    @check("driver.delete")
    async def test_a_delete_with_a_version_removes_only_that_version(self, bench: Bench) -> None:
        driver, key = await bench.driver(), bench.key()
        assert await driver.delete(key, expect="v1") is False
        await driver.replace(key, b"body", version="v1", expect=ANY, ttl=None)
        assert await driver.delete(key, expect="v2") is False
        assert await driver.load(key) == Record("v1", b"body", ())
        assert await driver.delete(key, expect="v1") is True
        assert await driver.load(key) is None

    @check("driver.delete", slow=True)
    async def test_a_delete_touches_no_other_record(self, bench: Bench) -> None:
        driver, scope = await bench.driver(), bench.scope()
        for name in NAMES:
            await driver.append(Key(scope, name), name.encode(), birth="birth", ttl=None)
        left = set(NAMES)
        for name in NAMES:
            assert await driver.delete(Key(scope, name)) is True, f"{name!r} was gone"
            left.remove(name)
            assert set(await names_in(driver, scope)) == left, f"deleting {name!r} removed others"
