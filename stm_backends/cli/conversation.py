"""One exported conversation, as `show` presents it in each format, and the whole of it for a page."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from stm_backends.admin.stats import last_activity_of, tokens_of
from stm_backends.backend import Backend
from stm_backends.cli.figures import iso, spans, when
from stm_backends.cli.replay import ledger
from stm_backends.history.log import ItemLog, LogItem, LogPage
from stm_backends.memory.shared.reading import Numbered, read_all_units, read_units_page
from stm_backends.memory.shared.record import SharedConversation
from stm_backends.memory.speech import split
from stm_backends.memory.units import stored_unit
from stm_backends.records import keys
from stm_backends.records.body import Body, Transcript
from stm_backends.records.codec import load_body
from stm_backends.types import MemoryBudget, MemoryKey, ShortTermMemoryConfig, StoredTurn

MOST: Final = 10_000
"""A page shows this many of the newest turns or items; a browser can open as many at once."""

One = TypeVar("One")


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation and its figures. `guessed` means that `full_zone_turns` is the default."""

    key: str
    document: Mapping[str, Any]
    body: Body
    pending: Sequence[StoredTurn]
    recent: Sequence[StoredTurn]
    tokens: int
    last_activity: float | None
    full_zone_turns: int
    guessed: bool
    transcript: Transcript

    @staticmethod
    def of(
        document: Mapping[str, Any],
        key: str,
        transcript: Transcript,
        *,
        full_zone_turns: int | None = None,
    ) -> Conversation:
        """Read an export, and the numbers of its turns from its record.

        The number of turns that its memory shows in full is not stored; `None` means the default.
        """
        budget = MemoryBudget() if full_zone_turns is None else MemoryBudget(full_zone_turns)
        body = load_body(document["body"])
        session: str = document["key"]["session_id"]
        turns = [
            stored._replace(turn=ledger.stored_without_mark(stored.turn, session))
            for stored in map(stored_unit, document["turns"])
        ]
        pending, recent = split(turns, ShortTermMemoryConfig("rolling_summary", budget))
        return Conversation(
            key,
            document,
            body,
            pending,
            recent,
            tokens_of(body, turns),
            last_activity_of(body, turns, now=time.time()),
            budget.full_zone_turns,
            full_zone_turns is None,
            transcript,
        )

    def section_of(self, one: Numbered) -> str:
        """Return the title above a turn or message of the whole conversation."""
        if any(one.stored.id == stored.id for stored in self.recent):
            return "Recent"
        if one.summarized:
            return "Covered by the summary"
        if any(one.stored.id == stored.id for stored in self.pending):
            return "Pending (not summarized yet)"
        return "Earlier (covered by no summary)"

    @property
    def first(self) -> int:
        """The number of the first turn that is shown."""
        return self.transcript.base

    @property
    def archived(self) -> int:
        """The number of turns in pages of the transcript."""
        return self.transcript.base - self.transcript.first

    @property
    def summary_title(self) -> str:
        """The heading above the summary."""
        covered, _ = ledger.split(self.body.summary)
        return (
            "Summary (first line added by replay: the turns that it covers, from 0)" if covered else "Summary"
        )

    @property
    def what(self) -> str:
        """The noun for its numbered items."""
        return said_in(self.body, [*self.pending, *self.recent])

    @property
    def turns(self) -> str:
        """The number of its turns or messages, in words."""
        in_full, body = len(self.pending) + len(self.recent), self.body
        return f"{in_full:,} in full, {body.folded} in the summary, {body.dropped} dropped without a summary"

    def facts(self) -> dict[str, str]:
        """Return the facts shown above the conversation, by name."""
        facts = {"health": self.body.health.value, self.what: self.turns}
        if self.archived:
            waiting = self.transcript.waiting
            suffix = f", {waiting:,} of them wait for a summary" if waiting else ""
            facts["transcript"] = f"{self.archived:,} in pages{suffix}"
        facts["tokens"] = f"{self.tokens:,} (estimate for the whole conversation)"
        facts["last activity"] = "unknown" if self.last_activity is None else when(self.last_activity)
        if self.guessed and (self.pending or self.recent):
            facts["recent"] = (
                f"the newest {self.full_zone_turns} turns (default; set yours with --full-zone-turns)"
            )
        return facts

    def as_json(self) -> dict[str, Any]:
        """Return the conversation and its figures as JSON; turns are as in an export."""
        turns: list[Any] = self.document["turns"]
        boundary = len(self.pending)
        return {
            "key": self.key,
            **self.document["key"],
            "health": self.body.health.value,
            "attempts": self.body.attempts,
            "next_attempt_at": iso(self.body.next_attempt_at or None),
            "tokens": self.tokens,
            "last_activity": iso(self.last_activity),
            "folded": self.body.folded,
            "dropped": self.body.dropped,
            "archived": self.archived,
            "waiting": self.transcript.waiting,
            "summary": self.body.summary,
            "pending": turns[:boundary],
            "recent": turns[boundary:],
        }


def said_in(body: Body, units: Sequence[StoredTurn]) -> str:
    """Return the noun for a conversation's items, judged by those in its record."""
    if not body.messages:
        return "turns"
    return "messages" if all(unit.said for unit in units) else "turns and messages"


@dataclass(frozen=True, slots=True)
class Whole(Generic[One]):
    """The turns and messages of a conversation, or the items of a log: from the number `start` on.

    `oldest` is the number of the oldest stored item, `what` is the noun for the items, and `again` is the
    command that shows all.
    """

    oldest: int
    start: int
    each: AsyncIterator[One]
    what: str
    again: str

    @staticmethod
    async def of(backend: Backend, key: MemoryKey, shown: Conversation) -> Whole[Numbered]:
        """Find the turns up to the newest one of an export, and read only those of the record yet."""
        again = f"stm-backends history {shown.key}"
        if not keys.is_dialogue(key):
            return Whole(shown.first, shown.first, _in_record(shown), shown.what, again)
        shared = backend.memory(key).shared
        look = await read_units_page(shared, before=None, after=None, at=None, limit=1)
        start = max(look.oldest, look.newest + 1 - MOST)
        each = _until_newest(shared, key.session_id, shown, start, look.newest)
        return Whole(look.oldest, start, each, shown.what, again)

    @staticmethod
    def of_log(log: ItemLog, newest: LogPage, again: str) -> Whole[LogItem]:
        """Return the items up to those of the newest page, none of which is read yet."""
        start = max(newest.oldest, newest.newest + 1 - MOST)
        return Whole(newest.oldest, start, _items_until(log, start, newest.newest), "items", again)

    def notes(self) -> list[str]:
        """Return the notes about items that are not shown."""
        notes: list[str] = []
        if self.oldest:
            notes.append(f"The {self.what} before number {self.oldest} are no longer stored.")
        if self.start > self.oldest:
            notes.append(
                f"This page shows the newest {MOST:,} {self.what}. "
                f"Numbers {self.oldest} to {self.start - 1}: {self.again} --before {self.start}"
            )
        return notes

    def hole(self, first: int, last: int) -> str:
        """Return the note in place of numbers without a turn."""
        return f"No longer stored: number{'s' * (last > first)} {spans([range(first, last + 1)])}"


async def _in_record(shown: Conversation) -> AsyncIterator[Numbered]:
    for number, stored in enumerate([*shown.pending, *shown.recent], shown.first):
        yield Numbered(number, stored, summarized=False, retained=True)


async def _until_newest(
    shared: SharedConversation, session: str, shown: Conversation, start: int, newest: int
) -> AsyncIterator[Numbered]:
    exported = [stored.id for stored in (*shown.pending, *shown.recent)]
    async with aclosing(read_all_units(shared, after=start - 1)) as units:
        async for one in units:
            turn = ledger.stored_without_mark(one.stored.turn, session)
            yield one._replace(stored=one.stored._replace(turn=turn))
            # Others may add turns meanwhile.
            if one.number >= newest or one.stored.id in exported[-1:]:
                return


async def _items_until(log: ItemLog, start: int, newest: int) -> AsyncIterator[LogItem]:
    async with aclosing(log.each_item(after=start - 1)) as items:
        async for one in items:
            if one.number > newest:
                return
            yield one
