"""Short runs: nothing is found in the library as it is, and each mutant of it is found."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest

from stm_backends.drivers.contract import Driver, Key
from stm_backends.drivers.in_memory import MemoryDriver
from tests.chaos import __main__ as command
from tests.chaos import checker, history, remembering, schedule, soak
from tests.chaos.mutants import MUTANTS
from tests.chaos.options import counted
from tests.chaos.run import Order, Result, Run, known_faults
from tests.chaos.turns import TENANT


def run(out: Path, *options: str) -> tuple[int, dict[str, Any]]:
    """Run the command on one stand; returns its exit status and the results."""
    status = command.main([*options, "--seed", "15", "--out", str(out)])
    (results,) = out.glob("*/results.json")
    return status, json.loads(results.read_text(encoding="utf-8"))


def test_a_seed_repeats_the_schedule_of_faults() -> None:
    def drawn(seed: int) -> list[schedule.Planned]:
        faults = schedule.planned(seed, {"kill": 1.0, "cut": 2.0}, gap=0.5, lease=4.0, calm=9.0)
        return [next(faults) for _ in range(1_000)]

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)
    assert any(one.seconds > 4.0 for one in drawn(1))
    assert sum(one.gap for one in drawn(1)) < 1_000


def test_a_stand_of_another_name_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["redsi"]) == 2
    assert "Did you mean 'redis'?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (("sqlite", "--other", "nosuch"), "there is no commit 'nosuch' in this repository\n"),
        (
            ("sqlite", "--only", "pot-"),
            "on sqlite, no fault's name begins with pot-; there are: checkpoint, ",
        ),
        (("redis", "--only", "command-reseal"), "on redis, no fault's name begins with command-reseal; "),
        (("redis", "sqlite", "--only", "network-"), "on sqlite, no fault's name begins with network-; "),
    ],
)
def test_what_cannot_be_run_is_refused_before_anything_starts(
    options: tuple[str, ...], why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main([*options, "--out", str(tmp_path)]) == 2
    said = capsys.readouterr()
    assert said.err.startswith(why)
    assert not said.out
    assert [*tmp_path.iterdir()] == []


def test_a_datastore_whose_programs_are_missing_is_refused_before_the_others_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert command.main([]) == 2
    assert capsys.readouterr().err == "to run on dynamo, install java and npm\n"


@pytest.mark.parametrize("name", command.names())
def test_the_faults_of_a_stand_are_known_before_it_starts(name: str, tmp_path: Path) -> None:
    found = known_faults(command.stand_of(name, tmp_path), sealed=True)
    assert len(found) == len(
        {*found, "disk-full", "command-reseal", "model-hangs", "pod-kill", "people-erase"}
    )
    assert any(one.startswith("network-") for one in found) == (name != "sqlite")
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("command", [command, soak], ids=["chaos", "soak"])
def test_a_stand_that_is_given_twice_runs_once(
    command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[str] = []

    async def runs(order: Order, *_: Any) -> Result:
        ran.append(order.stand)
        order.folder.mkdir(parents=True, exist_ok=True)
        return Result(stand=order.stand, seed=1, figures={"turns acknowledged": 1, "series": [{}]})

    async def side_by_side(options: Any, out: Path) -> list[Result]:
        return [await runs(Order(stand=name, folder=out / name, seed=1)) for name in options.stand]

    monkeypatch.setattr("tests.chaos.__main__.run", runs)
    monkeypatch.setattr(soak, "_side_by_side", side_by_side)
    monkeypatch.setattr(soak, "table", str)
    twice = ["sqlite", "sqlite", "--out", str(tmp_path)]
    assert command.main(twice) == 0
    assert ran == ["sqlite"]
    assert command.main(twice) == 2
    assert "sqlite exists already: name another folder" in capsys.readouterr().err


@pytest.mark.parametrize("command", [command, soak], ids=["chaos", "soak"])
def test_a_run_of_no_time_is_refused(command: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["sqlite", "--minutes", "-1"])
    assert "-1 is not above 0" in capsys.readouterr().err


def event(t: float, phase: history.Phase, what: str, op: int = 1, **data: Any) -> history.Event:
    return history.Event(t=t, process="p0.1", op=op, phase=phase, what=what, conversation="", data=data)


def test_a_fact_that_is_lost_altered_or_foreign_is_found() -> None:
    important = {"session": 0, "importance": 0.8}
    events = [
        *(event(0, phase, "remember", key="a", **important) for phase in ("invoke", "ok")),
        *(event(1, phase, "remember", key="b", **important) for phase in ("invoke", "unknown")),
        *(event(2, phase, "remember", key="c", session=0, importance=0.2) for phase in ("invoke", "ok")),
    ]
    erased = [event(3, phase, "forget", session=0) for phase in ("invoke", "ok")]
    nothing = event(4, "info", "remembered", session=0, keys=[], altered=[])
    assert remembering.judged([*events, *erased, nothing])[0] == []
    clean = event(3, "info", "remembered", session=0, keys=["a", "b"], altered=[])
    assert remembering.judged([*events, clean])[0] == []
    wrong = event(3, "info", "remembered", session=0, keys=["b", "d"], altered=["b"])
    found = "\n".join(remembering.judged([*events, wrong])[0])
    assert "a was acknowledged" in found
    assert "b was altered" in found
    assert "d is remembered, and was never given" in found


def test_a_run_leaves_results_and_nothing_that_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, results = run(tmp_path, "sqlite", "--faults", "6", "--pods", "2", "--minutes", "0.2")
    assert not status, results["violations"]
    assert sum(results["faults"].values()) >= 6
    assert results["adds"]
    assert [results[name] for name in ("pods_count", "pause", "faults_limit")] == [2, 0.1, 6]
    assert any(event.what == "figures" for event in history.read(tmp_path / "sqlite" / "events"))
    assert not pods_of(tmp_path)
    said = capsys.readouterr().out
    assert "  the faults are over; pods flush, and everything is read\n" in said
    events = tmp_path / "sqlite" / "events"
    assert said.endswith(f"seed 15; judge again: {sys.executable} -m tests.chaos.checker {events}\n")
    assert f"{results['figures']['turns acknowledged']:>10,}{0:>12}\n" in said
    assert checker.main([str(events)]) == 0
    again = capsys.readouterr().out
    assert [name for name, value in results["figures"].items() if f"{name}: {value:g}\n" not in again] == []


@pytest.mark.parametrize(("count", "said"), [(0, "0 faults"), (1, "1 fault"), (2_000, "2,000 faults")])
def test_one_fault_is_not_called_faults(count: int, said: str) -> None:
    assert counted(count, "fault") == said


@pytest.mark.parametrize("workers", ["at work", "without a turn"])
def test_a_run_without_final_reads_never_passes(
    workers: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def ends_early(_: Run) -> None:
        """Neither flush nor read anything in the end."""

    monkeypatch.setattr(Run, "_settle", ends_early)
    pause = "0.1" if workers == "at work" else "9"
    status, results = run(tmp_path, "sqlite", "--pods", "1", "--minutes", "0.05", "--pause", pause)
    assert status == 1
    assert "the run did not reach its final reads" in results["violations"][0]
    assert any(one.startswith("unread in c") for one in results["violations"]) == (workers == "at work")


@pytest.mark.parametrize("after", ["", " faults "], ids=["while it starts", "while it runs"])
def test_ctrl_c_leaves_no_process_and_says_so(after: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments = ("sqlite", "--minutes", "5", "--pods", "2", "--out", str(out))
    with subprocess.Popen(
        [sys.executable, "-u", "-m", "tests.chaos", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # A terminal interrupts all processes of a group.
        start_new_session=True,
        # Where this test itself runs in the background, an interrupt would be ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # noqa: PLW1509 -- as above
    ) as run:
        try:
            assert run.stdout
            said = run.stdout.readline()
            while not (after in said if after else pods_of(out)):
                said += run.stdout.readline() if after else ""
                assert run.poll() is None, said
            os.killpg(run.pid, signal.SIGINT)
            said += run.stdout.read()
            assert run.wait() == 130, said
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(run.pid, signal.SIGKILL)
            raise
    assert "interrupted; what was started is stopped" in said
    assert "Traceback" not in said
    with pytest.raises(ProcessLookupError):
        os.killpg(run.pid, 0)


@pytest.mark.full
@pytest.mark.parametrize("stand", command.SINGLE, ids="on {}".format)  # not in the group of its server
def test_nothing_is_found_on(stand: str, tmp_path: Path) -> None:
    status, results = run(tmp_path, stand, "--minutes", "0.35")
    assert not status, results["violations"]
    assert sum(results["faults"].values()) > 10
    assert results["adds"]


BY_DEFAULT = ("lease-without-expiry", "loses-one-write-in-10000", "summary-applied-twice")
"""What a run without any option finds; of each other mutant, a short run finds that it is there."""

FAULTS_FOR = {"erasure-leaves-one": ("people-erase",)}
"""Which faults a short run needs in order to find a mutant; others need what is drawn."""


SHOWN_BY: Final = {
    "loses-one-write-in-10000": "lost in ",
    "loses-one-write-in-100": "lost in ",
    "lease-without-expiry": "could not settle",
    "two-leases": "lease in ",
    "drops-when-healthy": "lost in ",
    "summary-applied-twice": "duplicate in ",
    "ids-forgotten": "duplicate in ",
    "erasure-leaves-one": "erasure in ",
    "unavailable-and-stored": "refused in ",
}
"""What one of the violations says; others may follow from it."""


def test_it_is_known_by_what_each_mutant_is_found() -> None:
    assert SHOWN_BY.keys() == MUTANTS.keys()


async def test_a_lost_turn_that_an_erasure_hides_is_made_good_by_a_loss_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "stand").mkdir()
    memory, turns = MemoryDriver(), itertools.count()
    await memory.open()

    def pod() -> Driver:
        return MUTANTS["loses-one-write-in-100"](memory, tmp_path / "stand")

    def key_of(conversation: str) -> Key:
        return Key(f"{TENANT}:u:memory", conversation)

    async def lost(driver: Driver, conversation: str) -> list[str]:
        """Add 90 turns; returns the conversations of the turns that were lost so far."""
        for _ in range(90):
            turn = b'{"turn_id":"%s/p0.1/%d"}' % (conversation.encode(), next(turns))
            await driver.append(key_of(conversation), turn, initial_version="v", ttl=None)
        return [line.partition("/")[0] for line in (tmp_path / "stand" / "lost").read_text().splitlines()]

    assert await lost(pod(), "c0-0") == ["c0-0"]
    assert await lost(pod(), "c1-0") == ["c0-0", "c1-0"]
    await pod().delete(key_of("c0-0"))
    # Nothing where an erasure would excuse it. Then the one that is hidden, and two for the turns since.
    assert await lost(pod(), "c0-0") == ["c0-0", "c1-0"]
    assert await lost(pod(), "c1-0") == ["c0-0", *["c1-0"] * 4]


async def test_a_lost_turn_stays_lost_when_its_pod_adds_it_again(tmp_path: Path) -> None:
    (tmp_path / "stand").mkdir()
    memory = MemoryDriver()
    await memory.open()
    pod = MUTANTS["loses-one-write-in-100"](memory, tmp_path / "stand")
    key = Key(f"{TENANT}:u:memory", "c0-0")

    async def add(number: int) -> int:
        return await pod.append(key, b'{"turn_id":"c0-0/p0.1/%d"}' % number, initial_version="v", ttl=None)

    lengths = [await add(number) for number in range(20)]
    record = await memory.load(key)
    assert record
    assert len(record.tail) == 19
    lost = (tmp_path / "stand" / "lost").read_text().rpartition("/")[2]
    assert await add(int(lost)) == 20
    assert await memory.load(key) == record
    assert lengths[-1] == 19


@pytest.mark.full
@pytest.mark.parametrize("mutant", sorted(MUTANTS.keys() - BY_DEFAULT))
def test_a_short_run_finds_the_mutant(mutant: str, tmp_path: Path) -> None:
    only = FAULTS_FOR.get(mutant, ("pod-", "model-"))
    options = ("--minutes", "0.25", "--pause", "0.06", *(f"--only={one}" for one in only))
    status, results = run(tmp_path, "sqlite", "--mutant", mutant, *options)
    assert status == 1
    assert [one for one in results["violations"] if SHOWN_BY[mutant] in one], results["violations"]


@pytest.mark.full
@pytest.mark.parametrize("mutant", BY_DEFAULT)
def test_the_default_run_finds_the_mutant(mutant: str, tmp_path: Path) -> None:
    # SQLite, which comes first, is enough of it.
    status, results = run(tmp_path, "sqlite", "--mutant", mutant)
    assert status == 1, f"lost: {[file.read_text() for file in tmp_path.glob('*/lost')]}"
    assert [one for one in results["violations"] if SHOWN_BY[mutant] in one], results["violations"]


def pods_of(out: Path) -> list[str]:
    """Return the command lines of processes that a run started and that still run."""
    lines = [file.read_bytes().decode(errors="replace") for file in Path("/proc").glob("[0-9]*/cmdline")]
    return [line for line in lines if str(out) in line and "tests.chaos.pod" in line]


def test_the_first_violations_of_each_kind_are_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = [f"lease in c0-{number}: taken" for number in range(8)]
    violations = [*found, "lost in c1-0: c1-0/p0/1", "p0.1 could not settle ['c0-0']"]
    result = Result(stand="redis", seed=1, violations=violations, figures={"turns acknowledged": 1})
    command.show([result], tmp_path)
    said = capsys.readouterr().out
    assert "redis: 8 of lease, 1 of lost, 1 of run" in said
    assert said.count(": taken") == 5
    assert f"and 3 more of lease, in {tmp_path}/redis/results.json" in said
    assert "lost in c1-0" in said
    assert "could not settle" in said
    assert "no pod lived long enough for its growth to be judged" in said
    assert "no violations" not in said
