"""The catalogue of conversations, for programs without an event loop."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from stm_backends.catalogue import conversations
from stm_backends.catalogue.card import Card
from stm_backends.catalogue.conversations import Cards, Results
from stm_backends.records.usage import Usage
from stm_backends.sync.memory import Run
from stm_backends.types import MemoryKey


class Conversations:
    """The asynchronous `Conversations` with blocking methods; `backend.conversations` is one."""

    def __init__(self, behind: conversations.Conversations, run: Run) -> None:
        self._behind = behind
        self._run = run

    def list(self, tenant: str, user: str, *, after: str | None = None, limit: int = 50) -> Cards:
        """Return a page of a user's conversations, the one with the latest activity first."""
        return self._run(self._behind.list(tenant, user, after=after, limit=limit))

    def all(self, tenant: str, user: str) -> Iterator[Card]:
        """Yield all cards of a user, latest first, a page at a time."""
        page = self.list(tenant, user, limit=conversations.PAGE)
        yield from page.cards
        while page.after is not None:
            page = self.list(tenant, user, after=page.after, limit=conversations.PAGE)
            yield from page.cards

    def search(
        self, tenant: str, user: str, words: str, *, after: str | None = None, limit: int = 20
    ) -> Results:
        """Return a user's conversations that have all of the words, the latest one first."""
        return self._run(self._behind.search(tenant, user, words, after=after, limit=limit))

    def get(self, key: MemoryKey) -> Card:
        """Return the card of one conversation. Raises `SessionNotFound`."""
        return self._run(self._behind.get(key))

    def update(
        self,
        key: MemoryKey,
        *,
        title: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        pinned: bool | None = None,
        archived: bool | None = None,
    ) -> Card:
        """Set the given fields, and return the card; the conversation keeps its place in the list."""
        return self._run(
            self._behind.update(key, title=title, metadata=metadata, pinned=pinned, archived=archived)
        )

    def usage(self, tenant: str, user: str, *, days: int | None = 31) -> Usage:
        """Sum the usage of a user's answers on the last `days` days, including today."""
        return self._run(self._behind.usage(tenant, user, days=days))

    def rebuild(self, tenant: str, user: str) -> int:
        """Make the cards of a user's conversations match the stored records; returns how many changed."""
        return self._run(self._behind.rebuild(tenant, user))
