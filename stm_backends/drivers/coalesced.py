"""Coalesced loads: concurrent loads of many records share one request to the datastore."""

from __future__ import annotations

import asyncio
import contextvars
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Hashable, Mapping, Sequence
from typing import Any, Final, Generic, NamedTuple, TypeVar

from stm_backends.drivers.bounded import Bounded
from stm_backends.drivers.contract import Key
from stm_backends.errors import Unavailable

K = TypeVar("K", bound=Hashable)
A = TypeVar("A")

LARGE_BYTES: Final = 256 * 1024
"""Loads of more bytes than this do not share requests with smaller ones, which would wait for them."""

REMEMBERED: Final = 10_000
"""The number of large keys that are remembered. Each takes some 130 bytes."""

_WEIGHT: Final = 1 / 16
"""Weight of the newest request in the average size of an answer."""


ALL: Final = 2**31 - 1
"""More entries than a record has; datastores take no larger number."""


class LoadKey(NamedTuple):
    """The arguments of a load: a record, and the number of its newest entries."""

    key: Key
    last: int

    @classmethod
    def of(cls, key: Key, last: int | None) -> LoadKey:
        """Return the key of a load with `last`."""
        return cls(key, ALL if last is None else min(last, ALL))


class LargeKeys:
    """The records or loads that were found to be large: the last `REMEMBERED` seen."""

    def __init__(self) -> None:
        self._hashes: Bounded[int, bool] = Bounded(REMEMBERED)

    def __contains__(self, key: Hashable) -> bool:
        return hash(key) in self._hashes

    def note(self, key: Hashable, size: int) -> bool:
        """Remember or forget a key by the size of its answer; returns whether that is large."""
        if size > LARGE_BYTES:
            self._hashes[hash(key)] = True
            return True
        self._hashes.pop(hash(key))
        return False


class _Batch(Generic[K, A]):
    """The loads of one request: the future of each caller, and the key it waits for; then what was sent."""

    def __init__(self) -> None:
        self.keys: tuple[K, ...] = ()
        self.callers: dict[asyncio.Future[tuple[A | None, bool]], K] = {}
        self.task: asyncio.Task[Mapping[K, A]] | None = None


class Coalesced(Generic[K, A]):
    """Groups loads that wait at the same time; each caller gets the answer for its own key.

    A key is that of a record or, where loads of the newest entries share requests too, a `LoadKey`.

    `fetch` reads several records with one request. It returns the found records by key; a key that is missing
    has no record. Its errors reach all callers of the request. `size` returns the number of bytes of an
    answer. `fetch` may leave out an answer of more than `LARGE_BYTES`, unless it is alone in its request.

    A load never joins a request that was already sent: its answer would miss writes that were acknowledged
    before the load began. A load that finds none in progress calls `fetch` itself, without a task. At most
    `in_flight` requests are in progress; further loads wait, and share the next one. A request has at most
    `max_keys` keys, or fewer if their answers would, by the average so far, exceed `max_bytes`. After
    a request that was not answered, the next ones have at most half as many.

    A large load is a separate request. At most `large_in_flight` of these are in progress besides the others,
    so small loads wait for none. A load that was not known to be large is repeated separately, once, after
    the request that it shared.

    Cancelling a load that waits takes its key out of the request. A request is cancelled when no caller is
    left, so the deadline of the callers is its deadline too.
    """

    def __init__(
        self,
        fetch: Callable[[Sequence[K]], Awaitable[Mapping[K, A]]],
        *,
        size: Callable[[A], int],
        max_keys: int = 64,
        max_bytes: int = 4 * 1024 * 1024,
        in_flight: int = 2,
        large_in_flight: int = 2,
    ) -> None:
        self._fetch = fetch
        self._size = size
        self._max_keys = max_keys
        self._max_bytes = max_bytes
        self._average = 1.0
        self._large = LargeKeys()
        self._shared = _Lane(self._fetch_all, in_flight, self._limit)
        self._alone = _Lane(self._fetch_all, large_in_flight, lambda: 1)

    async def load(self, key: K) -> A | None:
        """Return the answer for `key`, or `None` if there is no such record; raises what `fetch` raises."""
        if key not in self._large:
            found, is_alone = await self._shared.load(key)
            if not self._note(key, found) or is_alone:
                return found
        found, _ = await self._alone.load(key)
        self._note(key, found)
        return found

    async def close(self) -> None:
        """End the loads that wait and the requests in progress with `Unavailable`. Twice is harmless."""
        await self._shared.close()
        await self._alone.close()

    def _note(self, key: K, found: A | None) -> bool:
        return self._large.note(key, 0 if found is None else self._size(found))

    def _limit(self) -> int:
        return max(1, min(self._max_keys, int(self._max_bytes / self._average)))

    async def _fetch_all(self, keys: Sequence[K]) -> Mapping[K, A]:
        try:
            found = await self._fetch(keys)
        except BaseException:
            if len(keys) > 1:
                # Perhaps more than a deadline allows, so the same loads must not meet again in one request.
                self._average = max(self._average, 2 * self._max_bytes / len(keys))
            raise
        # The size of a separate request says nothing about shared ones.
        sizes = [size for one in found.values() if (size := self._size(one)) <= LARGE_BYTES]
        if sizes:
            self._average += (max(sum(sizes) / len(sizes), 1.0) - self._average) * _WEIGHT
        return found


class _Lane(Generic[K, A]):
    """Requests of one kind: at most `in_flight` are in progress, and a waiting one has `limit()` loads."""

    def __init__(
        self,
        fetch: Callable[[Sequence[K]], Coroutine[Any, Any, Mapping[K, A]]],
        in_flight: int,
        limit: Callable[[], int],
    ) -> None:
        self._fetch = fetch
        self._free = self._in_flight = in_flight
        self._limit = limit
        self._waiting: deque[_Batch[K, A]] = deque()
        self._running: set[asyncio.Task[Mapping[K, A]]] = set()

    async def load(self, key: K) -> tuple[A | None, bool]:
        """Return the answer for a key, and whether the key was alone in its request."""
        if self._free == self._in_flight and not self._waiting:
            self._free -= 1
            try:
                return (await self._fetch((key,))).get(key), True
            finally:
                self._free += 1
                self._send()
        batch = self._batch_for(key)
        caller: asyncio.Future[tuple[A | None, bool]] = asyncio.get_running_loop().create_future()
        batch.callers[caller] = key
        try:
            return await caller
        except asyncio.CancelledError:
            if caller.done() and not caller.cancelled():
                caller.exception()  # else asyncio logs that it was never retrieved
            raise
        finally:
            del batch.callers[caller]
            if not batch.callers and batch.task is not None:
                batch.task.cancel()

    async def close(self) -> None:
        for batch in self._waiting:
            _fail(batch, _closed)
        self._waiting.clear()
        running = [*self._running]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    def _batch_for(self, key: K) -> _Batch[K, A]:
        """Return the batch that a new load joins: the last one that waits, if it has room or the same key."""
        last = self._waiting[-1] if self._waiting else None
        if last is None or (len(last.callers) >= self._limit() and key not in last.callers.values()):
            self._waiting.append(_Batch())
            # In the next iteration of the loop, so that all loads of this one share the request.
            asyncio.get_running_loop().call_soon(self._send)
        return self._waiting[-1]

    def _send(self) -> None:
        """Send the batches that wait, while fewer than `in_flight` requests are in progress."""
        while self._free and self._waiting:
            batch = self._waiting.popleft()
            if not batch.callers:
                continue
            self._free -= 1
            batch.keys = tuple(dict.fromkeys(batch.callers.values()))
            # Not in the context of one caller, whose timeouts and traces are not those of the others.
            empty = contextvars.Context()
            batch.task = asyncio.create_task(
                self._fetch(batch.keys), name="stm-coalesced-loads", context=empty
            )
            self._running.add(batch.task)
            batch.task.add_done_callback(lambda task, batch=batch: self._done(batch, task))

    def _done(self, batch: _Batch[K, A], task: asyncio.Task[Mapping[K, A]]) -> None:
        self._running.discard(task)
        self._free += 1
        if task.cancelled():
            _fail(batch, _closed)
        elif (error := task.exception()) is not None:
            _fail(batch, lambda: error)
        else:
            found, is_alone = task.result(), len(batch.keys) == 1
            for caller, key in batch.callers.items():
                if not caller.done():
                    caller.set_result((found.get(key), is_alone))
        self._send()


def _fail(batch: _Batch[K, A], error: Callable[[], BaseException]) -> None:
    """Raise an error in each caller that still waits."""
    for caller in batch.callers:
        if not caller.done():
            caller.set_exception(error())


def _closed() -> Unavailable:
    return Unavailable("the driver was closed during the operation")
