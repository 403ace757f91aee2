"""Turns that cannot wait for a summary move to pages while it is being written, by any process."""

from __future__ import annotations

import asyncio
import copy
import itertools
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import pytest

from stm_backends.drivers.contract import Key
from stm_backends.drivers.in_memory import MemoryDriver, MemoryStore
from stm_backends.drivers.wrapper import Operation, WrapperDriver
from stm_backends.errors import Unavailable
from stm_backends.memory.shared.due import Held, Move, next_move, unless_held
from stm_backends.memory.shared.folds import Writes, attempt_of
from stm_backends.memory.shared.memory import DistributedShortTermMemory
from stm_backends.memory.shared.snapshot import Snapshot
from stm_backends.records import keys
from stm_backends.records.body import Body, Transcript
from stm_backends.records.codec import Codec
from stm_backends.telemetry.observer import Observer
from stm_backends.testing.memory_contract import config, shown, turn, until
from stm_backends.testing.workbench.summarizers import LedgerSummarizer
from stm_backends.types import MemoryHealth, MemoryKey, StoredTurn
from tests.support import clock

KEY = MemoryKey("acme", "u1", "chat")
RECORD = keys.memory_key(KEY)
KEPT = config(
    transcript=True,
    total_max_tokens=0,
    summary_max_tokens=100_000,
    fold_max_turns=3,
    recovery_backlog_limit=1,
    summarizer_timeout_s=30.0,
)
ZONE, BOUND = 2, 12
"""The turns that stay, and how many more a record holds: those of four calls."""

T = TypeVar("T")


class Mortal(WrapperDriver):
    """The operations of a process that is killed at its write number `dies_at`, before or after that."""

    def __init__(self, store: MemoryStore, *, unconfirmed: bool = False, **limits: Any) -> None:
        super().__init__(MemoryDriver(store, clock=clock.now, **limits))
        self._unconfirmed = unconfirmed
        self.writes = 0
        self.dies_at: int | None = None
        self.done = self.dead = False

    @property
    def traits(self) -> Any:
        return replace(self.inner.traits, shows_unconfirmed=self._unconfirmed)

    async def call(self, operation: Operation, key: Key | str, send: Callable[[], Awaitable[T]]) -> T:
        if self.dead:
            raise Unavailable("the process is dead")
        if operation in ("append", "replace"):
            self.writes += 1
            if self.writes == self.dies_at:
                self.dead = True
                if self.done:
                    await send()
                raise Unavailable("killed")
        return await send()


class Turns(Observer):
    """Counts what processes report of turns."""

    def __init__(self) -> None:
        self.of = Counter[str]()

    def turns(self, event: str, count: int) -> None:
        self.of[event] += count


@dataclass
class World:
    """A datastore, and processes that share one conversation on it."""

    store: MemoryStore = field(default_factory=MemoryStore)
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    counts: Turns = field(default_factory=Turns)

    async def process(
        self, settings: object = KEPT, model: LedgerSummarizer | None = None
    ) -> tuple[DistributedShortTermMemory, Mortal]:
        driver = Mortal(self.store, **self.options)
        await driver.open()
        model = model or LedgerSummarizer()
        memory = DistributedShortTermMemory(
            driver, KEY, settings, summarizer=model, observer=self.counts, clock=clock.now
        )
        return memory, driver

    @property
    def waiting(self) -> int:
        """How many turns wait in pages, as the processes report it."""
        return self.counts.of["moved"] - self.counts.of["caught_up"]

    def pending(self) -> int:
        return len(self.store.scopes[RECORD.scope].records[RECORD.name].tail) - ZONE

    def body(self) -> Body:
        return Codec().open_body(self.store.scopes[RECORD.scope].records[RECORD.name].body)


def held() -> LedgerSummarizer:
    model = LedgerSummarizer()
    model.hold()
    return model


async def talk(memory: DistributedShortTermMemory, turns: range) -> None:
    for number in turns:
        await memory.add_turn(turn(number), turn_id=f"t{number}")


async def everything(memory: DistributedShortTermMemory) -> list[str]:
    return [one.turn.user_message async for one in memory.each_turn()]


def no_turn_twice(model: LedgerSummarizer) -> bool:
    """Say whether no call of the model was made in vain."""
    asked = [item["user"] for request in model.requests for item in request["turns"]]
    return len(model.requests) > 1 and len({*asked}) == len(asked)


def users(count: int) -> list[str]:
    return [f"u{number}" for number in range(count)]


async def settled(world: World, count: int) -> None:
    """Let a new process summarize what is left, and see that every turn is there once and in order."""
    memory, _ = await world.process()
    for _ in range(20):
        await memory.flush()
        if memory.health is MemoryHealth.HEALTHY and len((await shown(memory))["summary"]) == count - ZONE:
            break
        await asyncio.sleep(60.0)
    assert (await shown(memory))["summary"] == users(count - ZONE)
    assert await everything(memory) == users(count)
    assert sum([one.summarized async for one in memory.each_turn()]) == count - ZONE
    assert memory.stats.dropped == 0


@clock.virtually
async def test_the_process_that_waits_for_its_model_moves_a_long_tail() -> None:
    world, model = World(), held()
    memory, _ = await world.process(model=model)
    await talk(memory, range(5))
    await model.called.wait()
    await talk(memory, range(5, 60))
    await until(lambda: world.pending() <= BOUND)
    assert len(model.requests) == 1
    assert world.body().lease is not None
    assert world.body().transcript is not None
    model.release()
    await memory.flush()
    assert memory.stats.lost_races == 0
    assert no_turn_twice(model)
    await settled(world, 60)


@clock.virtually
async def test_a_process_without_the_lease_moves_a_long_tail() -> None:
    world, model, other = World(), held(), LedgerSummarizer()
    memory, _ = await world.process(model=model)
    await talk(memory, range(5))
    await model.called.wait()
    lease = world.body().lease
    writer, _ = await world.process(model=other)
    await talk(writer, range(5, 60))
    await until(lambda: world.pending() <= BOUND)
    assert world.body().lease == lease
    assert writer.stats.trimmed > 0
    assert other.requests == []
    assert await everything(writer) == users(60)
    assert (world.body().transcript or Transcript("")).gap == 0
    model.release()
    await memory.flush()
    assert no_turn_twice(model)
    await settled(world, 60)


@clock.virtually
async def test_a_process_that_only_reads_moves_a_long_tail() -> None:
    """Those that have added the turns were killed."""
    world, model = World(), held()
    memory, holder = await world.process(model=model)
    await talk(memory, range(5))
    await model.called.wait()
    holder.dead = True
    writer, driver = await world.process(replace(KEPT, fold_max_turns=50))
    await talk(writer, range(5, 40))
    driver.dead = True
    reader, _ = await world.process()
    await reader.get_llm_context()
    await until(lambda: world.pending() <= BOUND)
    await settled(world, 40)


@clock.virtually
async def test_a_summary_covers_turns_of_which_only_some_have_moved() -> None:
    world, model = World(), held()
    memory, _ = await world.process(replace(KEPT, fold_batch_turns=20, fold_max_turns=20), model)
    await talk(memory, range(22))
    await model.called.wait()
    assert len(model.requests[0]["turns"]) == 20
    writer, _ = await world.process(replace(KEPT, fold_max_turns=5))
    await talk(writer, range(22, 23))
    await until(lambda: world.pending() == 5)
    assert world.waiting == 16
    model.release()
    await memory.flush()
    assert [item["user"] for item in model.requests[1]["turns"]] == ["u20"]
    assert world.waiting == 0
    await settled(world, 23)


@pytest.mark.parametrize("unconfirmed", [False, True])
@clock.virtually
async def test_a_full_record_has_room_while_a_summary_is_written(unconfirmed: bool) -> None:
    options = {"max_record_bytes": 9_000, "max_entry_bytes": 3_000, "unconfirmed": unconfirmed}
    world, model = World(options=options), held()
    memory, _ = await world.process(model=model)
    writer, _ = await world.process()
    for number in range(12):
        started = clock.now()
        await (memory, writer)[number % 2].add_turn(turn(number, "x" * 1_500), turn_id=f"t{number}")
        assert clock.now() - started < 1.0
    assert len(model.requests) == 1
    model.release()
    await settled(world, 12)


@pytest.mark.parametrize("name", ["t", "new-"], ids=["ids-used-again", "other-ids"])
@clock.virtually
async def test_a_summary_of_an_erased_conversation_is_not_stored_in_the_next(name: str) -> None:
    world, model = World(), held()
    memory, _ = await world.process(model=model)
    await talk(memory, range(5))
    await model.called.wait()
    assert await (await world.process())[1].delete(RECORD)
    await another_history(world, name)
    model.release()
    await memory.flush(1.0)
    assert world.body().summary == ""


@pytest.mark.parametrize("transcript", [True, False])
@pytest.mark.parametrize("name", ["t", "new-"], ids=["ids-used-again", "other-ids"])
@clock.virtually
async def test_a_failure_of_an_erased_conversation_is_not_stored_in_the_next(
    name: str, transcript: bool
) -> None:
    world, model, other = World(), held(), held()
    settings = replace(KEPT, transcript=transcript)
    memory, _ = await world.process(settings, model)
    await talk(memory, range(5))
    await model.called.wait()
    assert await (await world.process())[1].delete(RECORD)
    await asyncio.sleep(0.1)  # so that the other lease is not of the same moment
    writer, _ = await world.process(settings, other)
    for number in range(5):
        await writer.add_turn(turn(f"new-{number}"), turn_id=f"{name}{number}")
    await other.called.wait()
    model.fail = 1
    model.release()
    await memory.flush(1.0)
    assert memory.stats.summarizer_failures == 1
    assert (world.body().health, world.body().attempts) == (MemoryHealth.HEALTHY, 0)


def test_telling_a_failure_by_its_count_alone_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def is_on(self: Writes, snapshot: Snapshot, failure: Any) -> bool:
        del self
        return attempt_of(snapshot.body) == attempt_of(failure.leased.body)

    monkeypatch.setattr(Writes, "_is_on", is_on)
    with pytest.raises(AssertionError, match="RETRY"):
        test_a_failure_of_an_erased_conversation_is_not_stored_in_the_next("new-", True)


@clock.virtually
async def test_a_summary_of_turns_that_a_datastore_lost_is_not_stored() -> None:
    world, model = World(), held()
    memory, _ = await world.process(model=model)
    await talk(memory, range(1))
    records = world.store.scopes[RECORD.scope].records
    before = copy.deepcopy(records[RECORD.name])
    await talk(memory, range(1, 5))
    await model.called.wait()
    records[RECORD.name] = before
    await another_history(world, "new-")
    model.release()
    await memory.flush(1.0)
    assert world.body().summary == ""


async def another_history(world: World, name: str) -> None:
    """Have another process add turns, of which so many wait for a summary that they are moved."""
    await asyncio.sleep(0.1)  # so that its lease is not of the same moment
    writer, _ = await world.process(model=held())
    for number in range(30):
        await writer.add_turn(turn(f"new-{number}"), turn_id=f"{name}{number}")
    await until(lambda: world.pending() <= BOUND)
    assert (world.body().transcript or Transcript("")).gap == 0


KILLS = [
    pytest.param(
        *(who, write, done, unconfirmed),
        id=f"{who}-{write}-{'after' if done else 'before'}-{'unconfirmed' if unconfirmed else 'confirmed'}",
        marks=pytest.mark.full if write > (2 if unconfirmed else 4) else (),
    )
    for who, write, done, unconfirmed in itertools.product(
        ("holder", "mover", "alone"), range(1, 8), (False, True), (False, True)
    )
]


@pytest.mark.parametrize(("who", "write", "done", "unconfirmed"), KILLS)
@clock.virtually
async def test_a_kill_at_any_write_of_a_move_loses_and_repeats_nothing(
    who: str, write: int, done: bool, unconfirmed: bool
) -> None:
    world, model = World(options={"unconfirmed": unconfirmed}), held()
    memory, holder = await world.process(model=model)
    await talk(memory, range(5))
    await model.called.wait()
    writer, mover = (memory, holder) if who == "alone" else await world.process()
    # The next turn is one too many.
    await talk(writer, range(5, BOUND + ZONE))
    dying = holder if who == "holder" else mover
    dying.dies_at, dying.done = dying.writes + write + (who != "holder"), done
    last = BOUND + ZONE
    await writer.add_turn(turn(last), turn_id=f"t{last}")
    await asyncio.sleep(0.1)
    model.release()
    await asyncio.sleep(1.0)
    assert dying.dead or write > 2
    for each in (memory, writer):
        each.abandon()
    await settled(world, last + 1)


def test_what_moves_is_what_makes_the_tail_too_long() -> None:
    kept = Transcript("e")

    def snapshot(count: int, transcript: Transcript | None) -> Snapshot:
        turns = tuple(StoredTurn(f"t{n}", turn(n)) for n in range(count))
        return Snapshot("v", Body(transcript=transcript)).plus_entries((b"x" * 10,) * count, turns)

    def move(count: int, transcript: Transcript | None = kept, **given: Any) -> Move | None:
        traits = replace(MemoryDriver().traits, max_drop=given.pop("max_drop", 100))
        room, settings = given.pop("room", 0), replace(KEPT, **given)
        return next_move(settings, snapshot(count, transcript), traits=traits, room=room)

    assert move(BOUND + ZONE) is None
    assert move(BOUND + ZONE + 1) == Move(BOUND + 1 - 3)
    assert move(BOUND + ZONE + 1, None) is None
    assert move(BOUND + ZONE + 1, max_drop=4) == Move(4)
    assert move(BOUND + ZONE + 1, strategy="truncation") is None
    assert move(BOUND + ZONE + 1, budget=replace(KEPT.budget, summary_max_tokens=0)) is None
    assert move(5, room=1) == Move(1)
    assert move(5, room=1_000) == Move(3)
    assert move(ZONE, room=1_000) is None
    assert unless_held(Move(1), Move(2), 0.5) == Move(2)
    assert unless_held(Move(1), None, 0.5, overdue=True) == Held(0.5, overdue=True)
