"""What happened in a conversation, as far as its record says: counts, failures, leases, edits, summaries.

The record keeps no journal. So the page shows what follows from it: the state of summarizing, how much left
the record and about when, edits, and the summaries that pages keep from when they were begun.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from stm_backends.inspect.shown import transcript_of
from stm_backends.memory.shared.record import SharedConversation
from stm_backends.memory.shared.snapshot import Snapshot
from stm_backends.records import operations
from stm_backends.records.pages import TURNS

MOST: Final = 32
"""How many earlier summaries are read: one of each page."""


class Cover(NamedTuple):
    """A summary that was in force when the turn of a number left the record: it covers all before `end`."""

    left: int
    end: int
    text: str


class Covers(NamedTuple):
    """The earlier summaries of a conversation, the newest first. `more` says that some are older."""

    covers: list[Cover]
    more: bool

    def as_json(self) -> dict[str, Any]:
        """Return them for the page."""
        return {"covers": [cover._asdict() for cover in self.covers], "more": self.more}


def happened_in(snapshot: Snapshot) -> dict[str, Any]:
    """Return what a record says of its conversation, for the page; times are epoch seconds."""
    body, transcript = snapshot.body, transcript_of(snapshot.body)
    lease = body.lease and {
        "at": body.lease.at,
        "until": body.lease.at + body.lease.ttl,
        "overdue": body.overdue and body.overdue.since,
    }
    return {
        "health": body.health.value,
        "attempts": body.attempts,
        "next_attempt_at": body.next_attempt_at,
        "folded": body.folded,
        "dropped": body.dropped,
        "archived": transcript.base - transcript.first,
        "waiting": transcript.waiting,
        "oldest": transcript.first,
        "base": transcript.base,
        "newest": transcript.base + len(snapshot.turns) - 1,
        "summarized": transcript.summarized if body.summary else transcript.first,
        "in_record": len(snapshot.turns),
        "entries": len(snapshot.tail),
        "repeats": snapshot.repeats,
        "bytes": snapshot.size,
        "version": snapshot.version,
        "revision": transcript.rev,
        "lease": lease,
        "left": [{"at": at, "count": count} for at, count in reversed(body.forgotten.ages)],
        "branches": [
            {"revision": one.rev, "first": one.first, "newest": one.end - 1} for one in transcript.branches
        ],
        "patched": [one.number for one in transcript.patches],
        "fork": body.fork and {"of": body.fork.of, "to": body.fork.to},
        "title": body.title,
    }


async def covers_of(shared: SharedConversation, snapshot: Snapshot) -> Covers:
    """Return the summaries that pages keep: the text as it was when the first turn of a page left.

    Reads up to `MOST` pages. Parts of pages that cannot be read are left out.
    """
    transcript = transcript_of(snapshot.body)
    starts = [
        start
        for start in range((transcript.base - 1) // TURNS * TURNS, -1, -TURNS)
        if transcript.first <= start < transcript.base
    ]

    async def read(start: int) -> Cover | None:
        pages = shared.archive.pages
        found = await pages.between(shared.key, transcript, start, start + 1, damaged=lambda error: None)
        if start not in found or not (notes := found[start].notes).get("summary"):
            return None
        return Cover(start, notes["upto"], notes["summary"])

    found = await operations.together(starts[:MOST], read) if starts else []
    return Covers([cover for cover in found if cover is not None], len(starts) > MOST)
