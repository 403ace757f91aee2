"""Taking over conversations from states saved by PenguiFlow's memory, each as a whole.

A state has `version`, `health`, `summary`, `turns`, `pending`, `backlog` and `config_snapshot`. It does not
name its conversation; the state's key in the store does.

An `append` shows its entries at once, and a `replace` that creates a record cannot add entries. So an
adoption first appends an empty entry for each turn. Then one `replace` stores the summary and puts the turns
in place of these entries. Readers see the conversation either before or after it. If a process ends in
between, the next one uses the entries that it left. Of several concurrent adoptions, one wins that write.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, Literal, TypeAlias, cast

from stm_backends.admin.describing import catalogue_on
from stm_backends.admin.exporting import FORMAT, dump_key
from stm_backends.drivers.contract import ABSENT, Driver, Key, Record
from stm_backends.errors import (
    ConfigurationError,
    Corrupt,
    InvalidKey,
    InvalidState,
    StmError,
    StorageError,
    Unavailable,
    located,
)
from stm_backends.handed_in import Report, call, described, ignore
from stm_backends.memory.local.state import State, load_state, load_steps
from stm_backends.memory.shared.snapshot import Snapshot
from stm_backends.memory.units import Messages, seal_units
from stm_backends.races import Lost, contend
from stm_backends.records import keys, ledger, operations
from stm_backends.records.body import Body
from stm_backends.records.codec import Codec, dump_body, dump_turn
from stm_backends.records.directory import Directory
from stm_backends.records.limits import UNLIMITED, Guard, Whose, characters_of
from stm_backends.records.steps import run_in_slices
from stm_backends.telemetry.observer import SILENT, Observer, Subject
from stm_backends.types import MemoryKey, ShortTermMemoryConfig, StoredTurn, as_composite, as_turn_id

logger = logging.getLogger("stm_backends")

ANSWERS_WITHIN_S: Final = 10.0
"""Maximum time for a store to load a state, in seconds."""

Outcome: TypeAlias = Literal["adopted", "there", "nothing"]
"""The result of an adoption: done; a conversation already exists here; nothing is saved in the store."""

_ANY: Final = ShortTermMemoryConfig()
"""Reading a state does not depend on the configuration, except for a count of failures."""


def is_saved(document: object) -> bool:
    """Say whether a JSON object claims to be a saved state, and not an exported conversation."""
    if not isinstance(document, Mapping):
        return False
    found = cast("Mapping[str, object]", document)
    return "format" not in found and "health" in found and "version" in found


def exported(document: Mapping[str, Any], key: MemoryKey | str | None = None) -> dict[str, Any]:
    """Return a saved state as an exported conversation, with a stable id for each turn.

    Without a `key`, the state names its conversation in the field `key`, as a composite or as an export does.
    Raises `InvalidKey` and `InvalidState`.
    """
    named: object = document.get("key")
    given = named if key is None else key
    if key is not None and named is not None:
        raise InvalidKey('the saved state names its conversation itself, in the field "key"')
    if given is None:
        raise InvalidKey(
            "a saved state does not name its conversation: pass the key that it was saved under, or add it "
            'as the field "key"'
        )
    if isinstance(given, Mapping):
        parts = cast("Mapping[str, str]", given)
        given = MemoryKey(*(parts.get(name, "") for name in ("tenant_id", "user_id", "session_id")))
    whose = keys.parse_composite(as_composite(given))
    fields = {name: value for name, value in document.items() if name != "key"}
    try:
        state = load_state(fields, _ANY)
        turns = [*map(dump_turn, state.turns)]
    except InvalidState:
        raise
    except (ValueError, TypeError) as error:
        raise InvalidState(str(error)) from None
    return {
        "format": FORMAT,
        "version": 1,
        "key": dump_key(whose),
        "body": dump_body(_body_of(state)),
        "turns": turns,
    }


def require_store(store: object) -> None:
    """Raise `ConfigurationError` unless states can be loaded from a store."""
    if isinstance(store, type) or not callable(getattr(store, "load_memory_state", None)):
        what = f"the class {store.__name__} itself" if isinstance(store, type) else type(store).__name__
        raise ConfigurationError(
            "conversations are adopted from a store with load_memory_state(key), such as the state_store "
            f"that PenguiFlow's memory was saved in; not from {what}"
        )


class Adoption:
    """Takes over conversations that PenguiFlow's memory has saved in a store, which is only read.

    `ttl` is the time to live of an adopted conversation in seconds; `None` means forever.
    """

    def __init__(
        self,
        store: object,
        driver: Driver,
        codec: Codec,
        directory: Directory,
        *,
        ttl: float | None = None,
        guard: Guard = UNLIMITED,
        observer: Observer = SILENT,
    ) -> None:
        require_store(store)
        self._store: Any = store
        self._driver = driver
        self._codec = codec
        self._directory = directory
        self._catalogue = catalogue_on(driver, codec, directory)
        self._ttl = ttl
        self._guard = guard
        self._observer = observer

    async def adopt(self, key: MemoryKey) -> Outcome:
        """Begin a conversation from the state saved under its key, unless one exists here.

        Raises `Unavailable` if the store fails or does not answer in time, `Corrupt` if it returns no valid
        state, and the store's error if that is of this library; also `LimitReached`, and the errors of the
        datastore. After an error, nothing of the conversation is shown, and the next call tries again.
        """
        keys.require_key(key)
        keys.require_dialogue(key)
        where, owner = keys.memory_key(key), (key.tenant_id, key.user_id)
        if await self._is_begun(where):
            return "there"
        state = await loaded(self._store, key, self._observer.function_failed)
        if state is None or not (state.turns or state.body.summary):
            return "nothing"
        with self._guard.reporting(Whose(*owner, key.session_id), "adopt"):
            body = _body_of(state)
            entries = self._entries(state.turns, body)
            async with self._directory.listed(owner, self._ttl) as listing:
                listing.created = True
                outcome = await contend(partial(self._begin, where, body, entries))
        if outcome is None:
            raise Unavailable(
                "the conversation changed each time that it was read",
                backend=self._driver.name,
                operation="adopt",
            )
        if outcome == "adopted":
            await self._note(key)
        return outcome

    async def is_there(self, key: MemoryKey) -> bool:
        """Adopt a conversation as `adopt` does, and return whether one exists here afterwards."""
        return await self.adopt(key) != "nothing"

    async def _begin(self, where: Key, body: Body, entries: Sequence[bytes]) -> Outcome | Lost:
        """Store the conversation with one write, once the record has enough entries for it."""
        record = await self._driver.load(where)
        if self._is_there(record):
            return "there"
        lacking = len(entries) - (0 if record is None else record.length)
        if lacking > 0:
            await operations.together(range(lacking), lambda _: self._append_nothing(where))
            record = await self._driver.load(where)
            if self._is_there(record):
                return "there"
            if record is None or record.length < len(entries):
                return Lost(record and record.version)
        change = ledger.Change(self._codec.seal_body(body), rewrite=entries, ttl=self._ttl)
        if record is None:
            stored = await ledger.replace(self._driver, where, change, expect=ABSENT)
        else:
            stored = await ledger.fold(self._driver, where, record, change, unchanged=_no_body)
        return "adopted" if stored else Lost(record and record.version)

    async def _append_nothing(self, where: Key) -> None:
        """Append an empty entry, which no body names."""
        data = seal_units(self._codec, as_turn_id(None), (), forks=True)
        await ledger.append(self._driver, where, data, ttl=self._ttl)

    async def _is_begun(self, where: Key) -> bool:
        """Say whether a conversation exists; the body of a long one tells."""
        record = await self._driver.load(where, last=0)
        return record is not None and (bool(record.body) or self._is_there(await self._driver.load(where)))

    def _is_there(self, record: Record | None) -> bool:
        """Say whether a record has more than the leftovers of an interrupted adoption."""
        if record is None or record.body:
            return record is not None
        with located(self._driver.name, "adopt"):
            opened = Snapshot.of(record, self._codec).opened
        return not all(isinstance(one, Messages) and one.forks for one in opened)

    def _entries(self, turns: Sequence[StoredTurn], body: Body) -> list[bytes]:
        """Return an entry for each turn; the first has several if one write cannot store that many.

        Raises `LimitReached` for a state that exceeds the limits of a conversation.
        """
        for stored in turns:
            self._guard.require("turn_characters", partial(characters_of, stored.turn))
        self._guard.require("conversation_turns", len(turns))
        entries = [*map(self._codec.seal_turn, turns)]
        self._guard.require("conversation_bytes", len(self._codec.seal_body(body)) + sum(map(len, entries)))
        more = len(entries) - self._driver.traits.max_drop
        if more > 0:
            entries[: more + 1] = [seal_units(self._codec, as_turn_id(None), turns[: more + 1])]
        return entries

    async def _note(self, key: MemoryKey) -> None:
        """List the conversation in the catalogue, and report it."""
        try:
            await self._catalogue.touch(key, ttl=self._ttl)
        except StorageError as error:
            logger.warning(
                "a conversation is adopted, and listed with its next turn only: %s (conversation %s)",
                error,
                keys.log_name(keys.memory_key(key)),
            )
        self._observer.imported(Subject.of(key))


async def _no_body(record: Record, version: str) -> bytes:
    """Return the body that means the same as no body: that of a conversation that has not begun."""
    del record, version
    return b""


async def loaded(store: Any, key: MemoryKey, failed: Report = ignore) -> State | None:
    """Return the state that a store has saved under the composite of a key; `None` only if it has none.

    Raises the errors of `Adoption.adopt` for a failing store, after calling `failed` with them.
    """
    try:
        content = await call(lambda: store.load_memory_state(key.composite()), within=ANSWERS_WITHIN_S)
    except StmError:
        raise
    except Exception as error:
        failed("adopt_from", error)
        raise Unavailable(
            f"the store that conversations are adopted from failed ({described(error)}), so the state of "
            "this one is unknown; nothing was written",
            operation="adopt",
        ) from error
    if content is None:
        return None
    try:
        return await run_in_slices(load_steps(content, _ANY))
    except Exception as error:  # noqa: BLE001 -- a mapping class of the store may raise anything
        failed("adopt_from", error)
        # An error of such a mapping may quote the conversation.
        is_ours = isinstance(error, ValueError) and type(content) is dict
        raise Corrupt(
            "the store's data for this conversation is not the state of a memory "
            f"({error if is_ours else type(error).__name__}); nothing was written",
            operation="adopt",
        ) from None


def _body_of(state: State) -> Body:
    """Return the body of a conversation that continues from a state; all its turns are in its record."""
    return replace(state.body.unleased(), transcript=None, fork=None)
