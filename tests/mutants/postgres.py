"""The PostgreSQL driver, its connections and its grouped appends, with one deliberate fault each.

`test_connections.py`, `test_grouped.py` and `test_standby.py` in `tests/services/postgres` kill each of them
by a named test.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, ClassVar, TypeVar
from unittest import mock

from asyncpg import exceptions  # pyright: ignore[reportMissingTypeStubs] -- it has none

from stm_backends.drivers.coalesced import LoadKey
from stm_backends.drivers.contract import Key
from stm_backends.errors import OutcomeUnknown
from stm_backends_postgres.client import Connection, HandedIn, Lender
from stm_backends_postgres.connections import Connections
from stm_backends_postgres.driver import PostgresDriver
from stm_backends_postgres.grouped import Append, Caller, Grouped

T = TypeVar("T")


class LendsToTwo(Connections):
    """Lends the connection that was used last, whether or not it is still in use."""

    async def take(self, until: float = math.inf) -> Connection:
        return next(iter(self._opened), None) or await super().take(until)


class ReusesWhatWasCancelled(Connections):
    """Lends a connection again while the answer of a cancelled operation is still on its way."""

    def give_up(self, connection: Connection, error: BaseException) -> None:
        self._reuse(connection)


class KeepsTheOthers(Connections):
    """Replaces a connection that was dropped silently, and lends others that were dropped with it."""

    def _expire(self, opened_by: float) -> None:
        pass


class ReplacesTheHealthy(Connections):
    """Replaces all connections each time that one proves to be dead, also those that were opened since."""

    def _expire(self, opened_by: float) -> None:
        super()._expire(self.loop.time())


class CountsTheDeadTwice(Connections):
    """Takes the end of a connection that is to be replaced for a sign that later ones are dead, too."""

    async def _check(self, connection: Connection) -> None:
        self._opened[connection] = self.loop.time()
        await super()._check(connection)


class FailsWhatWaits(Connections):
    """Fails the operations that wait if no further connection can be opened."""

    def _refuse(self, error: BaseException) -> None:
        self._waiting.fail(lambda: error)


class NeverGrows(Connections):
    """Opens no further connection after that failed once."""

    def _refuse(self, error: BaseException) -> None:
        super()._refuse(error)
        self._grow_at = math.inf


class RaisesWhatThePoolRaises(HandedIn):
    """Fails operations if the pool cannot grow, although its connections are free in a moment."""

    async def take(self, until: float = math.inf) -> Connection:
        return await self._pool.acquire(timeout=self._patience_s)


class LendsOneToAll(HandedIn):
    """Lets every operation ask for the connection that is idle, so that all but one open another."""

    def _is_one_idle(self) -> bool:
        return self._grow_at == -math.inf or self._pool.get_idle_size() > 0


class RetriesLostWrites(PostgresDriver):
    """Sends a statement again if the connection was lost, although the server may have done it."""

    async def _borrow(
        self, operation: str, send: Callable[[Connection], Awaitable[T]], *, until: float = math.inf
    ) -> T:
        try:
            return await super()._borrow(operation, send, until=until)
        except exceptions.ConnectionDoesNotExistError:
            return await super()._borrow(operation, send, until=until)


class AnswersInOrder(PostgresDriver):
    """Gives the records that a shared statement found to its callers in order, as if none were missing."""

    async def _find(self, wanted: Sequence[LoadKey]) -> dict[LoadKey, Any]:
        return dict(zip(wanted, (await super()._find(wanted)).values(), strict=False))


class ReadsAlikeForAll(PostgresDriver):
    """Reads as many entries of each record as the first of several loads wants."""

    async def _find(self, wanted: Sequence[LoadKey]) -> dict[LoadKey, Any]:
        alike = [LoadKey(one.key, wanted[0].last) for one in wanted]
        found = await super()._find(alike)
        return {one: found[like] for one, like in zip(wanted, alike, strict=True) if like in found}


class ForgetsItsStandby(PostgresDriver):
    """Acknowledges a write although the server gave up to wait for the standby."""

    async def _use(
        self, lender: Lender, operation: str, send: Callable[[Connection], Awaitable[T]], until: float
    ) -> T:
        answers = list[T]()

        async def noted(connection: Connection) -> T:
            answers.append(await send(connection))
            return answers[0]

        try:
            return await super()._use(lender, operation, noted, until)
        except OutcomeUnknown:
            return answers[0]


class DeletesNothingWithoutItsStandby(PostgresDriver):
    """Writes nothing if there is nothing to delete, so that a retry waits for nothing."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        here = self._statements
        here.delete, _, _ = here.delete.partition("UNION ALL")


class ForgetsWhatIsUnderWay(Grouped):
    """Sends an append to a record while another statement appends to it."""

    def _busy(self) -> set[Key]:
        return set()


class KeepsThePlaceOfTheGone(Grouped):
    """Keeps a place for a caller that was cancelled when it was its turn, so nothing else is sent."""

    def _leave_turn(self, caller: Caller, key: Key) -> None:
        pass


class KeepsThePlaceOfTheSlow(Grouped):
    """Keeps the place of a statement that does not end, so that two of them stop all other appends."""

    def _free_place(self) -> None:
        pass


class SendsForNobody(Grouped):
    """Sends appends whose callers have given up, and lets a statement go on that has no caller any more."""

    def _leave(self, caller: Caller) -> None:
        pass

    def _ready(self) -> Iterator[tuple[Caller, Append]]:
        busy = self._busy()
        return ((caller, one) for caller, one in self._waiting.items() if one.key not in busy)


class SendsAgainWhatWasLost(Grouped):
    """Takes a lost connection for a refusal, and sends each append again, although it may have been done."""

    _is_refused: ClassVar = True

    def _done(self, group: Any, task: asyncio.Task[Any]) -> None:
        with mock.patch("stm_backends_postgres.grouped.is_refused", return_value=self._is_refused):
            super()._done(group, task)


class FailsWithTheRefused(SendsAgainWhatWasLost):
    """Fails all appends of a statement that the server refused because of one of them."""

    _is_refused: ClassVar = False


class AnswersInPlaceOfOthers(Grouped):
    """Gives the rows of a statement to its callers in another order."""

    def _done(self, group: Any, task: asyncio.Task[Any]) -> None:
        group.sent = [*reversed(group.sent)]
        super()._done(group, task)


class ClosesOnAppends(PostgresDriver):
    """Closes without waiting for appends that share statements."""

    async def _end(self) -> None:
        with mock.patch.object(self._groups, "drain"):
            await super()._end()


class StaysOpenIfCancelled(PostgresDriver):
    """Leaves its connections open if a close is cancelled while it waits for appends."""

    async def _end(self) -> None:
        await self._groups.drain(self._settings.deadline_s)
        await super()._end()


class AlteredAppends(PostgresDriver):
    """A driver whose shared statement lacks a part."""

    part: ClassVar[str]

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        here = self._statements
        before, here.append_many = here.append_many, here.append_many.replace(self.part, "")
        assert here.append_many != before


class WaitsForLocks(AlteredAppends):
    """Waits for a record that someone else has locked, with the appends to all others."""

    part = " SKIP LOCKED"


class CreatesAsItComes(AlteredAppends):
    """Creates records in the order of the appends, so two statements may wait for each other."""

    part = 'ORDER BY in_scope COLLATE "C", named COLLATE "C"'


class OverfillsRecords(AlteredAppends):
    """Appends to a record that has no room for it."""

    part = "AND size + bytes <= $12"


class AppendsToTheExpired(AlteredAppends):
    """Appends to a record that has expired, as if it were there."""

    part = "AND (expires IS NULL OR expires > clock_timestamp())"
