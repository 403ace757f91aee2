"""Listing, exporting, importing, copying and erasing conversations.

`exporting` describes an exported conversation. Fields of a newer version of this library, in the body and in
turns, are preserved.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from stm_backends.admin import log_lines
from stm_backends.admin.adopting import Adoption, exported, is_saved
from stm_backends.admin.copying import Owner
from stm_backends.admin.erasing import EraseKeys, Erasure
from stm_backends.admin.expiring import Expire, Expiring
from stm_backends.admin.exporting import FORMAT, Export, dump_key, joined
from stm_backends.admin.importing import Import, OnConflict, checked_lines, key_of
from stm_backends.admin.numbers import Unreadable, refused
from stm_backends.admin.purging import Found, Purge, Purged
from stm_backends.admin.receipt import LEFT_OVER, Receipt
from stm_backends.admin.resealing import OnProblem, Reseal, ResealReport
from stm_backends.drivers.contract import Driver, Key
from stm_backends.errors import ConfigurationError, Corrupt, Denied, StmError, StorageError
from stm_backends.history.log import ItemLog
from stm_backends.records import keys, operations
from stm_backends.records.codec import Codec
from stm_backends.records.directory import Directory, Seal
from stm_backends.records.keys import LogKind
from stm_backends.records.limits import UNLIMITED, Guard
from stm_backends.telemetry.observer import SILENT, Observer, Subject
from stm_backends.types import MemoryKey

if TYPE_CHECKING:
    from stm_backends.sealing.driver import SealedDriver


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
        self._guard = guard
        self._erase_keys = erase_keys or _no_keys
        self._sealed = sealed
        self._observer = observer

    def tenants(self) -> AsyncIterator[str]:
        """Yield the tenants that have stored data, if the driver can find them.

        Redis and DynamoDB cannot without reading the whole datastore: they raise `ConfigurationError`.
        """
        return self._directory.tenants()

    def users(self, tenant: str) -> AsyncIterator[str]:
        """Yield the users of a tenant who have stored data."""
        return self._directory.users(tenant)

    async def has(self, tenant: str, user: str | None = None) -> bool:
        """Say whether anything is stored for a tenant or, given a user, for that user. Reads no content."""
        return await self._directory.has(tenant, user)

    async def other_seal(self, tenant: str, user: str | None = None) -> Seal | None:
        """Return the seal of a user's data if this backend stores data the other way, else `None`.

        `"sealed"` means that the backend has no `sealing`, `"clear"` that it accepts only sealed values.
        Without a `user`, the first user of the tenant is examined. Reads one or two records.
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

    async def logs(
        self,
        tenant: str,
        user: str,
        kind: LogKind | None = None,
        *,
        prefix: str = "",
        beside: bool = True,
    ) -> AsyncIterator[tuple[LogKind, MemoryKey]]:
        """Yield the item logs of a user: the framework and the conversation of each.

        `kind` restricts them to one framework, and `prefix` to longer session ids that begin with it.
        `beside=False` leaves out logs that belong to another log; see `ItemLog.beside`.

        `list`, `export`, `import_` and `copy` ignore item logs; `export_log_lines` exports them, and `erase`,
        `erase_user` and `erase_tenant` erase them. A log that exists throughout the listing comes exactly
        once.
        """
        first = keys.name(prefix) if prefix else ""
        for one in keys.LOG_KINDS if kind is None else (kind,):
            scope = keys.scope(tenant, user, one)
            async for name in operations.names_of(self._driver, scope, first):
                if beside or not keys.is_beside(Key(scope, name)):
                    yield one, MemoryKey(tenant, user, keys.unname(name))

    async def export(self, key: MemoryKey, *, transcript: bool = True) -> dict[str, Any]:
        """Return one conversation as JSON, from one snapshot; it is not changed.

        `turns` are those in its record. If it has a transcript, `pages` are the turns that have left the
        record; `transcript=False` leaves them out and reads only the record. The result is held in memory;
        `export_lines` holds only a page at a time. Raises the same errors as `export_lines`.
        """
        if transcript:
            return joined([line async for line in self.export_lines(key)])
        keys.require_key(key)
        document = await Export(self._driver, self._codec, self._directory, key).document()
        self._observer.exported(Subject.of(key))
        return document

    async def export_lines(
        self, key: MemoryKey, *, unreadable: Unreadable = refused
    ) -> AsyncGenerator[dict[str, Any]]:
        """Yield one conversation with its transcript as JSON objects: the lines of a file.

        The pages of the transcript come first, oldest first, and the conversation comes last, all as of one
        moment. Needs memory for one page and the record. Raises `SessionNotFound`, `Corrupt` if this version
        cannot read everything, and `Unavailable` if an erasure or a purge meanwhile removed turns that are
        still to come.

        `unreadable` is called for each page with unreadable turns, with the error and the numbers of these
        turns. By default, it raises the error. If it returns, these turns are left out. The lines can be
        imported; the turns are then missing, like those of an expired page.
        """
        keys.require_key(key)
        async for line in Export(self._driver, self._codec, self._directory, key).lines(unreadable):
            if line["format"] == FORMAT:
                self._observer.exported(Subject.of(key))
            yield line

    async def export_log_lines(
        self, key: MemoryKey, kind: LogKind, *, unreadable: Unreadable = refused
    ) -> AsyncGenerator[dict[str, Any]]:
        """Yield the log of an agent framework as JSON objects, the lines of a file, for `importing`.

        Needs memory for one page and the record. An import stores all items or none; with `"merge"`, an
        existing log stays as it is. `unreadable` works as in `export_lines`. Raises `SessionNotFound` and
        `Corrupt`.
        """
        keys.require_key(key)
        async for line in log_lines.lines_of(self._driver, self._codec, key, kind, unreadable):
            yield line
        self._observer.exported(Subject.of(key))

    async def import_(
        self,
        document: Mapping[str, Any],
        *,
        key: MemoryKey | str | None = None,
        on_conflict: OnConflict = "refuse",
        ttl: float | None = None,
    ) -> MemoryKey:
        """Store an exported conversation under its key, and return the key.

        The document may also be a state saved by PenguiFlow's memory or `DefaultShortTermMemory`. Such a
        state does not name its conversation: pass the `key` that it was saved under, or its composite. Its
        turns get ids derived from their contents, the same for each import.

        `on_conflict` decides what happens if the conversation exists. `"refuse"` raises `SessionExists` and
        changes nothing. `"merge"` adds the missing turns at the end. It keeps the existing summary, unless no
        turn has left that conversation yet. Turns that were summarized or dropped there are not missing,
        regardless of how long ago. If nothing is missing, nothing is changed. `"replace"` erases the existing
        conversation. A merge of the same document completes an interrupted import. Use `importing` for the
        lines of `export_lines`: a merge keeps the transcript of a conversation that turns have left, and any
        other import takes the transcript of the lines. An invalid document raises `InvalidState` before
        anything is written.

        `ttl` is the time to live of the conversation in seconds, like `session_ttl_s`; `None`, the default,
        means forever. A merge that adds a turn sets it, too, even if the conversation had another time to
        live. A merge that adds no turn does not change the time to live.

        The backend's `Limits` apply. A document that exceeds them by itself, and a new conversation beyond
        `user_conversations`, raise `LimitReached` before anything is written. A merge raises it at the turn
        that exceeds them; the turns before it are stored.
        """
        if is_saved(document):
            document = exported(document, key)
        elif key is not None:
            raise ConfigurationError("key is that of a saved state; an exported conversation has its own")
        lines = checked_lines(document)

        async def each() -> AsyncIterator[Mapping[str, Any]]:
            for line in lines:
                yield line

        await _import_all(self.importing(on_conflict=on_conflict, ttl=ttl), each())
        return key_of(document)

    async def adopt(self, key: MemoryKey, store: object, *, ttl: float | None = None) -> bool:
        """Take over a conversation that PenguiFlow's memory has saved in `store` under this key.

        Returns `False` if the conversation already exists here, which leaves it unchanged, or if nothing is
        saved in `store`. `store` has `load_memory_state(key)`, and is only read. The conversation begins as a
        whole, and only once if several processes adopt it. It lives `ttl` seconds, by default forever. An
        erasure here does not reach `store`: a conversation that was erased only here would be taken over
        again.

        Raises `Unavailable` if the store fails or takes longer than ten seconds, `Corrupt` if it returns no
        valid state, and the store's error if that is of this library. Then nothing is taken over, and
        nothing that was begun is shown.
        """
        return await self.adopting(store, ttl=ttl).adopt(key) == "adopted"

    def adopting(self, store: object, *, ttl: float | None = None) -> Adoption:
        """Return the `Adoption` behind `adopt`. Raises `ConfigurationError` for an invalid store."""
        return Adoption(
            store,
            self._driver,
            self._codec,
            self._directory,
            ttl=ttl,
            guard=self._guard,
            observer=self._observer,
        )

    def importing(self, *, on_conflict: OnConflict = "refuse", ttl: float | None = None) -> Import:
        """Return an importer for the lines of `export_lines`, of any number of conversations, one by one.

        A line may also be a saved state that has its key in the field `key`.
        """
        return Import(
            self._driver,
            self._codec,
            self._directory,
            on_conflict=on_conflict,
            ttl=ttl,
            guard=self._guard,
            observer=self._observer,
        )

    async def copy(
        self,
        key: MemoryKey,
        to: Sessions,
        *,
        under: MemoryKey | None = None,
        on_conflict: OnConflict = "refuse",
        ttl: float | None = None,
    ) -> MemoryKey:
        """Copy a conversation to another backend, or on this one `under` another key; see `import_`.

        Raises the errors of `export_lines` and `import_`. If turns are removed meanwhile, the copy is
        complete or is not made.
        """
        importing, copied = to.importing(on_conflict=on_conflict, ttl=ttl), under or key
        keys.require_key(copied)
        named = {"key": dump_key(copied)}
        await _import_all(importing, ({**line, **named} async for line in self.export_lines(key)))
        return copied

    async def erase(self, key: MemoryKey) -> bool:
        """Erase a conversation, readable or not; returns whether anything existed.

        Erases its record, its item logs, the state saved under its composite, and the states under
        `kv:v1:` and its composite. Other `kv:v1:` states of the user, and paused runs, are erased with the
        user. The user leaves the tenant's directory with the last record.
        """
        # Without a session id, the user would be erased.
        keys.require_key(key)
        receipt = await self.erase_with_receipt(key.tenant_id, key.user_id, key.session_id)
        return bool(receipt.records or any(receipt.erased.get(kind) for kind in LEFT_OVER))

    async def erase_user(self, tenant: str, user: str) -> int:
        """Erase all records of a user, of every kind, and the data keys; returns the number of records."""
        # Without a user, the tenant would be erased.
        keys.require_part("user_id", user)
        return (await self.erase_with_receipt(tenant, user)).records

    async def erase_tenant(self, tenant: str) -> int:
        """Erase all records and data keys of all users of a tenant; returns the number of records."""
        return (await self.erase_with_receipt(tenant)).records

    async def erase_with_receipt(
        self, tenant: str, user: str | None = None, session: str | None = None
    ) -> Receipt:
        """Erase a conversation, a user or a tenant, and return what was erased and what remains.

        Everything is then read again. Records that another process writes during the erasure may be erased or
        not; the receipt counts those that the second reading finds. A later write starts a new conversation.

        Raises `KeyMismatch`, before anything is erased, for a user or a tenant whose data was sealed with
        keys that this backend lacks. A backend without `sealing` erases only the records; see
        `Receipt.keys_left`.
        """
        if session is not None:
            keys.require_part("user_id", user)
        erasure = Erasure(self._driver, self._codec, self._directory, self._erase_keys, self._observer)
        return await erasure.erase(tenant, user, session)

    async def reseal(self, tenant: str, user: str | None = None) -> ResealReport:
        """Seal everything of a tenant, or of one of its users, with the primary key.

        Changes no value. May be interrupted and repeated, while other processes use the datastore. Once every
        process seals with the primary key and the report is `ok`, no value needs an older key.
        Raises `ConfigurationError` if the backend has no `sealing`.
        """
        return await self.resealing([Owner(tenant, user)]).run()

    def resealing(
        self,
        owners: Iterable[Owner],
        *,
        on_problem: OnProblem = lambda key, problem, error: None,
    ) -> Reseal:
        """Return the pass behind `reseal` for some owners; it counts and reports its progress."""
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
        transcripts_older_than: float | None = None,
        dry_run: bool = False,
        on_step: Callable[[Purged], None] = lambda purged: None,
        on_found: Callable[[Found], None] = lambda found: None,
        on_unreadable: Callable[[Found, Corrupt], None] = lambda found, error: None,
    ) -> Purged:
        """Remove expired records and, with `older_than`, records without an addition for that many seconds.

        Without a `tenant`, removes only expired records that the datastore keeps, of all tenants. For a
        tenant or a `user` of it, also removes left-over parts of large values. `older_than` empties
        conversations and item logs; the empty records expire `older_than` seconds later, unless something is
        added to them. A turn that is added during the purge stays. Records without a time, such as turns
        without `ts`, are kept.

        `transcripts_older_than` removes the oldest turns of transcripts, in whole pages of 64 turns: a page
        is removed once all of its turns are that old. The records of the conversations keep their turns, and
        turns that no summary covers yet stay in their pages.

        Works in short steps, and may be interrupted and repeated. `dry_run=True` counts and writes nothing.
        `on_step` is called with the counts so far, `on_found` with each record that is purged by its age, and
        `on_unreadable` with each that is kept because it cannot be read, and the reason.
        """
        if tenant is None and (older_than, transcripts_older_than, user) != (None, None, None):
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
            transcripts_older_than=transcripts_older_than,
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
        """Give the records of a tenant, or of one user, a time to live of `ttl` seconds from now.

        Conversations with their transcripts, item logs and saved states expire; graphs do not. Content stays
        unchanged. The time to live of a record is replaced whether it was shorter or longer, because it
        cannot be read. A turn that is added later resets it to `session_ttl_s` or `transcript_ttl_s`, except
        for complete pages of the transcript. Running this again restarts the time. `on_step` is called with
        the counts so far.
        """
        expire = Expire(self._driver, self._codec, self._directory, ttl=ttl, on_step=on_step)
        await (expire.tenant(tenant) if user is None else expire.user(tenant, user))
        return expire.expiring


async def _import_all(importing: Import, lines: AsyncIterator[Mapping[str, Any]]) -> None:
    """Import the lines of one conversation; after an error, none of its pages stay."""
    try:
        async for line in lines:
            await importing.add(line)
    except StmError:
        # A purge removes what stays after an outage.
        with suppress(StorageError):
            await importing.discard()
        raise


async def _no_keys(tenant: str, user: str) -> int:
    """Erase no data keys: nothing is sealed."""
    del tenant, user
    return 0
