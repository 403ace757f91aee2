"""The longest dialogues, with results of tools of 30 kB, replayed while pods are killed.

Run pytest with `-rP` to see the figures. `STM_TEST_LONG_TURNS` is how long the dialogues are, by default 600
turns.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from stm_backends import MemoryBudget, ShortTermMemoryConfig, open_backend
from stm_backends.backend import Backend
from stm_backends.cli.replay.ledger import split, tokens_of
from stm_backends.cli.replay.pods import Setup
from stm_backends.errors import Unavailable
from stm_backends.testing.faults import Proxy
from tests.support.command_line import replay
from tests.support.places import EACH, Place

pytestmark = [pytest.mark.full, pytest.mark.parametrize("datastore", ["sqlite", *EACH])]

TURNS = int(os.environ.get("STM_TEST_LONG_TURNS") or 600)
LONGEST_S = 1100
"""How long a replay may last: 3 minutes on two free cores, and more when another test runs."""

RESULT = 30_000
SUMMARY = 1_000
SLOW = ("mongo", "dynamo")
"""There, one dialogue; elsewhere two at once."""

BUDGET = 20_000
"""Tokens that a model is shown at most: less than two results and a half."""


def dialogues(folder: Path, sessions: Sequence[str], count: int) -> Path:
    """Write dialogues whose answers quote what a tool found: a replay shortens what is called a result."""
    file = folder / "long.jsonl"
    with file.open("w", encoding="utf-8") as out:
        for session in sessions:
            turns = [
                {"user": f"Search for {session}{place}.", "assistant": found(f"{session}{place}")}
                for place in range(count)
            ]
            out.write(json.dumps({"session": session, "turns": turns}) + "\n")
    return file


def found(what: str) -> str:
    """Return a result of its own for each search."""
    chance = random.Random(what)
    row = "Row {} of {} is {}. "
    return "".join(row.format(number, what, chance.random()) for number in range(RESULT // 36))


class Model:
    """A model that is shown the dialogues, within its budget, while they are replayed."""

    def __init__(self, url: str, sessions: Sequence[str]) -> None:
        self._sessions = sessions
        budget = MemoryBudget(3, SUMMARY, total_max_tokens=BUDGET)
        config = ShortTermMemoryConfig("rolling_summary", budget, summarizer_timeout_s=2.0)
        self._setup = Setup(backend=url, url=None, tenant="demo", user="replay", config=config)
        self.tokens: list[int] = []
        self.summaries: list[str] = []

    async def look(self, backend: Backend) -> None:
        """Be shown each dialogue once."""
        for session in self._sessions:
            memory = self._setup.memory(backend, session, spent=Counter())
            try:
                shown = (await memory.get_llm_context()).get("conversation_memory", {})
            except Unavailable:
                # The pods also wait longer than their deadline at times, and send again.
                continue
            self.tokens.append(tokens_of(shown))
            self.summaries.append(split(shown.get("summary", ""))[1])


async def test_long_dialogues_with_large_results_outlive_their_pods(
    datastore: str,
    place_on: Callable[[str], Place],
    proxied: Callable[[str], tuple[Place, Proxy]],
    tmp_path: Path,
) -> None:
    slow = datastore in SLOW
    sessions = "a" if slow else "ab"
    file = dialogues(tmp_path, sessions, TURNS)
    place, slowly = place_on(datastore), contextlib.nullcontext[Any]()
    if datastore != "sqlite":
        place, proxy = proxied(datastore)
        # Slow enough that some are killed before all is done, however quick the datastore is.
        slowly = proxy.slow(0.005)
    # The lease of a killed pod lasts for a call and a deadline. Until then nothing is summarized, and each
    # read has all that was added meanwhile, which slow datastores take long for.
    url = place.options(deadline_s=3 if slow else 1.5)
    model = Model(url, sessions)
    budget = ("--full-zone-turns", 3, "--summary-max-tokens", SUMMARY)
    options = ("--pods", 3, "--kill-every", 10 if slow else 3, *budget)
    began = time.monotonic()
    async with slowly, open_backend(url, create=True) as backend:
        replaying = asyncio.create_task(
            asyncio.to_thread(replay, file, tmp_path, "--url", url, *options, timeout=LONGEST_S)
        )
        while not replaying.done():
            await model.look(backend)
            await asyncio.sleep(0.5)
        status, numbers = await replaying
        await model.look(backend)
        stored = await backend.stats.of_user("demo", "replay")

    assert numbers["found"] == {"lost": 0, "doubled": 0, "out_of_order": 0, "foreign": 0}
    assert numbers["bad_reads"] == 0
    assert status == 0
    assert numbers["killed"] >= 1
    assert numbers["turns"] == numbers["summarized"] + numbers["in_full"] == len(sessions) * TURNS
    assert max(model.tokens) <= BUDGET
    assert max(map(len, model.summaries)) <= 4 * SUMMARY
    shown = ("killed", "sent_again", "seconds", "summaries", "tokens_with", "tokens_without")
    figures = numbers["latencies"][0] | {name: numbers[name] for name in shown}
    figures |= {"looks": len(model.tokens), "most_tokens": max(model.tokens), "stored": stored.bytes}
    sys.stdout.write(f"{datastore}: {time.monotonic() - began:.0f} s, {file.stat().st_size:,} B, {figures}\n")
