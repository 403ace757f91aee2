"""A turn of our memory beside a turn of a bare client, on each datastore, with goals.

    python -m benchmarks.run [--quick] [--datastores redis,postgres] [--write]

`--write` writes the page, and beside it the figures (`results.json`), the chart (`results.svg`) and what
transcripts cost (`TRANSCRIPTS.md`). Without it the pages are only printed. Progress goes to stderr. A whole
run takes at most 17 minutes, `--quick` about three. A datastore that fails is named on the page, and the
others are measured.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import cost, report, transcripts
from benchmarks.datastores import ALL, TOGETHER, Datastore, folder_for_all, names_of, place_for_files
from benchmarks.measuring import EXTRA_ROUNDS, Bench, Cell, fill, note, tight_loop
from benchmarks.pages import add_write, machine, reason
from benchmarks.processes import Workers
from benchmarks.results import Measured, Results

PAGE = Path("benchmarks/RESULTS.md")

_LONGEST_STEP_S = 300.0
"""A step that takes longer has failed."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How much is measured.

    `counts` are conversations at once in this process, and `each` those in each of some `processes`. `alone`
    are blocks of so many `turns`. `extra` rounds are made while the machine is busy.
    """

    seconds: float = 0.8
    rounds: int = 5
    counts: Sequence[int] = (1, 8, TOGETHER, 128)
    processes: int = 4
    each: int = TOGETHER
    lengths: Sequence[int] = (10, 1_000)
    alone: int = 5
    turns: int = 40
    extra: int = EXTRA_ROUNDS


QUICK = Plan(seconds=0.5, rounds=3, counts=(1, TOGETHER), processes=2, lengths=(10,), alone=3, turns=20)
TINY = Plan(
    seconds=0.05,
    rounds=1,
    counts=(1, TOGETHER),
    processes=2,
    each=2,
    lengths=(10,),
    alone=1,
    turns=2,
    extra=0,
)
"""For the test that a run works; its figures mean nothing."""


async def measure(
    names: Sequence[str], plan: Plan, *, quick: bool, save: Callable[[Results], None]
) -> Results:
    """Measure the named datastores, one after the other; the figures so far are saved after each."""
    results = Results(machine(), quick=quick)
    for count in (1, TOGETHER):
        results.own[count] = await tight_loop(count, plan.seconds)
    for name in names:
        note(f"{name}: starting")
        with folder_for_all(place_for_files()) as folder:
            try:
                async with ALL[name](folder) as datastore:
                    about = Measured(datastore.name, datastore.about, external=datastore.address.external)
                    results.datastores.append(about)
                    await _measure_one(datastore, plan, about)
            except Exception as error:  # noqa: BLE001 -- the figures of the others are kept
                note(f"{name}: {error!r}")
                results.missing[name] = reason(error)
        save(results)
    return results


async def _measure_one(datastore: Datastore, plan: Plan, into: Measured) -> None:
    bench = Bench(datastore)

    async def alone() -> None:
        for length in plan.lengths:
            for mode in ("off", "on"):
                into.alone.append(
                    await bench.alone(mode, length, blocks=plan.alone, rounds=plan.turns, extra=plan.extra)
                )
        into.calls = await bench.calls(plan.alone * plan.turns)

    async def together(count: int) -> None:
        await bench.prepare(count)
        cell = await fill(
            Cell(count), plan.rounds, lambda side: bench.block(side, count, plan.seconds), extra=plan.extra
        )
        into.cells.append(cell)

    async def processes() -> None:
        async with Workers(datastore.address, plan.processes, plan.each) as workers:
            cell = await fill(
                Cell(plan.each, plan.processes),
                plan.rounds,
                lambda side: workers.block(side, plan.seconds),
                extra=plan.extra,
            )
        into.cells.append(cell)

    async def cost() -> None:
        into.cost = await bench.cost(2 * plan.seconds)

    steps: list[tuple[str, Callable[[], Awaitable[None]]]] = [
        ("alone", alone),
        *((f"{count} at once", lambda count=count: together(count)) for count in plan.counts),
        (f"{plan.processes} processes", processes),
        ("processor time", cost),
    ]
    for title, step in steps:
        note(f"{datastore.name}: {title}")
        try:
            async with asyncio.timeout(_LONGEST_STEP_S):
                await step()
        except Exception as error:  # noqa: BLE001 -- the other figures of this datastore are kept
            note(f"{datastore.name}: {title}: {error!r}")
            into.failed.append(f"{title}: {reason(error)}")


def main() -> None:
    """Measure, print the page, and write it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--datastores", type=names_of, default=list(ALL), metavar="NAMES")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="fewer and shorter blocks")
    size.add_argument("--tiny", action="store_true", help="only see that it runs")
    add_write(parser, PAGE)
    arguments = parser.parse_args()
    plan, kept = Plan(), transcripts.Plan()
    if arguments.quick or arguments.tiny:
        plan = QUICK if arguments.quick else TINY
        kept = transcripts.QUICK if arguments.quick else transcripts.TINY
    output: Path | None = arguments.write

    def save(results: Results) -> None:
        if output:
            output.parent.mkdir(parents=True, exist_ok=True)
            results.save(output.with_name("results.json"))
            output.with_name("results.svg").write_text(report.chart(results), encoding="utf-8")
            output.write_text(report.markdown(results, picture="results.svg"), encoding="utf-8")
            if (page := output.with_name("COST.md")).exists():
                page.write_text(cost.with_cores(page.read_text("utf-8"), cost.Day(), results), "utf-8")

    results = asyncio.run(measure(arguments.datastores, plan, quick=plan != Plan(), save=save))
    print(report.markdown(results))
    page = asyncio.run(transcripts.page(arguments.datastores, kept))
    if output:
        output.with_name(transcripts.PAGE.name).write_text(page, encoding="utf-8")
    print(page)


if __name__ == "__main__":
    main()
