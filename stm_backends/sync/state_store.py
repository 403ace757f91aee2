"""Saved states and paused runs, for programs without an event loop."""

from __future__ import annotations

from typing import Any

from stm_backends.records import state_store
from stm_backends.sync.memory import Run


class StateStore:
    """What `backend.state_store` is: the asynchronous `StateStore` with methods that wait.

    They promise and raise what its methods do.
    """

    def __init__(self, store: state_store.StateStore, run: Run) -> None:
        self._store = store
        self._run = run

    def save_memory_state(self, key: str, state: dict[str, Any], *, ttl: float | None = None) -> None:
        """Replace what stands under a key, never merging; the last save wins."""
        self._run(self._store.save_memory_state(key, state, ttl=ttl))

    def load_memory_state(self, key: str) -> dict[str, Any] | None:
        """Return what stands under a key, the caller's to keep; `None` only if nothing does."""
        return self._run(self._store.load_memory_state(key))

    def load_versioned(self, key: str) -> tuple[dict[str, Any] | None, str | None]:
        """Return what stands under a key and the version to hand to `save_if`; two `None` if nothing does."""
        return self._run(self._store.load_versioned(key))

    def save_if(
        self, key: str, state: dict[str, Any], *, expect: str | None, ttl: float | None = None
    ) -> bool:
        """Save only if the version that was loaded still stands (`None`: if nothing does)."""
        return self._run(self._store.save_if(key, state, expect=expect, ttl=ttl))

    def delete_memory_state(self, key: str) -> bool:
        """Erase what stands under a key; returns whether anything did."""
        return self._run(self._store.delete_memory_state(key))

    def save_planner_state(self, token: str, payload: dict[str, Any]) -> None:
        """Keep a paused run under the token that resumes it, for an hour, in any process."""
        self._run(self._store.save_planner_state(token, payload))

    def load_planner_state(self, token: str) -> dict[str, Any] | None:
        """Hand out a paused run and forget it: to one caller, however many ask, and to nobody again."""
        return self._run(self._store.load_planner_state(token))
