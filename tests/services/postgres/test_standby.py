"""A synchronous standby that does not answer: no write is acknowledged that the primary alone has."""

from __future__ import annotations

import asyncio
import uuid

import asyncpg
import pytest

from stm_backends import ConversationTurn, MemoryKey, ShortTermMemoryConfig, open_backend
from stm_backends.drivers.contract import ABSENT, ANY, Key
from stm_backends.errors import OutcomeUnknown
from stm_backends.testing import open_at
from stm_backends_postgres import PostgresSettings
from stm_backends_postgres.driver import PostgresDriver
from tests.mutants.postgres import DeletesNothingWithoutItsStandby, ForgetsItsStandby
from tests.services.postgres.support import run, started, until
from tests.support.postgresql import Postgres

WAITING = "FROM pg_stat_activity WHERE wait_event = 'SyncRep'"


@pytest.fixture(scope="module")
def pair(postgres_binaries, postgres_folder):
    """A primary with the tables, and a standby that each commit waits for."""
    primary = Postgres(postgres_binaries, postgres_folder / uuid.uuid4().hex, durable=False)
    primary.start()
    standby = Postgres(postgres_binaries, postgres_folder / uuid.uuid4().hex, durable=False, of=primary)
    standby.start()

    async def join():
        await (await open_at(primary.url, create=True)).close()
        admin = await asyncpg.connect(primary.url)
        await admin.execute("ALTER SYSTEM SET synchronous_standby_names = '*'")
        await admin.execute("SELECT pg_reload_conf()")
        joined = "SELECT count(*) FROM pg_stat_replication WHERE sync_state = 'sync'"
        await until(lambda: admin.fetchval(joined))
        await admin.close()

    run(join())
    yield primary, standby
    standby.kill()
    primary.kill()


@pytest.fixture
def key():
    """A key of the test's own."""
    return Key("scope", uuid.uuid4().hex)


async def outcome_of(write, primary, end="pg_cancel_backend"):
    """Have an administrator end a write that waits for the standby; return its answer or its error."""
    task, admin = asyncio.ensure_future(write), await asyncpg.connect(primary.url)
    while not task.done():
        await admin.fetch(f"SELECT {end}(pid) {WAITING}")
        await asyncio.wait({task}, timeout=0.05)
    await admin.close()
    return task.exception() or task.result()


async def nothing_is_acknowledged_too_early(pair, key, kind=PostgresDriver, *, pool=None):
    primary, standby = pair
    settings = PostgresSettings(dsn="" if pool else primary.url, deadline_s=60)
    driver = kind(settings, client=pool)
    await driver.open()
    other, absent = (Key(key.scope, f"{key.name} {name}") for name in ("other", "absent"))
    for entry in (b"a", b"b"):
        await driver.append(key, entry, initial_version="v", ttl=None)
    await driver.replace(other, b"a", version="v", expect=ANY, ttl=None)
    writes = (
        lambda: driver.append(key, b"c", initial_version="v", ttl=None),
        lambda: driver.replace(key, b"", version="w", expect="v", drop=2, ttl=None),
        lambda: driver.replace(key, b"", version="r", expect="w", rewrite=(b"B",), ttl=None),
        lambda: driver.replace(other, b"b", version="w", expect=ANY, ttl=None),
        lambda: driver.replace(absent, b"b", version="w", expect=ABSENT, ttl=None),
        lambda: driver.delete(other),
    )
    standby.pause()
    try:
        for write in writes:
            # The second time, all is done already, and the standby has still not heard of it.
            for _ in range(2):
                outcome = await outcome_of(write(), primary)
                assert isinstance(outcome, OutcomeUnknown), "acknowledged too early"
                assert "wait for a synchronous standby was cancelled" in str(outcome)
        outcome = await outcome_of(writes[0](), primary, "pg_terminate_backend")
        assert isinstance(outcome, OutcomeUnknown)
    finally:
        standby.go_on()
        await driver.close()
    driver = kind(settings, client=pool)
    await driver.open()
    assert await driver.delete(other) is False
    record = await driver.load(key)
    assert (record.version, record.tail[0]) == ("r", b"B")
    await driver.close()


async def test_what_the_primary_alone_has_is_not_acknowledged(pair, key):
    await nothing_is_acknowledged_too_early(pair, key)


async def shared_appends_are_not_acknowledged_too_early(pair, key, kind=PostgresDriver):
    primary, standby = pair
    driver = kind(PostgresSettings(dsn=primary.url, deadline_s=60))
    await driver.open()
    keys = [Key(key.scope, f"{key.name} {number}") for number in range(8)]
    try:
        standby.pause()
        try:
            appends = [driver.append(one, b"a", initial_version="v", ttl=None) for one in keys]
            tasks = await started(driver, *appends)
            await outcome_of(asyncio.gather(*tasks, return_exceptions=True), primary)
        finally:
            standby.go_on()
        outcomes = [task.exception() for task in tasks]
        assert {type(outcome) for outcome in outcomes} == {OutcomeUnknown}, "acknowledged too early"
        assert "wait for a synchronous standby was cancelled" in str(outcomes[-1])
        assert [await driver.append(one, b"b", initial_version="v", ttl=None) for one in keys] == [2] * 8
    finally:
        await driver.close()


async def test_nor_is_an_append_that_shares_its_statement(pair, key):
    await shared_appends_are_not_acknowledged_too_early(pair, key)


async def test_nor_is_it_on_a_pool_that_was_handed_in(pair, key, recwarn):
    async with asyncpg.create_pool(pair[0].url, min_size=0) as pool:
        await nothing_is_acknowledged_too_early(pair, key, pool=pool)
    assert not [one for one in recwarn if "listener" in str(one.message)]


async def test_nor_is_a_repeated_turn_that_the_primary_shows(pair):
    primary, standby = pair
    config, turn = ShortTermMemoryConfig(strategy="truncation"), ConversationTurn("question", "answer")
    async with open_backend(primary.url, deadline_s=60) as backend:
        memory = backend.memory(MemoryKey("acme", "u1", uuid.uuid4().hex), config)
        await memory.add_turn(ConversationTurn("before", "answer"))
        standby.pause()
        try:
            for _ in range(2):
                outcome = await outcome_of(memory.add_turn(turn, turn_id="one"), primary)
                assert isinstance(outcome, OutcomeUnknown), "acknowledged too early"
                assert len(await memory.turns()) == 2
        finally:
            standby.go_on()
        await memory.add_turn(turn, turn_id="one")
        assert len(await memory.turns()) == 2


@pytest.mark.parametrize("mutant", [ForgetsItsStandby, DeletesNothingWithoutItsStandby])
async def test_a_driver_that_does_not_wait_for_its_standby_is_found(mutant, pair, key):
    with pytest.raises(AssertionError, match="acknowledged too early"):
        await nothing_is_acknowledged_too_early(pair, key, mutant)


async def test_a_driver_that_forgets_its_standby_after_shared_appends_is_found(pair, key):
    with pytest.raises(AssertionError, match="acknowledged too early"):
        await shared_appends_are_not_acknowledged_too_early(pair, key, ForgetsItsStandby)
