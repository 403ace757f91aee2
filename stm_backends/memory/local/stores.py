"""Any object that may keep states: PenguiFlow's two methods, or ours that save on a condition."""

from __future__ import annotations

import logging
from typing import Any
from weakref import WeakSet

logger = logging.getLogger("stm_backends")

_warned_of: WeakSet[type[Any]] = WeakSet()


def warn_unwritable(store: object) -> None:
    """Say, once for each kind of store, that nothing can be saved in it."""
    if type(store) not in _warned_of:
        _warned_of.add(type(store))
        logger.warning(
            "persist saves nothing: %s has no save_memory_state; conversations end with this process",
            type(store).__name__,
        )


class StateSlot:
    """Where one state is kept: a key of a duck-typed store.

    A store with `load_versioned` and `save_if` (see `StateStore`) loses no race. One with
    `load_memory_state` and `save_memory_state` alone is overwritten by whoever saves last.
    """

    def __init__(self, store: Any, key: str) -> None:
        self._store = store
        self._key = key
        self._conditional = hasattr(store, "load_versioned") and hasattr(store, "save_if")
        # The store, if what it does not hold is erased or expired for certain: others may answer so when
        # they are out of order, and anybody may overwrite what they hold.
        self.authoritative: object | None = store if self._conditional else None
        self.readable = self._conditional or hasattr(store, "load_memory_state")
        self.writable = self._conditional or hasattr(store, "save_memory_state")

    async def load(self) -> tuple[object | None, str | None]:
        """Return the state and the version to save it on; two `None` if there is none."""
        if self._conditional:
            return await self._store.load_versioned(self._key)
        # A store that can only be written to cannot be asked; its user wants it so.
        return (await self._store.load_memory_state(self._key) if self.readable else None), None

    async def save(self, state: dict[str, Any], version: str | None) -> bool:
        """Save a state; `False` if another writer came first and nothing was saved."""
        if self._conditional:
            return await self._store.save_if(self._key, state, expect=version)
        await self._store.save_memory_state(self._key, state)
        return True
