"""The whole conversation, in pages of numbered turns: those that have left the record, and its tail.

The record is loaded first. All turns below its `base` are in pages by then and stay there, so turns that
leave it meanwhile change nothing: one load decides what is read from where.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple

from stm_backends.drivers.checks import require_integer
from stm_backends.errors import MessageNotFound
from stm_backends.memory.shared.record import SharedConversation
from stm_backends.memory.shared.snapshot import Snapshot
from stm_backends.memory.units import read_units
from stm_backends.records.body import Transcript
from stm_backends.records.pages import TURNS, each_after, numbers_asked_for, require_one_place
from stm_backends.types import ConversationTurn, StoredTurn

_AT_ONCE: Final = 8 * TURNS
"""Number of turns that `read_all` reads at a time, from pages that are loaded together."""


@dataclass(frozen=True, slots=True)
class TranscriptTurn:
    """One turn of a whole conversation. `number` counts from 0 and never changes; `turn.ts` is its time.

    `summarized` is true if the summary covers it, and `retained` if it is still in the record.
    """

    number: int
    id: str
    turn: ConversationTurn
    summarized: bool
    retained: bool


@dataclass(frozen=True, slots=True)
class TranscriptPage:
    """Turns of one conversation as of one moment, oldest first.

    `oldest` and `newest` are the numbers of the oldest and the newest turn of the conversation; without
    turns, `newest` is less than `oldest`. Pages expire without a trace in the record: until a page that
    reaches expired turns is requested, `oldest` still counts these. `missing` has the requested numbers
    without a turn, between others that have one.
    """

    turns: tuple[TranscriptTurn, ...]
    oldest: int
    newest: int
    missing: tuple[int, ...] = ()


class Numbered(NamedTuple):
    """A turn or a message with its number; see `TranscriptTurn`."""

    number: int
    stored: StoredTurn
    summarized: bool
    retained: bool


class UnitsPage(NamedTuple):
    """A `TranscriptPage` of turns and messages, and the record that it is of."""

    units: tuple[Numbered, ...]
    oldest: int
    newest: int
    missing: tuple[int, ...]
    snapshot: Snapshot


async def read_page(
    shared: SharedConversation, *, before: int | None, after: int | None, at: int | None, limit: int
) -> TranscriptPage:
    """Return up to `limit` turns before a number, after one or around one; by default the newest ones."""
    page = await read_units_page(shared, before=before, after=after, at=at, limit=limit)
    turns = tuple(_turn(one) for one in page.units if not one.stored.removed)
    return TranscriptPage(turns, page.oldest, page.newest, page.missing)


def _turn(one: Numbered) -> TranscriptTurn:
    return TranscriptTurn(one.number, one.stored.id, one.stored.turn, one.summarized, one.retained)


def require_revision(revision: int | None) -> None:
    """Raise `ConfigurationError` for an invalid revision."""
    if revision is not None:
        require_integer("revision", revision, least=0)


async def read_units_page(
    shared: SharedConversation,
    *,
    before: int | None,
    after: int | None,
    at: int | None,
    limit: int,
    revision: int | None = None,
) -> UnitsPage:
    """Return the same for turns and messages, optionally as they were when an edit ended a `revision`."""
    require_one_place(before, after, at, limit)
    require_revision(revision)
    snapshot, stored = await _load(shared), 0
    while True:
        oldest, end = bounds_of(snapshot, revision)
        oldest = max(oldest, stored)
        start, stop = numbers_asked_for(oldest, end, before=before, after=after, at=at, limit=limit)
        found = await _read(shared, snapshot, oldest, start, stop, end, revision)
        if not found.missing:
            return found
        again = await _load(shared)
        if _place_of(again) != _place_of(snapshot):
            # Erased, shortened or edited while it was read.
            snapshot, stored = again, 0
            continue
        if found.missing[0] > start:
            return found
        stored = await _oldest_stored(shared, snapshot)
        if stored <= start:
            return found


async def read_all(shared: SharedConversation, *, after: int | None) -> AsyncGenerator[TranscriptTurn]:
    """Yield all turns after a number, oldest first; all of the conversation for `None`."""
    async for one in read_all_units(shared, after=after):
        if not one.stored.removed:
            yield _turn(one)


def read_all_units(
    shared: SharedConversation, *, after: int | None, revision: int | None = None
) -> AsyncGenerator[Numbered]:
    """Yield the same for turns and messages, all as of the revision of the first ones."""
    seen = revision

    async def read(after: int) -> tuple[UnitsPage, Sequence[Numbered]]:
        nonlocal seen
        read_some = partial(read_units_page, shared, before=None, after=after, at=None, limit=_AT_ONCE)
        try:
            page = await read_some(revision=seen)
        except MessageNotFound:
            if revision is not None:
                raise
            # Another conversation has taken its place, or an edit that takes nothing out of the view.
            page, seen = await read_some(), None
        transcript = page.snapshot.body.transcript
        seen = transcript.rev if seen is None and transcript is not None else seen
        return page, page.units

    return each_after(after, read)


async def _load(shared: SharedConversation) -> Snapshot:
    """Return the conversation, whose turns have the numbers that a transcript would give them."""
    return (await shared.load_copy("transcript")).transcribed()


def bounds_of(snapshot: Snapshot, revision: int | None = None) -> tuple[int, int]:
    """Return the number of the oldest turn of a conversation, and that after the newest.

    Raises `MessageNotFound` if the revision is neither the present one nor one that an edit ended.
    """
    transcript = snapshot.body.transcript or Transcript("")
    if revision is not None and revision != transcript.rev:
        branch = transcript.branch(revision)
        if branch is None:
            raise MessageNotFound("no edit has removed anything from the view at this revision")
        return transcript.first, branch.end
    return transcript.first, transcript.base + len(snapshot.turns)


def _parts(
    transcript: Transcript, revision: int | None, start: int, stop: int
) -> Iterator[tuple[Transcript, int, int]]:
    """Yield the transcripts under which pages have the numbers from `start` to `stop - 1`, newest first.

    Units before a branch are on later branches, or still in view.
    """
    for branch in transcript.branches:
        if revision is not None and branch.rev >= revision and branch.first < stop:
            yield transcript.as_of(branch), max(start, branch.first), stop
            stop = branch.first
    yield transcript, start, stop


def _place_of(snapshot: Snapshot) -> tuple[str, int, int] | None:
    transcript = snapshot.body.transcript
    return None if transcript is None else (transcript.epoch, transcript.first, transcript.rev)


async def _oldest_stored(shared: SharedConversation, snapshot: Snapshot) -> int:
    """Return the number from which on turns are stored: pages before it have expired."""
    transcript = snapshot.body.transcript
    return 0 if transcript is None else await shared.archive.pages.oldest(shared.key, transcript)


async def _read(
    shared: SharedConversation,
    snapshot: Snapshot,
    oldest: int,
    start: int,
    stop: int,
    end: int,
    revision: int | None,
) -> UnitsPage:
    """Return the units with the numbers from `start` to `stop - 1`, of which some may be missing."""
    transcript = snapshot.body.transcript or Transcript("")
    base, store = transcript.base, shared.archive.pages
    *branches, (_, low, high) = _parts(transcript, revision, start, stop)
    found: dict[int, StoredTurn] = {}
    for part, first, after in [*branches, (transcript, low, min(high, base))]:
        found = await read_units(store, shared.key, part, first, after) | found
    found |= {number: stored for number, stored in enumerate(snapshot.turns, base) if low <= number < high}
    # Units that are in no branch are in view.
    summarized = min(high, transcript.summarized) if snapshot.body.summary else 0
    return UnitsPage(
        tuple(
            Numbered(number, found[number], number < summarized, base <= number < high)
            for number in sorted(found)
        ),
        oldest,
        end - 1,
        tuple(number for number in range(start, stop) if number not in found),
        snapshot,
    )
