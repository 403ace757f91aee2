"""`StmSaver`: what LangGraph's graphs keep, with graphs that run."""

from __future__ import annotations

import asyncio
import json
import operator
import random
from collections.abc import AsyncIterator, Mapping
from typing import Annotated, Any, TypedDict
from uuid import uuid4

import pytest
from langchain_core.messages import AIMessage, AnyMessage, HumanMessage
from langgraph.channels import DeltaChannel
from langgraph.checkpoint.base import BaseCheckpointSaver, CheckpointTuple
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, StateGraph, add_messages
from langgraph.types import Command, interrupt
from typer.testing import CliRunner

from stm_backends import (
    Backend,
    ConfigurationError,
    EditConflict,
    InvalidKey,
    MemoryKey,
    SealMismatch,
    SessionExists,
    open_backend,
    sync,
)
from stm_backends.cli.app import app as command
from stm_backends.drivers.in_memory import MemoryDriver, MemoryStore
from stm_backends.integrations.langgraph import StmSaver, StmStore, copy_threads, turns
from stm_backends.integrations.langgraph.deltas import delta, patch
from tests.support.catalogue import touched
from tests.support.delayed import Delayed
from tests.support.sealed import SEALING

TURN_CONFIG: Any = {"configurable": {"thread_id": "chat"}}


def extended(state: list[str], writes: list[list[str]]) -> list[str]:
    return [*state, *(one for write in writes for one in write)]


class State(TypedDict, total=False):
    messages: Annotated[list[AnyMessage], add_messages]
    steps: Annotated[list[str], DeltaChannel(extended, snapshot_frequency=4)]
    count: Annotated[int, operator.add]
    note: str


class Told(TypedDict):
    """What the inner graph tells the outer one; lists would be added to those that it was given."""

    note: str


def answer(state: State) -> State:
    asked = state["messages"][-1]
    if asked.content == "ask me":
        said = interrupt("yes or no?")
        return {"messages": [AIMessage(f"you said {said}", id=f"a-{asked.id}")], "steps": ["asked"]}
    return {"messages": [AIMessage(f"re: {asked.content}", id=f"a-{asked.id}")], "steps": ["answered"]}


def left(_: State) -> State:
    return {"steps": ["left"], "count": 1}


def right(state: State) -> State:
    return {"steps": ["right"], "note": f"right {len(state['steps'])}"}


def graph_with(saver: BaseCheckpointSaver[Any], **options: Any) -> Any:
    """A graph of an answer and, at the same time, two more steps, one of them in a graph of its own."""
    inner: Any = StateGraph(State, output_schema=Told)
    inner.add_node("right", right)
    inner.add_edge(START, "right")
    builder: Any = StateGraph(State)
    builder.add_node("answer", answer)
    builder.add_node("left", left)
    builder.add_node("inner", inner.compile())
    builder.add_edge(START, "answer")
    builder.add_edge("answer", "left")
    builder.add_edge("answer", "inner")
    builder.add_edge("left", END)
    builder.add_edge("inner", END)
    return builder.compile(checkpointer=saver, **options)


def chat_with(saver: BaseCheckpointSaver[Any]) -> Any:
    """A graph of one answer to each message."""
    builder: Any = StateGraph(State)
    builder.add_node("answer", answer)
    builder.add_edge(START, "answer")
    return builder.compile(checkpointer=saver)


def said(text: str) -> State:
    return {"messages": [HumanMessage(text, id=f"h-{text}-{uuid4().hex[:8]}")], "steps": [text]}


def on(thread: str) -> Any:
    return {"configurable": {"thread_id": thread}}


async def texts(graph: Any, config: Any) -> list[str]:
    return [one.content for one in (await graph.aget_state(config)).values.get("messages", [])]


async def all_of(found: AsyncIterator[CheckpointTuple]) -> list[CheckpointTuple]:
    return [one async for one in found]


# Turns


async def test_a_turn_continues_in_another_process(pods: tuple[Backend, Backend]) -> None:
    one, other = (graph_with(StmSaver(backend)) for backend in pods)
    await one.ainvoke(said("first"), on("chat"))
    await other.ainvoke(said("second"), on("chat"))
    expected = ["first", "re: first", "second", "re: second"]
    assert await texts(one, on("chat")) == await texts(other, on("chat")) == expected
    values = (await one.aget_state(on("chat"))).values
    assert (values["count"], values["note"]) == (2, "right 5")
    assert values["steps"] == ["first", "answered", "left", "second", "answered", "left"]


@pytest.mark.parametrize("durability", ["sync", "async", "exit"])
async def test_each_durability_keeps_every_turn(backend: Backend, durability: str) -> None:
    for number in range(3):
        graph = graph_with(StmSaver(backend))
        await graph.ainvoke(said(str(number)), on("chat"), durability=durability)
    graph = graph_with(StmSaver(backend))
    assert await texts(graph, on("chat")) == ["0", "re: 0", "1", "re: 1", "2", "re: 2"]
    assert len((await graph.aget_state(on("chat"))).values["steps"]) == 9


async def test_an_interrupted_run_is_resumed_by_another_process(pods: tuple[Backend, Backend]) -> None:
    one, other = (graph_with(StmSaver(backend)) for backend in pods)
    await one.ainvoke(said("ask me"), on("chat"))
    state = await other.aget_state(on("chat"))
    assert state.next == ("answer",)
    assert [found.value for found in state.interrupts] == ["yes or no?"]
    await other.ainvoke(Command(resume="yes"), on("chat"))
    assert await texts(one, on("chat")) == ["ask me", "you said yes"]


async def test_a_run_from_an_older_checkpoint_makes_a_branch(backend: Backend) -> None:
    graph = graph_with(StmSaver(backend))
    for text in ("first", "second"):
        await graph.ainvoke(said(text), on("chat"))
    history = [one async for one in graph.aget_state_history(on("chat"))]
    after_first = next(one for one in history if not one.next and len(one.values["messages"]) == 2)
    await graph.ainvoke(said("instead"), after_first.config)
    assert await texts(graph, on("chat")) == ["first", "re: first", "instead", "re: instead"]
    assert await texts(graph, history[0].config) == ["first", "re: first", "second", "re: second"]


async def test_values_of_every_kind_of_python_come_back(backend: Backend) -> None:
    saver = StmSaver(backend)
    values = {"a": b"\0\xff", "b": {1, 2}, "c": "\ud800".encode("utf-8", "surrogatepass"), "d": [1, None]}
    checkpoint = point(values)
    config = await saver.aput(put_at("chat"), checkpoint, {"source": "loop"}, checkpoint["channel_versions"])
    found = await StmSaver(backend).aget_tuple(config)
    assert found is not None
    assert found.checkpoint["channel_values"] == values


# Runs at the same time


async def in_turn(graph: Any, text: str, thread: str = "chat") -> int:
    """Run a turn, again after each refusal, as a program would; returns how many there were."""
    refused = 0
    while True:
        try:
            await graph.ainvoke(said(text), on(thread))
        except EditConflict:
            refused += 1
            await asyncio.sleep(random.uniform(0, 0.02 * min(refused, 10)))
        else:
            return refused


async def test_no_turn_is_lost_when_runs_of_a_thread_overlap(pods: tuple[Backend, Backend]) -> None:
    graphs = [chat_with(StmSaver(backend)) for backend in (*pods, *pods)]

    async def work(number: int) -> int:
        return sum([await in_turn(graphs[number], f"{number}.{turn}") for turn in range(8)])

    refused = sum(await asyncio.gather(*map(work, range(4))))
    found = await texts(graphs[0], on("chat"))
    asked = {f"{number}.{turn}" for number in range(4) for turn in range(8)}
    assert asked <= {*found}
    assert {f"re: {one}" for one in asked} <= {*found}
    assert refused > 0


async def test_the_second_of_two_runs_is_refused_and_stores_nothing(backend: Backend) -> None:
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def slow(state: State) -> State:
        begun.set()
        await go_on.wait()
        return answer(state)

    saver = StmSaver(backend)
    builder: Any = StateGraph(State)
    builder.add_node("slow", slow)
    builder.add_edge(START, "slow")
    slow_graph = builder.compile(checkpointer=saver)
    first = asyncio.create_task(slow_graph.ainvoke(said("slow"), on("chat"), durability="sync"))
    await begun.wait()
    await chat_with(saver).ainvoke(said("quick"), on("chat"))
    go_on.set()
    with pytest.raises(EditConflict, match="run it again"):
        await first
    assert await texts(slow_graph, on("chat")) == ["slow", "quick", "re: quick"]


async def test_a_stale_update_of_a_state_is_refused(pods: tuple[Backend, Backend]) -> None:
    one, other = (StmSaver(backend) for backend in pods)
    await chat_with(one).ainvoke(said("first"), on("chat"))
    read = await other.aget_tuple(on("chat"))
    assert read is not None
    await chat_with(one).ainvoke(said("second"), on("chat"))
    checkpoint = point({"messages": []})
    config = {"configurable": {**read.config["configurable"]}}
    with pytest.raises(EditConflict):
        await other.aput(config, checkpoint, {"source": "update"}, checkpoint["channel_versions"])
    # Who asks for that checkpoint by its id means a branch.
    await other.aget_tuple(read.config)
    await other.aput(config, checkpoint, {"source": "update"}, checkpoint["channel_versions"])


async def test_runs_that_wait_for_their_turn_are_never_refused(pods: tuple[Backend, Backend]) -> None:
    savers = [StmSaver(backend) for backend in (*pods, *pods)]

    async def work(number: int) -> None:
        for turn in range(5):
            async with savers[number].turn("chat"):
                await chat_with(savers[number]).ainvoke(said(f"{number}.{turn}"), on("chat"))

    await asyncio.gather(*map(work, range(4)))
    found = await texts(chat_with(savers[0]), on("chat"))
    assert len(found) == 40
    assert all(found[place + 1] == f"re: {found[place]}" for place in range(0, 40, 2))


async def test_a_turn_that_does_not_come_is_given_up(
    pods: tuple[Backend, Backend], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, same, other = StmSaver(pods[0]), StmSaver(pods[0]), StmSaver(pods[1])
    with pytest.raises(ConfigurationError, match="wait_s"):
        one.turn("chat", wait_s=-1)
    async with one.turn("chat"), one.turn("another"):
        for saver in (one, same, other):
            with pytest.raises(EditConflict, match="has not begun"):
                async with saver.turn("chat", wait_s=0.05):
                    pytest.fail("two have the turn")
    async with other.turn("chat", wait_s=5):
        pass
    # A claim lasts while it is renewed, and expires with its process.
    monkeypatch.setattr(turns, "LEASE_S", 0.3)
    async with one.turn("chat"):
        await asyncio.sleep(0.8)
        with pytest.raises(EditConflict):
            async with other.turn("chat", wait_s=0.05):
                pytest.fail("two have the turn")

    async def dies(*_: object) -> None:
        """Renew nothing, as a process that was killed."""

    monkeypatch.setattr(turns.Turns, "_renew", dies)
    async with one.turn("chat"), other.turn("chat", wait_s=5):
        pass


async def test_a_turn_waits_no_longer_than_it_is_told_and_tries_once_at_least(tmp_path: Any) -> None:
    async with open_backend(f"sqlite:///{tmp_path}/stm.db") as backend:
        one, other = StmSaver(backend), StmSaver(backend)
        async with one.turn("chat", wait_s=0):
            began = asyncio.get_running_loop().time()
            with pytest.raises(EditConflict):
                async with other.turn("chat", wait_s=0.3):
                    pytest.fail("two have the turn")
            assert asyncio.get_running_loop().time() - began < 0.6
            with pytest.raises(EditConflict):
                async with other.turn("chat", wait_s=0):
                    pytest.fail("two have the turn")
        async with other.turn("chat", wait_s=0):
            pass


async def test_a_turn_that_is_cancelled_while_it_is_claimed_leaves_no_claim() -> None:
    driver = Delayed(MemoryDriver(MemoryStore()))
    async with Backend(driver) as backend:
        saver, entered = StmSaver(backend), asyncio.Event()

        async def run() -> None:
            async with saver.turn("chat"):
                entered.set()

        driver.goes_on.clear()
        task = asyncio.create_task(run())
        await driver.reached.wait()
        task.cancel()
        await asyncio.sleep(0.01)
        driver.goes_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not entered.is_set()
        async with StmSaver(backend).turn("chat", wait_s=0):
            pass


# How much is stored, and read


async def stored_bytes(backend: Backend, key: MemoryKey) -> int:
    return sum(len(json.dumps(item)) for item in await backend.item_log(key, "langgraph").items())


@pytest.mark.parametrize("turns", [60, pytest.param(250, marks=pytest.mark.full)])
async def test_a_checkpoint_stores_what_it_adds(turns: int) -> None:
    async with open_backend("memory://") as backend:
        graph = chat_with(StmSaver(backend))
        for number in range(turns):
            await graph.ainvoke(said(f"{number} " + random.randbytes(100).hex()), on("chat"))
        size = await stored_bytes(backend, MemoryKey("default", "anonymous", "chat"))
        assert size <= 12_000 * 2 * turns  # 6 MB for 500 messages
        theirs = chat_with(InMemorySaver())
        whole = await theirs.ainvoke(said("x"), on("chat"))
        assert len(whole["messages"]) == 2
        fresh = await StmSaver(backend).aget_tuple(on("chat"))
        assert fresh is not None
        assert len(fresh.checkpoint["channel_values"]["messages"]) == 2 * turns


async def test_a_new_process_reads_the_latest_without_the_whole_thread(backend: Backend) -> None:
    graph = chat_with(StmSaver(backend))
    for number in range(60):
        await graph.ainvoke(said(f"{number} " + "x" * 300), on("chat"))
    log = backend.item_log(MemoryKey("default", "anonymous", "chat"), "langgraph")
    items = (await log.read()).items
    since = next(place for place, item in enumerate(reversed(items)) if item["k"] == 0)
    assert since < len(items) / 2
    assert sum("frame" in item for item in items) >= 1
    assert len(await texts(chat_with(StmSaver(backend)), on("chat"))) == 120


@pytest.mark.parametrize("seed", range(20))
def test_a_patched_value_is_the_one_that_was_stored(seed: int) -> None:
    rng = random.Random(seed)
    old = b"".join(rng.randbytes(rng.randrange(1, 60)) for _ in range(rng.randrange(1, 60)))
    new = bytearray(old)
    for _ in range(rng.randrange(6)):
        start = rng.randrange(len(new) + 1)
        new[start : start + rng.choice((0, 0, 1, 40))] = rng.randbytes(rng.choice((0, 1, 3, 100)))
    pieces = delta(old, bytes(new))
    assert pieces is None or patch(old, pieces) == bytes(new)
    longer = bytes([old[0] ^ 1]) + old[1:] + b"and a message more"
    if len(longer) >= 200:
        changed = delta(old, longer)
        assert changed is not None
        assert patch(old, changed) == longer
        assert sum(len(one) for one in changed if isinstance(one, bytes)) < 60


# Listing, erasing, copying


def point(values: Mapping[str, Any], **fields: Any) -> Any:
    """A checkpoint with these channels, all of the first version."""
    from langgraph.checkpoint.base.id import uuid6  # noqa: PLC0415 -- what LangGraph makes ids of

    return {
        "v": 1,
        "id": str(uuid6(clock_seq=-1)),
        "ts": "2026-01-01T00:00:00+00:00",
        "channel_values": {**values},
        "channel_versions": dict.fromkeys(values, "1"),
        "versions_seen": {},
        "updated_channels": None,
        **fields,
    }


def put_at(thread: str, parent: str | None = None, name: str = "") -> Any:
    return {"configurable": {"thread_id": thread, "checkpoint_ns": name, "checkpoint_id": parent}}


def of_a_user(thread_id: str) -> MemoryKey:
    return MemoryKey(*thread_id.split("/"))


async def test_threads_belong_to_the_users_that_a_function_names(backend: Backend) -> None:
    saver = StmSaver(backend, key_of=of_a_user, tenants=["acme"])
    graph = chat_with(saver)
    for thread in ("acme/ada/1", "acme/ada/2", "acme/bob/1", "other/eve/1"):
        await graph.ainvoke(said(thread), on(thread))

    async def threads() -> set[str]:
        return {one.config["configurable"]["thread_id"] async for one in saver.alist(None)}

    assert await threads() == {"acme/ada/1", "acme/ada/2", "acme/bob/1"}
    assert (await backend.sessions.erase_with_receipt("acme", "ada")).complete
    assert await threads() == {"acme/bob/1"}
    assert await texts(graph, on("acme/ada/1")) == []
    assert await texts(graph, on("other/eve/1")) == ["other/eve/1", "re: other/eve/1"]
    # What was erased can begin anew, in a process that remembers it.
    await graph.ainvoke(said("again"), on("acme/ada/1"))
    assert await texts(graph, on("acme/ada/1")) == ["again", "re: again"]


async def test_threads_are_listed_with_what_was_said_first(backend: Backend) -> None:
    saver = StmSaver(backend, key_of=of_a_user)
    for text in ("Book a table", "Make it noon"):
        await chat_with(saver).ainvoke(said(text), on("acme/ada/1"))
    await touched(backend, of_a_user("acme/ada/1"))
    (card,) = (await backend.conversations.list("acme", "ada")).cards
    assert (card.key, card.title, card.kinds) == (of_a_user("acme/ada/1"), "Book a table", ("langgraph",))


async def test_a_purged_thread_begins_anew_where_it_is_remembered(backend: Backend) -> None:
    graph = graph_with(StmSaver(backend))
    for text in ("first", "second"):
        await graph.ainvoke(said(text), on("chat"))
    await asyncio.sleep(0.05)
    assert (await backend.sessions.purge("default", older_than=0.02)).logs == 1
    assert await texts(graph, on("chat")) == []
    await graph.ainvoke(said("anew"), on("chat"))
    assert await texts(graph_with(StmSaver(backend)), on("chat")) == ["anew", "re: anew"]


async def test_a_sealed_thread_is_read_with_its_keys_alone(tmp_path: Any) -> None:
    url = f"sqlite:///{tmp_path}/sealed.db"
    async with open_backend(url, sealing=SEALING) as backend:
        graph = graph_with(StmSaver(backend))
        await graph.ainvoke(said("MARKER"), on("chat"))
        await StmStore(backend).aput(("notes",), "n", {"text": "MARKER"})
        assert await texts(graph_with(StmSaver(backend)), on("chat")) == ["MARKER", "re: MARKER"]
        assert (await backend.sessions.reseal("default")).ok
    assert all(b"MARKER" not in file.read_bytes() for file in tmp_path.iterdir())
    async with open_backend(url) as backend:
        with pytest.raises(SealMismatch):
            await StmSaver(backend).aget_tuple(on("chat"))


async def test_a_thread_of_which_nothing_is_left_is_listed_no_more(tmp_path: Any) -> None:
    url = f"sqlite:///{tmp_path}/stm.db"
    async with open_backend(url) as backend:
        saver = StmSaver(backend)
        for thread in ("gone", "kept"):
            await graph_with(saver).ainvoke(said("1"), {**on(thread), "metadata": {"run_id": thread}})
        await saver.adelete_for_runs(["gone"])
        assert {one.config["configurable"]["thread_id"] async for one in saver.alist(None)} == {"kept"}

    def cli(*arguments: str) -> tuple[int, str]:
        done = CliRunner().invoke(command, [*arguments, "--url", url])
        return done.exit_code, done.stdout

    of_user = "default:anonymous"
    assert await asyncio.to_thread(cli, "ls", of_user) == (0, f"{of_user}:kept\n")
    code, _ = await asyncio.to_thread(cli, "show", f"{of_user}:gone")
    assert code == 1
    code, exported = await asyncio.to_thread(cli, "export", "--user", of_user)
    assert (code, "gone" in exported) == (0, False)


async def test_a_run_of_a_thread_that_was_erased_stores_nothing_of_its_next_step(
    pods: tuple[Backend, Backend],
) -> None:
    one, other = (StmSaver(pod) for pod in pods)
    await chat_with(one).ainvoke(said("MARKER"), on("chat"))
    read = await one.aget_tuple(on("chat"))
    assert read is not None
    await other.adelete_thread("chat")
    with pytest.raises(EditConflict):
        await one.aput(read.config, point({"a": "MARKER"}), {"source": "loop"}, {"a": "1"})
    log = pods[1].item_log(MemoryKey("default", "anonymous", "chat"), "langgraph")
    assert not (await log.newest(0)).exists
    await chat_with(one).ainvoke(said("anew"), on("chat"))
    assert await texts(chat_with(other), on("chat")) == ["anew", "re: anew"]


async def test_all_threads_of_no_tenant_are_an_error(backend: Backend) -> None:
    saver = StmSaver(backend, key_of=of_a_user)
    with pytest.raises(ConfigurationError, match="tenants="):
        await all_of(saver.alist(None))
    with pytest.raises(ConfigurationError, match="tenants="):
        await saver.adelete_for_runs(["run"])


async def test_a_function_of_keys_that_fails_names_itself(backend: Backend) -> None:
    def broken(_: str) -> MemoryKey:
        raise ValueError("MARKER")

    with pytest.raises(InvalidKey, match="key_of") as caught:
        await StmSaver(backend, key_of=broken).aget_tuple(on("chat"))
    assert "MARKER" not in str(caught.value)
    nothing: Any = lambda _: None  # noqa: E731 -- a mistake of a user's
    with pytest.raises(InvalidKey):
        await StmSaver(backend, key_of=nothing).aget_tuple(on("chat"))
    with pytest.raises(InvalidKey, match="thread_id"):
        await StmSaver(backend).aget_tuple({"configurable": {}})


async def test_a_limited_list_is_the_newest_part_of_the_whole_one(backend: Backend) -> None:
    saver = StmSaver(backend)
    graph = graph_with(saver)
    for number in range(30):
        await graph.ainvoke(said(f"{number} " + "x" * 500), on("chat"))
    whole = [one.checkpoint["id"] for one in await all_of(saver.alist(put_at("chat")))]
    for limit in (1, 3, 50, 1000):
        some = await all_of(StmSaver(backend).alist(put_at("chat"), limit=limit))
        assert [one.checkpoint["id"] for one in some] == whole[:limit]
    before = put_at("chat", whole[10])
    some = await all_of(saver.alist(put_at("chat"), before=before, limit=5))
    assert [one.checkpoint["id"] for one in some] == whole[11:16]


async def test_pruning_keeps_the_latest_state_whole(backend: Backend) -> None:
    graph = graph_with(StmSaver(backend))
    for number in range(10):
        await graph.ainvoke(said(str(number)), on("chat"))
    values = (await graph.aget_state(on("chat"))).values
    assert len(values["messages"]) == 20
    assert len(values["steps"]) == 30
    for saver in (StmSaver(backend), graph.checkpointer):
        await saver.aprune(["chat"])
        assert (await graph_with(saver).aget_state(on("chat"))).values == values
        assert len(await all_of(saver.alist(put_at("chat")))) == 1
    await graph.ainvoke(said("more"), on("chat"))
    after = (await graph_with(StmSaver(backend)).aget_state(on("chat"))).values
    assert after["messages"][:20] == values["messages"]
    assert after["steps"][:30] == values["steps"]
    assert len(after["steps"]) == 33


async def test_an_interrupted_thread_can_be_resumed_once_it_is_pruned(backend: Backend) -> None:
    graph = graph_with(StmSaver(backend))
    await graph.ainvoke(said("first"), on("chat"))
    await graph.ainvoke(said("ask me"), on("chat"))
    await StmSaver(backend).aprune(["chat"])
    await graph.ainvoke(Command(resume="no"), on("chat"))
    assert await texts(graph, on("chat")) == ["first", "re: first", "ask me", "you said no"]
    assert len((await graph.aget_state(on("chat"))).values["steps"]) == 6


async def test_erasing_the_checkpoints_of_a_run_keeps_the_state_of_later_ones(backend: Backend) -> None:
    saver = StmSaver(backend)
    graph = graph_with(saver)
    for number in range(4):
        config = {**on("chat"), "metadata": {"run_id": f"run-{number}"}}
        await graph.ainvoke(said(str(number)), config)
    values = (await graph.aget_state(on("chat"))).values
    await saver.adelete_for_runs(["run-1", "run-2"])
    left_over = {one.metadata.get("run_id") for one in await all_of(saver.alist(on("chat")))}
    assert left_over == {"run-0", "run-3"}
    assert (await graph_with(StmSaver(backend)).aget_state(on("chat"))).values == values
    await graph.ainvoke(said("more"), on("chat"))
    assert len((await graph.aget_state(on("chat"))).values["steps"]) == 15
    await saver.adelete_for_runs(["run-0", "run-3"])
    assert len((await graph_with(StmSaver(backend)).aget_state(on("chat"))).values["steps"]) == 15


async def test_a_copied_thread_has_everything_and_goes_its_own_way(backend: Backend) -> None:
    saver = StmSaver(backend)
    graph = graph_with(saver)
    for number in range(3):
        await graph.ainvoke(said(str(number)), on("chat"))
    await saver.acopy_thread("chat", "copy")
    ours, copied = [
        [(one.checkpoint, one.metadata, one.pending_writes) for one in await all_of(saver.alist(on(thread)))]
        for thread in ("chat", "copy")
    ]
    assert ours == copied
    await graph.ainvoke(said("more"), on("copy"))
    assert len(await texts(graph, on("copy"))) == 8
    assert len(await texts(graph, on("chat"))) == 6
    with pytest.raises(SessionExists):
        await saver.acopy_thread("chat", "copy")


async def test_a_thread_is_exported_imported_and_copied_to_another_backend(backend: Backend) -> None:
    graph = graph_with(StmSaver(backend))
    for number in range(3):
        await graph.ainvoke(said(str(number)), on("chat"))
    values = (await graph.aget_state(on("chat"))).values
    key = MemoryKey("default", "anonymous", "chat")
    assert [one async for one in backend.sessions.logs("default", "anonymous")] == [("langgraph", key)]
    lines = [line async for line in backend.sessions.export_log_lines(key, "langgraph")]
    async with open_backend("memory://") as other:
        importing = other.sessions.importing()
        for line in lines:
            await importing.add(json.loads(json.dumps(line)))
        assert (await graph_with(StmSaver(other)).aget_state(on("chat"))).values == values
    await StmSaver(backend).adelete_thread("chat")
    assert (await graph.aget_state(on("chat"))).values == {}
    assert [one async for one in backend.sessions.logs("default", "anonymous")] == []


class Blocking(BaseCheckpointSaver[str]):
    """A checkpointer with blocking methods only, as LangGraph has for databases."""

    def __init__(self, inner: InMemorySaver) -> None:
        super().__init__()
        self.inner = inner

    def get_tuple(self, config: Any) -> CheckpointTuple | None:
        return self.inner.get_tuple(config)

    def list(self, config: Any, **options: Any) -> Any:
        return self.inner.list(config, **options)


@pytest.mark.parametrize("blocking", [False, True])
async def test_threads_of_another_checkpointer_are_copied_over(backend: Backend, blocking: bool) -> None:
    theirs = InMemorySaver()
    graph = graph_with(theirs)
    for thread in ("one", "two"):
        for number in range(3):
            await graph.ainvoke(said(str(number)), on(thread))
        history = [one async for one in graph.aget_state_history(on(thread))]
        await graph.ainvoke(said("branch"), history[7].config)
        await graph.ainvoke(said("ask me"), on(thread))
    source = Blocking(theirs) if blocking else theirs
    target = StmSaver(backend)
    ours = graph_with(target)
    assert await target.aget_tuple(on("one")) is None
    count = await copy_threads(source, target)
    assert count == len([*theirs.list(None)])
    assert await copy_threads(source, target, ["one"]) == 0
    for thread in ("one", "two"):
        expected = [one async for one in graph.aget_state_history(on(thread))]
        found = [one async for one in ours.aget_state_history(on(thread))]
        assert [(one.config, one.values, one.next) for one in found] == [
            (one.config, one.values, one.next) for one in expected
        ]
        for one in (graph, ours):
            await one.ainvoke(Command(resume="yes"), on(thread))
        assert (await ours.aget_state(on(thread))).values == (await graph.aget_state(on(thread))).values


async def test_versions_that_are_numbers_are_copied_as_texts(backend: Backend) -> None:
    class Numbers(InMemorySaver):
        def get_next_version(self, current: Any, channel: None) -> Any:
            return 1 if current is None else current + 1

    theirs = Numbers()
    graph = graph_with(theirs)
    for number in range(12):
        await graph.ainvoke(said(str(number)), on("chat"))
    await copy_threads(theirs, StmSaver(backend))
    ours = graph_with(StmSaver(backend))
    for one in (graph, ours):
        await one.ainvoke({"messages": [HumanMessage("more", id="m")]}, on("chat"))
    assert (await ours.aget_state(on("chat"))).values == (await graph.aget_state(on("chat"))).values


# Without an event loop


def test_blocking_graphs_run_on_the_loop_of_the_backend(tmp_path: Any) -> None:
    with sync.open_backend(f"sqlite:///{tmp_path}/stm.db") as backend:
        saver = StmSaver(backend.asynchronous, run=backend.run)
        graph = graph_with(saver)
        for text in ("first", "second"):
            with saver.turn("chat"):
                graph.invoke(said(text), on("chat"))
                other = StmSaver(backend.asynchronous, run=backend.run)
                with pytest.raises(EditConflict), other.turn("chat", wait_s=0):
                    pytest.fail("two have the turn")
        with pytest.raises(ZeroDivisionError), saver.turn("chat"):
            _ = 1 / 0
        history = [*graph.get_state_history(on("chat"))]
        assert [one.content for one in history[0].values["messages"]][-1] == "re: second"
        graph.invoke(said("instead"), history[-1].config)
        assert [one.config["configurable"]["thread_id"] for one in saver.list(None, limit=1)] == ["chat"]
        values = graph.get_state(on("chat")).values
        saver.copy_thread("chat", "copy")
        saver.prune(["chat"])
        assert graph.get_state(on("chat")).values == graph.get_state(on("copy")).values == values
        saver.delete_for_runs(["none"])
        saver.delete_thread("chat")
        assert graph.get_state(on("chat")).values == {}
        read = saver.get_tuple(on("copy"))
        assert read is not None
        saver.put(read.config, point({"a": 1}), {"source": "loop"}, {"a": "1"})
        with pytest.raises(EditConflict):
            saver.put(read.config, point({"a": 1}), {"source": "loop"}, {"a": "1"})


async def test_blocking_methods_without_a_loop_say_what_to_do(backend: Backend) -> None:
    saver = StmSaver(backend)
    with pytest.raises(ConfigurationError, match=r"get_tuple blocks .* use aget_tuple"):
        saver.get_tuple(on("chat"))
    with pytest.raises(ConfigurationError, match="write `async with`"), saver.turn("chat"):
        pytest.fail("nothing was claimed")
    with pytest.raises(ConfigurationError, match="list blocks"):
        next(saver.list(None))
    with pytest.raises(ConfigurationError, match="put_writes blocks"):
        saver.put_writes(put_at("chat", "1"), [("a", 1)], "task")
    with pytest.raises(ConfigurationError, match="checkpoint_id"):
        await saver.aput_writes(on("chat"), [("a", 1)], "task")
    with pytest.raises(ConfigurationError, match="strategy"):
        await saver.aprune(["chat"], strategy="keep_some")
