"""MongoDB drivers with a fault in what concurrent callers share."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from stm_backends.drivers.coalesced import LoadKey
from stm_backends.drivers.contract import Key
from stm_backends_mongo.calls import Calls
from stm_backends_mongo.driver import MongoDriver

T = TypeVar("T")


class AnswersInTheOrderAsked(MongoDriver):
    """Assigns the documents of a shared find to the keys by position; absent records have no document."""

    async def _fetch(self, wanted: Sequence[LoadKey]) -> dict[LoadKey, dict[str, Any]]:
        return dict(zip(wanted, (await super()._fetch(wanted)).values(), strict=False))


class ReadsForTheFirst(MongoDriver):
    """Reads as many entries of a record as the first of several loads wants."""

    async def _fetch(self, wanted: Sequence[LoadKey]) -> dict[LoadKey, dict[str, Any]]:
        first = {one.key: one for one in reversed(wanted)}
        found = await super()._fetch([*first.values()])
        return {one: found[first[one.key]] for one in wanted if first[one.key] in found}


class OneBadDocumentFailsAll(MongoDriver):
    """Checks the documents where they are shared, so that a damaged one fails the loads of others."""

    async def _fetch(self, wanted: Sequence[LoadKey]) -> dict[LoadKey, dict[str, Any]]:
        found = await super()._fetch(wanted)
        for one in found.values():
            self._record_of(one)
        return found


class WritesTwice(MongoDriver):
    """Sends each update again although it was acknowledged."""

    async def _write(self, *given: Any, **named: Any) -> dict[str, Any] | None:
        await super()._write(*given, **named)
        return await super()._write(*given, **named)


class EndsTheTurnOfCancelledWrites(MongoDriver):
    """Sends the next write to a record while a cancelled one is on its way, which may then be done last."""

    async def _in_turn(self, key: Key, send: Callable[[], Awaitable[T]]) -> T:
        async with self._turns.turn(key):
            return await self._calls.run(send())


class CancelsItsCalls(MongoDriver):
    """Passes each cancellation of an operation on to the client, also while the client ends a wait."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._calls = _Direct()


class _Direct(Calls):
    async def run(self, call: Awaitable[T]) -> T:
        return await call
