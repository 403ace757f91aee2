"""Saved states under string keys (Layer 1), each read and replaced as a whole, and paused runs.

A tenant as a whole has its own states.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, suppress
from typing import Any, Final, cast

from stm_backends.drivers.bounded import Bounded
from stm_backends.drivers.contract import ABSENT, ANY, AbsentType, AnyType, Driver, Key, Record
from stm_backends.errors import Corrupt, InvalidState, OutcomeUnknown, StorageError, located
from stm_backends.records import binary, keys, ledger, operations
from stm_backends.records.codec import Codec
from stm_backends.records.directory import Directory
from stm_backends.records.identity import DEFAULT_TENANT, DEFAULT_USER, part_of
from stm_backends.records.limits import UNLIMITED, Guard, Whose
from stm_backends.records.steps import run_in_slices
from stm_backends.types import MemoryIsolation

REMEMBERED_VERSIONS: Final = 10_000
"""Number of states for which a store remembers the version that it loaded or saved last."""

PLANNER_STATE_TTL_S: Final = 3600.0
"""Seconds for which a paused run can be resumed."""


class States:
    """JSON objects under any string: the base of `StateStore` and `TenantStates`."""

    def __init__(self, driver: Driver, codec: Codec, directory: Directory, guard: Guard = UNLIMITED) -> None:
        self._driver = driver
        self._codec = codec
        self._directory = directory
        self._guard = guard
        self._versions: Bounded[str, str] = Bounded(REMEMBERED_VERSIONS)

    def _place(self, key: str) -> tuple[Key, tuple[str, str] | None]:
        """Return the key of the record for a state, and the tenant and user that it belongs to, if any."""
        raise NotImplementedError

    async def save_memory_state(self, key: str, state: dict[str, Any], *, ttl: float | None = None) -> None:
        """Replace the state under a key, without merging; the last save wins.

        The state is kept forever, or for `ttl` seconds. Raises `InvalidState`, naming the path, for a value
        that is not JSON. The existing state is not read, so even one of a newer format is replaced; to avoid
        that, load it first and use `save_if`, as `DefaultShortTermMemory.persist` does.

        One round trip if this store was the last to load or save the state. Otherwise the save may create it,
        so the owner that the key names is listed again afterwards, for `erase_tenant` to find.
        """
        where, owner = self._place(key)
        change = await self._change(where, state, ttl=ttl)
        # A state that belongs to no user is never listed, so it does not matter whether the save creates it.
        known = None if owner is None else self._versions.get(key)
        async with self._directory.listed(owner, ttl) as listing:
            if known is None or not await self._write(where, change, known):
                await self._write(where, change, ANY)
                listing.created = True
        if owner is not None:
            self._versions[key] = change.version

    async def load_memory_state(self, key: str) -> dict[str, Any] | None:
        """Return the state under a key, as a new object; `None` only if there is none."""
        state, _ = await self.load_versioned(key)
        return state

    async def load_versioned(self, key: str) -> tuple[dict[str, Any] | None, str | None]:
        """Return the state under a key and its version for `save_if`; `(None, None)` if there is none."""
        record = await self._driver.load(self._place(key)[0])
        if record is None:
            return None, None
        state = await self._read(record, "load_memory_state")
        self._versions[key] = record.version
        return state, record.version

    async def save_if(
        self, key: str, state: dict[str, Any], *, expect: str | None, ttl: float | None = None
    ) -> bool:
        """Save only if the state still has the version that was loaded (`None`: only if there is no state).

        Returns `False` after a lost race, which changed nothing. If the answer is lost, a save that another
        process has replaced since also returns `False`. Raises `OutcomeUnknown` only if no attempt is
        answered.
        """
        return await self.save_versioned(key, state, expect=expect, ttl=ttl) is not None

    async def save_versioned(
        self, key: str, state: dict[str, Any], *, expect: str | None, ttl: float | None = None
    ) -> str | None:
        """Save as `save_if` does, and return the new version; `None` after a lost race."""
        where, owner = self._place(key)
        change = await self._change(where, state, ttl=ttl)
        async with self._directory.listed(owner, ttl) as listing:
            saved = await self._write(where, change, ABSENT if expect is None else expect)
            # Also after a lost race: another process may have replaced the state that this call created.
            listing.created = expect is None
        if saved and owner is not None:
            self._versions[key] = change.version
        return change.version if saved else None

    async def delete_memory_state(self, key: str) -> bool:
        """Erase the state under a key; returns whether there was one."""
        return await ledger.erase(self._driver, self._place(key)[0])

    async def delete_if(self, key: str, *, expect: str) -> bool:
        """Erase the state under a key if it still has the version that was loaded; returns whether it did.

        `False` is a lost race, which changed nothing. If the answer is lost, a state that is gone counts as
        erased; raises `OutcomeUnknown` if another is there.
        """
        return await ledger.delete(self._driver, self._place(key)[0], expect=expect)

    # States as records

    async def _names(self, scope: str, prefix: str) -> AsyncIterator[str]:
        """Yield the keys of the states in a scope that begin with a prefix, in the order of their UTF-8."""
        first = keys.name(prefix) if prefix else ""
        # A listing begins after a name.
        if first and await self._driver.load(Key(scope, first), last=0) is not None:
            yield prefix
        async for name in operations.names_of(self._driver, scope, first):
            yield keys.unname(name)

    async def _read(self, record: Record, operation: str) -> dict[str, Any]:
        with located(self._driver.name, operation):
            if record.body is None or record.tail:
                raise Corrupt("the record under this key is not a saved state")
            if not self._codec.is_of("binary-state", record.body):
                return await run_in_slices(self._codec.open_steps("state", record.body))
            content = await run_in_slices(self._codec.open_steps("binary-state", record.body))
            return await run_in_slices(binary.restored(content))

    async def _change(self, where: Key, state: dict[str, Any], *, ttl: float | None) -> ledger.Change:
        """Check and serialize a state."""
        if not isinstance(state, dict):  # pyright: ignore[reportUnnecessaryIsInstance] -- callers are not all typed
            raise InvalidState(f"a state is a dict, not {type(state).__name__}")
        try:
            body = await run_in_slices(self._codec.seal_steps("state", state))
        except InvalidState:
            if not binary.has_bytes(state):
                raise
            content = await run_in_slices(binary.escaped(state))
            body = await run_in_slices(self._codec.seal_steps("binary-state", content))
        with self._reporting(where):
            self._guard.require("state_bytes", len(body))
        return ledger.Change(body, ttl=ttl)

    async def _write(self, where: Key, change: ledger.Change, expect: str | AbsentType | AnyType) -> bool:
        with self._reporting(where):
            return await ledger.replace(self._driver, where, change, expect=expect)

    def _reporting(self, where: Key) -> AbstractContextManager[None]:
        return self._guard.reporting(Whose(*keys.owner_of(where.scope)), "save")


class StateStore(States):
    """JSON objects under any string; satisfies `SupportsMemoryState`, and keeps paused runs of a planner.

    A loaded state is JSON-equal to the saved one: NaN, lone surrogates and big integers are kept, and tuples
    become lists. Bytes come back as bytes; versions that do not know them refuse such a state. Large states
    are saved and loaded in steps, so that other tasks run in between; do not change a state before its save
    has returned. A save beyond the backend's `Limits` raises `LimitReached` before anything is written. A
    state under a key that names a tenant and a user (`MemoryKey.composite()`, or `kv:v1:` and a composite) is
    erased with the user. `isolation` gives the paths of tenant and user in a paused run.
    """

    def __init__(
        self,
        driver: Driver,
        codec: Codec,
        directory: Directory,
        guard: Guard = UNLIMITED,
        *,
        isolation: MemoryIsolation | None = None,
    ) -> None:
        super().__init__(driver, codec, directory, guard)
        self._isolation = isolation or MemoryIsolation()

    def _place(self, key: str) -> tuple[Key, tuple[str, str] | None]:
        return keys.blob(key)

    def states_of(self, tenant: str, user: str, prefix: str = "") -> AsyncIterator[str]:
        """Yield the keys of a user's states that begin with a prefix, in the order of their UTF-8 bytes.

        These are the states whose keys name the tenant and the user. A key that exists throughout comes once.
        """
        return self._names(keys.scope(tenant, user, "blob"), prefix)

    # Paused runs of a planner

    async def save_planner_state(self, token: str, payload: dict[str, Any]) -> None:
        """Keep a paused run under the token that resumes it, for an hour, in any process.

        It is erased with the user that its `tool_context` names, at the paths of `isolation`. A missing
        tenant is `default`, and a missing user `anonymous`, as for conversations. Raises `InvalidState`,
        naming the path, for a payload that is not JSON.
        """
        where = keys.planner_key(token)
        run = await self._change(where, payload, ttl=PLANNER_STATE_TTL_S)
        owner = _owner(payload, self._isolation)
        # An id that is too long raises before anything is written.
        note_key = None if owner is None else keys.planner_note_key(*owner, token)
        async with self._directory.listed(owner, PLANNER_STATE_TTL_S) as listing:
            await self._write(where, run, ANY)
            if note_key is not None:
                # After the run itself: an erasure of the user that comes later finds both.
                note = await self._change(note_key, {}, ttl=PLANNER_STATE_TTL_S)
                await self._write(note_key, note, ANY)
            listing.created = True

    async def load_planner_state(self, token: str, *, tenant: str | None = None) -> dict[str, Any] | None:
        """Return a paused run and remove it: exactly one of any number of callers receives it.

        `None` if there is no run under the token: it was never saved, has expired, or was loaded before. Two
        round trips. Raises `OutcomeUnknown` if it is unknown whether this call removed the run. The run is
        lost then, because resuming it twice would do everything twice.

        With `tenant`, only a run whose `tool_context` names this tenant is returned; any other is
        `None` and stays. Pass it wherever the request names a tenant: a token alone may have leaked.
        """
        where, tried = keys.planner_key(token), None
        while True:
            record = await self._driver.load(where)
            if record is None or record.version == tried:
                return None
            payload = await self._read(record, "load_planner_state")
            if tenant is not None and (_owner(payload, self._isolation) or ("",))[0] != tenant:
                return None
            if await self._claim(where, record.version):
                return payload
            # Loaded by another caller; or sealed again, or saved again, under another version.
            tried = record.version

    async def _claim(self, where: Key, version: str) -> bool:
        """Delete the run that was loaded; returns whether this call deleted it."""
        try:
            return await self._driver.delete(where, expect=version)
        except OutcomeUnknown:
            # If it is still there, the first attempt did nothing. If not, this or another caller has deleted
            # it.
            with suppress(StorageError):
                if await self._driver.delete(where, expect=version):
                    return True
            raise


class TenantStates(States):
    """The states of a tenant as a whole, under any strings: like `StateStore`, without paused runs.

    They are erased, copied and sealed with the tenant, and stay when one of its users is erased.
    """

    def __init__(
        self, driver: Driver, codec: Codec, directory: Directory, tenant: str, guard: Guard = UNLIMITED
    ) -> None:
        super().__init__(driver, codec, directory, guard)
        self._tenant = keys.require_part("tenant", tenant)

    def _place(self, key: str) -> tuple[Key, tuple[str, str] | None]:
        return keys.shared_blob(self._tenant, key), (self._tenant, "")

    def names(self, prefix: str = "") -> AsyncIterator[str]:
        """Yield the keys of the states that begin with a prefix, in the order of their UTF-8 bytes.

        One that exists throughout comes exactly once.
        """
        return self._names(keys.shared_scope(self._tenant), prefix)


def _owner(payload: dict[str, Any], isolation: MemoryIsolation) -> tuple[str, str] | None:
    """Return the tenant and user of a paused run, as `KeyResolver` finds them; `None` for unusable ids.

    PenguiFlow's own memory removes white space around ids, and the resolver refuses such ids.
    """
    context: object = payload.get("tool_context")
    found = cast("dict[str, object]", context) if isinstance(context, dict) else {}
    tenant = part_of(found, isolation.tenant_key, missing=DEFAULT_TENANT).strip()
    user = part_of(found, isolation.user_key, missing=DEFAULT_USER).strip()
    return (tenant, user) if tenant and user else None
