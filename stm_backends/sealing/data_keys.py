"""Data keys of each tenant or user, stored wrapped. Without them, what was sealed with them is unreadable."""

from __future__ import annotations

import asyncio
import base64
import os
import secrets
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar, cast

from stm_backends.drivers.checks import require_seconds
from stm_backends.drivers.contract import ABSENT, Driver, Key, new_version
from stm_backends.errors import ConfigurationError, Corrupt, Denied, StorageError, Unavailable
from stm_backends.records import operations
from stm_backends.records.codec import Codec
from stm_backends.records.keys import data_keys_key, data_keys_scope
from stm_backends.sealing.guarded import guarded_wrapping
from stm_backends.sealing.keys import KEY_BYTES, DataKey, Owner

if TYPE_CHECKING:
    from stm_backends.sealing.wrapping import Wrapping

T = TypeVar("T")

_REMEMBERED: Final = 10_000
"""How many owners' keys a process keeps."""


@dataclass(frozen=True, slots=True)
class _Keys:
    """The data keys of one owner as they were stored under `version`, read at `at` (monotonic seconds)."""

    at: float
    version: str
    primary: str
    wrapped: dict[str, bytes]
    opened: dict[str, DataKey]


class EnvelopeKeys:
    """Random data keys per user, or per tenant, which are stored wrapped in a datastore of their own.

    `store` is the open driver of any backend of this library, such as `open_backend(...).driver`. With
    `owns_store=True`, the backend that these keys are given to opens and closes it. Keep it apart from the
    data and its backups: a restored backup is then unreadable once the keys are erased. The first value of an
    owner creates the key. A process keeps unwrapped keys for `lifetime_s` seconds; so long it can still use
    keys that another process has erased or replaced.
    """

    def __init__(
        self,
        store: Driver,
        wrapping: Wrapping,
        *,
        per: Literal["user", "tenant"] = "user",
        lifetime_s: float = 300.0,
        owns_store: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        require_seconds("lifetime_s", lifetime_s)
        if per not in ("user", "tenant"):
            raise ConfigurationError("per is 'user' or 'tenant'")
        self._store = store
        self._wrapping = guarded_wrapping(wrapping)
        self._per_user = per == "user"
        self._lifetime_s = lifetime_s
        self._owns_store = owns_store
        self._clock = clock
        self._codec = Codec()
        self._known: OrderedDict[Owner, _Keys] = OrderedDict()
        self._erasures = 0

    async def open(self) -> None:
        """Open the store, if it is owned. Opening twice is harmless."""
        if self._owns_store:
            await _stored(self._store.open())

    async def close(self) -> None:
        """Close the store, if it is owned. Closing twice is harmless."""
        if self._owns_store:
            await self._store.close()

    async def primary(self, owner: Owner) -> DataKey:
        """Return the key that new values of `owner` are sealed with; creates the first one."""
        owner = self._holder(owner)
        keys = self._fresh(owner) or await self._load(owner)
        if keys is None:
            await self._add(owner, None)
            # Another process may have been first; its key is then the only one.
            keys = await self._load(owner)
        if keys is None:
            raise Unavailable("the data keys were erased while they were created")
        return await self._open(owner, keys, keys.primary)

    async def key(self, owner: Owner, key_id: str) -> DataKey:
        """Return the key of that id. Raises `Corrupt` if it was erased or never existed."""
        owner = self._holder(owner)
        keys = self._fresh(owner)
        if keys is None or key_id not in keys.wrapped:
            keys = await self._load(owner)
        if keys is None or key_id not in keys.wrapped:
            raise Corrupt("sealed with a data key that was erased, or that is not in this store of keys")
        return await self._open(owner, keys, key_id)

    async def rotate(self, owner: Owner) -> str:
        """Add a key and make it primary; returns its id. Older values stay readable."""
        owner = self._holder(owner)
        for lost in range(operations.RACES):
            await asyncio.sleep(operations.pause_after(lost))
            added = await self._add(owner, await self._load(owner))
            if added is not None:
                self._known.pop(owner, None)
                return added
        raise Unavailable("the data keys changed each time that one was to be added")

    async def rewrap(self, owner: Owner) -> int:
        """Wrap the stored keys of an owner again that an older wrapping key wraps; returns how many.

        Also forgets what this process remembers, so that it uses keys that others have added.
        """
        owner = self._holder(owner)
        for lost in range(operations.RACES):
            await asyncio.sleep(operations.pause_after(lost))
            keys = await self._load(owner)
            if keys is None:
                return 0
            old = [one for one, wrapped in keys.wrapped.items() if not self._wrapping.is_current(wrapped)]
            if not old:
                return 0
            again: dict[str, bytes] = {}
            for one in old:
                secret = await self._wrapping.unwrap(keys.wrapped[one], owner, one)
                again[one] = await self._wrapping.wrap(secret, owner, one)
            if await self._replace(owner, keys, keys.primary, {**keys.wrapped, **again}):
                self._known.pop(owner, None)
                return len(old)
        raise Unavailable("the data keys changed each time that they were wrapped again")

    async def erase(self, owner: Owner) -> int:
        """Delete the keys of a user or, with `Owner(tenant, "")`, of a tenant and all its users.

        Returns how many of them had keys. Keys per tenant are not touched by the erasure of a user.
        """
        if self._holder(owner) != owner:
            return 0
        try:
            if owner.user:
                return await self._delete(data_keys_key(*owner))
            # Also those of users whom the directory no longer lists, because nothing of them is stored.
            scope = data_keys_scope(owner.tenant)
            erased = [
                await self._delete(Key(scope, name)) async for name in operations.names(self._store, scope)
            ]
            if not erased:
                await operations.confirm(self._store, (scope,))
            return sum(erased)
        finally:
            # Last, so that what is read meanwhile is not remembered either.
            self._erasures += 1
            for one in [one for one in self._known if owner in (one, Owner(one.tenant, ""))]:
                del self._known[one]

    async def _delete(self, key: Key) -> bool:
        return await operations.retried(lambda: self._store.delete(key))

    def _holder(self, owner: Owner) -> Owner:
        return owner if self._per_user else Owner(owner.tenant, "")

    def _fresh(self, owner: Owner) -> _Keys | None:
        keys = self._known.get(owner)
        return keys if keys is not None and self._clock() - keys.at < self._lifetime_s else None

    async def _load(self, owner: Owner) -> _Keys | None:
        """Read the keys of an owner, and remember them."""
        at, erasures = self._clock(), self._erasures
        record = await _stored(self._store.load(data_keys_key(*owner)))
        if record is None or record.body is None:
            self._known.pop(owner, None)
            return None
        content = cast("Any", self._codec.open("keys", record.body))
        before = self._known.pop(owner, None)
        try:
            primary = str(content["primary"])
            wrapped = {str(one): base64.b64decode(text) for one, text in content["keys"].items()}
            _ = wrapped[primary]
        except (KeyError, AttributeError, TypeError, ValueError):
            raise Corrupt("the stored data keys of an owner cannot be read") from None
        opened = {k: v for k, v in before.opened.items() if k in wrapped} if before else {}
        keys = _Keys(at, record.version, primary, wrapped, opened)
        if erasures == self._erasures:
            self._known[owner] = keys
        if len(self._known) > _REMEMBERED:
            self._known.popitem(last=False)
        return keys

    async def _add(self, owner: Owner, before: _Keys | None) -> str | None:
        """Store a new primary key beside those known; `None` if another process has changed them."""
        key_id = secrets.token_hex(8)
        wrapped = await self._wrapping.wrap(os.urandom(KEY_BYTES), owner, key_id)
        every = {**(before.wrapped if before else {}), key_id: wrapped}
        return key_id if await self._replace(owner, before, key_id, every) else None

    async def _replace(
        self, owner: Owner, before: _Keys | None, primary: str, wrapped: Mapping[str, bytes]
    ) -> bool:
        """Store the keys of an owner, unless another process has changed them."""
        texts = {one: base64.b64encode(data).decode() for one, data in wrapped.items()}
        body = self._codec.seal("keys", {"primary": primary, "keys": texts})
        expect = ABSENT if before is None else before.version
        return await _stored(
            self._store.replace(data_keys_key(*owner), body, version=new_version(), expect=expect, ttl=None)
        )

    async def _open(self, owner: Owner, keys: _Keys, key_id: str) -> DataKey:
        found = keys.opened.get(key_id)
        if found is None:
            secret = await self._wrapping.unwrap(keys.wrapped[key_id], owner, key_id)
            found = keys.opened[key_id] = DataKey(key_id, secret)
        return found


async def _stored(operation: Awaitable[T]) -> T:
    """Return the answer of the store; an outage is `Unavailable`, because nothing was sealed or opened."""
    try:
        return await operation
    except (Corrupt, Denied):
        raise
    except StorageError as error:
        raise Unavailable(f"the store of the data keys failed: {error}") from error
