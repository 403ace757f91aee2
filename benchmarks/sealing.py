"""What sealing adds to a turn: the processor time of this process, beside that of an unsealed backend.

    python -m benchmarks.sealing [--tiny] [--write [PAGE]]

`--write` writes `benchmarks/SEALING.md` or another page; without it the page is only printed. A whole run
takes a minute.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import random
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from benchmarks.machine import Meter
from benchmarks.measuring import DIALOGUE, note
from benchmarks.pages import machine, spread, table
from stm_backends import (
    Backend,
    ConversationTurn,
    EnvelopeKeys,
    MemoryKey,
    Sealing,
    ShortTermMemoryConfig,
    StaticKeys,
    open_backend,
)
from stm_backends.drivers.in_memory import MemoryDriver
from stm_backends.records.keys import memory_key
from stm_backends.sealing.cipher import ENTRY, Cipher
from stm_backends.sealing.wrapping import LocalWrapping

PAGE = Path("benchmarks/SEALING.md")
GOAL_US: Final = 60.0
TURN_BYTES: Final = 1_000
CLEAR: Final = "unsealed"
CONFIG: Final = ShortTermMemoryConfig(strategy="truncation")

_TEXT: Final = "I want to book a table for two at half past eleven in San Jose, please. " * 20


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How many rounds are measured, of how many dialogues on each side.

    Blocks are short, so that some are not interrupted by other programs.
    """

    rounds: int = 100
    dialogues: int = 4


TINY: Final = Plan(rounds=2, dialogues=2)
"""For the test that a run works; its figures mean nothing."""


@dataclass
class Figures:
    """Microseconds of processor time for a turn, by side, one for each round; and whether others ran."""

    turns: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    busy: bool = False

    def added(self, side: str) -> list[float]:
        """Return what a side takes more than the unsealed one, in each round."""
        return [ours - clear for ours, clear in zip(self.turns[side], self.turns[CLEAR], strict=True)]


@asynccontextmanager
async def _sides(url: str) -> AsyncIterator[dict[str, Backend]]:
    """Open a backend for each side; `url` has a place for its name."""
    async with AsyncExitStack() as stack:
        store = MemoryDriver()
        await store.open()
        wrapping = LocalWrapping({"w1": os.urandom(32)}, primary="w1")
        sealings = {
            CLEAR: None,
            "StaticKeys": Sealing(StaticKeys({"k1": os.urandom(32)}, primary="k1")),
            "EnvelopeKeys": Sealing(EnvelopeKeys(store, wrapping)),
        }
        yield {
            side: await stack.enter_async_context(open_backend(url.format(side), sealing=sealing))
            for side, sealing in sealings.items()
        }


async def _block(backend: Backend, name: str, dialogues: int) -> float:
    """Return the microseconds of a turn in so many new dialogues, one after the other."""
    half = _TEXT[: TURN_BYTES // 2]
    start = time.process_time()
    for number in range(dialogues):
        memory = backend.memory(MemoryKey("acme", "u1", f"{name} {number}"), CONFIG)
        for place in range(DIALOGUE):
            await memory.add_turn(ConversationTurn(half, half, ts=float(place)))
            await memory.get_llm_context()
    return 1e6 * (time.process_time() - start) / (dialogues * DIALOGUE)


async def measure(url: str, plan: Plan) -> Figures:
    """Measure rounds of all sides in random order."""
    figures = Figures()
    async with _sides(url) as sides:
        for round_ in range(-1, plan.rounds):  # the first only warms up
            gc.collect()
            with Meter().reading() as usage:
                taken = {
                    side: await _block(sides[side], f"{round_}", plan.dialogues)
                    for side in random.sample([*sides], len(sides))
                }
            if round_ >= 0:
                figures.busy |= usage.busy
                for side, time_ in taken.items():
                    figures.turns.setdefault(side, []).append(time_)
    return figures


def calls(repeats: int) -> dict[str, float]:
    """Return the microseconds of the cipher's calls on a turn's bytes, and of deriving a record's key."""
    key, secret = memory_key(MemoryKey("acme", "u1", "chat")), os.urandom(32)
    cipher, value = Cipher(secret, "k1", key), os.urandom(TURN_BYTES)
    sealed = cipher.seal(ENTRY, value)
    each: dict[str, Callable[[], object]] = {
        "seal a value": lambda: cipher.seal(ENTRY, value),
        "open a value": lambda: cipher.open(ENTRY, sealed),
        "derive the key of a record": lambda: Cipher(secret, "k1", key),
    }
    return {name: _timed(call, repeats) for name, call in each.items()}


def _timed(call: Callable[[], object], repeats: int) -> float:
    start = time.process_time()
    for _ in range(repeats):
        call()
    return 1e6 * (time.process_time() - start) / repeats


def written(results: dict[str, Figures], alone: dict[str, float]) -> str:
    """Return the page."""
    rows: list[list[str]] = []
    for name, figures in results.items():
        clear = figures.turns[CLEAR]
        rows.append([name, CLEAR, spread(clear, 0), "", "", ""])
        for side in sorted(figures.turns.keys() - {CLEAR}):
            times, least = figures.turns[side], min(figures.turns[side]) - min(clear)
            verdict = "reached" if least < GOAL_US else "**missed**"
            rows.append(["", side, spread(times, 0), spread(figures.added(side), 0), f"{least:.0f}", verdict])
    rounds = len(next(iter(results.values())).turns[CLEAR])
    noisy = any(figures.busy for figures in results.values())
    warning = "**Other programs were running; times may be too long.**\n\n" if noisy else ""
    one = [[name, f"{time_:.1f}"] for name, time_ in alone.items()]
    return f"""# What sealing costs

Written by `python -m benchmarks.sealing --write`. {machine()}, {time.strftime("%-d %B %Y", time.gmtime())}.

{warning}A turn is one `add_turn` of {TURN_BYTES:,} characters and one `get_llm_context`. A dialogue has
{DIALOGUE} turns, the strategy is `truncation`, and one dialogue follows the other. The time is the processor
time of the process in microseconds: a median of {rounds} rounds, with the lowest and the highest. Each round
has a block of each side, in random order; *added* is the difference of two blocks of one round. *At least* is
the difference of the lowest times of two sides, which other programs disturb least. It has the goal, less
than {GOAL_US:.0f} µs. A read opens all turns that the record has.

{table(["", "keys", "a turn", "added", "at least", "goal"], rows)}
The calls of the cipher alone, for a value of {TURN_BYTES:,} bytes:

{table(["", "µs"], one)}"""


def main() -> None:
    """Measure, and print or write the page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tiny", action="store_true", help="only show that it works")
    parser.add_argument("--write", nargs="?", const=PAGE, type=Path, metavar="PAGE", help="write the page")
    arguments = parser.parse_args()
    plan = TINY if arguments.tiny else Plan()
    results: dict[str, Figures] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, url in (("in memory", "memory://"), ("SQLite", f"sqlite:///{folder}/{{}}.db")):
            note(f"{name}: {plan.rounds} rounds")
            results[name] = asyncio.run(measure(url, plan))
    page = written(results, calls(100 if arguments.tiny else 20_000))
    if arguments.write:
        arguments.write.write_text(page, "utf-8")
    else:
        print(page)


if __name__ == "__main__":
    main()
