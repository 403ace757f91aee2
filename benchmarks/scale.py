"""A large tenant, a long conversation, and many pods, on SQLite, Redis and PostgreSQL.

    python -m benchmarks.scale [--small] [--datastores sqlite,redis] [--write]

`--write` writes `benchmarks/SCALE.md`, and beside it `COST.md`, which calculates from these figures and from
those of `nox -s bench` (`results.json` there) what a day of 100 million turns takes. Without it both are only
printed. Progress goes to stderr. A whole run takes at most 25 minutes, `--small` about one. A step that
fails is named on the page, and the others are measured.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import pickle
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import cost, results, scale_report, touch, units
from benchmarks.datastores import ALL, Datastore, connect, folder_for_all, place_for_files, stored_bytes
from benchmarks.machine import Meter
from benchmarks.measuring import Bench, Counting, batched, note, turn
from benchmarks.pages import add_write, machine, reason
from benchmarks.scale_report import PODS_AT_ONCE, STORED_AT_ONCE, Directories, Scale, Scaled
from stm_backends.backend import Backend
from stm_backends.drivers.contract import ABSENT, Driver, Key, Record, new_version
from stm_backends.records import operations
from stm_backends.records.codec import Codec
from stm_backends.records.directory import Directory
from stm_backends.records.keys import memory_key, scope
from stm_backends.types import StoredTurn

PAGE = Path("benchmarks/SCALE.md")

NAMES = ("sqlite", "redis", "postgres", "dynamo")
"""Of DynamoDB, only the units of a turn are measured."""

_LONGEST_STEP_S = 900.0
"""A step that takes longer has failed."""

_PAGE_TIMES = 20
_CHECKED = 1_000


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How much there is. `expired_s` is how long the conversations last that are then purged."""

    conversations: int = 1_000_000
    folded: int = 5_000
    expired: int = 50_000
    expired_s: float = 45.0
    lengths: Sequence[int] = (10, 1_000, 100_000)
    blocks: int = 5
    rounds: int = 30
    pods: int = 1_000
    users: int = 100


SMALL = Plan(
    conversations=10_000,
    folded=500,
    expired=1_000,
    expired_s=2.0,
    lengths=(10, 1_000),
    blocks=2,
    rounds=10,
    pods=100,
    users=10,
)


async def measure(names: Sequence[str], plan: Plan, *, small: bool, save: Callable[[Scale], None]) -> Scale:
    """Measure the named datastores, all open at the same time; the figures so far are saved after each."""
    found = Scale(
        machine(), small=small, conversations=plan.conversations, lengths=list(plan.lengths), pods=plan.pods,
        users=plan.users,
    )  # fmt: skip
    record = await units.folded(cost.Day().turns_each)
    found.folded_bytes = len(record.body or b"") + sum(map(len, record.tail))
    async with AsyncExitStack() as stack:
        opened: list[tuple[Datastore, Scaled]] = []
        for name in names:
            if name == "dynamo":
                continue
            note(f"{name}: starting")
            try:
                folder = stack.enter_context(folder_for_all(place_for_files()))
                datastore = await stack.enter_async_context(ALL[name](folder))
                datastore = await stack.enter_async_context(connect(datastore.address.patient()))
            except Exception as error:  # noqa: BLE001 -- the others are measured
                note(f"{name}: {error!r}")
                found.missing[name] = reason(error)
                continue
            opened.append((datastore, Scaled(datastore.name, datastore.about)))
            found.datastores.append(opened[-1][1])
        for datastore, scaled in opened:
            await _one(datastore, scaled, plan, record)
            save(found)
        # Nothing is timed here, so all processes run at the same time.
        await asyncio.gather(
            *(
                _step(scaled, "touching", lambda d=datastore, s=scaled: _touched(d, s, plan))
                for datastore, scaled in opened
                if scaled.filled
            )
        )
    return found


async def _one(datastore: Datastore, scaled: Scaled, plan: Plan, record: Record) -> None:
    """Take the steps of one datastore. Between the two about expiry, nothing is written."""
    expired_at = 0.0

    async def expiring() -> None:
        nonlocal expired_at
        expired_at = await _expiring(datastore, plan)

    await _step(scaled, "filling", lambda: _fill(datastore, scaled, plan))
    await _step(scaled, "bytes", lambda: _folded(datastore, scaled, plan, record))
    await _step(scaled, "expiring", expiring)
    await _step(scaled, "pages", lambda: _pages(datastore, scaled, plan))
    await _step(scaled, "purging", lambda: _purge(datastore, scaled, plan, expired_at))
    await _step(scaled, "a long conversation", lambda: _long(datastore, scaled, plan))
    await _step(scaled, "pods", lambda: _pods(datastore, scaled, plan))


async def _step(scaled: Scaled, title: str, step: Callable[[], Awaitable[None]]) -> None:
    note(f"{scaled.name}: {title}")
    try:
        async with asyncio.timeout(_LONGEST_STEP_S):
            await step()
    except Exception as error:  # noqa: BLE001 -- the other figures are kept
        note(f"{scaled.name}: {title}: {error!r}")
        scaled.failed.append(f"{title}: {reason(error)}")


async def _fill(datastore: Datastore, scaled: Scaled, plan: Plan) -> None:
    """Store conversations of one turn each by the driver's own `append`, and check a sample of them."""
    driver, entry = datastore.driver, Codec().seal_turn(StoredTurn(new_version(), turn(1)))
    before = await stored_bytes(datastore.address)
    start = time.perf_counter()
    await _append_all(driver, (memory_key(touch.key_of(n)) for n in range(plan.conversations)), entry, None)
    scaled.fill_s = time.perf_counter() - start
    scaled.bytes_each = (await stored_bytes(datastore.address) - before) / plan.conversations
    for number in range(0, plan.conversations, max(1, plan.conversations // _CHECKED)):
        record = await driver.load(memory_key(touch.key_of(number)))
        if record is None or record.tail != (entry,):
            raise LookupError("a stored conversation is not what was written")
    scaled.filled = plan.conversations


async def _folded(datastore: Datastore, scaled: Scaled, plan: Plan, record: Record) -> None:
    """Measure the bytes of folded conversations, all with the body and the entries of one."""
    where = scope(touch.TENANT, "folded", "memory")
    keys = [Key(where, f"{number:09}") for number in range(plan.folded)]
    before = await stored_bytes(datastore.address)
    for some in batched(keys, STORED_AT_ONCE):
        await asyncio.gather(
            *(
                datastore.driver.replace(
                    key, record.body or b"", version=new_version(), expect=ABSENT, ttl=None
                )
                for key in some
            )
        )
        for entry in record.tail:
            await _append_all(datastore.driver, some, entry, None)
    scaled.folded_bytes = (await stored_bytes(datastore.address) - before) / plan.folded


async def _append_all(driver: Driver, keys: Any, entry: bytes, ttl: float | None) -> None:
    async def work() -> None:
        for key in keys:
            await driver.append(key, entry, initial_version=new_version(), ttl=ttl)

    keys = iter(keys)
    await asyncio.gather(*(work() for _ in range(STORED_AT_ONCE)))


async def _pages(datastore: Datastore, scaled: Scaled, plan: Plan) -> None:
    """Time a page at the start, in the middle and at the end of a listing, and count the whole listing."""
    driver, where = datastore.driver, scope(touch.TENANT, touch.USER, "memory")
    last = plan.conversations - 2 * operations.PAGE
    for number in (0, plan.conversations // 2, max(0, last)):
        after = memory_key(touch.key_of(number)).name if number else ""
        times: list[float] = []
        for _ in range(_PAGE_TIMES):
            start = time.perf_counter()
            await driver.scan(where, after=after, limit=operations.PAGE)
            times.append(1e3 * (time.perf_counter() - start))
        scaled.page_ms.append(statistics.median(times))
    start = time.perf_counter()
    listed = 0
    async for _ in operations.names(driver, where):
        listed += 1
    scaled.listing_s = time.perf_counter() - start
    if listed != plan.conversations:
        raise LookupError(f"a listing has {listed:,} conversations, not {plan.conversations:,}")


async def _expiring(datastore: Datastore, plan: Plan) -> float:
    """Store conversations that expire soon; returns when, or 0 if the datastore removes them by itself."""
    if not hasattr(datastore.driver, "purge"):
        return 0.0
    where, entry = scope(touch.TENANT, "expired", "memory"), b"x" * 600
    keys = (Key(where, f"{number:09}") for number in range(plan.expired))
    await _append_all(datastore.driver, keys, entry, plan.expired_s)
    return time.monotonic() + plan.expired_s


async def _purge(datastore: Datastore, scaled: Scaled, plan: Plan, expired_at: float) -> None:
    """Purge what has expired, once all of it has."""
    if expired_at:
        driver: Any = datastore.driver
        await asyncio.sleep(max(0.0, expired_at - time.monotonic()))
        start = time.perf_counter()
        scaled.purged = await driver.purge(plan.expired)
        scaled.purge_s = time.perf_counter() - start


async def _long(datastore: Datastore, scaled: Scaled, plan: Plan) -> None:
    """Measure turns of a conversation that has been summarized many times."""
    bench = Bench(datastore)
    for length in plan.lengths:
        alone = await bench.alone("on", length, blocks=plan.blocks, rounds=plan.rounds, at_once=40)
        scaled.long.append(alone)


async def _pods(datastore: Datastore, scaled: Scaled, plan: Plan) -> None:
    """Let the directories of many pods list the same users, twice."""
    driver = Counting(Backend(datastore.driver).driver)
    codec, times = Codec(), list[float]()
    pods = [Directory(driver, codec) for _ in range(plan.pods)]

    at_work = asyncio.Semaphore(PODS_AT_ONCE)

    async def work(pod: Directory) -> None:
        async with at_work:
            for number in range(plan.users):
                start = time.perf_counter()
                await pod.note("pods", f"user {number}")
                times.append(1e3 * (time.perf_counter() - start))

    start = time.perf_counter()
    await asyncio.gather(*map(work, pods))
    seconds, p99 = time.perf_counter() - start, statistics.quantiles(times, n=100)[-1]
    first = driver.count("replace")
    await asyncio.gather(*map(work, pods))
    again, start = driver.count("replace") - first, time.perf_counter()
    users = [user async for user in pods[0].users("pods")]
    if len(users) != plan.users or len(set(users)) != plan.users:
        raise LookupError(f"the directory has {len(users):,} users, not {plan.users:,}")
    scaled.directories = Directories(
        first, again, seconds, p99_ms=p99, listing_ms=1e3 * (time.perf_counter() - start)
    )


async def _touched(datastore: Datastore, scaled: Scaled, plan: Plan) -> None:
    """Let a process of its own touch every conversation, and remember its resident memory."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "benchmarks.touch"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    given = pickle.dumps((datastore.address.settings, plan.conversations))
    output, _ = await process.communicate(given)
    if process.returncode:
        raise RuntimeError(f"the process ended with status {process.returncode}")
    before, after, highest = json.loads(output)
    scaled.resident = before, after, highest


def main() -> None:
    """Measure, print the pages, and write them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--datastores", default=",".join(NAMES), metavar="NAMES")
    parser.add_argument("--small", action="store_true", help="a hundredth of it")
    add_write(parser, PAGE)
    arguments = parser.parse_args()
    names = arguments.datastores.split(",")
    if unknown := sorted(set(names) - set(NAMES)):
        parser.error(f"no datastore {', '.join(unknown)}; there are {', '.join(NAMES)}")
    plan = SMALL if arguments.small else Plan()
    output: Path | None = arguments.write

    def save(found: Scale) -> None:
        if output:
            output.parent.mkdir(parents=True, exist_ok=True)
            for path, page in zip((output, output.with_name("COST.md")), pages(found), strict=True):
                path.write_text(page, encoding="utf-8")

    def pages(found: Scale) -> tuple[str, str]:
        figures = (output or PAGE).with_name("results.json")
        bench = results.load(figures) if figures.exists() else None
        return scale_report.markdown(found), cost.markdown(cost.Day(), bench, found)

    with Meter().reading() as usage:
        found = asyncio.run(measure(names, plan, small=arguments.small, save=save))
        if "dynamo" in names:
            found.units = asyncio.run(units.measure(turns=20 if arguments.small else 200))
    found.busy = usage.busy
    save(found)
    print(*pages(found), sep="\n")


if __name__ == "__main__":
    main()
