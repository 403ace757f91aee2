"""Listing, exporting, importing, copying and erasing conversations.

An exported conversation is a JSON object:

```
{"format": "stm-session", "version": 1,
 "key":   {"tenant_id": ..., "user_id": ..., "session_id": ...},
 "body":  {"summary", "health", "attempts", "next_attempt_at", "folded", "dropped",
           "forgotten": {"digests", "ages"}},           as in `body.Body`
 "turns": [{"turn_id", "user_message", "assistant_response", "trajectory_digest",
            "artifacts_shown", "artifacts_hidden_refs", "ts"}, ...],     oldest first
 "card":  {"title", "metadata", "pinned", "archived"}}        as far as they were set for the catalogue
```

Fields of a newer version of this library, in the body and in turns, are preserved.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, cast, get_args

from stm_backends.admin.copying import Owner
from stm_backends.admin.describing import catalogue_on
from stm_backends.admin.erasing import EraseKeys, Erasure
from stm_backends.admin.expiring import Expire, Expiring
from stm_backends.admin.purging import Found, Purge, Purged
from stm_backends.admin.receipt import Receipt
from stm_backends.admin.resealing import OnProblem, Reseal, ResealReport
from stm_backends.catalogue.card import SET_BY_USER, Content, checked_changes
from stm_backends.drivers.contract import ABSENT, ANY, KEEP, Driver, KeepType, Record
from stm_backends.errors import (
    ConfigurationError,
    Corrupt,
    Denied,
    InvalidState,
    SessionExists,
    SessionNotFound,
    Unavailable,
    located,
)
from stm_backends.history.log import ItemLog
from stm_backends.memory.shared.snapshot import Snapshot
from stm_backends.records import confirming, keys, ledger, operations, pages
from stm_backends.records.body import REMEMBERED_IDS, Body
from stm_backends.records.codec import Codec, dump_body, dump_turn, load_body, load_turn, require_json
from stm_backends.records.directory import Directory, Seal
from stm_backends.records.keys import LogKind
from stm_backends.records.limits import UNLIMITED, Guard, Whose, characters_of
from stm_backends.telemetry.observer import SILENT, Observer, Subject
from stm_backends.types import MemoryHealth, MemoryKey

if TYPE_CHECKING:
    from stm_backends.sealing.driver import SealedDriver

FORMAT: Final = "stm-session"
FORMAT_VERSION: Final = 1

OnConflict: TypeAlias = Literal["refuse", "merge", "replace"]
"""What an import does if the conversation already exists."""


class Sessions:
    """The conversations of every tenant and user on one backend."""

    def __init__(
        self,
        driver: Driver,
        codec: Codec,
        directory: Directory,
        *,
        guard: Guard = UNLIMITED,
        erase_keys: EraseKeys | None = None,
        sealed: SealedDriver | None = None,
        observer: Observer = SILENT,
    ) -> None:
        self._driver = driver
        self._codec = codec
        self._directory = directory
        self._catalogue = catalogue_on(driver, codec, directory)
        self._guard = guard
        self._erase_keys = erase_keys or _no_keys
        self._sealed = sealed
        self._observer = observer

    def tenants(self) -> AsyncIterator[str]:
        """Yield the tenants for whom anything was stored, where the driver can find them.

        Redis and DynamoDB cannot without reading the whole datastore; there it raises `ConfigurationError`.
        """
        return self._directory.tenants()

    def users(self, tenant: str) -> AsyncIterator[str]:
        """Yield the users of a tenant for whom anything was stored."""
        return self._directory.users(tenant)

    async def has(self, tenant: str, user: str | None = None) -> bool:
        """Say whether anything is stored for a tenant or, given a user, for that user. Reads no content."""
        return await self._directory.has(tenant, user)

    async def other_seal(self, tenant: str, user: str | None = None) -> Seal | None:
        """Return how data of a user is stored if this backend stores it the other way, else `None`.

        `"sealed"` means that the backend has no `sealing`, `"clear"` that it accepts sealed values only.
        Without a `user`, it is that of the first user of the tenant. Reads one or two records.
        """
        if user is not None:
            return await self._directory.other_seal(tenant, user)
        async for first in self._directory.users(tenant):
            return await self._directory.other_seal(tenant, first)
        return None

    async def list(self, tenant: str, user: str) -> AsyncIterator[MemoryKey]:
        """Yield the conversations of a user; one that exists throughout the listing comes exactly once."""
        async for name in operations.names(self._driver, keys.scope(tenant, user, "memory")):
            yield MemoryKey(tenant, user, keys.unname(name))

    async def logs(self, tenant: str, user: str) -> AsyncIterator[tuple[LogKind, MemoryKey]]:
        """Yield the item logs of a user: the framework and the conversation of each.

        `list`, `export`, `import_` and `copy` ignore item logs; `erase`, `erase_user` and `erase_tenant`
        erase them. A log that exists throughout the listing comes exactly once.
        """
        for kind in keys.LOG_KINDS:
            async for name in operations.names(self._driver, keys.scope(tenant, user, kind)):
                yield kind, MemoryKey(tenant, user, keys.unname(name))

    async def export(self, key: MemoryKey) -> dict[str, Any]:
        """Return one conversation as JSON, from one snapshot; it is not changed.

        Raises `SessionNotFound`, and `Corrupt` if this version cannot read all of it.
        """
        record = await self._driver.load(keys.memory_key(key))
        if record is None:
            raise SessionNotFound("there is no conversation under this key")
        with located(self._driver.name, "export"):
            snapshot = Snapshot.of(record, self._codec)
            turns = [
                # The time as it is read: an import refuses what is none, and NaN is not JSON.
                {**dump_turn(stored), **self._codec.open("turn", record.tail[start]), "ts": stored.turn.ts}
                for stored, start in zip(snapshot.turns, snapshot.starts, strict=True)
            ]
        card = await self._catalogue.load(key) or {}
        shown = {name: card[name] for name in SET_BY_USER if name in card}
        self._observer.exported(Subject.of(key))
        return {
            "format": FORMAT,
            "version": FORMAT_VERSION,
            "key": {"tenant_id": key.tenant_id, "user_id": key.user_id, "session_id": key.session_id},
            # Without the transcript, whose pages are not exported.
            "body": dump_body(replace(snapshot.body.unleased(), transcript=None)),
            "turns": turns,
            **({"card": shown} if shown else {}),
        }

    async def import_(
        self,
        document: Mapping[str, Any],
        *,
        on_conflict: OnConflict = "refuse",
        ttl: float | None = None,
    ) -> MemoryKey:
        """Store an exported conversation under its key, and return the key.

        `on_conflict` says what happens if the conversation exists. `"refuse"` raises `SessionExists` and
        changes nothing. `"merge"` adds the missing turns at the end and keeps the existing summary, unless no
        turn has left that conversation yet. Turns that were summarized or dropped there are not missing,
        regardless of how long ago. If nothing is missing, nothing is changed. `"replace"` erases the existing
        conversation. A merge of the same document completes an interrupted import. Raises `InvalidState`,
        before anything is written, for an invalid document.

        `ttl` is the time to live of the conversation in seconds, as `session_ttl_s` is; `None`, the default,
        is for ever. A merge that adds a turn sets it, too, even if the conversation had another time to live.
        A merge that adds no turn does not change the time to live.

        The backend's `Limits` apply. A document that exceeds them by itself, and a new conversation beyond
        `user_conversations`, raise `LimitReached` before anything is written. A merge ends with it at the
        turn that exceeds them; the turns before it are stored.
        """
        if on_conflict not in get_args(OnConflict):
            raise ConfigurationError(f"on_conflict must be one of: {', '.join(get_args(OnConflict))}")
        session = _parse(document)
        entries = {turn_id: self._codec.seal("turn", turn) for turn_id, turn in session.turns.items()}
        where, owner = keys.memory_key(session.key), (session.key.tenant_id, session.key.user_id)
        with self._guard.reporting(Whose(*owner, session.key.session_id), "import"):
            self._require_within_limits(session, entries.values())
            async with self._directory.listed(owner, ttl) as listing:
                target = await self._prepare(session, on_conflict, ttl)
                listing.created = True
            missing = _missing(session, target)
            for turn_id in missing:
                # A turn creates the record if the conversation was just erased.
                listing = self._directory.listed(owner, ttl)
                await ledger.append(self._driver, where, entries[turn_id], ttl=ttl, listing=listing)
            if not missing:
                # An interrupted import may have stored them on the server alone, and not on its replicas.
                await confirming.confirm(self._driver, (where.scope,))
        await self._note(session, on_conflict, ttl=ttl if missing or on_conflict != "merge" else KEEP)
        self._observer.imported(Subject.of(session.key))
        return session.key

    async def _note(
        self, session: _Session, on_conflict: OnConflict, *, ttl: float | None | KeepType
    ) -> None:
        """Write the card of an imported conversation. A merge changes nothing that was set there."""
        if on_conflict == "replace":
            await self._catalogue.forget(session.key)
        card = await self._catalogue.touch(session.key, ttl=ttl) or {}
        changes = {name: value for name, value in session.card.items() if name not in card}
        if changes:
            await self._catalogue.update(session.key, changes)

    def _require_within_limits(self, session: _Session, entries: Collection[bytes]) -> None:
        """Raise `LimitReached` for a document that exceeds the limits of a conversation by itself."""
        for turn in session.turns.values():
            self._guard.require("turn_characters", partial(_characters, turn))
        self._guard.require("conversation_turns", len(entries))
        body = len(self._codec.seal_body(session.body))
        self._guard.require("conversation_bytes", body + sum(map(len, entries)))

    async def _prepare(self, session: _Session, on_conflict: OnConflict, ttl: float | None) -> Snapshot:
        """Store the body unless the existing one stays; returns the resulting conversation."""
        where, body = keys.memory_key(session.key), self._codec.seal_body(session.body)
        condition = ANY if on_conflict == "replace" else ABSENT
        old = None
        if condition is ANY:
            # Replacing a record that this process has loaded removes its parts, too.
            with suppress(Corrupt):
                old = Snapshot.of(await self._driver.load(where), self._codec).body.transcript
        created = ledger.Change(body, ttl=ttl)
        if await ledger.replace(self._driver, where, created, expect=condition):
            if old is not None:
                await pages.erase(self._driver, where, old.epoch)
            return Snapshot(created.version, session.body)
        if on_conflict == "refuse":
            raise SessionExists("there is already a conversation under this key; merge or replace it")

        async def merged(record: Record | None) -> tuple[ledger.Change | None, Snapshot]:
            with located(self._driver.name, "import"):
                found = Snapshot.of(record, self._codec)
            if found.version is not None and (_has_left(found.body) or not _has_left(session.body)):
                return None, found
            change = ledger.Change(body, ttl=ttl if record is None else KEEP)
            return change, replace(found, version=change.version, body=session.body)

        target = await ledger.update(self._driver, where, merged)
        if target is None:
            raise Unavailable(
                "the conversation changed each time that it was read",
                backend=self._driver.name,
                operation="import",
            )
        return target

    async def copy(
        self,
        key: MemoryKey,
        to: Sessions,
        *,
        under: MemoryKey | None = None,
        on_conflict: OnConflict = "refuse",
        ttl: float | None = None,
    ) -> MemoryKey:
        """Copy a conversation to another backend, or on this one `under` another key; see `import_`."""
        document = await self.export(key)
        if under is not None:
            document["key"] = {
                "tenant_id": under.tenant_id,
                "user_id": under.user_id,
                "session_id": under.session_id,
            }
        return await to.import_(document, on_conflict=on_conflict, ttl=ttl)

    async def erase(self, key: MemoryKey) -> bool:
        """Erase a conversation, readable or not; returns whether anything existed.

        Erases its record, its item logs, the state saved under its composite, and the states under
        `kv:v1:` and its composite. Other `kv:v1:` states of the user, and paused runs, are erased with the
        user. The user leaves the tenant's directory with the last record.
        """
        receipt = await self.erase_with_receipt(key.tenant_id, key.user_id, key.session_id)
        return bool(receipt.records or receipt.erased.get("parts"))

    async def erase_user(self, tenant: str, user: str) -> int:
        """Erase all records of a user, of every kind, and the user's data keys; returns how many records."""
        return (await self.erase_with_receipt(tenant, user)).records

    async def erase_tenant(self, tenant: str) -> int:
        """Erase all records and data keys of all users of a tenant; returns how many records."""
        return (await self.erase_with_receipt(tenant)).records

    async def erase_with_receipt(
        self, tenant: str, user: str | None = None, session: str | None = None
    ) -> Receipt:
        """Erase a conversation, a user or a tenant, and return what was erased and what remains.

        Then reads everything again. What another process writes during the erasure may be erased or not; what
        the second reading finds of it is in the receipt. A later write starts a new conversation.

        Raises `KeyMismatch`, before anything is erased, for a user or a tenant whose data was sealed with
        keys that this backend lacks. A backend without `sealing` erases the records alone; see
        `Receipt.keys_left`.
        """
        erasure = Erasure(self._driver, self._directory, self._erase_keys, self._observer)
        return await erasure.erase(tenant, user, session)

    async def reseal(self, tenant: str, user: str | None = None) -> ResealReport:
        """Seal everything of a tenant, or of one of its users, with the primary key.

        Changes no value. May be interrupted and repeated, while other processes use the datastore. Once every
        process seals with the primary key and the report is `ok`, no value needs an older key any more.
        Raises `ConfigurationError` if the backend has no `sealing`.
        """
        return await self.resealing([Owner(tenant, user)]).run()

    def resealing(
        self,
        owners: Iterable[Owner],
        *,
        on_problem: OnProblem = lambda key, problem, error: None,
    ) -> Reseal:
        """Return the work of `reseal` for some owners, which counts and reports its progress."""
        if self._sealed is None:
            raise ConfigurationError(
                "nothing is sealed here: open the backend with sealing=..., or the command with --sealing"
            )
        return Reseal(
            self._sealed, owners, fold_log=self._fold_log, relist=self._relist, on_problem=on_problem
        )

    async def _relist(self, tenant: str, user: str) -> None:
        """List a user again whose entry in the directory cannot be opened."""
        await self._directory.note(tenant, user, fresh=True, any_seal=True)

    async def _fold_log(self, where: keys.Key) -> bool:
        """Move the oldest entries of an item log into its body; `False` for any other record."""
        for kind in keys.LOG_KINDS:
            if where.scope.endswith(f":{kind}"):
                key = MemoryKey(*keys.owner_of(where.scope), keys.unname(where.name))
                log = ItemLog(self._driver, key, kind, codec=self._codec, directory=self._directory)
                return await log.fold()
        return False

    async def purge(
        self,
        tenant: str | None = None,
        user: str | None = None,
        *,
        older_than: float | None = None,
        dry_run: bool = False,
        on_step: Callable[[Purged], None] = lambda purged: None,
        on_found: Callable[[Found], None] = lambda found: None,
        on_unreadable: Callable[[Found, Corrupt], None] = lambda found, error: None,
    ) -> Purged:
        """Remove what has expired and, with `older_than`, what had no addition for so many seconds.

        Without a `tenant`, removes only expired records that the datastore keeps, of all tenants. For a
        tenant or a `user` of it, also removes left-over parts of large values. `older_than` empties
        conversations and item logs; the empty records expire `older_than` seconds later, unless something is
        added to them. A turn that is added during the purge stays. What has no time, as turns without `ts`,
        is kept.

        Works in short steps, and may be interrupted and repeated. `dry_run=True` counts and writes nothing.
        `on_step` is called with the counts so far, `on_found` with each record that is purged by its age, and
        `on_unreadable` with each that is kept because it cannot be read, and the reason.
        """
        if tenant is None and (older_than is not None or user is not None):
            raise ConfigurationError("name the tenant: its conversations cannot be found without it")

        def found(one: Found) -> None:
            if not dry_run:
                self._observer.purged(Subject(one.tenant, one.user, one.name), 1)
            on_found(one)

        purge = Purge(
            self._driver,
            self._codec,
            self._directory,
            older_than=older_than,
            dry_run=dry_run,
            on_step=on_step,
            on_found=found,
            on_unreadable=on_unreadable,
        )
        try:
            await purge.expired()
        except Denied:
            # A role that may use this tenant only. Listing its scopes does as much for the tenant.
            if tenant is None:
                raise
        if tenant is not None and user is not None:
            await purge.user(tenant, user)
        elif tenant is not None:
            await purge.tenant(tenant)
        return purge.purged

    async def expire(
        self,
        tenant: str,
        user: str | None = None,
        *,
        ttl: float,
        on_step: Callable[[Expiring], None] = lambda expiring: None,
    ) -> Expiring:
        """Give what is stored for a tenant, or for one user, a time to live of `ttl` seconds from now.

        Conversations, item logs and saved states expire; graphs do not. Keeps all content. Replaces the time
        to live that a record has, whether it is shorter or longer, since it cannot be read. A turn that is
        added later resets it to `session_ttl_s`. Running this again starts the time again. `on_step` is
        called with the counts so far.
        """
        expire = Expire(self._driver, self._codec, self._directory, ttl=ttl, on_step=on_step)
        await (expire.tenant(tenant) if user is None else expire.user(tenant, user))
        return expire.expiring


async def _no_keys(tenant: str, user: str) -> int:
    """Erase no data keys: nothing is sealed."""
    del tenant, user
    return 0


@dataclass(frozen=True, slots=True)
class _Session:
    """A valid exported conversation. `turns` are by id, oldest first; `card` is what was set for its card."""

    key: MemoryKey
    body: Body
    turns: Mapping[str, Mapping[str, Any]]
    card: Content


def _characters(turn: Mapping[str, Any]) -> int:
    return characters_of(load_turn(turn))


def _has_left(body: Body) -> bool:
    """Say whether turns have left a conversation, so that its body has what its turns do not."""
    return bool(body.summary or body.folded or body.dropped or body.forgotten.ages)


def _missing(session: _Session, target: Snapshot) -> list[str]:
    """Return the ids of the exported turns that a conversation lacks, oldest first.

    A conversation remembers the ids of the turns that left it last. If more have left than it remembers, an
    exported turn that it does not know may have left earlier. That is assumed of a turn that comes before all
    known ones, whose position from the beginning is before the remembered ones, or that is older than all
    turns in the record.
    """
    ids = [*session.turns]
    known = [target.holds(turn_id) for turn_id in ids]
    remembered, left = len(target.body.forgotten.each()), target.body.folded + target.body.dropped
    first = 0
    if left > remembered or remembered >= REMEMBERED_IDS:
        # Turns leave in order: after a remembered turn, none has been forgotten.
        first = known.index(True) if any(known) else _first_missing(session, target, left - remembered)
    return [turn_id for turn_id, is_known in zip(ids[first:], known[first:], strict=True) if not is_known]


def _first_missing(session: _Session, target: Snapshot, beyond_memory: int) -> int:
    """Return how many exported turns, none of which is known, left before the remembered ones."""
    before = session.body.folded + session.body.dropped
    oldest = min((stored.turn.ts for stored in target.turns), default=0.0)
    first = 0
    for index, turn in enumerate(session.turns.values()):
        if before + index < beyond_memory or 0.0 < load_turn(turn).ts < oldest:
            first = index + 1
    return first


def _parse(document: Mapping[str, Any]) -> _Session:
    if not isinstance(document, Mapping) or document.get("format") != FORMAT:  # pyright: ignore[reportUnnecessaryIsInstance] -- it comes from a file
        raise InvalidState("this is not an exported conversation")
    if document.get("version") != FORMAT_VERSION:
        raise InvalidState(f"this version of the library imports only version {FORMAT_VERSION} of exports")
    parts = _object(document, "key")
    key = MemoryKey(*(parts.get(name, "") for name in ("tenant_id", "user_id", "session_id")))
    key.composite()
    body = _object(document, "body")
    listed: object = document.get("turns")
    if not isinstance(listed, (list, tuple)):
        raise InvalidState("turns is not a list")
    turns: dict[str, Mapping[str, Any]] = {}
    for index, turn in enumerate(cast("Sequence[object]", listed)):
        path = f"turns[{index}]"
        require_json(turn, path)
        try:
            ts = load_turn(turn).ts
        except ValueError:
            # The cause may quote the conversation.
            raise InvalidState(f"{path} is not a turn: a field is of another type") from None
        content = cast("Mapping[str, Any]", turn)
        if (given := content.get("ts")) and not ts:
            raise InvalidState(f"{path}.ts is not a time in seconds since 1970")
        if given != ts and ts:
            content = {**content, "ts": ts}
        turn_id = content.get("turn_id")
        if not isinstance(turn_id, str):
            raise InvalidState(f"{path} has no turn_id")
        turns.setdefault(turn_id, content)
    try:
        loaded = load_body(body)
    except ValueError:
        raise InvalidState("body has a field of another type or with an invalid value") from None
    if loaded.health is MemoryHealth.RECOVERING:
        # Shown, never stored: no attempt on this conversation is running here.
        loaded = replace(loaded, health=MemoryHealth.DEGRADED)
    card: Mapping[str, Any] = _object(document, "card") if "card" in document else {}
    changes = checked_changes(**{name: card[name] for name in SET_BY_USER if name in card})
    # A transcript says which pages there are, and there are none of this document.
    return _Session(key, replace(loaded.unleased(), transcript=None), turns, changes)


def _object(document: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = document.get(name)
    require_json(value, name)
    if not isinstance(value, dict):
        raise InvalidState(f"{name} is not an object")
    return cast("Mapping[str, Any]", value)
