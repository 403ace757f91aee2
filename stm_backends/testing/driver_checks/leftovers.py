"""Checks that an operation leaves nothing behind in its connection, the process and the datastore."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import threading
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Final, NamedTuple

from stm_backends.drivers.contract import ABSENT, ANY, KEEP, Driver, Key
from stm_backends.errors import Corrupt, StorageError, TooLarge
from stm_backends.testing.driver_checks.steps import append_all, full_of_largest, loaded, noise
from stm_backends.testing.workbench.check import Contract, check, not_asked, too_slow
from stm_backends.testing.workbench.drivers import Bench
from stm_backends.testing.workbench.expectations import must_be

CONNECTIONS = 4
"""Number of concurrent loads, so that most connections of a pool are used."""

KEYS: Final = 50
"""Number of records used in each round, before tasks, threads and files are counted."""

ROUNDS: Final = 3
"""Number of consecutive rounds with a rising count that show a leak."""

MANY_KEYS: Final = 10_000
"""Number of records used before objects are counted for the last time."""

FEWEST_KEYS: Final = 4_000
"""Minimum number of records; with fewer, a limited cache may look unlimited."""

FEW_KEYS: Final = 200
"""Number of additional records used each time if the datastore is too slow for all."""

WAITED_FOR: Final = (
    *(asyncio.Lock, asyncio.Event, asyncio.Condition, asyncio.Semaphore, asyncio.Queue, asyncio.Future),
    *(threading.Event, threading.Condition, threading.Semaphore),
)
"""Objects that no cache keeps, limited or not, so that few records show whether each record keeps one."""

AT_ONCE: Final = 16
"""Number of records used at a time."""

SETTLING_S: Final = 2.0
"""Seconds for ending tasks, threads and connections to end."""

MANY_S: Final = 20.0
"""Maximum number of seconds for using many records."""

COUNTED: Final = ("tasks", "threads", "open files and connections")

FILES: Final = Path("/proc/self/fd")
"""The directory in which Linux lists the open files and connections of a process."""

QUICK_RECORD = 1024 * 1024
"""Maximum size in bytes of a record that a check fills only to make it refuse an entry."""


class Leftovers(Contract):
    """Checks that an operation leaves nothing behind in its connection, the process and the datastore."""

    @check("driver.lifecycle")
    async def test_operations_leave_no_task_thread_or_connection_behind(self, bench: Bench) -> None:
        """Each record gets a separate task, thread or stream, which does not end with the operation."""
        driver, scope = await bench.unnoted(), bench.scope()
        names = (f"record {number}" for number in itertools.count())
        # The first round opens all connections that will be needed.
        await _use(driver, (Key(scope, name) for name in itertools.islice(names, KEYS)))
        counts = [_counted()]
        for turn in range(ROUNDS):
            bench.history.say(
                f"after {(turn + 1) * KEYS} records: {dict(zip(COUNTED, counts[-1], strict=True))}"
            )
            await _use(driver, (Key(scope, name) for name in itertools.islice(names, KEYS)))
            for _ in range(100):
                if all(now <= before for now, before in zip(_counted(), counts[-1], strict=True)):
                    return
                await asyncio.sleep(SETTLING_S / 100)
            counts.append(_counted())
        for what, each in zip(COUNTED, zip(*counts, strict=True), strict=True):
            rises = all(before < after for before, after in itertools.pairwise(each))
            assert not rises, f"{KEYS} more records were used each time, and there were {each} {what}"

    @check("driver.lifecycle", slow=True)
    async def test_many_records_leave_no_object_behind(self, bench: Bench) -> None:
        """Each record gets a lock, a stream or an entry of a cache without a limit, and keeps it forever."""
        driver, scope = await bench.unnoted(), bench.scope()
        clock = asyncio.get_running_loop().time
        began, used, counts = clock(), 0, list[_Kept]()
        is_slow = False
        # In the last quarter, because limited caches are full by then.
        for share in (0.25, 0.75, 1.0):
            most = used + FEW_KEYS if is_slow else MANY_KEYS * share
            is_over = False
            while not is_over:
                await _use(driver, (Key(scope, f"record {number}") for number in range(used, used + KEYS)))
                used += KEYS
                is_over = used >= most or clock() >= began + MANY_S * share
            is_slow = is_slow or used < FEWEST_KEYS * share
            counts.append(_kept(used))
            bench.history.say(f"{used:,} records were stored, changed and deleted, one after the other")
        if not is_slow:
            left = counts[-1].objects_since(counts[-2])
            assert left < 0.5, f"each record that was used and deleted leaves {left:.1f} objects behind"
            return
        left = min(after.waited_for_since(before) for before, after in itertools.pairwise(counts))
        assert left < 0.5, f"each record that was used and deleted leaves {left:.1f} locks or the like behind"
        not_asked(
            too_slow(
                f"no lock is left behind by {used:,} records; an entry of a cache without a limit would show "
                f"with {FEWEST_KEYS:,}"
            )
        )

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


class _Kept(NamedTuple):
    """The number of objects in the process after some records, and of those that are waited for."""

    used: int
    objects: int
    waited_for: int

    def objects_since(self, before: _Kept) -> float:
        """Return the number of additional objects for each record used since."""
        return (self.objects - before.objects) / max(1, self.used - before.used)

    def waited_for_since(self, before: _Kept) -> float:
        """Return the same for objects that are waited for."""
        return (self.waited_for - before.waited_for) / max(1, self.used - before.used)


def _kept(used: int) -> _Kept:
    gc.collect()
    objects = gc.get_objects()
    # By type, because some objects claim to be of another class.
    return _Kept(used, len(objects), sum(issubclass(type(one), WAITED_FOR) for one in objects))


async def _use(driver: Driver, keys: Iterable[Key]) -> None:
    """Store, read, change and delete records."""
    waiting = iter(keys)

    async def use() -> None:
        for key in waiting:
            await driver.append(key, b"a", initial_version="initial", ttl=None)
            await driver.load(key)
            await driver.replace(key, b"", version="v2", expect="initial", drop=1, ttl=KEEP)
            await driver.delete(key, expect="v2")

    await asyncio.gather(*(use() for _ in range(AT_ONCE)))


def _counted() -> tuple[int, int, int]:
    """Return the numbers of tasks, of threads, and of files and connections; 0 if files cannot be listed."""
    files = len(list(FILES.iterdir())) if FILES.is_dir() else 0
    return len(asyncio.all_tasks()), threading.active_count(), files
