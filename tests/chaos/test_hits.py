"""A fault that hit nothing says so, and so does one that is not the only reason."""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.chaos import history
from tests.chaos.nemesis.hits import Hits
from tests.chaos.nemesis.people import People

USUAL = [("p0.1", "add", n / 10, n / 10 + 0.001, "ok") for n in range(50)]


def calls(*calls: tuple[str, str, float, float, history.Phase]) -> Iterable[history.Event]:
    events: list[history.Event] = []
    for op, (process, what, began, ended, phase) in enumerate(calls):
        for t, how in ((began, "invoke"), (ended, phase)):
            events.append(history.Event(t=t, process=process, op=op, phase=how, what=what))
    return sorted(events, key=lambda event: event.t)


def hit(kind: str, *made: Any, target: str = "", others: Any = (), **figures: Any) -> bool | str:
    """Return what is said of a fault between 10 and 12."""
    hits = Hits(Path("nowhere"))
    for other in others:
        hits.began(*other)
    fault = hits.began(kind, target, 10.0)
    hits.hear(calls(*USUAL, *made))
    return hits.ended(fault, 12.0, figures)


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (("p1.1", "add", 11.0, 11.001, "ok"), False),
        (("p1.1", "add", 11.0, 11.001, "fail"), True),
        (("p1.1", "read", 11.0, 11.001, "unknown"), True),
        (("p1.1", "add", 11.0, 11.2, "ok"), True),
        (("p1.1", "add", 11.5, 99.0, "ok"), True),
        (("p1.1", "add", 9.0, 9.5, "fail"), False),
        (("p1.1", "summarize", 11.0, 11.2, "fail"), False),
    ],
)
def test_a_fault_of_a_server_hits_calls_that_fail_or_take_long(call: Any, expected: bool) -> None:
    assert hit("server-kill", call) is expected


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (("network-cut", "", 9.0), "unknown"),
        (("pod-pause", "p1.1", 11.0), False),
        (("pod-pause", "p2.1", 11.0), True),
        (("model-hangs", "", 9.0), True),
        (("people-erase", "", 9.0), True),
    ],
)
def test_a_call_that_another_fault_may_have_hit_is_not_counted(other: Any, expected: bool | str) -> None:
    assert hit("server-kill", ("p1.1", "add", 11.0, 11.5, "fail"), others=[other]) == expected


def test_a_fault_of_the_model_hits_calls_that_begin_meanwhile() -> None:
    assert hit("model-hangs", ("p1.1", "summarize", 11.0, 11.1, "ok")) is True
    assert hit("model-hangs", ("p1.1", "summarize", 9.0, 11.1, "ok")) is False


def test_a_fault_of_a_pod_hits_calls_of_that_pod_only() -> None:
    failed = ("p1.1", "add", 11.0, 11.1, "fail")
    assert hit("pod-descriptors", failed, target="p1.1") is True
    assert hit("pod-descriptors", failed, target="p2.1") is False
    assert hit("pod-clock", failed, target="p1.1") is True
    assert hit("pod-restart", failed, target="p1.1") is False


@pytest.mark.parametrize(
    ("kind", "figures", "expected"),
    [
        ("pod-kill", {"struck": {"add": 1}}, True),
        ("pod-pause", {"struck": {}}, False),
        ("pod-kill", {}, "unknown"),
        ("pod-cancel", {"calls": 0}, False),
        ("people-erase", {"outcome": "ok", "found": True}, True),
        ("people-erase", {"outcome": "unknown", "found": False}, "unknown"),
        ("people-purge", {"outcome": "ok", "found": True, "removed": 0}, False),
        ("people-copy", {"acted": False}, False),
        ("command-purge", {"done": True, "expired": 0}, False),
        ("command-purge", {"done": False, "expired": 3}, "unknown"),
    ],
)
def test_what_says_itself_what_it_hit_is_believed(kind: str, figures: Any, expected: bool | str) -> None:
    assert hit(kind, **figures) == expected


class Dead:
    alive = False


async def test_people_who_find_no_pod_have_done_nothing() -> None:
    class Pods:
        all = (Dead(), Dead())
        generations = (0, 3)

    people: Any = People(Pods())  # type: ignore[arg-type]
    async with people.asked("erase", {}, random.Random(1), 0.0) as figures:
        assert figures == {"acted": False}
