"""The whole conversation, in pages of numbered turns: those that have left the record, and its tail.

The record is loaded first. All turns below its `base` are in pages by then and stay there, so turns that
leave it meanwhile change nothing: one load decides what is read from where.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from stm_backends.memory.shared.record import SharedConversation
from stm_backends.memory.shared.snapshot import Snapshot
from stm_backends.memory.units import read_units
from stm_backends.records.pages import TURNS, each_after, numbers_asked_for, require_one_place
from stm_backends.types import ConversationTurn, StoredTurn

_AT_ONCE: Final = 8 * TURNS
"""How many turns `read_all` reads at a time, from as many pages as are loaded at once."""


@dataclass(frozen=True, slots=True)
class TranscriptTurn:
    """One turn of a whole conversation. `number` counts from 0 and never changes; `turn.ts` is its time.

    `summarized` says that the summary covers it, and `retained` that it is still in the record.
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
    turns, `newest` is less than `oldest`. Pages expire without a word in the record: before a page is asked
    for that reaches to them, `oldest` is that of the turns before. `missing` has those of the numbers asked
    for that have no turn, between others that have one.
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
    return TranscriptPage(tuple(map(_turn, page.units)), page.oldest, page.newest, page.missing)


def _turn(one: Numbered) -> TranscriptTurn:
    return TranscriptTurn(one.number, one.stored.id, one.stored.turn, one.summarized, one.retained)


async def read_units_page(
    shared: SharedConversation, *, before: int | None, after: int | None, at: int | None, limit: int
) -> UnitsPage:
    """Return the same of turns and messages."""
    require_one_place(before, after, at, limit)
    snapshot, stored = await _load(shared), 0
    while True:
        oldest, end = bounds_of(snapshot)
        oldest = max(oldest, stored)
        start, stop = numbers_asked_for(oldest, end, before=before, after=after, at=at, limit=limit)
        found = await _read(shared, snapshot, oldest, start, stop)
        if not found.missing:
            return found
        again = await _load(shared)
        if _place_of(again) != _place_of(snapshot):
            # Erased, or shortened, while it was read.
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
        yield _turn(one)


def read_all_units(shared: SharedConversation, *, after: int | None) -> AsyncGenerator[Numbered]:
    """Yield the same of turns and messages."""

    async def read(after: int) -> tuple[UnitsPage, Sequence[Numbered]]:
        page = await read_units_page(shared, before=None, after=after, at=None, limit=_AT_ONCE)
        return page, page.units

    return each_after(after, read)


async def _load(shared: SharedConversation) -> Snapshot:
    """Return the conversation, whose turns have the numbers that a transcript would give them."""
    return (await shared.load_copy("transcript")).transcribed()


def bounds_of(snapshot: Snapshot) -> tuple[int, int]:
    """Return the number of the oldest turn of a conversation, and that after the newest."""
    transcript = snapshot.body.transcript
    if transcript is None:
        return 0, len(snapshot.turns)
    return transcript.first, transcript.base + len(snapshot.turns)


def _place_of(snapshot: Snapshot) -> tuple[str, int] | None:
    transcript = snapshot.body.transcript
    return None if transcript is None else (transcript.epoch, transcript.first)


async def _oldest_stored(shared: SharedConversation, snapshot: Snapshot) -> int:
    """Return the number from which on turns are stored: pages before it have expired."""
    transcript = snapshot.body.transcript
    return 0 if transcript is None else await shared.archive.pages.oldest(shared.key, transcript)


async def _read(
    shared: SharedConversation, snapshot: Snapshot, oldest: int, start: int, stop: int
) -> UnitsPage:
    """Return what has the numbers from `start` to `stop - 1`, of which some may be missing."""
    transcript, found = snapshot.body.transcript, dict[int, StoredTurn]()
    base = 0 if transcript is None else transcript.base
    if transcript is not None:
        found = await read_units(shared.archive.pages, shared.key, transcript, start, min(stop, base))
    found |= {number: stored for number, stored in enumerate(snapshot.turns, base) if start <= number < stop}
    summarized = 0 if transcript is None or not snapshot.body.summary else transcript.summarized
    _, end = bounds_of(snapshot)
    return UnitsPage(
        tuple(
            Numbered(number, stored, number < summarized, number >= base) for number, stored in found.items()
        ),
        oldest,
        end - 1,
        tuple(number for number in range(start, stop) if number not in found),
        snapshot,
    )
