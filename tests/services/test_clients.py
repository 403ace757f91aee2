"""The named classes work on a client of the caller's own, which stays open."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from stm_backends import ConversationTurn, MemoryKey, ShortTermMemoryConfig, open_backend
from stm_backends_dynamo import DynamoSettings
from stm_backends_mongo import MongoSettings
from stm_backends_postgres import PostgresSettings
from tests.services.test_alike import NAMES, package
from tests.support.places import EACH, Place, without_query

KEY = MemoryKey("acme", "u1", "chat")
CONFIG = ShortTermMemoryConfig(strategy="truncation")


@contextlib.asynccontextmanager
async def client_of(datastore: str, place: Place) -> AsyncIterator[tuple[Any, dict[str, Any]]]:
    """Yield a client as a program might have it, and the settings that name the place."""
    if datastore == "redis":
        from redis.asyncio import Redis  # noqa: PLC0415 -- each library is needed for its datastore alone

        async with Redis.from_url(without_query(place.url), decode_responses=True) as client:
            yield client, {"key_prefix": place.url.rpartition("key_prefix=")[2]}
    elif datastore == "postgres":
        import asyncpg  # noqa: PLC0415

        settings = PostgresSettings.from_url(place.url)
        async with asyncpg.create_pool(settings.dsn, min_size=1) as client:
            yield client, {"schema": settings.schema}
    elif datastore == "mongo":
        import bson  # noqa: PLC0415
        import pymongo  # noqa: PLC0415

        settings = MongoSettings.from_url(place.url)
        options = {"document_class": bson.SON, "retryWrites": True}
        async with pymongo.AsyncMongoClient(settings.url, **options) as client:
            yield client, {"database": settings.database}
    else:
        import boto3  # noqa: PLC0415

        settings = DynamoSettings.from_url(place.url)
        where = {"region_name": settings.region, "endpoint_url": settings.endpoint_url}
        with contextlib.closing(boto3.client("dynamodb", **where)) as client:
            yield client, {"table": settings.table}


@pytest.mark.parametrize("datastore", EACH)
async def test_the_named_classes_work_on_a_client_that_they_leave_open(
    datastore: str, place_on: Callable[[str], Place]
) -> None:
    memory_of, store_on = (
        getattr(package(datastore), f"{NAMES[datastore]}{kind}") for kind in ("ShortTermMemory", "StateStore")
    )
    place = place_on(datastore)
    async with open_backend(place.url, create=True):
        pass
    async with client_of(datastore, place) as (client, where):
        for number in range(2):
            memory = memory_of(client, CONFIG, key=KEY, **where)
            await memory.add_turn(ConversationTurn(f"hello {number}", "hi"))
            other = memory_of(client, CONFIG, key=KEY, deadline_s=2.0, **where)
            said = [turn.user_message for turn in await other.turns()]
            assert said == [f"hello {one}" for one in range(number + 1)]
            for one in (memory, other):
                await one.close()
        await store_on(client, **where).save_memory_state("any key", {"a": [1, None]})
        assert await store_on(client, **where).load_memory_state("any key") == {"a": [1, None]}
