"""Short-term memory: the entries of one session, in this process or in a backend's conversation."""

from __future__ import annotations

import secrets
import uuid
from collections.abc import Callable, Collection, Iterable
from datetime import datetime
from typing import Any, Final, Protocol, cast

from stm_backends.drivers.checks import require_count
from stm_backends.errors import ConfigurationError, StmError
from stm_backends.guarded import guarded_utc_clock, utc_now
from stm_backends.memory.tasks import LoopLock
from stm_backends.telemetry.guarded import guarded
from stm_backends.telemetry.observer import SILENT, Observer
from stm_backends.tiers import relevance
from stm_backends.tiers.embedding import Embedder, GuardedEmbedder
from stm_backends.tiers.entry import (
    MemoryEntry,
    MemoryTier,
    Tier,
    require_fraction,
    require_is_entry,
)
from stm_backends.tiers.holding import report_uncounted
from stm_backends.tiers.merging import WithVector
from stm_backends.tiers.model import require_provider, summary, summary_prompt
from stm_backends.tiers.session import SUMMARY_KEY, Held, Operation, Promotion, Session

SUMMARY_IMPORTANCE: Final = 0.8

KEPT: Final = 10
"""Number of most recent entries that `summarize` leaves as they are."""

MOST_CHARACTERS: Final = 2000
"""Maximum length of a summary without a model, in characters."""

SUMMARY_TOKENS: Final = MOST_CHARACTERS // relevance.CHARACTERS_PER_TOKEN

_ATTEMPTS: Final = 3
"""Maximum number of requests for a summary if its entries are forgotten while the model writes it."""


class Journal(Protocol):
    """Carries out the operations of a session."""

    @property
    def known(self) -> Session:
        """The session as far as this process knows it."""
        ...

    async def read(self) -> Session:
        """Return the session as it is now."""
        ...

    async def write(self, operation: Operation) -> None:
        """Carry out an operation."""
        ...


class LocalJournal:
    """A session in this process."""

    def __init__(self, observer: Observer = SILENT) -> None:
        self.known = Session()
        self._observer = observer

    async def read(self) -> Session:
        return self.known

    async def write(self, operation: Operation) -> None:
        before = self.known.pruned
        self.known.apply(operation)
        report_pruned(self._observer, self.known.pruned - before)


class ShortTermMemory(Tier):
    """The entries of one session, at most `max_entries`, in this process.

    Every `refresh_interval` calls of `remember`, and whenever there are too many entries, those with a
    relevance below `relevance_threshold` are removed, then the least relevant ones until the rest fit. If an
    entry that is removed in this way, by the garbage collector or by a summary is due for long-term memory,
    it is set aside until the session ends.

    Entries are copied on the way in and out. `session_id` names the summary in long-term memory; use a
    different one for each session. With an `embedder`, `recall` also finds entries whose cosine similarity to
    the query is at least `recall_cosine`; each process computes the vectors that it needs.
    `SharedShortTermMemory` is the same for several processes.
    """

    def __init__(  # noqa: PLR0913 -- the specification's three, and one for each part
        self,
        max_entries: int = 100,
        relevance_threshold: float = 0.15,
        refresh_interval: int = 10,
        *,
        session_id: str | None = None,
        embedder: Embedder | None = None,
        recall_cosine: float = relevance.RECALL_COSINE,
        observer: Observer = SILENT,
        clock: Callable[[], datetime] = utc_now,
        journal: Journal | None = None,
    ) -> None:
        require_count("max_entries", max_entries)
        require_count("refresh_interval", refresh_interval)
        require_fraction("relevance_threshold", relevance_threshold)
        require_fraction("recall_cosine", recall_cosine)
        self.max_entries = max_entries
        self.relevance_threshold = relevance_threshold
        self.refresh_interval = refresh_interval
        self.owner: tuple[str, str] | None = None
        self._session_id = session_id or uuid.uuid4().hex
        self.recall_cosine = recall_cosine
        self._observer = observer = guarded(observer)
        self._embedder = None if embedder is None else GuardedEmbedder(embedder, observer.function_failed)
        self._clock = guarded_utc_clock(clock, observer.function_failed)
        self.journal = journal or LocalJournal(observer)
        self._vectors: dict[str, tuple[str, list[float]]] = {}
        self._summarizing = LoopLock()

    async def remember(self, entry: MemoryEntry) -> None:
        """Store an entry as the most recent one, replacing any with the same key.

        The higher importance of the two is kept, and their accesses are added up.
        """
        require_is_entry(entry)
        await self._write(
            "remember",
            entry=entry.copied(tier=MemoryTier.SHORT_TERM),
            renews=True,
            at=self._clock(),
            every=self.refresh_interval,
            most=self.max_entries,
            below=self.relevance_threshold,
        )

    async def recall(self, query: str) -> list[MemoryEntry]:
        """Return the entries whose key, tags or content contain the query, the most relevant first.

        With an embedder, entries with a similar meaning are found too. An entry with `superseded_by` is not
        found. Each result counts as an access; if that cannot be stored, it is logged and not raised.
        """
        session = await self.journal.read()
        near = await self._near(query, session)
        return await self._accessed(
            session,
            [
                one
                for key, one in session.entries.items()
                if one.entry.superseded_by is None
                and (key in near or relevance.matches(query, key, one.entry.tags, one.entry.content))
            ],
        )

    async def touch(self, entries: Iterable[MemoryEntry]) -> list[MemoryEntry]:
        """Count an access to entries, and return those that still exist."""
        session = await self.journal.read()
        held = session.entries
        return await self._accessed(session, [held[one.key] for one in entries if one.key in held])

    async def get_recent(self, n: int) -> list[MemoryEntry]:
        """Return the `n` most recently stored entries, newest first. This does not count as an access."""
        given = cast("object", n)
        if isinstance(given, bool) or not isinstance(given, int) or given < 0:
            raise ConfigurationError("n must be an integer, at least 0")
        return (await self.listed())[::-1][:n]

    async def forget(self, key: str) -> None:
        """Remove an entry if it exists; it will not be promoted."""
        session = await self.journal.read()
        if key in session.entries or any(one.entry.key == key for one in session.aside):
            await self._write("forget", key=key)

    async def clear(self) -> None:
        """Remove all entries, including those set aside for long-term memory."""
        if (await self.journal.read()).operations:
            await self._write("clear")

    async def summarize(self, llm_provider: Any = None) -> MemoryEntry | None:
        """Replace all but the 10 most recent entries by one with the key `__summary__`; return that entry.

        Returns `None` if there is no summary. The new summary covers the previous one. Without a model, or if
        it fails, which is logged, texts are joined and cut to 2,000 characters. An empty answer changes
        nothing. An entry that is replaced while the model writes keeps its new content. If an entry is
        forgotten meanwhile, or another summary stored, the answer is discarded and requested again.
        """
        require_provider(llm_provider)
        async with self._summarizing.here():
            session = await self.journal.read()
            for _ in range(_ATTEMPTS):
                batch = [one for key, one in session.entries.items() if key != SUMMARY_KEY][:-KEPT]
                if not batch:
                    break
                previous = session.entries.get(SUMMARY_KEY)
                text = await self._summary_of(previous, batch, llm_provider)
                if not text or await self._replaced_by_summary(session.id, text, previous, batch):
                    break
                session = await self.journal.read()
            stored = (await self.journal.read()).entries.get(SUMMARY_KEY)
            return None if stored is None else stored.entry.copied()

    async def _summary_of(self, previous: Held | None, batch: list[Held], llm_provider: Any) -> str:
        current = [one.entry for one in batch if one.entry.superseded_by is None]
        if llm_provider is not None:
            entries = [*([previous.entry] if previous else []), *current]
            described = [(one.key, one.importance, one.content) for one in entries]
            prompt = summary_prompt(described, SUMMARY_TOKENS)
            answer = await summary(llm_provider, prompt, self._observer, MemoryTier.SHORT_TERM.value)
            if answer is not None:
                return answer
        newer = [f"[{one.key}] {one.content}" for one in current]
        return relevance.truncated(str(previous.entry.content) if previous else "", newer, MOST_CHARACTERS)

    async def _replaced_by_summary(
        self, of: str, text: str, previous: Held | None, batch: list[Held]
    ) -> bool:
        if (await self.journal.read()).id != of:
            # The session was erased while the model wrote: nothing of it may be stored again.
            return False
        now = self._clock()
        summary = MemoryEntry(
            SUMMARY_KEY,
            text,
            MemoryTier.SHORT_TERM,
            created_at=now,
            last_accessed=now,
            importance=SUMMARY_IMPORTANCE,
        )
        return await self._written_if_unchanged(
            of,
            "summarize",
            entry=summary,
            previous=previous.content_at if previous else 0,
            covered=[[one.entry.key, one.content_at] for one in batch],
        )

    async def promotable(self) -> list[Promotion]:
        """Return the entries due for long-term memory, each with its key there."""
        session = await self.journal.read()
        return session.promotions(self._name_of(session))

    async def was_promoted(self, done: Iterable[Promotion]) -> None:
        """Note which entries long-term memory has stored, so that they are not promoted again unchanged."""
        known = [*done]
        if known:
            # If the session was erased since, nothing of it may be stored again, not even its keys.
            of = (await self.journal.read()).id
            entries = [[one.key, one.changed_at] for one in known if one.of == of]
            if entries:
                await self._write("promoted", of=of, entries=entries)

    async def end_session(self) -> None:
        """End the session; the next entry begins a new one."""
        session = await self.journal.read()
        if session.operations and not session.ended:
            await self._write("end", of=session.id, number=session.number)

    @property
    def summary_key(self) -> str | None:
        """The long-term key of the summary, if this process knows of a summary."""
        session = self.journal.known
        summary = session.entries.get(SUMMARY_KEY)
        return None if summary is None else summary.long_term_key(self._name_of(session))

    def _name_of(self, session: Session) -> str:
        """Return the name of a session in the long-term key of its summary."""
        del session
        return self._session_id

    async def listed(self) -> list[MemoryEntry]:
        """Return copies of all entries, in the order in which they were stored."""
        return _copies(await self.journal.read())

    async def with_vectors(self) -> list[WithVector]:
        """Return copies of the entries that are not superseded, each with its vector if it has one."""
        session = await self.journal.read()
        vectors = {} if self._embedder is None else await self._all_vectors(self._embedder, session)
        return [(one, vectors.get(one.key)) for one in _copies(session) if one.superseded_by is None]

    async def discard(self, entry: MemoryEntry) -> bool:
        """Remove an entry unless it was changed or accessed since, and return whether it was removed."""
        session = await self.journal.read()
        one = session.entries.get(entry.key)
        if one is None or one.entry != entry:
            return False
        return await self._written_if_unchanged(
            session.id, "discard", key=entry.key, changed_at=one.changed_at
        )

    async def absorb(self, loser: MemoryEntry, survivor: MemoryEntry) -> bool:
        """Merge an entry into one that it duplicates, unless either was changed since."""
        session = await self.journal.read()
        merged, kept = _judged(session, loser), _judged(session, survivor)
        if merged is None or kept is None:
            return False
        return await self._written_if_unchanged(
            session.id,
            "absorb",
            loser=[loser.key, merged.content_at],
            survivor=[survivor.key, kept.content_at],
        )

    async def rewrite(self, entry: MemoryEntry, content: Any) -> bool:
        """Replace the content of an entry unless it was changed since, and return whether it was replaced."""
        session = await self.journal.read()
        one = _judged(session, entry)
        if one is None:
            return False
        return await self._written_if_unchanged(
            session.id, "rewrite", key=entry.key, content_at=one.content_at, content=content
        )

    @property
    def entries(self) -> list[MemoryEntry]:
        """Copies of all entries that this process knows of, in the order in which they were stored."""
        return _copies(self.journal.known)

    def _keys(self) -> Collection[str]:
        return self.journal.known.entries.keys()

    async def _write(self, name: str, **fields: Any) -> str:
        """Carry out an operation and return its id."""
        identity = secrets.token_hex(8)
        await self.journal.write({"op": name, "id": identity, **fields})
        return identity

    async def _written_if_unchanged(self, of: str, name: str, **fields: Any) -> bool:
        """Carry out an operation on the session with this id, and return whether it had an effect."""
        identity = await self._write(name, of=of, **fields)
        return identity in (await self.journal.read()).done

    async def _accessed(self, session: Session, found: list[Held]) -> list[MemoryEntry]:
        now, entries = self._clock(), [one.entry for one in found]
        if found and await self._counted(session, found, now):
            entries = [one.accessed(now) for one in entries]
        else:
            entries = [one.copied() for one in entries]
        return sorted(entries, key=lambda one: one.relevance_at(now), reverse=True)

    async def _counted(self, session: Session, found: list[Held], now: datetime) -> bool:
        """Count an access to entries. A failure is only reported, because reading them has succeeded."""
        entries = [[one.entry.key, one.content_at] for one in found]
        try:
            await self._write("access", of=session.id, entries=entries, at=now)
        except StmError as error:
            report_uncounted(self._observer, MemoryTier.SHORT_TERM, len(found), error)
            return False
        return True

    async def _near(self, query: str, session: Session) -> set[str]:
        if self._embedder is None or not session.entries or not query.strip():
            return set()
        vectors = await self._all_vectors(self._embedder, session)
        wanted = await self._embedder.wanted(query, self.recall_cosine)
        return {key for key, vector in vectors.items() if wanted.is_near(vector)}

    async def _all_vectors(self, embedder: GuardedEmbedder, session: Session) -> dict[str, list[float]]:
        texts = {key: str(one.entry.content) for key, one in session.entries.items()}
        known = {key: one for key, one in self._vectors.items() if one[0] == texts.get(key)}
        new = [key for key in texts if key not in known]
        for key, vector in zip(new, await embedder.vectors([texts[key] for key in new]), strict=True):
            known[key] = (texts[key], vector)
        self._vectors = known
        return {key: vector for key, (_, vector) in known.items()}


def report_pruned(observer: Observer, count: int) -> None:
    """Report entries that were removed from short-term memory because of their relevance or to make room."""
    if count:
        observer.memories("pruned", "short_term", count)


def _copies(session: Session) -> list[MemoryEntry]:
    return [one.entry.copied() for one in session.entries.values()]


def _judged(session: Session, entry: MemoryEntry) -> Held | None:
    """Return an entry of the session if it still has the content that a caller has read."""
    one = session.entries.get(entry.key)
    if one is None or (one.entry.content, one.entry.created_at) != (entry.content, entry.created_at):
        return None
    return one
