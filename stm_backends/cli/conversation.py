"""One exported conversation, as `show` presents it as text, JSON and Markdown."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stm_backends.admin.stats import last_activity_of, tokens_of
from stm_backends.cli.figures import iso, when
from stm_backends.cli.replay import ledger
from stm_backends.memory.speech import split
from stm_backends.memory.units import stored_unit
from stm_backends.records.body import Body, Transcript
from stm_backends.records.codec import load_body
from stm_backends.types import MemoryBudget, ShortTermMemoryConfig, StoredTurn


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
