"""What keeping transcripts adds to folding: time, requests, bytes, and DynamoDB's units.

    python -m benchmarks.transcripts [--quick] [--datastores redis,postgres] [--write]

`--write` writes `benchmarks/TRANSCRIPTS.md` or another page, as `nox -s bench -- --write` does; without it
the page is only printed. A whole run takes about five minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks import units
from benchmarks.datastores import (
    ALL,
    TOGETHER,
    Datastore,
    connect,
    folder_for_all,
    names_of,
    place_for_files,
    stored_bytes,
)
from benchmarks.machine import Meter
from benchmarks.measuring import EXTRA_ROUNDS, Bench, Block, Cell, Counting, Talk, fill, note
from benchmarks.pages import add_write, machine, reason, table
from benchmarks.peers.measure import dialogues
from benchmarks.report import Verdict
from stm_backends.backend import Backend
from stm_backends.drivers.contract import Key
from stm_backends.drivers.in_memory import MemoryDriver
from stm_backends.records import keys, operations
from stm_backends.records.codec import Codec, encode_turn
from stm_backends.records.directory import Directory
from stm_backends.records.pages import TURNS
from stm_backends.types import ConversationTurn, StoredTurn

PAGE = Path("benchmarks/TRANSCRIPTS.md")
GOAL = 1.25
"""The most time that a turn takes with a transcript, as a multiple of that without."""

SHOWN = 50
"""The turns of a page that is read."""

_ROOT = Path(__file__).parents[1]
DIALOGUES = _ROOT / "examples" / "conversations.jsonl"
_PROSE = 1_150

Says = Callable[[int], ConversationTurn]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How much is measured.

    There are `rounds` of blocks of so many `seconds`, and `extra` ones while the machine is busy. A long
    conversation has so many `turns`. Requests are counted over `counted` turns, and units over `units`.
    """

    together: int = TOGETHER
    rounds: int = 7
    seconds: float = 1.5
    turns: int = 2_000
    reads: int = 40
    counted: int = 1_280
    units: int = 128
    extra: int = EXTRA_ROUNDS


QUICK = Plan(rounds=3, seconds=0.7, turns=500, reads=20, counted=640, units=64)
TINY = Plan(together=4, rounds=1, seconds=0.05, turns=150, reads=2, counted=64, units=2, extra=0)
"""For the test that a run works; its figures mean nothing."""


def prose() -> Says:
    """Return turns of some 1,200 bytes, into which the pages of the documentation are cut."""
    text = " ".join(page.read_text("utf-8") for page in sorted((_ROOT / "docs").rglob("*.md")))
    pieces = [text[start : start + _PROSE] for start in range(0, len(text) - _PROSE, _PROSE)]
    return lambda number: ConversationTurn(
        (piece := pieces[number % len(pieces)])[:150], piece[150:], ts=float(number)
    )


def from_file(path: Path) -> Says:
    """Return the turns of a file of dialogues, over and over again."""
    said = dialogues(str(path))
    return lambda number: ConversationTurn(*said[number % len(said)], ts=float(number))


# On each datastore


async def folding(datastore: Datastore, plan: Plan) -> Cell:
    """Measure turns of conversations with folding, without transcripts and with them.

    A block ends when all work in the background has ended. The conversations differ in length, so that not
    all of them fill a page at the same time.
    """
    bench, meter = Bench(datastore), Meter(watches=not datastore.address.external)
    talks = {side: [bench.talk(f"{n}", side) for n in range(plan.together)] for side in ("on", "kept")}
    everyone = itertools.chain.from_iterable(map(enumerate, talks.values()))
    await asyncio.gather(*(talk.grow(6 + n * TURNS // plan.together, at_once=1) for n, talk in everyone))

    async def go_on(talk: Talk, until: float) -> int:
        turns = 0
        while time.perf_counter() < until:
            await talk.add()
            await talk.read()
            turns += 1
        await talk.settled()
        return turns

    async def block(side: str) -> Block:
        with meter.reading() as usage:
            until = time.perf_counter() + plan.seconds
            turns = await asyncio.gather(*(go_on(talk, until) for talk in talks[side]))
        return Block(
            sum(turns), wall=usage.wall, client=usage.client, server=usage.family, p99=0.0, busy=usage.busy
        )

    cell = Cell(plan.together, blocks={side: [] for side in talks})
    return await fill(cell, plan.rounds, block, extra=plan.extra)


async def long(datastore: Datastore, plan: Plan) -> list[str]:
    """Return what a long conversation takes there, and what reading from its middle takes."""
    backend = Backend(datastore.driver)
    says, directory = prose(), Directory(backend.driver, Codec())
    talk = Talk(backend.driver, directory, "long", "kept", says=says)
    sized = datastore.address.datastore in ("sqlite", "redis")
    before = await stored_bytes(datastore.address) if sized else 0
    await talk.grow(plan.turns)
    raw = sum(len(_json(number, says(number))) for number in range(1, plan.turns + 1))
    stored = (await stored_bytes(datastore.address) - before) / raw if sized else None
    await datastore.bare.keep(0, bytes(SHOWN * raw // plan.turns))
    times: dict[str, list[float]] = {"ours": [], "bare": []}

    async def ours() -> None:
        page = await talk.memory.transcript(at=random.randrange(SHOWN, plan.turns - SHOWN), limit=SHOWN)
        if len(page.turns) != SHOWN:
            raise LookupError("turns of a page are missing")

    for _ in range(plan.reads):
        for side in random.sample([*times], 2):
            start = time.perf_counter()
            await (ours() if side == "ours" else datastore.bare.read(0))
            times[side].append(1e3 * (time.perf_counter() - start))
    medians = {side: statistics.median(each) for side, each in times.items()}
    return [
        f"{medians['ours']:.2f}",
        f"{medians['bare']:.2f}",
        f"{medians['ours'] / medians['bare']:.1f}",
        "" if stored is None else f"{stored:.2f}",
    ]


def _json(number: int, turn: ConversationTurn) -> bytes:
    return encode_turn(StoredTurn(f"{number:024x}", turn))


# Counted on the in-memory driver


def _counting(name: str, mode: str, says: Says | None = None) -> tuple[Counting, Talk]:
    counting = Counting(MemoryDriver())
    driver = Backend(counting).driver
    given = {} if says is None else {"says": says}
    return counting, Talk(driver, Directory(driver, Codec()), name, mode, **given)


async def requests(mode: str, plan: Plan) -> tuple[float, float]:
    """Return the requests of a turn, and those of them that are about pages."""
    counting, talk = _counting("requests", mode)
    await counting.open()
    await talk.grow(64, at_once=1)
    counting.requests.clear()
    for _ in range(plan.counted):
        await talk.add()
        await talk.read()
        await talk.settled()
    return counting.count() / plan.counted, counting.count(kind="page") / plan.counted


async def values(says: Says, plan: Plan) -> tuple[float, float, float]:
    """Return the JSON bytes of a turn, what its page has of it, and the requests of reading a page."""
    counting, talk = _counting("values", "kept", says)
    await counting.open()
    await talk.grow(plan.turns)
    left = [turn async for turn in talk.memory.each_turn() if not turn.retained]
    raw = sum(len(encode_turn(StoredTurn(turn.id, turn.turn))) for turn in left)
    scope, stored = keys.pages_of(talk.key).scope, 0
    async for name in operations.names(counting, scope):
        record = await counting.load(Key(scope, name))
        stored += 0 if record is None else len(record.body or b"") + sum(map(len, record.tail))
    counting.requests.clear()
    await talk.memory.transcript(at=plan.turns // 2, limit=SHOWN)
    return raw / len(left), stored / raw, counting.count()


# The page

BEGINNING = f"""\
# What transcripts cost

Written by `nox -s bench`, or by `python3 -m benchmarks.transcripts --write`: {{date}}; {{machine}}; a load of
{{load:.1f}} at the end. A load above the number of processors means that other programs ran, and that times
are too long; ratios of blocks that alternate bear it.

{{about}}

## Folding with transcripts

{{together}} conversations at once in one process, as in [RESULTS.md](RESULTS.md), with folding: five turns at
a time, by a summarizer that answers at once. *Kept* is with `transcript=True`. Blocks of both alternate in
random order, and end when all summaries are written. Medians of {{rounds}} blocks of {{seconds:g}} s, and in
parentheses the lowest and the highest. Processor times are those of a turn in microseconds; *server* is empty
where the benchmark did not start it, and for SQLite. **~** marks a busy machine.

{{cells}}
## Requests and bytes

Requests of the driver for a turn (`add_turn`, `get_llm_context` and what is written in the background),
counted over {{counted:,}} turns; and of these, those about pages.

{{requests}}
A page has 64 turns. The bytes of all pages of a conversation of {{turns:,}} turns, for each byte of the JSON
of their turns, and the requests of reading {SHOWN} turns in the middle:

{{values}}
## A conversation of {{turns:,}} turns

Turns of prose, as above. *A page* is {SHOWN} turns around a number at random, read by `transcript(at=)`
beside a bare read of as many bytes of JSON as one value: medians of {{reads}} reads that alternate.
*Stored* is what the datastore holds more for the whole conversation, indexes included, for each byte of JSON.

{{long}}
## DynamoDB's units

As the server reports them for a turn, as a mean of {{units}} turns of prose; [COST.md](COST.md) says what
they are.

{{consumed}}"""


@dataclass
class Rows:
    """The rows of each table, and what is said about the datastores."""

    about: list[str] = field(default_factory=list[str])
    cells: list[list[str]] = field(default_factory=list[list[str]])
    long: list[list[str]] = field(default_factory=list[list[str]])
    consumed: list[list[str]] = field(default_factory=list[list[str]])


async def page(names: Sequence[str], plan: Plan, file: Path = DIALOGUES) -> str:
    """Measure the datastores, one after the other, and return the page."""
    rows = Rows()
    for name in names:
        note(f"{name}: starting")
        with folder_for_all(place_for_files()) as folder:
            try:
                async with ALL[name](folder) as started, connect(started.address.patient()) as datastore:
                    await _measure_one(datastore, plan, rows)
            except Exception as error:  # noqa: BLE001 -- the figures of the others are kept
                note(f"{name}: {error!r}")
                rows.about.append(f"- {name} is incomplete: {reason(error)}.")
    note("requests and bytes")
    columns = ["", "turns/s", "kept", "time of a turn, kept / not", "goal", "", "client, µs", "kept"]
    return BEGINNING.format(
        cells=table([*columns, "server, µs", "kept"], rows.cells),
        requests=table(["folding", "without", "kept", "about pages"], await _requests(plan)),
        values=table(["turns", "JSON bytes of a turn", "in pages", "requests"], await _values(plan, file)),
        long=table(["", "a page, ms", "bare, ms", "of bare", "stored"], rows.long),
        consumed=table(["folding", "write units", "read units", "requests"], rows.consumed)
        if rows.consumed
        else "Not measured.\n",
        about="\n".join(rows.about),
        date=time.strftime("%-d %B %Y"),
        machine=machine(),
        load=os.getloadavg()[0],
        **asdict(plan),
    )


async def _measure_one(datastore: Datastore, plan: Plan, rows: Rows) -> None:
    rows.about.append(f"- {datastore.name}: {datastore.about}.")
    # First, while nothing else is stored there.
    note(f"{datastore.name}: a long conversation")
    rows.long.append([datastore.name, *await long(datastore, plan)])
    note(f"{datastore.name}: folding")
    rows.cells.append(_row(datastore, await folding(datastore, plan)))
    if datastore.name == "DynamoDB":
        note(f"{datastore.name}: units")
        rows.consumed += await _units(datastore, plan)


def _row(datastore: Datastore, cell: Cell) -> list[str]:
    verdict = Verdict(cell.ratios("on", to="kept"), GOAL, cell.noisy, at_most=True)
    row = [datastore.name, *(f"{statistics.median(cell.rates(side)):,.0f}" for side in cell.blocks)]
    row += verdict.columns()
    for of in ("client", "server"):
        row += [f"{cell.cost(side, of):,.0f}" for side in cell.blocks]
    no_server = datastore.address.external or datastore.name == "SQLite"
    return [*row[:-2], "", ""] if no_server else row


async def _requests(plan: Plan) -> list[list[str]]:
    rows: list[list[str]] = []
    for title, at in (("five turns", ""), ("one turn", ", one at a time")):
        without, _ = await requests(f"on{at}", plan)
        kept, pages = await requests(f"kept{at}", plan)
        rows.append([f"{title} at a time", f"{without:.2f}", f"{kept:.2f}", f"{pages:.2f}"])
    return rows


async def _values(plan: Plan, file: Path) -> list[list[str]]:
    rows: list[list[str]] = []
    for title, says in (("prose, from `docs`", prose()), (f"dialogues, from `{file.name}`", from_file(file))):
        raw, share, reading = await values(says, plan)
        rows.append([title, f"{raw:,.0f}", f"{share:.2f}", f"{reading:.0f}"])
    return rows


async def _units(datastore: Datastore, plan: Plan) -> list[list[str]]:
    rows: list[list[str]] = []
    for at in ("", ", one at a time"):
        for side in ("on", "kept"):
            one = await units.of_turns(datastore.address.settings, f"{side}{at}", plan.units, prose())
            title = f"{at[2:] or 'five at a time'}{', kept' if side == 'kept' else ''}"
            rows.append([title, f"{one.writes:.2f}", f"{one.reads:.2f}", f"{one.requests:.2f}"])
    return rows


def main() -> None:
    """Measure, print the page, and write it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--datastores", type=names_of, default=list(ALL), metavar="NAMES")
    parser.add_argument("--dialogues", type=Path, default=DIALOGUES, help="a file of conversations")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="fewer and shorter blocks")
    size.add_argument("--tiny", action="store_true", help="only see that it runs")
    add_write(parser, PAGE)
    arguments = parser.parse_args()
    plan = QUICK if arguments.quick else TINY if arguments.tiny else Plan()
    text = asyncio.run(page(arguments.datastores, plan, arguments.dialogues))
    if arguments.write:
        arguments.write.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
