"""Stores of states: PenguiFlow's two methods, or conditional saves as `StateStore` has them."""

from __future__ import annotations

import logging
from typing import Any
from weakref import WeakSet

logger = logging.getLogger("stm_backends")

_warned_of: WeakSet[type[Any]] = WeakSet()


def warn_unwritable(store: object) -> None:
    """Log, once for each type of store, that nothing can be saved in it."""
    if type(store) not in _warned_of:
        _warned_of.add(type(store))
        logger.warning(
            "persist saves nothing: %s has no save_memory_state; conversations end with this process",
            type(store).__name__,
        )


class StateSlot:
    """One state under a key of a duck-typed store.

    With `load_versioned` and `save_if` (see `StateStore`), concurrent saves do not overwrite each other. With
    only `load_memory_state` and `save_memory_state`, the last save wins.
    """

    def __init__(self, store: Any, key: str) -> None:
        self._store = store
        self._key = key
        self._conditional = hasattr(store, "load_versioned") and hasattr(store, "save_if")
        # The store, if a missing state was certainly erased or has expired. Other stores may return `None`
        # during an outage, and any process may overwrite what they hold.
        self.authoritative: object | None = store if self._conditional else None
        self.readable = self._conditional or hasattr(store, "load_memory_state")
        self.writable = self._conditional or hasattr(store, "save_memory_state")

    async def load(self) -> tuple[object | None, str | None]:
        """Return the state and its version; `(None, None)` if there is none."""
        if self._conditional:
            return await self._store.load_versioned(self._key)
        # A store without `load_memory_state` can only be written to.
        return (await self._store.load_memory_state(self._key) if self.readable else None), None

    async def save(self, state: dict[str, Any], version: str | None) -> bool:
        """Save a state; `False` after a lost race, in which nothing was saved."""
        if self._conditional:
            return await self._store.save_if(self._key, state, expect=version)
        await self._store.save_memory_state(self._key, state)
        return True
