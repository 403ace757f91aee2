"""Long-term memory: entries that outlive their session, on any graph."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from datetime import datetime
from typing import Any, Final

from stm_backends.drivers.checks import require_count
from stm_backends.drivers.tasks import all_of
from stm_backends.guarded import guarded_utc_clock, utc_now
from stm_backends.records.words import words_of
from stm_backends.telemetry.guarded import guarded
from stm_backends.telemetry.observer import SILENT, MemoryEvent, Observer
from stm_backends.tiers import merging, relevance, stored
from stm_backends.tiers.embedding import Embedder, GuardedEmbedder, vector_in
from stm_backends.tiers.entry import (
    MemoryEntry,
    MemoryTier,
    Tier,
    require_fraction,
    require_is_entry,
)
from stm_backends.tiers.graph import (
    Change,
    GraphBackend,
    InProcessGraph,
    RankedGraph,
    SearchableGraph,
    SharedGraph,
    Vertex,
    provides,
)
from stm_backends.tiers.holding import HeldEntries, is_outage, report_uncounted
from stm_backends.tiers.known import KnownEntries, Reading
from stm_backends.tiers.merging import WithVector
from stm_backends.tiers.plain import PlainGraph
from stm_backends.tiers.relevance import EntryHead
from stm_backends.tiers.stored import LABEL, Stored, vertex_id

logger = logging.getLogger("stm_backends")

SIMILAR: Final = 0.6
"""The minimum similarity at which `consolidate` merges two entries."""

INDEXED: Final = 100
"""Maximum number of entries that a recall by index returns unless the caller sets a limit."""

_AT_ONCE: Final = 16
"""Number of vertices changed concurrently."""


class LongTermMemory(Tier):
    """Entries that survive their session, as vertices of a graph with the label `memory`.

    Every process that uses the same graph sees the same entries. With a `SharedGraph`, concurrent updates by
    several processes are never lost; with any other `GraphBackend`, this holds within one process. Without a
    graph, entries are kept in this process.

    An error of the graph is raised, never hidden. With `hold_on_outage=True`, `remember` and promotions
    succeed in an outage: the entries are held in this process, with a warning in the log, and are stored by
    the next call that reaches the graph. `held` is their number. While any are held and the graph fails,
    `recall` returns only the held entries, with a warning.

    `entries`, `size`, `len()` and `in` do no I/O: they cover the entries that this process has stored,
    recalled or listed, as it last saw them.

    With an `embedder`, `recall` also finds entries whose cosine similarity to the query is at least
    `recall_cosine`, and `consolidate` merges those with at least `duplicate_cosine`. Models differ: set both
    for your model.
    """

    def __init__(
        self,
        graph_backend: GraphBackend | None = None,
        relevance_threshold: float = 0.10,
        *,
        embedder: Embedder | None = None,
        recall_cosine: float = relevance.RECALL_COSINE,
        duplicate_cosine: float = relevance.DUPLICATE_COSINE,
        hold_on_outage: bool = False,
        observer: Observer = SILENT,
        clock: Callable[[], datetime] = utc_now,
    ) -> None:
        require_fraction("relevance_threshold", relevance_threshold)
        require_fraction("recall_cosine", recall_cosine)
        require_fraction("duplicate_cosine", duplicate_cosine)
        self.relevance_threshold = relevance_threshold
        graph = InProcessGraph(clock=clock) if graph_backend is None else graph_backend
        self._graph: SharedGraph = graph if provides(graph, SharedGraph) else PlainGraph(graph)
        self.recall_cosine = recall_cosine
        self.duplicate_cosine = duplicate_cosine
        self._hold_on_outage = hold_on_outage
        self._observer = observer = guarded(observer)
        self._embedder = None if embedder is None else GuardedEmbedder(embedder, observer.function_failed)
        self._held = HeldEntries(self._store_held)
        self._clock = guarded_utc_clock(clock, self._observer.function_failed)
        self._known = KnownEntries()

    async def remember(self, entry: MemoryEntry) -> None:
        """Store an entry, replacing any with the same key. Raises `InvalidState` if it is not JSON.

        The higher importance of the two is kept, and their accesses are added up. An entry with
        `superseded_by` is stored, but no longer found.
        """
        require_is_entry(entry)
        new = entry.copied(tier=MemoryTier.LONG_TERM)
        fields = await self._fields_of(new)

        def change(properties: Stored | None) -> Stored | None:
            renewed = relevance.renewed(stored.live(properties), fields)
            return {**fields, **renewed, "merges": merging.of(properties)}

        await self._store(new, change)

    async def promote(self, entry: MemoryEntry, *, again: bool = False) -> bool:
        """Store an entry of short-term memory with its metadata. Repeating this changes nothing.

        An existing entry with the same key keeps its content if it was created later, or was promoted before
        and improved since. Accesses, importance and tags of both are combined. An entry with `superseded_by`
        keeps that, so it is no longer found. `again` says that this content was promoted before: then nothing
        is stored if the entry was removed since. Returns `False` if the entry is only held in this process
        because of an outage.
        """
        new = entry.copied(tier=MemoryTier.LONG_TERM)
        promotion = await self._promotion_of(new, again=again)
        stores_content = False

        def change(properties: dict[str, Any] | None) -> Stored | None:
            nonlocal stores_content
            changed = promotion(properties)
            before = None if properties is None else properties.get("origin")
            stores_content = changed is not None and changed.get("origin") != before
            return changed

        reached = await self._store(new, change)
        if reached and stores_content:
            self._observer.memories("promoted", MemoryTier.LONG_TERM.value, 1)
        return reached

    async def _promotion_of(self, entry: MemoryEntry, *, again: bool = False) -> Change:
        return stored.promotion(entry, await self._fields_of(entry), again=again)

    async def recall(self, query: str, *, limit: int | None = None) -> list[MemoryEntry]:
        """Return the entries that have every word of the query, the most relevant first.

        Words come from keys, tags and contents, and are compared whole and regardless of case. Letters and
        digits make words, so `api key` finds the key `api_key_location`. A query without a word finds entries
        that contain it as text; an empty one finds all. With an embedder, entries with a similar meaning are
        found too. Each result counts as an access; if that cannot be stored, it is logged and not raised.

        A `SearchableGraph` returns the entries whose words were written last: at most 100, or `limit` if that
        is larger. With an embedder, and for a query without a word, all entries are read.
        """
        if limit is not None:
            require_count("limit", limit)
        words = words_of(query)
        wanted = None
        if self._embedder is not None and query.strip():
            wanted = await self._embedder.wanted(query, self.recall_cosine)

        def found(entry: MemoryEntry, properties: Stored) -> bool:
            if not words:
                if relevance.matches(query, entry.key, entry.tags, entry.content):
                    return True
            elif words <= words_of([entry.key, entry.tags, entry.content]):
                return True
            vector = vector_in(properties)
            return wanted is not None and vector is not None and wanted.is_near(vector)

        graph = self._graph
        if self._embedder is None and words and provides(graph, SearchableGraph):
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
        def found(entry: MemoryEntry, _: Stored) -> bool:
            return getattr(entry, name) == value

        graph = self._graph
        if provides(graph, SearchableGraph):
            return await self._recalled(found, None, lambda: graph.find_vertices(LABEL, name, value))
        return await self._recalled(found, None)

    async def forget(self, key: str) -> None:
        """Remove an entry if it exists."""
        graph = self._graph
        await self._held.forget(key, lambda: graph.change_vertex(vertex_id(key), LABEL, lambda _: None))
        self._known.drop(key)

    async def consolidate(self) -> int:
        """Merge entries with a similarity of at least 0.6, and return how many were removed.

        The more relevant entry takes over the accesses, importance and tags of the other, which is marked
        with `superseded_by` and removed. The removed key is remembered for 30 days, so that a session that is
        ended again does not promote it again. An entry stored with `superseded_by` is removed 30 days after
        its last access. Merges that another process did not finish are finished.
        """
        now, removed = self._clock(), 0
        entries: list[WithVector] = []
        async for entry, properties in self._all(superseded=True):
            if entry.superseded_by is None:
                entries.append((entry, vector_in(properties)))
            elif not merging.is_unfinished(properties):
                await merging.forget(self._graph, entry.key, properties, now)
            elif await merging.finish(self._graph, entry.key, properties, now):
                self._known.drop(entry.key)
                removed += 1
        for loser, survivor in await merging.duplicates(entries, SIMILAR, self.duplicate_cosine, now):
            removed += await self.absorb(loser, survivor)
        return self._reported("merged", removed)

    async def decay(self) -> int:
        """Remove the entries whose `relevance * 0.95 ^ days_since_last_access` is below the threshold.

        Returns the number removed.
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
        found = [entry async for entry, _ in self._all()]
        if self._known.reading is None:
            self._known.seen.update((entry.key, entry.copied()) for entry in found)
        return found

    async def with_vectors(self) -> list[WithVector]:
        """Return all entries, each with its vector if it has one. This does not count as an access."""
        return [(entry, vector_in(properties)) async for entry, properties in self._all()]

    async def heads(self) -> dict[str, EntryHead]:
        """Return the heads that rank the entries, by key. This does not count as an access."""
        if not provides(self._graph, RankedGraph):
            heads = {entry.key: stored.head_of(properties) async for entry, properties in self._all()}
            return {key: head for key, head in heads.items() if head is not None}
        await self._held.reconcile()
        before = self._known.keys.copy()
        found = {
            id_.removeprefix(vertex_id("")): head for id_, head in (await self._graph.list_heads()).items()
        }
        self._known.has_all(found.keys(), before)
        return found

    async def opened(self, heads: Mapping[str, EntryHead]) -> list[MemoryEntry]:
        """Return entries by their heads, the most relevant first, and count an access to each.

        Entries that were removed or became larger since are left out.
        """
        now = self._clock()
        sizes = {key: head.size for key, head in heads.items()}
        found = await self._counted({key: stored.accessed(now, size) for key, size in sizes.items()})
        for key in sizes.keys() - found.keys():
            vertex = await self._graph.query_vertex(vertex_id(key))
            found[key] = None if vertex is None else _entry(vertex["properties"])
        entries = [one for one in found.values() if one is not None]
        fitting = [one for one in entries if relevance.size_of(one.key, one.content) <= sizes[one.key]]
        return sorted(fitting, key=lambda one: one.relevance_at(now), reverse=True)

    async def touch(self, entries: Iterable[MemoryEntry]) -> list[MemoryEntry]:
        """Count an access to entries that were read, and return those that still exist."""
        now, read = self._clock(), {entry.key: entry for entry in entries}
        counted = await self._counted(dict.fromkeys(read, stored.accessed(now)))
        found = (counted.get(key, entry) for key, entry in read.items())
        return sorted(
            (one for one in found if one is not None), key=lambda one: one.relevance_at(now), reverse=True
        )

    async def _counted(self, changes: Mapping[str, Change]) -> dict[str, MemoryEntry | None]:
        """Count accesses and return the entries by key; `None` means that the entry was removed.

        Entries whose access could not be counted are missing. The failure is reported and ends the counting.
        """
        found, failed, keys = dict[str, MemoryEntry | None](), list[Exception](), [*changes]

        async def count(key: str) -> None:
            try:
                left = await self._graph.change_vertex(vertex_id(key), LABEL, changes[key])
            except Exception as error:  # noqa: BLE001 -- any graph; the read has succeeded
                failed.append(error)
            else:
                found[key] = self._known.see(key, left)

        while keys and not failed:
            await all_of(map(count, keys[:_AT_ONCE]))
            del keys[:_AT_ONCE]
        if failed:
            report_uncounted(self._observer, MemoryTier.LONG_TERM, len(changes) - len(found), failed[0])
        return found

    async def discard(self, entry: MemoryEntry) -> bool:
        """Remove an entry unless it was changed or accessed since, and return whether it was removed."""
        removed = False

        def change(properties: Stored | None) -> Stored | None:
            nonlocal removed
            removed = properties is not None and MemoryEntry.from_dict(properties) == entry
            return None if removed else properties

        await self._graph.change_vertex(vertex_id(entry.key), LABEL, change)
        if removed:
            self._known.drop(entry.key)
        return removed

    async def rewrite(self, entry: MemoryEntry, content: Any) -> bool:
        """Replace the content of an entry unless it was changed since, and return whether it was replaced."""
        fields = await self._fields_of(entry.copied(content=content))
        new, judged = {name: fields[name] for name in ("content", "vector")}, stored.identity(entry)
        replaced = False

        def change(properties: Stored | None) -> Stored | None:
            nonlocal replaced
            known = stored.live(properties)
            replaced = known is not None and stored.has_content(known, judged)
            return {**known, **new} if known is not None and replaced else properties

        await self._graph.change_vertex(vertex_id(entry.key), LABEL, change)
        return replaced

    async def absorb(self, loser: MemoryEntry, survivor: MemoryEntry) -> bool:
        """Merge an entry into one that it duplicates, unless either was changed since.

        The merge is done in three atomic changes. `consolidate` finishes one that was interrupted.
        """
        merged = await merging.merge(self._graph, loser, survivor, self._clock())
        if merged:
            self._known.absorb(loser, survivor)
        return merged

    def reading_once(self) -> AbstractContextManager[None]:
        """Read all entries at most once within the block, however often this task judges them.

        Each change names the state of the entries that it was computed from, so an entry that others changed
        since is left alone.
        """
        return self._known.reading_once()

    @property
    def entries(self) -> list[MemoryEntry]:
        """Copies of the entries that this process has stored, recalled or listed, as it last saw them."""
        return [one.copied() for one in {**self._known.seen, **self._held.entries}.values()]

    def _keys(self) -> Collection[str]:
        return self._known.keys | self._held.entries.keys()

    @property
    def held(self) -> int:
        """The number of entries waiting for the graph."""
        return len(self._held.entries)

    async def reconcile(self) -> None:
        """Store the held entries. Raises the graph's errors; entries that could not be stored stay held.

        An entry that the graph refuses, for instance as too large, does not prevent others from being stored.
        Only this method tries to store it again.
        """
        refused = await self._held.reconcile(again=True)
        if refused is not None:
            raise refused

    async def _store_held(self, entry: MemoryEntry) -> None:
        promotion = await self._promotion_of(entry)
        if self._held.entries.get(entry.key) is entry:
            self._known.see(
                entry.key, await self._graph.change_vertex(vertex_id(entry.key), LABEL, promotion)
            )

    async def _store(self, entry: MemoryEntry, change: Change) -> bool:
        """Change the vertex of an entry, and return `False` if the entry is held instead."""
        try:
            await self._held.reconcile()
            left = await self._graph.change_vertex(vertex_id(entry.key), LABEL, change)
        except Exception as error:
            if not self._hold_on_outage or not is_outage(error):
                raise
            self._held.hold(entry, error)
            return False
        self._held.replaced_by(entry)
        self._known.see(entry.key, left)
        return True

    async def _fields_of(self, entry: MemoryEntry) -> dict[str, Any]:
        fields = {**entry.to_dict(), "run_id": entry.source_run_id or None, "vector": None}
        if self._embedder is not None:
            [vector] = await self._embedder.vectors([entry.content])
            fields["vector"] = {"text": str(entry.content), "of": vector}
        return fields

    async def _all(
        self, *, superseded: bool = False, search: Callable[[], Awaitable[list[Vertex]]] | None = None
    ) -> AsyncIterator[tuple[MemoryEntry, Stored]]:
        """Yield each entry, or each one that `search` returns, with the properties of its vertex.

        Afterwards, this process knows these entries, and forgets those that others have removed.
        """
        if search is not None:
            await self._held.reconcile()
            for vertex in await search():
                entry = MemoryEntry.from_dict(vertex["properties"])
                if entry.superseded_by is None:
                    yield entry, vertex["properties"]
            return
        found = self._known.reading
        if found is None:
            found = await self._read_all()
        for entry, properties in [*found.values()]:
            if superseded or entry.superseded_by is None:
                yield entry, properties

    async def _read_all(self) -> Reading:
        await self._held.reconcile()
        before, found = self._known.keys.copy(), Reading()
        async for page in self._graph.list_vertices(LABEL):
            for vertex in page:
                entry = MemoryEntry.from_dict(vertex["properties"])
                found[entry.key] = entry, vertex["properties"]
        live = (key for key, (entry, _) in found.items() if entry.superseded_by is None)
        # Between two pages, other tasks may have stored and removed entries.
        self._known.has_all(live, before)
        self._known.keep(found)
        return found

    async def _recalled(
        self,
        found: Callable[[MemoryEntry, Stored], bool],
        limit: int | None,
        search: Callable[[], Awaitable[list[Vertex]]] | None = None,
    ) -> list[MemoryEntry]:
        """Return the entries for which `found` is true, out of those that `search` returns, or out of all."""
        now = self._clock()
        entries: list[MemoryEntry] = []
        try:
            async for entry, properties in self._all(search=search):
                if found(entry, properties):
                    entries.append(entry)
        except Exception as error:
            held = self._held.entries.values()
            if not held or not is_outage(error):
                raise
            logger.warning(
                "long-term memory recalls only the %d entries held in this process: the graph failed (%s)",
                len(held),
                type(error).__name__,
            )
            entries = [one.copied() for one in held if found(one, {})]
            return sorted(entries, key=lambda one: one.relevance_at(now), reverse=True)[:limit]
        entries.sort(key=lambda one: one.relevance_at(now), reverse=True)
        return await self.touch(entries[:limit])


def _entry(properties: Stored) -> MemoryEntry | None:
    known = stored.live(properties)
    return None if known is None else MemoryEntry.from_dict(known)
