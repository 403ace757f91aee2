"""The directory of a tenant's users, so that the tenant's conversations can be listed and erased.

Each user of a tenant has an entry: a record in a scope of the tenant. Every stored record belongs to a user
with an entry while the record exists:

- The entry is written before the user's first record and, because an erasure may come in between, again after
  a record was created.
- The entry has at least the time to live of any record that was written for the user. It is extended in
  advance, so most writes need not touch it. With a record that never expires, the entry never expires.

So the entry of a user expires soon after the user's last record. `forget_if_unused` removes the entry of a
user whose records were removed otherwise.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import Final, Literal, NamedTuple, TypeAlias

from stm_backends import races
from stm_backends.drivers.bounded import Bounded
from stm_backends.drivers.checks import LONGEST_S
from stm_backends.drivers.contract import ABSENT, ANY, AbsentType, AnyType, Driver, Key
from stm_backends.drivers.scopes import next_scope_of
from stm_backends.errors import (
    ConfigurationError,
    Corrupt,
    KeyMismatch,
    OutcomeUnknown,
    SealMismatch,
    StorageError,
    Unavailable,
)
from stm_backends.races import Lost, contend
from stm_backends.records import confirming, keys, ledger, operations
from stm_backends.records.codec import Codec
from stm_backends.records.seals import Seals

logger = logging.getLogger("stm_backends")

REMEMBERED_USERS: Final = 10_000
REMEMBERED_FOR_S: Final = 60.0
"""Maximum number of users that a process remembers as listed, and the seconds for which it does."""

SPARE: Final = 1 / 8
LEAST_SPARE_S: Final = 2 * 3600.0
"""The time for which a user's entry outlives a record: a share of the record's time to live, and at least
this many seconds. An entry is extended once half of that has passed, so clocks of processes may differ by an
hour."""


Seal: TypeAlias = Literal["sealed", "clear"]
"""The storage form of a user's data."""


class _Entry(NamedTuple):
    """The condition to replace an entry, until when it lives (epoch seconds), and the id of a data key."""

    expect: str | AbsentType | AnyType
    until: float = -math.inf
    key: str | None = None


class _Noted(NamedTuple):
    """An entry that this process read or wrote `at` (monotonic seconds), and how long it lived from then."""

    at: float
    life: float


class Directory:
    """The users of every tenant on one backend.

    `clock` is monotonic; `epoch` is in epoch seconds. With `any_seal`, entries are replaced even if they are
    sealed and this backend has no sealing, or the reverse. `seals` is asked whether this backend may write.
    """

    def __init__(
        self,
        driver: Driver,
        codec: Codec,
        *,
        clock: Callable[[], float] = time.monotonic,
        epoch: Callable[[], float] = time.time,
        any_seal: bool = False,
        seals: Seals | None = None,
    ) -> None:
        self._driver = driver
        self._codec = codec
        self._clock = clock
        self._epoch = epoch
        self._any_seal = any_seal
        self._seals = seals
        self._noted: Bounded[tuple[str, str], _Noted] = Bounded(REMEMBERED_USERS)

    async def note(
        self,
        tenant: str,
        user: str,
        *,
        ttl: float | None = None,
        fresh: bool = False,
        any_seal: bool = False,
    ) -> None:
        """List a user for whom a record is written that lives `ttl` seconds, or forever.

        Takes no round trip if this process did so within the last minute, unless `fresh=True`; else one, and
        one more if the entry does not exist, does not live long enough, or may be unconfirmed. Unless
        `any_seal=True`, it raises `SealMismatch` if the user's data is sealed and this backend has no
        sealing, or the reverse, and `KeyMismatch` if it is sealed with a key that this backend lacks.
        """
        owner = (tenant, user)
        if not fresh and self.knows(owner, ttl):
            return
        at, key = self._clock(), keys.directory_key(*owner)
        any_seal = any_seal or self._any_seal
        try:
            if not any_seal:
                await self.meet(tenant)
            life = await self._cover(key, ttl, any_seal=any_seal)
        except BaseException:
            # An earlier listing counts until then, so that no write of the user waits for this one.
            self.doubt(owner)
            raise
        self._noted[owner] = _Noted(at, life)

    async def life_of(self, tenant: str, user: str) -> float | None:
        """List a user who has records; returns the maximum seconds that these live, `None` if forever."""
        until = (await self._read(keys.directory_key(tenant, user))).until
        # Without an entry, or with one that cannot be read, nothing is known.
        known = self._epoch() < until < math.inf
        await self.note(tenant, user, ttl=0.0 if known else None)
        return until - self._epoch() if known else None

    async def meet(self, tenant: str) -> None:
        """Raise `SealMismatch` or `KeyMismatch` if this backend may not write for a tenant; see `Seals`.

        `""` stands for data that names no tenant. Takes no round trip if done within the last minute.
        """
        whole, at = (tenant, ""), self._clock()
        if self._seals is not None and not self.knows(whole):
            await self._seals.meet(tenant)
            self._noted[whole] = _Noted(at, math.inf)

    async def require_keys(self, tenant: str) -> None:
        """Raise `KeyMismatch` if this backend has keys, and none that wrote for a tenant."""
        if self._seals is not None:
            await self._seals.require(tenant)

    async def _cover(self, key: Key, ttl: float | None, *, any_seal: bool) -> float:
        """Make an entry live long enough for a record; returns the seconds that it lives from now."""
        if ttl is not None and ttl > LONGEST_S / 2:
            ttl = None
        spare = 0.0 if ttl is None else max(SPARE * ttl, LEAST_SPARE_S)

        async def attempt() -> float | Lost:
            nonlocal ttl
            now = self._epoch()
            entry = await self._read(key, any_seal=any_seal)
            data_key = entry.key
            if self._seals is not None and not any_seal:
                data_key = await self._seals.key_of(*_listed_by(key), entry.key)
            if entry.expect is ANY:
                # Its intended time to live is unknown.
                ttl = None
            until = entry.until
            if until - now >= (math.inf if ttl is None else ttl + spare / 2) and data_key == entry.key:
                # Another process may have written it, and its replicas lack it yet.
                await confirming.confirm(self._driver, (key.scope,))
                return until - now
            until = math.inf if ttl is None else max(until, now + ttl + spare)
            content = {} if until == math.inf else {"until": until}
            body = self._codec.seal("user", content if data_key is None else {**content, "key": data_key})
            life = until - now
            change = ledger.Change(body, ttl=None if life == math.inf else life)
            stored = await ledger.replace(self._driver, key, change, expect=entry.expect)
            return life if stored else Lost(entry.expect)

        life = await contend(attempt)
        if life is None:
            raise self._unsettled()
        return life

    async def _read(self, key: Key, *, any_seal: bool = True) -> _Entry:
        """Return an entry as it is now."""
        try:
            record = await self._driver.load(key)
            if record is None:
                return _Entry(ABSENT)
            content = self._codec.open("user", record.body or b"")
            until, data_key = float(content.get("until", math.inf)), content.get("key")
            if math.isnan(until):
                return _Entry(ANY)
            return _Entry(record.version, until, None if data_key is None else str(data_key))
        except (Corrupt, AttributeError, TypeError, ValueError) as error:
            if isinstance(error, KeyMismatch) and not any_seal:
                # With the right key, it and all that it stands for can be read.
                raise
            if (
                isinstance(error, SealMismatch)
                and not any_seal
                and await self.other_seal(*_listed_by(key)) is not None
            ):
                raise
            # It says little but how long it lives; it is damaged, or its data key was erased.
            return _Entry(ANY)

    async def other_seal(self, tenant: str, user: str) -> Seal | None:
        """Return the seal of a user's data if this backend stores data the other way, else `None`.

        `"sealed"` means that the backend has no sealing, `"clear"` that it accepts only sealed values.
        """
        try:
            entry = await self._driver.load(keys.directory_key(tenant, user))
            if entry is None or operations.is_sealed(entry):
                return "sealed" if entry else None
        except SealMismatch:
            pass
        except Corrupt:
            return None
        # The entry is in clear text. A copy made without keys leaves such entries next to sealed records.
        return await self._other_seal_of_records(tenant, user)

    async def _other_seal_of_records(self, tenant: str, user: str) -> Seal | None:
        """Return the same for a user's first readable record."""
        for kind in keys.KINDS:
            scope = keys.scope(tenant, user, kind)
            async for name in operations.names(self._driver, scope):
                try:
                    record = await self._driver.load(Key(scope, name), last=1)
                except SealMismatch:
                    return "clear"
                except Corrupt:
                    continue
                if record is not None:
                    return "sealed" if operations.is_sealed(record) else None
        return None

    def knows(self, owner: tuple[str, str], ttl: float | None = None) -> bool:
        """Say whether this process listed a user within the last minute, for records that live as long."""
        noted = self._noted.get(owner)
        return (
            noted is not None
            and self._clock() - noted.at < REMEMBERED_FOR_S
            and (noted.life == math.inf if ttl is None else noted.life >= ttl + LEAST_SPARE_S / 2)
        )

    def doubt(self, owner: tuple[str, str]) -> None:
        """Ask the datastore again before the next write for a user."""
        self._noted.pop(owner)

    async def forget_seal(self, tenant: str) -> None:
        """Remove the mark of a tenant without remaining data; the next write with keys marks it again."""
        await races.retried(lambda: self._driver.delete(keys.mark_key(tenant)))
        self.doubt((tenant, ""))

    def listed(self, owner: tuple[str, str] | None, ttl: float | None = None) -> Listing:
        """Keep a user listed around a write that may create a record of theirs; `None`: no tenant and user.

        A tenant as a whole, with the user `""`, is in no list: the key of its records follows from its name.

        The record lives `ttl` seconds, or forever. The user is listed before the write, so that an erasure
        of the tenant finds the record even if this process dies after writing it. If `created` is set, the
        user is listed once more, because an erasure may have come in between; a write that creates nothing
        needs no more, because the erasure finds the record itself. After a write whose outcome is unknown,
        the next write asks the datastore again.
        """
        return Listing(self, owner, ttl)

    async def note_creation(self, owner: tuple[str, str], ttl: float | None) -> None:
        """List a user again after a record of theirs was created. Only logs a failure: the write was done."""
        try:
            await self.note(*owner, ttl=ttl, fresh=True)
        except StorageError as error:
            logger.warning("could not refresh the tenant directory after creating a record: %s", error)

    async def note_parts(self, key: Key, ttl: float | None) -> None:
        """List the user of a record whose parts are about to live `ttl` seconds, longer than the record."""
        tenant, user = keys.owner_of(key.scope)
        if tenant and user:
            await self.note(tenant, user, ttl=ttl)

    async def users(self, tenant: str) -> AsyncIterator[str]:
        """Yield the users of a tenant."""
        async for name in operations.names(self._driver, keys.directory_scope(tenant)):
            yield keys.unname(name)

    async def has(self, tenant: str, user: str | None = None) -> bool:
        """Say whether anything is stored for a tenant, or for one user of it."""
        if user is not None:
            try:
                entry = await self._driver.load(keys.directory_key(tenant, user))
            except Corrupt:
                return True
            return entry is not None or await self._has_records(tenant, user)
        return await self._has_tenant(tenant)

    async def _has_tenant(self, tenant: str) -> bool:
        """Say whether a tenant has a user, or its own states."""
        for scope in (keys.directory_scope(tenant), keys.shared_scope(tenant)):
            async for _ in operations.names(self._driver, scope):
                return True
        return False

    async def tenants(self) -> AsyncIterator[str]:
        """Yield the tenants with a listed user, or their own states.

        Takes two or three operations for each tenant, regardless of how many users and conversations it has.
        Raises `ConfigurationError` if the driver cannot find them.
        """
        next_scope = next_scope_of(self._driver)
        if next_scope is None:
            raise ConfigurationError(f"{self._driver.name} cannot list its tenants; name those that you mean")
        after = ""
        while (scope := await next_scope(after)) is not None:
            tenant, _, _ = scope.partition(":")
            # Every scope of the tenant sorts before this text, because ";" follows ":".
            after = f"{tenant};"
            if tenant and await self._has_tenant(keys.unname(tenant)):
                yield keys.unname(tenant)

    async def forget(self, tenant: str, user: str) -> float | None:
        """Remove the entry of a user; returns its remaining time to live, `None` if there was no entry."""
        key = keys.directory_key(tenant, user)

        async def attempt() -> tuple[float | None] | Lost:
            entry = await self._read(key)
            # Without a condition, a driver also removes an entry that has expired.
            removed = await self._driver.delete(key, expect=ANY if entry.expect is ABSENT else entry.expect)
            if entry.expect is ABSENT or removed:
                return (entry.until - self._epoch() if removed else None,)
            return Lost(entry.expect)

        try:
            forgotten = await contend(attempt)
        finally:
            # Last, so that a concurrent note is not remembered either.
            self.doubt((tenant, user))
        if forgotten is None:
            raise self._unsettled()
        return forgotten[0]

    def _unsettled(self) -> Unavailable:
        return Unavailable("the entry of a user in the directory kept changing", backend=self._driver.name)

    async def restore(self, tenant: str, user: str, life: float | None) -> None:
        """List a user again whose entry was removed although there are records; `life` is from `forget`."""
        # The entry covered every record that was written before it was removed. Else nothing is known.
        known = life is not None and 0 < life < math.inf
        await self.note(tenant, user, ttl=life if known else None, fresh=True, any_seal=True)

    async def forget_if_unused(self, tenant: str, user: str) -> bool:
        """Remove the entry of a user without any record; returns whether it was removed.

        A process that creates a record for the user meanwhile lists the user again after the creation. If the
        creation came before the removal, it is found here, and the user is listed again.
        """
        if await self._has_records(tenant, user):
            return False
        life = await self.forget(tenant, user)
        if life is None or not await self._has_records(tenant, user):
            return life is not None
        await self.restore(tenant, user, life)
        return False

    async def _has_records(self, tenant: str, user: str) -> bool:
        for kind in keys.KINDS:
            async for _ in operations.names(self._driver, keys.scope(tenant, user, kind)):
                return True
        return False


def _listed_by(key: Key) -> tuple[str, str]:
    """Return the tenant and the user that an entry lists."""
    return keys.owner_of(key.scope)[0], keys.unname(key.name)


class Listing:
    """A user who is listed while something is written for them; see `Directory.listed`.

    Set `created` once the write may have created a record.
    """

    __slots__ = ("_directory", "_owner", "_ttl", "created")

    def __init__(self, directory: Directory, owner: tuple[str, str] | None, ttl: float | None) -> None:
        self._directory = directory
        self._owner = owner
        self._ttl = ttl
        self.created = False

    async def __aenter__(self) -> Listing:
        if self._owner is None or not self._owner[1]:
            await self._directory.meet("" if self._owner is None else self._owner[0])
        else:
            await self._directory.note(*self._owner, ttl=self._ttl)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._owner is None or not self._owner[1]:
            return
        if isinstance(error, (OutcomeUnknown, asyncio.CancelledError)):
            self._directory.doubt(self._owner)
        elif error is None and self.created:
            await self._directory.note_creation(self._owner, self._ttl)
