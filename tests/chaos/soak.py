"""Datastores in steady use for an hour, side by side: `python -m tests.chaos.soak --help`.

A few pods on each datastore work at a modest rate on conversations that come and go. The data soon has the
size that it keeps. What then grows is a leak: the rule is `flat.climb`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import importlib
import itertools
import json
import random
import sqlite3
import statistics
import sys
import tempfile
import time
import traceback
from collections import defaultdict
from collections.abc import Awaitable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

from stm_backends import Backend, open_backend
from stm_backends.records import keys
from tests.chaos import flat, remembering, schedule, turns
from tests.chaos.history import Event, Writer, read
from tests.chaos.mutants import LEAKS
from tests.chaos.nemesis.pods import Pod
from tests.chaos.options import counted, no_such_stand, positive, there_already
from tests.chaos.run import DEADLINE_S, Order, Result, Run
from tests.chaos.stands import Fault, Stand
from tests.chaos.stands.common import asked

DATASTORES: Final = ("sqlite", "redis", "postgres")
LONGEST: Final = 60
IN_FLIGHT_S: Final = 3 * DEADLINE_S
"""After so long no pod works on a conversation any more that it was told to leave."""

KIB: Final = 1024

ALLOWED: Final[Mapping[str, float]] = {
    "allocated": 256 * KIB,
    "memory": 256 * KIB,
    "blocks": 1_500,
    "tasks": 3,
    "descriptors": 3,
    "connections": 3,
}
"""By how much a figure of a pod may climb, in bytes or in pieces.

`allocated` is what malloc has given out, and `blocks` is how many small objects Python has: together all that
is in use. `memory` are the pages that hold it, which may be more. In the three quarters of an hour that
count, a leak of a hundredth of a MiB per minute is 460 KiB.
"""

ALLOWED_SHARE: Final = 0.25
"""By what part of its median a figure of a datastore may climb."""

SHORT_MINUTES: Final = 20.0
MORE_AT_FIRST: Final[Mapping[str, float]] = {
    "allocated": KIB * KIB,
    "memory": 2 * KIB * KIB,
    "blocks": 5_000,
}
"""In a run shorter than this, a process still grows into its memory, by as much as this."""

OPTIONS: Final[Mapping[str, Mapping[str, Any]]] = {"postgres": {"pool_size": 4}}
"""Of few connections, each soon has prepared every statement and read the largest answer."""

NOT_JUDGED: Final = frozenset({"adds", "WAL written"})
"""Figures that count what was done, and so grow by nature."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pace:
    """How fast a soak goes; times in seconds."""

    sampled_every: float
    killed_every: float
    lasts: float
    """An idle conversation of a third of all expires after so long, and one of another third is purged."""


# What a datastore says of itself


class Sampler(Protocol):
    """Returns the figures of a datastore."""

    def __call__(self, stand: Stand, /) -> Awaitable[dict[str, float]]: ...


async def of_sqlite(stand: Stand) -> dict[str, float]:
    file = Path(stand.direct_url.removeprefix("sqlite:///"))

    def look() -> dict[str, float]:
        with contextlib.closing(sqlite3.connect(f"file:{file}?mode=ro", uri=True, timeout=10)) as connection:
            pages, free = (
                connection.execute(f"PRAGMA {name}").fetchone()[0]
                for name in ("page_count", "freelist_count")
            )
            (records,) = connection.execute("SELECT count(*) FROM stm_record").fetchone()
        return {
            "database": file.stat().st_size,
            "WAL": file.with_name(f"{file.name}-wal").stat().st_size,
            "pages": pages,
            "free pages": free,
            "records": records,
        }

    return await asyncio.to_thread(look)


async def of_redis(stand: Any) -> dict[str, float]:
    (server,) = stand.servers
    memory, clients, log = [
        await asked(server, "INFO", part) for part in ("memory", "clients", "persistence")
    ]
    return {
        "used memory": memory["used_memory"],
        "keys": await asked(server, "DBSIZE"),
        "clients": clients["connected_clients"],
        "append-only file": log["aof_current_size"],
    }


async def of_postgres(stand: Stand) -> dict[str, float]:
    import asyncpg  # noqa: PLC0415 -- only this datastore needs it

    connection = await asyncpg.connect(stand.direct_url, timeout=10)
    try:
        sizes = await connection.fetch(
            "SELECT relname, CASE relkind WHEN 'r' THEN pg_table_size(oid) ELSE pg_relation_size(oid) END"
            " FROM pg_class WHERE relnamespace = 'public'::regnamespace AND relkind IN ('r', 'i')"
        )
        others = await connection.fetchrow(
            'SELECT (SELECT sum(n_dead_tup) FROM pg_stat_user_tables) AS "dead rows",'
            " pg_wal_lsn_diff(pg_current_wal_lsn(), '0/0') AS \"WAL written\","
            ' (SELECT sum(size) FROM pg_ls_waldir()) AS "WAL kept",'
            " (SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend') AS clients"
        )
    finally:
        await connection.close(timeout=10)
    assert others
    return {name: float(value or 0) for name, value in [*sizes, *others.items()]}


SAMPLERS: Final[Mapping[str, Sampler]] = {"sqlite": of_sqlite, "redis": of_redis, "postgres": of_postgres}


# One datastore


class Soak(Run):
    """A run without chance: conversations come and go, and now and then a pod is killed."""

    over = "the time is over"

    def __init__(self, order: Order, stand: Stand, stack: contextlib.AsyncExitStack, pace: Pace) -> None:
        super().__init__(order, stand, stack)
        self._pace = pace
        self._janitor = Writer(order.folder / "events", "janitor")
        self._store = Writer(order.folder / "events", stand.name)
        stack.callback(self._janitor.close)
        stack.callback(self._store.close)
        self._gone: set[str] = set()

    def _pod(self, number: int) -> Pod:
        settings = super()._pod(number).settings
        pace = self._pace
        return Pod(
            dataclasses.replace(
                settings,
                url=self._stand.direct_url,
                options={**settings.options, **OPTIONS.get(self._stand.name, {})},
                longest=LONGEST,
                lasts=pace.lasts,
                figures_every=pace.sampled_every,
            )
        )

    async def _torment(self, faults: Mapping[str, Fault], of_pods: Mapping[str, Any]) -> None:
        async with (
            open_backend(self._stand.direct_url, deadline_s=10.0) as backend,
            asyncio.TaskGroup() as group,
        ):
            tasks = [
                group.create_task(self._sample()),
                group.create_task(self._come_and_go(backend)),
                group.create_task(self._purge(backend)),
                group.create_task(self._forget(backend)),
                group.create_task(self._kill(of_pods["pod-kill"])),
            ]
            await asyncio.sleep(60 * self._order.minutes)
            for task in tasks:
                task.cancel()
        self._show()

    async def _sample(self) -> None:
        while True:
            self._store.info("figures", **await SAMPLERS[self._stand.name](self._stand))
            await asyncio.sleep(self._pace.sampled_every)

    async def _kill(self, kill: Any) -> None:
        for number in range(1_000_000):
            await asyncio.sleep(self._pace.killed_every)
            self._show()
            chance = random.Random(f"{self._order.seed} {number}").getrandbits(32)
            await self._on_pod(kill, schedule.Planned(kind="pod-kill", seconds=1.0, gap=0.0, chance=chance))

    async def _come_and_go(self, backend: Backend) -> None:
        """When a pod begins a new conversation, have all of them do so, and end the one before."""
        before = self._pods.generations
        async with asyncio.TaskGroup() as group:
            while True:
                await asyncio.sleep(0.5)
                for pod in self._pods.all:
                    await pod.revive()
                now = self._pods.generations
                ended = [f"c{user}-{number}" for user, number in enumerate(before) if number < now[user]]
                if not ended:
                    continue
                for pod in self._pods.all:
                    pod.settings.generations[:] = now
                await asyncio.gather(*(pod.ask("generations", generations=now) for pod in self._pods.all))
                before = now
                for conversation in ended:
                    group.create_task(self._end(backend, conversation))

    async def _end(self, backend: Backend, conversation: str) -> None:
        """Erase a conversation, or wait until it has expired or was purged by its age."""
        await asyncio.sleep(IN_FLIGHT_S)
        how = ("erasure", "expiry", "purge")[turns.generation(conversation) % 3]
        op = self._janitor.invoke("erase", conversation, by=how)
        key = turns.key_of(conversation)
        if how == "erasure":
            await backend.sessions.erase(key)
        while await backend.driver.load(keys.memory_key(key)) is not None:  # noqa: ASYNC110 -- nobody tells
            await asyncio.sleep(1.0)
        self._janitor.end(op, "ok", "erase", conversation, by=how)
        self._gone.add(conversation)

    async def _purge(self, backend: Backend) -> None:
        while True:
            await asyncio.sleep(self._pace.lasts / 3)
            await backend.sessions.purge(turns.TENANT, older_than=self._pace.lasts)

    async def _forget(self, backend: Backend) -> None:
        """Erase one user of the tiers after another: long-term memory keeps all that is important."""
        for session in itertools.cycle(range(remembering.SESSIONS)):
            await asyncio.sleep(self._pace.lasts)
            op = self._janitor.invoke("forget", session=session)
            await backend.sessions.erase_user(remembering.TENANT, remembering.user(session))
            self._janitor.end(op, "ok", "forget", session=session)

    def _used(self, conversations: list[str]) -> list[str]:
        return [one for one in conversations if one not in self._gone]

    def _judged(self, minutes: float) -> Result:
        result = super()._judged(minutes)
        judge(vars(result), self._order.folder)
        self._write(result)
        return result


# The judgement


@dataclasses.dataclass(kw_only=True)
class Summary:
    """One figure of one process: medians of a twelfth of the run each, and by how much it climbs."""

    process: str
    name: str
    samples: int
    start: float
    middle: float
    end: float
    most: float
    climb: float | None
    climbs: bool


def judge(result: dict[str, Any], folder: Path) -> None:
    """Add to a result what the figures in its folder come to, and what climbs to its violations."""
    found = summed_up(figures_of(read(folder / "events")), result["minutes"])
    result["figures"]["series"] = [vars(one) for one in found]
    result["violations"] += [
        f"{one.name} of {one.process} climbs by {one.climb:,.0f}" for one in found if one.climbs
    ]


def figures_of(events: Sequence[Event]) -> dict[tuple[str, str], list[float]]:
    """Return the series of each figure of each process."""
    series: dict[tuple[str, str], list[float]] = defaultdict(list)
    for event in events:
        if event.what == "figures":
            for name, value in event.data.items():
                series[event.process, name].append(float(value))
    return series


def summed_up(series: Mapping[tuple[str, str], Sequence[float]], minutes: float) -> list[Summary]:
    """Return what is to be said of each series that is long enough to be judged."""
    found: list[Summary] = []
    for (process, name), values in series.items():
        if (climb := flat.climb(values)) is None:
            continue
        part = len(values) // flat.BLOCKS
        middle = (len(values) - part) // 2
        found.append(
            Summary(
                process=process,
                name=name,
                samples=len(values),
                start=statistics.median(values[:part]),
                middle=statistics.median(values[middle : middle + part]),
                end=statistics.median(values[-part:]),
                most=max(values),
                climb=climb,
                climbs=name not in NOT_JUDGED and climb > allowed(name, values, minutes),
            )
        )
    return found


def allowed(name: str, values: Sequence[float], minutes: float) -> float:
    """Return by how much a figure may climb in a run of so many minutes."""
    if name not in ALLOWED:
        return max(ALLOWED_SHARE * statistics.median(values), 1.0)
    return ALLOWED[name] + (MORE_AT_FIRST.get(name, 0.0) if minutes < SHORT_MINUTES else 0.0)


def table(results: Sequence[Mapping[str, Any]]) -> str:
    """Return the results as a table in Markdown."""
    lines = ["| datastore | of | figure | start | middle | end | most |", "|---|---|---|---|---|---|---|"]
    for result in results:
        for one in result["figures"]["series"]:
            if one["name"] == "adds":
                continue
            of = "server" if one["process"] == result["stand"] else f"pod {one['process'].partition('.')[0]}"
            cells = (_readable(one["name"], one[part]) for part in ("start", "middle", "end", "most"))
            name = one["name"] + " **climbs**" * one["climbs"]
            lines.append(f"| {' | '.join((result['stand'], of, name, *cells))} |")
    return "\n".join(lines)


def _readable(name: str, value: float) -> str:
    if name == "blocks" or value < 16 * KIB:
        return f"{value:,.0f}"
    return f"{value / KIB:,.0f} KiB" if value < KIB * KIB else f"{value / KIB / KIB:,.2f} MiB"


# The command


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    options = parser().parse_args(arguments)
    if options.table and not options.out:
        parser().error("--table needs --out, the folder that has the results")
    options.stand = [*dict.fromkeys(options.stand)]
    said = no_such_stand(options.stand, DATASTORES)
    if said := said or ("" if options.table else there_already(options.out, options.stand)):
        print(said, file=sys.stderr)
        return 2
    out: Path = options.out or Path(tempfile.mkdtemp(prefix="stm-soak-"))
    if options.table:
        results = [json.loads(file.read_text(encoding="utf-8")) for file in _results(out)]
        if not any(one["figures"]["series"] for one in results):
            print(f"there are no figures that were judged in {out}", file=sys.stderr)
            return 2
        print(table(results))
        return 0
    print(f"histories and results in {out}", flush=True)
    if 60 * options.minutes < flat.ENOUGH * options.every:
        print(f"no figure will be judged: {least(options.every)}", flush=True)
    began = time.monotonic()
    try:
        results = asyncio.run(_side_by_side(options, out))
    except KeyboardInterrupt:
        print("interrupted; what was started is stopped", file=sys.stderr)
        return 130
    status = show(results, options.every)
    for one in results:
        print(f"judge again: {sys.executable} -m tests.chaos.checker {out / one.stand / 'events'}")
    print(f"{(time.monotonic() - began) / 60:.1f} minutes")
    return 1 if len(results) < len(options.stand) else status


def show(results: Sequence[Result], every: float) -> int:
    """Print what the soaks came to; returns 1 if that is a violation, and 2 if no figure was judged."""
    if any(one.figures["series"] for one in results):
        print(f"\n{table([vars(one) for one in results])}\n")
    for one in results:
        added, kills = one.figures["turns acknowledged"], sum(one.faults.values())
        parts = (added, "turn"), (kills, "kill"), (len(one.violations), "violation")
        print(f"{one.stand}: {', '.join(counted(*part) for part in parts)}")
        for violation in one.violations[:20]:
            print(violation)
        if not one.figures["series"]:
            print(f"no figure was judged: {least(every)}")
    if any(one.violations for one in results):
        return 1
    return 0 if all(one.figures["series"] for one in results) else 2


def least(every: float) -> str:
    """Return how long it takes to have enough samples."""
    return f"that takes {flat.ENOUGH} samples, {flat.ENOUGH * every / 60:g} minutes at --every {every:g}"


def parser() -> argparse.ArgumentParser:
    """Return what the command takes."""
    found = argparse.ArgumentParser(
        prog="python -m tests.chaos.soak",
        description="Pods use datastores steadily, while the figures of both are sampled. Exits with 1 if "
        "one climbs without end, or if a turn is lost or doubled, and with 2 if there were too few samples "
        "to judge.",
    )
    names = ", ".join(DATASTORES)
    found.add_argument("stand", nargs="*", default=DATASTORES, help=f"any of {names}; by default all of them")
    for option, default, meaning in (
        ("--minutes", 60.0, "how long"),
        ("--pods", 2, "how many processes on each datastore"),
        ("--users", 12, "how many conversations are in use at a time"),
        ("--pause", 0.6, "seconds between two calls of a worker, of which a pod has two"),
        ("--every", 15.0, "seconds between two samples"),
        ("--kill-every", 300.0, "seconds between two kills of a pod"),
        (
            "--lasts",
            150.0,
            "seconds until an idle conversation expires or is purged, or a user of tiers is erased",
        ),
    ):
        said = f"{meaning} ({default})"
        found.add_argument(option, type=positive(type(default)), default=default, help=said)
    found.add_argument("--seed", type=int, default=15, help="repeats what the pods draw (15)")
    found.add_argument("--mutant", choices=sorted(LEAKS), default="", help="a leak that the run must find")
    found.add_argument("--out", type=Path, help="a folder for histories and results; by default a new one")
    found.add_argument("--table", action="store_true", help="only show the results that are in --out")
    return found


async def _side_by_side(options: argparse.Namespace, out: Path) -> list[Result]:
    outcomes = await asyncio.gather(
        *(_one(name, options, out) for name in options.stand), return_exceptions=True
    )
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            traceback.print_exception(outcome)
    return [outcome for outcome in outcomes if isinstance(outcome, Result)]


async def _one(name: str, options: argparse.Namespace, out: Path) -> Result:
    folder = (out / name).absolute()
    folder.mkdir(parents=True)
    order = Order(
        stand=name,
        folder=folder,
        seed=options.seed,
        minutes=options.minutes,
        pods=options.pods,
        pause=options.pause,
        users=options.users,
        mutant=options.mutant,
    )
    pace = Pace(sampled_every=options.every, killed_every=options.kill_every, lasts=options.lasts)
    stand: Any = importlib.import_module(f"tests.chaos.stands.{name}").stand(folder)
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(stand.stop)
        await stand.start()
        if name == "redis":
            # Otherwise the file is not rewritten within the hour.
            await asked(*stand.servers, "CONFIG", "SET", "auto-aof-rewrite-min-size", "1mb")
        return await Soak(order, stand, stack, pace).go()


def _results(out: Path) -> list[Path]:
    return [file for name in DATASTORES if (file := out / name / "results.json").exists()]


if __name__ == "__main__":
    sys.exit(main())
