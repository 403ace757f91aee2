"""The OpenAI Agents SDK: the history of its runs on any backend (extra `openai-agents`)."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from stm_backends.backend import Backend
from stm_backends.drivers.checks import require_backend, require_integer, require_items
from stm_backends.errors import TooLarge
from stm_backends.extras import missing_extra
from stm_backends.types import MemoryKey

try:
    from agents.memory import SessionSettings
except ModuleNotFoundError as error:
    raise missing_extra("openai-agents", error) from error

if TYPE_CHECKING:
    from agents import TResponseInputItem


class _Snapshot(NamedTuple):
    """For `OpenAIResponsesCompactionSession`: the latest items, and a function to replace some."""

    items: list[TResponseInputItem]
    complete: bool
    replace_suffix: Callable[[int, list[TResponseInputItem]], Awaitable[bool]]


class StmSession:
    """A conversation as a `Session` of the Agents SDK, shared by every process that uses the same key.

    ```
    await Runner.run(agent, "Hello", session=StmSession(backend, MemoryKey("acme", "u123", "chat_001")))
    ```

    Items are returned as they were added: all of them, unless `session_settings` or a call sets a limit.
    `session_settings` may be a dictionary, as for the SDK's own sessions. The history expires `ttl_s` seconds
    after the last item was added; `None` means never. The constructor reads and writes nothing. Raises
    `InvalidKey` for an invalid key.

    All methods raise `StorageError`; an outage is never an empty history. A cancelled call has ended when the
    cancellation is raised: its work is done, or never will be. The SDK includes
    `session_id`, the last part of the key, in its traces.
    """

    def __init__(
        self,
        backend: Backend,
        key: MemoryKey,
        *,
        ttl_s: float | None = None,
        session_settings: SessionSettings | dict[str, Any] | None = None,
    ) -> None:
        require_backend(backend)
        self._log = backend.item_log(key, "openai-agents", ttl_s=ttl_s)
        self.session_id: str = key.session_id
        self.session_settings: SessionSettings | None = _settings(session_settings)

    async def get_items(self, limit: int | None = None) -> list[TResponseInputItem]:
        """Return the latest `limit` items, oldest first; by default, the limit of the settings applies.

        Takes one round trip, and with a limit reads only the newest items, however long the conversation is.
        Raises `ConfigurationError` for a limit that is negative or not an integer.
        """
        if limit is None:
            limit = _settings(self.session_settings).limit
        if limit is not None:
            require_integer("limit", limit, least=0)
        return cast("list[TResponseInputItem]", await self._log.items(limit))

    async def add_items(self, items: list[TResponseInputItem]) -> None:
        """Add items at the end, all or none, in one round trip.

        Raises `InvalidState`, naming the path, for values that are not JSON, and `TooLarge`.
        """
        require_items("items", items)
        await self._log.add(items)

    async def pop_item(self) -> TResponseInputItem | None:
        """Remove and return the last item, or `None` if there is none; no other caller receives the same.

        Raises `OutcomeUnknown` if an item may have been removed but cannot be returned.
        """
        return cast("TResponseInputItem | None", await self._log.pop())

    async def clear_session(self) -> None:
        """Erase the conversation's items."""
        await self._log.clear()

    async def _get_compaction_snapshot(
        self, limit: int, *, prune_prefix: Callable[[TResponseInputItem], bool] | None = None
    ) -> _Snapshot:
        """Return the latest items for the SDK's compaction. The SDK looks for a method of this name.

        Some of them are replaced in one step, and only if nothing has changed since they were read.
        """
        state = await self._log.read()
        items = cast("list[TResponseInputItem]", [*state.items])
        start = max(0, len(items) - limit)

        async def replace_suffix(first: int, output: list[TResponseInputItem]) -> bool:
            kept = items[: start + first]
            if len(kept) == len(items):
                return False
            if prune_prefix is not None:
                kept = [*itertools.dropwhile(prune_prefix, kept)]
            try:
                return await self._log.rewrite(state.tip, [*kept, *output]) is not None
            except TooLarge:
                return False

        return _Snapshot(items[start:], start == 0, replace_suffix)


def _settings(given: SessionSettings | dict[str, Any] | None) -> SessionSettings:
    """Return settings from any form that the SDK accepts. Raises `TypeError` for unknown settings."""
    if isinstance(given, SessionSettings):
        return given
    settings = given or {}
    if unknown := settings.keys() - {field.name for field in dataclasses.fields(SessionSettings)}:
        raise TypeError(f"session_settings has no {', '.join(sorted(unknown))}")
    return SessionSettings(**settings)
