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
    "datastore",
    [
        *("redis", "postgres"),
        *(pytest.param(name, marks=pytest.mark.full) for name in ("sqlite", "mongo", "dynamo")),
    ],
)
async def test_a_long_log_that_two_fill_is_read_whole_removed_from_and_erased(
    datastore: str, place_on: PlaceOn
) -> None:
    url = place_on(datastore).url
    async with open_backend(url, create=True) as one, open_backend(url) as two:
        logs = [backend.item_log(KEY, "langchain") for backend in (one, two)]

        async def fill(writer: int) -> None:
            for number in range(200):
                await logs[writer].add([{"text": f"{writer} {number}"}])

        await asyncio.gather(fill(0), fill(1))
        everything = await texts(one)
        assert [text for text in everything if text[0] == "0"] == [f"0 {number}" for number in range(200)]
        assert [text for text in everything if text[0] == "1"] == [f"1 {number}" for number in range(200)]
        assert [item["text"] for item in await logs[1].items(20)] == everything[-20:]
        page = await logs[1].transcript(before=150, limit=50)
        assert [one.item["text"] for one in page.items] == everything[100:150]
        assert not any(one.retained for one in page.items)
        popped = [await logs[number % 2].pop() for number in range(150)]
        assert [item["text"] for item in popped if item] == everything[:-151:-1]
        await logs[0].add([{"text": "again"}])
        assert await texts(two) == [*everything[:-150], "again"]
        receipt = await one.sessions.erase_with_receipt(KEY.tenant_id)
        assert receipt.complete
        assert receipt.erased["pages"] >= 5
        assert await texts(two) == []


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
