"""Grouped appends: concurrent appends of one process share a statement."""

from __future__ import annotations

import asyncio
import contextvars
import enum
import functools
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, NamedTuple, TypeAlias

from stm_backends.drivers.coalesced import LARGE_BYTES
from stm_backends.drivers.contract import Key
from stm_backends.errors import OutcomeUnknown, Unavailable
from stm_backends_postgres.client import Row
from stm_backends_postgres.errors import NO_CONNECTION, is_refused

IN_FLIGHT: Final = 2
"""Maximum number of concurrent statements; further appends wait, and share the next one."""

MOST: Final = 64
"""Maximum number of appends in one statement, and so of unknown outcomes if its answer is lost."""

MOST_BYTES: Final = 1024 * 1024
"""Maximum size in bytes of the entries in one statement. An entry above `LARGE_BYTES` is sent alone."""


class Append(NamedTuple):
    """One append. `version` is for a record that it creates; `seconds` is the time to live.

    `is_known` says that the record probably exists, and will not expire soon.
    """

    key: Key
    entry: bytes
    version: str
    seconds: float | None
    is_known: bool


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
        self.sent: Sequence[Caller] = ()


class Grouped:
    """Groups appends that wait at the same time; each caller gets the row for its own append.

    `alone` sends one append. `together` gets a connection, then calls the function that it is given for the
    appends to send. It returns a row for each, in order, or `None` for one that the statement left out:
    nothing was done, and its caller sends it alone. After an error by which the server refused the statement,
    all are sent alone, so that each one fails by itself. Any other error reaches all callers.

    An append is sent alone, without a task, if none is in progress or it has no other to share with. At most
    `IN_FLIGHT` statements are in progress, not counting appends sent alone after a statement left them out;
    further appends wait. Once a statement has a connection, it takes waiting appends, at most `MOST` of them
    and `MOST_BYTES`. Appends to one record keep their order, unless they are large or were left out: none is
    sent while a statement with an earlier one is in progress.

    Cancelling a waiting append removes it. Once it is sent, it may be done. The statement is cancelled when
    no caller is left, so the callers' deadline is also its deadline. An append that was not sent within
    `patience_s` seconds raises `Unavailable`.
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
        self._free = IN_FLIGHT
        # The records of appends sent alone, except those that a statement has left out.
        self._lone: set[Key] = set()
        # The waiting appends, with the time until which they wait; oldest first.
        self._waiting: dict[Caller, tuple[Append, float]] = {}
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
        if self._free == IN_FLIGHT and not self._waiting:
            self._begin_alone(one.key)
            return await self._send_alone(one)
        row = await self._wait(one)
        if row is _Alone.NOW:
            return await self._send_alone(one)
        # The record of a left-out append is in use, full, expired or gone; only `alone` can tell.
        return await self._alone(one._replace(is_known=False)) if row is None else row

    async def drain(self, patience_s: float) -> None:
        """Wait at most `patience_s` seconds until the statement of each current append was answered.

        By then, appends that were left out have requested a connection.
        """
        callers = [*self._waiting, *(caller for group in self._groups for caller in group.appends)]
        if callers:
            await asyncio.wait(callers, timeout=patience_s)

    def _begin_alone(self, key: Key) -> None:
        self._free -= 1
        self._lone.add(key)

    async def _send_alone(self, one: Append) -> Row:
        try:
            return await self._alone(one)
        finally:
            self._end_alone(one.key)

    def _end_alone(self, key: Key) -> None:
        self._free += 1
        self._lone.discard(key)
        self._send()

    async def _wait(self, one: Append) -> Row | None | _Alone:
        loop = asyncio.get_running_loop()
        caller: Caller = loop.create_future()
        self._waiting[caller] = one, loop.time() + self._patience_s
        if self._expiring is None:
            self._expiring = loop.call_later(self._patience_s, self._expire)
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
        """Pass on the place of a caller that was cancelled at the moment of its turn."""
        has_answer = caller.done() and not caller.cancelled() and caller.exception() is None
        if has_answer and caller.result() is _Alone.NOW:
            self._end_alone(key)

    def _expire(self) -> None:
        """Fail the appends that have waited too long, and schedule a check for the oldest of the rest."""
        loop = asyncio.get_running_loop()
        self._expiring = None
        for caller, (_, until) in [*self._waiting.items()]:
            if until > loop.time():
                self._expiring = loop.call_at(until, self._expire)
                return
            del self._waiting[caller]
            if not caller.done():
                caller.set_exception(Unavailable(NO_CONNECTION))

    def _send(self) -> None:
        """Handle the waiting appends, once for all that are added in this iteration of the loop."""
        if self._free and self._next is None and self._waiting and not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._begin)

    def _begin(self) -> None:
        """Start one more statement, or let a caller send its append, if one may be sent."""
        self._is_due = False
        if not self._free or self._next is not None:
            return
        busy = self._busy()
        ready = [(caller, one.key) for caller, (one, _) in self._waiting.items() if one.key not in busy]
        if len(ready) == 1:
            ((caller, key),) = ready
            del self._waiting[caller]
            if not caller.done():
                self._begin_alone(key)
                caller.set_result(_Alone.NOW)
            return
        if not ready:
            return
        self._free -= 1
        group = self._next = _Group()
        self._groups.add(group)
        # Not in one caller's context, because its timeouts and traces do not apply to the others.
        group.task = asyncio.get_running_loop().create_task(
            self._run(group), name="stm-postgres-appends", context=contextvars.Context()
        )
        group.task.add_done_callback(functools.partial(self._done, group))

    async def _run(self, group: _Group) -> Sequence[Row | None]:
        group.waited = [*self._waiting]
        return await self._together(functools.partial(self._take, group))

    def _take(self, group: _Group) -> Sequence[Append]:
        """Return the appends of a statement that now has a connection, perhaps not its first."""
        if group is self._next:
            busy, size = self._busy(), 0
            for caller, (one, _) in self._waiting.items():
                if one.key in busy:
                    continue
                size += len(one.entry)
                if len(group.appends) == MOST or (size > MOST_BYTES and group.appends):
                    break
                group.appends[caller] = one
            for caller in group.appends:
                del self._waiting[caller]
            group.keys = frozenset(one.key for one in group.appends.values())
            self._next = None
            self._send()
        group.sent = [*group.appends]
        return [*group.appends.values()]

    def _busy(self) -> set[Key]:
        """Return the records with an append in progress."""
        return self._lone.union(*(group.keys for group in self._groups))

    def _done(self, group: _Group, task: asyncio.Task[Sequence[Row | None]]) -> None:
        self._groups.discard(group)
        self._free += 1
        callers = group.sent
        if group is self._next:  # the group got no connection
            self._next = None
            callers = [caller for caller in group.waited if self._waiting.pop(caller, None) is not None]
        error = OutcomeUnknown("cancelled before the answer came") if task.cancelled() else task.exception()
        if error is None or is_refused(error):
            rows = task.result() if error is None else [None] * len(callers)
            for caller, row in zip(callers, rows, strict=True):
                if not caller.done():
                    caller.set_result(row)
        else:
            for caller in callers:
                if not caller.done():
                    caller.set_exception(error)
        self._send()
