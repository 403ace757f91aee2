"""Maintenance of the tiers: forgetting, summaries, pruning, improvement, and the hooks."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, cast

from stm_backends.drivers.checks import require_count
from stm_backends.errors import ConfigurationError, StorageError
from stm_backends.telemetry.observer import MemoryEvent
from stm_backends.tiers import merging, relevance
from stm_backends.tiers.entry import MemoryEntry, MemoryTier, require_fraction
from stm_backends.tiers.holding import REFUSALS
from stm_backends.tiers.merging import WithVector
from stm_backends.tiers.model import ask, improvement_prompt, require_provider, summary, summary_prompt
from stm_backends.tiers.session import Promotion

if TYPE_CHECKING:
    from stm_backends.tiers.manager import MemoryManager


class _Maintained(Protocol):
    async def listed(self) -> list[MemoryEntry]: ...
    async def with_vectors(self) -> list[WithVector]: ...
    async def discard(self, entry: MemoryEntry) -> bool: ...
    async def absorb(self, loser: MemoryEntry, survivor: MemoryEntry) -> bool: ...
    async def rewrite(self, entry: MemoryEntry, content: Any) -> bool: ...


class MemoryGarbageCollector:
    """Maintains the tiers of a manager.

    An entry changed or accessed while it is being judged is kept. Fleeting memory has no relevance, so
    every method leaves it alone except the hooks.
    """

    def __init__(
        self,
        memory_manager: MemoryManager,
        llm_provider: Any = None,
        relevance_threshold: float = 0.15,
        duplicate_similarity_threshold: float = 0.7,
    ) -> None:
        require_provider(llm_provider)
        require_fraction("relevance_threshold", relevance_threshold)
        require_fraction("duplicate_similarity_threshold", duplicate_similarity_threshold)
        self._manager = memory_manager
        self.llm_provider = llm_provider
        self.relevance_threshold = relevance_threshold
        self.duplicate_similarity_threshold = duplicate_similarity_threshold

    async def auto_forget(self, tier: MemoryTier) -> int:
        """Remove the entries with a relevance below the threshold and return their number."""
        now = self._manager.now()
        return await self._discarded(
            tier,
            [one for one in await self._listed(tier) if one.relevance_at(now) < self.relevance_threshold],
        )

    async def summarize_context(self, entries: Sequence[MemoryEntry], max_tokens: int = 2000) -> str:
        """Return a summary of entries.

        Without a model, or if its answer is empty or it fails, which is logged, the texts are joined and cut
        to `max_tokens` tokens of four characters. Nothing is stored.
        """
        require_count("max_tokens", max_tokens)
        if not entries:
            return ""
        if self.llm_provider is not None:
            described = [(one.key, one.importance, one.content) for one in entries]
            prompt = summary_prompt(described, max_tokens)
            answer = await summary(self.llm_provider, prompt, self._manager.observer, entries[0].tier.value)
            if answer:
                return answer
        joined = "\n".join(f"[{one.key}] {one.content}" for one in entries)
        return joined[: max_tokens * relevance.CHARACTERS_PER_TOKEN]

    async def prune_by_relevance(self, tier: MemoryTier, keep_ratio: float = 0.7) -> int:
        """Remove the least relevant entries so that this share is kept, and return the number removed."""
        require_fraction("keep_ratio", keep_ratio)
        now = self._manager.now()
        ranked = sorted(await self._listed(tier), key=lambda one: one.relevance_at(now), reverse=True)
        return await self._discarded(tier, ranked[math.ceil(len(ranked) * keep_ratio - 1e-9) :])

    async def prune_by_staleness(self, tier: MemoryTier, max_age_days: float = 30) -> int:
        """Remove the entries that were last accessed more than `max_age_days` ago and return their number."""
        days = cast("object", max_age_days)
        if isinstance(days, bool) or not isinstance(days, (int, float)) or not days >= 0:
            raise ConfigurationError("max_age_days must be a number of days, at least 0")
        now = self._manager.now()
        return await self._discarded(
            tier,
            [
                one
                for one in await self._listed(tier)
                if relevance.days_between(one.last_accessed, now) > max_age_days
            ],
        )

    async def prune_duplicates(self, tier: MemoryTier) -> int:
        """Remove each entry that a more relevant one duplicates, and return the number removed.

        The survivor takes over their accesses, importance and tags.
        """
        store = self._store(tier)
        if store is None:
            return 0
        pairs = await merging.duplicates(
            await store.with_vectors(),
            self.duplicate_similarity_threshold,
            self._manager.long_term.duplicate_cosine,
            self._manager.now(),
        )
        merged = sum([await store.absorb(loser, survivor) for loser, survivor in pairs])
        return self._reported("merged", tier, merged)

    async def improve_memory(self, tier: MemoryTier) -> int:
        """Ask the model to correct and sharpen each entry, and return how many changed.

        Without a model, does nothing. An answer is ignored if it is empty or, for an entry that is not text,
        not JSON of the same type. An entry that was changed while the model answered keeps its change. Raises
        `Unavailable` if the model fails; entries improved before that stay improved.
        """
        if self.llm_provider is None:
            return 0
        store = self._store(tier)
        if store is None:
            return 0
        now = self._manager.now()
        entries = sorted(await store.listed(), key=lambda one: one.relevance_at(now), reverse=True)
        improved = 0
        for entry in entries:
            others = ((one.key, one.content) for one in entries if one is not entry)
            prompt = improvement_prompt(entry.key, entry.content, others)
            answer = await ask(self.llm_provider, prompt, self._manager.observer.function_failed)
            content = _content_in(answer, entry.content)
            if content is not None and content != entry.content:
                improved += await store.rewrite(entry, content)
        return improved

    async def on_turn_end(self) -> None:
        """Clear fleeting memory."""
        await self._manager.fleeting.clear()

    async def on_session_end(self) -> None:
        """Summarize short-term memory, promote its important entries, and clear fleeting memory.

        Entries with an importance of at least 0.5 or at least 3 accesses are promoted, whether or not they
        were summarized. A content is promoted once, even if several processes end a shared session at the
        same time or the session is ended again: later calls only update an entry that long-term memory still
        has. If the model fails, the summary is cut text; see `ShortTermMemory.summarize`. If long-term memory
        refuses an entry, for instance as too large, everything else is done and then the error is raised. If
        the graph fails, the error is raised and the session can be ended again.
        """
        # Once before the summary, so that the entries are safe even if the summary fails.
        await self._promote()
        try:
            await self._manager.short_term.summarize(self.llm_provider)
        except Exception:
            # Skipped after a cancellation, which an error of the graph would hide.
            await self._end_session()
            raise
        refused = await self._end_session()
        if refused is not None:
            raise refused

    async def on_idle(self) -> None:
        """Maintain long-term memory: forget, prune, deduplicate, consolidate and improve."""
        with self._manager.long_term.reading_once():
            await self.auto_forget(MemoryTier.LONG_TERM)
            await self.prune_by_staleness(MemoryTier.LONG_TERM, max_age_days=30)
            await self.prune_duplicates(MemoryTier.LONG_TERM)
            await self._manager.long_term.consolidate()
        await self.improve_memory(MemoryTier.LONG_TERM)

    async def _end_session(self) -> Exception | None:
        """Promote the due entries and end the session; returns the first error about a single entry."""
        refused = await self._promote()
        await self._manager.fleeting.clear()
        await self._manager.short_term.end_session()
        return refused

    async def _promote(self) -> Exception | None:
        """Promote the due entries. Returns the first error about a single entry, after trying all others."""
        short_term, done, refused = self._manager.short_term, list[Promotion](), None
        try:
            for one in await short_term.promotable():
                try:
                    promoted = await self._manager.long_term.promote(one.entry, again=one.again)
                except REFUSALS as error:
                    refused = refused or error
                else:
                    done += [one] if promoted else []
        except BaseException:
            # Raise the original error or cancellation, not the failure to note the promotions.
            with contextlib.suppress(StorageError):
                await short_term.was_promoted(done)
            raise
        await short_term.was_promoted(done)
        return refused

    async def _listed(self, tier: MemoryTier) -> list[MemoryEntry]:
        store = self._store(tier)
        return [] if store is None else await store.listed()

    async def _discarded(self, tier: MemoryTier, entries: Iterable[MemoryEntry]) -> int:
        store = self._store(tier)
        if store is None:
            return 0
        return self._reported("pruned", tier, sum([await store.discard(one) for one in entries]))

    def _reported(self, event: MemoryEvent, tier: MemoryTier, count: int) -> int:
        if count:
            self._manager.observer.memories(event, MemoryTier(tier).value, count)
        return count

    def _store(self, tier: MemoryTier) -> _Maintained | None:
        stores: dict[MemoryTier, _Maintained] = {
            MemoryTier.SHORT_TERM: self._manager.short_term,
            MemoryTier.LONG_TERM: self._manager.long_term,
        }
        return stores.get(MemoryTier(tier))


def _content_in(answer: str, content: Any) -> Any:
    """Return the content in a model's answer, in the form of the current one, or `None`."""
    if isinstance(content, str):
        return answer or None
    try:
        found = json.loads(answer)
    except ValueError:
        return None
    return found if type(found) is type(content) else None
