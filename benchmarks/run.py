"""What a turn and a read cost, and whether either grows with the conversation.

    python benchmarks/run.py [--rounds 400] [--lengths 10,100,1000,10000] [--pause 0] [-o results.md]

Two tables of medians, in microseconds:

- `DefaultShortTermMemory`: `add_turn` and `get_llm_context` after so many turns, in process.
- SQLite: the distributed memory's `add_turn` and `get_llm_context` beside one bare statement that writes
  or reads the same bytes through the same hand-off from the event loop, and beside that statement sent
  directly, blocking. The four take turns in every round, in random order, so that whatever slows the
  machine slows all. Folding is on and the background settles between rounds: what is measured is what a
  caller waits for.

`--pause 0.003` lets the machine fall asleep before each call, as it does between the turns of a person;
then caches are cold, and what has more code pays more for it. By the memory's clock a turn comes every ten
seconds: the ids of a minute's turns are remembered, and at the machine's own pace that would be all.
"""

from __future__ import annotations

import argparse
import asyncio
import platform
import random
import sqlite3
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from stm_backends import (
    ConversationTurn,
    DefaultShortTermMemory,
    DistributedShortTermMemory,
    ExtractiveSummarizer,
    MemoryBudget,
    MemoryKey,
    ShortTermMemoryConfig,
    open_backend,
)
from stm_backends.keys import memory_key
from stm_backends.sqlite.thread import ConnectionThread

CONFIG = ShortTermMemoryConfig(
    strategy="rolling_summary",
    budget=MemoryBudget(full_zone_turns=5, summary_max_tokens=500),
    fold_batch_turns=5,
)
SUMMARIZER = ExtractiveSummarizer(max_tokens=500)


def turn(number: int) -> ConversationTurn:
    """Return a turn of about the size of a real one: 455 bytes of text."""
    return ConversationTurn(
        f"Turn {number}: I want to book a table for two at half past eleven in San Jose, please.",
        "Your reservation is made. " + "They have good vegetarian options and outdoor seating. " * 6,
        ts=float(number),
    )


async def timed(call: Callable[..., Awaitable[object]], *args: object) -> float:
    """Return how many microseconds a call took."""
    start = time.perf_counter()
    await call(*args)
    return (time.perf_counter() - start) * 1e6


async def settled(memory: DefaultShortTermMemory | DistributedShortTermMemory) -> None:
    """Let the background end, so that it is not measured with the next call."""
    while memory.busy:  # noqa: ASYNC110 -- it tells nobody when it is done
        await asyncio.sleep(0.0005)


async def default_memory(lengths: list[int], rounds: int) -> list[str]:
    """Return the table of the memory in process."""
    rows = ["| turns before | add_turn | get_llm_context |", "|---:|---:|---:|"]
    memory = DefaultShortTermMemory(config=CONFIG, summarizer=SUMMARIZER)
    added = 0
    for length in lengths:
        while added < length:
            await memory.add_turn(turn(added))
            added += 1
            if added % 50 == 0:
                await memory.flush()
        await settled(memory)
        adds: list[float] = []
        reads: list[float] = []
        for _ in range(rounds):
            adds.append(await timed(memory.add_turn, turn(added)))
            reads.append(await timed(memory.get_llm_context))
            added += 1
            await settled(memory)
        rows.append(f"| {length:,} | {statistics.median(adds):.0f} | {statistics.median(reads):.0f} |")
    return rows


class Bare:
    """One statement that writes, and one that reads, the bytes that the memory does."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.thread = ConnectionThread(self.connect, name="bare")
        self.direct = self.connect()

    def connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self._path, timeout=5, isolation_level=None)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = normal")
        connection.execute("CREATE TABLE IF NOT EXISTS written (id INTEGER PRIMARY KEY, entry BLOB)")
        connection.execute("CREATE TABLE IF NOT EXISTS kept (id INTEGER PRIMARY KEY, entry BLOB)")
        return connection

    def keep(self, values: list[bytes]) -> None:
        self.direct.execute("DELETE FROM kept")
        self.direct.executemany("INSERT INTO kept (entry) VALUES (?)", [(value,) for value in values])

    @staticmethod
    def write(connection: sqlite3.Connection, entry: bytes) -> None:
        connection.execute("INSERT INTO written (entry) VALUES (?)", (entry,))

    @staticmethod
    def read(connection: sqlite3.Connection) -> list[bytes]:
        return connection.execute("SELECT entry FROM kept ORDER BY id").fetchall()

    async def handed_write(self, entry: bytes) -> None:
        until = asyncio.get_running_loop().time() + 5
        await self.thread.run(lambda connection: self.write(connection, entry), until=until)

    async def handed_read(self) -> None:
        until = asyncio.get_running_loop().time() + 5
        await self.thread.run(self.read, until=until)


async def sqlite_memory(folder: Path, lengths: list[int], rounds: int, pause: float) -> list[str]:
    """Return the table of the distributed memory on SQLite."""
    columns = "turns before|add_turn|bare write|ratio|direct|get_llm_context|bare read|ratio|direct"
    rows = [f"| {columns.replace('|', ' | ')} |", "|---:" * 9 + "|"]
    bare = Bare(folder / "bare.db")
    async with open_backend(f"sqlite:///{folder / 'memory.db'}") as backend:
        added = 0
        conversation = MemoryKey("acme", "u1", "chat")
        memory = DistributedShortTermMemory(
            backend.driver, conversation, CONFIG, summarizer=SUMMARIZER, clock=lambda: 1e9 + 10 * added
        )
        key = memory_key(conversation)
        for length in lengths:
            while added < length:
                await memory.add_turn(turn(added))
                added += 1
                if added % 10 == 0:
                    await memory.flush()
            await settled(memory)
            taken: dict[str, list[float]] = {name: [] for name in ("add", "read", "w", "r", "dw", "dr")}
            for _ in range(rounds):
                record = await backend.driver.load(key)
                if record is None:
                    raise LookupError("the conversation is gone")
                bare.keep([record.body or b"", *record.tail])
                entry = record.tail[-1]
                calls: list[tuple[str, Callable[..., Awaitable[object]], tuple[object, ...]]] = [
                    ("w", bare.handed_write, (entry,)),
                    ("r", bare.handed_read, ()),
                    ("add", memory.add_turn, (turn(added),)),
                    ("read", memory.get_llm_context, ()),
                ]
                random.shuffle(calls)
                await settled(memory)
                # Both threads have just been at work, whichever is measured first.
                await bare.handed_read()
                await backend.ping()
                for name, call, arguments in calls:
                    if pause:
                        await asyncio.sleep(pause)
                    taken[name].append(await timed(call, *arguments))
                added += 1
                start = time.perf_counter()
                bare.write(bare.direct, entry)
                middle = time.perf_counter()
                bare.read(bare.direct)
                taken["dw"].append((middle - start) * 1e6)
                taken["dr"].append((time.perf_counter() - middle) * 1e6)
            m = {name: statistics.median(values) for name, values in taken.items()}
            rows.append(
                f"| {length:,} | {m['add']:.0f} | {m['w']:.0f} | **{m['add'] / m['w']:.2f}** | {m['dw']:.0f} "
                f"| {m['read']:.0f} | {m['r']:.0f} | **{m['read'] / m['r']:.2f}** | {m['dr']:.0f} |"
            )
    bare.direct.close()
    await bare.thread.close()
    return rows


async def main() -> None:
    """Measure, print, and write to a file if told to."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=400)
    parser.add_argument("--lengths", default="10,100,1000,10000")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds of idleness before each call")
    parser.add_argument("-o", "--output", type=Path)
    arguments = parser.parse_args()
    lengths = [int(length) for length in arguments.lengths.split(",")]
    about = f"Python {platform.python_version()}, SQLite {sqlite3.sqlite_version}"
    with tempfile.TemporaryDirectory() as folder:
        lines = [
            f"{about}: medians of {arguments.rounds} rounds in microseconds.",
            "",
            "**DefaultShortTermMemory**",
            "",
            *await default_memory(lengths, arguments.rounds),
            "",
            "**Distributed memory on SQLite** (synchronous=normal)",
            "",
            *await sqlite_memory(Path(folder), lengths, arguments.rounds, arguments.pause),
        ]
    print("\n".join(lines))
    if arguments.output:
        arguments.output.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    asyncio.run(main())
