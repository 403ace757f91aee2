"""Saved states and paused runs, for programs without an event loop."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

from stm_backends.records import state_store
from stm_backends.sync.memory import Run


class States:
    """The base of `StateStore` and `TenantStates`, with blocking methods."""

    def __init__(self, store: state_store.States, run: Run) -> None:
        self._states = store
        self._run = run

    def save_memory_state(self, key: str, state: dict[str, Any], *, ttl: float | None = None) -> None:
        """Replace the state under a key, without merging; the last save wins."""
        self._run(self._states.save_memory_state(key, state, ttl=ttl))

    def load_memory_state(self, key: str) -> dict[str, Any] | None:
        """Return the state under a key as a new object; `None` only if there is none."""
        return self._run(self._states.load_memory_state(key))

    def load_versioned(self, key: str) -> tuple[dict[str, Any] | None, str | None]:
        """Return the state under a key and its version, for `save_if`; `(None, None)` if there is none."""
        return self._run(self._states.load_versioned(key))

    def save_if(
        self, key: str, state: dict[str, Any], *, expect: str | None, ttl: float | None = None
    ) -> bool:
        """Save only if the stored version is still `expect` (`None`: only if there is no state)."""
        return self._run(self._states.save_if(key, state, expect=expect, ttl=ttl))

    def save_versioned(
        self, key: str, state: dict[str, Any], *, expect: str | None, ttl: float | None = None
    ) -> str | None:
        """Save as `save_if` does, and return the new version; `None` after a lost race."""
        return self._run(self._states.save_versioned(key, state, expect=expect, ttl=ttl))

    def delete_memory_state(self, key: str) -> bool:
        """Erase the state under a key; returns whether there was one."""
        return self._run(self._states.delete_memory_state(key))

    def delete_if(self, key: str, *, expect: str) -> bool:
        """Erase the state under a key if it still has the version that was loaded; returns whether it did."""
        return self._run(self._states.delete_if(key, expect=expect))

    def _listed(self, names: AsyncIterator[str]) -> Iterator[str]:
        async def every() -> list[str]:
            return [name async for name in names]

        return iter(self._run(every()))


class StateStore(States):
    """The asynchronous `StateStore` with blocking methods; `backend.state_store` is one.

    Its methods guarantee and raise the same as the asynchronous ones.
    """

    def __init__(self, store: state_store.StateStore, run: Run) -> None:
        super().__init__(store, run)
        self._store = store

    def states_of(self, tenant: str, user: str, prefix: str = "") -> Iterator[str]:
        """Return the keys of a user's states that begin with a prefix, in the order of their UTF-8 bytes."""
        return self._listed(self._store.states_of(tenant, user, prefix))

    def save_planner_state(self, token: str, payload: dict[str, Any]) -> None:
        """Keep a paused run for an hour under the token that resumes it, in any process."""
        self._run(self._store.save_planner_state(token, payload))

    def load_planner_state(self, token: str, *, tenant: str | None = None) -> dict[str, Any] | None:
        """Return a paused run, if it is the tenant's, and erase it; only one of many callers receives it."""
        return self._run(self._store.load_planner_state(token, tenant=tenant))


class TenantStates(States):
    """The asynchronous `TenantStates` with blocking methods; see `Backend.tenant_state`."""

    def __init__(self, store: state_store.TenantStates, run: Run) -> None:
        super().__init__(store, run)
        self._store = store

    def names(self, prefix: str = "") -> Iterator[str]:
        """Return the keys of the states that begin with a prefix, in the order of their UTF-8 bytes."""
        return self._listed(self._store.names(prefix))
