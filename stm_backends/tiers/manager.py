"""The manager of the three tiers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, cast

from stm_backends.drivers.checks import require_count
from stm_backends.errors import ConfigurationError
from stm_backends.guarded import guarded_utc_clock, utc_now
from stm_backends.telemetry.guarded import guarded
from stm_backends.telemetry.observer import SILENT, Observer
from stm_backends.tiers import relevance
from stm_backends.tiers.backend_graph import BackendGraph
from stm_backends.tiers.embedding import Embedder
from stm_backends.tiers.entry import MemoryEntry, MemoryTier
from stm_backends.tiers.fleeting import FleetingMemory
from stm_backends.tiers.gc import MemoryGarbageCollector
from stm_backends.tiers.graph import GraphBackend
from stm_backends.tiers.long_term import LongTermMemory
from stm_backends.tiers.short_term import ShortTermMemory

if TYPE_CHECKING:
    from stm_backends.backend import Backend

_ALL: Final = (MemoryTier.FLEETING, MemoryTier.SHORT_TERM, MemoryTier.LONG_TERM)


class MemoryManager:
    """Fleeting, short-term and long-term memory, with the garbage collector that maintains them.

    All arguments are optional: without a model, summaries are cut text, and without a graph, long-term memory
    is kept in this process. To share long-term memory, pass a `graph_backend`, or a `backend` and its `owner`
    (tenant and user). `llm_provider` has `generate(messages=...)` or is a function of the messages.
    `embedder` is an async function from texts to vectors. `recall_cosine`, `duplicate_cosine` and
    `hold_on_outage` are described in `LongTermMemory`.

    `session_id` names the summary in long-term memory. To share the session, too, pass a
    `SharedShortTermMemory` as `short_term`. `observer` is notified of promoted, pruned and merged entries,
    and defaults to that of `backend`. Raises `ConfigurationError` for arguments of the wrong type, and if the
    session and the graph belong to different users.
    """

    def __init__(  # noqa: PLR0913 -- one for each part; none is needed
        self,
        graph_backend: GraphBackend | None = None,
        llm_provider: Any = None,
        backend: Backend | None = None,
        owner: tuple[str, str] | None = None,
        embedder: Embedder | None = None,
        *,
        session_id: str | None = None,
        short_term: ShortTermMemory | None = None,
        observer: Observer | None = None,
        recall_cosine: float = relevance.RECALL_COSINE,
        duplicate_cosine: float = relevance.DUPLICATE_COSINE,
        hold_on_outage: bool = False,
        clock: Callable[[], datetime] = utc_now,
    ) -> None:
        if graph_backend is not None and backend is not None:
            raise ConfigurationError("pass graph_backend, or backend and owner, not both")
        if (backend is None) != (owner is None):
            raise ConfigurationError("backend and owner must be passed together")
        if backend is not None and owner is not None:
            graph_backend = BackendGraph(backend, owner, clock=clock)
        if not isinstance(cast("object", short_term), ShortTermMemory | None):
            raise ConfigurationError(f"short_term must be a ShortTermMemory, not {type(short_term).__name__}")
        if short_term is not None and session_id is not None:
            raise ConfigurationError("pass session_id to your short-term memory instead")
        if embedder is not None and not callable(embedder):
            raise ConfigurationError("embedder must be an async function of a list of texts")
        if observer is None:
            observer = SILENT if backend is None else backend.observer
        self.observer = observer = guarded(observer)
        self.now = clock = guarded_utc_clock(clock, observer.function_failed)
        self.fleeting = FleetingMemory(clock=clock)
        if short_term is None:
            short_term = ShortTermMemory(
                session_id=session_id,
                embedder=embedder,
                recall_cosine=recall_cosine,
                observer=observer,
                clock=clock,
            )
        self.short_term = short_term
        self.long_term = LongTermMemory(
            graph_backend,
            embedder=embedder,
            recall_cosine=recall_cosine,
            duplicate_cosine=duplicate_cosine,
            hold_on_outage=hold_on_outage,
            observer=observer,
            clock=clock,
        )
        self.owner = _owner_of(graph_backend, self.short_term)
        self.gc = MemoryGarbageCollector(self, llm_provider=llm_provider)

    async def remember(
        self,
        key: str,
        value: Any,
        tier: MemoryTier = MemoryTier.SHORT_TERM,
        importance: float = 0.5,
        tags: Sequence[str] | None = None,
        source_agent: str = "",
        source_run_id: str = "",
    ) -> MemoryEntry:
        """Store a value in a tier, replacing any with the same key there, and return its entry.

        The tier keeps the higher importance of the two and adds up their accesses; the returned entry has the
        given importance. Raises `ConfigurationError` for an importance outside [0, 1].
        """
        now = self.now()
        entry = MemoryEntry(
            key,
            value,
            MemoryTier(tier),
            created_at=now,
            last_accessed=now,
            importance=importance,
            source_agent=source_agent,
            source_run_id=source_run_id,
            tags=[] if tags is None else tags,  # pyright: ignore[reportArgumentType] -- checked, and copied to a list
        )
        if entry.tier is MemoryTier.FLEETING:
            entry.importance = 0.0
            await self.fleeting.remember(key, value)
            return entry
        entry = entry.copied()
        if entry.tier is MemoryTier.SHORT_TERM:
            await self.short_term.remember(entry)
        else:
            await self.long_term.remember(entry)
        return entry

    async def recall(self, query: str, tiers: Iterable[MemoryTier] | None = None) -> list[MemoryEntry]:
        """Return the entries of the tiers that match the query, the most relevant first.

        All tiers are searched if none are given. Each result counts as an access.
        """
        if not isinstance(cast("object", query), str):
            raise ConfigurationError(f"query must be a string, not {type(query).__name__}")
        if isinstance(tiers, (str, MemoryTier)):
            raise ConfigurationError("tiers must be a list of tiers")
        wanted = {*_ALL} if tiers is None else {MemoryTier(tier) for tier in tiers}
        found: list[MemoryEntry] = []
        if MemoryTier.FLEETING in wanted:
            found += await self.fleeting.recall(query)
        if MemoryTier.SHORT_TERM in wanted:
            found += await self.short_term.recall(query)
        if MemoryTier.LONG_TERM in wanted:
            found += await self.long_term.recall(query)
        return self._ranked(found)

    async def forget(self, key: str, tier: MemoryTier | None = None) -> None:
        """Remove an entry from a tier, or from all tiers if none is given."""
        for one in _ALL if tier is None else (MemoryTier(tier),):
            if one is MemoryTier.FLEETING:
                await self.fleeting.forget(key)
            elif one is MemoryTier.SHORT_TERM:
                await self.short_term.forget(key)
            else:
                await self.long_term.forget(key)

    async def get_context_window(self, max_tokens: int = 4000) -> list[MemoryEntry]:
        """Return the most relevant entries of short-term and long-term memory that fit into the budget.

        A token is four characters of a key and its content. Each key occurs once: the entry that was created
        later is used, or the short-term one. A summary of this session in long-term memory is left out. Only
        the returned entries count as accessed.
        """
        if max_tokens != 0:
            require_count("max_tokens", max_tokens)
        entries = {one.key: one for one in await self.short_term.listed() if one.superseded_by is None}
        heads = await self.long_term.heads()
        heads.pop(self.short_term.summary_key or "", None)
        for key in entries.keys() & heads.keys():
            if heads[key].created_at > entries[key].created_at.timestamp():
                del entries[key]
            else:
                del heads[key]
        now = self.now()
        sizes = {key: relevance.size_of(key, one.content) for key, one in entries.items()}
        sizes |= {key: head.size for key, head in heads.items()}
        scores = {key: one.relevance_at(now) for key, one in entries.items()}
        scores |= {key: head.relevance_at(now.timestamp()) for key, head in heads.items()}
        ranked = sorted(scores, key=lambda key: scores[key], reverse=True)
        fitting = relevance.within_budget([sizes[key] for key in ranked], max_tokens)
        chosen = [ranked[position] for position in fitting]
        # Entries that another task or process removed or replaced by now are left out.
        touched = await self.short_term.touch(entries[key] for key in chosen if key in entries)
        opened = await self.long_term.opened({key: heads[key] for key in chosen if key in heads})
        return self._ranked([*(one for one in touched if one.content == entries[one.key].content), *opened])

    async def run_gc(self) -> None:
        """Maintain short-term memory, then long-term memory as `gc.on_idle` does.

        In short-term memory, it removes irrelevant entries and duplicates and, with a model, summarizes all
        but the 10 most recent entries. Entries that are due for long-term memory are set aside until the
        session ends.
        """
        await self.gc.auto_forget(MemoryTier.SHORT_TERM)
        await self.gc.prune_duplicates(MemoryTier.SHORT_TERM)
        if self.gc.llm_provider is not None:
            await self.short_term.summarize(self.gc.llm_provider)
        await self.gc.on_idle()

    def _ranked(self, entries: Iterable[MemoryEntry]) -> list[MemoryEntry]:
        now = self.now()
        return sorted(entries, key=lambda one: one.relevance_at(now), reverse=True)


def _owner_of(graph: GraphBackend | None, short_term: ShortTermMemory) -> tuple[str, str] | None:
    """Return the tenant and user that the memories belong to, if known."""
    of_graph = graph.owner if isinstance(graph, BackendGraph) else None
    if of_graph is not None and short_term.owner not in (None, of_graph):
        raise ConfigurationError("the graph and the short-term memory belong to different users")
    return of_graph or short_term.owner
