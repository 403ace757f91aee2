"""MongoDB drivers with a fault in what concurrent callers share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stm_backends.drivers.contract import Key
from stm_backends_mongo.driver import MongoDriver


class AnswersInTheOrderAsked(MongoDriver):
    """Assigns the documents of a shared find to the keys by position; absent records have no document."""

    async def _fetch(self, keys: Sequence[Key]) -> dict[Key, dict[str, Any]]:
        return dict(zip(keys, (await super()._fetch(keys)).values(), strict=False))


class OneBadDocumentFailsAll(MongoDriver):
    """Checks the documents where they are shared, so that a damaged one fails the loads of others."""

    async def _fetch(self, keys: Sequence[Key]) -> dict[Key, dict[str, Any]]:
        found = await super()._fetch(keys)
        for one in found.values():
            self._record_of(one)
        return found


class WritesTwice(MongoDriver):
    """Sends each update again although it was acknowledged."""

    async def _write(self, *given: Any, **named: Any) -> dict[str, Any] | None:
        await super()._write(*given, **named)
        return await super()._write(*given, **named)
