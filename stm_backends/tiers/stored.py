"""A long-term entry as the properties of a vertex, and its changes; pure functions.

The properties are the fields of `MemoryEntry.to_dict`, and:

```
run_id     the run that produced the entry, or None; graphs return traces by it
vector     {"text": ..., "of": [...]}: the vector of the content and the text it was made from, or None
origin     identifies the content last promoted from short-term memory
merges     the ids of the merges that this entry absorbed
merge      {"id", "survivor"}: a merge into `superseded_by` that is not finished, or None
merged_at  when the entry was merged; only its key and its times are left
```
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final, TypeAlias, cast

from stm_backends.errors import InvalidState
from stm_backends.tiers import relevance
from stm_backends.tiers.entry import MemoryEntry
from stm_backends.tiers.graph import Change
from stm_backends.tiers.relevance import EntryHead

Stored: TypeAlias = Mapping[str, Any]

LABEL: Final = "memory"


def vertex_id(key: str) -> str:
    """Return the id of the vertex of an entry."""
    return f"{LABEL}:{key}"


def live(properties: Stored | None) -> Stored | None:
    """Return the properties if they are those of an entry that is neither missing nor superseded."""
    return None if properties is None or properties.get("superseded_by") is not None else properties


def head_of(properties: Stored) -> EntryHead | None:
    """Return the head of an entry; `None` if it is superseded or the properties are not an entry's."""
    if live(properties) is None:
        return None
    try:
        importance = float(properties["importance"])
        if not 0 <= importance <= 1:
            return None
        return EntryHead(
            importance,
            int(properties["access_count"]),
            _seconds(properties["created_at"]),
            _seconds(properties["last_accessed"]),
            relevance.size_of(properties["key"], properties["content"]),
        )
    except (KeyError, TypeError, ValueError, OverflowError):
        return None


def _seconds(text: str) -> float:
    time = datetime.fromisoformat(text)
    return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()


def identity(entry: MemoryEntry) -> str:
    """Return a digest that identifies this content of an entry."""
    text = f"{entry.created_at.isoformat()}\n{json.dumps(entry.content, sort_keys=True)}"
    return hashlib.sha256(text.encode()).hexdigest()


def has_content(properties: Stored, identified: str) -> bool:
    """Return whether a stored entry still has the content with this identity."""
    return identity(MemoryEntry.from_dict(properties)) == identified


def accessed(now: datetime, largest: int | None = None) -> Change:
    """Return the change that counts an access, unless the entry has more than `largest` characters."""

    def change(properties: Stored | None) -> Stored | None:
        known = live(properties)
        if known is None:
            return properties
        if largest is not None and relevance.size_of(known["key"], known["content"]) > largest:
            return properties
        return {**known, **MemoryEntry.from_dict(known).accessed(now).to_dict()}

    return change


def promotion(entry: MemoryEntry, fields: Stored, *, again: bool = False) -> Change:
    """Return the change that promotes an entry with the properties `fields`; see `relevance.promoted`."""
    origin = identity(entry)

    def change(properties: Stored | None) -> Stored | None:
        known = live(properties)
        if properties is not None and known is None and properties["created_at"] >= fields["created_at"]:
            # The entry was promoted before and is superseded, or its merge is still to be finished.
            return properties
        promoted = relevance.promoted(known, fields, origin, again=again)
        return properties if promoted is None else promoted

    return change


def require_entry(properties: Stored) -> None:
    """Raise `InvalidState` unless these are the properties of an entry, as long-term memory stores it."""
    merge, merges, vector = (properties.get(name) for name in ("merge", "merges", "vector"))
    try:
        complete = MemoryEntry.from_dict(properties).to_dict().keys() <= properties.keys()
        if properties.get("merged_at") is not None:
            datetime.fromisoformat(properties["merged_at"])
        complete &= merge is None or _are_texts([*cast("dict[str, Any]", merge).values()])
        complete &= merges is None or _are_texts(merges)
        if vector is not None:
            complete &= isinstance(vector["text"], str) and all(math.isfinite(x) for x in vector["of"])
    except (AttributeError, KeyError, TypeError, ValueError):
        complete = False
    if not complete:
        raise InvalidState("properties is not an entry of the long-term memory")


def _are_texts(values: object) -> bool:
    return isinstance(values, list) and all(isinstance(value, str) for value in cast("list[object]", values))
