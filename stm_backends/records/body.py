"""The content of a conversation's record besides its turns: the summary, its health, and remembered ids.

A `Body` is data. `stm_backends.memory.policy` decides how it changes, and `stm_backends.records.codec`
serializes it.
"""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Final, NamedTuple

from stm_backends.types import MemoryHealth

REMEMBERED_IDS: Final = 256
"""Number of ids of folded and trimmed turns that are always remembered, in addition to recent ones."""


@dataclass(frozen=True, slots=True)
class Forgotten:
    """The ids of turns that have left the record, as short hashes, oldest first.

    They make adding such a turn again a no-op. `digests` is `",d1,d2,"`. `ages` has a pair
    `(epoch seconds, count)` for each recent fold or trim, in the same order, after one pair with the time 0
    for all older ones.
    """

    digests: str = ","
    ages: tuple[tuple[float, int], ...] = ()

    def __len__(self) -> int:
        return sum(count for _, count in self.ages)

    def __contains__(self, turn_id: str) -> bool:
        if len(self.digests) > _MANY:
            return digest(turn_id) in _each_of(self.digests)
        return len(self.digests) > 1 and f",{digest(turn_id)}," in self.digests

    def adding(
        self, turn_ids: Sequence[str], *, now: float, keep_for: float, copies: Set[str] = frozenset()
    ) -> Forgotten:
        """Return these ids and more, without those that are both old and beyond `REMEMBERED_IDS`.

        `copies` are ids with a repeat that is still in the record. They are kept regardless of age: without
        them, the repeat would become a turn.
        """
        repeated = frozenset(digest(turn_id) for turn_id in copies)
        return self._adding(
            [digest(turn_id) for turn_id in turn_ids], now=now, keep_for=keep_for, repeated=repeated
        )

    def union(self, newer: Forgotten, *, now: float, keep_for: float) -> Forgotten:
        """Return these ids, then those of `newer` that are not among them."""
        known = set(self.each())
        return self._adding([d for d in newer.each() if d not in known], now=now, keep_for=keep_for)

    @property
    def newest(self) -> str:
        """The short hash of the id that was added last; `""` if there is none."""
        digests = self.digests.rstrip(",")
        return digests[digests.rfind(",") + 1 :]

    def each(self) -> list[str]:
        """Return the short hashes, oldest first."""
        return self.digests.strip(",").split(",") if self.ages else []

    def _adding(
        self, newer: list[str], *, now: float, keep_for: float, repeated: Set[str] = frozenset()
    ) -> Forgotten:
        if not newer:
            return self
        digests = [*self.each(), *newer]
        # Times are rounded up to tenths of `keep_for`, so that many folds need only a few pairs.
        grain = keep_for / 10 if keep_for > 0 else 1.0
        when = math.ceil(now / grain) * grain
        # A clock that was ahead must not keep ids for longer.
        young = [(min(time, when), count) for time, count in self.ages]
        if young and young[-1][0] == when:
            young[-1] = (when, young[-1][1] + len(newer))
        else:
            young.append((when, len(newer)))
        recent = next((i for i, (time, _) in enumerate(young) if time > now - keep_for), len(young))
        old, young = sum(count for _, count in young[:recent]), young[recent:]
        # Only old ids may be removed, and only those beyond the number that is always remembered.
        removable = min(old, max(0, len(digests) - REMEMBERED_IDS))
        kept = [one for one in digests[:removable] if one in repeated] + digests[removable:]
        old = len(kept) - sum(count for _, count in young)
        ages = ((0.0, old), *young) if old else tuple(young)
        return Forgotten(f",{','.join(kept)},", ages)


@lru_cache(4_096)  # an id is looked up when it is added, loaded and folded
def digest(turn_id: str) -> str:
    """Return the short hash of an id: 48 bits in 8 characters."""
    raw = hashlib.blake2b(turn_id.encode("utf-8", "surrogatepass"), digest_size=6).digest()
    return base64.urlsafe_b64encode(raw).decode("ascii")


_MANY: Final = 32 * 1024
"""Up to this many characters of digests are searched; beyond, a set is made, so many look-ups are cheap."""


@lru_cache(2)
def _each_of(digests: str) -> frozenset[str]:
    return frozenset(digests.split(","))


class Lease(NamedTuple):
    """The right of one process to summarize a conversation: taken at `at` (epoch seconds) for `ttl` seconds.

    The process that wrote the record's version holds it. A lease only saves calls of the summarizer:
    `Driver.replace` ensures that no summary is lost or applied twice.
    """

    at: float
    ttl: float


class Overdue(NamedTuple):
    """A note of a process for others: at `since`, by its clock, the lease taken at `lease_at` had ended."""

    lease_at: float
    since: float


class Branch(NamedTuple):
    """Numbers that left the view when a conversation continued from an earlier place: `first` to `end - 1`.

    `rev` is the revision that ended then, and `last` the short hash of the id of the newest one.
    """

    rev: int
    first: int
    end: int
    last: str


class Patch(NamedTuple):
    """The unit that an edit has given to a number, until the page of the number has it.

    `rev` is the revision after the edit. `turn` is the unit for the page; if the record itself has the unit,
    only its id, of which the page may have older copies.
    """

    rev: int
    number: int
    turn: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Transcript:
    """The data about pages (see `pages`) in the body of a record: the turns that are there.

    `epoch` is the version that the first body with a transcript replaced, so that no two lives of a record
    share pages. `base` is the number of the oldest turn of the tail: all lower numbers have left it. `last`
    is the short hash of the id of the turn before it. `gap` is the first number that left without a summary:
    `gap` to `base - 1` are still to be summarized; `None` if there are none. `rev` counts the changes of what
    had left already, and `first` is the oldest number that is retained. `branches` has the numbers that edits
    have removed from the view, oldest edit first, and `patches` the replacements of units in pages.
    `extra` holds fields of a newer version of this library.
    """

    epoch: str
    base: int = 0
    last: str = ""
    gap: int | None = None
    rev: int = 0
    first: int = 0
    branches: tuple[Branch, ...] = ()
    patches: tuple[Patch, ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @staticmethod
    def begun(version: str, body: Body) -> Transcript:
        """Return the transcript of a record that has none yet, from its version and its body.

        Turns that have left it are in no page, and keep their numbers.
        """
        left = body.left
        return Transcript(version, base=left, last=body.forgotten.newest, first=left)

    @property
    def summarized(self) -> int:
        """The first number that no summary covers."""
        return self.base if self.gap is None else self.gap

    @property
    def waiting(self) -> int:
        """The number of turns that have left the record and wait for a summary."""
        return self.base - self.summarized

    def moved(self, turn_ids: Sequence[str], *, summarized: bool) -> Transcript:
        """Return the transcript after the oldest turns of the tail have left.

        If they are not `summarized`, they still wait for a summary. Otherwise, nothing before them does.
        """
        if not turn_ids:
            return self
        gap = None if summarized else self.summarized
        return replace(self, base=self.base + len(turn_ids), last=digest(turn_ids[-1]), gap=gap)

    def caught_up(self, until: int) -> Transcript:
        """Return the transcript once a summary covers all numbers below `until`."""
        return replace(self, gap=until if until < self.base else None)

    def branch(self, rev: int) -> Branch | None:
        """Return the branch that left the view when a revision ended; `None` if nothing did."""
        return next((one for one in self.branches if one.rev == rev), None)

    def as_of(self, branch: Branch) -> Transcript:
        """Return the transcript under which the pages have a branch."""
        return replace(self, base=branch.end, last=branch.last, gap=None, rev=branch.rev)

    def keeping(self, most: int | None) -> Transcript:
        """Return the transcript without all but the newest `most` turns of its pages; `None` keeps all.

        Those that no summary covers yet stay, so that the next summary covers them.
        """
        first = self.first if most is None else min(self.base - most, self.summarized)
        return replace(self, first=first) if first > self.first else self

    def recounted(self, forgotten: Forgotten) -> Transcript:
        """Return the transcript with the turns counted that an older version of this library has dropped.

        It drops turns without pages, and preserves unknown fields. Numbers that it dropped are in no page.
        """
        newest = forgotten.newest
        if newest == self.last:
            return self
        ids = forgotten.each()[::-1]
        dropped = ids.index(self.last) if self.last in ids else len(ids)
        return replace(self, base=self.base + dropped, last=newest)


TITLE_CHARACTERS: Final = 120
"""Maximum number of characters kept of a title from a summarizer."""


def as_title(given: object) -> str:
    """Return a title that comes from a model as one line of text; `""` for anything else."""
    if not isinstance(given, str):
        return ""
    line = " ".join(given[: 8 * TITLE_CHARACTERS].encode("utf-8", "ignore").decode().split())
    return line if len(line) <= TITLE_CHARACTERS else f"{line[: TITLE_CHARACTERS - 1].rstrip()}…"


class Fork(NamedTuple):
    """The origin of a copied conversation: up to the number `to` of the session `of`.

    The first of its entries is `entry`, which holds nothing for any other body.
    """

    of: str
    to: int
    entry: str


@dataclass(frozen=True, slots=True)
class Body:
    """The content of a conversation's record besides its turns.

    `health` is never `RECOVERING`. `attempts` counts failures in a row, `next_attempt_at` is in epoch
    seconds. `folded` counts turns that a summary covers and `dropped` turns that were lost without one.
    `lease` is set while a process writes a summary, and `overdue` if another found it to last too long.
    `transcript` tells the place of turns that have left the record; `None` if they are not kept. `messages`
    is true if messages have been in the record, and not only turns. Of the units that have left, a model is
    still shown `lead`, the agent's instructions at the beginning, and `asked`, the question of a turn that
    continues. `usage` has the usage of their answers, see `usage.Sums`. `title` is a summarizer's title of
    the conversation, if any. `fork` is set in a copy of another conversation. `extra` holds fields of a newer
    version of this library, which survive a rewrite.
    """

    summary: str = ""
    health: MemoryHealth = MemoryHealth.HEALTHY
    attempts: int = 0
    next_attempt_at: float = 0.0
    folded: int = 0
    dropped: int = 0
    forgotten: Forgotten = Forgotten()
    lease: Lease | None = None
    overdue: Overdue | None = None
    transcript: Transcript | None = None
    messages: bool = False
    lead: tuple[Mapping[str, Any], ...] = ()
    asked: Mapping[str, Any] | None = None
    usage: Mapping[str, Mapping[str, int]] = field(default_factory=dict[str, Mapping[str, int]])
    title: str = ""
    fork: Fork | None = None
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def left(self) -> int:
        """The number of turns that have left a record without a transcript, as far as it says.

        Of turns that were to be dropped, as under the strategy `truncation`, only the newest are remembered.
        """
        return max(self.folded + self.dropped, len(self.forgotten))

    def unleased(self) -> Body:
        """Return the body without a lease."""
        return self if self.lease is self.overdue is None else replace(self, lease=None, overdue=None)
