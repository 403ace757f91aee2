"""Limits on conversations and users: a driver around a driver that refuses appends and creations.

It knows each record from the answers to this process, so that a check takes no extra round trip. Lengths and
sizes are upper bounds: the load that precedes every refusal shows what other processes have removed since.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, cast
from weakref import WeakValueDictionary

from stm_backends.drivers.checks import require_append, require_replace
from stm_backends.drivers.contract import ANY, AnyType, Driver, Expect, Key, Record
from stm_backends.drivers.wrapper import WrapperDriver
from stm_backends.records import keys
from stm_backends.records.limits import Guard, LimitName
from stm_backends.records.operations import PAGE

REMEMBERED: Final = 4_096
"""Maximum number of record lengths cached. Adding to any other record loads it first."""


@dataclass(slots=True, eq=False)
class Sent:
    """An entry whose append was not answered yet. `loaded` is true if a load has seen it."""

    entry: bytes
    loaded: bool = False


@dataclass(slots=True)
class Known:
    """This process's knowledge of one record.

    `at` is the time of the last answer, by the steady clock; before the first, it is minus infinity. `sizes`
    are the bytes of the entries in the order of the tail, 0 for an entry of another process that was not
    loaded yet. `during` has the entries of appends that were answered during the `loads` in progress, which
    those may not have seen.
    """

    at: float = -math.inf
    exists: bool = False
    body: int = 0
    sizes: list[int] = field(default_factory=list[int])
    sent: list[Sent] = field(default_factory=list[Sent])
    loads: int = 0
    during: list[bytes] = field(default_factory=list[bytes])

    @property
    def length(self) -> int:
        """The maximum number of entries, as far as this process knows."""
        return len(self.sizes) + sum(not one.loaded for one in self.sent)

    @property
    def size(self) -> int:
        """The maximum number of bytes, as far as this process knows."""
        return self.body + sum(self.sizes) + sum(len(one.entry) for one in self.sent if not one.loaded)

    def loaded(self, record: Record | None) -> None:
        """Note the answer to a load."""
        tail = () if record is None else record.tail
        unseen = [entry for entry in self.during if entry not in tail]
        self.exists = record is not None or bool(unseen)
        self.body = 0 if record is None or record.body is None else len(record.body)
        self.sizes = [*map(len, tail), *map(len, unseen)]
        for one in self.sent:
            one.loaded = one.entry in tail

    def appended(self, one: Sent, length: int) -> None:
        """Note the answer to an append: the new length of the tail."""
        self.exists = True
        sizes, entry = self.sizes, one.entry
        if one.loaded:
            # Counted by the load.
            pass
        elif length > len(sizes):
            sizes += [0] * (length - len(sizes))
            sizes[length - 1] = len(entry)
        elif sizes[length - 1] == 0:
            # Answers arrive in any order.
            sizes[length - 1] = len(entry)
        else:
            # Some were removed, perhaps by another process. Their number is not known, so all still count.
            sizes.append(len(entry))
        if self.loads:
            self.during.append(entry)

    def failed(self, one: Sent) -> None:
        """Note that an append ended without an answer: the entry may be stored, at any place."""
        if not one.loaded:
            self.sizes.append(len(one.entry))
        if self.loads:
            self.during.append(one.entry)

    def replaced(self, body: bytes, drop: int, rewrite: Sequence[bytes], *, whole: bool) -> None:
        """Note that a body was stored; `whole` is true if the tail was emptied."""
        self.exists = True
        self.body = len(body)
        self.sizes = [] if whole else self.sizes[drop:]
        self.sizes[: len(rewrite)] = map(len, rewrite)


class LimitedDriver(WrapperDriver):
    """The five operations of `inner`, with the limits of a backend on its conversations and its users.

    `append` raises `LimitReached` before anything is written. So does a `replace` that would create a
    conversation or a saved state; no other is refused. `steady` is a clock that never steps back.
    """

    def __init__(self, inner: Driver, guard: Guard, *, steady: Callable[[], float] = time.monotonic) -> None:
        super().__init__(inner)
        self._guard = guard
        self._steady = steady
        self._known: OrderedDict[Key, Known] = OrderedDict()
        self._creations: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def load(self, key: Key, *, last: int | None = None) -> Record | None:
        """Return the record as it is now, or `None` if and only if it does not exist."""
        known = self._of(key)
        if known is None:
            return await self.inner.load(key, last=last)
        known.loads += 1
        try:
            record = await self.inner.load(key, last=last)
            if record is None or not record.skipped:
                # The sizes of entries that were skipped are not known.
                known.loaded(record)
                known.at = self._steady()
        finally:
            known.loads -= 1
            if not known.loads:
                known.during.clear()
        return record

    async def append(self, key: Key, entry: bytes, *, initial_version: str, ttl: float | None) -> int:
        """Add one entry at the end; returns the new length of the tail. Raises `LimitReached`."""

        async def append() -> int:
            return await self.inner.append(key, entry, initial_version=initial_version, ttl=ttl)

        known = self._of(key)
        if known is None:
            return await append()
        require_append(entry, ttl, self.traits, backend=self.name)
        # The record may have expired since the last answer.
        if self._steady() - known.at >= (math.inf if ttl is None else ttl):
            await self.load(key)
        if known.exists or self._most(key) is None:
            return await self._append(key, entry, known, append)
        async with self._creating(key.scope):
            if not known.exists:
                await self._require_creation(key)
            return await self._append(key, entry, known, append)

    async def _append(self, key: Key, entry: bytes, known: Known, append: Callable[[], Any]) -> int:
        await self._require_room(key, entry, known)
        # Nothing is awaited between the check and this, so calls of this process count each other.
        sent = Sent(entry)
        known.sent.append(sent)
        try:
            length = await append()
        except BaseException:
            # It may have been done, so it counts until the next append has loaded the record.
            known.at = -math.inf
            known.failed(sent)
            raise
        finally:
            known.sent.remove(sent)
        known.appended(sent, length)
        known.at = self._steady()
        return length

    async def replace(self, key: Key, body: bytes, **options: Any) -> bool:
        """Store a body and its version if the record is what the caller expects. Raises `LimitReached`."""
        expect, known = options["expect"], self._of(key)
        sizes = None if known is None else known.sizes
        if isinstance(expect, Expect) and self._most(key) is not None:
            drop, rewrite = options.get("drop", 0), options.get("rewrite", ())
            require_replace(body, rewrite, drop, expect, options["ttl"], self.traits, backend=self.name)
            async with self._creating(key.scope):
                if known is None or not known.exists:
                    await self._require_creation(key)
                stored = await self.inner.replace(key, body, **options)
        else:
            stored = await self.inner.replace(key, body, **options)
        if known is not None and stored:
            if known.sizes is sizes:
                known.replaced(body, options.get("drop", 0), options.get("rewrite", ()), whole=expect is ANY)
            else:
                # A load was answered in between, and may have seen it done: the next append loads again.
                known.at = -math.inf
        return stored

    async def delete(self, key: Key, *, expect: str | AnyType = ANY) -> bool:
        """Remove the record if it exists and carries `expect`; returns whether it did."""
        try:
            return await self.inner.delete(key, expect=expect)
        finally:
            if key in self._known:
                self._known[key].at = -math.inf

    async def _require_room(self, key: Key, entry: bytes, known: Known) -> None:
        """Raise `LimitReached` if the record as it is now has no room for one more entry."""
        turns, size = self._guard.limits.conversation_turns, self._guard.limits.conversation_bytes
        if (turns is None or _kind(key) != "memory" or known.length < turns) and (
            size is None or known.size + len(entry) <= size
        ):
            return
        record = await self.load(key)
        if record is not None and entry in record.tail:
            # A retry of what is stored already.
            return
        if _kind(key) == "memory":
            self._guard.require("conversation_turns", known.length + 1)
        self._guard.require("conversation_bytes", known.size + len(entry))

    async def _require_creation(self, key: Key) -> None:
        """Raise `LimitReached` if the user has no room for one more such record, unless it exists."""
        name, most = cast("tuple[LimitName, int]", self._most(key))
        if (
            await self._count(key.scope, _prefix(key), most) < most
            or await self.load(key, last=0) is not None
        ):
            return
        self._guard.require(name, most + 1)

    def _most(self, key: Key) -> tuple[LimitName, int] | None:
        """Return the limit on the number of such records of a user; `None` if there is none."""
        name: LimitName = "user_memories" if _kind(key) == "graph" else "user_conversations"
        most: int | None = getattr(self._guard.limits, name)
        return (name, most) if most is not None and _counted(key) else None

    async def _count(self, scope: str, prefix: str, most: int) -> int:
        """Return how many names of a scope begin with `prefix`, at most `most`."""
        count, after = 0, cast("str | None", prefix)
        while after is not None and count < most:
            page = await self.inner.scan(scope, after=after, limit=min(PAGE, most - count))
            matching = [name for name in page.names if name.startswith(prefix)]
            count += sum(not keys.is_beside(Key(scope, name)) for name in matching)
            after = page.after if len(matching) == len(page.names) else None
        return count

    def _of(self, key: Key) -> Known | None:
        """Return the knowledge of a record with limits on its size or on its creation."""
        limits, kind = self._guard.limits, _kind(key)
        if kind not in _CONVERSATIONS or (
            limits.conversation_bytes is None
            and limits.user_conversations is None
            and (kind != "memory" or limits.conversation_turns is None)
        ):
            return None
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = Known()
            if len(self._known) > REMEMBERED:
                # The oldest may be in use, so a `Bounded` does not fit.
                idle = (one for one, found in self._known.items() if not (found.sent or found.loads))
                del self._known[next(idle)]
        else:
            self._known.move_to_end(key)
        return known

    def _creating(self, scope: str) -> asyncio.Lock:
        """Return the lock of those who create a record in a scope: each counts the ones before it."""
        return self._creations.setdefault(scope, asyncio.Lock())


_CONVERSATIONS: Final = frozenset(("memory", *keys.LOG_KINDS))


def _kind(key: Key) -> str:
    return key.scope.rpartition(":")[2]


def _counted(key: Key) -> bool:
    """Say whether a record is a vertex, or a user's conversation as a memory, a log or a saved state."""
    kind = _kind(key)
    if kind == "graph":
        return key.name.startswith(keys.VERTICES)
    return (kind in _CONVERSATIONS and not keys.is_beside(key)) or (
        kind == "blob"
        and not key.scope.endswith(keys.OTHER_BLOBS)
        and not key.name.startswith(keys.RESERVED_PREFIX)
    )


def _prefix(key: Key) -> str:
    """Return the prefix of the names of a user's conversations."""
    if _kind(key) == "graph":
        return keys.VERTICES
    # In front of the session, which has no ':'.
    return key.name[: key.name.rindex(":") + 1] if _kind(key) == "blob" else ""
