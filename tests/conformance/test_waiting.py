"""The checks that hold a record up pass drivers whose writes give up, and end what they have begun."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import ClassVar

import pytest

from stm_backends.drivers.contract import ANY, AnyType, Key, Record
from stm_backends.errors import OutcomeUnknown, Unavailable
from stm_backends.testing import Bench, DriverContract, FakeClock
from stm_backends.testing.driver_checks.steps import HELD_S
from stm_backends.testing.workbench.check import NotAsked
from stm_backends.testing.workbench.failures import Met
from stm_backends.testing.workbench.faulty import SMALL, FaultyDriver, faulty_datastore
from tests.support import clock

EXPIRY = "test_a_write_that_had_to_wait_does_not_bring_back_what_has_expired"
ONE_WINS = "test_of_writers_that_wait_for_a_record_exactly_one_wins"
ORDER = "test_no_entry_appears_before_one_that_a_load_has_seen"
DEADLINE = "test_a_write_that_waits_past_its_deadline_raises_and_is_not_done_later"
CANCELLED = "test_cancelling_a_write_that_waits_leaves_the_others_waiting"
LONG = "test_an_append_that_waits_long_for_a_lock_is_stored_once"
CLOSING = "test_closing_ends_each_running_operation_with_a_result_or_an_error"


class HasAShortQueue(FaultyDriver):
    """Has room for one write that waits, and refuses others at once."""

    room: ClassVar = 1
    _waiting = 0

    async def lock(self, key: Key, operation: str) -> None:
        if key in self.store.held and self._waiting == self.room:
            raise Unavailable("the queue is full", backend=self.name, operation=operation)
        self._waiting += 1
        try:
            await super().lock(key, operation)
        finally:
            self._waiting -= 1


class NeverWaits(HasAShortQueue):
    """Refuses each write to a record that is locked."""

    room: ClassVar = 0


class EndsWhatWasCancelledLater(FaultyDriver):
    """Ends a cancelled write only when its wait has ended, as a driver on a thread may."""

    async def lock(self, key: Key, operation: str) -> None:
        wait = asyncio.ensure_future(self.wait(key, operation))
        try:
            await asyncio.shield(wait)
        except asyncio.CancelledError:
            await asyncio.wait((wait,))
            wait.exception()
            raise

    async def wait(self, key: Key, operation: str) -> None:
        await super().lock(key, operation)


class WaitsForAMoment(EndsWhatWasCancelledLater):
    """Waits about as long as the check does: the first writes a little longer, others not as long."""

    waits: ClassVar[list[float]] = []

    async def wait(self, key: Key, operation: str) -> None:
        if key in self.store.held:
            self.waits.append(HELD_S * (1.02 if len(self.waits) < 6 else 0.8))
        try:
            async with asyncio.timeout(self.waits[-1] if key in self.store.held else None):
                await super().wait(key, operation)
        except TimeoutError:
            raise Unavailable("the record is locked", backend=self.name, operation=operation) from None


class DeletesLater(FaultyDriver):
    """Does not know at its deadline whether a delete was done; it is done a little after the lock is free."""

    _late: asyncio.Future[None] | None = None

    async def delete(self, key: Key, *, expect: str | AnyType = ANY) -> bool:
        held = self.store.held.get(key)
        try:
            return await super().delete(key, expect=expect)
        except Unavailable:
            if held is None:
                raise
            self._late = asyncio.ensure_future(self._after(held, key))
            raise OutcomeUnknown("no answer", backend=self.name, operation="delete") from None

    async def _after(self, held: asyncio.Event, key: Key) -> None:
        await held.wait()
        await asyncio.sleep(0.05)
        await super().delete(key)


class LoadsWaitToo(FaultyDriver):
    """Has one lock for readers and writers, as a transaction for each operation may."""

    async def load(self, key: Key) -> Record | None:
        await self.lock(key, "load")
        return await super().load(key)


class NeverEnds(FaultyDriver):
    """Never ends a write that had to wait, nor the close that meets it; notes when the close ends."""

    noted: ClassVar[list[str]] = []

    async def lock(self, key: Key, operation: str) -> None:
        if key in self.store.held:
            await asyncio.Event().wait()

    async def close(self) -> None:
        if self.store.held:
            try:
                await asyncio.Event().wait()
            finally:
                self.noted.append("the close was ended")
        await super().close()
        self.noted.append("closed")


@pytest.fixture
def virtual(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run checks in virtual time: what they wait for takes none."""
    monkeypatch.setattr(asyncio, "run", clock.run)


def run(check: str, kind: type[FaultyDriver], *, deadline_s: float = 1.0) -> None:
    """Run a check in its quick form, with few races."""
    datastore = faulty_datastore(kind, clock=FakeClock(), deadline_s=deadline_s, **SMALL)
    DriverContract.checks()[check](DriverContract(), Bench(replace(datastore, races_s=0.1), quick=True))


# Not in virtual time, which does not advance while a check keeps loading.
@pytest.mark.parametrize("check", [ONE_WINS, ORDER])
@pytest.mark.parametrize("kind", [HasAShortQueue, NeverWaits])
def test_a_driver_that_lets_few_wait_passes_the_races(check: str, kind: type[FaultyDriver]) -> None:
    run(check, kind)


@pytest.mark.usefixtures("virtual")
@pytest.mark.parametrize("check", [DEADLINE, CANCELLED, CLOSING, EXPIRY])
def test_a_driver_with_a_short_queue_is_not_rejected(check: str) -> None:
    run(check, HasAShortQueue)


@pytest.mark.usefixtures("virtual")
@pytest.mark.parametrize("check", [DEADLINE, CLOSING])
def test_a_driver_that_refuses_to_wait_is_not_rejected(check: str) -> None:
    run(check, NeverWaits)


@pytest.mark.usefixtures("virtual")
def test_a_driver_that_gives_up_as_the_check_looks_is_not_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WaitsForAMoment, "waits", [])
    with pytest.raises(NotAsked, match="gave up by themselves"):
        run(CANCELLED, WaitsForAMoment)


@pytest.mark.usefixtures("virtual")
@pytest.mark.parametrize("check", [EXPIRY, CANCELLED])
def test_a_check_of_waiting_writes_is_not_asked_where_none_waits(check: str) -> None:
    with pytest.raises(NotAsked, match="needs writes that wait"):
        run(check, NeverWaits)


@pytest.mark.usefixtures("virtual")
@pytest.mark.parametrize("check", [EXPIRY, CANCELLED])
def test_a_check_is_not_asked_where_the_deadline_passes_first(check: str) -> None:
    with pytest.raises(NotAsked, match="needs writes that wait"):
        run(check, FaultyDriver, deadline_s=0.05)


@pytest.mark.usefixtures("virtual")
def test_a_wait_for_what_was_cancelled_may_outlast_the_others_deadline() -> None:
    with pytest.raises(NotAsked, match="gave up by themselves"):
        run(CANCELLED, EndsWhatWasCancelledLater)


@pytest.mark.usefixtures("virtual")
def test_a_delete_of_unknown_outcome_may_be_the_last_to_be_done() -> None:
    run(DEADLINE, DeletesLater)


@pytest.mark.usefixtures("virtual")
@pytest.mark.parametrize("check", [DEADLINE, CANCELLED, CLOSING, EXPIRY, LONG])
def test_a_lock_that_stops_loads_too_is_told_as_a_mistake_of_the_means(check: str) -> None:
    with pytest.raises(AssertionError, match=r"`Datastore\.hold`, which also stops loads; leave") as caught:
        run(check, LoadsWaitToo)
    assert isinstance(caught.value, Met)
    assert not any("Usual cause: " in note for note in caught.value.__notes__)


@pytest.mark.usefixtures("virtual")
def test_a_close_that_hangs_is_ended_before_the_driver_is_closed_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(NeverEnds, "noted", [])
    with pytest.raises(AssertionError, match="nothing holds the record any more"):
        run(CLOSING, NeverEnds)
    assert "the close was ended" in NeverEnds.noted
    ended = NeverEnds.noted.index("the close was ended")
    assert NeverEnds.noted[ended + 1 :].count("closed") >= 2
