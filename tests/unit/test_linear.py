"""Functions on stored or given values take time in proportion to them, whoever made the values.

Each case took a minute of processor time or more when its cost was quadratic, and takes less than a second
now. Processor time does not depend on what else the machine does.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Callable, Sequence

import pytest

from stm_backends import ConversationTurn, ExtractiveSummarizer
from stm_backends.drivers.contract import Record
from stm_backends.errors import InvalidState
from stm_backends.memory.shared.snapshot import Snapshot
from stm_backends.plain_json import require_json
from stm_backends.records.body import Body, Forgotten
from stm_backends.records.codec import Codec
from stm_backends.records.steps import run_now
from stm_backends.types import StoredTurn

CODEC = Codec()
MOST_S = 5.0


def record(ids: Sequence[object], body: Body | None = None) -> Record:
    entries = (CODEC.seal_turn(StoredTurn(str(one), ConversationTurn("u", "a"))) for one in ids)
    return Record("v", CODEC.seal_body(body or Body()), tuple(entries))


def forgotten(count: int) -> Forgotten:
    return Forgotten(f",{','.join(['AAAAAAAA'] * count)},", ((1.0, count),))


def many_ids_looked_up_among_many_that_left() -> Callable[[], object]:
    found = record(range(20_000), Body(forgotten=forgotten(250_000)))
    return lambda: Snapshot.of(found, CODEC)


def many_pairs_of_age_that_have_passed() -> Callable[[], object]:
    count = 600_000
    old = Forgotten(forgotten(count).digests, tuple((float(index), 1) for index in range(count)))
    return lambda: old.adding(["x"], now=1e9, keep_for=1.0)


def many_repeats_out_of_order() -> Callable[[], object]:
    others = [*range(12_000)]
    ids = ["a", *others, *(["a"] * 12_000), *others[:-2], others[-1], others[-2]]
    return Snapshot.of(record(ids), CODEC).leading_repeats


def a_long_key_above_many_values() -> Callable[[], object]:
    value = {"k" * 2_000_000: [0] * 200_000 + [10**4299]}
    return lambda: require_json(value, "x")


def a_long_key_of_a_state_above_many_values() -> Callable[[], object]:
    state = {"k" * 2_000_000: [0] * 200_000}
    return lambda: run_now(CODEC.seal_steps("state", state))


def many_tools_that_no_result_names() -> Callable[[], object]:
    observed = "\n".join("x" * 2_000 for _ in range(50))
    digest = {"tools_invoked": [f"t{index}" for index in range(500_000)], "observations_summary": observed}
    turn = {"user": "u", "assistant": "a", "trajectory_digest": digest}
    return lambda: asyncio.run(ExtractiveSummarizer()({"turns": [turn]}))


@pytest.mark.parametrize(
    "case",
    [
        many_ids_looked_up_among_many_that_left,
        many_pairs_of_age_that_have_passed,
        many_repeats_out_of_order,
        a_long_key_above_many_values,
        a_long_key_of_a_state_above_many_values,
        many_tools_that_no_result_names,
    ],
)
def test_the_time_grows_with_the_input_and_no_faster(case: Callable[[], Callable[[], object]]):
    work = case()
    start = time.process_time()
    work()
    assert time.process_time() - start < MOST_S


def slow_leading_repeats(snapshot: Snapshot) -> int:
    """Do what `leading_repeats` does, as its docstring says it."""
    if not snapshot.repeats:
        return 0
    if not snapshot.turns:
        return len(snapshot.tail)
    ids = [one if isinstance(one, str) else one.id for one in snapshot.opened]
    wanted = [stored.id for stored in snapshot.turns]
    for drop in range(len(ids) - 1, -1, -1):
        left = [one for one in dict.fromkeys(ids[drop:]) if one in wanted]
        if ids[drop] == wanted[0] and left == wanted:
            return drop
    return snapshot.starts[0]


def test_repeats_that_can_be_dropped_are_found_as_before():
    choices = random.Random(13)
    for _ in range(3_000):
        ids = [choices.randrange(4) for _ in range(choices.randrange(1, 9))]
        snapshot = Snapshot.of(record(ids), CODEC)
        assert snapshot.leading_repeats() == slow_leading_repeats(snapshot), ids
    for ids in itertools.product(range(3), repeat=5):
        snapshot = Snapshot.of(record(ids), CODEC)
        assert snapshot.leading_repeats() == slow_leading_repeats(snapshot), ids


@pytest.mark.parametrize("count", [10, 10_000])
def test_ids_that_left_are_known_whether_few_or_many(count: int):
    remembered = forgotten(count).adding(["x", "y"], now=2.0, keep_for=3600.0)
    assert "x" in remembered
    assert "y" in remembered
    assert "z" not in remembered
    assert "" not in remembered


def test_the_path_of_an_invalid_value_is_shown_shortened():
    with pytest.raises(InvalidState) as caught:
        require_json({"k" * 1_000: {"deeper": object()}}, "state")
    assert str(caught.value).startswith("state.kkk")
    assert str(caught.value).endswith("kkk... is object, which JSON does not have")
    assert len(str(caught.value)) < 120
    with pytest.raises(InvalidState, match=r"^state\.a\[1\]\.b is object"):
        require_json({"a": [0, {"b": object()}]}, "state")
