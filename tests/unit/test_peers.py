"""The comparison with other libraries counts what passes and what is lost, and writes what it counted."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("boto3", reason="the comparison starts every datastore")
pytest.importorskip("redis", reason="as above")
pytest.importorskip("pymongo", reason="as above")

from benchmarks.peers import losses, report, speaking, speaking_report
from benchmarks.peers.__main__ import Order, run_one
from benchmarks.peers.catalogue import MESSAGES, PEERS, SHOWING, Peer
from benchmarks.peers.conversation import exchange_of, text_of
from benchmarks.peers.figures import (
    HISTORY,
    ITEMS,
    SIDEBAR,
    AtLength,
    Counted,
    Measured,
    Shown,
    Together,
)
from benchmarks.peers.frameworks import report as frameworks_report
from benchmarks.peers.places import Place, stored_bytes
from benchmarks.peers.servers import serve
from benchmarks.peers.wire import Wire
from tests.support.losing import LOST

ROOT = Path(__file__).parents[2]
LOSING = Peer(
    label="a losing library",
    datastore="sqlite",
    open="tests.support.losing:losing",
    packages=(),
    shows="",
    settings="",
    link="",
)


def a_place(folder: Path) -> Place:
    return Place("sqlite", 0, str(folder), "losing")


# Turns that are lost, doubled or refused


async def test_turns_that_tasks_lose_and_double_are_counted(tmp_path: Path) -> None:
    counted = await losses.with_tasks(LOSING.opened(), a_place(tmp_path), turns=10)
    each = losses.TASKS
    assert counted == Counted(9 * each, lost=each, doubled=each, errors={"ConnectionError": each})


async def test_turns_that_processes_lose_and_double_are_counted(tmp_path: Path) -> None:
    counted = await losses.with_processes(LOSING, a_place(tmp_path), turns=10)
    each = losses.PROCESSES
    assert counted == Counted(9 * each, lost=each, doubled=each, errors={"ConnectionError": each})


async def test_exchanges_that_processes_lose_and_double_are_counted(tmp_path: Path) -> None:
    counted = await losses.with_processes(LOSING, a_place(tmp_path), turns=10, speaking=True)
    each = losses.PROCESSES
    assert counted == Counted(9 * each, lost=each, doubled=each, errors={"ConnectionError": each})


def test_a_question_without_its_whole_answer_is_lost() -> None:
    said = [text_of(message) for message in exchange_of("first", "Done: first")]
    assert losses.spoken([*said, "second"]) == ["first"]
    assert [losses.spoken(said[:place] + said[place + 1 :]) for place in range(len(said))] == [[]] * 4
    # As often as any message of it is stored.
    assert losses.spoken([*said, said[1]]) == ["first", "first"]


async def test_a_library_that_loses_nothing_has_no_losses(tmp_path: Path) -> None:
    counted = await losses.with_tasks(LOSING.opened(), a_place(tmp_path), turns=LOST)
    assert counted == Counted(LOST * losses.TASKS)


def test_an_unacknowledged_turn_that_is_stored_is_not_lost() -> None:
    assert losses.count(["a"], ["a", "b"], [{"TimeoutError": 1}]) == Counted(1, errors={"TimeoutError": 1})


# What is said


def test_every_exchange_has_a_tool_that_was_called_once() -> None:
    said = speaking.dialogues(str(ROOT / "examples" / "conversations.jsonl"))
    assert len(said) > 40
    spoken = [exchange for exchange, _ in zip(speaking.exchanges(said), range(1_000), strict=False)]
    assert len({exchange[0]["content"] for exchange in spoken}) == 1_000
    assert all(exchange[1]["tool_calls"][0]["id"] == exchange[2]["tool_call_id"] for exchange in spoken)
    assert {len(exchange) for exchange in spoken} == {speaking.EXCHANGE}


@pytest.mark.parametrize("name", ["ours-sqlite", "ours-all-sqlite", "openai-sqlite"])
async def test_what_was_spoken_is_shown_and_read_back(tmp_path: Path, name: str) -> None:
    if name.startswith("openai"):
        pytest.importorskip("agents", reason="it is a session of the OpenAI Agents SDK")
    place = a_place(tmp_path)
    Path(place.url).parent.mkdir()
    exchanges = [exchange_of(f"question {number}", "answer") for number in range(3)]
    async with MESSAGES[name].opened()(place) as conversations:
        one = conversations("one")
        await one.seed_messages(exchanges[:2])
        # All that was said before, and the question.
        assert len(await one.speak(exchanges[2])) == 9
        assert await one.said() == [text_of(message) for exchange in exchanges for message in exchange]


# What passes, and what is stored


async def test_the_proxy_counts_bytes_and_round_trips() -> None:
    closed = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError):
            while await reader.readexactly(4):
                writer.write(b"0123456789")
        writer.close()
        await writer.wait_closed()
        closed.set()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    wire = Wire(server.sockets[0].getsockname()[1])
    wire.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", wire.port)
    for requests in (1, 2):
        # Two requests that are sent at once wait once.
        writer.write(b"1234" * requests)
        await reader.readexactly(10 * requests)
    counted = wire.counted
    assert (counted.sent, counted.received, counted.round_trips) == (12, 30, 2)
    writer.close()
    await closed.wait()
    await asyncio.to_thread(wire.stop)
    server.close()


def test_what_is_stored_in_files_is_counted_without_pages(tmp_path: Path) -> None:
    place = a_place(tmp_path)
    Path(place.url).parent.mkdir()
    with sqlite3.connect(place.url) as database:
        database.execute("CREATE TABLE said (id INTEGER PRIMARY KEY, text TEXT)")
        database.execute("INSERT INTO said VALUES (7, 'über')")
    database.close()
    assert stored_bytes(place) == 1 + 5


# A process for each library


@pytest.mark.full
def test_a_library_that_hangs_is_stopped_and_said_so(tmp_path: Path) -> None:
    measured = Measured("hanging")
    hanging = Peer(**{**vars(LOSING), "open": "tests.support.losing:hanging"})
    file = str(ROOT / "examples" / "conversations.jsonl")
    with serve("sqlite", tmp_path) as server, server.place("hanging") as place:
        run_one(hanging, measured, place, Order(10, until=0, quick=True, dialogues=file))
    assert measured.problems == ["stopped after 10 s"]


@pytest.mark.full
def test_the_smallest_run_measures_a_library_and_ours(tmp_path: Path) -> None:
    pytest.importorskip("agents", reason="it measures a session of the OpenAI Agents SDK")
    figures = tmp_path / "figures.json"
    names = ("openai-sqlite", "ours-sqlite")
    command = [sys.executable, "-m", "benchmarks.peers", "--quick", "--peers", ",".join(names)]
    command += ["--figures", str(figures), "--each", "300"]  # a busy machine is slow
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    results = [Measured.of(each) for each in json.loads(figures.read_text("utf-8"))]
    assert [(one.name, one.problems) for one in results] == [(name, []) for name in names]
    for one in results:
        assert one.together is not None
        assert sorted(one.lengths) == [10, 100]
        assert (one.tasks, one.processes) == (Counted(200), Counted(200))
    assert "OpenAI Agents `SQLiteSession`" in ended.stdout


@pytest.mark.full
def test_the_smallest_run_asks_for_what_a_product_shows(tmp_path: Path) -> None:
    pytest.importorskip("agents", reason="ours keeps the items of a session of the OpenAI Agents SDK")
    figures = tmp_path / "figures.json"
    command = [sys.executable, "-m", "benchmarks.peers", "--shown", "--quick", "--figures", str(figures)]
    command += ["--peers", "ours-sqlite,openai-sqlite", "--each", "300"]  # a busy machine is slow
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    ours, theirs = (Measured.of(each) for each in json.loads(figures.read_text("utf-8")))
    assert (ours.problems, theirs.problems) == ([], [])
    assert [(one.what, one.whole) for one in ours.shown.values()] == [
        *((HISTORY, False), (ITEMS, False), (SIDEBAR, False)),
    ]
    # Its calls return the newest items, and else all; nothing lists its sessions.
    assert [(one.what, one.whole, one.ms is None) for one in theirs.shown.values()] == [
        *((HISTORY, True, False), (ITEMS, False, False), (SIDEBAR, False, True)),
    ]
    assert "| OpenAI Agents `SQLiteSession` | whole: " in ended.stdout


@pytest.mark.full
def test_the_smallest_run_compares_messages(tmp_path: Path) -> None:
    pytest.importorskip("agents", reason="it measures a session of the OpenAI Agents SDK")
    figures = tmp_path / "figures.json"
    command = [sys.executable, "-m", "benchmarks.peers", "--messages", "--quick", "--figures", str(figures)]
    command += ["--peers", "ours-sqlite,openai-sqlite", "--each", "300"]  # a busy machine is slow
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    ours, theirs = (Measured.of(each) for each in json.loads(figures.read_text("utf-8")))
    assert (ours.problems, theirs.problems) == ([], [])
    assert [*ours.lengths] == [*theirs.lengths] == [12, 100]
    # The question, and what was said before.
    assert [at.shown for at in theirs.lengths.values()] == [13, 101]
    assert (ours.processes, theirs.processes) == (Counted(200), Counted(200))
    assert (ours.shown[HISTORY].whole, theirs.shown[HISTORY].whole) == (False, True)
    assert "| OpenAI Agents `SQLiteSession` |" in ended.stdout


# The page


def some_results() -> list[Measured]:
    """Return figures of ours and of two others, one of which has failed half-way."""
    full = {
        length: AtLength(
            length, 1.5, 2.0, 0.5, sent=1_200, received=length * 100, round_trips=2, stored=9_000
        )
        for length in (10, 1_000)
    }
    return [
        Measured("ours-redis", "Redis 8.2", {}, full, Together(900, 850), Counted(200), Counted(200)),
        Measured(
            "openai-redis",
            "Redis 8.2",
            {"openai-agents": "0.24.0"},
            full,
            Together(600, 900),
            Counted(200),
            Counted(190, lost=3, doubled=1, errors={"WatchError": 10}),
        ),
        Measured("langgraph-redis", problems=["`ImportError`: no module"]),
    ]


def test_the_page_has_each_figure_beside_ours() -> None:
    page = report.page(some_results(), {"redis": "peers-redis.svg"})
    row = "| OpenAI Agents `RedisSession` |"
    assert f"{row} 1.5 (0.5) | 1.5 (0.5) | 600 (900) | 2.0 |" in page
    assert f"{row} 1.2 / 1.2 | 1.0 / 100 | 9.0 / 9.0 |" in page
    losing = "**3 + 1 of 190**; 10 x `WatchError`"
    assert f"{row} 0 + 0 of 200 | {losing} |" in page
    assert "(peers-redis.svg)" in page


def test_the_page_says_why_a_library_has_no_figures() -> None:
    page = report.page(some_results(), {})
    assert "- LangGraph `AsyncShallowRedisSaver`: `ImportError`: no module." in page
    assert "| LangGraph `AsyncShallowRedisSaver` | - | - | - |" in page


def test_the_chart_leaves_out_what_was_not_measured() -> None:
    chart = report.chart(some_results(), "redis")
    assert chart is not None
    assert ">OpenAI Agents<" in chart
    assert "LangGraph" not in chart
    assert report.chart(some_results(), "mongo") is None


def test_figures_survive_being_written_and_read() -> None:
    written = json.dumps([one.as_json() for one in [*some_results(), *shown_results()]])
    assert [Measured.of(each) for each in json.loads(written)] == [*some_results(), *shown_results()]


def shown_results() -> list[Measured]:
    """Return what ours and two others show, one of which has failed."""
    theirs = (Shown(HISTORY, 30.0, 2.0, whole=True), Shown(ITEMS, 0.5, 0.4), Shown(SIDEBAR))
    return [
        Measured("ours-redis", shown={what: Shown(what, 2.0, 2.1) for what in (HISTORY, ITEMS, SIDEBAR)}),
        Measured("openai-redis", shown={one.what: one for one in theirs}),
        Measured("langgraph-redis", problems=["`ImportError`: no module"]),
    ]


def test_what_a_library_cannot_show_alone_is_said() -> None:
    section = report.shown(shown_results())
    assert "| stm-backends | 2.0 (2.1) | 2.0 (2.1) | 2.0 (2.1) |" in section
    assert "| OpenAI Agents `RedisSession` | whole: 30.0 (2.0) | 0.5 (0.4) | no |" in section
    assert "| LangGraph `AsyncShallowRedisSaver` | - | - | - |" in section
    assert "- LangGraph `AsyncShallowRedisSaver`: `ImportError`: no module." in section


def test_what_is_shown_stays_in_the_page_until_it_is_measured_again() -> None:
    page = report.page(some_results(), {})
    written = page
    others = (speaking_report.section(spoken_results()), frameworks_report.section([Measured("adk-sqlite")]))
    for section in (report.shown(shown_results()), *others):
        written = report.with_section(written, section)
    kept = [report.section_of(written, heading) for heading in report.SECTIONS]
    for section in kept:
        assert report.with_section(written, section) == written
        written = written.replace(section + "\n", "")
    assert written == page
    assert [report.section_of(page, heading) for heading in report.SECTIONS] == [""] * 3


def spoken_results(*, timed: bool = True) -> list[Measured]:
    """Return figures about messages: of ours, of two others, and of one that has failed."""
    times = (1.5, 2.0, 0.5) if timed else (None, None, None)
    at = {
        length: AtLength(length, *times, sent=1_000, received=length * 100, round_trips=3, shown=length + 1)
        for length in (12, 1_000)
    }
    page = Shown(HISTORY, 30.0, 2.0, whole=True) if timed else Shown(HISTORY, whole=True)
    lost = Counted(190, lost=3, doubled=1, errors={"StaleSessionError": 10})
    return [
        Measured("ours-redis", lengths=at, processes=Counted(200), shown={HISTORY: Shown(HISTORY, 2.0, 2.1)}),
        Measured("openai-redis", lengths=at, processes=Counted(200), shown={HISTORY: page}),
        Measured("adk-redis", lengths=at, processes=lost, shown={HISTORY: page}),
        Measured("langgraph-dynamo", problems=["`ImportError`: no module"]),
    ]


def test_messages_have_each_figure_beside_ours() -> None:
    section = speaking_report.section(spoken_results())
    row = "| Google ADK `RedisSessionService` | 1.5 (0.5) / 1.5 (0.5) | 2.2 / 101 | 3.0 / 3.0 |"
    assert f"{row} **3 + 1 of 190**; 10 x `StaleSessionError` | 1,001 | whole: 30.0 (2.0) |" in section
    assert "| stm-backends | 1.5 (0.5) / 1.5 (0.5) | 2.2 / 101 | 3.0 / 3.0 | 0 + 0 of 200 |" in section
    assert "- LangGraph `DynamoDBSaver`: `ImportError`: no module." in section
    assert "| Google ADK | not offered |" in section
    assert "[Google ADK `RedisSessionService`]" in section


def test_messages_that_were_only_counted_have_no_times() -> None:
    section = speaking_report.section(spoken_results(timed=False))
    assert "--messages --counts --write" in section
    assert "there are no times" in section
    assert "| - / - | 2.2 / 101 | 3.0 / 3.0 | 0 + 0 of 200 | 1,001 | whole |" in section


def test_every_library_is_asked_once_for_what_it_shows() -> None:
    assert {"ours-redis", "openai-redis", "penguiflow-redis", "key-value-disk"} <= {*SHOWING}
    assert not {"ours-all-redis", "openai-redis-limit", "langgraph-postgres-delta"} & {*SHOWING}


def test_the_readme_has_one_place_for_the_short_table() -> None:
    readme = (ROOT / "README.md").read_text("utf-8")
    written = report.in_readme(readme, some_results())
    assert "| 1.5 / 1.5 | 2.2 / 101 | 3 |" in written
    assert report.in_readme(written, some_results()) == written
    with pytest.raises(ValueError, match="no place"):
        report.in_readme("nothing", some_results())


def test_every_library_can_be_named_in_the_page() -> None:
    page = report.page([Measured(name, problems=["not tried"]) for name in PEERS], {})
    assert all(f"[{peer.label}]({peer.link})" in page for peer in PEERS.values())
    section = speaking_report.section([Measured(name, problems=["not tried"]) for name in MESSAGES])
    assert all(f"[{peer.label}]({peer.link})" in section for peer in MESSAGES.values())
