"""A graph in a datastore, shared by every process that opens it. The layout is that of decision 0035."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast, get_args
from weakref import WeakValueDictionary

from stm_backends import races
from stm_backends.admin.importing import OnConflict
from stm_backends.drivers.checks import require_backend
from stm_backends.drivers.contract import Key, Record
from stm_backends.errors import (
    ConfigurationError,
    Corrupt,
    OutcomeUnknown,
    StorageError,
    Unavailable,
    located,
)
from stm_backends.guarded import guarded_utc_clock, utc_now
from stm_backends.records import keys, ledger, operations, postings
from stm_backends.records.large.driver import ORPHANED_S
from stm_backends.records.limits import Whose, characters_in
from stm_backends.records.words import words_of
from stm_backends.tiers import exports, vertices, wording
from stm_backends.tiers.graph import (
    PAGE,
    Change,
    Properties,
    Vertex,
    VertexExists,
    VertexNotFound,
    same_properties,
)
from stm_backends.tiers.heads import Heads
from stm_backends.tiers.index import Index
from stm_backends.tiers.relevance import EntryHead
from stm_backends.tiers.stored import LABEL, head_of
from stm_backends.tiers.vertices import Stored

if TYPE_CHECKING:
    from stm_backends.backend import Backend

AT_ONCE: Final = 64
"""Number of records loaded concurrently."""


class _Changed(NamedTuple):
    """A vertex as it was read, and as it is then stored; `None` if it is not stored."""

    before: Stored
    after: Stored | None


class BackendGraph:
    """The graph of one owner, a tenant and a user, on a backend.

    Implements `SearchableGraph` and `RankedGraph`.

    The constructor reads and writes nothing. The backend must be open, and stays open. `clock` returns the
    creation time of vertices.
    """

    def __init__(
        self,
        backend: Backend,
        owner: tuple[str, str],
        *,
        clock: Callable[[], datetime] = utc_now,
    ) -> None:
        require_backend(backend)
        self._driver = backend.driver
        self._codec = backend.codec
        self._directory = backend.directory
        if not isinstance(cast("object", owner), (tuple, list)) or len(owner) != 2:
            # Two users must not share a graph because their ids were passed as one string.
            raise ConfigurationError("owner must be a tuple of a tenant and a user")
        self.owner = self._owner = (owner[0], owner[1])
        self._scope = keys.scope(*self._owner, "graph")
        self._guard = backend.guard
        self._clock = guarded_utc_clock(clock, backend.observer.function_failed)
        self._changing: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._index = Index(self._driver, self._codec, self._directory, self._owner)
        self._heads = Heads(self._driver, self._codec, self._directory, self._owner)

    # Vertices

    async def add_vertex(self, vertex_id: str, label: str, properties: dict[str, Any]) -> None:
        """Store a vertex; see `GraphBackend`. Its edges and its creation time are kept."""
        await self._change(
            vertex_id, lambda stored: replace(stored, label=label, properties=dict(properties))
        )

    async def update_vertex(self, vertex_id: str, properties: dict[str, Any]) -> None:
        """Merge properties into the stored ones. Raises `VertexNotFound` if the vertex does not exist."""
        await self._change(
            vertex_id, lambda stored: replace(stored, properties={**_found(stored).properties, **properties})
        )

    async def change_vertex(self, vertex_id: str, label: str, change: Change) -> dict[str, Any] | None:
        """Replace the properties by `change(properties)`, atomically; see `SharedGraph`.

        Takes two round trips if the words of the vertex do not change. A memory takes one more, which
        concurrent calls share.
        """

        def changed(stored: Stored) -> Stored | None:
            exists = stored.label is not None
            properties = change(copy.deepcopy(stored.properties) if exists else None)
            if properties is None:
                return None
            return replace(stored, label=stored.label if exists else label, properties=dict(properties))

        return await self._change(vertex_id, changed)

    async def query_vertex(self, vertex_id: str) -> dict[str, Any] | None:
        """Return a vertex, or `None`."""
        stored = await self._load(vertex_id)
        return None if stored.label is None else stored.vertex()

    async def list_vertices(self, label: str) -> AsyncIterator[list[dict[str, Any]]]:
        """Yield the vertices with a label, in pages of at most `PAGE`, in any order."""
        async for page in self._pages():
            labelled = [stored.vertex() for stored in page if stored.label == label]
            if labelled:
                yield labelled

    async def clear(self) -> None:
        """Remove all vertices and edges, and the index."""
        # Vertices first, so that an interruption leaves no vertex without its words.
        for prefix in (keys.VERTICES, ""):
            async for name in operations.names_of(self._driver, self._scope, prefix):
                where = Key(self._scope, name)
                await races.retried(lambda where=where: ledger.erase(self._driver, where))
        await self._directory.forget_if_unused(*self._owner)

    async def list_heads(self) -> dict[str, EntryHead]:
        """Return the heads that rank the memories; see `RankedGraph`.

        Loads one record and lists the names of the vertices. Only vertices without a head are loaded; they
        then get one.
        """
        # In this order, a vertex without a head was stored in between, or by an older version.
        known = await self._heads.read()
        names = [one async for one in operations.names_of(self._driver, self._scope, keys.VERTICES)]
        new = await self._each([Key(self._scope, one) for one in names if one not in known])
        heads = {stored.id: _head_of(stored) for stored in new if stored.label is not None}
        gone = known.keys() - {*names}
        await self._heads.note(heads, gone=[known[one][0] for one in gone])
        listed = [known[one] for one in names if one in known]
        return {id_: head for id_, head in (*listed, *heads.items()) if head is not None}

    # Searching

    async def search_vertices(self, label: str, text: str, *, limit: int = 100) -> list[dict[str, Any]]:
        """Return at most `limit` vertices with a label and every word of a text; see `SearchableGraph`.

        Loads one record for each word, and only the returned vertices.
        """
        return await self._with_terms(frozenset(words_of(text)), label, limit=limit)

    async def find_vertices(self, label: str, name: str, value: str) -> list[dict[str, Any]]:
        """Return all vertices with a label and this value of a property, which is one of `wording.EXACT`."""
        if name not in wording.EXACT:
            raise ValueError(f"{name!r} is not indexed; {', '.join(wording.EXACT)} are")
        return await self._with_terms(frozenset([wording.exact_term(name, value)]), label)

    async def _with_terms(
        self, terms: frozenset[str], label: str, *, limit: int | None = None
    ) -> list[Vertex]:
        ids = iter(await self._index.ids(terms))
        found: list[Vertex] = []
        while some := list(islice(ids, AT_ONCE if limit is None else min(AT_ONCE, limit - len(found)))):
            loaded = await self._each([self._at(one) for one in some])
            # The index may list vertices or words that are no longer stored.
            found += [
                stored.vertex()
                for stored in loaded
                if stored.label == label and terms <= wording.terms_of(stored.properties)
            ]
        return found

    async def reindex(self) -> int:
        """Repair the index; returns how many vertices were missing some of their words in it.

        No process leaves such gaps, but erasing or changing records by hand may. Also removes words of
        changed or removed vertices, and entries that killed processes left more than an hour ago. Reads every
        record of the graph, which may be in use. May be interrupted and repeated.
        """
        counts, used, repaired = await self._index.counts(), set[str](), 0
        async for page in self._pages():
            for stored in page:
                terms = wording.terms_of(stored.properties)
                if stored.label is None:
                    continue
                if stored.index == wording.RULE and counts[stored.stamp] == len(terms):
                    used.add(stored.stamp)
                    continue
                with suppress(VertexNotFound):
                    await self._change(stored.id, _found, again=True)
                    repaired += 1
        await self._index.drop_unless(lambda stamp: stamp in used or postings.age_of(stamp) < ORPHANED_S)
        return repaired

    # Exports

    async def export(
        self, *, failed: Callable[[Corrupt], None] | None = None
    ) -> AsyncIterator[dict[str, Any]]:
        """Yield each vertex, with the edges that lead from it, as a JSON object; see `exports`.

        Changes by other processes in the meantime may or may not be included. Raises `Corrupt` for a vertex
        that cannot be read. If `failed` is given, it is called with the error instead, and the vertex and the
        edges to it are left out.
        """
        async for page in self._pages(failed):
            found = [stored for stored in page if stored.label is not None]
            targets = (target for stored in found for target, _ in stored.out)
            others = await self._by_id(targets, None if failed is None else lambda error: None)
            for stored in found:
                yield exports.dump(self._owner, stored, vertices.edges_from(stored.id, stored, others))

    async def import_(self, document: Mapping[str, Any], *, on_conflict: OnConflict = "refuse") -> bool:
        """Store an exported vertex and the edges that lead from it; returns whether anything changed.

        The vertex is stored under its id, even if it was exported from the graph of another user.
        `on_conflict` applies if a vertex with its id exists. `"refuse"` raises `VertexExists` and changes
        nothing. `"merge"` keeps the vertex and adds the missing edges. `"replace"` replaces its label and
        properties, and the properties of its edges; other edges are kept. A merge completes an interrupted
        import. Raises `InvalidState`, before anything is written, for an invalid document.
        """
        if on_conflict not in get_args(OnConflict):
            raise ConfigurationError(f"on_conflict must be one of: {', '.join(get_args(OnConflict))}")
        given = exports.parse(document)

        def imported(stored: Stored) -> Stored:
            if stored.label is None:
                created = replace(stored, label=given.label, created_at=given.created_at)
                return replace(created, properties=dict(given.properties))
            if on_conflict == "refuse":
                raise VertexExists("a vertex with this id already exists; merge or replace it")
            if on_conflict == "merge":
                return stored
            return replace(stored, label=given.label, properties=dict(given.properties))

        source = await self._load(given.id)
        changed = not vertices.same(source, imported(source))
        await self._change(given.id, imported)
        known = vertices.edges_from(given.id, source, await self._by_id(target for target, _ in given.out))
        for (target, label), properties in given.out.items():
            there = known.get((target, label))
            if there is None or (on_conflict == "replace" and not same_properties(there, properties)):
                await self.add_edge(given.id, target, label, properties)
                changed = True
        return changed

    # Edges

    async def add_edge(self, source_id: str, target_id: str, label: str, properties: dict[str, Any]) -> None:
        """Store a directed edge with two appends; see `GraphBackend`."""
        source, target = vertices.seal_halves(source_id, target_id, label, properties, self._codec)
        # In this order: without the second append, the edge does not exist or keeps its old properties.
        async with self._directory.listed(self._owner) as listing:
            for one, entry in (source_id, source), (target_id, target):
                appended = await ledger.append_and_fold(self._driver, self._at(one), entry, self._body_of)
                listing.created |= appended.created

    async def query_children(self, vertex_id: str) -> list[dict[str, Any]]:
        """Return the targets of this vertex's outgoing edges, once for each edge."""
        stored = await self._load(vertex_id)
        if stored.label is None:
            return []
        others = await self._by_id(target for target, _ in stored.out)
        return [
            {**others[target].vertex(), "edge_label": label, "edge_properties": copy.deepcopy(properties)}
            for (target, label), properties in vertices.edges_from(vertex_id, stored, others).items()
            if others[target].label is not None
        ]

    async def query_parents(self, vertex_id: str) -> list[dict[str, Any]]:
        """Return the sources of this vertex's incoming edges, once for each edge."""
        stored = await self._load(vertex_id)
        if stored.label is None:
            return []
        others = await self._by_id(source for source, _ in stored.into)
        return [
            {
                **others[source].vertex(),
                "edge_label": label,
                "edge_properties": others[source].out[vertex_id, label],
            }
            for source, label in stored.into
            if others[source].label is not None and (vertex_id, label) in others[source].out
        ]

    async def get_full_trace(self, run_id: str) -> dict[str, Any]:
        """Return `{"vertices", "edges"}`: the vertices with this `run_id`, and the edges between them."""
        ids = await self._index.ids(frozenset([wording.exact_term("run_id", run_id)]))
        found = await self._by_id(sorted(ids))
        known = {
            one: stored
            for one, stored in found.items()
            if stored.label is not None and stored.properties.get("run_id") == run_id
        }
        edges = [
            {"source_id": source, "target_id": target, "label": label, "properties": properties}
            for source, stored in known.items()
            for (target, label), properties in vertices.edges_from(source, stored, known).items()
        ]
        return {"vertices": [stored.vertex() for stored in known.values()], "edges": edges}

    # Records

    def _at(self, vertex_id: str) -> Key:
        return keys.vertex_key(*self._owner, vertex_id)

    async def _load(self, vertex_id: str) -> Stored:
        return await self._read(self._at(vertex_id))

    async def _read(self, where: Key) -> Stored:
        return self._opened(await self._driver.load(where))

    def _opened(self, record: Record | None) -> Stored:
        with located(self._driver.name, "load"):
            return vertices.read(record, self._codec)

    async def _each(self, places: list[Key], failed: Callable[[Corrupt], None] | None = None) -> list[Stored]:
        """Load records. An unreadable one is passed to `failed`, if given, and then counts as missing."""

        async def read(where: Key) -> Stored:
            try:
                return await self._read(where)
            except Corrupt as error:
                if failed is None:
                    raise
                failed(error)
                return Stored()

        found: list[Stored] = []
        for start in range(0, len(places), AT_ONCE):
            found += await operations.together(places[start : start + AT_ONCE], read)
        return found

    async def _pages(self, failed: Callable[[Corrupt], None] | None = None) -> AsyncIterator[list[Stored]]:
        """Yield all records of vertices, in pages of at most `PAGE`."""
        places: list[Key] = []
        async for name in operations.names_of(self._driver, self._scope, keys.VERTICES):
            places.append(Key(self._scope, name))
            if len(places) == PAGE:
                yield await self._each(places, failed)
                places = []
        if places:
            yield await self._each(places, failed)

    async def _by_id(
        self, ids: Iterable[str], failed: Callable[[Corrupt], None] | None = None
    ) -> dict[str, Stored]:
        wanted = list(dict.fromkeys(ids))
        found = await self._each([self._at(one) for one in wanted], failed)
        return dict(zip(wanted, found, strict=True))

    async def _change(
        self, vertex_id: str, decide: Callable[[Stored], Stored | None], *, again: bool = False
    ) -> Properties | None:
        # Calls of this process take turns instead of losing races against each other.
        async with self._changing.setdefault(vertex_id, asyncio.Lock()):
            before, left = await self._change_alone(vertex_id, decide, again=again)
            if left is None:
                return None
            head = _head_of(left)
            # A read of this process may be older than a head that it has noted since.
            if head != _head_of(before) or head != self._heads.had(vertex_id):
                await self._heads.note({vertex_id: head})
            return left.properties

    async def _change_alone(
        self, vertex_id: str, decide: Callable[[Stored], Stored | None], *, again: bool
    ) -> _Changed:
        """Write the result of `decide` for the stored vertex.

        Index terms added for an attempt that lost its race are removed again. With `again`, the vertex is
        indexed and written even if nothing changes.
        """
        added = dict[str, frozenset[str]]()
        used, existed, gone = "", False, False

        async def decided(record: Record | None) -> tuple[ledger.Change | ledger.Deletion | None, _Changed]:
            nonlocal used, existed, gone
            stored, used = self._opened(record), ""
            # The user may have been erased in between, so none of these words may stay.
            gone = existed and stored.label is None
            existed = existed or stored.label is not None
            wanted = decide(stored)
            if wanted is None:
                # Edges that wait for a vertex are not the edges of a removed vertex.
                return (None if stored.label is None else ledger.DELETE), _Changed(stored, None)
            if not again and vertices.same(stored, wanted):
                return None, _Changed(stored, stored)
            vertices.require_properties(wanted.properties)
            self._require_within_limits(stored, wanted)
            wanted = replace(wanted, id=vertex_id, properties=copy.deepcopy(wanted.properties))
            new = await self._indexed(stored, wanted, added, again=again)
            used = new.stamp
            drop = min(stored.length, self._driver.traits.max_drop)
            return ledger.Change(vertices.seal(new, self._codec), drop=drop), _Changed(stored, new)

        try:
            changed = await ledger.update(
                self._driver,
                self._at(vertex_id),
                decided,
                unchanged=ledger.unchanged_by(self._body_of),
                listing=self._directory.listed(self._owner),
                repeatable=False,
            )
        except OutcomeUnknown:
            # It may have been written, with the terms added to the index last.
            added.pop(used, None)
            raise
        except asyncio.CancelledError:
            # Searches ignore leftover terms.
            added.clear()
            raise
        except StorageError:
            used = ""
            raise
        else:
            if changed is None:
                used = ""
                raise Unavailable("a vertex kept changing", backend=self._driver.name, operation="replace")
        finally:
            added.pop(used, None)
            if added:
                await self._index.drop(added, fold=gone)
        stored, new = changed
        if stored.stamp and (new is None or stored.stamp != new.stamp):
            await self._index.drop({stored.stamp: wording.terms_of(stored.properties)})
        return changed

    def _require_within_limits(self, stored: Stored, wanted: Stored) -> None:
        """Raise `LimitReached` for too many words, unless they are already stored."""
        texts, before = (
            {name: one.properties.get(name) for name in wording.WORDS_OF} for one in (wanted, stored)
        )
        if texts != before:
            with self._guard.reporting(Whose(*self._owner), "add_vertex"):
                self._guard.require("memory_characters", lambda: characters_in(texts))

    async def _indexed(
        self, stored: Stored, wanted: Stored, added: dict[str, frozenset[str]], *, again: bool = False
    ) -> Stored:
        """Return a vertex to store, once its terms are in the index."""
        new = replace(wanted, created_at=wanted.created_at or self._clock().isoformat(), index=wording.RULE)
        indexed = stored.label is not None and stored.index == wording.RULE and not again
        if indexed and _same_words(stored, wanted):
            return new
        terms = wording.terms_of(wanted.properties)
        if indexed and terms == wording.terms_of(stored.properties):
            return new
        stamp = next((one for one, its_terms in added.items() if its_terms == terms), "")
        if not stamp:
            stamp = postings.new_stamp()
            added[stamp] = terms
            await self._index.add(stamp, new.id, terms)
        return replace(new, stamp=stamp)

    def _body_of(self, record: Record) -> bytes:
        return vertices.seal(vertices.read(record, self._codec), self._codec)


def _head_of(stored: Stored) -> EntryHead | None:
    return head_of(stored.properties) if stored.label == LABEL else None


def _found(stored: Stored) -> Stored:
    """Return a vertex that exists. Raises `VertexNotFound` if it does not exist."""
    if stored.label is None:
        raise VertexNotFound("no vertex has this id")
    return stored


def _same_words(stored: Stored, wanted: Stored) -> bool:
    """Return whether the indexed properties are the same, which is cheaper than computing the terms."""
    names = (*wording.WORDS_OF, *wording.EXACT, "superseded_by")
    before, after = ({name: one.properties.get(name) for name in names} for one in (stored, wanted))
    return same_properties(before, after)
