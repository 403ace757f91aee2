"""Long-term memory: what stays when a session ends, on any graph."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import math
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from datetime import datetime
from typing import Any, Final, cast

from stm_backends.errors import ConfigurationError, Corrupt, Denied, InvalidState, LimitReached, TooLarge
from stm_backends.records.steps import run_in_slices
from stm_backends.telemetry.guarded import guarded
from stm_backends.telemetry.observer import SILENT, MemoryEvent, Observer
from stm_backends.tiers import postings, relevance
from stm_backends.tiers.embedding import Embedder, embed, vector_in
from stm_backends.tiers.entry import MemoryEntry, MemoryTier, utc_now
from stm_backends.tiers.graph import (
    Change,
    GraphBackend,
    InProcessGraph,
    SearchableGraph,
    SharedGraph,
    Vertex,
)
from stm_backends.tiers.plain import PlainGraph

logger = logging.getLogger("stm_backends")

LABEL: Final = "memory"

SIMILAR: Final = 0.6
"""The similarity from which `consolidate` merges two entries."""

INDEXED: Final = 100
"""The most entries that a recall by an index returns if the caller sets no limit."""

_AT_ONCE: Final = 16
"""How many vertices are changed at the same time."""

_NO_OUTAGE: Final = (ConfigurationError, Corrupt, Denied, LimitReached, TooLarge)
"""Errors that are raised even with `hold_on_outage`, because a retry would not help."""

_MERGES_KNOWN: Final = 64
"""How many merges a survivor remembers, so that one that was interrupted is not counted twice."""

MERGED_KEPT_DAYS: Final = 30.0
"""How long a merged entry is remembered, so that promoting it again does not create it again."""


def vertex_id(key: str) -> str:
    """Return the id of the vertex of an entry."""
    return f"{LABEL}:{key}"


class LongTermMemory:
    """Entries that survive their session, as vertices of a graph with the label `memory`.

    Every process that uses the same graph sees the same entries. With a `SharedGraph`, updates of several
    processes are never lost; with any other `GraphBackend`, that holds within one process. Without a graph,
    entries are kept in this process.

    An error of the graph is raised, never hidden. With `hold_on_outage=True`, `remember` and promotions
    succeed in an outage: the entries are held in this process, with a warning in the log, and are stored by
    the next call that reaches the graph. `held` is their number. While any are held and the graph fails,
    `recall` returns these only, with a warning.
    """

    def __init__(
        self,
        graph_backend: GraphBackend | None = None,
        relevance_threshold: float = 0.10,
        *,
        embedder: Embedder | None = None,
        hold_on_outage: bool = False,
        observer: Observer = SILENT,
        clock: Callable[[], datetime] = utc_now,
    ) -> None:
        if not 0 <= relevance_threshold <= 1:
            raise ConfigurationError("relevance_threshold must be within [0, 1]")
        self.relevance_threshold = relevance_threshold
        graph = InProcessGraph(clock=clock) if graph_backend is None else graph_backend
        self._graph: SharedGraph = graph if isinstance(graph, SharedGraph) else PlainGraph(graph)
        self._embedder = embedder
        self._hold_on_outage = hold_on_outage
        self._observer = guarded(observer)
        self._held: dict[str, MemoryEntry] = {}
        self._reconciling = asyncio.Lock()
        self._clock = clock
        self._known: set[str] = set()

    async def remember(self, entry: MemoryEntry) -> None:
        """Store an entry; it replaces one with the same key. Raises `InvalidState` if it is not JSON."""
        stored = entry.copied(tier=MemoryTier.LONG_TERM, superseded_by=None)
        fields = await self._fields_of(stored)

        def change(known: Mapping[str, Any] | None) -> dict[str, Any]:
            return {**fields, "merges": _merges(known)}

        await self._store(stored, change)

    async def promote(self, entry: MemoryEntry, *, again: bool = False) -> bool:
        """Store an entry of short-term memory with its metadata; repeating it changes nothing.

        An entry with the same key that was created later keeps its content, and so does one that was promoted
        before and was improved since. Accesses, importance and tags of both are combined. `again` says that
        this content was promoted before: then nothing is stored if the entry was removed since. Returns
        `False` if the entry is only held in this process, because of an outage.
        """
        stored = entry.copied(tier=MemoryTier.LONG_TERM, superseded_by=None)
        promotion = await self._promotion_of(stored, again=again)
        new = False

        def change(properties: dict[str, Any] | None) -> Mapping[str, Any] | None:
            nonlocal new
            changed = promotion(properties)
            before = None if properties is None else properties.get("origin")
            new = changed is not None and changed.get("origin") != before
            return changed

        reached = await self._store(stored, change)
        if reached and new:
            self._observer.memories("promoted", MemoryTier.LONG_TERM.value, 1)
        return reached

    async def _promotion_of(self, entry: MemoryEntry, *, again: bool = False) -> Change:
        fields = await self._fields_of(entry)
        origin = _digest(entry.created_at.isoformat(), entry.content)

        def change(known: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
            live = _live(known)
            if known is not None and live is None and known["created_at"] >= fields["created_at"]:
                # It was promoted before and merged into another, or such a merge is still to be finished.
                return known
            promoted = relevance.promoted(live, fields, origin, again=again)
            return known if promoted is None else promoted

        return change

    async def recall(self, query: str, *, limit: int | None = None) -> list[MemoryEntry]:
        """Return the entries that have every word of the query, the most relevant first.

        Words are those of keys, tags and contents, compared whole and regardless of case: letters and digits
        make words, so `api key` finds the key `api_key_location`. A query without a word finds entries that
        contain it as text; an empty one finds all. With an embedder, entries of a similar meaning are found
        too. Each result counts as an access.

        A `SearchableGraph` returns at most 100 entries, or `limit`, if larger: those whose words were
        written last. With an embedder, and for a query without a word, all entries are read.
        """
        words = postings.words_of(query)
        wanted = None
        if self._embedder is not None and query.strip():
            [wanted] = await embed(self._embedder, [query])

        def found(entry: MemoryEntry, properties: dict[str, Any]) -> bool:
            if not words:
                if relevance.matches(query, entry.key, entry.tags, entry.content):
                    return True
            elif words <= postings.words_of([entry.key, entry.tags, entry.content]):
                return True
            vector = vector_in(properties)
            if wanted is None or vector is None:
                return False
            return relevance.cosine(wanted, vector) >= relevance.SAME_MEANING

        graph = self._graph
        if self._embedder is None and words and isinstance(graph, SearchableGraph):
            return await self._recalled(
                found, limit, lambda: graph.search_vertices(LABEL, query, limit=max(limit or 0, INDEXED))
            )
        return await self._recalled(found, limit)

    async def recall_by_agent(self, agent_name: str) -> list[MemoryEntry]:
        """Return the entries of an agent, the most relevant first; each counts as an access."""
        return await self._recalled_by("source_agent", agent_name)

    async def recall_by_run(self, run_id: str) -> list[MemoryEntry]:
        """Return the entries of a run, the most relevant first; each counts as an access."""
        return await self._recalled_by("source_run_id", run_id)

    async def _recalled_by(self, name: str, value: str) -> list[MemoryEntry]:
        def found(entry: MemoryEntry, _: dict[str, Any]) -> bool:
            return getattr(entry, name) == value

        graph = self._graph
        if isinstance(graph, SearchableGraph):
            return await self._recalled(found, None, lambda: graph.find_vertices(LABEL, name, value))
        return await self._recalled(found, None)

    async def forget(self, key: str) -> None:
        """Remove an entry, if there is one."""
        self._held.pop(key, None)
        # After a reconciliation that is storing the entry.
        async with self._reconciling:
            await self._graph.change_vertex(vertex_id(key), LABEL, lambda _: None)
        self._known.discard(key)

    async def consolidate(self) -> int:
        """Merge entries with a similarity of at least 0.6; return how many were removed.

        The more relevant one takes over the accesses, the importance and the tags of the other, which is
        marked with `superseded_by` and removed. Its key is remembered for `MERGED_KEPT_DAYS`, so that a
        session that is ended again does not promote it again. Merges that another process did not finish are
        finished.
        """
        removed = 0
        now = self._clock()
        entries: dict[str, MemoryEntry] = {}
        vectors: dict[str, list[float]] = {}
        async for entry, properties in self._all(superseded=True):
            if _is_merged(properties):
                if relevance.days_between(_merged_at(properties), now) > MERGED_KEPT_DAYS:
                    await self._forget_merged(entry.key, properties)
                continue
            if entry.superseded_by is not None:
                removed += await self._finish(entry.key, properties)
                continue
            entries[entry.key] = entry
            vector = vector_in(properties)
            if vector is not None:
                vectors[entry.key] = vector
        candidates = [
            relevance.Candidate(key, one.content, one.relevance_at(now), vectors.get(key))
            for key, one in entries.items()
        ]
        for loser, survivor in await run_in_slices(relevance.duplicates(candidates, SIMILAR)):
            removed += await self.absorb(entries[loser], entries[survivor])
        return self._reported("merged", removed)

    async def decay(self) -> int:
        """Remove the entries whose `relevance * 0.95 ^ days_since_last_access` is below the threshold.

        Returns how many were removed.
        """
        now = self._clock()
        faded = [
            entry
            for entry in await self.listed()
            if relevance.decayed(entry.relevance_at(now), entry.last_accessed, now) < self.relevance_threshold
        ]
        return self._reported("pruned", sum([await self.discard(entry) for entry in faded]))

    def _reported(self, event: MemoryEvent, count: int) -> int:
        if count:
            self._observer.memories(event, MemoryTier.LONG_TERM.value, count)
        return count

    async def listed(self) -> list[MemoryEntry]:
        """Return all entries. This does not count as an access."""
        found = {entry.key: entry async for entry, _ in self._all()}
        self._known = {*found}
        return [*found.values()]

    async def vectors(self) -> dict[str, list[float]]:
        """Return the vectors stored with the entries, by key."""
        pairs = [(entry.key, vector_in(properties)) async for entry, properties in self._all()]
        return {key: vector for key, vector in pairs if vector is not None}

    async def touch(self, entries: Iterable[MemoryEntry]) -> list[MemoryEntry]:
        """Count an access to entries; returns those that still exist, the most relevant first."""
        now = self._clock()

        def change(properties: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
            live = _live(properties)
            if live is None:
                return properties
            entry = MemoryEntry.from_dict(live).accessed(now)
            return {**live, **entry.to_dict()}

        ids = [vertex_id(entry.key) for entry in entries]
        found: list[MemoryEntry] = []
        for start in range(0, len(ids), _AT_ONCE):
            changes = [self._graph.change_vertex(one, LABEL, change) for one in ids[start : start + _AT_ONCE]]
            stored = await asyncio.gather(*changes)
            found += [MemoryEntry.from_dict(one) for one in map(_live, stored) if one is not None]
        return sorted(found, key=lambda one: one.relevance_at(now), reverse=True)

    async def discard(self, entry: MemoryEntry) -> bool:
        """Remove an entry unless it was changed or accessed since; say whether it was removed."""
        removed = False

        def change(properties: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
            nonlocal removed
            removed = properties is not None and MemoryEntry.from_dict(properties) == entry
            return None if removed else properties

        await self._graph.change_vertex(vertex_id(entry.key), LABEL, change)
        if removed:
            self._known.discard(entry.key)
        return removed

    async def rewrite(self, entry: MemoryEntry, content: Any) -> bool:
        """Replace the content of an entry unless it was changed since; say whether it was replaced."""
        fields = await self._fields_of(entry.copied(content=content))
        new = {name: fields[name] for name in ("content", "vector")}
        replaced = False

        def change(properties: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
            nonlocal replaced
            live = _live(properties)
            replaced = live is not None and _content(live) == _digest(
                entry.created_at.isoformat(), entry.content
            )
            return {**live, **new} if live is not None and replaced else properties

        await self._graph.change_vertex(vertex_id(entry.key), LABEL, change)
        return replaced

    async def absorb(self, loser: MemoryEntry, survivor: MemoryEntry) -> bool:
        """Merge an entry into one that it duplicates, unless either was changed since.

        The merge is done in three atomic changes. `consolidate` finishes one that was interrupted.
        """
        judged = _digest(loser.created_at.isoformat(), loser.content)
        mark = {
            "id": uuid.uuid4().hex,
            "survivor": _digest(survivor.created_at.isoformat(), survivor.content),
        }

        def marked(properties: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
            live = _live(properties)
            if live is None or _content(live) != judged:
                return properties
            return {**live, "superseded_by": survivor.key, "merge": mark}

        stored = await self._graph.change_vertex(vertex_id(loser.key), LABEL, marked)
        if stored is None or stored.get("merge") != mark:
            return False
        return await self._finish(loser.key, stored)

    async def _finish(self, key: str, loser: dict[str, Any]) -> bool:
        """Carry out the rest of a merge: add to the survivor, then remove the loser.

        If the survivor was changed or removed since, the loser is an entry again.
        """
        mark: dict[str, str] = loser.get("merge") or {}

        def add(properties: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
            live = _live(properties)
            if live is None or mark.get("id") in _merges(live):
                return properties
            if _content(live) != mark.get("survivor"):
                return properties
            merges = [*_merges(live), mark["id"]][-_MERGES_KNOWN:]
            return {**live, **relevance.absorbed(live, loser), "merges": merges}

        survivor = await self._graph.change_vertex(vertex_id(loser["superseded_by"]), LABEL, add)
        merged = survivor is not None and mark.get("id") in _merges(survivor)

        def end(properties: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
            if properties is None or properties.get("merge") != loser.get("merge"):
                return properties
            if not merged:
                return {**properties, "superseded_by": None, "merge": None}
            return {**properties, **_NOTHING, "merged_at": self._clock().isoformat()}

        await self._graph.change_vertex(vertex_id(key), LABEL, end)
        if merged:
            self._known.discard(key)
        return merged

    async def _forget_merged(self, key: str, merged: dict[str, Any]) -> None:
        def change(properties: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
            return None if properties == merged else properties

        await self._graph.change_vertex(vertex_id(key), LABEL, change)

    @property
    def size(self) -> int:
        """The number of entries that this process knows of; other processes may have changed it."""
        return len(self._known | self._held.keys())

    @property
    def held(self) -> int:
        """The number of entries that wait for the graph."""
        return len(self._held)

    async def reconcile(self) -> None:
        """Store the held entries. Raises what the graph raises; what could not be stored stays held."""
        if not self._held:
            return
        async with self._reconciling:
            for key, entry in list(self._held.items()):
                promotion = await self._promotion_of(entry)
                if self._held.get(key) is not entry:
                    continue
                await self._graph.change_vertex(vertex_id(key), LABEL, promotion)
                self._known.add(key)
                if self._held.get(key) is entry:
                    del self._held[key]
                    logger.warning("an entry of long-term memory that was held in an outage is stored")

    async def _store(self, entry: MemoryEntry, change: Change) -> bool:
        """Change the vertex of an entry; `False` if the entry is held instead."""
        try:
            await self.reconcile()
            await self._graph.change_vertex(vertex_id(entry.key), LABEL, change)
        except Exception as error:
            if not self._hold_on_outage or isinstance(error, _NO_OUTAGE):
                raise
            self._held[entry.key] = entry
            logger.warning(
                "long-term memory holds %d entries in this process: the graph failed (%s)",
                len(self._held),
                type(error).__name__,
            )
            return False
        self._known.add(entry.key)
        return True

    async def _fields_of(self, entry: MemoryEntry) -> dict[str, Any]:
        fields = {**entry.to_dict(), "run_id": entry.source_run_id or None, "vector": None}
        if self._embedder is not None:
            [vector] = await embed(self._embedder, [entry.content])
            fields["vector"] = {"text": str(entry.content), "of": vector}
        return fields

    async def _all(
        self, *, superseded: bool = False, search: Callable[[], Awaitable[list[Vertex]]] | None = None
    ) -> AsyncIterator[tuple[MemoryEntry, dict[str, Any]]]:
        """Yield each entry, or each that `search` returns, with the properties of its vertex."""
        await self.reconcile()
        pages = self._graph.list_vertices(LABEL) if search is None else _page(await search())
        async for page in pages:
            for vertex in page:
                properties: dict[str, Any] = vertex["properties"]
                entry = MemoryEntry.from_dict(properties)
                if superseded or entry.superseded_by is None:
                    yield entry, properties

    async def _recalled(
        self,
        found: Callable[[MemoryEntry, dict[str, Any]], bool],
        limit: int | None,
        search: Callable[[], Awaitable[list[Vertex]]] | None = None,
    ) -> list[MemoryEntry]:
        """Return the entries for which `found` holds, of those that `search` returns or of all."""
        now = self._clock()
        keys: set[str] = set()
        entries: list[MemoryEntry] = []
        try:
            async for entry, properties in self._all(search=search):
                keys.add(entry.key)
                if found(entry, properties):
                    entries.append(entry)
        except Exception as error:
            if not self._held:
                raise
            logger.warning(
                "long-term memory recalls only the %d entries held in this process: the graph failed (%s)",
                len(self._held),
                type(error).__name__,
            )
            held = [one.copied() for one in self._held.values() if found(one, {})]
            return sorted(held, key=lambda one: one.relevance_at(now), reverse=True)[:limit]
        self._known = keys if search is None else self._known | keys
        entries.sort(key=lambda one: one.relevance_at(now), reverse=True)
        return await self.touch(entries[:limit])


def _are_texts(values: Iterable[Any]) -> bool:
    return all(isinstance(value, str) for value in values)


def require_entry(properties: Mapping[str, Any]) -> None:
    """Raise `InvalidState` unless these are properties of an entry, as long-term memory stores them."""
    merge: Any = properties.get("merge")
    merges: Any = properties.get("merges")
    vector: Any = properties.get("vector")
    try:
        entry = MemoryEntry.from_dict(properties).to_dict()
        for name in ("created_at", "last_accessed", "merged_at"):
            if properties.get(name) is not None:
                datetime.fromisoformat(properties[name])
        complete = entry.keys() <= properties.keys()
        if vector is not None:
            complete &= isinstance(vector["text"], str) and all(math.isfinite(x) for x in vector["of"])
    except (KeyError, TypeError, ValueError):
        complete = False
    if not (
        complete
        and isinstance(properties["superseded_by"], str | None)
        and (
            merge is None or (isinstance(merge, dict) and _are_texts(cast("dict[str, Any]", merge).values()))
        )
        and (merges is None or (isinstance(merges, list) and _are_texts(cast("list[Any]", merges))))
    ):
        raise InvalidState("properties is not an entry of the long-term memory")


async def _page(vertices: list[Vertex]) -> AsyncIterator[list[Vertex]]:
    yield vertices


def _live(properties: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Return the properties of a vertex that is an entry: neither missing nor superseded."""
    return None if properties is None or properties.get("superseded_by") is not None else properties


_NOTHING: Final[Mapping[str, Any]] = {
    "content": None,
    "tags": [],
    "vector": None,
    "run_id": None,
    "merge": None,
    "merges": [],
}
"""What replaces the fields of an entry that was merged: only its key and its times are remembered."""


def _is_merged(properties: Mapping[str, Any]) -> bool:
    """Say whether this is what is remembered of an entry that was merged."""
    return properties.get("superseded_by") is not None and properties.get("merged_at") is not None


def _merged_at(properties: Mapping[str, Any]) -> datetime:
    return datetime.fromisoformat(properties["merged_at"])


def _content(properties: Mapping[str, Any]) -> str:
    return _digest(MemoryEntry.from_dict(properties).created_at.isoformat(), properties["content"])


def _digest(created_at: str, content: Any) -> str:
    """Return what identifies one content of an entry."""
    return hashlib.sha256(f"{created_at}\n{json.dumps(content, sort_keys=True)}".encode()).hexdigest()


def _merges(properties: Mapping[str, Any] | None) -> list[str]:
    """Return the ids of the merges that a survivor has taken part in."""
    return [*((properties or {}).get("merges") or ())]
