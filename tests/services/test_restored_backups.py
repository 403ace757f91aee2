"""A backup that is restored after an erasure stays unreadable: the data keys are kept elsewhere, and gone."""

from __future__ import annotations

import asyncio
import io
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, closing
from functools import partial
from pathlib import Path
from typing import Any, Literal
from urllib.parse import parse_qs, urlsplit

import pytest

from stm_backends import (
    Backend,
    ConversationTurn,
    Corrupt,
    EnvelopeKeys,
    ExtractiveSummarizer,
    MemoryBudget,
    MemoryKey,
    Sealing,
    ShortTermMemoryConfig,
    open_backend,
)
from stm_backends.drivers import Driver
from stm_backends.sealing.wrapping import LocalWrapping
from tests.support.places import Place, quick_on, without_query

ADA, BOB, EVE = (
    MemoryKey(*ids) for ids in (("acme", "ada", "a"), ("acme", "bob", "b"), ("other", "eve", "e"))
)
CONFIG = ShortTermMemoryConfig("rolling_summary", MemoryBudget(full_zone_turns=2))
WRAPPING = LocalWrapping({"w1": bytes(range(32))}, primary="w1")

Restore = Callable[[], Awaitable[None]]

pytestmark = pytest.mark.parametrize("datastore", quick_on("sqlite", ["sqlite", "redis", "postgres"]))


async def backed_up_sqlite(place: Place) -> Restore:
    """Copy the file, and return what puts the copy in its place."""
    file = Path(place.url.removeprefix("sqlite:///"))
    with closing(sqlite3.connect(file)) as connection:
        connection.execute(f"VACUUM INTO '{file}.backup'")

    def restore() -> None:
        for more in ("-wal", "-shm"):
            Path(f"{file}{more}").unlink(missing_ok=True)
        Path(f"{file}.backup").replace(file)

    return partial(asyncio.to_thread, restore)


async def backed_up_redis(place: Place) -> Restore:
    """Dump all keys, and return what restores them."""
    from redis.asyncio import Redis  # noqa: PLC0415 -- as in `tests/support/places.py`

    prefix = parse_qs(urlsplit(place.url).query)["key_prefix"][0]
    async with Redis.from_url(without_query(place.url)) as client:
        names = [name async for name in client.scan_iter(match=f"{prefix}*")]
        dumps = {name: await client.dump(name) for name in names}
        assert dumps

    async def restore() -> None:
        async with Redis.from_url(without_query(place.url)) as client:
            for name, dump in dumps.items():
                await client.restore(name, 0, dump, replace=True)

    return restore


async def backed_up_postgres(place: Place) -> Restore:
    """Copy all tables out, and return what copies them in again."""
    import asyncpg  # noqa: PLC0415

    schema = parse_qs(urlsplit(place.url).query)["schema"][0]
    tables: dict[str, bytes] = {}
    connection = await asyncpg.connect(without_query(place.url))
    try:
        found = await connection.fetch(
            # Entries refer to records, so they come last.
            "SELECT tablename FROM pg_tables WHERE schemaname = $1 ORDER BY tablename DESC",
            schema,
        )
        for (table,) in found:
            out = io.BytesIO()
            await connection.copy_from_table(table, schema_name=schema, output=out, format="binary")
            tables[table] = out.getvalue()
        assert tables
    finally:
        await connection.close()

    async def restore() -> None:
        connection = await asyncpg.connect(without_query(place.url))
        try:
            names = ", ".join(f'"{schema}"."{table}"' for table in tables)
            await connection.execute(f"TRUNCATE {names}")
            for table, data in tables.items():
                await connection.copy_to_table(
                    table, schema_name=schema, source=io.BytesIO(data), format="binary"
                )
        finally:
            await connection.close()

    return restore


BACKED_UP: dict[str, Callable[[Place], Awaitable[Restore]]] = {
    "sqlite": backed_up_sqlite,
    "redis": backed_up_redis,
    "postgres": backed_up_postgres,
}


@asynccontextmanager
async def opened(place: Place, store: Driver, per: Literal["user", "tenant"]) -> AsyncIterator[Backend]:
    """Open a sealed backend as a new process does: it remembers no key."""
    sealing = Sealing(EnvelopeKeys(store, WRAPPING, per=per))
    async with open_backend(place.url, create=True, sealing=sealing) as backend:
        yield backend


async def shown(backend: Backend, key: MemoryKey) -> str:
    memory = backend.memory(key, CONFIG, summarizer=ExtractiveSummarizer())
    return str(await memory.get_llm_context())


async def refusals(backend: Backend, key: MemoryKey) -> None:
    """Check that every way to read a conversation raises the typed error."""
    reads: list[Callable[[], Awaitable[Any]]] = [
        lambda: shown(backend, key),
        lambda: backend.sessions.export(key),
        lambda: backend.state_store.load_memory_state(key.composite()),
    ]
    for read in reads:
        with pytest.raises(Corrupt, match="a data key that was erased"):
            await read()


@pytest.fixture(params=["user", "tenant"])
def per(request: pytest.FixtureRequest) -> Any:
    return request.param


async def test_a_backup_restored_after_an_erasure_is_unreadable(
    datastore: str, per: Literal["user", "tenant"], place_on: Callable[[str], Place], tmp_path: Path
) -> None:
    place = place_on(datastore)
    async with open_backend(f"sqlite:///{tmp_path}/keys.db") as keys:
        async with opened(place, keys.driver, per) as backend:
            for key in (ADA, BOB, EVE):
                memory = backend.memory(key, CONFIG, summarizer=ExtractiveSummarizer())
                for number in range(6):
                    await memory.add_turn(ConversationTurn(f"{number} rooms in Zanzibar", "Noted."))
                await memory.flush()
                await backend.state_store.save_memory_state(key.composite(), {"place": "Zanzibar"})
        restore = await BACKED_UP[datastore](place)
        async with opened(place, keys.driver, per) as backend:
            if per == "user":
                await backend.sessions.erase_user("acme", "ada")
            else:
                await backend.sessions.erase_tenant("acme")
            assert "Zanzibar" not in await shown(backend, ADA)
        # What is restored is not what the seal protects from: it comes back, but nobody can read it.
        await restore()
        async with opened(place, keys.driver, per) as backend:
            assert [key async for key in backend.sessions.list("acme", "ada")] == [ADA]
            await refusals(backend, ADA)
            if per == "tenant":
                await refusals(backend, BOB)
            else:
                assert "Zanzibar" in await shown(backend, BOB)
            assert "Zanzibar" in await shown(backend, EVE)


async def test_the_same_backup_is_readable_while_the_keys_exist(
    datastore: str, place_on: Callable[[str], Place], tmp_path: Path
) -> None:
    place = place_on(datastore)
    async with open_backend(f"sqlite:///{tmp_path}/keys.db") as keys:
        async with opened(place, keys.driver, "user") as backend:
            memory = backend.memory(ADA, CONFIG, summarizer=ExtractiveSummarizer())
            await memory.add_turn(ConversationTurn("rooms in Zanzibar", "Noted."))
        restore = await BACKED_UP[datastore](place)
        async with opened(place, keys.driver, "user") as backend:
            await backend.sessions.erase(ADA)
        await restore()
        async with opened(place, keys.driver, "user") as backend:
            assert "Zanzibar" in await shown(backend, ADA)


async def test_erasing_a_tenant_erases_the_keys_of_users_who_are_not_listed(
    datastore: str, place_on: Callable[[str], Place], tmp_path: Path
) -> None:
    place = place_on(datastore)
    async with open_backend(f"sqlite:///{tmp_path}/keys.db") as keys:
        async with opened(place, keys.driver, "user") as backend:
            for key in (ADA, EVE):
                memory = backend.memory(key, CONFIG, summarizer=ExtractiveSummarizer())
                await memory.add_turn(ConversationTurn("rooms in Zanzibar", "Noted."))
        restore = await BACKED_UP[datastore](place)
        async with opened(place, keys.driver, "user") as backend:
            await backend.sessions.erase(ADA)
            receipt = await backend.sessions.erase_with_receipt("acme")
            assert receipt.erased == {"data_keys": 2}, "of the user, and of the tenant"
        await restore()
        async with opened(place, keys.driver, "user") as backend:
            with pytest.raises(Corrupt, match="a data key that was erased"):
                await shown(backend, ADA)
            assert "Zanzibar" in await shown(backend, EVE)
