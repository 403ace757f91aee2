"""A turn is made of its id, and a turn that was altered anywhere is told from it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from stm_backends import TrajectoryDigest
from stm_backends.memory.view import shown_turn
from tests.chaos import turns

RUN = [turns.identity_of("c0-1", "p1.2", number) for number in range(1_000)]
SOAK = [turns.identity_of("c0-1", "p1.2", number, 1_790_000_000.25) for number in range(1_000)]


def shown(identity: str) -> dict[str, Any]:
    return shown_turn(turns.turn_of(identity), turns.config())


@pytest.mark.parametrize("identity", [*RUN[:50], *SOAK[:50]])
def test_a_turn_that_is_shown_as_it_was_is_known_by_its_id(identity: str) -> None:
    assert turns.turn_in(shown(identity), "c0-1") == identity
    assert turns.turn_in(shown(identity), "c0-2") is None
    assert turns.turn_of(identity) == turns.turn_of(identity)


def test_one_turn_in_ten_has_results_of_one_to_eight_kilobytes() -> None:
    digests = [digest for one in RUN if (digest := turns.turn_of(one).trajectory_digest)]
    assert 70 < len(digests) < 130
    sizes = sorted(len(digest.observations_summary) for digest in digests)
    assert 1_000 <= sizes[0] < 2_000
    assert 7_000 < sizes[-1] <= 8_000


def test_each_turn_of_a_soak_has_a_time_and_results() -> None:
    made = [turns.turn_of(one) for one in SOAK]
    assert {one.ts for one in made} == {1_790_000_000.25}
    assert all(one.trajectory_digest for one in made)


@pytest.mark.parametrize(
    "identity", [next(one for one in RUN if turns.turn_of(one).trajectory_digest), SOAK[0]]
)
def test_a_turn_whose_results_were_altered_is_not_known(identity: str) -> None:
    turn = turns.turn_of(identity)
    assert turn.trajectory_digest
    text = turn.trajectory_digest.observations_summary
    for results in (None, TrajectoryDigest(["search"], text[:-1]), TrajectoryDigest([], text)):
        altered = dataclasses.replace(turn, trajectory_digest=results)
        assert turns.turn_in(shown_turn(altered, turns.config()), "c0-1") is None
