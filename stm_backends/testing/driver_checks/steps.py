"""Steps shared by several checks."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from typing import Any, Final, TypeVar

import pytest

from stm_backends.drivers.contract import ABSENT, Driver, Key, Record, Traits
from stm_backends.errors import OutcomeUnknown, StorageError, Unavailable
from stm_backends.testing.workbench.check import not_asked
from stm_backends.testing.workbench.drivers import OPERATIONS, Bench, no_network
from stm_backends.testing.workbench.expectations import must_be, must_end, must_raise
from stm_backends.testing.workbench.failures import Met
from stm_backends.testing.workbench.proxy import HeldAnswer, Proxy

T = TypeVar("T")

SLACK_S: Final = 5.0
"""Seconds that a busy machine may add to a driver's deadline."""

HELD_S: Final = 0.1
"""Seconds for writes to begin waiting for a lock that a check holds."""

HOLDS_LOADS: Final = (
    "a load waits for the lock of `Datastore.hold`, which also stops loads; leave `hold` out, or hold only "
    "the lock of writers"
)

PAUSE_S: Final = 0.05
"""Pause before a check retries an operation that may fail at first, in seconds."""

ATTEMPTS: Final = 20
"""Minimum number of attempts: each one may meet another dead connection."""

TRIES: Final = 3
"""Number of times that a check holds a record up if the waiting writes give up, or retries an operation that
a busy machine may keep from ending in time."""

MOST_ANSWERS: Final = 20
"""Maximum number of answers of one operation that are lost or held in turn."""

LATE_S: Final = 5.0
"""Seconds for failed operations, or for a closed driver, to close their connections."""

UNDONE: Final = (
    "`Unavailable` says that nothing was done; once the request was sent, a lost answer is `OutcomeUnknown`"
)


def full_of_largest(traits: Traits) -> int | None:
    """Return the number of largest entries that fill a record, so that one more cannot fit.

    `None` if the traits do not determine it: an overhead is the most that a value takes, so more entries may
    fit than must, and values that take no room in the record never fill it.
    """
    most = traits.room(traits.max_entry)
    count = traits.max_record // max(1, most)
    return count if (count + 1) * (most - traits.overhead) > traits.max_record else None


def require_network(bench: Bench) -> None:
    """Skip the check if no proxy can be put before the datastore."""
    if bench.datastore.through is None:
        not_asked(no_network(bench.datastore))


async def behind(bench: Bench) -> tuple[Proxy, Driver]:
    """Return a proxy before the datastore, and a driver behind it; otherwise skip the check."""
    require_network(bench)
    proxy, key = bench.proxy(), bench.key()
    driver = await persistently(lambda: bench.driver_at(proxy.address))
    await persistently(lambda: driver.load(key))
    if not proxy.accepted:
        pytest.fail("`Datastore.through` opened a driver that does not use the address it was given")
    return proxy, driver


def mark_of(key: Key) -> bytes:
    """Return text that only requests about a fresh key contain: the unescaped part of its scope."""
    return key.scope.split(":")[1].encode()


async def outcome(work: Awaitable[T]) -> T | StorageError:
    """Return the answer, or an error that the network explains."""
    try:
        return await work
    except (Unavailable, OutcomeUnknown) as error:
        return error


async def persistently(work: Callable[[], Awaitable[T]]) -> T:
    """Return the answer of an operation, not an append, that may need several short deadlines."""
    for _ in range(TRIES - 1):
        with contextlib.suppress(Unavailable, OutcomeUnknown):
            return await work()
    return await work()


async def usable(driver: Driver, key: Key) -> None:
    """Wait until a driver can load again."""
    await recovered(lambda: driver.load(key), driver.traits)


async def is_held(held: HeldAnswer, running: asyncio.Future[Any]) -> bool:
    """Wait until an answer is held, or the operation has ended without it."""
    while True:
        if held.happened or running.done():
            return held.happened
        await asyncio.sleep(0.002)


async def comes(is_so: Callable[[], bool], within: float = LATE_S) -> bool:
    """Wait briefly until a condition holds, and return whether it did."""
    for _ in range(round(within / PAUSE_S)):
        if is_so():
            return True
        await asyncio.sleep(PAUSE_S)
    return is_so()


async def loaded(driver: Driver, key: Key) -> Record:
    """Return a record that must exist."""
    __tracebackhide__ = True
    record = await driver.load(key)
    assert record is not None, "the record must exist, but the load returned None"
    return record


async def shared(bench: Bench) -> tuple[Driver, Key]:
    """Return a driver that shares data with other processes, and a fresh key; otherwise skip the check."""
    driver = await bench.driver()
    if driver.traits.reach == "process":
        not_asked("this driver's reach ends with the process, as its traits say")
    return driver, bench.key()


async def append_all(driver: Driver, key: Key, *entries: bytes, initial_version: str = "initial") -> None:
    """Append entries one after another."""
    __tracebackhide__ = True
    for entry in entries:
        await driver.append(key, entry, initial_version=initial_version, ttl=None)


def each_fails_in_time(
    driver: Driver, key: Key, why: str = "no {} gets an answer"
) -> list[Callable[[], Awaitable[None]]]:
    """Return a step for each operation: without a working server, it must raise a typed error in time."""
    calls: list[Callable[[], Awaitable[object]]] = [
        lambda: driver.load(key),
        lambda: driver.append(key, b"b", initial_version="initial", ttl=None),
        lambda: driver.replace(key, b"body", version="v", expect="initial", ttl=None),
        lambda: driver.delete(Key(key.scope, "other")),
        lambda: driver.scan(key.scope, limit=1),
    ]

    async def fails(operation: str, call: Callable[[], Awaitable[object]]) -> None:
        __tracebackhide__ = True
        with must_raise((Unavailable, OutcomeUnknown), why.format(operation)) as caught:
            async with must_end(longest(driver.traits), "the driver has a deadline"):
                await call()
        assert_located(caught.value, driver, operation, key)

    return [functools.partial(fails, *each) for each in zip(OPERATIONS, calls, strict=True)]


async def expired(bench: Bench) -> Key:
    """Return the key of a record of version `old`, with body and tail, that has expired."""
    driver, key = await bench.driver(), bench.key()
    await driver.replace(key, b"old body", version="old", expect=ABSENT, ttl=bench.tick * 2)
    await driver.append(key, b"old entry", initial_version="older", ttl=bench.tick)
    await bench.pass_time(bench.tick * 1.1)
    return key


async def cancelled_after(steps: int, work: Coroutine[Any, Any, object]) -> bool:
    """Cancel `work` after some steps of the event loop, and return whether it had already ended."""
    task = asyncio.ensure_future(work)
    await take_steps(steps)
    task.cancel()
    try:
        await task
    except asyncio.CancelledError:
        return False
    return True


@asynccontextmanager
async def waiting_for(
    bench: Bench, key: Key, *writes: Callable[[], Awaitable[T]]
) -> AsyncGenerator[list[asyncio.Future[T]]]:
    """Let writes wait for a record that the check holds; they have ended when the context is left.

    A write may give up while it waits, even at once: a driver may limit its queue, and the contract states no
    minimum wait.
    """
    __tracebackhide__ = True
    assert bench.datastore.hold is not None, "a check must require `Datastore.hold` before it holds anything"
    assert bench.traits is not None, "the writes are those of a driver of the bench"
    waiting: list[asyncio.Future[T]] = []
    reader = None if bench.loads_go_on else await bench.driver()
    try:
        async with bench.datastore.hold(key):
            if reader is not None:
                await _must_load(reader, key)
                bench.loads_go_on = True
            waiting += [asyncio.ensure_future(write()) for write in writes]
            await asyncio.sleep(HELD_S)
            ended = [write.result() for write in waiting if write.done() and not gave_up(write)]
            must_be(ended, [], "`Datastore.hold` keeps writers to the record waiting")
            yield waiting
        async with must_end(
            longest(bench.traits), "nothing holds the record any more, and the driver has a deadline"
        ):
            await asyncio.gather(*waiting, return_exceptions=True)
    finally:
        await end(*waiting)


async def _must_load(reader: Driver, key: Key) -> None:
    """Fail if a load waits for a record that the check holds, because the lock must stop only writers."""
    __tracebackhide__ = True
    try:
        async with asyncio.timeout(longest(reader.traits)):
            await reader.load(key)
    except (Unavailable, OutcomeUnknown, TimeoutError) as error:
        raise Met(HOLDS_LOADS, HOLDS_LOADS) from error


def gave_up(write: asyncio.Future[Any]) -> bool:
    """Return whether a write has ended without an answer, as at its deadline or if a queue is full."""
    if not write.done() or write.cancelled():
        return False
    return isinstance(write.exception(), (Unavailable, OutcomeUnknown))


async def end(*tasks: asyncio.Future[Any]) -> None:
    """Cancel the tasks that have not ended, and wait for all to end."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def held_up(
    bench: Bench,
    key: Key,
    *writes: Callable[[], Awaitable[T]],
    meanwhile: Callable[[], Awaitable[object]] | None = None,
) -> list[T] | None:
    """Return the answers of writes that begin while the check holds the record, and end after its release.

    `None` if a write gave up: then the check has nothing to judge.
    """
    __tracebackhide__ = True
    async with waiting_for(bench, key, *writes) as waiting:
        if meanwhile is not None:
            await meanwhile()
    return None if any(map(gave_up, waiting)) else [write.result() for write in waiting]


def longest(traits: Traits) -> float:
    """Return the number of seconds that an operation may take on a busy machine."""
    return traits.deadline + SLACK_S


def rounds(bench: Bench, share: float) -> Iterator[bool]:
    """Yield, for a share of `races_s`, whether to hold up the next race; at least one of each."""
    clock = asyncio.get_running_loop().time
    end, can_hold = clock() + bench.datastore.races_s * share, bench.datastore.hold is not None
    yield False
    yield can_hold
    while clock() < end:
        yield False
        yield can_hold


async def recovered(work: Callable[[], Awaitable[T]], traits: Traits) -> T:
    """Return the answer of an operation that may fail for one deadline after an outage.

    A client library may pause before it reconnects, and meanwhile refuse everything at once.
    """
    __tracebackhide__ = True
    clock = asyncio.get_running_loop().time
    until, tried = clock() + traits.deadline, 0
    while True:
        tried += 1
        try:
            return await work()
        except (Unavailable, OutcomeUnknown) as error:
            if clock() >= until and tried >= ATTEMPTS:
                raise AssertionError(
                    f"the datastore has been within reach for a deadline of {traits.deadline:g} s, and "
                    f"{tried} operations in a row have failed; the last one: {error}"
                ) from error
        await asyncio.sleep(PAUSE_S)


async def take_steps(count: int) -> None:
    """Let the event loop take some steps."""
    for _ in range(count):
        await asyncio.sleep(0)


def assert_complete_and_in_order(entries: list[str], counts: dict[str, int]) -> None:
    """Fail unless the ledger has all entries of each label, in order, and nothing else."""
    for label, count in counts.items():
        mine = [entry for entry in entries if entry.startswith(f"{label}:")]
        written = [f"{label}:{number}" for number in range(count)]
        must_be(mine, written, f"writer {label} was acknowledged these entries in this order")
    must_be(len(entries), sum(counts.values()), "there are no other writers")


def assert_located(error: StorageError, driver: Driver, operation: str, key: Key) -> None:
    """Fail unless an error names its driver and operation, but not the conversation."""
    __tracebackhide__ = True
    must_be(error.backend, driver.name, "an error names its backend")
    must_be(error.operation, operation, "an error names its operation")
    assert key.scope not in str(error), "the message of an error must not name a conversation"


def noise(size: int) -> bytes:
    """Return `size` bytes that are not text."""
    return (bytes(range(256)) * (size // 256 + 1))[:size]
