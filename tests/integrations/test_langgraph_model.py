"""Random walks: `StmSaver` beside LangGraph's own saver in memory, which keeps everything."""

from __future__ import annotations

import operator
import random
from collections.abc import AsyncIterator
from typing import Annotated, Any, TypedDict

import pytest
from langchain_core.messages import AIMessage, AnyMessage, HumanMessage, RemoveMessage
from langgraph.channels import DeltaChannel
from langgraph.checkpoint.base import CheckpointTuple
from langgraph.checkpoint.base.id import uuid6
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, StateGraph, add_messages
from langgraph.types import Command, interrupt

from stm_backends import Backend, MemoryKey
from stm_backends.integrations.langgraph import StmSaver
from stm_backends.integrations.langgraph.threads import View

SEEDS = [*range(3), *(pytest.param(seed, marks=pytest.mark.full) for seed in range(3, 40))]


def extended(state: list[str], writes: list[list[str]]) -> list[str]:
    return [*state, *(one for write in writes for one in write)]


class State(TypedDict, total=False):
    messages: Annotated[list[AnyMessage], add_messages]
    steps: Annotated[list[str], DeltaChannel(extended, snapshot_frequency=5)]
    rare: Annotated[list[str], DeltaChannel(extended, snapshot_frequency=1000)]
    count: Annotated[int, operator.add]
    note: str


class Told(TypedDict):
    """What the inner graph tells the outer one; lists would be added to those that it was given."""

    note: str


def answer(state: State) -> State:
    asked = state["messages"][-1]
    made = f"{len(state['messages'])} {asked.content}"
    if str(asked.content).startswith("ask"):
        made = f"{made}: {interrupt('which?')}"
    removed = [RemoveMessage(state["messages"][0].id or "")] if len(state["messages"]) > 30 else []
    return {"messages": [AIMessage(made, id=f"a-{asked.id}"), *removed], "steps": [made], "rare": ["answer"]}


def left(state: State) -> State:
    return {"steps": [f"left {len(state['steps'])}"], "count": 1}


def right(state: State) -> State:
    return {"steps": [f"right {len(state['steps'])}"], "note": f"{len(state['rare'])}", "rare": ["right"]}


def graph_with(saver: Any) -> Any:
    inner: Any = StateGraph(State, output_schema=Told)
    inner.add_node("first", right)
    inner.add_node("second", left)
    inner.add_edge(START, "first")
    inner.add_edge("first", "second")
    builder: Any = StateGraph(State)
    builder.add_node("answer", answer)
    builder.add_node("left", left)
    builder.add_node("inner", inner.compile())
    builder.add_edge(START, "answer")
    builder.add_edge("answer", "left")
    builder.add_edge("answer", "inner")
    builder.add_edge("left", END)
    builder.add_edge("inner", END)
    return builder.compile(checkpointer=saver)


def on(thread: str) -> Any:
    return {"configurable": {"thread_id": thread}}


async def history_of(graph: Any, thread: str) -> list[Any]:
    return [one async for one in graph.aget_state_history(on(thread))]


def what_is_seen(state: Any) -> Any:
    """All that must be alike of two graphs whose checkpoints have other ids."""
    return (
        state.values,
        state.next,
        state.metadata.get("source"),
        state.metadata.get("step"),
        [
            (task.name, task.result, bool(task.error), [one.value for one in task.interrupts])
            for task in state.tasks
        ],
    )


def places_of_parents(history: list[Any]) -> list[int | None]:
    places = {one.config["configurable"]["checkpoint_id"]: place for place, one in enumerate(history)}
    parents = [one.parent_config and one.parent_config["configurable"]["checkpoint_id"] for one in history]
    return [places.get(parent or "") for parent in parents]


class Walk:
    """Does the same with a graph on either saver, and compares what both show."""

    def __init__(self, backend: Backend, rng: random.Random) -> None:
        self.backend, self.rng = backend, rng
        self.thread, self.number = "walk", 0
        self.theirs = graph_with(InMemorySaver())
        self.begin_anew()

    def begin_anew(self) -> None:
        """As another process: one that remembers nothing."""
        self.ours = graph_with(StmSaver(self.backend))

    def said(self) -> State:
        self.number += 1
        kind = self.rng.choice(("tell", "tell", "ask"))
        text = f"{kind} {self.number} " + "x" * self.rng.choice((0, 10, 400))
        return {"messages": [HumanMessage(text, id=f"h-{self.number}")], "steps": [f"in {self.number}"]}

    async def both(self, given: Any, place: int | None = None) -> None:
        """Run both graphs, from the latest checkpoint or from one so many before it."""
        durability = self.rng.choice(("sync", "async", "exit"))
        ended: list[type[Exception] | None] = []
        for graph, thread in ((self.ours, self.thread), (self.theirs, "walk")):
            config = on(thread) if place is None else (await history_of(graph, thread))[place].config
            try:
                await graph.ainvoke(given, config, durability=durability)
            except Exception as error:  # noqa: BLE001 -- what LangGraph refuses on one, it must on the other
                ended.append(type(error))
            else:
                ended.append(None)
        assert ended[0] == ended[1]

    async def updated(self, place: int | None) -> None:
        self.number += 1
        values = {"messages": [AIMessage(f"edited {self.number}", id=f"e-{self.number}")], "rare": ["edit"]}
        for graph, thread in ((self.ours, self.thread), (self.theirs, "walk")):
            config = on(thread) if place is None else (await history_of(graph, thread))[place].config
            await graph.aupdate_state(config, values, as_node="answer")

    async def step(self) -> str:
        rng, known = self.rng, await history_of(self.ours, self.thread)
        place = rng.randrange(len(known)) if known else None
        what = rng.choice(
            ("turn", "turn", "turn", "resume", "branch", "replay", "update", "edit", "anew", "anew", "fold")
            + ("prune", "copy") * (len(known) > 8)
        )
        if what == "turn":
            await self.both(self.said())
        elif what == "resume" and known and any(task.interrupts for task in known[0].tasks):
            await self.both(Command(resume=f"answer {self.number}"))
        elif what == "branch" and place is not None:
            await self.both(self.said(), place)
        elif what == "replay" and place is not None:
            await self.both(None, place)
        elif what == "update" and known:
            await self.updated(None)
        elif what == "edit" and place is not None:
            await self.updated(place)
        elif what == "fold":
            log = self.backend.item_log(MemoryKey("default", "anonymous", self.thread), "langgraph")
            await log.fold()
        elif what == "prune":
            await StmSaver(self.backend).aprune([self.thread])
        elif what == "copy":
            self.number += 1
            await self.ours.checkpointer.acopy_thread(self.thread, f"copy-{self.number}")
            await self.ours.checkpointer.adelete_thread(self.thread)
            self.thread = f"copy-{self.number}"
        if rng.random() < 0.5:
            self.begin_anew()
        return what

    async def compare(self) -> None:
        ours, theirs = await history_of(self.ours, self.thread), await history_of(self.theirs, "walk")
        assert bool(ours) == bool(theirs)
        # What was pruned is missing at the end.
        assert [*map(what_is_seen, ours)] == [*map(what_is_seen, theirs[: len(ours)])]
        parents = [*zip(places_of_parents(ours), places_of_parents(theirs), strict=False)]
        assert all(one in (None, other) for one, other in parents)
        if ours:
            deep, other = [
                await graph.aget_state(on(thread), subgraphs=True)
                for graph, thread in ((self.ours, self.thread), (self.theirs, "walk"))
            ]
            assert what_is_seen(deep) == what_is_seen(other)


@pytest.mark.parametrize("seed", SEEDS)
async def test_graphs_on_either_saver_show_the_same_after_any_operations(
    backend: Backend, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(seed)
    due = rng.choice((0.0, 0.1, 1.0))
    monkeypatch.setattr(View, "is_frame_due", property(lambda view: view.count > 1 and rng.random() < due))
    walk = Walk(backend, rng)
    for _ in range(20):
        what = await walk.step()
        try:
            await walk.compare()
        except AssertionError as error:
            raise AssertionError(f"after {what}, seed {seed}") from error


# The saver alone


CHANNELS = ("a", "b", "c", "d")
SPACES = ("", "", "child", "child:1", "child:2")


async def all_of(found: AsyncIterator[CheckpointTuple]) -> list[CheckpointTuple]:
    return [one async for one in found]


class Calls:
    """Calls both savers with the same arguments, whatever LangGraph would do."""

    def __init__(self, backend: Backend, rng: random.Random) -> None:
        self.backend, self.rng = backend, rng
        self.ours, self.theirs = StmSaver(backend), InMemorySaver()
        self.put: dict[tuple[str, str], dict[str, Any]] = {}

    def config(self, name: str, checkpoint_id: str | None) -> Any:
        return {"configurable": {"thread_id": "t", "checkpoint_ns": name, "checkpoint_id": checkpoint_id}}

    def place(self) -> tuple[str, str] | None:
        return self.rng.choice([*self.put]) if self.put else None

    async def write(self) -> None:
        rng = self.rng
        name = rng.choice(SPACES)
        parent = self.place()
        parent_id = parent[1] if parent and parent[0] == name and rng.random() < 0.8 else None
        versions: dict[str, Any] = dict(self.put[name, parent_id]) if parent_id else {}
        new: dict[str, Any] = {}
        for channel in rng.sample(CHANNELS, rng.randrange(len(CHANNELS)) if versions else len(CHANNELS)):
            new[channel] = versions[channel] = self.ours.get_next_version(versions.get(channel), None)
        values = {
            channel: rng.choice(([channel] * rng.randrange(200), rng.randbytes(300), None, {"x": [1] * 50}))
            for channel in versions
            if rng.random() < 0.8
        }
        checkpoint: Any = {
            "v": 4,
            "id": str(uuid6(clock_seq=-1)),
            "ts": "2026",
            "channel_values": values,
            "channel_versions": versions,
            "versions_seen": {"n": versions},
            "updated_channels": None,
        }
        early = rng.random() < 0.2
        if early:  # LangGraph writes in the background, and writes may come before their checkpoint
            await self.pending(name, checkpoint["id"])
        metadata: Any = {"source": "fork", "step": rng.randrange(3), "run_id": f"r{rng.randrange(4)}"}
        for saver in (self.ours, self.theirs):
            await saver.aput(self.config(name, parent_id), checkpoint, metadata, new)
        self.put[name, checkpoint["id"]] = versions
        if rng.random() < 0.6:
            await self.pending(name, checkpoint["id"])

    async def pending(self, name: str, checkpoint_id: str) -> None:
        rng = self.rng
        channels = rng.choices((*CHANNELS, "__error__", "__interrupt__"), k=rng.randrange(1, 4))
        writes = [(channel, rng.randrange(100)) for channel in channels]
        task, path = rng.choice("xyz"), rng.choice(("", "~a", "~b"))
        for saver in (self.ours, self.theirs):
            await saver.aput_writes(self.config(name, checkpoint_id), writes, task, path)

    async def compare(self) -> None:
        if self.rng.random() < 0.3:
            self.ours = StmSaver(self.backend)
        for name in {*SPACES}:
            config = {"configurable": {"thread_id": "t", "checkpoint_ns": name}}
            assert await self.ours.aget_tuple(config) == await self.theirs.aget_tuple(config)
            ours, theirs = [await all_of(saver.alist(config)) for saver in (self.ours, self.theirs)]
            assert ours == theirs
        if (place := self.place()) is None:
            return
        config = self.config(*place)
        assert await self.ours.aget_tuple(config) == await self.theirs.aget_tuple(config)
        channels = self.rng.sample(CHANNELS, 3)
        found = await self.ours.aget_delta_channel_history(config=config, channels=channels)
        assert found == await self.theirs.aget_delta_channel_history(config=config, channels=channels)
        wanted = {"step": self.rng.randrange(3)}
        some, others = [
            await all_of(
                saver.alist({"configurable": {"thread_id": "t", "checkpoint_ns": ""}}, filter=wanted, limit=2)
            )
            for saver in (self.ours, self.theirs)
        ]
        assert some == others


@pytest.mark.parametrize("seed", SEEDS)
async def test_either_saver_answers_alike_whatever_is_put(
    backend: Backend, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(seed)
    due = rng.choice((0.0, 0.1, 1.0))
    monkeypatch.setattr(View, "is_frame_due", property(lambda view: view.count > 1 and rng.random() < due))
    calls = Calls(backend, rng)
    for number in range(60):
        await calls.write()
        if number % 3 == 0:
            await calls.compare()


@pytest.mark.parametrize("seed", SEEDS)
async def test_what_stays_after_an_erasure_says_what_it_said(
    backend: Backend, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(seed)
    due = rng.choice((0.0, 0.1, 1.0))
    monkeypatch.setattr(View, "is_frame_due", property(lambda view: view.count > 1 and rng.random() < due))
    calls = Calls(backend, rng)
    for _ in range(rng.randrange(5, 40)):
        await calls.write()
    ours = calls.ours
    before = await all_of(ours.alist(None))
    histories = {
        (name, one): await ours.aget_delta_channel_history(config=calls.config(name, one), channels=CHANNELS)
        for name, one in calls.put
    }
    erased = {f"r{rng.randrange(4)}", f"r{rng.randrange(4)}"}
    await ours.adelete_for_runs([*erased])
    if rng.random() < 0.5:
        await ours.acopy_thread("t", "copy")
        await ours.adelete_thread("t")
        await ours.acopy_thread("copy", "t")
        await ours.adelete_thread("copy")
    left = await all_of(StmSaver(backend).alist(None))
    expected = [one for one in before if one.metadata.get("run_id") not in erased]
    assert [(one.config, one.checkpoint, one.metadata, one.pending_writes) for one in left] == [
        (one.config, one.checkpoint, one.metadata, one.pending_writes) for one in expected
    ]
    ids = {one.checkpoint["id"] for one in left}
    for one in left:
        assert one.parent_config is None or one.parent_config["configurable"]["checkpoint_id"] in ids
        given = one.config["configurable"]
        channels = [
            channel
            for channel in one.checkpoint["channel_versions"]
            if channel not in one.checkpoint["channel_values"]
        ]
        found = await ours.aget_delta_channel_history(config=one.config, channels=channels)
        place = given["checkpoint_ns"], given["checkpoint_id"]
        assert found == {channel: histories[place][channel] for channel in channels}
