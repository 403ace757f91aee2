"""Saved states under string keys (Layer 1), each read and replaced as a whole."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from stm_backends import keys, records
from stm_backends.codec import Codec, require_json
from stm_backends.directory import Directory
from stm_backends.driver import ABSENT, ANY, AbsentType, AnyType, Driver, new_version
from stm_backends.errors import (
    Corrupt,
    InvalidState,
    OutcomeUnknown,
    StorageError,
    located,
)


class StateStore:
    """JSON objects under any string; satisfies `SupportsMemoryState`.

    What is loaded is JSON-equal to what was saved: NaN, lone surrogates and big integers are kept, and
    tuples become lists. A key that names a tenant and a user (`MemoryKey.composite()`, or
    `kv:v1:tenant:user:...`) is theirs: it is erased with the user.
    """

    def __init__(self, driver: Driver, codec: Codec, directory: Directory) -> None:
        self._driver = driver
        self._codec = codec
        self._directory = directory

    async def save_memory_state(self, key: str, state: dict[str, Any], *, ttl: float | None = None) -> None:
        """Replace what stands under a key, never merging; the last save wins.

        Kept for ever, or for `ttl` seconds. Raises `InvalidState`, naming the path, for what is not JSON.
        """
        write = await self._writer(key, state, expect=ANY, ttl=ttl)
        await records.resent(write)

    async def load_memory_state(self, key: str) -> dict[str, Any] | None:
        """Return what stands under a key, the caller's to keep; `None` only if nothing does."""
        state, _ = await self.load_versioned(key)
        return state

    async def load_versioned(self, key: str) -> tuple[dict[str, Any] | None, str | None]:
        """Return what stands under a key and the version to hand to `save_if`; two `None` if nothing does."""
        record = await self._driver.load(keys.blob_key(key))
        if record is None:
            return None, None
        with located(self._driver.name, "load_memory_state"):
            if record.body is None or record.tail:
                raise Corrupt("the record under this key is not a saved state")
            return self._codec.open("state", record.body), record.version

    async def save_if(
        self, key: str, state: dict[str, Any], *, expect: str | None, ttl: float | None = None
    ) -> bool:
        """Save only if the version that was loaded still stands (`None`: if nothing does).

        `False` is a lost race and changed nothing. Raises `OutcomeUnknown` only if the datastore cannot
        be asked what became of the write.
        """
        version = new_version()
        write = await self._writer(
            key, state, expect=ABSENT if expect is None else expect, ttl=ttl, version=version
        )
        saved = await self._settled(key, write, version=version, expect=expect)
        owner = keys.blob_owner(key)
        if saved and expect is None and owner is not None:
            # A birth: the owner may have been erased, and taken off the list, just before.
            await self._directory.note(*owner, fresh=True)
        return saved

    async def _settled(
        self, key: str, write: Callable[[], Awaitable[bool]], *, version: str, expect: str | None
    ) -> bool:
        """Send a conditional write; if its outcome is unknown, look what stands there."""
        try:
            return await write()
        except OutcomeUnknown as unknown:
            try:
                record = await self._driver.load(keys.blob_key(key))
            except StorageError:
                raise unknown from unknown.__cause__
        found = None if record is None else record.version
        if found == expect:
            return await write()
        # A third version may stand on top of ours, which nobody can tell; to the caller that is lost.
        return found == version

    async def delete_memory_state(self, key: str) -> bool:
        """Erase what stands under a key; returns whether anything did."""
        return await self._driver.delete(keys.blob_key(key))

    async def _writer(
        self,
        key: str,
        state: dict[str, Any],
        *,
        expect: str | AbsentType | AnyType,
        ttl: float | None,
        version: str | None = None,
    ) -> Callable[[], Awaitable[bool]]:
        """Check and seal a state, list its owner, and return the write: the same one each time it is sent."""
        if not isinstance(state, dict):  # pyright: ignore[reportUnnecessaryIsInstance] -- callers are not all typed
            raise InvalidState(f"a state is a dict, not {type(state).__name__}")
        require_json(state, "state")
        where, body, token = keys.blob_key(key), self._codec.seal("state", state), version or new_version()
        owner = keys.blob_owner(key)
        if owner is not None:
            await self._directory.note(*owner)
        return lambda: self._driver.replace(where, body, version=token, expect=expect, ttl=ttl)
