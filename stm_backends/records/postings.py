"""Postings: the items that have a word, in buckets. These are of a graph's index; `portions` has others.

For a graph, they name the vertices that have a word, or an exact value of some properties.

The terms of a vertex are spread over `BUCKETS` records by their hash. An entry of a bucket adds the terms of
one stamp, or removes them:

```
body   {"terms": {term: {stamp: vertex id, ...}, ...}}
entry  {"stamp": ..., "vertex": ..., "add": [term, ...]}
entry  {"stamp": ..., "drop": true}
```

Each write of a vertex that changes its terms has a new stamp, which is added before the vertex is written and
removed only after a later write has replaced that one. A removed stamp is never added again. So the index has
every stored vertex at any time. A killed process may also leave stamps of no vertex in it; a
search loads the vertices that it finds, and drops such stamps.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Final

from stm_backends.drivers.contract import Record
from stm_backends.errors import Corrupt
from stm_backends.records.codec import Codec

BUCKETS: Final = 64


def new_stamp() -> str:
    """Return a new stamp; later ones sort after earlier ones, as far as clocks agree."""
    return f"{int(time.time() * 1000):011x}{secrets.token_hex(4)}"


def age_of(stamp: str) -> float:
    """Return how many seconds ago a stamp was made, as far as clocks agree."""
    try:
        return time.time() - int(stamp[:11], 16) / 1000
    except ValueError:
        raise Corrupt("the stored index of a graph has an invalid stamp") from None


def by_bucket(terms: Iterable[str]) -> dict[int, list[str]]:
    """Return terms by the bucket that has them."""
    found: dict[int, list[str]] = {}
    for term in sorted(terms):
        digest = blake2b(term.encode("utf-8", "surrogatepass"), digest_size=1).digest()
        found.setdefault(digest[0] % BUCKETS, []).append(term)
    return found


@dataclass(frozen=True, slots=True)
class Bucket:
    """One bucket: the vertex ids of each term, by stamp."""

    terms: dict[str, dict[str, str]] = field(default_factory=dict[str, dict[str, str]])
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])


def read(record: Record | None, codec: Codec) -> Bucket:
    """Return the bucket in a record. Raises `Corrupt` if any part of it cannot be read."""
    if record is None:
        return Bucket()
    content = codec.open("postings", record.body) if record.body else {}
    try:
        terms: dict[str, dict[str, str]] = content.get("terms", {})
        if not all(map(_is_object, terms.values())):
            raise TypeError
        dropped: set[str] = set()
        for entry in record.tail:
            _apply(terms, dropped, codec.open("postings", entry))
        if dropped:
            terms = _without(terms, dropped)
    except (AttributeError, KeyError, TypeError, ValueError):
        raise Corrupt("the stored index of a graph has a field of the wrong type") from None
    return Bucket(terms, {name: value for name, value in content.items() if name != "terms"})


def _is_object(value: object) -> bool:
    return isinstance(value, dict)


def _apply(terms: dict[str, dict[str, str]], dropped: set[str], entry: Mapping[str, Any]) -> None:
    stamp = str(entry["stamp"])
    if entry.get("drop"):
        dropped.add(stamp)
    for term in entry.get("add", ()):
        terms.setdefault(term, {})[stamp] = str(entry["vertex"])


def _without(terms: Mapping[str, dict[str, str]], dropped: set[str]) -> dict[str, dict[str, str]]:
    left = {
        term: stamps
        if dropped.isdisjoint(stamps)
        else {stamp: one for stamp, one in stamps.items() if stamp not in dropped}
        for term, stamps in terms.items()
    }
    return {term: stamps for term, stamps in left.items() if stamps}


def seal(bucket: Bucket, codec: Codec) -> bytes:
    """Return the body of a bucket."""
    return codec.seal("postings", {**bucket.extra, "terms": bucket.terms})


def seal_added(stamp: str, vertex_id: str, terms: list[str], codec: Codec) -> bytes:
    """Return the entry that adds terms of a vertex."""
    return codec.seal("postings", {"stamp": stamp, "vertex": vertex_id, "add": terms})


def seal_dropped(stamp: str, codec: Codec) -> bytes:
    """Return the entry that removes the terms of a stamp.

    It has no terms, because it may be stored after the user was erased.
    """
    return codec.seal("postings", {"stamp": stamp, "drop": True})


def with_all(found: Sequence[Mapping[str, str]]) -> list[str]:
    """Return the ids of the vertices that all of the terms have, the one indexed last first.

    `found` has the vertex ids of each term by stamp. The stamps of a vertex may differ: another process may
    have changed it after one bucket was read and before another was.
    """
    if not found:
        return []
    fewest, *others = sorted(found, key=len)
    ids = set(fewest.values()).intersection(*(other.values() for other in others))
    return list(
        dict.fromkeys(fewest[stamp] for stamp in sorted(fewest, reverse=True) if fewest[stamp] in ids)
    )
