"""Operations that are paused between their requests: what the suite finds so, and finds in no other way."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any

import pytest

from stm_backends.testing import Bench, DriverContract
from stm_backends.testing.driver_checks.stepping import Stepping
from stm_backends.testing.workbench.check import NotAsked, check_of
from tests.mutants import OPTIMISTIC
from tests.mutants import stepping as mutants
from tests.support.networked import NetworkedDriver, networked_datastore
from tests.support.optimistic import OptimisticDriver, optimistic_datastore

STEPPING = [name for name, member in vars(Stepping).items() if check_of(member)]
RACES = (
    "test_concurrent_appends_are_all_stored_in_each_writers_order",
    "test_folds_never_lose_an_append_and_loads_never_see_half_a_fold",
    "test_of_writers_that_expect_the_same_version_exactly_one_wins",
    "test_of_concurrent_requests_for_a_lease_exactly_one_succeeds",
    "test_concurrent_first_appends_create_one_record",
)
"""Those that depend on no size."""

ALSO: dict[type[OptimisticDriver], str] = {
    mutants.TakesTheTimeBeforeItsTurn: (
        "test_a_write_whose_read_is_answered_late_judges_expiry_after_the_answer"
    )
}
"""A second check that rejects a mutant: what comes before the queue comes before the read."""


def run(name: str, bench: Bench) -> None:
    DriverContract.checks()[name](DriverContract(), bench)


@pytest.mark.parametrize("kind", OPTIMISTIC, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize(
    "names", [RACES, pytest.param(STEPPING, marks=pytest.mark.full)], ids=["races", "steps"]
)
def test_a_mutant_passes_every_other_check_of_steps_and_of_races(
    names: Sequence[str], kind: type[OptimisticDriver], monkeypatch: pytest.MonkeyPatch
) -> None:
    if names is RACES:
        # Without a pause no operation takes longer than a lock lasts, however busy the machine is.
        monkeypatch.setattr(mutants, "LOCKED_S", 30.0)
    for name in names:
        if name not in (OPTIMISTIC[kind].check, ALSO.get(kind)):
            # One that locks has no queue.
            with contextlib.suppress(NotAsked):
                run(name, Bench(optimistic_datastore(kind), quick=True))


def test_a_driver_of_single_requests_passes_or_has_nothing_to_be_paused_in() -> None:
    asked = 0
    for name in STEPPING:
        try:
            run(name, Bench(networked_datastore(NetworkedDriver), quick=True))
            asked += 1
        except NotAsked as reason:
            assert "one request each" in str(reason) or "do not queue" in str(reason)  # noqa: PT017 -- of some
    assert asked == 4


def test_the_pause_is_told_in_the_history_of_a_failure() -> None:
    (kind, *_), (caught, *_) = OPTIMISTIC, OPTIMISTIC.values()
    with pytest.raises(AssertionError) as rejected:
        run(caught.check, Bench(optimistic_datastore(kind), quick=True))
    (note,) = rejected.value.__notes__
    assert "is paused after answer 1" in note
    assert "the paused write goes on" in note
    assert "exactly one can win" in str(rejected.value)


class AsksAgain(OptimisticDriver):
    """Is correct, and sends a read again that is not answered soon, on another connection."""

    async def ask(self, operation: str, request: str, *given: object, **named: object) -> Any:
        if request == "read":
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.1):
                    return await super().ask(operation, request, *given, **named)
        return await super().ask(operation, request, *given, **named)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (AsksAgain, "gave up, or sent its request again, after 0"),
        (mutants.TrustsItsLock, "do not queue in the driver"),
    ],
)
def test_a_driver_without_a_queue_and_one_that_does_not_wait_are_told_apart(
    kind: type[OptimisticDriver], reason: str
) -> None:
    name = "test_a_write_that_queues_behind_another_judges_expiry_when_its_turn_comes"
    with pytest.raises(NotAsked, match=reason):
        run(name, Bench(optimistic_datastore(kind), quick=True))


def test_a_driver_that_asks_again_passes_every_other_check_of_steps() -> None:
    for name in STEPPING:
        with contextlib.suppress(NotAsked):
            run(name, Bench(optimistic_datastore(AsksAgain), quick=True))
