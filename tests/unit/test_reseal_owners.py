"""Resealing a tenant or a user: afterwards no record of any kind needs the old key."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable
from typing import Any, ClassVar

import pytest

from stm_backends import (
    Backend,
    ConfigurationError,
    ConversationTurn,
    Corrupt,
    EnvelopeKeys,
    ExtractiveSummarizer,
    MemoryBudget,
    MemoryKey,
    Sealing,
    ShortTermMemoryConfig,
    StaticKeys,
    TooLarge,
    Unavailable,
    open_backend,
)
from stm_backends.admin.copying import UNOWNED, Owner
from stm_backends.admin.resealing import OnProblem, Problem, ResealReport
from stm_backends.catalogue.portions import Logged, Portion
from stm_backends.catalogue.word_index import WordIndex
from stm_backends.drivers.contract import Key
from stm_backends.drivers.in_memory import MemoryDriver, MemoryStore
from stm_backends.records.keys import KINDS, LOG_KINDS, PAUSED_RUNS, log_key, memory_key, scope
from stm_backends.sealing.cipher import MAGIC, key_id_of
from stm_backends.sealing.keys import Owner as KeyOwner
from stm_backends.sealing.wrapping import LocalWrapping
from stm_backends.sync import Backend as SyncBackend
from stm_backends.tiers.backend_graph import BackendGraph

OLD, NEW = bytes(range(32)), bytes(range(32, 64))
BEFORE = Sealing(StaticKeys({"k1": OLD}, primary="k1"))
ROTATED = Sealing(StaticKeys({"k1": OLD, "k2": NEW}, primary="k2"))
AFTER = Sealing(StaticKeys({"k2": NEW}, primary="k2"))
CONFIG = ShortTermMemoryConfig("rolling_summary", MemoryBudget(full_zone_turns=2), transcript=True)
USERS = ("ada", "b:ob")
LARGE = "Zanzibar " * 4_000

DEFAULT = Owner("default")
"""The tenant of paused runs that name none."""


class World:
    """One datastore in memory, with small records, and the backends that share it."""

    def __init__(self, *, max_entry: int = 12_000) -> None:
        self.store = MemoryStore()
        self._max_entry = max_entry

    def raw(self) -> MemoryDriver:
        return MemoryDriver(self.store, max_entry_bytes=self._max_entry, max_record_bytes=50_000)

    def backend(self, sealing: Sealing | None) -> Backend:
        return Backend(self.raw(), sealing=sealing)

    async def key_ids(self) -> dict[str, set[str | None]]:
        """Return the ids of the keys that stored values need, by scope."""
        found: dict[str, set[str | None]] = {}
        async with self.backend(None) as backend:
            raw = backend.driver.inner
            for place in self.places():
                record = await raw.load(place)
                if record is not None and not place.scope.endswith("::seal"):
                    body = [] if record.body is None else [record.body.replace(b"absent", b"sealed", 1)]
                    found.setdefault(place.scope, set()).update(
                        key_id_of(value) for value in [*body, *record.tail]
                    )
        return found

    def places(self) -> list[Key]:
        """Return the keys of all records."""
        return [Key(scope, name) for scope, records in self.store.scopes.items() for name in records.records]


async def fill(backend: Backend, tenant: str = "acme") -> None:
    """Store records of every kind for two users, and some that no user owns."""
    for user in USERS:
        for session in ("one", "two"):
            memory = backend.memory(
                MemoryKey(tenant, user, session), CONFIG, summarizer=ExtractiveSummarizer()
            )
            for number in range(4):
                await memory.add_turn(
                    ConversationTurn(f"{number} in Zanzibar", LARGE if not number else "Yes")
                )
            if session == "one":
                await memory.flush()
        for kind in LOG_KINDS:
            await backend.item_log(MemoryKey(tenant, user, "one"), kind).add([{"text": "Zanzibar"}])
        await BackendGraph(backend, (tenant, user)).add_vertex("v", "memory", {"content": LARGE})
        words = WordIndex(backend.driver, backend.codec, backend.directory, (tenant, user))
        await words.add(Logged(Portion("one"), {"zanzibar": 1}))
        composite = MemoryKey(tenant, user, "one").composite()
        await backend.state_store.save_memory_state(composite, {"text": LARGE})
        context = {"tenant_id": tenant, "user_id": user}
        await backend.state_store.save_planner_state(
            f"run of {tenant} {user}", {"tool_context": context, "text": LARGE}
        )
    await backend.state_store.save_memory_state("other", {"text": LARGE})
    await backend.state_store.save_planner_state("other", {"text": LARGE})


async def read(backend: Backend, tenant: str = "acme") -> list[Any]:
    """Return everything that `fill` stored for a tenant, except for paused runs."""
    found: list[Any] = []
    for user in [user async for user in backend.sessions.users(tenant)]:
        async for key in backend.sessions.list(tenant, user):
            document = await backend.sessions.export(key)
            found.append((document["key"], document["body"]["summary"], document["turns"]))
        async for kind, key in backend.sessions.logs(tenant, user):
            found.append((kind, await backend.item_log(key, kind).items()))
        composite = MemoryKey(tenant, user, "one").composite()
        found.append(await backend.state_store.load_memory_state(composite))
        found += [page async for page in BackendGraph(backend, (tenant, user)).list_vertices("memory")]
    return found


def noting(problems: list[tuple[Key, Problem, Any]]) -> OnProblem:
    """Return a function that notes the problems it is called with."""
    return lambda key, problem, error: problems.append((key, problem, error))


@pytest.fixture
def world() -> World:
    return World()


async def test_after_resealing_a_tenant_the_old_key_can_be_removed(world: World) -> None:
    async with world.backend(BEFORE) as backend:
        await fill(backend)
        everything = await read(backend)
        assert len(everything) == 2 * (2 + len(LOG_KINDS) + 1 + 1)
    async with world.backend(ROTATED) as backend:
        report = await backend.sessions.reseal("acme")
        assert report.ok
        assert report.records > 2 * (2 + len(LOG_KINDS) + 1 + 1)
        assert report.values > report.records
        again = await backend.sessions.reseal("acme")
        assert again == ResealReport(current=report.records)
    async with world.backend(AFTER) as backend:
        assert await read(backend) == everything
        for user in USERS:
            run = await backend.state_store.load_planner_state(f"run of acme {user}")
            assert run is not None
            assert run["text"] == LARGE
        # What no user owns was not asked for.
        with pytest.raises(Corrupt, match="'k1', which this process does not have"):
            await backend.state_store.load_memory_state("other")


async def test_resealing_covers_every_kind_of_record_and_no_other_tenant(world: World) -> None:
    async with world.backend(BEFORE) as backend:
        await fill(backend)
        await fill(backend, "globex")
    async with world.backend(ROTATED) as backend:
        await backend.sessions.reseal("acme")
    key_ids = await world.key_ids()
    expected = {scope("acme", user, kind) for user in USERS for kind in KINDS} | {"acme::users"}
    assert expected <= key_ids.keys()
    for place, ids in key_ids.items():
        if place.startswith("acme:"):
            assert ids == {"k2"}, place
        elif place.startswith("globex:") or place == "::blob":
            assert ids == {"k1"}, place


async def test_resealing_a_user_leaves_the_other_users_alone(world: World) -> None:
    async with world.backend(BEFORE) as backend:
        await fill(backend)
    async with world.backend(ROTATED) as backend:
        await backend.sessions.reseal("acme", "b:ob")
    key_ids = await world.key_ids()
    assert key_ids[scope("acme", "b:ob", "memory")] == {"k2"}
    assert key_ids[scope("acme", "ada", "memory")] == {"k1"}


async def test_records_without_a_tenant_are_resealed_when_asked_for(world: World) -> None:
    async with world.backend(BEFORE) as backend:
        await fill(backend)
    async with world.backend(ROTATED) as backend:
        work = backend.sessions.resealing([Owner("acme"), Owner("acme", "ada"), DEFAULT, UNOWNED])
        seen: list[int] = []
        total = await work.count()
        report = await work.run(seen.append)
        assert report.ok
        assert seen == [*range(1, total + 1)]
    assert {one for ids in (await world.key_ids()).values() for one in ids} == {"k2"}
    async with world.backend(AFTER) as backend:
        assert await backend.state_store.load_memory_state("other") == {"text": LARGE}
        assert await backend.state_store.load_planner_state("other") == {"text": LARGE}


async def test_clear_data_is_migrated_by_resealing_it() -> None:
    world = World(max_entry=48_000)
    async with world.backend(None) as backend:
        await fill(backend)
        everything = await read(backend)
    async with world.backend(Sealing(AFTER.keys, accept_clear=True)) as backend:
        assert (await backend.sessions.resealing([Owner("acme"), DEFAULT, UNOWNED]).run()).ok
    assert {one for ids in (await world.key_ids()).values() for one in ids} == {"k2"}
    async with world.backend(AFTER) as backend:
        assert await read(backend) == everything


async def test_clear_parts_that_have_no_room_for_a_seal_are_reported(world: World) -> None:
    async with world.backend(None) as backend:
        await fill(backend)
        everything = await read(backend)
    async with world.backend(Sealing(AFTER.keys, accept_clear=True)) as backend:
        problems: list[tuple[Key, Problem, Any]] = []
        await backend.sessions.resealing([Owner("acme")], on_problem=noting(problems)).run()
        assert problems
        assert all(key.scope.endswith(":part") for key, _, _ in problems)
        assert all(isinstance(error, TooLarge) for _, _, error in problems)
        assert await read(backend) == everything


async def test_resealing_that_is_cancelled_is_completed_by_the_next(world: World) -> None:
    async with world.backend(BEFORE) as backend:
        await fill(backend)
        everything = await read(backend)
    async with world.backend(ROTATED) as backend:
        work = backend.sessions.resealing([Owner("acme")])
        reached = asyncio.Event()

        def note(done: int) -> None:
            if done == 7:
                reached.set()

        task = asyncio.ensure_future(work.run(note))
        await reached.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await read(backend) == everything
        rest = await backend.sessions.reseal("acme")
        assert rest.ok
        assert rest.records
        assert rest.current >= 7
    async with world.backend(AFTER) as backend:
        assert await read(backend) == everything


async def test_a_record_that_cannot_be_opened_is_reported_and_the_rest_resealed(world: World) -> None:
    async with world.backend(BEFORE) as backend:
        await fill(backend)
    async with world.backend(None) as backend:
        damaged = memory_key(MemoryKey("acme", "ada", "one"))
        await backend.driver.append(damaged, MAGIC + b"k1\n" + bytes(60), initial_version="v", ttl=None)
    problems: list[tuple[Key, Problem, Any]] = []
    async with world.backend(ROTATED) as backend:
        work = backend.sessions.resealing([Owner("acme")], on_problem=noting(problems))
        report = await work.run()
    assert not report.ok
    assert (report.failed, report.left) == (1, 0)
    ((key, problem, error),) = problems
    assert (key, problem) == (damaged, "failed")
    assert isinstance(error, Corrupt)
    key_ids = await world.key_ids()
    assert key_ids[scope("acme", "b:ob", "memory")] == {"k2"}


async def test_an_outage_ends_resealing_and_names_itself(world: World) -> None:
    class Down(StaticKeys):
        async def key(self, owner: Any, key_id: str) -> Any:
            raise Unavailable("the key service is down")

    async with world.backend(BEFORE) as backend:
        await fill(backend)
    async with world.backend(Sealing(Down({"k1": OLD, "k2": NEW}, primary="k2"))) as backend:
        with pytest.raises(Unavailable, match="key service"):
            await backend.sessions.reseal("acme")
    assert (await world.key_ids())["acme::users"] == {"k1"}


async def test_a_log_with_more_entries_than_one_write_reaches_is_resealed(world: World) -> None:
    key = MemoryKey("acme", "ada", "one")
    items = [{"number": number} for number in range(100)]
    async with world.backend(BEFORE) as backend:
        for item in items:
            await backend.item_log(key, "langchain").add([item])
    raw = world.raw()
    raw.traits = dataclasses.replace(raw.traits, max_drop=30)
    async with Backend(raw, sealing=ROTATED) as backend:
        report = await backend.sessions.reseal("acme")
        assert report.ok
    record = await raw_record(world, log_key(key, "langchain"))
    assert len(record.tail) < 100
    async with world.backend(AFTER) as backend:
        assert await backend.item_log(key, "langchain").items() == items


async def raw_record(world: World, key: Key) -> Any:
    async with world.backend(None) as backend:
        return await backend.driver.inner.load(key)


async def test_old_wrapping_keys_can_be_removed_after_resealing(world: World) -> None:
    wrapping = {"w1": OLD, "w2": NEW}
    async with open_backend("memory://") as store:

        def sealing(primary: str, *ids: str) -> Sealing:
            some = {one: wrapping[one] for one in ids}
            return Sealing(EnvelopeKeys(store.driver, LocalWrapping(some, primary=primary)))

        async with world.backend(sealing("w1", "w1")) as backend:
            await fill(backend)
            everything = await read(backend)
        async with world.backend(sealing("w2", "w1", "w2")) as backend:
            report = await backend.sessions.reseal("acme")
            assert (report.data_keys, report.records) == (3, 0)
            assert (await backend.sessions.reseal("acme")).data_keys == 0
        async with world.backend(sealing("w2", "w2")) as backend:
            assert await read(backend) == everything
            with pytest.raises(Corrupt):
                await backend.state_store.load_memory_state("other")


async def test_a_rotated_data_key_is_used_at_once_by_resealing(world: World) -> None:
    async with open_backend("memory://") as store:
        wrapping = LocalWrapping({"w1": OLD}, primary="w1")
        keys, elsewhere = EnvelopeKeys(store.driver, wrapping), EnvelopeKeys(store.driver, wrapping)
        async with world.backend(Sealing(keys)) as backend:
            await fill(backend)
            added = await elsewhere.rotate(KeyOwner("acme", "ada"))
            assert (await backend.sessions.reseal("acme", "ada")).records
    assert (await world.key_ids())[scope("acme", "ada", "memory")] == {added}


async def test_a_paused_run_that_is_resealed_while_it_is_loaded_is_found(world: World) -> None:
    class Resealed(MemoryDriver):
        before_delete: ClassVar[list[Callable[[], Awaitable[object]]]] = []

        async def delete(self, key: Key, **options: Any) -> bool:
            if self.before_delete and key.scope == PAUSED_RUNS:
                await self.before_delete.pop()()
            return await super().delete(key, **options)

    async with world.backend(BEFORE) as backend:
        await backend.state_store.save_planner_state("token", {"step": 1})
    async with (
        Backend(Resealed(world.store), sealing=ROTATED) as backend,
        world.backend(ROTATED) as other,
    ):
        Resealed.before_delete.append(lambda: other.sessions.resealing([UNOWNED]).run())
        assert await backend.state_store.load_planner_state("token") == {"step": 1}
        assert not Resealed.before_delete
        assert await backend.state_store.load_planner_state("token") is None


async def test_a_backend_that_seals_nothing_cannot_reseal(world: World) -> None:
    async with world.backend(None) as backend:
        with pytest.raises(ConfigurationError, match="sealing"):
            await backend.sessions.reseal("acme")


def test_blocking_programs_reseal_through_run(world: World) -> None:
    with SyncBackend(world.backend(BEFORE)) as backend:
        backend.run(fill(backend.asynchronous))
    with SyncBackend(world.backend(ROTATED)) as backend:
        assert backend.run(backend.asynchronous.sessions.reseal("acme")).ok
