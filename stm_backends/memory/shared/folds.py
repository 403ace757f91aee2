"""The writes of a conversation's background: folds under a lease, trims, compactions and recoveries.

Each is one conditional `replace`. A fold is two: the first takes the lease, and the second stores the
summary, drops the turns that it covers, and releases the lease. Where a load may show what is not confirmed,
a write that drops entries stores the body under a new version before, and loads again; see decision 0037.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, NamedTuple, TypeAlias

from stm_backends import races
from stm_backends.cutting import cut_summary
from stm_backends.drivers.contract import ABSENT
from stm_backends.errors import StorageError, TooLarge, Unavailable
from stm_backends.handed_in import WrongType
from stm_backends.memory import log, policy
from stm_backends.memory.policy import Fold, Gap, Trim
from stm_backends.memory.schedule import Plan, PlannedWork, Schedule, now
from stm_backends.memory.shared import due
from stm_backends.memory.shared.activity import look_at
from stm_backends.memory.shared.due import Compact, Move
from stm_backends.memory.shared.record import SharedConversation
from stm_backends.memory.shared.room import Room
from stm_backends.memory.shared.snapshot import Snapshot
from stm_backends.memory.speech import as_turns, whole_turns
from stm_backends.messages import Shape
from stm_backends.records import confirming, ledger, pages
from stm_backends.records.body import Body, Lease, Overdue
from stm_backends.telemetry.observer import Observer
from stm_backends.types import MemoryHealth, ShortTermMemoryConfig

logger = logging.getLogger("stm_backends")

AGAIN: Final = Plan(0.0, look=False)
"""The plan to check at once what is due next."""

LOST: Final = Plan(0.0)
"""The plan to look again after a lost race, with a pause after several in a row."""


GIVEN: Final = 3
WRITER: Final = 2
"""Precedence among the settings of one conversation; see `Writes.use`."""


@dataclass(slots=True)
class Stats:
    """Counters of completed work. `lost_races` counts summaries and failures that lost a race."""

    appended: int = 0
    summaries: int = 0
    folded: int = 0
    trimmed: int = 0
    dropped: int = 0
    lost_races: int = 0
    summarizer_calls: int = 0
    summarizer_failures: int = 0

    def since(self, before: Stats) -> Stats:
        """Return the counts since `before`."""
        return Stats(**{name: getattr(self, name) - getattr(before, name) for name in self.__match_args__})


class Writes(PlannedWork):
    """The writes of the background to a record. Each method returns the next plan, or `None`.

    A method is called with a snapshot whose body has no lease: there was none, or it has ended. A lease that
    another process takes meanwhile stays. `hopeless` is true if the summarizer's last answer was of the wrong
    type, so that a retry is unlikely to help. `noting` is `Touches.note` for this conversation, if it is in
    the catalogue, and `forgetting` removes content that an edit has deleted from lists and searches.
    `telling` notes for a worker that there is work, and `elsewhere` is true if summaries are left to workers.
    `shape` is the format of its messages, if one was given.
    """

    def __init__(
        self, shared: SharedConversation, tenant: str, schedule: Schedule, observer: Observer
    ) -> None:
        super().__init__(tenant, schedule, observer.function_failed)
        self.shared = shared
        self.config = ShortTermMemoryConfig()
        self.stats = Stats()
        self.room = Room()
        self.hopeless = False
        self._observer = observer
        self._summarizer: Callable[..., object] = policy.summarizer_for(self.config, None)
        self.keep_ids_for = 10 * shared.driver.traits.deadline
        self._unstored: _Failure | None = None
        self._unnoted: Lease | None = None
        self._unmarked: str | None = None
        self.noting: Callable[..., None] | None = None
        self.forgetting: Callable[..., Awaitable[None]] | None = None
        self.telling: Callable[[ShortTermMemoryConfig, bool], Awaitable[None]] | None = None
        self.elsewhere = False
        self.shape: Shape | None = None
        self._given = 0

    def start_over(self) -> None:
        """Reset: plans and work of an event loop that has ended are forgotten."""
        super().start_over()
        self._answered: asyncio.Future[None] | None = None
        self._mover: asyncio.Task[None] | None = None

    def use(
        self,
        config: ShortTermMemoryConfig,
        summarizer: Callable[..., object],
        *,
        given: int,
        elsewhere: bool = False,
    ) -> None:
        """Use these settings from now on, unless they store nothing; the newest memory object wins.

        Defaults never replace what was given: `given` is `GIVEN` for a configuration, `WRITER` for a
        summarizer without one, and less for neither: 1 for a conversation of messages, and 0 for a memory.
        """
        if config.strategy != "none" and given >= self._given:
            self._given = given
            self.shared.archive.ttl = config.record_ttl_s
            self.hopeless = self.hopeless and summarizer is self._summarizer
            self.config, self._summarizer = config, summarizer
            self.elsewhere = elsewhere

    def touch(self, at: float | None = None, *, begins: bool = False, reset: bool = False) -> None:
        """Note an activity in the catalogue, by default now; see `Touches.note`."""
        if self.noting is not None:
            look = partial(look_at, self.shared)
            self.noting(look, ttl=self.config.record_ttl_s, at=at, begins=begins, reset=reset)

    @property
    def lease_s(self) -> float:
        """The duration of this process's leases in seconds; see `policy.lease_s`."""
        return policy.lease_s(self.config, self.shared.driver.traits.deadline)

    async def trim(self, snapshot: Snapshot, trim: Trim) -> Plan | None:
        """Drop the oldest turns."""
        gone = snapshot.turns[: trim.count]
        drop, full = snapshot.entries_of(len(gone)), self.room.needed > 0
        confirmed = await self.confirmed(snapshot, drop)
        if confirmed is None:
            return LOST
        # Not before: a transcript that begins with this write has the version that was confirmed.
        body = policy.after_trim(
            confirmed.body,
            trim,
            gone,
            now=self.shared.clock(),
            keep_for=self.keep_ids_for,
            copies=confirmed.copies(drop),
            replaced=confirmed.replaced(drop, len(gone)),
        )
        body = confirmed.told(self.shared.archive.within_limit(body), len(gone))
        if not await self.shared.replace(confirmed, body, drop=drop):
            return LOST
        self.room.made()
        self.stats.trimmed += len(gone)
        if trim.lost and body.transcript is not None:
            self._observer.turns("moved", len(gone))
            log.moved(self.shared.log_name, len(gone))
        elif trim.lost:
            self.stats.dropped += len(gone)
            self._observer.turns("dropped", len(gone))
            (log.dropped_for_room if full else log.dropped)(self.shared.log_name, len(gone))
        elif confirmed.body.transcript is not None and confirmed.body.transcript.waiting:
            # A strategy without summaries: nothing waits for one any more.
            self._observer.turns("caught_up", confirmed.body.transcript.waiting)
        return AGAIN if trim.lost else None

    async def compact(self, snapshot: Snapshot, compact: Compact) -> Plan:
        """Drop the oldest entries, which are repeats."""
        drop = compact.entries
        confirmed = await self.confirmed(snapshot, drop)
        if confirmed is None:
            return LOST
        forgotten = confirmed.body.forgotten.adding(
            confirmed.replaced(drop),
            now=self.shared.clock(),
            keep_for=self.keep_ids_for,
            copies=confirmed.copies(drop),
        )
        body = replace(confirmed.body, forgotten=forgotten)
        if not await self.shared.replace(confirmed, body, drop=drop):
            return LOST
        self.room.made()
        return AGAIN

    async def note_overdue(self, snapshot: Snapshot) -> None:
        """Note for processes that start later that the lease of another has ended by the clock of this one.

        If that was wrong, the other loses a race, and stores its summary under the new version.
        """
        lease = snapshot.body.lease
        if lease is not None:
            body = replace(snapshot.body, overdue=Overdue(lease.at, self.shared.clock()))
            try:
                await self.shared.replace(snapshot, body, drop=0)
            except TooLarge:
                # A full record stays full until the lease has ended, so the note is not sent again.
                self._unnoted = lease

    async def mend(self, snapshot: Snapshot) -> Plan | None:
        """Apply an edit to the units in pages, and remove their former content."""
        transcript = snapshot.body.transcript
        if transcript is None or not transcript.patches:
            return None
        put = await self.shared.archive.mend(transcript)
        if self.forgetting is not None:
            await self.forgetting(ttl=self.config.record_ttl_s)
        body = replace(snapshot.body, transcript=replace(transcript, patches=()))
        if not await self.shared.replace(snapshot, body, drop=0):
            return LOST
        self.shared.archive.settled(put)
        return AGAIN

    async def mended(self, operation: str) -> Snapshot:
        """Load the conversation, after earlier edits have been finished."""

        async def mended() -> Snapshot | races.Lost:
            found = await self._load(operation)
            return found if await self.mend(found) is None else races.Lost(found.version)

        found = await races.contend(mended)
        if found is None:
            raise Unavailable(
                "the conversation changed each time that it was read",
                backend=self.shared.driver.name,
                operation=operation,
            )
        return found

    async def mark(self, snapshot: Snapshot) -> Plan:
        """Store the transcript that this process would begin; a full record is marked once it has room."""
        try:
            return AGAIN if await self.shared.replace(snapshot, snapshot.body, drop=0) else LOST
        except TooLarge:
            self._unmarked = snapshot.version
            return AGAIN

    async def recover(self, snapshot: Snapshot) -> Plan | None:
        """Become healthy without a summarizer call."""
        body = policy.after_recovery(snapshot.body)
        if not await self.shared.replace(snapshot, body, drop=0):
            return LOST
        log.recovered(self.shared.log_name)
        self._health_changed(snapshot.body.health, body.health)
        return None

    async def catch_up(self, snapshot: Snapshot, gap: Gap) -> Plan | None:
        """Summarize turns that left the record without a summary: they are older than those in the tail."""
        transcript = snapshot.body.transcript
        if transcript is None:
            return LOST
        # A turn of many messages may end later.
        most = min(gap.end + pages.TURNS, transcript.base) if snapshot.body.messages else gap.end
        found = await self.shared.archive.read_confirmed(transcript, gap.first, most)
        turns, portion = [*found.values()], sum(number < gap.end for number in found)
        count = len(policy.oldest_for_fold(self.config, snapshot.body, turns[:portion]))
        if snapshot.body.messages:
            count = whole_turns(turns, count, ends=most == transcript.base)
        if count:
            end = [*found, most][count]
            fold = Fold(snapshot.body.summary, tuple(turns[:count]), Gap(gap.first, end), archived=count)
            return await self.fold(snapshot, fold)
        if not await self.shared.replace(snapshot, policy.after_hole(snapshot.body, gap), drop=0):
            return LOST
        self._caught_up(gap, 0)
        return AGAIN

    def _caught_up(self, gap: Gap, summarized: int) -> None:
        """Report that turns no longer wait in pages, and how many of them were there for the summary."""
        count = gap.end - gap.first
        self._observer.turns("caught_up", count)
        if summarized < count:
            self._observer.turns("dropped", count - summarized)
            log.hole(self.shared.log_name, count - summarized, *gap)

    async def fold(self, snapshot: Snapshot, fold: Fold) -> Plan | None:
        """Summarize turns under a lease and store the summary; or store that this attempt failed."""
        if self._unstored is not None and await self._is_on(snapshot, self._unstored):
            return await self._store_failure(self._unstored, snapshot)
        self._unstored = None
        try:
            leased = await self._take_lease(snapshot, drop=_entries_of(fold, snapshot))
            return LOST if leased is None else await self._fold_leased(leased, fold)
        finally:
            await self.shared.release()
            if self.shared.recovering:
                # The conversation was replaced or erased.
                self.shared.recovering = False
                self._health_changed(MemoryHealth.RECOVERING, self.shared.health)

    async def _take_lease(self, snapshot: Snapshot, *, drop: int) -> Snapshot | None:
        """Return the snapshot under the version of the lease, or `None` if the record has changed.

        A full record may have no room for a lease; its fold makes room, and is made without one.
        """
        shared = self.shared
        body = replace(snapshot.body, lease=Lease(shared.clock(), self.lease_s))
        attempts = confirming.attempts_to_confirm(shared.driver)
        try:
            await shared.replace(snapshot, body, drop=0, attempts=attempts)
        except TooLarge:
            shared.leased = None
            return await self.confirmed(snapshot, drop)
        if shared.leased is None:
            return None
        version = shared.leased.version
        there = await confirming.still_there(shared.driver, snapshot, drop, version, load=self._load)
        return replace(snapshot, version=version) if there else None

    async def confirmed(self, snapshot: Snapshot, drop: int) -> Snapshot | None:
        """Return the snapshot once its oldest `drop` entries are confirmed, see `confirming.confirmed`.

        `None` if the record has changed.
        """
        shared = self.shared

        async def store(version: str) -> bool:
            return await shared.replace(snapshot, snapshot.body, drop=0, version=version, attempts=1)

        # A transcript that begins with this write is not stored yet.
        stored, is_smaller = snapshot.untranscribed(), False

        async def store_least(version: str) -> bool:
            nonlocal is_smaller
            is_smaller = True
            body = b"" if stored.body == Body() else shared.codec.seal_body(stored.body)
            change = ledger.Change(body, version=version)
            return await ledger.replace(
                shared.driver, shared.key, change, expect=snapshot.version or ABSENT, attempts=1
            )

        version = await confirming.confirmed(
            shared.driver, snapshot, drop, store=store, store_least=store_least, load=self._load
        )
        if version is None:
            return None
        if is_smaller and stored is not snapshot:
            return replace(stored, version=version).transcribed()
        return replace(snapshot, version=version)

    async def _load(self, operation: str = "background") -> Snapshot:
        snapshot = await self.shared.load(operation)
        await self.shared.archive.tidy(snapshot, lambda: self.shared.load(operation))
        return snapshot

    def ready(self, snapshot: Snapshot) -> Snapshot:
        """Return a snapshot for a write: with a transcript, if the turns that leave the record are kept.

        Once one process keeps them, every process does.
        """
        return snapshot.transcribed() if self.config.transcript else snapshot

    async def _fold_leased(self, snapshot: Snapshot, fold: Fold) -> Plan | None:
        if snapshot.body.health is MemoryHealth.DEGRADED:
            self.shared.recovering = True
            self._health_changed(MemoryHealth.DEGRADED, MemoryHealth.RECOVERING)
        drop = _entries_of(fold, snapshot)
        try:
            async with self._moves():
                told = await self._summarize(fold, snapshot.body.title)
            body, data = self._body_after(snapshot, fold, told, drop)
        except Exception as error:  # noqa: BLE001 -- any error of a user's summarizer is one failed attempt
            self.stats.summarizer_failures += 1
            self._observer.summarizer_failed(error)
            failure = _Failure(snapshot, fold, error)
            return await self._store_failure(failure, None if self._moved else snapshot)
        found: tuple[Snapshot, Fold, int, Body, bytes] | None = (snapshot, fold, drop, body, data)
        found = None if self._moved else found

        async def stored() -> Plan | races.Lost:
            nonlocal found
            if found is None:
                again = await self._load_unleased()
                # The summary is stored under the new version while it applies.
                applies = await self._as_it_applies(fold, snapshot, again)
                if applies is None:
                    return AGAIN
                found = (again, *applies, *self._body_after(again, applies[0], told, applies[1]))
            (before, applied, going, body, data), found = found, None
            if not await self._replace(before, body, drop=going, data=data):
                return races.Lost(before.version)
            self._stored(before.body, body, applied)
            return AGAIN

        return await races.contend(stored) or LOST

    async def _as_it_applies(self, fold: Fold, leased: Snapshot, again: Snapshot) -> tuple[Fold, int] | None:
        """Return the fold for the present record, and the number of entries it drops; `None` if it is void.

        Its turns are where they were under the lease, or have moved to pages in the meantime.
        """
        head = leased.tail[: _entries_of(fold, leased)]
        began, transcript = leased.transcribed().body.transcript, again.body.transcript
        if began is not None and transcript is not None:
            if (began.epoch, began.rev) != (transcript.epoch, transcript.rev):
                return None
            fold = fold.after_moves(began.base, transcript.base)
        if not fold.still_applies(again.body, again.turns):
            return None
        if fold.gap is not None and transcript is not None:
            found = await self.shared.archive.read_confirmed(transcript, *fold.gap)
            if [stored.id for stored in found.values()] != [one.id for one in fold.turns[: fold.archived]]:
                return None
        # Only the entries that were there under the lease go: repeats that came since may not be confirmed,
        # see `still_there`.
        going = head[leased.entries_of(fold.archived) if fold.archived else 0 :]
        return (fold, len(going)) if again.tail[: len(going)] == going else None

    # Turns that cannot wait for a summary

    def next_move(self, snapshot: Snapshot) -> Move | None:
        """Return the move of turns to pages that does not wait for a summary."""
        return due.next_move(self.config, snapshot, traits=self.shared.driver.traits, room=self.room.needed)

    @property
    def keeps_transcript(self) -> bool:
        """True if turns that leave the record are kept, as far as this process knows."""
        return self.config.transcript or self.shared.seen.body.transcript is not None

    def hurry(self) -> None:
        """Have turns moved to pages now if a fold of this process waits for its summary."""
        if self._answered is not None and (self._mover is None or self._mover.done()):
            self._mover = self.background.start(self._move_until(self._answered), name="stm-move")

    @property
    def _moved(self) -> bool:
        """Turns may have moved to pages while this process last waited for a summary."""
        return self._mover is not None

    @contextlib.asynccontextmanager
    async def _moves(self) -> AsyncGenerator[None]:
        """Have surplus turns moved to pages while the context waits for a summary."""
        answered = asyncio.get_running_loop().create_future()
        self._answered, self._mover = answered, None
        try:
            yield
        finally:
            self._answered = None
            answered.set_result(None)
            if self._mover is not None:
                # One write at a time: what it has begun is done before the summary is stored.
                await asyncio.wait({self._mover})

    async def _move_until(self, answered: asyncio.Future[None]) -> None:
        """Move turns to pages while they are too many and a summary is awaited."""
        in_vain = 0
        while not answered.done():
            try:
                snapshot = self.ready(self.shared.seen if self.shared.current else await self._load())
                move = self.next_move(snapshot)
                if move is None:
                    return
                lost = await self.trim(snapshot, Trim(move.count, lost=True)) is LOST
            except StorageError as error:
                logger.warning(
                    "could not move turns to pages: %s (conversation %s)", error, self.shared.log_name
                )
                lost = True
            self._notify()
            in_vain = in_vain + 1 if lost else 0
            if in_vain:
                await asyncio.wait({answered}, timeout=races.pause(0.05, in_vain))

    async def _summarize(self, fold: Fold, title: str) -> _Told:
        if all(stored.removed for stored in fold.turns):
            return _Told(fold.previous_summary, title)
        self.stats.summarizer_calls += 1
        with self._observer.call("summarize"):
            answer = await self.background.call_within(
                self.config.summarizer_timeout_s,
                self._summarizer,
                replace(fold, turns=tuple(as_turns(fold.turns, self.shape))).request(self.config)
                | ({"title": title} if title else {}),
            )
            return _Told(policy.summary_of(answer), policy.title_of(answer) or title)

    def _body_after(self, snapshot: Snapshot, fold: Fold, told: _Told, drop: int) -> tuple[Body, bytes]:
        """Return the body with this summary, cut to the limit of the datastore if needed, and its bytes."""
        gone = len(fold.turns) - fold.archived
        body = policy.after_fold(
            self.config,
            snapshot.body,
            fold,
            told.summary,
            now=self.shared.clock(),
            keep_for=self.keep_ids_for,
            copies=snapshot.copies(drop),
            replaced=snapshot.replaced(drop, gone),
        )
        body = snapshot.told(self.shared.archive.within_limit(body), gone)
        body = replace(body, title=told.title)
        most, seal = self.shared.driver.traits.max_entry, self.shared.codec.seal_body
        data = seal(body)
        if len(data) > most:
            kept = cut_summary(body.summary, lambda text: len(seal(replace(body, summary=text))) <= most)
            if not kept:
                raise policy.BadSummary("no summary fits into the largest entry of this datastore")
            body = replace(body, summary=kept)
            data = seal(body)
        return body, data

    def _stored(self, before: Body, body: Body, fold: Fold) -> None:
        """Report a summary that was stored."""
        self.stats.summaries += 1
        self.stats.folded += len(fold.turns)
        self.hopeless = False
        self._observer.turns("folded", len(fold.turns))
        if fold.gap is not None:
            self._caught_up(fold.gap, fold.archived)
        # At the time of the newest turn, whose own process may have died before it noted that.
        self.touch(at=0.0)
        if before.health is not MemoryHealth.HEALTHY:
            log.recovered(self.shared.log_name)
        self.background.call_back(self.config.on_summary_updated, before.summary, body.summary)
        self._attempt_ended(before, body)

    async def _is_on(self, snapshot: Snapshot, failure: _Failure) -> bool:
        """Say whether a failed attempt is the last one on a conversation, and not on an earlier life."""
        leased, fold, _ = failure
        return (
            attempt_of(snapshot.body) == attempt_of(leased.body)
            and await self._as_it_applies(fold, leased, snapshot) is not None
        )

    async def _store_failure(self, failure: _Failure, found: Snapshot | None) -> Plan | None:
        """Store a failed attempt, retrying lost races unless another process has stored a newer attempt.

        `found` is the conversation if it is known to be the one that was attempted. Until the failure is
        stored, this process makes no further attempt.
        """
        self._unstored, error = failure, failure.error
        self.hopeless = isinstance(error, WrongType)
        snapshot = failure.leased

        async def stored() -> Body | Plan | races.Lost:
            nonlocal snapshot, found
            if found is None:
                found = await self._load_unleased()
                if not await self._is_on(found, failure):
                    return AGAIN
            snapshot, found = found, None
            body = policy.after_failure(self.config, snapshot.body, now=self.shared.clock())
            return body if await self._replace(snapshot, body, drop=0) else races.Lost(snapshot.version)

        body = await races.contend(stored)
        if body is None:
            return Plan(now() + policy.delay_after(self.config, snapshot.body.attempts + 1))
        self._unstored = None
        if isinstance(body, Plan):
            return body
        if body.health is MemoryHealth.RETRY:
            log.retrying(self.shared.log_name, body.attempts, error)
        elif snapshot.body.health is not MemoryHealth.DEGRADED:
            log.degraded(self.shared.log_name, error)
        self._attempt_ended(snapshot.body, body)
        return AGAIN

    async def _load_unleased(self) -> Snapshot:
        """Return the conversation after a lost race, without the lease of this process."""
        snapshot = self.ready(await self._load())
        return snapshot.unleased() if self.shared.holds(snapshot.body.lease) else snapshot

    async def _replace(self, snapshot: Snapshot, body: Body, *, drop: int, data: bytes = b"") -> bool:
        done = await self.shared.replace(snapshot, body, drop=drop, data=data)
        if not done:
            self.stats.lost_races += 1
            self._observer.race_lost()
        elif drop:
            self.room.made()
        return done

    def _attempt_ended(self, before: Body, after: Body) -> None:
        shown = MemoryHealth.RECOVERING if self.shared.recovering else before.health
        self.shared.recovering = False
        self._health_changed(shown, after.health)

    def _health_changed(self, old: MemoryHealth, new: MemoryHealth) -> None:
        if old is not new:
            self._observer.health_changed(old, new)
            self.background.call_back(self.config.on_health_changed, old, new)


def _entries_of(fold: Fold, snapshot: Snapshot) -> int:
    """Return the number of entries of the record that a fold drops."""
    return 0 if fold.gap else snapshot.entries_of(len(fold.turns))


Attempt: TypeAlias = tuple[str, int, float]


class _Told(NamedTuple):
    """The result of a summarizer: the summary and, if it gave one, the title."""

    summary: str
    title: str


class _Failure(NamedTuple):
    """A failed attempt: the conversation under its lease, the fold, and the error."""

    leased: Snapshot
    fold: Fold
    error: Exception


def attempt_of(body: Body) -> Attempt:
    """Return the identity of one summarizer call, made or planned."""
    return body.summary, body.attempts, body.next_attempt_at
