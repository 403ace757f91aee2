"""Google ADK: its sessions, with their events and their state, on any backend (extra `google-adk`).

A session is an item log. An event is one item, added only if the last item is still the one that its writer
saw last. The item also holds the event's changes to the state:

```
item    {"type": "session", "id": ..., "data": {"created": 1760000000.0, "state": {...}}}   the first one
item    {"type": "event", "id": ..., "role": "user" or "assistant", "data": {...}}          an event
head    {"tip": ..., "last": ..., "at": 1760000000.0, "state": {...}}
```

A head is a saved state stored with the log: the session's state after the item `last`, when the log had this
`tip`. Lists therefore read no events, and loading a session reads only the newest ones. No event waits for
the head, which a task saves. The head may lag behind the log; a reader of both applies the items it lacks.

Each user and each app has a saved state; see `history.shared_state`. The note of an item names the previous
item: if another item has followed that one, the announced item will never be stored.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import logging
import secrets
import time
from collections.abc import Coroutine, Generator, Hashable, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar, cast
from weakref import WeakValueDictionary

from stm_backends.backend import Backend
from stm_backends.drivers.bounded import Bounded
from stm_backends.drivers.checks import require_backend, require_seconds
from stm_backends.drivers.tasks import all_of, to_its_end
from stm_backends.errors import (
    Corrupt,
    InvalidState,
    OutcomeUnknown,
    StmError,
    StorageError,
    located,
)
from stm_backends.extras import missing_extra
from stm_backends.history.items import Tip
from stm_backends.history.log import ItemLog, LogState, Newest
from stm_backends.history.shared_state import SharedState
from stm_backends.integrations.blocking import Waits, elsewhere
from stm_backends.records import keys, operations
from stm_backends.records.state_store import States
from stm_backends.types import MemoryKey

try:
    from google.adk.errors import StaleSessionError
    from google.adk.errors.already_exists_error import AlreadyExistsError
    from google.adk.errors.session_not_found_error import SessionNotFoundError
    from google.adk.events.event import Event
    from google.adk.events.event_actions import EventActions
    from google.adk.platform import time as adk_time
    from google.adk.platform import uuid as adk_uuid
    from google.adk.sessions import BaseSessionService, Session, State
    from google.adk.sessions.base_session_service import GetSessionConfig, ListSessionsResponse
except ModuleNotFoundError as error:
    raise missing_extra("google-adk", error) from error

logger = logging.getLogger("stm_backends")

KIND: Final = "google-adk"

LOOK: Final = 16
"""Number of newest items read first when the number needed is unknown."""

GIVEN_UP_S: Final = 3600.0
"""Seconds after which an announced item that is not in the log will never be stored."""

REMEMBERED: Final = 1_000
"""Maximum number of sessions, users and apps whose last saved state a service remembers."""

Json: TypeAlias = dict[str, Any]
T = TypeVar("T")


class StmSessionService(BaseSessionService):
    """ADK's sessions on any backend, shared by every process that uses the same datastore.

    ```
    runner = Runner(app_name="travel", agent=agent, session_service=StmSessionService(backend))
    ```

    An app is a tenant here. An event and its changes to the state of the session, the user and the app are
    stored together or not at all. Two processes that append to one session never lose an event: the one with
    the outdated session object gets `StaleSessionError` and must read the session again. A cancelled call
    first finishes a write that it has begun, and then raises the cancellation.

    A session expires `ttl_s` seconds after its last event; `None` means never. A user's state is kept until
    the user is erased, and an app's until the tenant is. `run` runs a coroutine on the event loop that the
    backend was opened on. With it, the service may be used on any event loop, as `Runner.run` requires. The
    constructor reads and writes nothing.

    All methods raise `StorageError`; an outage is never a session without events. They raise `InvalidKey` for
    an id that is blank or too long, and `InvalidState` for values that cannot be written as JSON. State
    values that are not JSON are converted as in ADK's own database service.
    """

    def __init__(self, backend: Backend, *, ttl_s: float | None = None, run: Waits | None = None) -> None:
        super().__init__()
        require_backend(backend)
        if ttl_s is not None:
            require_seconds("ttl_s", ttl_s)
        self._backend = backend
        self._ttl_s = ttl_s
        self._run = run
        self._locks: WeakValueDictionary[Hashable, asyncio.Lock] = WeakValueDictionary()
        self._logs: Bounded[MemoryKey, ItemLog] = Bounded(REMEMBERED)
        # The newest known heads, and the versions of the saved ones.
        self._heads: Bounded[MemoryKey, tuple[_Head, str | None]] = Bounded(REMEMBERED)
        self._states: Bounded[tuple[str, str], SharedState] = Bounded(REMEMBERED)
        # The sessions whose heads are to be saved, and the task that saves them.
        self._late: dict[MemoryKey, None] = {}
        self._saving: asyncio.Task[None] | None = None

    # Called by ADK

    async def create_session(
        self,
        *,
        app_name: str,
        user_id: str,
        state: dict[str, Any] | None = None,
        session_id: str | None = None,
    ) -> Session:
        """Create and return a session, with a new id unless one is given.

        Raises `AlreadyExistsError` if a session with this id exists; it is not changed.
        """
        return await to_its_end(self._on_loop(self._create(app_name, user_id, state, session_id)))

    async def get_session(
        self, *, app_name: str, user_id: str, session_id: str, config: GetSessionConfig | None = None
    ) -> Session | None:
        """Return a session with its events, or those that `config` asks for; `None` if it does not exist.

        With `num_recent_events`, reads only these, however long the session is.
        """
        return await self._on_loop(self._get(app_name, user_id, session_id, config))

    async def list_sessions(self, *, app_name: str, user_id: str | None = None) -> ListSessionsResponse:
        """Return the sessions of a user, or of all users, with their state, the latest last.

        Reads and returns no events.
        """
        return await self._on_loop(self._list(app_name, user_id))

    async def delete_session(self, *, app_name: str, user_id: str, session_id: str) -> None:
        """Erase a session if it exists. The state of the user and the app is kept."""
        await to_its_end(self._on_loop(self._delete(app_name, user_id, session_id)))

    async def get_user_state(self, *, app_name: str, user_id: str) -> dict[str, Any]:
        """Return the state of a user, without the prefix `user:`; empty if the user has none."""
        return await self._on_loop(self._of_user(app_name, user_id).read())

    async def append_event(self, session: Session, event: Event) -> Event:
        """Store an event of a session with its changes to the state, and add it to the session object.

        Costs one append, a read that checks whether another event came first, and two more writes for each
        user or app state that it changes. Partial events, and events that the object already has, are not
        stored. Raises `StaleSessionError` if another event came after the last one of this object, and
        `SessionNotFoundError` if the session does not exist; in both cases nothing was stored. After
        `OutcomeUnknown`, read the session to see whether the event was stored.
        """
        if event.partial or any(one.id == event.id and one == event for one in session.events):
            return event
        return await to_its_end(self._on_loop(self._append(session, event)))

    async def flush(self) -> None:
        """Wait until everything stored so far is saved in the form that lists read. `Runner.close` calls it.

        Nothing is lost without it: a state that could not be saved is rebuilt from the events.
        """
        await self._on_loop(self._saved())

    async def _on_loop(self, work: Coroutine[Any, Any, T]) -> T:
        return await (work if self._run is None else elsewhere(self._run, work))

    # The same calls, on the backend's loop

    async def _create(
        self, app_name: str, user_id: str, state: dict[str, Any] | None, session_id: str | None
    ) -> Session:
        given_id = _stripped(session_id)
        key = MemoryKey(app_name, user_id, given_id or adk_uuid.new_uuid())
        created, given = adk_time.get_time(), _dumped_state(state or {})
        item: Json = {"type": "session", "id": _new_id(), "data": {"created": created, "state": given}}
        delta, tip = _Delta.of(given), None
        # A refused item would stay in the log until the log is folded.
        if not (given_id and await self._exists(key)):
            tip = await self._store(key, _Seen("", ""), item, delta)
        if tip is None:
            raise AlreadyExistsError("a session with this id already exists")
        head = _Head(tip, item["id"], created, delta.own)
        self._heads[key] = head, None
        self._save_later(key)
        return await self._session(key, head, ())

    async def _get(
        self, app_name: str, user_id: str, session_id: str, config: GetSessionConfig | None
    ) -> Session | None:
        session_id = _stripped(session_id)
        if not session_id:
            return None
        key = MemoryKey(app_name, user_id, session_id)
        count, since = (config.num_recent_events, config.after_timestamp) if config else (None, None)
        limit = LOOK if count is None and since is not None else count
        while (found := await self._read(key, limit)) is not None:
            with located(self._backend.name, "get_session"):
                events = _events_in(found.items)
            newer = [*itertools.takewhile(lambda one: one.timestamp >= (since or 0.0), reversed(events))]
            if limit is None or limit == count or found.whole or len(newer) < len(events):
                return await self._session(key, found.head, newer[::-1])
            limit *= 4
        return None

    async def _list(self, app_name: str, user_id: str | None) -> ListSessionsResponse:
        sessions = self._backend.sessions
        users = [user_id] if user_id is not None else [user async for user in sessions.users(app_name)]
        listed: list[Session] = []
        for user in users:
            there = [key async for _, key in sessions.logs(app_name, user, KIND)]
            heads: list[tuple[MemoryKey, _Head]] = []
            for some in (there[start : start + AT_ONCE] for start in range(0, len(there), AT_ONCE)):
                found = await operations.together(some, partial(self._read, limit=0))
                heads += [(key, one.head) for key, one in zip(some, found, strict=True) if one is not None]
            if heads:
                shared = await self._shared_by(app_name, user)
                listed += [_session_of(key, head, (), shared) for key, head in heads]
        listed.sort(key=lambda one: (one.last_update_time, one.user_id, one.id))
        return ListSessionsResponse(sessions=listed)

    async def _delete(self, app_name: str, user_id: str, session_id: str) -> None:
        session_id = _stripped(session_id)
        if session_id:
            key = MemoryKey(app_name, user_id, session_id)
            await self._log(key).clear()
            self._heads.pop(key)
            self._late.pop(key, None)
            # Erased after the log, so that a process that reads the session meanwhile saves no head.
            await self._backend.state_store.delete_memory_state(_head_name(key))

    async def _append(self, session: Session, event: Event) -> Event:
        key = MemoryKey(session.app_name, session.user_id, session.id)
        data = _dumped(event)
        delta = _Delta.of(data["actions"]["state_delta"])
        role = "user" if event.author == "user" else "assistant"
        item: Json = {"type": "event", "id": _new_id(), "role": role, "data": data}
        # Branches of one invocation append to one object concurrently, and each of them is up to date.
        async with self._lock(key):
            seen = _seen_by(session) or await self._seen_without_mark(key, session)
            tip = await self._store(key, seen, item, delta)
            if tip is None:
                exists = await self._exists(key)
                raise StaleSessionError(_STALE) if exists else SessionNotFoundError(_NOT_FOUND)
            self._advance(key, seen, item, tip)
            _mark(session, _Seen(tip, item["id"]))
            session.last_update_time = event.timestamp
            return await super().append_event(session=session, event=event)

    # Sessions and their heads

    def _log(self, key: MemoryKey) -> ItemLog:
        log = self._logs.use(key)
        if log is None:
            log = self._logs[key] = self._backend.item_log(key, KIND, ttl_s=self._ttl_s)
        return log

    async def _exists(self, key: MemoryKey) -> bool:
        log = self._log(key)
        return (await log.newest(0)).exists and (await log.read(limit=0)).exists

    async def _read(self, key: MemoryKey, limit: int | None) -> _Found | None:
        """Return a session as of one moment, with its newest `limit` items; `None` if it does not exist."""
        log, reach = self._log(key), limit
        both = await all_of((self._saved_head(key), log.read() if limit is None else log.newest(limit)))
        (saved, version), read = cast(
            "tuple[tuple[_Head | None, str | None], LogState | Newest]", tuple(both)
        )
        head, known = saved, self._heads.get(key)
        if read.exists and known is not None and known[0].tip == read.tip:
            head = known[0]
            if saved is None or saved.tip != read.tip:
                self._save_later(key)
        elif saved is not None and saved.tip == read.tip:
            self._remember(key, saved, version)
        if read.exists and (head is None or head.tip != read.tip):
            # Read again, so that the head is not of a later moment.
            reach = None if limit is None else max(LOOK, limit)
            read = await log.read(reach)
        while read.exists and (head is None or head.tip != read.tip):
            is_whole = reach is None or len(read.items) < reach
            with located(self._backend.name, "get_session"):
                head = _head_after(saved, read.items, read.tip, is_whole=is_whole)
            if head is None:
                reach = max(LOOK, 4 * (reach or 0))
                read = await log.read(reach)
                continue
            # The database role may lack the right to write.
            with suppress(StorageError):
                if saved is None:
                    await self._adopt(key, read.items)
                if await self._save_head(key, head, version) and version is None:
                    await self._forget_deleted(key)
        if not read.exists or head is None:
            return None
        items = read.items if limit is None else read.items[max(0, len(read.items) - limit) :]
        return _Found(head, items, whole=limit is None or len(read.items) < limit)

    async def _saved_head(self, key: MemoryKey) -> tuple[_Head | None, str | None]:
        content, version = await self._backend.state_store.load_versioned(_head_name(key))
        return _Head.of(content), version

    async def _save_head(self, key: MemoryKey, head: _Head, version: str | None) -> bool:
        """Replace the head of this version; `False` after a lost race."""
        store, name = self._backend.state_store, _head_name(key)
        saved = await store.save_versioned(name, head.content, expect=version, ttl=self._ttl_s)
        if saved is not None:
            self._remember(key, head, saved)
        return saved is not None

    def _remember(self, key: MemoryKey, head: _Head, version: str | None) -> None:
        """Note a saved head. The head of an event that came meanwhile has yet to replace it."""
        known = self._heads.get(key)
        self._heads[key] = known[0] if known is not None and known[0].follows(head) else head, version

    async def _forget_deleted(self, key: MemoryKey) -> None:
        """Erase the head of a session that was deleted before its head was saved."""
        if not await self._exists(key):
            await self._backend.state_store.delete_memory_state(_head_name(key))

    def _advance(self, key: MemoryKey, seen: _Seen, item: Json, tip: str) -> None:
        """Note the head that follows from a stored item."""
        known = self._heads.pop(key)
        if known is not None and known[0].tip == seen.tip:
            after = _head_after(known[0], (item,), tip, is_whole=True)
            self._heads[key] = after or known[0], known[1]
        self._save_later(key)

    def _save_later(self, key: MemoryKey) -> None:
        """Let a task save the head of a session. Requests that come meanwhile are combined."""
        self._late[key] = None
        if self._running() is None:
            self._saving = asyncio.create_task(self._save_late(), name="stm-google-adk")

    def _running(self) -> asyncio.Task[None] | None:
        """Return the task that saves heads, or `None` if it has ended, as it does with its event loop."""
        task, loop = self._saving, asyncio.get_running_loop()
        return task if task is not None and not task.done() and task.get_loop() is loop else None

    async def _saved(self) -> None:
        while (task := self._running()) is not None:
            await asyncio.wait((task,))

    async def _save_late(self) -> None:
        with self._backend.observer.background():
            while self._late:
                some = [*itertools.islice(self._late, AT_ONCE)]
                for key in some:
                    del self._late[key]
                await operations.together(some, self._catch_up)

    async def _catch_up(self, key: MemoryKey) -> None:
        """Save the head of a session; an outage is harmless: readers apply the missing items."""
        try:
            known = self._heads.get(key)
            if known is None or not await self._save_head(key, *known):
                self._heads.pop(key)
                await self._read(key, 0)  # this saves the head
            elif known[1] is None:
                await self._forget_deleted(key)
        except StmError as error:
            logger.debug("could not save the head of a session: %s", type(error).__name__)

    async def _seen_without_mark(self, key: MemoryKey, session: Session) -> _Seen:
        """Return what a session object made by hand has seen: all, if its last event is the last one."""
        found = await self._read(key, 1)
        if found is None:
            raise SessionNotFoundError(_NOT_FOUND)
        with located(self._backend.name, "append_event"):
            last = [event.id for event in _events_in(found.items)]
        is_last = [event.id for event in session.events[-1:]] == last
        if found.head.at > session.last_update_time and not is_last:
            raise StaleSessionError(_STALE)
        return _Seen(found.head.tip, found.head.last)

    async def _session(self, key: MemoryKey, head: _Head, events: Sequence[Event]) -> Session:
        # Read after the log: an item's changes were announced before the item was stored.
        return _session_of(key, head, events, await self._shared_by(key.tenant_id, key.user_id))

    # The state of users and apps

    def _of_app(self, app_name: str) -> SharedState:
        return self._shared(app_name, KIND, self._backend.tenant_state(app_name))

    def _of_user(self, app_name: str, user_id: str) -> SharedState:
        # Not a key of any session: the third part of a composite never has such a "%".
        name = keys.user_state(app_name, user_id, f"%{KIND}")
        return self._shared(app_name, name, self._backend.state_store)

    def _shared(self, app_name: str, name: str, store: States) -> SharedState:
        state = self._states.use((app_name, name))
        if state is None:
            fate, lock = partial(self._fate, app_name), partial(self._lock, (app_name, name))
            state = self._states[app_name, name] = SharedState(store, name, fate, lock)
        return state

    async def _shared_by(self, app_name: str, user_id: str) -> tuple[Json, Json]:
        """Return the states of an app and of a user."""
        app, user = await all_of((self._of_app(app_name).read(), self._of_user(app_name, user_id).read()))
        return app, user

    def _changed_by(self, key: MemoryKey, delta: _Delta) -> list[tuple[SharedState, Json]]:
        app, user = self._of_app(key.tenant_id), self._of_user(key.tenant_id, key.user_id)
        return [(state, part) for state, part in ((app, delta.app), (user, delta.user)) if part]

    async def _store(self, key: MemoryKey, seen: _Seen, item: Json, delta: _Delta) -> str | None:
        """Add an item and its state changes after the item that was seen. Returns the tip, or `None`."""
        changed, entry = self._changed_by(key, delta), item["id"]
        note = {"user": key.user_id, "session": key.session_id, "after": seen.last, "at": time.time()}

        async def decide(state: SharedState, fates: Mapping[str, bool]) -> None:
            with _surviving():
                await state.decide(fates)

        fates: dict[str, bool] = {}
        try:
            await all_of(state.announce(entry, {**note, "set": part}) for state, part in changed)
            tip = await self._log(key).add_after(seen.tip, [item])
            fates = {entry: tip is not None}
        except OutcomeUnknown:
            # It is announced: readers of the state look up its fate.
            raise
        except StmError:
            fates = {entry: False}
            raise
        finally:
            if fates:
                await all_of(decide(state, fates) for state, _ in changed)
        return tip

    async def _fate(self, app_name: str, entry: str, note: Json) -> bool | None:
        """Return whether an announced item is in its log; `None` if it may still be stored."""
        try:
            key, at, before = MemoryKey(app_name, note["user"], note["session"]), note["at"], note["after"]
        except KeyError:
            return False
        log, limit = self._log(key), LOOK
        may_come = None if time.time() - at < GIVEN_UP_S else False
        while True:
            read = await log.read(limit=limit)
            for item in reversed(read.items):
                if item.get("id") == entry:
                    return True
                if item.get("id") == before:
                    return may_come if item is read.items[-1] else False
            if len(read.items) < limit:
                return may_come if not read.exists and not before else False
            limit *= 4

    async def _adopt(self, key: MemoryKey, items: Sequence[Json]) -> None:
        """Add to the states of the user and the app the values of an imported session that they lack."""
        with located(self._backend.name, "get_session"):
            deltas = [_Delta.of(_change_in(item)) for item in items]
        merged = _Delta({}, {}, {})
        for delta in deltas:
            merged.app.update(delta.app)
            merged.user.update(delta.user)
        await all_of(state.adopt(part) for state, part in self._changed_by(key, merged))

    def _lock(self, of: Hashable) -> asyncio.Lock:
        return self._locks.setdefault(of, asyncio.Lock())


_STALE: Final = (
    "the session was modified in storage since it was loaded; read it again before you append to it"
)
_NOT_FOUND: Final = "no session has this id: it was deleted, has expired, or was never created"

AT_ONCE: Final = operations.AT_ONCE


class _Seen(NamedTuple):
    """The tip of a log, and the id of its last item, as last seen by an object."""

    tip: str
    last: str


class _Delta(NamedTuple):
    """The changes to the states of an app, a user and a session, without the prefixes."""

    app: Json
    user: Json
    own: Json

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> _Delta:
        found = cls({}, {}, {})
        for name, value in state.items():
            if name.startswith(State.APP_PREFIX):
                found.app[name.removeprefix(State.APP_PREFIX)] = value
            elif name.startswith(State.USER_PREFIX):
                found.user[name.removeprefix(State.USER_PREFIX)] = value
            elif not name.startswith(State.TEMP_PREFIX):
                found.own[name] = value
        return found


@dataclass(frozen=True, slots=True)
class _Head:
    """The session's state, and its time, after the item `last`, when the log had this `tip`."""

    tip: str
    last: str
    at: float
    state: Json

    def follows(self, other: _Head) -> bool:
        """Return whether it is of a later moment of the same log."""
        own, others = Tip.of(self.tip), Tip.of(other.tip)
        return own.life == others.life and own.position > others.position

    @property
    def content(self) -> Json:
        return {"tip": self.tip, "last": self.last, "at": self.at, "state": self.state}

    @classmethod
    def of(cls, content: Mapping[str, Any] | None) -> _Head | None:
        """Return the head in a saved state; `None` if it is missing or invalid; then it is replaced."""
        match content:
            case {"tip": str(tip), "last": str(last), "at": float(at)} if isinstance(
                content.get("state"), dict
            ):
                return cls(tip, last, at, cast("Json", content["state"]))
            case _:
                return None


class _Found(NamedTuple):
    """A session that was read, and its newest items, oldest first; `whole` if these are all."""

    head: _Head
    items: Sequence[Json]
    whole: bool


@contextmanager
def _surviving() -> Generator[None]:
    """Log an outage after an item was stored: the next reader applies the changes that were not saved."""
    try:
        yield
    except StorageError as error:
        logger.warning("could not save an event's changes; readers take them from the event: %s", error)


def _head_name(key: MemoryKey) -> str:
    return keys.state_beside(key, KIND)


def _new_id() -> str:
    return secrets.token_hex(12)


def _stripped(session_id: str | None) -> str:
    """Return an id as ADK's own services keep it."""
    return session_id.strip() if isinstance(session_id, str) else session_id or ""


def _seen_by(session: Session) -> _Seen | None:
    mark = session._storage_update_marker  # noqa: SLF001 # pyright: ignore[reportPrivateUsage] -- ADK has it for session services
    last, separator, tip = (mark or "").partition(" ")
    return _Seen(tip, last) if separator else None


def _mark(session: Session, seen: _Seen) -> None:
    session._storage_update_marker = f"{seen.last} {seen.tip}"  # noqa: SLF001 # pyright: ignore[reportPrivateUsage] -- as above


def _dumped(event: Event) -> Json:
    """Return an event as JSON, without the state that ends with the invocation."""
    try:
        data = event.model_dump(mode="json", exclude_none=True)
    except (ValueError, TypeError, RecursionError):
        # The cause may quote the conversation.
        raise InvalidState("an event has a value that cannot be written as JSON") from None
    actions = data["actions"]
    changed = actions.get("state_delta", {}).items()
    actions["state_delta"] = {
        name: value for name, value in changed if not name.startswith(State.TEMP_PREFIX)
    }
    return data


def _dumped_state(state: dict[str, Any]) -> Json:
    """Return a state as JSON, as for an event, without the values that end with the invocation."""
    try:
        event = Event(actions=EventActions(state_delta=state))
    except ValueError:
        raise InvalidState("a state must be an object with string keys") from None
    return _dumped(event)["actions"]["state_delta"]


def _events_in(items: Iterable[Json]) -> list[Event]:
    try:
        return [Event.model_validate(item["data"]) for item in items if item.get("type") == "event"]
    except (ValueError, TypeError, KeyError):
        raise Corrupt("a stored event is damaged, or of a newer version of google-adk") from None


def _change_in(item: Json) -> Json:
    """Return an item's changes to the state. Raises `Corrupt` if they cannot be read."""
    try:
        if item.get("type") == "session":
            return {**item["data"]["state"]}
        if item.get("type") == "event":
            return {**item["data"]["actions"]["state_delta"]}
    except (TypeError, KeyError):
        raise Corrupt("a stored event is damaged") from None
    return {}


def _head_after(head: _Head | None, items: Sequence[Json], tip: str, *, is_whole: bool) -> _Head | None:
    """Return the head after the newest items of a log; `None` if older ones are needed for it.

    Older items are needed if the last item that the head covers is not among these and these are not the
    whole log. If they are the whole log, the head is of another session, or the oldest items are gone; the
    remaining ones are then applied to it again.
    """
    known = [place for place, item in enumerate(items) if head is not None and item.get("id") == head.last]
    if not known and not is_whole:
        return None
    state, at, last = (dict(head.state), head.at, head.last) if head is not None else (Json(), 0.0, "")
    try:
        for item in items[known[-1] + 1 if known else 0 :]:
            own = _Delta.of(_change_in(item)).own
            if item.get("type") == "session":
                state, at = own, float(item["data"]["created"])
            elif item.get("type") == "event":
                state, at = {**state, **own}, float(item["data"]["timestamp"])
            last = str(item["id"])
    except (TypeError, ValueError, KeyError):
        raise Corrupt("a stored event is damaged") from None
    return _Head(tip, last, at, state)


def _session_of(key: MemoryKey, head: _Head, events: Sequence[Event], shared: tuple[Json, Json]) -> Session:
    app, user = shared
    state = {
        **head.state,
        **{State.APP_PREFIX + name: value for name, value in app.items()},
        **{State.USER_PREFIX + name: value for name, value in user.items()},
    }
    session = Session(
        app_name=key.tenant_id,
        user_id=key.user_id,
        id=key.session_id,
        state=copy.deepcopy(state),
        events=[*events],
        last_update_time=head.at,
    )
    _mark(session, _Seen(head.tip, head.last))
    return session
