"""The interfaces between a memory, the store it may be saved in, and the model that summarizes.

All are structural: an object with these methods qualifies, whatever it derives from.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from typing import Any, Protocol, runtime_checkable

from stm_backends.types import ConversationTurn, MemoryHealth


class Summarizer(Protocol):
    """Fold turns into a summary.

    Called with `{"previous_summary": str, "turns": [{"user", "assistant", "trajectory_digest"?}]}`,
    oldest turn first; answers `{"summary": str}`, which replaces the previous summary. An exception, a
    blank summary and any other answer count as a failed attempt and change nothing.
    """

    def __call__(self, request: Mapping[str, Any], /) -> Awaitable[Mapping[str, Any]]: ...


@runtime_checkable
class ShortTermMemory(Protocol):
    """What an agent needs of a memory, and all that it needs."""

    @property
    def health(self) -> MemoryHealth:
        """How summarization is doing, as far as this process knows."""
        ...

    async def add_turn(self, turn: ConversationTurn) -> None:
        """Remember a completed turn; never waits for a summary."""
        ...

    async def get_llm_context(self) -> Mapping[str, Any]:
        """Return what the model shall know: `{}` or `{"conversation_memory": {...}}`.

        The inner mapping has `recent_turns` and, when there are any, `pending_turns` and `summary`. It
        is JSON, is within the token budget, and is the caller's to keep.
        """
        ...

    def estimate_tokens(self) -> int:
        """Estimate the tokens that `get_llm_context` would show, as far as this process knows."""
        ...

    async def flush(self) -> None:
        """Wait until nothing is left to summarize, or it cannot be helped."""
        ...


@runtime_checkable
class ShortTermMemoryPersistence(Protocol):
    """A memory that can be saved in, and restored from, a store with `SupportsMemoryState`."""

    async def persist(self, store: Any, key: str) -> None: ...

    async def hydrate(self, store: Any, key: str) -> None: ...


@runtime_checkable
class ShortTermMemorySerializable(Protocol):
    """A memory whose whole state is a JSON object.

    `version`, `health`, `summary`, `turns`, `pending`, `backlog` and `config_snapshot`.
    """

    def to_dict(self) -> dict[str, Any]: ...

    def from_dict(self, state: Mapping[str, Any]) -> None: ...


@runtime_checkable
class ShortTermMemoryArtifacts(Protocol):
    """A memory that can produce artifacts hidden from the model."""

    def get_artifact(self, ref: str) -> Any | None: ...


@runtime_checkable
class SupportsMemoryState(Protocol):
    """A store of JSON objects under string keys."""

    async def save_memory_state(self, key: str, state: dict[str, Any]) -> None: ...

    async def load_memory_state(self, key: str) -> dict[str, Any] | None: ...
