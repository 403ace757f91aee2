"""Retention on each datastore: `purge`, `expire` and `import --ttl` as a user calls them."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from stm_backends import Backend, ConversationTurn, MemoryKey, ShortTermMemoryConfig, open_backend
from stm_backends.drivers.contract import Key, Record
from stm_backends.records import keys
from stm_backends.testing.workbench.drivers import names_in
from tests.support.command_line import cli
from tests.support.places import EACH, Place, quick_on

PlaceOn = Callable[[str], Place]

DAY = 86_400.0
TTL_S = 3.0

pytestmark = pytest.mark.parametrize("datastore", quick_on("redis", ["sqlite", *EACH]))


def config(ttl: float | None = None) -> ShortTermMemoryConfig:
    return ShortTermMemoryConfig("truncation", session_ttl_s=ttl)


async def fill(backend: Backend, *, days: int, sessions: int = 3, ttl: float | None = None) -> None:
    for number in range(sessions):
        memory = backend.memory(MemoryKey("acme", "u1", f"{days} days, {number}"), config(ttl))
        for question in range(3):
            turn = ConversationTurn(f"question {question}", "answer", ts=time.time() - days * DAY)
            await memory.add_turn(turn)


async def everything(backend: Backend) -> dict[Key, Record | None]:
    """Return all records of the tenant."""
    driver = backend.driver.inner
    scopes = [keys.directory_scope("acme"), *(keys.scope("acme", "u1", kind) for kind in keys.KINDS)]
    found = [Key(scope, name) for scope in scopes for name in await names_in(driver, scope)]
    return {key: await driver.load(key) for key in found}


async def questions(backend: Backend) -> list[int]:
    """Return how many turns each conversation has that has not expired yet."""
    found = [key async for key in backend.sessions.list("acme", "u1")]
    records = [await backend.driver.load(keys.memory_key(key)) for key in found]
    return [len(record.tail) for record in records if record is not None]


async def test_purge_removes_what_is_old_and_keeps_the_rest(
    datastore: str, place_on: PlaceOn, tmp_path: Path
) -> None:
    place, report = place_on(datastore), tmp_path / "report.json"
    options = ("--tenant", "acme", "--older-than", "90d", "--url", place.url)
    async with open_backend(place.url, create=True) as backend:
        await fill(backend, days=100)
        await fill(backend, days=80)
        await backend.item_log(MemoryKey("acme", "u1", "log"), "langchain").add([{"text": "hello"}])
        large = ConversationTurn("x" * 3_000_000, "answer", ts=time.time() - 100 * DAY)
        await backend.memory(MemoryKey("acme", "u1", "large"), config()).add_turn(large)
    # Closing has written to the catalogue what was to be written.
    async with open_backend(place.url) as backend:
        before = await everything(backend)

        dry = cli("purge", *options, "--dry-run", "-v", "--json", report)

        assert dry.returncode == 0, dry.stderr
        assert await everything(backend) == before
        counts = json.loads(report.read_text())
        assert (counts["conversations"], counts["kept"], counts["dry_run"]) == (4, 4, True)
        # Several are judged at once, so they are told in no order.
        old = [*(f"acme:u1:100%20days,%20{number}" for number in range(3)), "acme:u1:large"]
        assert sorted(dry.stdout.splitlines()[:4]) == old

        done = cli("purge", *options)

        assert done.returncode == 0, done.stderr
        assert "Removed: 4 old conversations\nKept: 4 newer\n" in done.stdout
        assert await questions(backend) == [0, 0, 0, 3, 3, 3, 0]
        assert await backend.item_log(MemoryKey("acme", "u1", "log"), "langchain").items()
        assert str(await everything(backend)).count("question") == 12, "9 turns, and 3 cards"
        memory = backend.memory(MemoryKey("acme", "u1", "100 days, 0"), config())
        await memory.add_turn(ConversationTurn("again", "answer", ts=time.time()))
        again = cli("purge", *options)
        assert "Removed: nothing\nKept: 5 newer, 3 emptied by an earlier purge" in again.stdout
        assert await questions(backend) == [1, 0, 0, 3, 3, 3, 0]


async def test_an_emptied_record_expires_unless_a_turn_is_added(datastore: str, place_on: PlaceOn) -> None:
    place = place_on(datastore)
    async with open_backend(place.url, create=True) as backend:
        await fill(backend, days=1, sessions=2)
        purged = await backend.sessions.purge("acme", "u1", older_than=TTL_S)
        assert purged.conversations == 2
        memory = backend.memory(MemoryKey("acme", "u1", "1 days, 1"), config())
        await memory.add_turn(ConversationTurn("again", "answer"))
        until = time.monotonic() + 60
        while len(await questions(backend)) > 1:
            assert time.monotonic() < until, "the emptied record did not expire"
            await asyncio.sleep(0.1)
        assert await questions(backend) == [1]


async def test_expire_and_import_set_a_time_to_live_and_keep_content(
    datastore: str, place_on: PlaceOn, tmp_path: Path
) -> None:
    place, file = place_on(datastore), tmp_path / "out.jsonl"
    async with open_backend(place.url, create=True) as backend:
        await fill(backend, days=1, sessions=2)
        before = [key async for key in backend.sessions.list("acme", "u1")]
        exported = [await backend.sessions.export(key) for key in before]

        done = cli("expire", "--ttl", "1h", "--tenant", "acme", "--url", place.url)

        assert done.returncode == 0, done.stderr
        assert done.stdout == "Expire in 1h: 2 conversations\n"
        assert [await backend.sessions.export(key) for key in before] == exported
        assert (await backend.sessions.expire("acme", ttl=TTL_S)).conversations == 2
        until = time.monotonic() + 60
        while await questions(backend):
            assert time.monotonic() < until, "the conversations did not expire"
            await asyncio.sleep(0.1)

        file.write_text("".join(json.dumps(document) + "\n" for document in exported))
        assert cli("import", file, "--ttl", f"{TTL_S}s", "--url", place.url).returncode == 0
        while await questions(backend):
            assert time.monotonic() < until, "the imported conversations did not expire"
            await asyncio.sleep(0.1)


@pytest.mark.usefixtures("writes_purge_nothing")
async def test_expired_records_that_the_datastore_keeps_are_purged(datastore: str, place_on: PlaceOn) -> None:
    place = place_on(datastore)
    async with open_backend(place.url, create=True) as backend:
        await fill(backend, days=0, ttl=1.0)
        until = time.monotonic() + 60
        while await questions(backend):
            assert time.monotonic() < until, "the conversations did not expire"
            await asyncio.sleep(0.1)
        done = cli("purge", "--url", place.url)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("Removed: ")
        assert cli("purge", "--url", place.url).stdout == "Removed: nothing\n"
        assert (await backend.sessions.purge(dry_run=True)).expired == 0
