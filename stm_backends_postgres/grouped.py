"""Grouped appends: concurrent appends of one process share a statement."""

from __future__ import annotations

import asyncio
import contextvars
import enum
import functools
import itertools
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Final, NamedTuple, TypeAlias

from stm_backends.drivers.coalesced import LARGE_BYTES
from stm_backends.drivers.contract import Key
from stm_backends.errors import OutcomeUnknown, Unavailable
from stm_backends_postgres.client import Row
from stm_backends_postgres.errors import NO_CONNECTION, copied, is_refused

IN_FLIGHT: Final = 2
"""The number of places for statements; further appends wait, and share the next statement."""

PLACE_S: Final = 0.1
"""Seconds after which a statement leaves its place to waiting appends. A lock may hold it up for longer."""

MOST: Final = 64
"""Maximum number of appends in one statement, and so of unknown outcomes if its answer is lost."""

MOST_BYTES: Final = 1024 * 1024
"""Maximum size in bytes of the entries in one statement. An entry above `LARGE_BYTES` is sent alone."""


class Append(NamedTuple):
    """One append. `version` is for a record that it creates; `seconds` is the time to live.

    `is_known` says that the record probably exists, and will not expire soon. `until` is the time of the
    event loop at which it stops waiting, for its turn and for a connection alike.
    """

    key: Key
    entry: bytes
    version: str
    seconds: float | None
    is_known: bool
    until: float = math.inf


class _Alone(enum.Enum):
    """The result for a caller that must send its append itself."""

    NOW = enum.auto()


Caller: TypeAlias = asyncio.Future[Row | None | _Alone]


class _Group:
    """The appends of one statement: none before it has a connection, and then those with remaining callers.

    `waited` are the callers that were waiting when it began to request a connection, and `sent` those whose
    appends the statement has, in order.
    """

    task: asyncio.Task[Sequence[Row | None]]

    def __init__(self) -> None:
        self.waited: Sequence[Caller] = ()
        self.appends: dict[Caller, Append] = {}
        self.keys: frozenset[Key] = frozenset()
        self.sent: Sequence[tuple[Caller, Append]] = ()


class Grouped:
    """Groups appends that wait at the same time; each caller gets the row for its own append.

    `alone` sends one append; it gets a connection by `Append.until`, or raises an error. `together` gets a
    connection, then calls the function that it is given for the appends to send. It returns a row for each,
    in order, or `None` for one that the statement left out: nothing was done, and its caller sends it alone.
    After an error by which the server refused the statement, all are sent alone, so that each one fails by
    itself. Any other error reaches all callers; each gets a copy without the frames.

    There are `IN_FLIGHT` places for statements. An append that finds all of them free is sent alone, without
    a task, and so is one that has no other to share with. If no place is free, appends wait. A statement that
    has lasted for `PLACE_S` seconds leaves its place to waiting appends: it may wait for a lock, or for a
    server that never answers. An append that was left out needs no place. Once a statement has a connection,
    it takes waiting appends, at most `MOST` of them and `MOST_BYTES`.

    Appends to one record keep their order: none is sent while an earlier one is in progress. Large appends
    are the exception, as are those that the same statement left out: they are sent at the same time.

    Cancelling a waiting append removes it. Once it is sent, it may be done. The statement is cancelled when
    no caller is left, so the callers' deadline is also its deadline. An append that has waited `patience_s`
    seconds for its turn and for a connection raises `Unavailable`.
    """

    def __init__(
        self,
        alone: Callable[[Append], Awaitable[Row]],
        together: Callable[[Callable[[], Sequence[Append]]], Awaitable[Sequence[Row | None]]],
        *,
        patience_s: float,
    ) -> None:
        self._alone = alone
        self._together = together
        self._patience_s = patience_s
        # The statements that have a place, oldest first, and when they began; the key is that of an append
        # sent alone.
        self._placed: dict[_Group | Key, float] = {}
        self._freeing: asyncio.TimerHandle | None = None
        # The records of appends sent alone. A statement may have left out several appends to one record.
        self._lone: Counter[Key] = Counter()
        # The waiting appends; oldest first.
        self._waiting: dict[Caller, Append] = {}
        self._expiring: asyncio.TimerHandle | None = None
        self._groups: set[_Group] = set()
        # The group that waits for a connection.
        self._next: _Group | None = None
        # True if the next iteration of the loop handles the waiting appends, with those added in this one.
        self._is_due = False

    async def append(self, one: Append) -> Row:
        """Return the row for an append. Raises the errors of `alone` and `together`."""
        if len(one.entry) > LARGE_BYTES:
            return await self._alone(one)
        if not self._placed and not self._waiting and one.key not in self._busy():
            self._begin_alone(one.key)
            return await self._send_alone(one)
        one = one._replace(until=asyncio.get_running_loop().time() + self._patience_s)
        row = await self._wait(one)
        if row is _Alone.NOW:
            return await self._send_alone(one)
        # The record of a left-out append is in use, full, expired or gone; only `alone` can tell.
        return await self._send_alone(one._replace(is_known=False)) if row is None else row

    async def drain(self, patience_s: float) -> None:
        """Wait at most `patience_s` seconds until the statement of each current append was answered.

        By then, appends that are sent alone have requested a connection.
        """
        callers = [*self._waiting, *(caller for group in self._groups for caller in group.appends)]
        if callers:
            await asyncio.wait(callers, timeout=patience_s)
        # A caller whose turn has come, or whose append was left out, may not have woken up.
        await asyncio.sleep(0)
        if not self._waiting:
            self._stop_timers()

    def _stop_timers(self) -> None:
        for timer in (self._expiring, self._freeing):
            if timer is not None:
                timer.cancel()
        self._expiring = self._freeing = None

    def _begin_alone(self, key: Key) -> None:
        self._placed[key] = asyncio.get_running_loop().time()
        self._lone[key] += 1

    async def _send_alone(self, one: Append) -> Row:
        try:
            return await self._alone(one)
        finally:
            self._end_alone(one.key)

    def _end_alone(self, key: Key) -> None:
        # One that was left out has no place, and neither has any other append to its record.
        self._placed.pop(key, None)
        self._lone[key] -= 1
        if not self._lone[key]:
            del self._lone[key]
        self._send()

    async def _wait(self, one: Append) -> Row | None | _Alone:
        loop = asyncio.get_running_loop()
        caller: Caller = loop.create_future()
        self._waiting[caller] = one
        if self._expiring is None:
            self._expiring = loop.call_at(one.until, self._expire)
        self._send()
        try:
            return await caller
        except asyncio.CancelledError:
            self._leave(caller)
            self._leave_turn(caller, one.key)
            raise

    def _leave(self, caller: Caller) -> None:
        """Remove an append whose caller is gone, and end a statement without remaining callers."""
        if caller.done() and not caller.cancelled():
            caller.exception()  # otherwise asyncio logs that it was never retrieved
        self._waiting.pop(caller, None)
        for group in self._groups:
            if group.appends.pop(caller, None) is not None and not group.appends:
                group.task.cancel()

    def _leave_turn(self, caller: Caller, key: Key) -> None:
        """End the append of a caller that was cancelled at the moment when it was to send it alone."""
        if caller.done() and not caller.cancelled() and caller.exception() is None:
            row = caller.result()
            if row is None or row is _Alone.NOW:
                self._end_alone(key)

    def _expire(self) -> None:
        """Fail the appends that have waited too long, and schedule a check for the oldest of the rest."""
        loop = asyncio.get_running_loop()
        self._expiring = None
        for caller, one in [*self._waiting.items()]:
            if one.until > loop.time():
                self._expiring = loop.call_at(one.until, self._expire)
                return
            del self._waiting[caller]
            if not caller.done():
                caller.set_exception(Unavailable(NO_CONNECTION))

    def _send(self) -> None:
        """Handle the waiting appends, once for all that are added in this iteration of the loop."""
        if not self._waiting or self._next is not None:
            return
        loop = next(iter(self._waiting)).get_loop()
        if loop.is_closed():  # before all tasks had ended; nothing can be sent any more
            return
        if len(self._placed) >= IN_FLIGHT:
            if self._freeing is None:
                self._freeing = loop.call_at(next(iter(self._placed.values())) + PLACE_S, self._free_place)
        elif not self._is_due:
            self._is_due = True
            loop.call_soon(self._begin)

    def _free_place(self) -> None:
        """Free the place of the oldest statement if appends wait and it has lasted for `PLACE_S` seconds."""
        self._freeing = None
        if self._waiting and len(self._placed) >= IN_FLIGHT and self._next is None:
            statement, began = next(iter(self._placed.items()))
            if began + PLACE_S <= asyncio.get_running_loop().time():
                del self._placed[statement]
        self._send()

    def _begin(self) -> None:
        """Start one more statement, or let a caller send its append, if one may be sent."""
        self._is_due = False
        if len(self._placed) >= IN_FLIGHT or self._next is not None:
            return
        ready = [*itertools.islice(self._ready(), 2)]
        if len(ready) == 1:
            ((caller, one),) = ready
            del self._waiting[caller]
            self._begin_alone(one.key)
            caller.set_result(_Alone.NOW)
        elif ready:
            self._begin_group()

    def _begin_group(self) -> None:
        loop = asyncio.get_running_loop()
        group = self._next = _Group()
        self._groups.add(group)
        self._placed[group] = loop.time()
        # Not in one caller's context, because its timeouts and traces do not apply to the others.
        group.task = loop.create_task(
            self._run(group), name="stm-postgres-appends", context=contextvars.Context()
        )
        group.task.add_done_callback(functools.partial(self._done, group))

    async def _run(self, group: _Group) -> Sequence[Row | None]:
        group.waited = [*self._waiting]
        return await self._together(functools.partial(self._take, group))

    def _take(self, group: _Group) -> Sequence[Append]:
        """Return the appends of a statement that now has a connection, perhaps not its first."""
        if group is self._next:
            self._fill(group)
            self._next = None
            self._send()
        else:
            group.appends = {caller: one for caller, one in group.appends.items() if not caller.done()}
        group.sent = [*group.appends.items()]
        return [*group.appends.values()]

    def _fill(self, group: _Group) -> None:
        size = 0
        for caller, one in self._ready():
            size += len(one.entry)
            if len(group.appends) == MOST or (size > MOST_BYTES and group.appends):
                break
            group.appends[caller] = one
        for caller in group.appends:
            del self._waiting[caller]
        group.keys = frozenset(one.key for one in group.appends.values())

    def _ready(self) -> Iterator[tuple[Caller, Append]]:
        """Yield the waiting appends that may be sent, oldest first."""
        busy = self._busy()
        for caller, one in self._waiting.items():
            # A caller that was cancelled a moment ago has not removed its append.
            if not caller.done() and one.key not in busy:
                yield caller, one

    def _busy(self) -> set[Key]:
        """Return the records with an append in progress."""
        return set(self._lone).union(*(group.keys for group in self._groups))

    def _done(self, group: _Group, task: asyncio.Task[Sequence[Row | None]]) -> None:
        self._groups.discard(group)
        self._placed.pop(group, None)
        sent = group.sent
        if group is self._next:  # the group got no connection
            self._next = None
            waited = ((caller, self._waiting.pop(caller, None)) for caller in group.waited)
            sent = [(caller, one) for caller, one in waited if one is not None]
        error = OutcomeUnknown("cancelled before the answer came") if task.cancelled() else task.exception()
        if error is None or is_refused(error):
            rows = task.result() if error is None else [None] * len(sent)
            for (caller, one), row in zip(sent, rows, strict=True):
                self._answer(caller, one.key, row)
        else:
            for caller, _ in sent:
                if not caller.done():
                    caller.set_exception(copied(error))
        self._send()

    def _answer(self, caller: Caller, key: Key, row: Row | None) -> None:
        if caller.done():
            return
        if row is None:  # its caller sends it alone, and no later append to its record comes first
            self._lone[key] += 1
        caller.set_result(row)
