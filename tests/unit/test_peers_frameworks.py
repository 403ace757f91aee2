"""The comparison with what frameworks have of their own measures both sides alike, and writes that down."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("boto3", reason="the comparison starts every datastore")
pytest.importorskip("redis", reason="as above")
pytest.importorskip("pymongo", reason="as above")

from benchmarks.peers import report as whole_report
from benchmarks.peers.conversation import Conversation, Message
from benchmarks.peers.figures import Counted, Measured, Pair, Side
from benchmarks.peers.frameworks import report, trial
from benchmarks.peers.frameworks.catalogue import FRAMEWORKS
from benchmarks.peers.losses import PROCESSES
from benchmarks.peers.servers import serve

ROOT = Path(__file__).parents[2]


# Both sides


async def test_calls_alternate_and_have_the_median_of_their_times(monkeypatch: pytest.MonkeyPatch) -> None:
    now, called = 0.0, list[str]()
    monkeypatch.setattr(trial.time, "perf_counter", lambda: now)

    def taking(name: str, *ms: float) -> Callable[[], Any]:
        left = iter(ms)

        async def call() -> None:
            nonlocal now
            called.append(name)
            now += next(left) / 1e3

        return call

    # The first call of each, which opens connections, is not timed.
    found = await trial.alternating(3, taking("theirs", 90, 3, 4, 50), taking("ours", 80, 2, 1, 1))
    assert found == pytest.approx((4, 1))
    assert {*called[:2]} == {*called[2:4]} == {*called[4:6]} == {*called[6:]} == {"theirs", "ours"}


def test_what_is_lost_or_doubled_is_wrong() -> None:
    counted = Counted(40, lost=3, doubled=1, errors={"EditConflict": 9})
    assert trial.lost_in(counted) == Side(4, 40, right=0, errors={"EditConflict": 9})


class Cancelled(Conversation):
    """A session that stores after its caller has gone, or before."""

    def __init__(self, *, late: bool) -> None:
        self._items = list[Message]()
        self._late = late

    async def add(self, *messages: Message) -> None:
        if self._late:
            asyncio.get_running_loop().call_later(0.05, self._items.extend, messages)
        else:
            self._items += messages
        await asyncio.sleep(0.02)

    async def newest(self) -> list[Message]:
        return self._items[-20:]

    async def said(self) -> list[str]:
        return [item["content"] for item in self._items]


@pytest.mark.parametrize(("late", "landed"), [(True, 4), (False, 0)])
async def test_what_a_cancelled_call_stores_after_a_read_is_counted(
    late: bool, landed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("agents", reason="it is about sessions of the OpenAI Agents SDK")
    from benchmarks.peers.frameworks.openai_agents import cancelled  # noqa: PLC0415 -- it imports the SDK

    monkeypatch.setattr(random, "uniform", lambda low, high: 0.001)
    assert await cancelled(Cancelled(late=late), 4) == Side(landed, 4, right=0)


# Rows


async def measured(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Pair]:
    """Return what the smallest run of a row reports, in this process."""
    about = FRAMEWORKS[name]
    with serve(about.datastore, folder) as server, server.place("measured") as place:
        await about.measure(place, trial.QUICK)
    said = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {kind for one in said for kind in one} == {"pair"}, said
    return {one["pair"]["what"]: Pair.of(one["pair"]) for one in said}


def counts(pairs: dict[str, Pair]) -> list[tuple[float | None, float | None]]:
    """Return the counts of theirs and of ours."""
    return [(one.theirs.value, one.ours.value) for one in pairs.values() if one.unit == "count"]


async def test_a_batch_that_is_sent_again_is_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("claude_agent_sdk", reason="it is about the store of the Claude Agent SDK")
    pairs = await measured("claude-memory", tmp_path, capsys)
    assert counts(pairs) == [(8, 5)]
    assert all(one.theirs.right == one.ours.right == 5 for one in pairs.values() if one.unit == "count")
    assert len(pairs) == 4


async def test_of_four_who_save_a_conversation_one_wins(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("pydantic_ai", reason="it is about the store of Pydantic AI")
    pairs = await measured("pydantic-ai-memory", tmp_path, capsys)
    races = next(one for one in pairs.values() if one.unit == "count")
    refused = {"ConversationConflict": 3 * trial.QUICK.races}
    assert races.theirs == races.ours == Side(0, trial.QUICK.races, right=0, errors=refused)
    assert len(pairs) == 5


async def test_both_sessions_of_the_agents_sdk_are_given_the_same_calls(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("agents", reason="it is about sessions of the OpenAI Agents SDK")
    pairs = await measured("openai-sqlite", tmp_path, capsys)
    assert [one.unit for one in pairs.values()] == ["ms", "ms", "count"]
    assert [one for _, one in counts(pairs)] == [0]


@pytest.mark.full
def test_the_smallest_run_compares_frameworks(tmp_path: Path) -> None:
    for module in ("strands", "google.adk", "sqlalchemy", "aiosqlite"):
        pytest.importorskip(module, reason="it measures Strands and ADK")
    figures = tmp_path / "figures.json"
    command = [sys.executable, "-m", "benchmarks.peers", "--frameworks", "--quick", "--figures", str(figures)]
    command += ["--peers", "adk-sqlite,strands-sqlite", "--each", "300"]  # a busy machine is slow
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    adk, strands = (Measured.of(each) for each in json.loads(figures.read_text("utf-8")))
    assert (adk.problems, strands.problems) == ([], [])
    each = trial.QUICK.writes * PROCESSES
    assert [one.ours for one in adk.pairs if one.unit == "count"] == [Side(each, each, each)] * 4
    assert [one.ours for one in strands.pairs if one.unit == "count"] == [Side(0, each // 2, 0)]
    assert {"google-adk", "stm-backends"} <= {*adk.versions}
    assert (
        "| Google ADK on SQLite | `DatabaseSessionService` | `StmSessionService` | times ours |"
        in ended.stdout
    )


def test_every_row_names_a_module_that_measures_it() -> None:
    for about in FRAMEWORKS.values():
        assert about.open.endswith(":measure")
        path = ROOT / f"{about.module.replace('.', '/')}.py"
        assert "async def measure(place: Place, plan: Plan) -> None:" in path.read_text("utf-8")
    assert {about.framework for about in FRAMEWORKS.values()} == {
        *("Claude Agent SDK", "Pydantic AI", "Google ADK", "LangGraph", "Agent Framework", "Strands"),
        *("OpenAI Agents", "LangChain", "LlamaIndex"),
    }


# The section


def results() -> list[Measured]:
    """Return figures of two frameworks, one of which has failed half-way."""
    return [
        Measured(
            "claude-memory",
            "The memory of one process",
            {"claude-agent-sdk": "0.2.189"},
            pairs=[
                Pair("kept", "count", Side(8, right=5), Side(5, right=5)),
                Pair("lost", "count", Side(), Side(0, 80, 0, {"EditConflict": 9})),
                Pair("append", "ms", Side(0.5), Side(2)),
                Pair("stored", "bytes", Side(148_000_000), Side(3_700_000)),
            ],
        ),
        Measured("adk-sqlite", pairs=[Pair("keys", "count", Side(139, 160, 160), Side(160, 160, 160))]),
        Measured("adk-postgres", problems=["`ImportError`: no module"]),
    ]


def test_both_sides_stand_in_a_row_with_what_theirs_takes_of_ours() -> None:
    section = report.section(results())
    assert (
        "| Claude Agent SDK on memory | `InMemorySessionStore` | `StmSessionStore` | times ours |" in section
    )
    assert "| append | 0.50 ms | 2.00 ms | 0.25 |" in section
    assert "| stored | 148,000 kB | 3,700 kB | 40.00 |" in section


def test_counts_that_are_wrong_are_bold_and_have_no_ratio() -> None:
    section = report.section(results())
    assert "| kept | **8** | 5 |  |" in section
    assert "| keys | **139 of 160** | 160 of 160 |  |" in section
    assert "| lost | - | 0 of 80; 9 x `EditConflict` |  |" in section


def test_a_framework_has_one_heading_and_says_what_was_not_measured() -> None:
    section = report.section(results())
    assert section.count("### Google ADK\n") == 1
    assert "- Google ADK `DatabaseSessionService`: `ImportError`: no module." in section
    assert "| The memory of one process | claude-agent-sdk 0.2.189 |" in section


def test_every_framework_can_be_named_in_the_section() -> None:
    section = report.section([Measured(name, problems=["not tried"]) for name in FRAMEWORKS])
    assert all(f"[{about.label}]({about.link})" in section for about in FRAMEWORKS.values())


def test_the_section_stays_in_the_page_until_it_is_measured_again() -> None:
    page = whole_report.page([], {})
    section = report.section(results())
    written = whole_report.with_section(page, section)
    assert whole_report.section_of(written, "## Frameworks\n") == section.rstrip() + "\n"
    assert whole_report.with_section(written, section) == written
    shown = whole_report.shown([])
    assert whole_report.section_of(whole_report.with_section(written, shown), "## Frameworks\n") in written


def test_figures_of_frameworks_survive_being_written_and_read() -> None:
    written = json.dumps([one.as_json() for one in results()])
    assert [Measured.of(each) for each in json.loads(written)] == results()
