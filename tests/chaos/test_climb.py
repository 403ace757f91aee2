"""A slow leak is told from what rises and falls anyway, within an hour of samples."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.chaos import flat, soak
from tests.chaos.run import Result

MIB = 1024 * 1024
PAGE = 4096
SAMPLES = 240
"""An hour, every 15 seconds."""


def memory(more: Callable[[float], float]) -> list[float]:
    """Return what a process takes: `more` bytes after some minutes, whole pages, and what comes and goes."""
    chance = random.Random(15)
    values = (30 * MIB + more(n / 4) + chance.gauss(0, 40_000) for n in range(SAMPLES))
    return [PAGE * (value // PAGE) for value in values]


STEADY = {
    "flat": memory(lambda minute: 0),
    "a warm-up": memory(lambda minute: 3 * MIB * (1 - math.exp(-minute / 4))),
    "a step": memory(lambda minute: 2 * MIB * (minute > 35)),
    "two steps": memory(lambda minute: MIB * (minute > 28) + MIB * (minute > 44)),
    "a saw": memory(lambda minute: MIB * (minute % 7)),
    "a slow saw": memory(lambda minute: MIB / 8 * (minute % 22)),
    "a peak": memory(lambda minute: 40 * MIB * (50 < minute < 52)),
    "falling": memory(lambda minute: -20_000 * minute),
    "a kilobyte a minute": memory(lambda minute: 1_000 * minute),
}
LEAKING = {
    "a hundredth of a MiB per minute": memory(lambda minute: MIB / 100 * minute),
    "the same under a saw": memory(lambda minute: MIB / 100 * minute + MIB / 16 * (minute % 3)),
    "in arenas": memory(lambda minute: MIB / 4 * (minute // 5)),
    "after a warm-up": memory(lambda minute: MIB / 50 * minute + 3 * MIB * (1 - math.exp(-minute / 4))),
}


@pytest.mark.parametrize("name", STEADY)
def test_an_hour_without_a_leak_does_not_climb(name: str) -> None:
    assert not climbs("allocated", STEADY[name])
    assert not climbs("memory", STEADY[name])


@pytest.mark.parametrize("name", LEAKING)
def test_an_hour_with_a_leak_climbs(name: str) -> None:
    assert climbs("allocated", LEAKING[name])
    assert climbs("memory", LEAKING[name])


def test_a_descriptor_that_is_not_given_back_every_ten_minutes_climbs() -> None:
    assert climbs("descriptors", [11 + n // 40 for n in range(SAMPLES)])
    assert not climbs("descriptors", [11 + n % 3 for n in range(SAMPLES)])


def test_a_record_that_is_left_behind_every_minute_climbs() -> None:
    # As many as in an hour that was published.
    chance = random.Random(15)
    assert climbs("records", [135 + chance.randrange(-6, 6) + n // 4 for n in range(SAMPLES)])
    assert not climbs("records", [135 + chance.randrange(-6, 6) for _ in range(SAMPLES)])


def test_what_is_done_may_grow_and_a_short_series_is_not_judged() -> None:
    assert not climbs("WAL written", [float(n) for n in range(SAMPLES)])
    assert flat.climb([float(n) for n in range(flat.ENOUGH - 1)]) is None


def test_chance_climbs_less_than_once_in_a_thousand_series() -> None:
    chance = random.Random(15)
    rises = [flat.climb([chance.gauss(0, 1) for _ in range(SAMPLES)]) for _ in range(2_000)]
    assert sum(map(bool, rises)) <= 2


def climbs(name: str, values: Sequence[float]) -> bool:
    (summary,) = soak.summed_up({("p0.1", name): values}, minutes=60.0)
    return summary.climbs


@pytest.mark.parametrize(
    ("samples", "violations", "status"), [(47, [], 2), (48, [], 0), (47, ["c0-0 lost a turn"], 1)]
)
def test_a_soak_too_short_to_be_judged_says_so(
    samples: int, violations: list[str], status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    series = [vars(one) for one in soak.summed_up({("p0.1", "memory"): memory(lambda _: 0)[:samples]}, 1.0)]
    figures = {"series": series, "turns acknowledged": 1, "adds ok": 2}
    result = Result(stand="sqlite", seed=15, adds=2, violations=violations, figures=figures)
    assert soak.show([result], every=15.0) == status
    said = capsys.readouterr().out
    assert f"sqlite: 1 turn, 0 kills, {len(violations)} violation" in said
    too_short = "no figure was judged: that takes 48 samples, 12 minutes at --every 15\n"
    assert (too_short in said, "| memory |" in said) == (samples < 48, samples == 48)


def test_a_table_of_nothing_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        soak.main(["--table"])
    assert "--table needs --out" in capsys.readouterr().err
    assert soak.main(["--table", "--out", str(tmp_path)]) == 2
    assert "there are no figures that were judged in" in capsys.readouterr().err
