"""How long a recall from long-term memory takes, with 100, 1,000 and 10,000 memories of a user.

    python -m benchmarks.recall [--tiny] [--datastores sqlite,redis] [--write [PAGE]]

`--write` writes `benchmarks/RECALL.md` or another page; without it the page is only printed. A whole run
takes about two minutes for each datastore.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Final

from benchmarks.datastores import Opened, folder_for_all, redis, sqlite
from benchmarks.machine import Meter
from benchmarks.measuring import note
from benchmarks.pages import machine, spread, table
from stm_backends.backend import Backend
from stm_backends.tiers import BackendGraph, MemoryManager, MemoryTier

PAGE: Final = Path("benchmarks/RECALL.md")
GOAL_MS: Final = 50.0
OWNER: Final = ("acme", "u1")
LONG: Final = MemoryTier.LONG_TERM
WORDS: Final = 30
VOCABULARY: Final = [f"word{rank}" for rank in range(1, 5_001)]
_WEIGHTS: Final = [*accumulate(1 / rank for rank in range(1, 5_001))]
_AT_ONCE: Final = 16

_DATASTORES: Final[dict[str, Opened]] = {"sqlite": sqlite, "redis": redis}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The numbers of memories, and how often each call is measured."""

    sizes: tuple[int, ...] = (100, 1_000, 10_000)
    rounds: int = 50


TINY: Final = Plan(sizes=(20, 40), rounds=10)
"""For the test that a run works; its figures mean nothing."""


@dataclass
class Figures:
    """Milliseconds of each call, by what it is and by the number of memories; and whether others ran."""

    about: str
    external: bool
    calls: dict[str, dict[int, list[float]]] = field(default_factory=dict[str, dict[int, list[float]]])
    busy: bool = False


def text(number: int) -> str:
    """Return the content of a memory: always the same words for the same number."""
    return " ".join(random.Random(number).choices(VOCABULARY, cum_weights=_WEIGHTS, k=WORDS))


async def _fill(memory: MemoryManager, numbers: range) -> float:
    """Add memories; returns the milliseconds for each."""
    waiting = iter(numbers)

    async def worker() -> None:
        for number in waiting:
            await memory.remember(f"memory_{number}", text(number), tier=LONG, importance=0.5)

    start = time.perf_counter()
    await asyncio.gather(*(worker() for _ in range(_AT_ONCE)))
    return 1e3 * (time.perf_counter() - start) / len(numbers)


def _calls(
    memory: MemoryManager, graph: BackendGraph, size: int
) -> dict[str, Callable[[], Awaitable[object]]]:
    ltm = memory.long_term

    def some() -> int:
        return random.randrange(size)

    def pair() -> str:
        return " ".join(random.sample(sorted(set(text(some()).split())), 2))

    return {
        "one entry, by a word of all and one that only it has": lambda: ltm.recall(f"memory {some()}"),
        "two words of an entry": lambda: ltm.recall(pair()),
        "a word that no entry has": lambda: ltm.recall("nothing"),
        "the most frequent word, the best 10 entries": lambda: ltm.recall("word1", limit=10),
        "the most frequent word, 100 entries": lambda: ltm.recall("word1"),
        "the same search, without counting accesses": lambda: graph.search_vertices("memory", "word1"),
        "a context window of 1,000 tokens": lambda: memory.get_context_window(1_000),
    }


async def measure(opened: Opened, folder: Path, plan: Plan) -> Figures:
    """Measure each call on one datastore, at each size, in random order."""
    async with opened(folder) as datastore:
        figures = Figures(datastore.about, datastore.address.external)
        backend = Backend(datastore.driver)
        memory, graph = MemoryManager(backend=backend, owner=OWNER), BackendGraph(backend, OWNER)
        meter, before = Meter(watches=not figures.external), 0
        for size in plan.sizes:
            note(f"{datastore.name}: {size:,} memories")
            taken = await _fill(memory, range(before, size))
            figures.calls.setdefault("adding a memory, 16 at a time, for each", {})[size] = [taken]
            before = size
            calls = _calls(memory, graph, size)
            for round_ in range(-1, plan.rounds):  # the first only warms up
                gc.collect()
                with meter.reading() as usage:
                    for name in random.sample([*calls], len(calls)):
                        if name.startswith("a context") and round_ >= plan.rounds // 10:
                            continue
                        start = time.perf_counter()
                        await calls[name]()
                        took = 1e3 * (time.perf_counter() - start)
                        if round_ >= 0:
                            figures.calls.setdefault(name, {}).setdefault(size, []).append(took)
                figures.busy |= usage.busy
    return figures


def written(results: dict[str, Figures], plan: Plan) -> str:
    """Return the page."""
    parts = [
        f"""# What a recall takes

Written by `python -m benchmarks.recall --write`. {machine()}, {time.strftime("%-d %B %Y", time.gmtime())}.

The long-term memory of one user, with memories of {WORDS} words. The words are drawn from
{len(VOCABULARY):,}; the second is half as frequent as the first, the third a third, and so on, as words of a
language are. Each call is alone: milliseconds, a median of {plan.rounds} (context windows: fewer), with the
lowest and the highest. A recall counts an access to each entry that it returns, which takes a load and a
write.

The goal is at most {GOAL_MS:.0f} ms on Redis for a recall among 10,000 memories.
"""
    ]
    for name, figures in results.items():
        warning = "**Other programs were running; times may be too long.**\n\n" if figures.busy else ""
        rows = [
            [call, *(spread(by_size[size], 1) for size in plan.sizes)]
            for call, by_size in figures.calls.items()
        ]
        columns = ["a call", *(f"{size:,} memories" for size in plan.sizes)]
        parts.append(f"## {name}\n\n{figures.about}.\n\n{warning}{table(columns, rows)}")
    return "\n".join(parts)


def main() -> None:
    """Measure, and print or write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tiny", action="store_true", help="only show that it works")
    parser.add_argument("--datastores", default=",".join(_DATASTORES), help="some of sqlite,redis")
    parser.add_argument("--write", nargs="?", const=PAGE, type=Path, metavar="PAGE", help="write the page")
    arguments = parser.parse_args()
    plan = TINY if arguments.tiny else Plan()
    results: dict[str, Figures] = {}
    for name in arguments.datastores.split(","):
        with folder_for_all() as folder:
            results[name] = asyncio.run(measure(_DATASTORES[name], folder, plan))
    page = written(results, plan)
    if arguments.write:
        arguments.write.write_text(page, "utf-8")
    else:
        print(page)


if __name__ == "__main__":
    main()
