"""The suite passes drivers that are unusual and right."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar

import pytest

from stm_backends.drivers.contract import Key
from stm_backends.errors import OutcomeUnknown, Unavailable
from stm_backends.testing import Bench, DriverContract, FakeClock
from stm_backends.testing.driver_checks import leftovers, optional, races
from stm_backends.testing.workbench.check import NotAsked
from stm_backends.testing.workbench.faulty import SMALL, FaultyDriver, faulty_datastore
from tests.mutants.expiry import RenewsNoWholeSeconds
from tests.mutants.messages import logger
from tests.mutants.replaces import KeepIsForEver
from tests.mutants.waiting import KeepsALockForEachRecord
from tests.support.networked import NetworkedDriver, networked_datastore

EXACTLY = "test_a_record_is_full_with_exactly_max_record_bytes"
PURGE = "test_a_purge_removes_what_has_expired_and_no_more_than_its_limit"
AT_ONCE = "test_of_many_writes_at_once_each_succeeds_or_fails_for_itself"
FOLDS = "test_each_fold_of_the_only_folder_succeeds_beside_appends"
KEEP = "test_keep_leaves_the_time_to_live_unchanged"
MANY = "test_many_records_leave_no_object_behind"
DEAD = "test_connections_that_died_unnoticed_are_replaced"
OUTAGE = "test_after_an_outage_the_same_driver_works_and_nothing_is_lost"
FULL = (
    "test_a_full_record_refuses_what_it_cannot_hold_and_a_fold_makes_room",
    "test_a_rewrite_that_makes_a_record_too_large_is_refused",
    "test_no_operation_leaves_a_transaction_or_a_lock_behind",
)
"""Checks that fill a record with its largest entries."""


class CountsNoOverhead(FaultyDriver):
    """Takes more entries than it promises, because the overhead of its traits is the most it may be."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self.traits = replace(self.traits, overhead=64)


class KeepsLargeValuesElsewhere(FaultyDriver):
    """Has room for any number of large values, which take nothing of the record."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self.traits = replace(self.traits, max_inline=1_000)


class FindsMuchToPurge(FaultyDriver):
    """Is on a datastore in which others have left many expired records."""

    _swept = 0
    purges = 0

    def __init__(self, *given: Any, clock: FakeClock, **options: Any) -> None:
        super().__init__(*given, clock=clock, **options)
        self._time = clock

    async def expired(self) -> int:
        for number in range(5_000):
            await super().append(Key("others", f"{number}"), b"", initial_version="v", ttl=1)
        self._time.now += 2
        return await super().expired()

    async def purge(self, limit: int) -> int:
        type(self).purges += 1
        return await super().purge(limit)


class PassesOverWhatOthersHold(FaultyDriver):
    """Removes nothing at first, because another purge has all records in hand, which is then given up."""

    _swept = 0
    purges = 0

    async def purge(self, limit: int) -> int:
        self.purges += 1
        return await super().purge(limit) if self.purges > 1 else 0


class PausesBeforeItConnects(FaultyDriver):
    """Has a client that, once it has met an outage, refuses everything until a pause is over."""

    _until = 0.0

    @contextmanager
    def _scope(self, name: str, operation: str) -> Generator[tuple[Any, float]]:
        clock = asyncio.get_running_loop().time
        if self.store.down:
            self._until = clock() + self.traits.deadline * 0.8
        if clock() < self._until:
            raise Unavailable("not connected", backend=self.name, operation=operation)
        with super()._scope(name, operation) as found:
            yield found


def run(name: str, kind: type[FaultyDriver], **limits: int) -> None:
    """Run one check on a driver that is right."""
    datastore = replace(faulty_datastore(kind, clock=FakeClock(), **limits), races_s=0.1)
    DriverContract.checks()[name](DriverContract(), Bench(datastore, quick=True))


@pytest.mark.parametrize("largest", [100, 2_000, 60_000])
def test_a_driver_that_takes_more_than_it_promises_passes(largest: int) -> None:
    run(EXACTLY, CountsNoOverhead, max_entry_bytes=largest, max_record_bytes=200_000)


@pytest.mark.parametrize("name", FULL)
@pytest.mark.parametrize("kind", [CountsNoOverhead, KeepsLargeValuesElsewhere])
def test_no_record_must_be_full_before_its_values_exceed_the_limit(
    name: str, kind: type[FaultyDriver]
) -> None:
    try:
        run(name, kind, max_entry_bytes=2_000, max_record_bytes=200_000)
    except NotAsked as reason:
        assert "do not say how many" in str(reason)  # noqa: PT017 -- of some checks


def test_bytes_are_cut_to_the_largest_entry_of_a_driver() -> None:
    run("test_bytes_are_returned_unchanged", FaultyDriver, max_entry_bytes=100, max_record_bytes=2_000)


def test_a_purge_of_what_others_have_left_is_short() -> None:
    run(PURGE, FindsMuchToPurge)
    assert FindsMuchToPurge.purges < 20


def test_a_purge_may_pass_over_what_another_has_in_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optional, "PATIENCE", 2)
    run(PURGE, PassesOverWhatOthersHold)


def test_a_driver_may_take_a_deadline_until_it_works_after_an_outage() -> None:
    datastore = faulty_datastore(PausesBeforeItConnects, clock=FakeClock(), deadline_s=0.5, **SMALL)
    DriverContract.checks()[OUTAGE](DriverContract(), Bench(datastore, quick=True))


class LogsEachAppend(FaultyDriver):
    """Says for debugging what it does, and nothing of whom."""

    async def append(self, *given: Any, **named: Any) -> int:
        logger.debug("an append of %d bytes", len(given[1]))
        return await super().append(*given, **named)


def test_what_is_logged_for_debugging_is_no_object_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leftovers, "MANY_KEYS", 2_000)
    monkeypatch.setattr(leftovers, "FEWEST_KEYS", 1_000)
    run(MANY, LogsEachAppend)


# What a busy machine does


class RemembersTheLatest(FaultyDriver):
    """Has a cache of entries, which is not full after a few records."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self.latest: dict[Key, list[bytes]] = {}

    async def append(self, key: Key, entry: bytes, **named: Any) -> int:
        self.latest[key] = [entry]
        return await super().append(key, entry, **named)


@pytest.fixture
def too_slow_for_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leftovers, "MANY_KEYS", 200)
    monkeypatch.setattr(leftovers, "FEW_KEYS", 100)


@pytest.mark.usefixtures("too_slow_for_many")
@pytest.mark.parametrize("kind", [FaultyDriver, RemembersTheLatest])
def test_few_records_do_not_show_whether_a_cache_has_a_limit(kind: type[FaultyDriver]) -> None:
    with pytest.raises(NotAsked, match="too slow here: no lock is left behind by 250 records; an entry of"):
        run(MANY, kind)


@pytest.mark.usefixtures("too_slow_for_many")
def test_few_records_show_that_each_keeps_a_lock() -> None:
    with pytest.raises(AssertionError, match=r"each record .* leaves 1\.0 locks or the like behind"):
        run(MANY, KeepsALockForEachRecord)


class TakesItsTime(FaultyDriver):
    """Takes some of a short time to live for each write, as any driver may on a busy machine."""

    opened: ClassVar = 0
    takes_s: ClassVar = 0.03

    async def open(self) -> None:
        TakesItsTime.opened += 1
        await super().open()

    async def lock(self, key: Key, operation: str) -> None:
        await asyncio.sleep(self.takes_s)
        await super().lock(key, operation)


class KeepsForEverInItsTime(KeepIsForEver, TakesItsTime):
    """Is as slow, and wrong."""


class KeepsForEverAtOnce(KeepsForEverInItsTime):
    """Is wrong, and quick."""

    takes_s: ClassVar = 0.0


def of_time(kind: type[Any], tick: float) -> None:
    """Run a check of times to live on a clock that nobody can stop."""
    TakesItsTime.opened = 0
    datastore = replace(faulty_datastore(kind), tick=tick)
    DriverContract.checks()[KEEP](DriverContract(), Bench(datastore, quick=True))


def test_a_check_of_time_is_repeated_with_more_time_where_operations_took_too_long() -> None:
    of_time(TakesItsTime, tick=0.03)
    # A check opens one to check with, and another one to tidy up.
    assert TakesItsTime.opened > 2


def test_a_driver_that_is_slow_and_wrong_is_told_so() -> None:
    with pytest.raises(AssertionError, match="KEEP does not change when the record expires") as caught:
        of_time(KeepsForEverInItsTime, tick=0.03)
    # With the longer tick, it was not the machine.
    assert not any("busy machine" in note for note in caught.value.__notes__)


def test_a_check_of_time_that_fails_on_a_quick_machine_is_not_repeated() -> None:
    with pytest.raises(AssertionError, match="KEEP does not change when the record expires"):
        of_time(KeepsForEverAtOnce, tick=1.0)
    # One more looks at the record with which the check has failed.
    assert TakesItsTime.opened == 3


def test_only_a_time_to_live_of_some_seconds_shows_a_lease_of_whole_ones() -> None:
    clock = FakeClock()
    datastore = replace(faulty_datastore(RenewsNoWholeSeconds, clock=clock), tick=0.1)
    checks, name = DriverContract.checks(), "test_the_same_time_to_live_set_again_begins_anew"
    checks[name](DriverContract(), Bench(datastore))
    with pytest.raises(AssertionError, match="a time to live of 3 s was set again"):
        checks[name.replace("set_again", "of_some_seconds")](DriverContract(), Bench(datastore))


class GivesUpInItsQueue(FaultyDriver):
    """Has no connection for the last of many writes in half of the deadline, and sends them not at all."""

    waiting = 0

    async def lock(self, key: Key, operation: str) -> None:
        self.waiting += 1
        place = self.waiting
        try:
            await asyncio.sleep(0)
            if place > 100:
                await asyncio.sleep(self.traits.deadline * 0.6)
                raise Unavailable("no connection became free", backend=self.name, operation=operation)
        finally:
            self.waiting -= 1


def test_writes_that_give_up_after_half_of_the_deadline_are_not_judged() -> None:
    datastore = faulty_datastore(GivesUpInItsQueue, clock=FakeClock(), deadline_s=0.5)
    DriverContract.checks()[AT_ONCE](DriverContract(), Bench(datastore, quick=True))


class NeverFolds(FaultyDriver):
    """Has no turn for a fold, as on a machine where others are quicker."""

    error = Unavailable

    async def replace(self, *given: Any, **named: Any) -> bool:
        raise self.error("no turn", backend=self.name, operation="replace")


class FoldsUnheard(NeverFolds):
    """Does not hear whether a fold was done."""

    error = OutcomeUnknown


@pytest.mark.parametrize("kind", [NeverFolds, FoldsUnheard])
def test_folds_that_do_not_end_in_time_are_not_judged(
    kind: type[FaultyDriver], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(races, "FOLDING_S", 0.2)
    with pytest.raises(NotAsked, match="needs folds that end in time"):
        run(FOLDS, kind)


class AnswersOnce(NetworkedDriver):
    """Answers a single load in time, whichever connection it has."""

    loads = 0

    async def load(self, key: Key) -> Any:
        self.loads += 1
        if self.loads > 1:
            raise Unavailable("no answer in time", backend=self.name, operation="load")
        return await super().load(key)


def test_dead_connections_are_not_blamed_for_what_new_ones_do_as_well() -> None:
    with pytest.raises(NotAsked, match="needs new connections that answer in time"):
        DriverContract.checks()[DEAD](DriverContract(), Bench(networked_datastore(AnswersOnce), quick=True))
