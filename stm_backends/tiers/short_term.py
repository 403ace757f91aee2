"""Short-term memory: what one session keeps, in this process."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import datetime
from typing import Any, Final

from stm_backends.drivers.checks import require_count
from stm_backends.errors import ConfigurationError
from stm_backends.tiers import relevance
from stm_backends.tiers.embedding import Embedder, embed
from stm_backends.tiers.entry import MemoryEntry, MemoryTier, utc_now
from stm_backends.tiers.model import ask, summary_prompt

SUMMARY_KEY: Final = "__summary__"
SUMMARY_IMPORTANCE: Final = 0.8

KEPT: Final = 10
"""How many of the most recent entries `summarize` leaves as they are."""

MOST_CHARACTERS: Final = 2000
"""The most characters of a summary without a model."""

SUMMARY_TOKENS: Final = MOST_CHARACTERS // relevance.CHARACTERS_PER_TOKEN

_ATTEMPTS: Final = 3
"""How often a summary is requested if what it contains was forgotten while the model wrote it."""


class ShortTermMemory:
    """The entries of one session, at most `max_entries`.

    Every `refresh_interval` calls of `remember`, and whenever there are too many entries, those with a
    relevance below `relevance_threshold` are removed, then the least relevant ones until the size fits. An
    entry that is due for long-term memory and is removed by that or by a summary is set aside until the
    session ends.

    Entries are copied on the way in and out. `session_id` names the summary in long-term memory.
    """

    def __init__(
        self,
        max_entries: int = 100,
        relevance_threshold: float = 0.15,
        refresh_interval: int = 10,
        *,
        session_id: str | None = None,
        embedder: Embedder | None = None,
        clock: Callable[[], datetime] = utc_now,
    ) -> None:
        require_count("max_entries", max_entries)
        require_count("refresh_interval", refresh_interval)
        if not 0 <= relevance_threshold <= 1:
            raise ConfigurationError("relevance_threshold must be within [0, 1]")
        self.max_entries = max_entries
        self.relevance_threshold = relevance_threshold
        self.refresh_interval = refresh_interval
        self._embedder = embedder
        self._clock = clock
        self._entries: dict[str, MemoryEntry] = {}
        self._set_aside: dict[str, MemoryEntry] = {}
        self._vectors: dict[str, tuple[str, list[float]]] = {}
        self._operations = 0
        self._session_id = session_id or uuid.uuid4().hex
        self._summary_session = self._session_id
        self._ended = False
        self._summarizing = asyncio.Lock()

    async def remember(self, entry: MemoryEntry) -> None:
        """Store an entry; it replaces one with the same key and becomes the most recent."""
        stored = entry.copied(tier=MemoryTier.SHORT_TERM)
        if self._ended:
            self._ended, self._session_id = False, uuid.uuid4().hex
        self._remove(entry.key)
        self._entries[entry.key] = stored
        self._operations += 1
        if self._operations % self.refresh_interval == 0 or len(self._entries) > self.max_entries:
            self._refresh()

    async def recall(self, query: str) -> list[MemoryEntry]:
        """Return the entries whose key, tags or content contain the query, the most relevant first.

        With an embedder, entries of a similar meaning are found too. Each result counts as an access.
        """
        near = await self._near(query)
        now = self._clock()
        found = [
            key
            for key, one in self._entries.items()
            if key in near or relevance.matches(query, key, one.tags, one.content)
        ]
        return self._accessed(found, now)

    async def touch(self, entries: Iterable[MemoryEntry]) -> list[MemoryEntry]:
        """Count an access to entries; returns those that still exist."""
        return self._accessed([one.key for one in entries if one.key in self._entries], self._clock())

    async def get_recent(self, n: int) -> list[MemoryEntry]:
        """Return the `n` most recently stored entries, oldest first. This does not count as an access."""
        if n < 0:
            raise ConfigurationError("n must be at least 0")
        return [one.copied() for one in list(self._entries.values())[-n or len(self._entries) :]]

    async def forget(self, key: str) -> None:
        """Remove an entry, if there is one; it will not be promoted."""
        self._remove(key)

    async def clear(self) -> None:
        """Remove all entries, including those set aside for long-term memory."""
        self._entries.clear()
        self._set_aside.clear()
        self._vectors.clear()

    async def summarize(self, llm_provider: Any = None) -> str:
        """Replace all but the 10 most recent entries by one with the key `__summary__`; return its text.

        The new summary covers the previous one. Without a model, texts are joined and cut to 2,000
        characters. An empty answer changes nothing. An entry that is replaced while the model writes keeps
        its new content; if one is forgotten, or another summary is stored, the answer is discarded and
        requested again. Raises what the provider raises; then nothing has changed.
        """
        async with self._summarizing:
            for _ in range(_ATTEMPTS):
                batch = self._to_summarize()
                previous = self._entries.get(SUMMARY_KEY)
                if not batch:
                    break
                text = await self._summary_of(previous, batch, llm_provider)
                if not text:
                    break
                current = self._entries.get(SUMMARY_KEY)
                if _same(previous, current) and all(one.key in self._entries for one in batch):
                    self._put_summary(text, batch)
                    break
            summary = self._entries.get(SUMMARY_KEY)
            return "" if summary is None else str(summary.content)

    def _to_summarize(self) -> list[MemoryEntry]:
        return [one for key, one in self._entries.items() if key != SUMMARY_KEY][:-KEPT]

    async def _summary_of(
        self, previous: MemoryEntry | None, batch: list[MemoryEntry], llm_provider: Any
    ) -> str:
        if llm_provider is not None:
            entries = [*([previous] if previous else []), *batch]
            described = [(one.key, one.importance, one.content) for one in entries]
            return await ask(llm_provider, summary_prompt(described, SUMMARY_TOKENS))
        newer = [f"[{one.key}] {one.content}" for one in batch]
        return relevance.truncated(str(previous.content) if previous else "", newer, MOST_CHARACTERS)

    def _put_summary(self, text: str, batch: Iterable[MemoryEntry]) -> None:
        for one in batch:
            if _same(one, self._entries[one.key]):
                self._set_aside_if_due(one.key)
        now = self._clock()
        summary = MemoryEntry(
            SUMMARY_KEY,
            text,
            MemoryTier.SHORT_TERM,
            created_at=now,
            last_accessed=now,
            importance=SUMMARY_IMPORTANCE,
        )
        # The oldest entry, because it covers what was before all others.
        self._entries.pop(SUMMARY_KEY, None)
        self._entries = {SUMMARY_KEY: summary, **self._entries}
        self._summary_session = self._session_id

    def promotable(self) -> list[tuple[str, MemoryEntry]]:
        """Return the entries due for long-term memory, each with its key there.

        The key of a summary there contains the session, so that the summaries of two sessions do not replace
        each other.
        """
        entries = [*self._set_aside.values(), *self._entries.values()]
        return [
            (self._summary_key() if one.key == SUMMARY_KEY else one.key, one.copied())
            for one in entries
            if relevance.is_promoted(one.importance, one.access_count)
        ]

    def _summary_key(self) -> str:
        return f"{SUMMARY_KEY}:{self._summary_session}"

    def was_promoted(self, entry: MemoryEntry) -> None:
        """Drop an entry that was set aside, now that long-term memory has it."""
        if _same(self._set_aside.get(entry.key), entry):
            del self._set_aside[entry.key]

    def end_session(self) -> None:
        """Give the next entry a new session."""
        self._ended = True

    async def listed(self) -> list[MemoryEntry]:
        """Return copies of all entries."""
        return self.entries

    async def vectors(self) -> dict[str, list[float]]:
        """Return the vectors of the entries by key; none without an embedder."""
        return {} if self._embedder is None else await self._all_vectors(self._embedder)

    async def discard(self, entry: MemoryEntry) -> bool:
        """Remove an entry unless it was changed or accessed since; say whether it was removed."""
        if not _same(self._entries.get(entry.key), entry, exactly=True):
            return False
        self._remove(entry.key)
        return True

    async def absorb(self, loser: MemoryEntry, survivor: MemoryEntry) -> bool:
        """Merge an entry into one that it duplicates, unless either was changed since."""
        kept, merged = self._entries.get(survivor.key), self._entries.get(loser.key)
        if kept is None or merged is None or not _same(kept, survivor) or not _same(merged, loser):
            return False
        self._entries[survivor.key] = replace(kept, **relevance.absorbed(vars(kept), vars(merged)))
        self._remove(loser.key)
        return True

    async def rewrite(self, entry: MemoryEntry, content: Any) -> bool:
        """Replace the content of an entry unless it was changed since; say whether it was replaced."""
        current = self._entries.get(entry.key)
        if current is None or not _same(current, entry):
            return False
        self._entries[entry.key] = current.copied(content=content)
        return True

    @property
    def entries(self) -> list[MemoryEntry]:
        """Copies of all entries, in the order in which they were stored."""
        return [one.copied() for one in self._entries.values()]

    @property
    def size(self) -> int:
        """The number of entries."""
        return len(self._entries)

    def _accessed(self, keys: Iterable[str], now: datetime) -> list[MemoryEntry]:
        found: list[MemoryEntry] = []
        for key in keys:
            self._entries[key] = self._entries[key].accessed(now)
            found.append(self._entries[key].copied())
        return sorted(found, key=lambda one: one.relevance_at(now), reverse=True)

    def _refresh(self) -> None:
        now = self._clock()
        scores = {key: one.relevance_at(now) for key, one in self._entries.items()}
        # The order is stable: of equally relevant entries the oldest is removed first.
        ranked = sorted(scores, key=lambda key: scores[key])
        surplus = len(ranked) - self.max_entries
        for position, key in enumerate(ranked):
            if position < surplus or scores[key] < self.relevance_threshold:
                self._set_aside_if_due(key)

    def _set_aside_if_due(self, key: str) -> None:
        """Remove an entry, and keep it for long-term memory if it is due."""
        entry = self._entries[key]
        self._remove(key)
        if key != SUMMARY_KEY and relevance.is_promoted(entry.importance, entry.access_count):
            self._set_aside[key] = entry

    def _remove(self, key: str) -> None:
        self._entries.pop(key, None)
        self._set_aside.pop(key, None)
        self._vectors.pop(key, None)

    async def _near(self, query: str) -> set[str]:
        if self._embedder is None or not self._entries or not query.strip():
            return set()
        vectors = await self._all_vectors(self._embedder)
        [wanted] = await embed(self._embedder, [query])
        return {
            key
            for key, vector in vectors.items()
            if relevance.cosine(wanted, vector) >= relevance.SAME_MEANING
        }

    async def _all_vectors(self, embedder: Embedder) -> dict[str, list[float]]:
        texts = {key: str(one.content) for key, one in self._entries.items()}
        new = [key for key, text in texts.items() if self._vectors.get(key, ("", []))[0] != text]
        for key, vector in zip(new, await embed(embedder, [texts[key] for key in new]), strict=True):
            if key in self._entries:
                self._vectors[key] = (texts[key], vector)
        return {key: self._vectors[key][1] for key in texts if key in self._vectors}


def _same(one: MemoryEntry | None, other: MemoryEntry | None, *, exactly: bool = False) -> bool:
    """Say whether two states of an entry have the same content; `exactly` compares accesses and tags too."""
    if one is None or other is None:
        return one is other
    if exactly:
        return one == other
    return one.content == other.content and one.created_at == other.created_at
