"""Copies all records of tenants and users from one datastore to another.

Body, tail and version are copied byte for byte. Nothing is decoded, so records of a newer version of this
library are copied, too, and records written with a transform need that transform at the target. A lease in a
body is copied with it and expires by itself. A time to live cannot be read, so it is not copied. Paused
runs expire within an hour and are not copied.

Copying a record takes several writes: its body, then its tail, entry by entry. An interruption leaves the
beginning of the record under its own version, which the next copy recognizes and completes. Any other record
under the same key is different, and is left alone unless `replace` is set.

The pages of transcripts come after the conversations that they belong to: pages only grow, so they have every
turn that a record says is there. The pages of a conversation that was not copied are not copied either.

The source may be in use; verifying finds what has changed since. The records of these owners at the target
must not be in use yet: a memory that folds half a copy makes it different.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from enum import Enum
from typing import Final, Literal, NamedTuple, TypeAlias, get_args

from stm_backends.catalogue.card import SLOT_S
from stm_backends.catalogue.word_index import WordIndex
from stm_backends.drivers.checks import require_fits, require_seconds
from stm_backends.drivers.contract import ABSENT, ANY, Driver, Key, Record
from stm_backends.drivers.wrapper import layer_with
from stm_backends.errors import (
    Corrupt,
    KeyMismatch,
    OutcomeUnknown,
    SealMismatch,
    StorageError,
    TooLarge,
    Unavailable,
)
from stm_backends.races import Lost, contend
from stm_backends.records import confirming, keys, ledger, operations, pages
from stm_backends.records.codec import Codec
from stm_backends.records.directory import Directory
from stm_backends.records.seals import load_mark, store_mark
from stm_backends.telemetry.guarded import guarded
from stm_backends.telemetry.observer import SILENT, Observer, Subject

KINDS: Final[tuple[keys.Kind, ...]] = tuple(
    kind for kind in keys.KINDS if kind not in ("card", "recent", "words", "part", "planner")
)
"""The kinds that are copied and counted. Parts come with their record, and words follow from conversations.
Paused runs expire within an hour, so neither they nor the notes that name their users are copied."""

CARDS: Final[tuple[keys.Kind, ...]] = ("card", "recent")
"""Kinds copied with conversations and not counted: their cards, then the names in the index."""

_SHARED: Final[tuple[keys.Kind, ...]] = ("blob",)
"""Kinds that no user owns: states of a tenant as a whole, and states whose keys name no tenant."""


class Owner(NamedTuple):
    """The owner of records: a user or, with `user=None`, a tenant with all of its users."""

    tenant: str
    user: str | None = None


UNOWNED: Final = Owner("", "")
"""The owner of states whose keys name no tenant and user."""


class Item(NamedTuple):
    """One record: its owner, kind and key. The user is empty if a tenant owns it, and both if nobody does."""

    tenant: str
    user: str
    kind: keys.Kind
    key: Key

    @property
    def name(self) -> str:
        """The session id of a conversation, or the key of a saved state."""
        return keys.unname(self.key.name)


class Comparison(Enum):
    """The comparison of a record at the target with the one at the source."""

    ABSENT = "absent"
    BEGUN = "begun"
    EQUAL = "equal"
    DIFFERENT = "different"


def compare(source: Record, target: Record | None) -> Comparison:
    """Compare two records under one key; `BEGUN` means that the tail only lacks entries at its end."""
    if target is None:
        return Comparison.ABSENT
    if target == source:
        return Comparison.EQUAL
    same = (target.version, target.body) == (source.version, source.body)
    if same and target.tail == source.tail[: len(target.tail)]:
        return Comparison.BEGUN
    return Comparison.DIFFERENT


Written: TypeAlias = Literal["copied", "completed", "replaced"]
"""The kind of write: an absent record, the rest of a begun one, or a replacement."""

Problem: TypeAlias = Literal["left", "behind", "changed", "failed"]
"""The reason why a record differs between both ends.

- `"left"`: the target had a different record, which was not changed.
- `"behind"`: the source has grown since the copy; copying again adds the rest.
- `"changed"`: the source or the target has changed otherwise since; copying again must replace it.
- `"failed"`: the record cannot be read, or is too large for the target; the error says which.
"""

Outcome: TypeAlias = Written | Problem | Literal["unchanged", "verified", "extra", "gone"]
"""The result of copying or verifying a record.

`"unchanged"`: was equal already; `"verified"`: is equal at both ends, byte for byte; `"extra"`: exists only
at the target, because it was erased or expired at the source, or never existed there; `"gone"`: disappeared
before it was copied.
"""


class Copy:
    """One copy of the records of some owners: call `count`, `copy` and `verify`, in that order.

    Both drivers must be open and are not closed. With `replace`, different records of the target are
    replaced. `ttl` is the time to live in seconds of every record that is written, except for those of
    graphs, which never expire; `None` means forever.
    `on_problem` is called once for each record that is not equal at both ends, and `observer` receives each
    record that was written. Memory use depends on the number of those records, not of all records.
    """

    def __init__(
        self,
        source: Driver,
        target: Driver,
        owners: Iterable[Owner],
        *,
        replace: bool = False,
        ttl: float | None = None,
        on_problem: Callable[[Item, Problem, StorageError | None], None] = lambda item, problem, error: None,
        observer: Observer = SILENT,
    ) -> None:
        if ttl is not None:
            require_seconds("ttl", ttl)
        self._source = source
        self._target = target
        self._directory = Directory(target, Codec(), any_seal=True)
        given = dict.fromkeys(owners)
        # A user of a tenant that is copied as a whole is not copied twice.
        self._owners = [one for one in given if one.user is None or Owner(one.tenant) not in given]
        self._replace = replace
        self._ttl = ttl
        self._on_problem = on_problem
        self._observer = guarded(observer)
        self._problems: set[Key] = set()
        self._sealed: set[str] = set()
        self._without_pages: set[Key] = set()
        self.tally: Counter[Outcome] = Counter()

    @property
    def ok(self) -> bool:
        """True if every record that was verified is equal at both ends."""
        return not any(self.tally[problem] for problem in get_args(Problem))

    async def count(self) -> Mapping[Owner, int]:
        """Return the number of records to copy, for each owner."""
        return {owner: await _length(_items(owner, self._source)) for owner in self._owners}

    async def copy(self, on_record: Callable[[int], None] = lambda done: None) -> None:
        """Copy every record that the target does not have completely.

        A record that cannot be read or is too large is skipped. Any other `StorageError` ends the copy; a new
        one does not repeat what was copied. `on_record` is called with the number of processed records.
        """
        for tenant in {owner.tenant for owner in self._owners}:
            await self._bring_mark(tenant)
        await self._each((self._source,), self._copy, on_record)
        await self._each((self._source,), self._copy_card, kinds=CARDS)

    async def verify(self, on_record: Callable[[int], None] = lambda done: None) -> None:
        """Load all records of both ends and compare them, except for those with a known problem."""
        await self._each((self._source, self._target), self._verify, on_record)
        await self._each((self._source,), self._verify_card, kinds=CARDS)

    async def _each(
        self,
        ends: tuple[Driver, ...],
        work: Callable[[Item], Awaitable[None]],
        on_record: Callable[[int], None] = lambda done: None,
        *,
        kinds: Sequence[keys.Kind] = KINDS,
    ) -> None:
        """Process each record that either end has, several at a time."""
        done = 0

        async def one(item: Item) -> None:
            nonlocal done
            await work(item)
            done += 1
            on_record(done)

        first: list[keys.Kind] = [kind for kind in kinds if kind != "page"]
        then: list[keys.Kind] = [kind for kind in kinds if kind == "page"]
        for stage in (first, then):
            for owner in self._owners:
                await operations.each(_items(owner, *ends, kinds=stage), one)

    async def _bring_mark(self, tenant: str) -> None:
        """Mark a tenant as sealed at the target if it is at the source, and note whether it is."""
        if any(layer_with(end, "marks") for end in (self._source, self._target)):
            return  # an end with keys is read and written in clear text
        source = await load_mark(self._source, tenant)

        async def attempt() -> bool | Lost:
            target = await load_mark(self._target, tenant)
            checks = {**target.checks, **source.checks}
            if checks:
                self._sealed.add(tenant)
            if any(source.checks.get(one, check) != check for one, check in target.checks.items()):
                raise KeyMismatch(
                    "a tenant is sealed at the source and at the target with different keys of the same id; "
                    "nothing was copied",
                    backend=self._target.name,
                    operation="copy",
                )
            if checks == target.checks or await store_mark(self._target, tenant, target, checks):
                return True
            return Lost(target.expect)

        if not await contend(attempt):
            raise Unavailable("the mark of a sealed tenant kept changing", backend=self._target.name)

    async def _copy(self, item: Item) -> None:
        if item.kind == "page" and self._is_without_record(item.key):
            self._problems.add(item.key)
            return
        owner = (item.tenant, item.user) if item.tenant else None
        # The records of a graph belong together, so none expires before the others.
        ttl = None if item.kind == "graph" else self._ttl
        try:
            source = await self._source.load(item.key)
            if source is None:
                self._note(item, "gone")
                return
            self._require_sealed(item, source)
            async with self._directory.listed(owner, ttl) as listing:
                outcome = await self._bring(item.key, source, ttl)
                listing.created = outcome in get_args(Written)
        except (Corrupt, TooLarge) as error:
            self._note(item, "failed", error)
        else:
            self._note(item, outcome)

    def _is_without_record(self, page: Key) -> bool:
        """Say whether the record that a page belongs to was not copied."""
        return Key(page.scope, keys.prefix_in(page.name)) in self._without_pages

    async def _copy_card(self, item: Item) -> None:
        """Copy a card, or its name in the index, over what the target has of the same conversation."""
        try:
            source, target = await self._source.load(item.key), await self._target.load(item.key)
            if source is None or source.body is None or source == target:
                return
            self._require_sealed(item, source)
            # A name lives longer than its card.
            ttl = self._ttl if self._ttl is None or item.kind == "card" else self._ttl + SLOT_S
            async with self._directory.listed((item.tenant, item.user), ttl) as listing:
                change = ledger.Change(source.body, version=source.version, ttl=ttl)
                await ledger.replace(self._target, item.key, change, expect=ANY)
                listing.created = target is None
            if item.kind == "card" and target is not None:
                words = WordIndex(self._target, Codec(), self._directory, (item.tenant, item.user))
                await words.forget(item.key.name)
        except SealMismatch:
            # Its conversation has failed for the same reason.
            self._problems.add(item.key)
        except Corrupt as error:
            self._note(item, "failed", error)

    async def _verify_card(self, item: Item) -> None:
        """Find a card that has changed since it was copied, or a name that is missing."""
        if item.key in self._problems:
            return
        try:
            source, target = await self._source.load(item.key), await self._target.load(item.key)
        except Corrupt as error:
            self._note(item, "failed", error)
        else:
            if source is not None and source != target:
                self._note(item, "behind")

    def _require_sealed(self, item: Item, source: Record) -> None:
        """Raise `SealMismatch` for clear text of a tenant that is sealed at the target."""
        if item.tenant in self._sealed and not operations.is_sealed(source):
            raise SealMismatch(
                "the data of the tenant is sealed at the target, and this is clear text; export it, and "
                "import it with the keys",
                backend=self._target.name,
                operation="copy",
            )

    async def _bring(self, key: Key, source: Record, ttl: float | None) -> Outcome:
        """Make the target's record equal to the source's.

        Each round loads the target and continues from there, so a lost answer is handled like an
        interruption.
        """
        outcome: Outcome = "unchanged"
        unknown: OutcomeUnknown | None = None

        async def attempt() -> Outcome | Lost:
            nonlocal outcome, unknown
            target = await self._target.load(key)
            found, lost = compare(source, target), Lost(target and target.version)
            if found is Comparison.EQUAL:
                if outcome == "unchanged" or unknown is not None:
                    # An earlier write may be on the server alone, and not on its replicas.
                    await confirming.confirm(self._target, (key.scope,))
                return outcome
            self._require_fits(source)
            if target is not None and found is Comparison.DIFFERENT:
                if not self._replace:
                    return "left"
                outcome, version = "replaced", target.version
                try:
                    if not await ledger.delete(self._target, key, expect=version):
                        return lost
                except OutcomeUnknown as error:
                    unknown = error
                    return lost
                await ledger.erase_parts(self._target, key)
                await pages.erase(self._target, key)
                target = None
            elif outcome == "unchanged":
                outcome = "completed" if target else "copied"
            try:
                return outcome if await self._write(key, source, target, ttl) else lost
            except OutcomeUnknown as error:
                unknown = error
                return lost

        done = await contend(attempt)
        if done is None and unknown is not None:
            raise unknown
        return done or "left"

    async def _bring_parts(self, key: Key, record: Record) -> None:
        """Copy the parts of a sealed record's large values: without its keys, its pointers cannot be seen."""
        if not operations.is_sealed(record):
            return
        scope, prefix = keys.parts_of(key)
        async for name in operations.names_of(self._source, scope, prefix):
            part = await self._source.load(Key(scope, name))
            if part is None or part.body is None:
                continue
            # The time to live in a part is sealed, so nothing would extend another one. `purge`
            # removes the parts of expired records.
            await self._directory.note_parts(key, None)
            change = ledger.Change(part.body, version=part.version, ttl=None)
            await ledger.replace(self._target, Key(scope, name), change, expect=ABSENT)

    async def _write(self, key: Key, source: Record, target: Record | None, ttl: float | None) -> bool:
        """Write the missing data; returns `False` if another process wrote the same record."""
        version, body = source.version, source.body
        try:
            # First, so that no pointer is without its parts.
            await self._bring_parts(key, source)
            if target is None and body is not None:
                change = ledger.Change(body, version=version, ttl=ttl)
                created = await ledger.replace(self._target, key, change, expect=ABSENT)
                if not created:
                    return False
            start = len(target.tail) if target else 0
            for length, entry in enumerate(source.tail[start:], start + 1):
                if await self._target.append(key, entry, initial_version=version, ttl=ttl) != length:
                    return False
        except TooLarge:
            # The target's limit is lower than its traits say. An incomplete conversation must not stay.
            if target is None:
                await ledger.delete(self._target, key, expect=version)
                await ledger.erase_parts(self._target, key)
            raise
        return True

    def _require_fits(self, record: Record) -> None:
        """Raise `TooLarge`, before anything is written, for a record that exceeds the target's limits."""
        traits, values = self._target.traits, (record.body or b"", *record.tail)
        where = {"backend": self._target.name, "operation": "copy"}
        require_fits("entry", max(map(len, values)), traits.max_entry, **where)
        # A sealed value is stored as it is: if it was large, it is in parts already.
        taken = (
            len(value) + traits.overhead if value.startswith(operations.SEALED) else traits.room(len(value))
            for value in values
        )
        require_fits("record", sum(taken), traits.max_record, **where)

    async def _verify(self, item: Item) -> None:
        if item.key not in self._problems:
            try:
                source, target = await self._source.load(item.key), await self._target.load(item.key)
            except Corrupt as error:
                self._note(item, "failed", error)
            else:
                self._note(item, _judged(source, target))

    def _note(self, item: Item, outcome: Outcome, error: StorageError | None = None) -> None:
        self.tally[outcome] += 1
        if outcome in ("left", "failed", "gone"):
            self._without_pages.add(keys.pages_of(item.key))
        if outcome in get_args(Written):
            session = item.name if item.kind == "memory" else ""
            self._observer.copied(Subject(item.tenant, item.user, session), 1)
        if outcome in ("left", "behind", "changed", "failed"):
            self._problems.add(item.key)
            self._on_problem(item, outcome, error)


def _judged(source: Record | None, target: Record | None) -> Outcome:
    """Return the result of comparing a record at both ends."""
    if source is None:
        return "gone" if target is None else "extra"
    match compare(source, target):
        case Comparison.EQUAL:
            return "verified"
        case Comparison.ABSENT | Comparison.BEGUN:
            return "behind"
        case Comparison.DIFFERENT:
            return "changed"


async def _items(owner: Owner, *ends: Driver, kinds: Sequence[keys.Kind] = KINDS) -> AsyncIterator[Item]:
    """Yield the records of an owner that either end has, each once."""
    shared: Sequence[keys.Kind] = [kind for kind in _SHARED if kind in kinds]
    async for user in _users(owner, *ends):
        for kind in kinds if user else shared:
            scope = keys.scope(owner.tenant, user, kind) if user else keys.shared_scope(owner.tenant)
            async for name in _union(*(operations.names(end, scope) for end in ends)):
                yield Item(owner.tenant, user, kind, Key(scope, name))


async def _users(owner: Owner, *ends: Driver) -> AsyncIterator[str]:
    if owner.user is not None:
        yield owner.user
        return
    scope = keys.directory_scope(owner.tenant)
    async for name in _union(*(operations.names(end, scope) for end in ends)):
        yield keys.unname(name)
    # Records of the tenant as a whole.
    yield ""


async def _union(*listings: AsyncIterator[str]) -> AsyncIterator[str]:
    """Merge listings in the order of their UTF-8 bytes, without duplicates."""
    heads = [await anext(listing, None) for listing in listings]
    while (
        first := min((head for head in heads if head is not None), key=str.encode, default=None)
    ) is not None:
        yield first
        for index, head in enumerate(heads):
            if head == first:
                heads[index] = await anext(listings[index], None)


async def _length(items: AsyncIterator[object]) -> int:
    length = 0
    async for _ in items:
        length += 1
    return length
