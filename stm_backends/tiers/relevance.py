"""Every decision of the three tiers: scores, similarity, duplicates, merges; pure functions, no clock."""

from __future__ import annotations

import bisect
import itertools
import math
import operator
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final, NamedTuple, cast

from stm_backends.records.steps import STEP, Steps

PROMOTED_IMPORTANCE: Final = 0.5
PROMOTED_ACCESSES: Final = 3
"""A short-term entry with at least this importance, or this many accesses, goes to long-term memory."""

CHARACTERS_PER_TOKEN: Final = 4

RECALL_COSINE: Final = 0.75
"""The minimum cosine similarity of a text that answers a query."""

DUPLICATE_COSINE: Final = 0.9
"""The minimum cosine similarity of two texts with the same meaning."""

_SHORTEST_LINE: Final = 32
"""Minimum length to which `truncated` cuts a line, if lines can be left out instead."""

_BITS: Final = 256
"""The number of bits in a signature of words."""

_DAY_S: Final = 86_400.0


def days_between(earlier: datetime, later: datetime) -> float:
    """Return the days from one time to another, but at least 0: other processes' clocks may be ahead."""
    return _days(earlier.timestamp(), later.timestamp())


def _days(earlier: float, later: float) -> float:
    return max((later - earlier) / _DAY_S, 0.0)


def relevance(
    *, importance: float, access_count: int, created_at: datetime, last_accessed: datetime, now: datetime
) -> float:
    """Return `recency * 0.3 + frequency * 0.2 + importance * 0.4 + decay * 0.1`, within [0, 1]."""
    return score(importance, access_count, created_at.timestamp(), last_accessed.timestamp(), now.timestamp())


def score(importance: float, access_count: int, created_at: float, last_accessed: float, now: float) -> float:
    """Return the relevance, with times in seconds since 1970."""
    recency = 1.0 / (1.0 + _days(last_accessed, now))
    frequency = min(access_count / 10.0, 1.0)
    decay = 0.95 ** _days(created_at, now)
    return min(max(recency * 0.3 + frequency * 0.2 + importance * 0.4 + decay * 0.1, 0.0), 1.0)


class EntryHead(NamedTuple):
    """The data that rank a long-term entry, and the number of characters of its key and content.

    Times are in seconds since 1970.
    """

    importance: float
    access_count: int
    created_at: float
    last_accessed: float
    size: int

    def relevance_at(self, now: float) -> float:
        """Return the relevance at a time in seconds since 1970."""
        return score(self.importance, self.access_count, self.created_at, self.last_accessed, now)


def size_of(key: str, content: object) -> int:
    """Return the number of characters that an entry takes in a context window."""
    return len(key) + len(str(content))


def decayed(score: float, last_accessed: datetime, now: datetime) -> float:
    """Return `score * 0.95 ^ days_since_last_access`."""
    return score * 0.95 ** days_between(last_accessed, now)


def is_promoted(importance: float, access_count: int) -> bool:
    """Return whether an entry goes to long-term memory when its session ends."""
    return importance >= PROMOTED_IMPORTANCE or access_count >= PROMOTED_ACCESSES


def matches(query: str, key: str, tags: Iterable[str], content: object) -> bool:
    """Return whether the query is part of the key, a tag or the content, regardless of case."""
    wanted = query.casefold()
    return any(wanted in text.casefold() for text in (key, *tags, str(content)))


def tokens_of(content: object) -> frozenset[str]:
    """Return the words of a content: lower case, split at white space."""
    return frozenset(str(content).lower().split())


def jaccard(one: object, other: object) -> float:
    """Return the share of words that two contents have in common: `|intersection| / |union|`."""
    return _jaccard(tokens_of(one), tokens_of(other))


def _jaccard(one: frozenset[str], other: frozenset[str]) -> float:
    return len(one & other) / len(one | other) if one and other else 0.0


def _signature(words: Iterable[str]) -> int:
    """Return `_BITS` bits with one set for each word; several words may share a bit."""
    found = 0
    for word in words:
        found |= 1 << hash(word) % _BITS
    return found


def cosine(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the cosine of the angle between two vectors; 0 if they differ in length or one is zero."""
    if len(one) != len(other):
        return 0.0
    lengths = math.hypot(*one) * math.hypot(*other)
    return sum(map(operator.mul, one, other)) / lengths if lengths else 0.0


class Candidate(NamedTuple):
    """The data of an entry that the search for duplicates needs."""

    key: str
    content: object
    score: float
    vector: Sequence[float] | None = None


def can_be_duplicate(content: object) -> bool:
    """Return whether equal contents under different keys mean the same: whether any text has two words.

    A single word, a number, a truth value or `None` has a meaning only together with its key, and so does an
    object of these.
    """
    if isinstance(content, str):
        return len(tokens_of(content)) > 1
    if isinstance(content, dict):
        return any(map(can_be_duplicate, cast("dict[object, object]", content).values()))
    if isinstance(content, (list, tuple)):
        return any(map(can_be_duplicate, cast("Iterable[object]", content)))
    return False


def duplicates(
    candidates: Iterable[Candidate], threshold: float, least_cosine: float = DUPLICATE_COSINE
) -> Steps[list[tuple[str, str]]]:
    """Return `(removed, survivor)` for each entry that a more relevant survivor duplicates.

    The survivor of a removed entry is never removed itself. Entries are similar if the Jaccard similarity of
    their words is at least `threshold`, or the cosine similarity of their vectors at least `least_cosine`.
    """
    ranked = sorted(
        (one for one in candidates if can_be_duplicate(one.content)), key=lambda one: (-one.score, one.key)
    )
    words = [tokens_of(one.content) for one in ranked]
    often = Counter(word for one in words for word in one)
    by_word: dict[str, list[int]] = {}
    lacks: dict[int, int] = {}
    with_vector: dict[int, Sequence[float]] = {}
    found: list[tuple[str, str]] = []
    for index, candidate in enumerate(ranked):
        yield
        own = words[index]
        # Two sets this similar share one of their rarest words, so only few survivors are compared.
        rarest = sorted(own, key=lambda word: (often[word], word))
        rarest = rarest[: len(own) - math.ceil(threshold * len(own) - 1e-9) + 1]
        near = {survivor for word in rarest for survivor in by_word.get(word, ())}
        bits, length = _signature(own), len(own)
        similar = [
            one
            for one in near
            # A word whose bit the other lacks is not in common; comparing bits is faster.
            if (1 + threshold) * (length - (bits & lacks[one]).bit_count())
            >= threshold * (length + len(words[one])) - 1e-9
            and _jaccard(own, words[one]) >= threshold
        ]
        if candidate.vector is not None:
            for compared, (survivor, vector) in enumerate(with_vector.items(), 1):
                if cosine(candidate.vector, vector) >= least_cosine:
                    similar.append(survivor)
                    break
                if compared % STEP == 0:
                    yield
        if similar:
            found.append((candidate.key, ranked[min(similar)].key))
            continue
        lacks[index] = ~bits
        for word in rarest:
            by_word.setdefault(word, []).append(index)
        if candidate.vector is not None:
            with_vector[index] = candidate.vector
    return found


def within_budget(sizes: Iterable[int], max_tokens: int) -> list[int]:
    """Return the positions that fit into the budget, in order, skipping any that do not fit."""
    room = max_tokens * CHARACTERS_PER_TOKEN
    kept: list[int] = []
    for position, size in enumerate(sizes):
        if size <= room:
            kept.append(position)
            room -= size
    return kept


def truncated(previous: str, newer: Sequence[str], most: int) -> str:
    """Return a text and newer lines, in at most `most` characters.

    The text and the lines each keep half of the room, or their whole length. The longest lines are cut first.
    If there are too many lines to keep much of each, the oldest lines are left out.
    """
    length = sum(map(len, newer)) + len(newer)
    for_previous = min(len(previous), max(most // 2, most - length))
    room = most - for_previous
    least = list(itertools.accumulate(min(len(line), _SHORTEST_LINE) + 1 for line in reversed(newer)))
    kept = newer[-max(bisect.bisect_right(least, room), 1) :]
    longest = _share(sorted(map(len, kept)), max(room - len(kept), 0))
    lines = [previous[:for_previous]] if previous else []
    return "\n".join([*lines, *(line[:longest] for line in kept)])[:most]


def _share(lengths: Sequence[int], room: int) -> int:
    """Return the length to cut lines to so that they fit; shorter lines leave room for longer ones."""
    for position, length in enumerate(lengths):
        others = len(lengths) - position
        if length * others > room:
            return room // others
        room -= length
    return max(lengths, default=0)


Fields = dict[str, Any]


def absorbed(survivor: Mapping[str, Any], loser: Mapping[str, Any]) -> Fields:
    """Return the fields of a survivor that change when it absorbs its duplicate."""
    return {
        "access_count": survivor["access_count"] + loser["access_count"],
        "importance": max(survivor["importance"], loser["importance"]),
        "last_accessed": max(survivor["last_accessed"], loser["last_accessed"]),
        "tags": union(survivor["tags"], loser["tags"]),
    }


def renewed(known: Mapping[str, Any] | None, entry: Mapping[str, Any]) -> Fields:
    """Return the fields of an entry that change when it replaces a known one with its key."""
    if known is None:
        return {}
    return {
        "access_count": known["access_count"] + entry["access_count"],
        "importance": max(known["importance"], entry["importance"]),
    }


def promoted(
    known: Mapping[str, Any] | None, entry: Mapping[str, Any], origin: str, *, again: bool = False
) -> Fields | None:
    """Return the long-term fields of an entry after its promotion. Repeating a promotion changes nothing.

    `origin` identifies the promoted content. If that content was promoted before, which `again` also says, or
    the known entry was created later, the known content is kept: it may have been improved since. With
    `again`, an entry that is no longer known is not stored: it was merged, pruned or forgotten since.
    """
    if known is None:
        return None if again else {**entry, "origin": origin}
    newer = known["created_at"] > entry["created_at"]
    stays = again or known.get("origin") == origin or newer
    base: Fields = {**known} if stays else {**known, **entry, "origin": origin}
    return {
        **base,
        "superseded_by": None if newer else entry["superseded_by"],
        "access_count": max(known["access_count"], entry["access_count"]),
        "importance": max(known["importance"], entry["importance"]),
        "last_accessed": max(known["last_accessed"], entry["last_accessed"]),
        "created_at": base["created_at"],
        "tags": union(known["tags"], entry["tags"]),
    }


def union(one: Iterable[str], other: Iterable[str]) -> list[str]:
    """Return the tags of both, each once, in order."""
    return list(dict.fromkeys((*one, *other)))
