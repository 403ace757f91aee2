"""How long a search takes in a user's conversations: indexed, not indexed yet, and some of them active.

    python -m benchmarks.search [--tiny] [--datastores sqlite,redis] [--dialogues FILE] [--write [PAGE]]

`--write` writes `benchmarks/SEARCH.md` or another page; without it the page is only printed. A whole run
takes about five minutes for each datastore.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, Final

from benchmarks.datastores import ALL, Datastore, connect, folder_for_all, names_of, place_for_files
from benchmarks.machine import Meter
from benchmarks.measuring import Counting, batched, note, summarize
from benchmarks.pages import add_write, machine, spread, table
from benchmarks.peers.measure import dialogues
from stm_backends.backend import Backend
from stm_backends.types import ConversationTurn, MemoryKey

PAGE: Final = Path("benchmarks/SEARCH.md")
GOAL_MS: Final = 100.0
OWNER: Final = ("acme", "u1")
TURNS: Final = 50
WORDS: Final = 100
VOCABULARY: Final = [f"word{rank}" for rank in range(1, 20_001)]
_WEIGHTS: Final = [*accumulate(1 / rank for rank in range(1, 20_001))]
_APART_S: Final = 2_400.0
"""How long after a conversation the next one is: three in two hours."""

_AT_ONCE: Final = 16

Says = Callable[[int, int], ConversationTurn]
"""Returns a turn by the numbers of its conversation and of its own."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How many conversations there are, how many of them become active again, and how often is measured."""

    conversations: int = 1_000
    active: int = 20
    rounds: int = 30


TINY: Final = Plan(conversations=12, active=3, rounds=2)
"""For the test that a run works; its figures mean nothing."""

QUERIES: Final = {
    "a word of one conversation": "own{some}",
    "a word of some conversations": "word9000",
    "the most frequent word": "word1",
    "two words that are often in one turn": "word4 word40",
    "a word that nobody has said": "nothing",
}


def drawn(conversation: int, number: int) -> ConversationTurn:
    """Return a turn whose words are drawn from the vocabulary: always the same for the same numbers."""
    words = random.Random(conversation * TURNS + number).choices(VOCABULARY, cum_weights=_WEIGHTS, k=WORDS)
    return ConversationTurn(" ".join(words[: WORDS // 5]), " ".join(words[WORDS // 5 :]))


def from_file(path: Path) -> Says:
    """Return the turns of a file of dialogues, over and over again."""
    said = dialogues(str(path))
    return lambda conversation, number: ConversationTurn(*said[(conversation * TURNS + number) % len(said)])


@dataclass
class Figures:
    """What was measured on one datastore.

    `calls` has milliseconds, `spent` those of this process's processor, and `requests` how many there were.
    """

    about: str
    external: bool
    calls: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    spent: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    requests: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    busy: bool = False

    def add(self, name: str, wall: float, client: float, requests: int) -> None:
        """Add one call, in seconds."""
        for figures, value in (
            (self.calls, 1e3 * wall),
            (self.spent, 1e3 * client),
            (self.requests, requests),
        ):
            figures.setdefault(name, []).append(value)


class User:
    """The conversations of a user on one datastore. The clock of the catalogue is `now`."""

    def __init__(self, datastore: Datastore, says: Says, plan: Plan) -> None:
        self.counting = Counting(datastore.driver)
        self.backend = Backend(self.counting)
        self.now = time.time()
        self._says = says
        self._plan = plan
        # A backend has no clock of its own.
        self.internals: Any = self.backend
        self.internals._catalogue.clock = lambda: self.now  # noqa: SLF001

    async def talk(self, conversation: int, numbers: range) -> None:
        """Add turns to a conversation, which the summarizer covers five at a time, as they come."""
        memory = self.backend.memory(MemoryKey(*OWNER, f"chat {conversation:05}"), summarizer=summarize)
        for number in numbers:
            turn = replace(self._says(conversation, number), ts=self.now)
            if number == TURNS // 2:
                turn = replace(turn, user_message=f"{turn.user_message} own{conversation}")
            await memory.add_turn(turn)
            if number % 5 == 0:
                await memory.flush()
        await memory.flush()

    async def fill(self) -> None:
        """Have all conversations, one after the other by the clock of the catalogue; the last one is old."""
        end = self.now - 4 * 3_600.0
        for some in batched(range(self._plan.conversations), _AT_ONCE):
            self.now = end - _APART_S * (self._plan.conversations - some[0])
            await asyncio.gather(*(self.talk(one, range(TURNS)) for one in some))
            if some[0] % 160 == 0:
                note(f"  {some[0]:,} conversations")
        self.now = end + 4 * 3_600.0

    async def search(
        self, figures: Figures, name: str, words: str, *, after: str | None = None
    ) -> str | None:
        """Search once, and note what that took; returns where the next call would begin."""
        before, wall, client = self.counting.count(), time.perf_counter(), time.process_time()
        results = await self.backend.conversations.search(*OWNER, words, after=after)
        taken = time.perf_counter() - wall, time.process_time() - client
        figures.add(name, *taken, self.counting.count() - before)
        return results.after

    async def indexed(self) -> None:
        """Wait until what was read is indexed: no operation waits for it."""
        await self.internals._searching._background.close(timeout=3_600)  # noqa: SLF001
        self.internals._searching.start_over()  # noqa: SLF001

    async def settled(self) -> None:
        """Have the catalogue show all that was said."""
        await self.internals._touches.close(timeout=600)  # noqa: SLF001


async def measure(datastore: Datastore, plan: Plan, says: Says) -> Figures:
    """Fill a datastore, and measure searches in random order."""
    figures, user = Figures(datastore.about, datastore.address.external), User(datastore, says, plan)
    meter = Meter(watches=not figures.external)
    note(f"{datastore.name}: {plan.conversations:,} conversations")
    await user.fill()
    await user.settled()
    note(f"{datastore.name}: the first search")
    first, after = "the first search, which reads everything: each call", None
    while (after := await user.search(figures, first, "nothing", after=after)) is not None:
        await user.indexed()
    await user.indexed()
    note(f"{datastore.name}: searching")
    await _rounds(figures, user, plan, meter, "")
    for conversation in random.Random(0).sample(range(plan.conversations), plan.active):
        await user.talk(conversation, range(TURNS, TURNS + 3))
    await user.settled()
    await _rounds(figures, user, plan, meter, f", {plan.active} conversations active lately")
    return figures


async def _rounds(figures: Figures, user: User, plan: Plan, meter: Meter, suffix: str) -> None:
    for round_ in range(-1, plan.rounds):  # the first only warms up
        gc.collect()
        with meter.reading() as usage:
            for name, words in random.sample([*QUERIES.items()], len(QUERIES)):
                some = words.format(some=random.randrange(plan.conversations))
                kept = figures if round_ >= 0 else Figures("", external=False)
                await user.search(kept, name + suffix, some)
        figures.busy |= usage.busy


DRAWN: Final = f"""\
The words of a turn, {WORDS} of
them, are drawn from {len(VOCABULARY):,}; the second is half as frequent as the first, the third a third, and
so on, as words of a language are."""


def written(results: dict[str, Figures], plan: Plan, said: str) -> str:
    """Return the page."""
    parts = [
        f"""# What a search takes

Written by `python3 -m benchmarks.search --write`: {time.strftime("%-d %B %Y")}; {machine()}.

One user with {plan.conversations:,} conversations of {TURNS} turns, three in two hours. {said} Calls of
`conversations.search`, each alone: milliseconds, a median of {plan.rounds}, with the lowest and the highest;
and the medians of milliseconds of this process's processor, and of the requests of the driver.

The goal is at most {GOAL_MS:.0f} ms on SQLite and on Redis, once the conversations are indexed.
"""
    ]
    columns = ["a call", "ms", "processor, ms", "requests"]
    for name, figures in results.items():
        warning = "**Other programs were running; times may be too long.**\n\n" if figures.busy else ""
        rows = [
            [
                call,
                spread(times, 1),
                f"{statistics.median(figures.spent[call]):,.1f}",
                f"{statistics.median(figures.requests[call]):,.0f}",
            ]
            for call, times in figures.calls.items()
        ]
        parts.append(f"## {name}\n\n{figures.about}.\n\n{warning}{table(columns, rows)}")
    return "\n".join(parts)


async def page(names: Sequence[str], plan: Plan, says: Says, said: str) -> str:
    """Measure the datastores, one after the other, and return the page."""
    results: dict[str, Figures] = {}
    for name in names:
        with folder_for_all(place_for_files()) as folder:
            async with ALL[name](folder) as started, connect(started.address.patient()) as datastore:
                results[datastore.name] = await measure(datastore, plan, says)
    return written(results, plan, said)


def main() -> None:
    """Measure, and print or write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="only show that it works")
    parser.add_argument("--datastores", type=names_of, default=["sqlite", "redis"], metavar="NAMES")
    parser.add_argument("--dialogues", type=Path, metavar="FILE", help="turns to be said, as for replay")
    add_write(parser, PAGE)
    arguments = parser.parse_args()
    says, said = drawn, DRAWN
    if arguments.dialogues:
        says, said = from_file(arguments.dialogues), f"The turns are those of `{arguments.dialogues.name}`."
    text = asyncio.run(page(arguments.datastores, TINY if arguments.tiny else Plan(), says, said))
    if arguments.write:
        arguments.write.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
