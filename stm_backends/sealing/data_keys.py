"""Data keys of each tenant or user, stored wrapped. Values sealed with them are unreadable without them."""

from __future__ import annotations

import asyncio
import base64
import os
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar, cast
from weakref import WeakValueDictionary

from stm_backends import races
from stm_backends.drivers.bounded import Bounded
from stm_backends.drivers.checks import require_seconds
from stm_backends.drivers.contract import ABSENT, ANY, AnyType, Driver, Key, Record
from stm_backends.errors import (
    ConfigurationError,
    Corrupt,
    Denied,
    KeyErased,
    KeyMismatch,
    StorageError,
    Unavailable,
)
from stm_backends.races import Lost, contend
from stm_backends.records import confirming, ledger, operations
from stm_backends.records.codec import Codec
from stm_backends.records.keys import data_keys_key, data_keys_scope, erased_data_key
from stm_backends.sealing.guarded import guarded_wrapping
from stm_backends.sealing.keys import KEY_BYTES, DataKey, Owner

if TYPE_CHECKING:
    from stm_backends.sealing.wrapping import Wrapping

T = TypeVar("T")

_REMEMBERED: Final = 10_000
"""Maximum number of owners whose keys a process keeps."""


@dataclass(frozen=True, slots=True)
class _Keys:
    """The data keys of one owner as they were stored under `version`, read at `at` (monotonic seconds).

    `asked` is the number of requests to read keys again that this process had made when it read these.
    """

    at: float
    asked: int
    version: str
    primary: str
    wrapped: dict[str, bytes]
    opened: dict[str, DataKey]


@dataclass(slots=True, weakref_slot=True)
class _Access:
    """The access to an owner's keys, for one call at a time, and the last outage that a call met."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    outage: Unavailable | None = None


class EnvelopeKeys:
    """Random data keys per user, or per tenant, which are stored wrapped in a separate datastore.

    `store` is the open driver of any backend of this library, such as `open_backend(...).driver`. With
    `owns_store=True`, the backend that these keys are given to opens and closes it. Keep it apart from the
    data and its backups: a restored backup is then unreadable once the keys are erased. The first value of an
    owner creates the key; concurrent calls ask the key service once. A process keeps unwrapped keys for
    `lifetime_s` seconds; for that time it still reads with keys that others have erased or replaced.
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
            raise ConfigurationError("per must be 'user' or 'tenant'")
        self._store = store
        self._wrapping = guarded_wrapping(wrapping)
        self._per_user = per == "user"
        self._lifetime_s = lifetime_s
        self._owns_store = owns_store
        self._clock = clock
        self._codec = Codec()
        self._known: Bounded[Owner, _Keys] = Bounded(_REMEMBERED)
        self._asked = 0
        # Concurrent calls for an owner ask the store and the key service once.
        self._accesses: WeakValueDictionary[Owner, _Access] = WeakValueDictionary()
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
        keys = self._fresh(owner)
        if keys is not None and (opened := keys.opened.get(keys.primary)) is not None:
            return opened
        async with self._alone(owner):
            keys = self._fresh(owner) or await self._load(owner)
            # Another process may be first; its key is then the only one.
            keys = keys or await self._add(owner, None) or await self._load(owner)
            if keys is None:
                raise Unavailable("the data keys were erased while they were created")
            return await self._open(owner, keys, keys.primary)

    async def key(self, owner: Owner, key_id: str) -> DataKey:
        """Return the key of that id.

        Raises `KeyErased` if it was erased, and `KeyMismatch` if this store of keys has never had it.
        """
        owner = self._holder(owner)
        keys = self._fresh(owner)
        if keys is not None and (opened := keys.opened.get(key_id)) is not None:
            return opened
        async with self._alone(owner):
            keys = self._fresh(owner)
            if keys is None or key_id not in keys.wrapped:
                keys = await self._load(owner)
            if keys is not None and key_id in keys.wrapped:
                return await self._open(owner, keys, key_id)
        if await _stored(self._store.load(erased_data_key(key_id))) is not None:
            raise KeyErased("sealed with a data key that was erased")
        raise KeyMismatch(
            "sealed with a data key that this store of keys does not have: it is another store, or an older "
            "state of it; give the process the store that has the key"
        )

    async def reread(self, owner: Owner) -> None:
        """Read the stored keys of an owner, which another process may have erased."""
        owner = self._holder(owner)
        self._asked += 1
        asked = self._asked
        async with self._alone(owner):
            keys = self._known.get(owner)
            if keys is None or keys.asked < asked:
                await self._load(owner)

    async def rotate(self, owner: Owner) -> str:
        """Add a key and make it primary; returns its id. Older values stay readable."""
        owner = self._holder(owner)

        async def attempt() -> str | Lost:
            before = await self._load(owner)
            added = await self._add(owner, before)
            return Lost(before and before.version) if added is None else added.primary

        added = await contend(attempt)
        if added is None:
            raise Unavailable("the data keys changed at each attempt to add one")
        return added

    async def rewrap(self, owner: Owner) -> int:
        """Wrap the stored keys of an owner again that an older wrapping key wraps; returns how many.

        Also forgets what this process remembers, so that it uses keys that others have added.
        """
        owner = self._holder(owner)

        async def attempt() -> int | Lost:
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
            if await self._replace(owner, keys, keys.primary, {**keys.wrapped, **again}) is None:
                return Lost(keys.version)
            self._known.pop(owner)
            return len(old)

        wrapped = await contend(attempt)
        if wrapped is None:
            raise Unavailable("the data keys changed at each attempt to wrap them again")
        return wrapped

    async def erase(self, owner: Owner) -> int:
        """Delete the keys of a user or, with `Owner(tenant, "")`, of a tenant and all its users.

        Returns how many of them had keys. Keys per tenant are not touched by the erasure of a user.
        """
        if self._holder(owner) != owner:
            return 0
        try:
            if owner.user:
                return await self._delete(data_keys_key(*owner))
            # Including users whom the directory no longer lists, because nothing of them is stored.
            scope = data_keys_scope(owner.tenant)
            erased = [
                await self._delete(Key(scope, name)) async for name in operations.names(self._store, scope)
            ]
            if not erased:
                await confirming.confirm(self._store, (scope,))
            return sum(erased)
        finally:
            # Last, so that keys read meanwhile are not remembered either.
            self._erasures += 1
            for one in [one for one in self._known if owner in (one, Owner(one.tenant, ""))]:
                self._known.pop(one)

    async def _delete(self, key: Key) -> bool:
        """Note that the keys of one owner are erased, and delete them; returns whether there were any.

        Without the note, a store that has lost keys would look as if they were erased.
        """
        existed = False

        async def attempt() -> bool | Lost:
            nonlocal existed
            version: str | AnyType = ANY
            erased: Iterable[str] = ()
            with suppress(Corrupt):
                record = await self._store.load(key)
                if record is None and not self._store.traits.shows_unconfirmed:
                    return existed  # keys that are made from here on would be deleted without a note
                if record is not None:
                    erased, version = self._read(record).wrapped, record.version
            for key_id in erased:
                note = ledger.Change(self._codec.seal("keys", {"erased": key_id}), version=key_id, ttl=None)
                await ledger.replace(self._store, erased_data_key(key_id), note, expect=ABSENT)
            deleted = await races.retried(lambda: self._store.delete(key, expect=version))
            existed |= deleted or version is not ANY
            return existed if deleted or version is ANY else Lost(version)

        erased = await contend(attempt)
        if erased is None:
            raise Unavailable("the data keys changed at each attempt to erase them")
        return erased

    @asynccontextmanager
    async def _alone(self, owner: Owner) -> AsyncGenerator[None, None]:
        """Read, create and unwrap the keys of an owner one at a time.

        An outage of one call counts for all calls that waited for it: otherwise each would wait for its own
        time-out, after all those before it.
        """
        access = self._accesses.setdefault(owner, _Access())
        before = access.outage
        async with access.lock:
            if access.outage is not None and access.outage is not before:
                raise Unavailable("a concurrent call for the same data keys failed") from access.outage
            try:
                yield
            except Unavailable as error:
                access.outage = error
                raise

    def _holder(self, owner: Owner) -> Owner:
        return owner if self._per_user else Owner(owner.tenant, "")

    def _fresh(self, owner: Owner) -> _Keys | None:
        keys = self._known.get(owner)
        return keys if keys is not None and self._clock() - keys.at < self._lifetime_s else None

    async def _load(self, owner: Owner) -> _Keys | None:
        """Read the keys of an owner, and remember them."""
        at, asked, erasures = self._clock(), self._asked, self._erasures
        record = await _stored(self._store.load(data_keys_key(*owner)))
        before = self._known.pop(owner)
        if record is None or record.body is None:
            return None
        keys = self._read(record, at, asked)
        keys.opened.update({k: v for k, v in before.opened.items() if k in keys.wrapped} if before else {})
        self._remember(owner, keys, erasures)
        return keys

    def _read(self, record: Record, at: float = 0.0, asked: int = 0) -> _Keys:
        content = cast("Any", self._codec.open("keys", record.body or b""))
        try:
            primary = str(content["primary"])
            wrapped = {str(one): base64.b64decode(text) for one, text in content["keys"].items()}
            _ = wrapped[primary]
        except (KeyError, AttributeError, TypeError, ValueError):
            raise Corrupt("the stored data keys of an owner cannot be read") from None
        return _Keys(at, asked, record.version, primary, wrapped, {})

    def _remember(self, owner: Owner, keys: _Keys, erasures: int) -> None:
        """Remember keys, unless there were erasures since `erasures` was read."""
        if erasures == self._erasures:
            self._known[owner] = keys

    async def _add(self, owner: Owner, before: _Keys | None) -> _Keys | None:
        """Store a new primary key besides the known ones; `None` if another process has changed them."""
        at, asked, erasures = self._clock(), self._asked, self._erasures
        key = DataKey(secrets.token_hex(8), os.urandom(KEY_BYTES))
        wrapped = await self._wrapping.wrap(key.secret, owner, key.id)
        every = {**(before.wrapped if before else {}), key.id: wrapped}
        version = await self._replace(owner, before, key.id, every)
        if version is None:
            return None
        keys = _Keys(at, asked, version, key.id, every, {**(before.opened if before else {}), key.id: key})
        self._remember(owner, keys, erasures)
        return keys

    async def _replace(
        self, owner: Owner, before: _Keys | None, primary: str, wrapped: Mapping[str, bytes]
    ) -> str | None:
        """Store the keys of an owner; returns the version, or `None` if another process has changed them."""
        texts = {one: base64.b64encode(data).decode() for one, data in wrapped.items()}
        body = self._codec.seal("keys", {"primary": primary, "keys": texts})
        change = ledger.Change(body, ttl=None)
        expect = ABSENT if before is None else before.version
        stored = await _stored(ledger.replace(self._store, data_keys_key(*owner), change, expect=expect))
        return change.version if stored else None

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
