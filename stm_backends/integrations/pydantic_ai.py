"""Pydantic AI: its conversations on any backend (extra `pydantic-ai`).

A conversation is a log of items:

```
{"id": ..., "parent": ... or null, "message": {...}}                     an entry
{"id": ..., "parent": ..., "message": {...}, "record": {...}}            the last entry of a save
{"record": {...}}                                                        a save without new entries
```

A save adds its items in one conditional write, so it is stored whole or not at all; the newest record counts.
A fork has copies of the entries that it keeps, under the same ids, so that each conversation is complete in
its own log, which expires, is exported and is erased independently.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from typing import Final, NamedTuple

from stm_backends.backend import Backend
from stm_backends.drivers.bounded import Bounded
from stm_backends.drivers.checks import require_backend
from stm_backends.drivers.tasks import to_its_end
from stm_backends.errors import Corrupt, InvalidState, MessageNotFound, StorageError, located
from stm_backends.extras import missing_extra
from stm_backends.history.items import Item
from stm_backends.history.log import ItemLog
from stm_backends.records import operations
from stm_backends.types import MemoryKey

try:
    from pydantic_ai.conversation_store import (
        ConversationConflict,
        ConversationEntry,
        ConversationRecord,
        ConversationStore,
    )
    from pydantic_ai.messages import ModelMessagesTypeAdapter
except ModuleNotFoundError as error:
    raise missing_extra("pydantic-ai", error) from error

# It comes with Pydantic AI. If that is missing, the error above is the one to show.
from pydantic import ConfigDict, TypeAdapter

REMEMBERED: Final = 10_000
"""Maximum number of conversations, and of entries, that a store remembers."""

SPARE: Final = 8
"""Number of extra items that a limited load reads, because saves without new entries are items, too."""

# A list, because the adapter of a dataclass takes no configuration; this is the messages' configuration.
_RECORDS: Final = TypeAdapter(
    list[ConversationRecord], config=ConfigDict(ser_json_bytes="base64", val_json_bytes="base64")
)


class _Head(NamedTuple):
    """A conversation as last seen: the revision, the last entries of its histories, and its log."""

    revision: str | None
    ends: frozenset[str]
    tip: str


class StmConversationStore(ConversationStore):
    """The conversations of one user as a `ConversationStore`, shared by every process.

    ```
    store = StmConversationStore(backend, "acme", "u123")
    conversation = await store.load("chat_001") or Conversation(conversation_id="chat_001")
    await store.save(await agent.run("Hello", conversation=conversation))
    ```

    The store reaches nothing of other users, whatever ids it is given. A save is one conditional write: of
    several saves that begin with the same revision, one is stored, and the others raise
    `ConversationConflict` and change nothing. A conversation expires `ttl_s` seconds after it was last saved;
    `None` means never. The constructor reads and writes nothing, so a store for each request costs nothing.

    All methods raise `StorageError`; an outage is never a missing conversation. `OutcomeUnknown` means that a
    save may have been stored: load the conversation to see. Raises `InvalidKey` for an invalid tenant, user
    or conversation id.
    """

    def __init__(self, backend: Backend, tenant: str, user: str, *, ttl_s: float | None = None) -> None:
        require_backend(backend)
        self._backend = backend
        self._owner = (tenant, user)
        self._ttl_s = ttl_s
        # Raises the error for an invalid tenant or user.
        self._log("any")
        # Used by the write that follows a read.
        self._heads: Bounded[str, _Head] = Bounded(REMEMBERED)
        # The conversation of each entry. The base class asks for entries only by their ids.
        self._places: Bounded[str, str] = Bounded(REMEMBERED)

    async def read_record(self, conversation_id: str) -> ConversationRecord | None:
        """Return the record of a conversation, or `None` if it does not exist, in one round trip.

        Raises `Corrupt` if it cannot be read, for example because a newer Pydantic AI stored it.
        """
        record, _ = await self._look(conversation_id)
        return record

    async def read_records(
        self, *, scope: str | None = None, limit: int | None = None
    ) -> Sequence[ConversationRecord]:
        """Return the records of the user's conversations, or those of a scope, the one saved last first.

        Reads the end of each conversation, whatever the limit. `backend.conversations.list` returns a page in
        two round trips, as of up to a minute ago.
        """
        found: list[ConversationRecord] = []

        async def read(conversation_id: str) -> None:
            record, _ = await self._look(conversation_id)
            if record is not None and scope in (None, record.scope):
                found.append(record)

        await operations.each(self._conversations(), read)
        found.sort(key=lambda record: record.updated_at, reverse=True)
        return found[:limit]

    async def write_record(
        self,
        record: ConversationRecord,
        *,
        new_entries: Sequence[ConversationEntry] = (),
        expected_revision: str | None,
    ) -> None:
        """Store a record with its new entries, all or nothing, if the stored revision is the expected one.

        Takes two round trips if this store has read the record that it replaces. A fork, and a return to an
        earlier entry, also read the entries that they refer to. A cancelled call has ended when the
        cancellation is raised. Raises `ConversationConflict`, `InvalidState` for values that could not be
        read again, `TooLarge`, and `OutcomeUnknown`.
        """
        conversation_id = record.conversation_id
        added, stored = _dumped(record, new_entries)
        head = await self._expected(conversation_id, expected_revision)
        known = head.ends | {entry.id for entry in new_entries}
        needed = {record.head_id, *(entry.parent_id for entry in new_entries)} - known - {None}
        copied, sources = await self._missing(conversation_id, [one for one in needed if one is not None])
        items = [*copied, *added] or [{}]
        items[-1] = {**items[-1], "record": stored}
        if not await to_its_end(self._stored(self._log(conversation_id), head.tip, items, sources)):
            raise ConversationConflict(conversation_id)
        self._note(record)
        for entry in new_entries:
            self._places[entry.id] = conversation_id

    async def delete_record(self, conversation_id: str, *, expected_revision: str) -> None:
        """Erase a conversation with all its messages; its forks keep their copies.

        Raises `ConversationConflict` if the stored revision is not the expected one.
        """
        head = await self._expected(conversation_id, expected_revision)
        if not await self._log(conversation_id).clear_after(head.tip):
            raise ConversationConflict(conversation_id)

    async def read_entry(self, entry_id: str) -> ConversationEntry:
        """Return an entry. Raises `MessageNotFound`, a `LookupError`, if no conversation has it.

        If this store does not know the entry, it searches the user's conversations.
        """
        _, line = await self._history(entry_id, 1)
        return self._entries(line)[0]

    async def read_history(self, head_id: str | None, *, limit: int | None = None) -> list[ConversationEntry]:
        """Return the entries up to one, oldest first, or the newest `limit` of them; raises as `read_entry`.

        With a limit, reads only the end of the log, unless the entry is not there. If the oldest entries
        have expired, returns the newer ones.
        """
        if head_id is None or (limit is not None and limit < 1):
            return []
        _, line = await self._history(head_id, limit)
        return self._entries(line)

    def _log(self, conversation_id: str) -> ItemLog:
        return self._backend.item_log(
            MemoryKey(*self._owner, conversation_id), "pydantic-ai", ttl_s=self._ttl_s
        )

    async def _conversations(self) -> AsyncIterator[str]:
        async for _, key in self._backend.sessions.logs(*self._owner, "pydantic-ai"):
            yield key.session_id

    # Records

    async def _look(self, conversation_id: str) -> tuple[ConversationRecord | None, _Head]:
        """Read the newest record of a conversation."""
        log, limit = self._log(conversation_id), 1
        while True:
            state = await log.newest(limit)
            with located(self._backend.name, "read_record"):
                record = _record_in(state.items, conversation_id)
            # If an import was cut short, no record is among the last items.
            if record is not None or len(state.items) < limit:
                break
            limit *= 16
        head = _Head(record and record.revision, frozenset(self._note(record)), state.tip)
        self._heads[conversation_id] = head
        return record, head

    def _note(self, record: ConversationRecord | None) -> list[str]:
        """Note that the last entries of a conversation's histories belong to it, and return them."""
        if record is None:
            return []
        ends = [one for one in (record.head_id, *record.branches) if one is not None]
        for end in ends:
            self._places[end] = record.conversation_id
        return ends

    async def _expected(self, conversation_id: str, revision: str | None) -> _Head:
        """Return the head of a conversation. Raises `ConversationConflict` unless it has this revision."""
        head = self._heads.pop(conversation_id)
        if head is None or head.revision != revision:
            _, head = await self._look(conversation_id)
        if head.revision != revision:
            raise ConversationConflict(conversation_id)
        return head

    async def _missing(
        self, conversation_id: str, needed: Sequence[str]
    ) -> tuple[list[Item], dict[str, str]]:
        """Return copies of the entries that a conversation lacks in the histories up to `needed`.

        Also returns the conversations that these entries were copied from. Raises `ConversationConflict` if
        there is no such entry.
        """
        copied: dict[str, Item] = {}
        sources: dict[str, str] = {}
        for entry_id in needed:
            if entry_id in copied or await self._history_in(conversation_id, entry_id, 1):
                continue
            try:
                sources[entry_id], line = await self._history(entry_id)
            except MessageNotFound:
                raise ConversationConflict(conversation_id) from None
            copied |= {item["id"]: {name: item[name] for name in item if name != "record"} for item in line}
        return [*copied.values()], sources

    async def _stored(
        self, log: ItemLog, tip: str, items: Sequence[Item], sources: Mapping[str, str]
    ) -> bool:
        """Add items to a log; `False` if others came first, or the conversations copied from are gone."""
        after = await log.add_after(tip, items)
        with suppress(StorageError):
            if after is None:
                if not (await log.read(0)).exists:
                    # If the log was erased, nothing else removes the refused items.
                    await log.fold()
                return False
            # After an outage, the fork stays: it was stored before anything happened to its source.
            for entry_id, source in sources.items():
                if not await self._history_in(source, entry_id, 1):
                    # Deleted while it was copied, perhaps with its user.
                    await log.clear_after(after)
                    return False
        return after is not None

    # Entries

    async def _history(self, entry_id: str, limit: int | None = None) -> tuple[str, list[Item]]:
        """Return a conversation that has an entry, and the newest `limit` items of the history up to it."""
        known = self._places.use(entry_id)
        if known is not None and (line := await self._history_in(known, entry_id, limit)):
            return known, line
        async for conversation_id in self._conversations():
            if line := await self._history_in(conversation_id, entry_id, limit):
                self._places[entry_id] = conversation_id
                return conversation_id, line
        raise MessageNotFound("no conversation of this user has an entry of this id")

    async def _history_in(self, conversation_id: str, entry_id: str, limit: int | None) -> list[Item]:
        """Return the newest `limit` items of the history up to an entry; `[]` if the log lacks the entry."""
        line: list[Item] = []
        for last in (None,) if limit is None else (limit + SPARE, None):
            items = await self._log(conversation_id).items(last)
            with located(self._backend.name, "read_history"):
                entries = _entries_in(items)
            line, place = [], entry_id
            # Removed, so that a cycle ends.
            while len(line) != limit and (item := entries.pop(place, None)) is not None:
                line.append(item)
                place = item["parent"]
            if place is None or len(line) == limit or (last is not None and len(items) < last):
                break
        return line[::-1]

    def _entries(self, line: Sequence[Item]) -> list[ConversationEntry]:
        with located(self._backend.name, "read_history"):
            try:
                messages = ModelMessagesTypeAdapter.validate_python([item["message"] for item in line])
            except (TypeError, ValueError, RecursionError):
                # The cause quotes the conversation.
                raise Corrupt("a stored message is not one that this version of Pydantic AI knows") from None
        return [
            ConversationEntry(id=item["id"], parent_id=item["parent"], message=message)
            for item, message in zip(line, messages, strict=True)
        ]


def _dumped(record: ConversationRecord, entries: Sequence[ConversationEntry]) -> tuple[list[Item], Item]:
    """Return the stored form of entries and of a record. Raises `InvalidState`."""
    try:
        messages = ModelMessagesTypeAdapter.dump_python(
            [entry.message for entry in entries], mode="json", warnings=False
        )
        (stored,) = _RECORDS.dump_python([record], mode="json", warnings=False)
        # A value that could not be read again would make the conversation unreadable.
        ModelMessagesTypeAdapter.validate_python(messages)
        _RECORDS.validate_python([stored])
    except Exception as error:  # noqa: BLE001 -- values in messages may have users' serializers
        what = type(error).__name__
        raise InvalidState(f"Pydantic AI cannot write a message or a record as JSON ({what})") from None
    # The log's key has the id, and an export may be imported under another one.
    del stored["conversation_id"]
    items = [
        {"id": entry.id, "parent": entry.parent_id, "message": message}
        for entry, message in zip(entries, messages, strict=True)
    ]
    return items, stored


def _record_in(items: Sequence[Item], conversation_id: str) -> ConversationRecord | None:
    """Return the newest record of a log, or `None`. Raises `Corrupt`."""
    for item in reversed(items):
        if "record" in item:
            try:
                stored = {**item["record"], "conversation_id": conversation_id}
                return _RECORDS.validate_python([stored])[0]
            except (TypeError, ValueError, RecursionError):
                raise Corrupt("a stored record is not one that this version of Pydantic AI knows") from None
    return None


def _entries_in(items: Sequence[Item]) -> dict[str | None, Item]:
    """Return the entries of a log by their ids. Raises `Corrupt`."""
    found: dict[str | None, Item] = {}
    for item in items:
        if "message" in item:
            entry_id, parent = item.get("id"), item.get("parent", 0)
            if not isinstance(entry_id, str) or not (parent is None or isinstance(parent, str)):
                raise Corrupt("a stored entry has no id or no parent id")
            found[entry_id] = item
    return found
