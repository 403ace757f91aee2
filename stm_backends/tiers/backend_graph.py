"""A graph in a datastore, shared by every process that opens it. The layout is that of decision 0035."""

from __future__ import annotations

import asyncio
import copy
import logging
import random
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from stm_backends.drivers.contract import ABSENT, KEEP, Key, Record, new_version
from stm_backends.errors import OutcomeUnknown, StorageError, TooLarge, Unavailable, located
from stm_backends.records import keys, operations
from stm_backends.tiers import postings, vertices
from stm_backends.tiers.graph import PAGE, Change, Properties, Vertex, VertexNotFound
from stm_backends.tiers.vertices import Stored

if TYPE_CHECKING:
    from stm_backends.backend import Backend

logger = logging.getLogger("stm_backends")

FOLD_AT: Final = 64
"""After how many entries a tail is folded into its body."""

ROUNDS: Final = 64
"""How often a change starts again because another process has changed the vertex."""

AT_ONCE: Final = 64
"""How many records are loaded concurrently."""

_Decision: TypeAlias = tuple[str, Mapping[str, Any]] | None
"""The label and the properties that a vertex is to have; `None` for no vertex."""


class BackendGraph:
    """The graph of one owner, a tenant and a user, on a backend. Implements `SharedGraph`.

    Reads and writes nothing when it is made. The backend must be open, and stays open. `clock` returns the
    time of creation of vertices.
    """

    def __init__(
        self,
        backend: Backend,
        owner: tuple[str, str],
        *,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._driver = backend.driver
        self._codec = backend.codec
        self._directory = backend.directory
        self.owner = self._owner = (owner[0], owner[1])
        self._scope = keys.scope(*self._owner, "graph")
        self._clock = clock

    # Vertices

    async def add_vertex(self, vertex_id: str, label: str, properties: dict[str, Any]) -> None:
        """Store a vertex; see `GraphBackend`. Its edges and its time of creation stay."""
        await self._change(vertex_id, lambda stored: (label, properties))

    async def update_vertex(self, vertex_id: str, properties: dict[str, Any]) -> None:
        """Merge properties into those that are stored now. Raises `VertexNotFound` if there is no vertex."""

        def merged(stored: Stored) -> _Decision:
            if stored.label is None:
                raise VertexNotFound("there is no vertex with this id")
            return stored.label, {**stored.properties, **properties}

        await self._change(vertex_id, merged)

    async def change_vertex(self, vertex_id: str, label: str, change: Change) -> dict[str, Any] | None:
        """Replace the properties by `change(properties)`, atomically; see `SharedGraph`.

        Takes two round trips if the words of the vertex do not change.
        """

        def changed(stored: Stored) -> _Decision:
            exists = stored.label is not None
            properties = change(copy.deepcopy(stored.properties) if exists else None)
            return (
                None
                if properties is None
                else (stored.label if stored.label is not None else label, properties)
            )

        return await self._change(vertex_id, changed)

    async def query_vertex(self, vertex_id: str) -> dict[str, Any] | None:
        """Return a vertex, or `None`."""
        stored = await self._load(vertex_id)
        return None if stored.label is None else stored.vertex()

    async def list_vertices(self, label: str) -> AsyncIterator[list[dict[str, Any]]]:
        """Yield the vertices with a label, in pages of at most `PAGE`, in any order."""
        names: list[str] = []
        async for name in operations.names_of(self._driver, self._scope, keys.VERTICES):
            names.append(name)
            if len(names) == PAGE:
                yield await self._labelled(names, label)
                names = []
        if names:
            yield await self._labelled(names, label)

    async def _labelled(self, names: list[str], label: str) -> list[Vertex]:
        found = await self._each([Key(self._scope, name) for name in names])
        return [stored.vertex() for stored in found if stored.label == label]

    async def clear(self) -> None:
        """Remove all vertices and edges, and the index."""
        async for name in operations.names(self._driver, self._scope):
            where = Key(self._scope, name)
            await operations.retried(partial(operations.erase, self._driver, where))
        await self._directory.forget_if_unused(*self._owner)

    # Searching

    async def search_vertices(self, label: str, text: str, *, limit: int = 100) -> list[dict[str, Any]]:
        """Return at most `limit` vertices with a label and any of the words of a text, best first.

        A word counts the more the fewer vertices have it. Words are those of `key`, `content` and `tags`.
        Superseded vertices are not found. Loads a record for each word, and the vertices that are returned,
        however many there are.
        """
        words = postings.words_of(text)
        return await self._found(words, label, limit=limit)

    async def find_vertices(self, label: str, name: str, value: str) -> list[dict[str, Any]]:
        """Return all vertices with a label and this value of a property, which is one of `postings.EXACT`."""
        if name not in postings.EXACT:
            raise ValueError(f"{name!r} is not indexed; {', '.join(postings.EXACT)} are")
        return await self._found([postings.exact_term(name, value)], label)

    async def _found(self, terms: Iterable[str], label: str, *, limit: int | None = None) -> list[Vertex]:
        wanted = frozenset(terms)
        # Of those that are left out, some may take the place of what is not stored any more.
        most = None if limit is None else 4 * limit + AT_ONCE
        ids = postings.ranked(await self._postings(wanted), most)
        found: list[Vertex] = []
        for start in range(0, len(ids), AT_ONCE):
            if limit is not None and len(found) >= limit:
                break
            loaded = await self._each([self._at(one) for one in ids[start : start + AT_ONCE]])
            # The index may have more than is stored.
            found += [
                stored.vertex()
                for stored in loaded
                if stored.label == label and wanted & postings.terms_of(stored.properties)
            ]
        return found if limit is None else found[:limit]

    async def _postings(self, terms: frozenset[str]) -> dict[str, dict[str, str]]:
        """Return the vertex ids of each term that has any, by stamp."""

        async def of(bucket: tuple[int, list[str]]) -> dict[str, dict[str, str]]:
            number, some = bucket
            record = await self._driver.load(keys.postings_key(*self._owner, number))
            with located(self._driver.name, "search"):
                found = postings.read(record, self._codec).terms
            return {term: found[term] for term in some if found.get(term)}

        pages = await operations.together(list(postings.by_bucket(terms).items()), of)
        return {term: found for page in pages for term, found in page.items()}

    # Edges

    async def add_edge(self, source_id: str, target_id: str, label: str, properties: dict[str, Any]) -> None:
        """Store a directed edge with two appends; see `GraphBackend`."""
        source, target = vertices.seal_halves(source_id, target_id, label, properties, self._codec)
        # In this order: without the second one there is no edge, or the one before has its properties.
        async with self._directory.listed(self._owner) as listing:
            listing.created |= await self._append(self._at(source_id), source, self._fold_vertex)
            listing.created |= await self._append(self._at(target_id), target, self._fold_vertex)

    async def query_children(self, vertex_id: str) -> list[dict[str, Any]]:
        """Return the vertices to which edges lead from this one, once for each edge."""
        stored = await self._load(vertex_id)
        if stored.label is None:
            return []
        others = await self._by_id(target for target, _ in stored.out)
        return [
            {**others[target].vertex(), "edge_label": label, "edge_properties": copy.deepcopy(properties)}
            for (target, label), properties in stored.out.items()
            if others[target].label is not None and (vertex_id, label) in others[target].into
        ]

    async def query_parents(self, vertex_id: str) -> list[dict[str, Any]]:
        """Return the vertices from which edges lead to this one, once for each edge."""
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
        ids = postings.ranked(await self._postings(frozenset([postings.exact_term("run_id", run_id)])))
        found = await self._by_id(sorted(ids))
        known = {
            one: stored
            for one, stored in found.items()
            if stored.label is not None and stored.properties.get("run_id") == run_id
        }
        edges = [
            {"source_id": source, "target_id": target, "label": label, "properties": properties}
            for source, stored in known.items()
            for (target, label), properties in stored.out.items()
            if target in known and (source, label) in known[target].into
        ]
        return {"vertices": [stored.vertex() for stored in known.values()], "edges": edges}

    # Records

    def _at(self, vertex_id: str) -> Key:
        return keys.vertex_key(*self._owner, vertex_id)

    async def _load(self, vertex_id: str) -> Stored:
        return await self._read(self._at(vertex_id))

    async def _read(self, where: Key) -> Stored:
        record = await self._driver.load(where)
        with located(self._driver.name, "load"):
            return vertices.read(record, self._codec)

    async def _each(self, places: list[Key]) -> list[Stored]:
        found: list[Stored] = []
        for start in range(0, len(places), AT_ONCE):
            found += await operations.together(places[start : start + AT_ONCE], self._read)
        return found

    async def _by_id(self, ids: Iterable[str]) -> dict[str, Stored]:
        wanted = list(dict.fromkeys(ids))
        return dict(zip(wanted, await self._each([self._at(one) for one in wanted]), strict=True))

    async def _change(self, vertex_id: str, decide: Callable[[Stored], _Decision]) -> Properties | None:
        """Write what `decide` makes of the vertex as it is stored now; returns the properties then stored.

        What was added to the index for an attempt that lost its race is removed again.
        """
        where, added = self._at(vertex_id), dict[str, frozenset[str]]()
        used = ""
        try:
            for attempt in range(ROUNDS):
                stored = await self._read(where)
                decision = decide(stored)
                if decision is None:
                    if stored.version is None or await self._deleted(where, stored):
                        return None
                else:
                    label, properties = decision
                    if (label, dict(properties)) == (stored.label, stored.properties):
                        return stored.properties
                    vertices.require_properties(properties)
                    new = await self._indexed(
                        vertex_id, stored, label, copy.deepcopy(dict(properties)), added
                    )
                    used = new.stamp
                    if await self._replaced(where, stored, new):
                        if stored.stamp not in ("", new.stamp):
                            await self._unindex({stored.stamp: postings.terms_of(stored.properties)})
                        return new.properties
                    used = ""
                await asyncio.sleep(random.uniform(0, 0.001 * min(attempt, 20)))
            raise Unavailable("a vertex kept changing", backend=self._driver.name, operation="replace")
        except OutcomeUnknown:
            # It may have been written, with what was added to the index last.
            added.pop(used, None)
            raise
        except asyncio.CancelledError:
            # A search ignores what is left.
            added.clear()
            raise
        except StorageError:
            used = ""
            raise
        finally:
            added.pop(used, None)
            if added:
                await self._unindex(added)

    async def _indexed(
        self,
        vertex_id: str,
        stored: Stored,
        label: str,
        properties: Properties,
        added: dict[str, frozenset[str]],
    ) -> Stored:
        """Return a vertex to store, once its terms are in the index."""
        terms = postings.terms_of(properties)
        new = replace(
            stored,
            id=vertex_id,
            label=label,
            properties=properties,
            created_at=stored.created_at if stored.label is not None else self._clock().isoformat(),
            index=postings.RULE,
        )
        if (
            stored.label is not None
            and stored.index == postings.RULE
            and terms == postings.terms_of(stored.properties)
        ):
            return new
        stamp = next((one for one, its_terms in added.items() if its_terms == terms), "")
        if not stamp:
            stamp = postings.new_stamp()
            added[stamp] = terms
            await self._index(postings.by_bucket(terms), partial(postings.seal_added, stamp, vertex_id))
        return replace(new, stamp=stamp)

    async def _index(self, buckets: dict[int, list[str]], seal: Callable[..., bytes]) -> None:
        async def add(bucket: tuple[int, list[str]]) -> bool:
            number, terms = bucket
            where = keys.postings_key(*self._owner, number)
            return await self._append(where, seal(terms, self._codec), self._fold_bucket)

        async with self._directory.listed(self._owner) as listing:
            listing.created = any(await operations.together(list(buckets.items()), add))

    async def _unindex(self, stamps: Mapping[str, frozenset[str]]) -> None:
        """Remove stamps from the index; only logs a failure, because a search ignores what is left."""
        try:
            for stamp, terms in stamps.items():
                await self._index(postings.by_bucket(terms), partial(postings.seal_dropped, stamp))
        except StorageError as error:
            logger.warning("could not remove words from the index of a graph: %s", error)

    async def _replaced(self, where: Key, stored: Stored, new: Stored) -> bool:
        """Store a vertex over the one that was read, with its edges; `False` after a lost race."""
        body, version = vertices.seal(new, self._codec), new_version()
        expect = ABSENT if stored.version is None else stored.version
        drop = min(stored.length, self._driver.traits.max_drop)
        ttl = None if stored.version is None else KEEP
        async with self._directory.listed(self._owner) as listing:
            listing.created = expect is ABSENT
            return await operations.retried(
                lambda: self._driver.replace(where, body, version=version, expect=expect, drop=drop, ttl=ttl)
            )

    async def _deleted(self, where: Key, stored: Stored) -> bool:
        """Delete the vertex that was read, and its halves of edges; `False` if it may still exist."""
        version = stored.version or ""
        if not await operations.retried(lambda: self._driver.delete(where, expect=version)):
            return False
        if stored.stamp:
            await self._unindex({stored.stamp: postings.terms_of(stored.properties)})
        return True

    # Tails

    async def _append(self, where: Key, entry: bytes, fold: Callable[[Record], bytes]) -> bool:
        """Append an entry; returns whether that may have created the record.

        Folds a long tail afterwards, and a full record before the next attempt.
        """
        attempt = 0
        while True:
            attempt += 1
            try:
                appended = await operations.append(self._driver, where, entry, ttl=None)
                break
            except TooLarge as error:
                if error.what == "entry" or attempt == ROUNDS:
                    raise
                await self._fold(where, fold)
        if appended.length % FOLD_AT == 0:
            try:
                await self._fold(where, fold)
            except StorageError as error:
                logger.warning("could not fold a record of a graph; a later write will: %s", error)
        return appended.created

    async def _fold(self, where: Key, fold: Callable[[Record], bytes]) -> None:
        """Move the entries of a tail into the body; another process may do so first."""
        record = await self._driver.load(where)
        if record is None or not record.tail:
            return
        with located(self._driver.name, "fold"):
            body, version = fold(record), new_version()
        drop = min(len(record.tail), self._driver.traits.max_drop)
        await operations.retried(
            lambda: self._driver.replace(
                where, body, version=version, expect=record.version, drop=drop, ttl=KEEP
            )
        )

    def _fold_vertex(self, record: Record) -> bytes:
        return vertices.seal(vertices.read(record, self._codec), self._codec)

    def _fold_bucket(self, record: Record) -> bytes:
        return postings.seal(postings.read(record, self._codec), self._codec)
