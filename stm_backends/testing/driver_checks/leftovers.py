"""Checks of what an operation leaves behind in its connection and in the datastore."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from stm_backends.drivers.contract import ABSENT, ANY, KEEP, Key
from stm_backends.errors import Corrupt, StorageError, TooLarge
from stm_backends.testing.driver_checks.steps import append_all, full_of_largest, loaded, noise
from stm_backends.testing.workbench.check import Contract, check
from stm_backends.testing.workbench.drivers import Bench
from stm_backends.testing.workbench.expectations import must_be

CONNECTIONS = 4
"""How many loads at once see to it that most connections of a pool are used."""

QUICK_RECORD = 1024 * 1024
"""The largest record, in bytes, that a check fills only to have it refuse an entry."""


class Leftovers(Contract):
    """Checks of what an operation leaves behind in its connection and in the datastore."""

    @check("driver.transactions")
    async def test_no_operation_leaves_a_transaction_or_a_lock_behind(self, bench: Bench) -> None:
        """A connection goes back to its pool inside a transaction: after a read, a refusal or an error."""
        one, two, scope = await bench.driver(), await bench.driver(), bench.scope()
        key, full, saved = (Key(scope, name) for name in ("record", "full", "saved"))
        damaged = bench.key()
        others = [Key(scope, f"other {number}") for number in range(CONNECTIONS)]
        for each in (key, damaged, *others):
            await append_all(two, each, b"a", b"b")
        too_large = noise(one.traits.max_entry + 1)
        operations: dict[str, Callable[[], Awaitable[object]]] = {
            "a load": lambda: one.load(key),
            "a load of nothing": lambda: one.load(Key(scope, "nothing")),
            "an append": lambda: one.append(key, b"c", initial_version="initial", ttl=None),
            "a replace": lambda: one.replace(key, b"", version="v2", expect="initial", ttl=KEEP),
            "a replace that was done before": lambda: one.replace(
                key, b"", version="v2", expect="initial", ttl=KEEP
            ),
            "a refused replace": lambda: one.replace(
                key, b"", version="v3", expect="other", drop=1, ttl=None
            ),
            "a fold of too many entries": lambda: one.replace(
                key, b"", version="v3", expect="v2", drop=99, ttl=None
            ),
            "a refused creation": lambda: one.replace(key, b"", version="v3", expect=ABSENT, ttl=None),
            "a save": lambda: one.replace(saved, b"", version="v1", expect=ANY, ttl=None),
            "a refused delete": lambda: one.delete(key, expect="other"),
            "a delete of nothing": lambda: one.delete(Key(scope, "nothing")),
            "a scan": lambda: one.scan(scope, limit=1),
            "a refused entry": lambda: one.append(key, too_large, initial_version="initial", ttl=None),
            "a refused body": lambda: one.replace(key, too_large, version="v3", expect="v2", ttl=None),
            "an invalid argument": lambda: one.append(key, b"d", initial_version="initial", ttl=-1),
        }
        count = full_of_largest(one.traits)
        if count and count * one.traits.max_entry <= QUICK_RECORD:
            await append_all(two, full, *[too_large[1:]] * count)
            entry = too_large[1:]
            operations |= {
                "an append to a full record": lambda: one.append(
                    full, entry, initial_version="initial", ttl=None
                ),
                "a body in a full record": lambda: one.replace(
                    full, entry, version="v2", expect="initial", ttl=None
                ),
            }
        if bench.datastore.damage is not None:
            await bench.damage(damaged)
            operations |= {
                "a load of a damaged record": lambda: one.load(damaged),
                "an append to a damaged record": lambda: one.append(
                    damaged, b"c", initial_version="initial", ttl=None
                ),
                "a fold of a damaged record": lambda: one.replace(
                    damaged, b"", version="v2", expect="initial", drop=1, ttl=None
                ),
            }
        await asyncio.gather(*(one.load(each) for each in others))
        for what, operation in operations.items():
            with contextlib.suppress(TooLarge, Corrupt, ValueError):
                await operation()
            if bench.datastore.transactions is not None:
                must_be(await bench.datastore.transactions(), 0, f"{what} has ended with its transaction")
            entry = what.encode()
            try:
                await append_all(two, key, entry)
                await asyncio.gather(*(append_all(two, each, entry) for each in others))
            except StorageError as error:
                raise AssertionError(f"{what} has ended, and another instance can write; {error}") from error
            records = await asyncio.gather(*(loaded(one, each) for each in (key, *others)))
            for record in records:
                must_be(record.tail[-1:], (entry,), f"{what} has ended, and a load shows what is new since")
