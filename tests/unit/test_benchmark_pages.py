"""The pages of the benchmarks, written from fixed figures."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

from benchmarks import cost, report, results, scale_report
from benchmarks.charts import Series, bars
from benchmarks.measuring import Alone, Block, Cell, Cost, fill
from benchmarks.pages import spread
from benchmarks.results import Measured, Results
from benchmarks.scale_report import Directories, Scale, Scaled
from benchmarks.units import Units


def block(rate: float, *, busy: bool = False, errors: int = 0) -> Block:
    return Block(
        turns=rate, wall=1.0, client=rate * 5e-4, server=rate * 1e-4, p99=12.0, busy=busy, errors=errors
    )


def cell(bare: float, off: float, on: float, *, busy: bool = False, processes: int = 1) -> Cell:
    rates = {"bare": bare, "off": off, "on": on}
    return Cell(
        32, processes, {side: [block(rate * k, busy=busy) for k in (1, 1, 1)] for side, rate in rates.items()}
    )


def measured(name: str, one: Cell, *, alone: float = 1.2, busy: bool = False) -> Measured:
    return Measured(
        name,
        f"{name} 1.0",
        alone=[Alone("off", 10, [alone * 100], [100.0], [busy])],
        cells=[one],
        cost=Cost(memory=60.0, driver=30.0, library=10.0, total=200.0, busy=False),
    )


def row(page: str, heading: str, name: str) -> list[str]:
    """Return the cells of a row in a section of a page."""
    (section,) = (part for part in page.split("\n## ") if part.startswith(heading))
    (line,) = (line for line in section.splitlines() if line.startswith(f"| {name} |"))
    return [part.strip() for part in line.strip("|").split("|")]


FIGURES = Results(
    "a machine",
    own={1: 55.0, 32: 130.0},
    datastores=[
        measured("Redis", cell(1_000, 1_100, 700), alone=1.31),
        measured("SQLite", cell(1_000, 650, 600, busy=True), alone=1.39, busy=True),
    ],
    missing={"mongo": "no mongod"},
)
PAGE = report.markdown(FIGURES, picture="results.svg")


def test_a_goal_that_is_reached_is_told_from_one_that_is_missed() -> None:
    assert row(PAGE, "32 conversations at once", "Redis")[1:] == [
        *("1,000", "1,100", "1.10 (1.10 to 1.10)", "≥ 1", "reached"),
        *("700", "0.70 (0.70 to 0.70)", "≥ 0.75", "**missed**"),
    ]


def test_the_goal_with_folding_is_three_quarters_of_the_other() -> None:
    on = report.throughput(FIGURES.datastores[1], "on")
    assert on is not None
    assert (on.goal, on.reached) == (0.525, True)


def test_figures_of_a_busy_machine_are_marked() -> None:
    sqlite = row(PAGE, "32 conversations at once", "SQLite")
    assert [sqlite[3], sqlite[5]] == ["0.65 (0.65 to 0.65) ~", "**missed**"]
    assert row(PAGE, "Processor time of a turn", "SQLite ~")[1:] == ["500", "500", "500", "", "", ""]
    assert "~" not in "".join(row(PAGE, "32 conversations at once", "Redis"))


def test_a_missed_goal_has_its_processor_times() -> None:
    (reason,) = (line for line in PAGE.splitlines() if line.startswith("- Redis, folding on: "))
    assert reason == (
        "- Redis, folding on: a turn takes 500 µs of the client's processor time, a bare one 500. "
        "The client process is at work 35% of the time, with the bare client 50%. "
        "The server takes 100 µs, for a bare turn 100."
    )
    assert "- Redis, folding off: " not in PAGE


def test_a_latency_is_judged_by_the_datastores_own_goal() -> None:
    assert row(PAGE, "One conversation", "Redis")[-3:] == ["1.31", "≤ 1.3", "**missed**"]
    assert row(PAGE, "One conversation", "SQLite")[-3:] == ["1.39 ~", "≤ 1.4", "reached"]


def test_our_own_code_is_judged_in_a_loop_and_together() -> None:
    loop = row(PAGE, "Our own code", "in-memory driver, a tight loop")
    together = row(PAGE, "Our own code", "in-memory driver, 32 conversations")
    assert [loop[-3:], together[-3:]] == [["55", "≤ 60", "reached"], ["130", "≤ 120", "**missed**"]]
    # The memory, the driver, the client library, and the rest of 200.
    assert row(PAGE, "Our own code", "Redis")[1:] == ["60", "30", "10", "100", "90", "≤ 120", "reached"]


def test_the_page_says_what_was_not_measured_and_why() -> None:
    FIGURES.datastores[0].failed.append("4 processes: RuntimeError: too slow")
    page = report.markdown(FIGURES)
    FIGURES.datastores[0].failed.clear()
    assert "- mongo is missing: no mongod." in page
    assert "- Redis is incomplete: 4 processes: RuntimeError: too slow." in page
    assert "svg" not in page


def test_a_datastore_without_any_figures_leaves_the_page_whole() -> None:
    page = report.markdown(Results("a machine", datastores=[Measured("Redis", "Redis 1.0")]))
    assert page.count("\n## ") == PAGE.count("\n## ")


def test_saved_figures_are_the_same_when_loaded(tmp_path: Path) -> None:
    FIGURES.save(tmp_path / "results.json")
    assert results.load(tmp_path / "results.json") == FIGURES


async def test_a_round_on_a_busy_machine_is_repeated_a_few_times() -> None:
    asked: list[str] = []

    async def measure(side: str) -> Block:
        asked.append(side)
        return block(len(asked), busy=len(asked) <= 3)

    once = await fill(Cell(1), 2, measure)
    assert (len(asked), once.noisy) == (9, False)

    async def always(side: str) -> Block:
        asked.append(side)
        return block(1.0, busy=True)

    asked.clear()
    twice = await fill(Cell(1), 2, always)
    assert (len(asked), twice.noisy, len(twice.blocks["bare"])) == (12, True, 2)


def test_a_spread_has_the_lowest_and_the_highest() -> None:
    assert spread([3.0, 1.0, 2.5]) == "2.50 (1.00 to 3.00)"
    assert spread([1_234.5], 0) == "1,234"


def test_the_chart_has_a_bar_and_a_goal_for_each_value() -> None:
    chart = ET.fromstring(report.chart(FIGURES))  # noqa: S314 -- it was made here
    texts = [element.text for element in chart.iter() if element.tag.endswith("text")]
    assert {"1.10", "0.70", "0.65", "0.60", "Redis", "SQLite"} <= {*texts}
    goals = [element for element in chart.iter() if element.get("class") == "goal"]
    assert len(goals) == 4
    # One picture for both kinds of pages.
    assert "prefers-color-scheme: dark" in report.chart(FIGURES)


def test_a_chart_leaves_out_what_has_no_value() -> None:
    chart = bars("A <title>", ["one", "two"], [Series("ours", [1.0, None])])
    assert ET.fromstring(chart).get("aria-label") == "A <title>"  # noqa: S314 -- as above
    assert chart.count('class="small"') == 2


SCALE = Scale(
    "a machine",
    conversations=1_000,
    lengths=[10, 1_000],
    pods=100,
    users=10,
    folded_bytes=5_000,
    datastores=[
        Scaled(
            "PostgreSQL",
            "PostgreSQL 18",
            filled=1_000,
            fill_s=0.5,
            bytes_each=700.0,
            folded_bytes=6_000.0,
            page_ms=[1.0, 2.0, 3.0],
            listing_s=0.25,
            purged=500,
            purge_s=0.1,
            long=[
                Alone("on", 10, [900.0], [700.0], [False]),
                Alone("on", 1_000, [910.0], [700.0], [True]),
            ],
            directories=Directories(1_000, 0, 0.5, p99_ms=40.0, listing_ms=2.0),
            resident=(90_000_000, 180_000_000, 201_000_000),
        ),
        Scaled("Redis", "Redis 8", failed=["filling: Unavailable: gone"]),
    ],
    units={"off": Units(2.0, 2.0, 1.0, 900.0, 4_000.0), "on": Units(3.0, 3.0, 2.0, 1_000.0, 5_000.0)},
)


def test_the_page_about_scale_has_what_was_measured() -> None:
    page = scale_report.markdown(SCALE)
    assert row(page, "One tenant", "PostgreSQL")[1:] == [
        *("2,000", "700", "1.00", "2.00", "3.00", "0.2", "5,000"),
    ]
    assert row(page, "A process that touches", "PostgreSQL")[1:] == ["90", "180", "201", "**missed**"]
    assert row(page, "One long conversation", "PostgreSQL")[1:] == ["900", "910 ~", "700"]
    assert row(page, "100 pods", "PostgreSQL")[1:] == ["1,000", "0.5", "40", "0", "2"]
    assert "- Redis is incomplete: filling: Unavailable: gone." in page


def test_a_days_cost_follows_from_the_figures_by_its_formulas() -> None:
    day = cost.Day(turns=86_400_000, peak=2.0, turns_each=10)
    assert day.rate == 2_000
    page = cost.markdown(day, FIGURES, SCALE)
    # 2,000 turns a second: over 1,100 of a process, and times 100 µs of a server.
    assert row(page, "Cores at the peak", "Redis")[1:6] == ["off", "1,100", "1.8", "100", "0.2"]
    assert row(page, "Cores at the peak", "SQLite")[3:6] == ["3.1", "", ""]
    # 8.64 million conversations of 6,000 bytes.
    assert row(page, "Bytes stored", "PostgreSQL")[1:] == ["6,000", "51.8"]
    assert row(page, "DynamoDB's units", "folding off")[2:8] == [
        "2.00",
        "1.00",
        "173",
        "86",
        "4,000",
        "2,000",
    ]


def test_later_figures_replace_the_cores_and_nothing_else() -> None:
    day = cost.Day(turns=86_400_000, peak=2.0, turns_each=10)
    assert cost.with_cores(cost.markdown(day, None, SCALE), day, FIGURES) == cost.markdown(
        day, FIGURES, SCALE
    )


def test_a_cost_without_figures_says_what_is_missing() -> None:
    page = cost.markdown(
        cost.Day(), None, Scale("a machine", 1, [10], 1, 1, units={"on": Units(missing="no java")})
    )
    assert "There are no figures of `nox -s bench` yet." in page
    assert "Not measured: no java." in page
