"""Many readers of one process: loads of the newest entries beside loads of all, and beside a bare read.

    python -m benchmarks.readers [--tiny] [--datastores redis,postgres] [--write]

A bare read returns as many bytes as the newest entries have, as one value. Blocks alternate in random order.
The page has the median of the blocks, so that a busy machine changes the ratios little.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.datastores import ALL, Datastore, folder_for_all, names_of, place_for_files
from benchmarks.measuring import batched, note
from benchmarks.pages import add_write, machine, spread, table
from stm_backends.drivers.contract import Key, new_version

PAGE = Path("benchmarks/READERS.md")
READERS, LAST, ENTRY_BYTES = 100, 20, 100
LENGTHS = (40, 400)
_FILLED_AT_ONCE = 8

Reads = Mapping[str, Callable[[int], Awaitable[object]]]


@dataclass(frozen=True)
class Plan:
    """How many blocks of so many seconds there are, and how long the records are."""

    blocks: int = 7
    seconds: float = 0.5
    lengths: tuple[int, ...] = LENGTHS


TINY = Plan(blocks=1, seconds=0.05, lengths=(40,))

BEGINNING = f"""\
# {READERS} readers of the newest entries

Written by `python3 -m benchmarks.readers --write`: {{date}}; {{machine}}; a load of {{load:.1f}} at the end.

{READERS} tasks of one process read at once, each a record of its own, with entries of {ENTRY_BYTES} bytes.
*Bare* is a read of {LAST * ENTRY_BYTES:,} bytes as one value, with the client library alone, as in
[RESULTS.md](RESULTS.md). The others are the driver's `load(key)` of 40 entries, and `load(key, last={LAST})`
of records with 40 and with 400 entries. Blocks of {{seconds:g}} s alternate in random order: the figures
are medians of {{blocks}} blocks, and in parentheses the lowest and the highest.
"""


def record(place: int, length: int) -> Key:
    """Return the key of the record that one reader reads."""
    return Key(f"readers:{length}", f"{place}")


async def prepare(datastore: Datastore, length: int) -> None:
    """Store a record for each reader."""

    async def fill(place: int) -> None:
        key, version = record(place, length), new_version()
        await datastore.driver.delete(key)
        for number in range(length):
            entry = (b"%07d " % number).ljust(ENTRY_BYTES, b"x")
            await datastore.driver.append(key, entry, initial_version=version, ttl=None)

    for places in batched(range(READERS), _FILLED_AT_ONCE):
        await asyncio.gather(*map(fill, places))


async def rate(read: Callable[[int], Awaitable[object]], seconds: float) -> float:
    """Return how many reads a second all readers make together."""
    done = 0

    async def reader(place: int) -> None:
        nonlocal done
        while time.perf_counter() < until:
            await read(place)
            done += 1

    start = time.perf_counter()
    until = start + seconds
    await asyncio.gather(*map(reader, range(READERS)))
    return done / (time.perf_counter() - start)


async def measure(datastore: Datastore, plan: Plan) -> list[str]:
    """Return the row of a datastore."""
    for place in range(READERS):
        await datastore.bare.keep(place, bytes(LAST * ENTRY_BYTES))
    for length in plan.lengths:
        note(f"{datastore.name}: storing records of {length:,} entries")
        await prepare(datastore, length)
    note(f"{datastore.name}: reading")
    load = datastore.driver.load
    reads: dict[str, Callable[[int], Awaitable[object]]] = {
        "bare": datastore.bare.read,
        "all": lambda place: load(record(place, plan.lengths[0])),
    }
    for length in plan.lengths:
        reads[f"{length}"] = lambda place, length=length: load(record(place, length), last=LAST)
    rates: dict[str, list[float]] = {name: [] for name in reads}
    for _ in range(plan.blocks):
        for name in random.sample([*reads], len(reads)):
            rates[name].append(await rate(reads[name], plan.seconds))
    bare = rates.pop("bare")
    row = [datastore.name, f"{statistics.median(bare):,.0f}"]
    for each in rates.values():
        ratios = [ours / theirs for ours, theirs in zip(each, bare, strict=True)]
        row += [f"{statistics.median(each):,.0f}", spread(ratios)]
    return row


async def page(names: list[str], plan: Plan) -> str:
    """Measure the datastores, one after the other, and return the page."""
    rows: list[list[str]] = []
    for name in names:
        with folder_for_all(place_for_files()) as folder:
            async with ALL[name](folder) as datastore:
                rows.append(await measure(datastore, plan))
    columns = ["", "bare, reads/s", f"all of {plan.lengths[0]:,}", "of bare"]
    for length in plan.lengths:
        columns += [f"{LAST} of {length:,}", "of bare"]
    beginning = BEGINNING.format(
        date=time.strftime("%-d %B %Y"),
        machine=machine(),
        load=os.getloadavg()[0],
        seconds=plan.seconds,
        blocks=plan.blocks,
    )
    return f"{beginning}\n{table(columns, rows)}"


def main() -> None:
    """Measure, print the page, and write it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--datastores", type=names_of, default=list(ALL), metavar="NAMES")
    parser.add_argument("--tiny", action="store_true", help="only see that it runs")
    add_write(parser, PAGE)
    arguments = parser.parse_args()
    text = asyncio.run(page(arguments.datastores, TINY if arguments.tiny else Plan()))
    if arguments.write:
        arguments.write.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
