"""The OpenAI Agents SDK: its runs keep their history on any of our backends (extra `openai-agents`)."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, cast

from stm_backends.backend import Backend
from stm_backends.extras import missing_extra
from stm_backends.types import MemoryKey

try:
    from agents.memory import SessionSettings
except ModuleNotFoundError as error:
    raise missing_extra("openai-agents", error) from error

if TYPE_CHECKING:
    from agents import TResponseInputItem


class StmSession:
    """One conversation as a `Session` of the Agents SDK, shared by every process that opens the same key.

    ```
    await Runner.run(agent, "Hello", session=StmSession(backend, MemoryKey("acme", "u123", "chat_001")))
    ```

    Items come back as they were added, all of them unless `session_settings` or a call has a limit; the
    settings may be a dictionary, as for the SDK's own sessions. A conversation that nobody adds to for
    `ttl_s` seconds is forgotten; `None`: never. Making one reads and writes nothing. Raises `InvalidKey`
    for what is no key: there is no history without one.

    All methods raise `StorageError`; an outage is never an empty history. The SDK shows `session_id`, the
    last part of the key, to its tracing.
    """

    def __init__(
        self,
        backend: Backend,
        key: MemoryKey,
        *,
        ttl_s: float | None = None,
        session_settings: SessionSettings | dict[str, Any] | None = None,
    ) -> None:
        self._log = backend.item_log(key, "openai-agents", ttl_s=ttl_s)
        self.session_id: str = key.session_id
        self.session_settings: SessionSettings | None = _settings(session_settings)

    async def get_items(self, limit: int | None = None) -> list[TResponseInputItem]:
        """Return the latest `limit` items, oldest first; without one, as many as the settings say.

        The whole conversation is read, whatever the limit, in one round trip.
        """
        if limit is None:
            limit = _settings(self.session_settings).limit
        return cast("list[TResponseInputItem]", await self._log.items(limit))

    async def add_items(self, items: list[TResponseInputItem]) -> None:
        """Add items at the end, all or none, in one round trip.

        Raises `InvalidState`, naming the path, for what is not JSON, and `TooLarge`.
        """
        await self._log.add(items)

    async def pop_item(self) -> TResponseInputItem | None:
        """Remove the last item and return it, `None` if there is none; nobody else gets the same.

        Raises `OutcomeUnknown` if an item was perhaps removed and cannot be returned.
        """
        return cast("TResponseInputItem | None", await self._log.pop())

    async def clear_session(self) -> None:
        """Erase the conversation's items."""
        await self._log.clear()


def _settings(given: SessionSettings | dict[str, Any] | None) -> SessionSettings:
    """Return settings in any of the forms in which the SDK takes them; an unknown one is a `TypeError`."""
    if isinstance(given, SessionSettings):
        return given
    settings = given or {}
    if unknown := settings.keys() - {field.name for field in dataclasses.fields(SessionSettings)}:
        raise TypeError(f"session_settings has no {', '.join(sorted(unknown))}")
    return SessionSettings(**settings)
