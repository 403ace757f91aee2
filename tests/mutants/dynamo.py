"""DynamoDB drivers with a fault in what concurrent callers share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stm_backends.drivers.contract import Key
from stm_backends_dynamo.driver import DynamoDriver
from stm_backends_dynamo.items import Item


class AnswersInTheOrderAsked(DynamoDriver):
    """Assigns the heads of a shared request to the keys by position, though they come in any order."""

    async def _fetch(self, client: Any, keys: Sequence[Key]) -> dict[Key, Item]:
        heads = await super()._fetch(client, keys)
        return dict(zip(keys, sorted(heads.values(), key=len, reverse=True), strict=False))


class UnreadIsAbsent(DynamoDriver):
    """Takes a key that the server did not get to for one without a record."""

    async def _fetch(self, client: Any, keys: Sequence[Key]) -> dict[Key, Item]:
        return {key: {} for key in keys} | await super()._fetch(client, keys)


class AppendsTwice(DynamoDriver):
    """Sends each append again although it was acknowledged."""

    async def _append(self, *given: Any) -> int:
        await super()._append(*given)
        return await super()._append(*given)
