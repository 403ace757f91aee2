"""Short processes that leave summaries to workers, of which one is killed again and again.

    python -m benchmarks.workers URL [--seconds 120] [--rate 100] [--kill-every 10] [--conversations 300]

Each process is forked, opens a backend, adds one turn and ends. Two workers of the command `work` summarize,
with a model that takes 0.2 s; one of them is killed by SIGKILL after so many seconds, and another is started.
Afterwards everything is read. The last line is the figures as JSON; the exit status is 1 if a turn was lost
or stored twice, a conversation has no summary of what one is due for, or something waited for longer than
30 s. The datastore of URL is set up beforehand: `stm-backends ping --create --url URL`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from stm_backends import ConversationTurn, MemoryBudget, MemoryKey, ShortTermMemoryConfig, open_backend

CONFIG: Final = ShortTermMemoryConfig(
    "rolling_summary",
    MemoryBudget(full_zone_turns=2, summary_max_tokens=4_000, total_max_tokens=0),
    fold_batch_turns=5,
    summarizer_timeout_s=5.0,
    transcript=True,
)
CALLS: Final = "STM_BENCHMARK_CALLS"
"""The variable that names the file of the calls of all workers."""

LONGEST_S: Final = 30.0
PATIENCE_S: Final = 120.0


async def summarize(request: Mapping[str, Any]) -> Mapping[str, Any]:
    """Summarize as a list of the turns, in 0.2 s; the model of the workers."""
    await asyncio.sleep(0.2)
    said = [turn["user"] for turn in request["turns"]]
    with Path(os.environ[CALLS]).open("a", encoding="utf-8") as calls:  # noqa: ASYNC230 -- a line
        calls.write(f"{said[0]} {said[-1]}\n")
    lines = "\n".join([request["previous_summary"], *said]).strip()
    return {"summary": lines}


def key_of(number: int) -> MemoryKey:
    """Return the key of a conversation, of one of seven tenants."""
    return MemoryKey(f"tenant{number % 7}", "u", f"s{number}")


async def add(url: str, number: int, turn: int) -> None:
    """Add a turn as a short process does."""
    async with open_backend(url, summaries="worker", close_timeout_s=1.0) as backend:
        memory = backend.memory(key_of(number), CONFIG)
        await memory.add_turn(ConversationTurn(f"{number}-{turn}", "fine"), turn_id=f"{number}-{turn}")


def forked(url: str, number: int, turn: int) -> int:
    """Start a process that adds a turn; returns its id."""
    child = os.fork()
    if not child:
        status = 1
        try:
            asyncio.run(add(url, number, turn))
            status = 0
        finally:
            os._exit(status)
    return child


def worker(url: str) -> subprocess.Popen[bytes]:
    """Start a worker."""
    command = (sys.executable, "-m", "stm_backends", "work", "--url", url, "--concurrency", "8")
    return subprocess.Popen([*command, "--summarizer", "benchmarks.workers:summarize"])  # noqa: S603 -- ours


async def watch(url: str) -> None:
    """Print each second for how long the oldest conversation has been due, until killed."""
    async with open_backend(url, summaries="worker") as backend:
        while True:
            found = await backend.stats.work()
            sys.stdout.write(f"{found.lag if found else 0.0:.2f}\n")
            sys.stdout.flush()
            await asyncio.sleep(1.0)


def talk(url: str, options: argparse.Namespace) -> tuple[Counter[int], Counter[str]]:
    """Add turns at the rate; returns how many each conversation has, and how the processes ended."""
    turns, ended = Counter[int](), Counter[str]()
    running: dict[int, int] = {}
    mortal, steady, killed = worker(url), worker(url), time.monotonic()
    began, number = time.monotonic(), 0
    try:
        while (now := time.monotonic()) < began + options.seconds or running:
            if now - killed > options.kill_every and now < began + options.seconds:
                mortal.kill()
                mortal.wait()
                ended["workers killed"] += 1
                mortal, killed = worker(url), now
            while now < began + options.seconds and number < (now - began) * options.rate:
                one = number % options.conversations
                running[forked(url, one, number // options.conversations)] = one
                number += 1
            while running and (found := os.waitpid(-1, os.WNOHANG))[0]:
                if found[0] in running:
                    one = running.pop(found[0])
                    turns[one] += found[1] == 0
                    ended["acknowledged" if found[1] == 0 else "failed"] += 1
            time.sleep(0.002)
        asyncio.run(until_empty(url))
    finally:
        for process in (mortal, steady):
            process.send_signal(signal.SIGTERM)
        for process in (mortal, steady):
            process.wait(60)
    return turns, ended


async def until_empty(url: str) -> None:
    """Wait until nothing waits for a worker."""
    async with asyncio.timeout(PATIENCE_S), open_backend(url, summaries="worker") as backend:
        while (found := await backend.stats.work()) is None or found.waiting:  # noqa: ASYNC110 -- of others
            await asyncio.sleep(0.5)


async def check(url: str, turns: Counter[int]) -> list[str]:
    """Read everything; returns what is wrong."""
    problems = list[str]()
    async with open_backend(url, summaries="worker") as backend:
        for number, count in turns.items():
            memory = backend.memory(key_of(number), CONFIG)
            told = [one.turn.user_message async for one in memory.each_turn()]
            kept = [one.user_message for one in await memory.turns()]
            shown = (await memory.get_llm_context())["conversation_memory"]
            covered = shown.get("summary", "").splitlines()
            if len({*told}) != len(told) or len(told) < count:
                problems.append(f"conversation {number} has {len(told)} turns of {count}")
            if covered + kept != told:
                problems.append(f"conversation {number}: the summary and what is kept are not what was said")
            if len(kept) >= 2 + CONFIG.fold_batch_turns:
                problems.append(f"conversation {number} has {len(kept)} turns without a summary")
    return problems


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--rate", type=float, default=100.0)
    parser.add_argument("--kill-every", type=float, default=10.0)
    parser.add_argument("--conversations", type=int, default=300)
    parser.add_argument("--watch", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.watch:
        asyncio.run(watch(options.url))
        return
    with tempfile.TemporaryDirectory() as folder:
        calls = Path(folder) / "calls"
        calls.touch()
        os.environ[CALLS] = str(calls)
        with (Path(folder) / "lags").open("w+", encoding="utf-8") as lags:
            command = [sys.executable, "-m", "benchmarks.workers", options.url, "--watch"]
            watching = subprocess.Popen(command, stdout=lags)  # noqa: S603 -- ours
            try:
                turns, ended = talk(options.url, options)
            finally:
                watching.kill()
                watching.wait()
            lags.seek(0)
            longest = max((float(line) for line in lags if line.endswith("\n")), default=0.0)
        made = calls.read_text("utf-8").splitlines()
    problems = asyncio.run(check(options.url, turns))
    if longest > LONGEST_S:
        problems.append(f"a conversation waited for {longest:.1f} s")
    for problem in problems:
        sys.stderr.write(f"{problem}\n")
    again = sum(count - 1 for count in Counter(made).values())
    figures = {
        **ended,
        "conversations": len(turns),
        "calls": len(made),
        "calls made again": again,
        "longest wait, s": longest,
        "problems": len(problems),
    }
    sys.stdout.write(f"{json.dumps(figures)}\n")
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
