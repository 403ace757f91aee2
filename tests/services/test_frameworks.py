"""What frameworks keep, and what telemetry hears, on each datastore: a round of everything."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from stm_backends import (
    Backend,
    ConversationTurn,
    MemoryBudget,
    MemoryKey,
    ShortTermMemoryConfig,
    open_backend,
)
from stm_backends.history.log import TOLERATED_WASTE
from tests.support.places import EACH, Place

PlaceOn = Callable[[str], Place]

KEY = MemoryKey("acme:co", "MARKER é", "MARKER/1")
ROLLING = ShortTermMemoryConfig(strategy="rolling_summary", budget=MemoryBudget(full_zone_turns=1))


async def texts(backend: Backend) -> list[str]:
    return [item["text"] for item in await backend.item_log(KEY, "langchain").items()]


@pytest.mark.parametrize("datastore", EACH)
async def test_a_log_of_items_is_added_to_removed_from_folded_copied_and_erased(
    datastore: str, place_on: PlaceOn
) -> None:
    async with open_backend(place_on(datastore).url, create=True) as backend:
        log = backend.item_log(KEY, "langchain")
        await log.add([{"text": "é \0"}, {"text": "kept"}])
        for number in range(TOLERATED_WASTE):
            await log.add([{"text": str(number)}])
            assert await log.pop() == {"text": str(number)}
        removed = await asyncio.gather(*(log.pop() for _ in range(3)))
        assert sorted(item["text"] for item in removed if item) == ["kept", "é \0"]
        assert await log.items() == []
        await log.add([{"text": "again"}])
        assert await texts(backend) == ["again"]
        # The other framework's log is another, and both go with the user.
        await backend.item_log(KEY, "openai-agents").add([{"text": "other"}])
        assert await texts(backend) == ["again"]
        assert await backend.sessions.erase_tenant(KEY.tenant_id) == 2
        assert await texts(backend) == []


@pytest.mark.parametrize(
    ("datastore", "system"),
    [("redis", "redis"), ("postgres", "postgresql"), ("mongo", "mongodb"), ("dynamo", "aws.dynamodb")],
)
async def test_each_operation_is_heard_under_the_datastores_name_and_no_id_is(
    datastore: str, system: str, place_on: PlaceOn
) -> None:
    pytest.importorskip("opentelemetry.sdk")
    from tests.support.telemetry import Ear  # noqa: PLC0415 -- needs the SDK

    async def summarize(_: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"summary": "MARKER"}

    ear = Ear()
    async with open_backend(place_on(datastore).url, create=True, observer=ear.telemetry) as backend:
        memory = backend.memory(KEY, ROLLING, summarizer=summarize)
        for _ in range(2):
            await memory.add_turn(ConversationTurn("MARKER", "MARKER"))
        await memory.flush()
        await memory.get_llm_context()
        log = backend.item_log(KEY, "langchain")
        await log.add([{"text": "MARKER"}])
        await log.pop()
        await backend.sessions.erase_tenant(KEY.tenant_id)
    heard = {
        (attributes["db.system.name"], attributes["db.operation.name"], attributes.get("error.type"))
        for attributes, _ in ear.points()["db.client.operation.duration"]
    }
    assert heard == {(system, name, None) for name in ("load", "append", "replace", "delete", "scan")}
    assert ear.points()["stm.turns.appended"] == [({}, 2)]
    assert ear.points()["stm.turns.folded"] == [({}, 1)]
    assert "MARKER" not in ear.exported()
