"""Checks of keys with special characters, and of bytes that are not text."""

from __future__ import annotations

import reprlib

from stm_backends.drivers.contract import ABSENT, ANY, Key, Record
from stm_backends.testing.driver_checks.samples import NAMES, SHIFTED, VALUES
from stm_backends.testing.driver_checks.steps import append_all, loaded
from stm_backends.testing.workbench.check import Contract, check
from stm_backends.testing.workbench.drivers import Bench, names_in
from stm_backends.testing.workbench.expectations import must_be


class Keys(Contract):
    """Checks of keys with special characters, and of bytes that are not text."""

    @check("driver.keys")
    async def test_keys_never_collide_and_never_act_as_patterns(self, bench: Bench) -> None:
        driver, scope = await bench.driver(), bench.scope()
        for number, name in enumerate(NAMES):
            length = await driver.append(
                Key(scope, name), b"%d" % number, initial_version=f"v{number}", ttl=None
            )
            must_be(length, 1, f"the name {reprlib.repr(name)} is not another")
        for number, name in enumerate(NAMES):
            record = Record(f"v{number}", None, (b"%d" % number,))
            must_be(
                await driver.load(Key(scope, name)), record, f"the name {reprlib.repr(name)} is not another"
            )

    @check("driver.keys")
    async def test_scopes_never_collide_and_never_act_as_patterns(self, bench: Bench) -> None:
        driver, root = await bench.driver(), bench.scope()
        scopes = [f"{root}{suffix}" for suffix in ("", *(name for name in NAMES if len(name) < 20))]
        for scope in scopes:
            bench.clean(scope)
            length = await driver.append(
                Key(scope, "same"), scope.encode(), initial_version="initial", ttl=None
            )
            must_be(length, 1, f"a scope that ends with {scope[len(root) :]!r} is not another scope")
        for scope in scopes:
            why = f"a scope that ends with {scope[len(root) :]!r} is not another scope"
            must_be((await loaded(driver, Key(scope, "same"))).tail, (scope.encode(),), why)
            must_be(await names_in(driver, scope), ["same"], why)

    @check("driver.keys")
    async def test_scope_and_name_are_joined_injectively(self, bench: Bench) -> None:
        driver, root = await bench.driver(), bench.scope()
        for left, right in SHIFTED:
            keys = [Key(f"{root}:{key.scope}", key.name) for key in (left, right)]
            for key in keys:
                bench.clean(key.scope)
            for key in keys:
                length = await driver.append(key, repr(key).encode(), initial_version="initial", ttl=None)
                must_be(length, 1, f"{left} and {right} are two keys")
            for key in keys:
                must_be((await loaded(driver, key)).tail, (repr(key).encode(),), "the keys are two")
                must_be(await names_in(driver, key.scope), [key.name], "the scope has this name and no other")
                await driver.delete(key)

    @check("driver.bytes")
    async def test_bytes_are_returned_unchanged(self, bench: Bench) -> None:
        driver, key = await bench.driver(), bench.key()
        values = tuple(value[: driver.traits.max_entry] for value in VALUES)
        await append_all(driver, key, *values)
        must_be((await loaded(driver, key)).tail, values, "an entry is returned unchanged")
        for number, value in enumerate(values):
            done = await driver.replace(key, value, version=f"v{number}", expect=ANY, ttl=None)
            must_be(done, True, "ANY is never refused")
            must_be(await driver.load(key), Record(f"v{number}", value, ()), "a body is returned unchanged")

    @check("driver.bytes")
    async def test_empty_bodies_and_empty_entries_are_stored(self, bench: Bench) -> None:
        driver, key = await bench.driver(), bench.key()
        await driver.replace(key, b"", version="v1", expect=ABSENT, ttl=None)
        must_be(await driver.load(key), Record("v1", b"", ()), "an empty body is not the same as none")
        must_be(
            await driver.append(key, b"", initial_version="initial", ttl=None), 1, "an empty entry counts"
        )
        must_be(await driver.load(key), Record("v1", b"", (b"",)), "an empty entry is an entry")
        done = await driver.replace(key, b"", version="v2", expect="v1", drop=1, ttl=None)
        must_be(done, True, "the record is of the version expected, and has one entry")
        must_be(await driver.load(key), Record("v2", b"", ()), "the empty entry was folded")
