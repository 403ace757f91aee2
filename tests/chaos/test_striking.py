"""Kills and pauses strike what is under way, and say what it was."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.chaos import __main__ as command
from tests.chaos import checker, history, striking


def test_a_seed_repeats_what_strikes_are_aimed_at() -> None:
    def drawn(seed: int, *, is_long: bool) -> list[str]:
        chance = random.Random(seed)
        return [striking.aimed(chance, is_long=is_long) for _ in range(1_000)]

    assert drawn(1, is_long=False) == drawn(1, is_long=False) != drawn(2, is_long=False)
    short, lasting = Counter(drawn(1, is_long=False)), Counter(drawn(1, is_long=True))
    assert {*short} == {*lasting} == {"", *striking.KINDS}
    assert 200 < short[""] < 300
    assert 200 < lasting[""] < 300
    assert lasting.most_common(1)[0][0] == "summarize"


Said = list[dict[str, Any]]


@pytest.fixture
def pod(tmp_path: Path) -> Iterator[tuple[striking.Watch, striking.Striker, Said]]:
    """What a pod strikes itself with; the signal is one that it survives."""
    said: Said = []
    handlers = {one: signal.getsignal(one) for one in (signal.SIGALRM, signal.SIGUSR1)}
    signal.signal(signal.SIGUSR1, lambda *_: said.append({"signal": True}))
    watch = striking.Watch(tmp_path, "p0.1")
    yield watch, striking.Striker(watch, lambda **what: said.append(what)), said
    signal.setitimer(signal.ITIMER_REAL, 0)
    for number, handler in handlers.items():
        signal.signal(number, handler)
    watch.close()


def until_struck(said: Said) -> None:
    give_up_at = time.monotonic() + 30
    while {"signal": True} not in said:
        assert time.monotonic() < give_up_at
        time.sleep(0.001)


@pytest.mark.parametrize("first", ["armed", "begun"])
def test_a_strike_waits_for_an_operation_of_its_kind(first: str, pod: Any) -> None:
    watch, striker, said = pod
    other = watch.invoke("read", "c0-0")
    if first == "begun":
        watch.invoke("add", "c0-0", turn="c0-0/p0.1/1")
    striker.arm(signal.SIGUSR1, "add", 0.5, time.monotonic() + 60)
    watch.end(other, "ok", "read", "c0-0")
    if first == "armed":
        assert not said
        watch.invoke("add", "c0-0", turn="c0-0/p0.1/1")
    until_struck(said)
    assert said[0]["struck"] == {"add": 1}
    assert said[0]["turns"] == [("c0-0", "c0-0/p0.1/1")]


def test_a_pod_says_which_turns_may_be_added_again(pod: Any) -> None:
    watch, _, _ = pod
    for number, phase in enumerate(["fail", "ok", "unknown", "ok", "ok", "unknown", None]):
        op = watch.invoke("add", "c0-0", turn=f"t{number}")
        if phase:
            watch.end(op, phase, "add", "c0-0", turn=f"t{number}")
    assert [turn for _, turn in watch.turns()] == ["t6", "t2", "t5", "t3", "t4"]


def test_a_strike_comes_in_the_end_and_says_that_it_struck_nothing(pod: Any) -> None:
    _, striker, said = pod
    striker.arm(signal.SIGUSR1, "add", 0.5, time.monotonic() + 0.05)
    until_struck(said)
    assert striking.shown(said[0]["struck"]) == ["nothing"]


def test_a_pod_that_is_late_leaves_the_strike_to_the_nemesis(pod: Any) -> None:
    watch, striker, said = pod
    # The pod did not run for so long that the nemesis has struck it meanwhile.
    striker.arm(signal.SIGUSR1, "add", 0.5, time.monotonic() - 2 * striking.LATE_S)
    watch.invoke("add", "c0-0", turn="c0-0/p0.1/1")
    time.sleep(0.1)
    os.sched_yield()
    assert not said


def history_of(*ops: tuple[str, float, float | None, str]) -> list[history.Event]:
    """Return a history of adds of one turn by these processes, and of reads that show it."""
    events: list[history.Event] = []
    for number, (process, began, ended, what) in enumerate(ops):
        data = {"turn": "c0-0/p1.1/1"} if what == "add" else {}
        shown = (
            {} if what == "add" else {"summary": [], "pending": [], "recent": ["c0-0/p1.1/1"] * int(what[4:])}
        )
        for t, phase in ((began, "invoke"), (ended, "ok")):
            if t is not None:
                event = {"t": t, "op": number, "phase": phase, "what": what[:4].strip("0123456789")}
                kept = data if what == "add" or phase == "invoke" else shown
                events.append(history.Event(process=process, conversation="c0-0", data=kept, **event))
    return sorted(events, key=lambda event: event.t)


@pytest.mark.parametrize(("times", "found"), [(1, []), (2, ["duplicate"])])
def test_a_turn_of_a_killed_pod_may_be_added_by_others_but_stands_once(times: int, found: list[str]) -> None:
    killed, others = ("p1.1", 1.0, None, "add"), [("p2.1", 2.0, 3.0, "add"), ("p3.1", 2.5, 2.6, "add")]
    read = ("p2.1", 4.0, 5.0, f"read{times}")
    report = checker.judged(history_of(killed, *others, read), lease_s=2.0, recovery_s=9.0, interrupted=True)
    assert [one.kind for one in report.violations] == found


@pytest.mark.full
def test_turns_of_killed_pods_are_added_by_others(tmp_path: Path) -> None:
    arguments = ("sqlite", "--faults", "10", "--pause", "0.05", "--only", "pod-kill", "--out", str(tmp_path))
    assert command.main([*arguments, "--seed", "15", "--minutes", "2"]) == 0
    events = history.read(tmp_path / "sqlite" / "events")
    added = [one for one in events if one.what == "add" and one.phase == "ok"]
    assert any(one.data["turn"].split("/")[1] != one.process for one in added)


@pytest.mark.full
def test_most_kills_and_pauses_of_a_run_strike_something(tmp_path: Path) -> None:
    kinds = ("--only", "pod-kill", "--only", "pod-pause")
    arguments = ("sqlite", "--faults", "30", "--pause", "0.05", *kinds, "--out", str(tmp_path))
    assert command.main([*arguments, "--seed", "15", "--minutes", "2"]) == 0
    events = history.read(tmp_path / "sqlite" / "events")
    struck = [one.data for one in events if one.what == "fault" and "struck" in one.data]
    assert len(struck) >= 25
    assert sum(bool(one["struck"]) for one in struck) > len(struck) / 2
    # What a kill has struck has no end.
    open_ops = Counter((one.process, one.what) for one in events if one.phase == "invoke")
    open_ops.subtract((one.process, one.what) for one in events if one.phase not in {"invoke", "info"})
    for one in struck:
        if one["kind"] == "pod-kill" and "add" in one["struck"]:
            assert open_ops[one["target"], "add"] == one["struck"]["add"]
