"""The interfaces of memories, of their configurations, of the stores that save them, and of summarizers.

All are structural: any object with these members satisfies them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from typing import Any, Protocol, runtime_checkable

from stm_backends.types import ConversationTurn, MemoryHealth


class ConfigLike(Protocol):
    """Any object with the fields of a `ShortTermMemoryConfig`, such as the configuration of PenguiFlow.

    These two are required. Other fields that are missing have their defaults. A mapping is no configuration.
    """

    @property
    def strategy(self) -> str:
        """`"truncation"`, `"rolling_summary"` or `"none"`."""
        ...

    @property
    def budget(self) -> object:
        """An object with the fields of a `MemoryBudget`."""
        ...


class Summarizer(Protocol):
    """Fold turns into a summary.

    Called with `{"previous_summary": str, "turns": [...]}`, oldest turn first; a turn is `{"user",
    "assistant", "trajectory_digest"?, "artifacts_shown"?}`. Returns `{"summary": str}`, which replaces the
    previous summary. It may also have `"title": str`: lists of conversations show it, unless the user
    has set one, and the next call receives it as `"title"`. An exception, a blank summary or any other result
    is a failed attempt and changes nothing.
    """

    # A `dict`, so that a function whose parameter is a `dict` or a `Mapping` is a summarizer.
    def __call__(self, request: dict[str, Any], /) -> Awaitable[Mapping[str, Any]]: ...


@runtime_checkable
class ShortTermMemory(Protocol):
    """The methods of a memory that an agent needs."""

    @property
    def health(self) -> MemoryHealth:
        """The health of summarization, as far as this process knows."""
        ...

    async def add_turn(self, turn: ConversationTurn) -> None:
        """Store a completed turn; never waits for a summary."""
        ...

    async def get_llm_context(self) -> Mapping[str, Any]:
        """Return the context for the model: `{}` or `{"conversation_memory": {...}}`.

        The inner mapping has `recent_turns` and, if there are any, `pending_turns` and `summary`. It is JSON
        within the token budget, and the caller may change it.
        """
        ...

    def estimate_tokens(self) -> int:
        """Estimate the tokens of `get_llm_context`, as far as this process knows."""
        ...

    async def flush(self) -> None:
        """Wait until nothing is left to summarize, or summarizing has failed."""
        ...


@runtime_checkable
class ShortTermMemoryPersistence(Protocol):
    """A memory that can be saved in and restored from a store with `SupportsMemoryState`."""

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
    """A memory that returns the artifacts of its turns."""

    def get_artifact(self, ref: str) -> Any | None:
        """Return the newest artifact with this name in the `artifacts_shown` of retained turns, or `None`."""
        ...


@runtime_checkable
class SupportsMemoryState(Protocol):
    """A store of JSON objects under string keys."""

    async def save_memory_state(self, key: str, state: dict[str, Any]) -> None: ...

    async def load_memory_state(self, key: str) -> dict[str, Any] | None: ...
