"""Duplicates, and the merge of two entries of long-term memory.

A merge takes three atomic changes: it marks the entry to be removed, adds its metadata to the survivor, and
removes it. A process may be killed in between, and others may change either entry. `finish` continues a merge
from its mark.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final, TypeAlias

from stm_backends.records.steps import run_in_slices
from stm_backends.tiers import relevance, stored
from stm_backends.tiers.entry import MemoryEntry
from stm_backends.tiers.graph import SharedGraph
from stm_backends.tiers.stored import LABEL, Stored, vertex_id

KEPT_DAYS: Final = 30.0
"""Days for which a merged entry is remembered, so that another promotion does not create it again."""

_KNOWN: Final = 64
"""Number of merges that a survivor remembers, so that an interrupted one is not counted twice."""

_NOTHING: Final[Mapping[str, Any]] = {
    "content": None,
    "tags": [],
    "vector": None,
    "run_id": None,
    "merge": None,
    "merges": [],
}
"""The new fields of a merged entry: only its key and its times are remembered."""


WithVector: TypeAlias = tuple[MemoryEntry, list[float] | None]


async def duplicates(
    entries: list[WithVector], threshold: float, least_cosine: float, now: datetime
) -> list[tuple[MemoryEntry, MemoryEntry]]:
    """Return `(removed, survivor)` for each entry that a more relevant one duplicates.

    See `relevance.duplicates`. Other tasks run while entries are compared.
    """
    candidates = [
        relevance.Candidate(one.key, one.content, one.relevance_at(now), vector) for one, vector in entries
    ]
    by_key = {one.key: one for one, _ in entries}
    pairs = await run_in_slices(relevance.duplicates(candidates, threshold, least_cosine))
    return [(by_key[removed], by_key[survivor]) for removed, survivor in pairs]


def of(properties: Stored | None) -> list[str]:
    """Return the ids of the merges that a survivor has taken part in."""
    return [*((properties or {}).get("merges") or ())]


async def merge(graph: SharedGraph, loser: MemoryEntry, survivor: MemoryEntry, now: datetime) -> bool:
    """Merge an entry into one that it duplicates, unless either was changed since."""
    judged = stored.identity(loser)
    mark = {"id": uuid.uuid4().hex, "survivor": stored.identity(survivor)}

    def marked(properties: Stored | None) -> Stored | None:
        known = stored.live(properties)
        if known is None or not stored.has_content(known, judged):
            return properties
        return {**known, "superseded_by": survivor.key, "merge": mark}

    found = await graph.change_vertex(vertex_id(loser.key), LABEL, marked)
    if found is None or found.get("merge") != mark:
        return False
    return await finish(graph, loser.key, found, now)


async def finish(graph: SharedGraph, key: str, loser: Stored, now: datetime) -> bool:
    """Finish a merge: update the survivor, then remove the loser.

    If the survivor was changed or removed since, the loser becomes an entry again.
    """
    mark: Mapping[str, str] = loser.get("merge") or {}

    def add(properties: Stored | None) -> Stored | None:
        known = stored.live(properties)
        if known is None or mark.get("id") in of(known):
            return properties
        if not stored.has_content(known, mark.get("survivor", "")):
            return properties
        return {**known, **relevance.absorbed(known, loser), "merges": [*of(known), mark["id"]][-_KNOWN:]}

    survivor = await graph.change_vertex(vertex_id(loser["superseded_by"]), LABEL, add)
    merged = survivor is not None and mark.get("id") in of(survivor)

    def end(properties: Stored | None) -> Stored | None:
        if properties is None or properties.get("merge") != loser.get("merge"):
            return properties
        if not merged:
            return {**properties, "superseded_by": None, "merge": None}
        return {**properties, **_NOTHING, "merged_at": now.isoformat()}

    await graph.change_vertex(vertex_id(key), LABEL, end)
    return merged


def is_unfinished(properties: Stored) -> bool:
    """Return whether a merge of this entry into another was begun but not finished."""
    return properties.get("superseded_by") is not None and bool(properties.get("merge"))


async def forget(graph: SharedGraph, key: str, merged: Stored, now: datetime) -> None:
    """Remove the record of a merged entry, `KEPT_DAYS` after its merge.

    An entry that was stored as superseded is removed as long after its last access.
    """
    since = datetime.fromisoformat(merged.get("merged_at") or merged["last_accessed"])
    if relevance.days_between(since, now) > KEPT_DAYS:
        await graph.change_vertex(
            vertex_id(key), LABEL, lambda properties: None if properties == merged else properties
        )
