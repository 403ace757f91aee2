"""Strands Agents: agents' storage, and sessions message by message, on any backend (extra `strands`).

Strands runs its agents on its own event loops, in threads, so both classes take `run`; `stm_backends.sync`
has one.
"""

from __future__ import annotations

import builtins
import copy
import hashlib
import json
from collections.abc import Coroutine, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast
from urllib.parse import quote, unquote

from stm_backends import errors, races
from stm_backends.backend import Backend
from stm_backends.drivers.checks import require_backend, require_seconds
from stm_backends.errors import Corrupt, InvalidKey, InvalidState, Unavailable, located
from stm_backends.extras import missing_extra
from stm_backends.history.log import ItemLog
from stm_backends.integrations.blocking import Waits, elsewhere
from stm_backends.plain_json import DEEPEST_IN_TURN, require_json
from stm_backends.types import MemoryKey

try:
    from strands.session import SessionRepository
    from strands.storage import Storage, storage
    from strands.types.exceptions import SessionException, StorageError
    from strands.types.session import Session, SessionAgent, SessionMessage
except ModuleNotFoundError as error:
    raise missing_extra("strands", error) from error

if TYPE_CHECKING:
    from strands.multiagent import MultiAgentBase

_T = TypeVar("_T")

_SCOPED: Final[object] = getattr(storage, "_NAMESPACED", None)
"""Strands' mark of a storage that has a namespace. Without it, Strands adds a second namespace."""

_DEFAULT_AGENT: Final = "default"
"""The id that Strands gives an agent without one."""


class StmStorage(Storage):
    """Bytes under keys, as a `Storage` of Strands: for snapshots of sessions, memories and offloaded data.

    ```
    with stm_backends.sync.open_backend("redis://host:6379/0") as backend:
        storage = StmStorage(backend.asynchronous, "acme", "u123", run=backend.run)
        agent = Agent(session_manager=SnapshotSessionManager("chat_001", storage=storage))
    ```

    Stored values belong to the user and are erased with the user. `run` runs a coroutine on the backend's
    loop and returns its result; it is called in other threads, so every event loop may use the storage. Each
    value is written and read as a whole; of two writers to one key, the last one wins. A value expires
    `ttl_s` seconds after it was written; `None` means never.

    Keys are paths, as in the storages of Strands. All methods raise the `StorageError` of Strands, whose
    `__cause__` is that of this library; an outage is never a missing value. A cancelled call has ended when
    the cancellation is raised. The constructor reads and writes nothing, and raises `InvalidKey` for an
    invalid tenant or user.
    """

    _namespaced: object = None

    def __init__(
        self, backend: Backend, tenant_id: str, user_id: str, *, run: Waits, ttl_s: float | None = None
    ) -> None:
        require_backend(backend)
        if ttl_s is not None:
            require_seconds("ttl_s", ttl_s)
        self._backend = backend.name
        self._states = backend.state_store
        self._owner = (tenant_id, user_id)
        self._base = MemoryKey(tenant_id, user_id, "strands/").composite()
        self._prefix = ""
        self._run = run
        self._ttl_s = ttl_s

    async def write(self, key: str, data: bytes) -> None:
        """Store data under a key, replacing any that is there."""
        if not isinstance(data, (bytes, bytearray, memoryview)):  # pyright: ignore[reportUnnecessaryIsInstance] -- callers are not all typed
            raise InvalidState(f"data must be bytes, not {type(data).__name__}")
        name, state = self._name(key), {"data": bytes(data)}
        await self._do(self._states.save_memory_state(name, state, ttl=self._ttl_s))

    async def read(self, key: str) -> bytes | None:
        """Return the data under a key; `None` only if there is none."""
        name = self._name(key)

        async def read() -> bytes | None:
            state = await self._states.load_memory_state(name)
            data = b"" if state is None else state.get("data")
            if not isinstance(data, bytes):
                with located(self._backend, "read"):
                    raise Corrupt("the state under this key does not contain bytes")
            return None if state is None else data

        return await self._do(read())

    async def delete(self, key: str) -> None:
        """Erase the data under a key, if there is any."""
        await self._do(self._states.delete_memory_state(self._name(key)))

    async def list(self, query: str = "") -> builtins.list[str]:
        """Return the keys that begin with a prefix, sorted; `""` is the prefix of all."""
        beginning = f"{self._base}{_escaped(self._prefix + _path(query))}"

        async def names() -> builtins.list[str]:
            return [name async for name in self._states.states_of(*self._owner, beginning)]

        start = len(self._base)
        found = [_unescaped(name[start:]) for name in await self._do(names())]
        return sorted(name.removeprefix(self._prefix) for name in found)

    def namespace(self, prefix: str) -> StmStorage:
        """Return the same storage with a prefix before every key; namespaces nest."""
        added = _path(prefix).rstrip("/")
        scoped = copy.copy(self)
        scoped._prefix = f"{self._prefix}{added}/" if added else self._prefix  # noqa: SLF001 -- the same class
        scoped._namespaced = _SCOPED  # noqa: SLF001 -- the same class
        return scoped

    def _name(self, key: str) -> str:
        if not (path := _path(key).rstrip("/")):
            raise StorageError("a storage key must not be empty")
        return f"{self._base}{_escaped(self._prefix + path)}"

    async def _do(self, work: Coroutine[Any, Any, _T]) -> _T:
        try:
            return await elsewhere(self._run, work)
        except (errors.StorageError, InvalidKey) as error:
            raise StorageError(str(error)) from error


def _path(key: str) -> str:
    """Return a key or a prefix without a leading "/" and without repeated ones, as Strands reads it."""
    parts = key.split("/")
    if "\\" in key or ".." in parts:
        raise StorageError("a storage key must not contain a backslash or the part '..'")
    last = "/" if key.endswith("/") else ""
    path = "/".join(filter(None, parts))
    return f"{path}{last}" if path else ""


def _escaped(key: str) -> str:
    """Escape as `MemoryKey.composite` does."""
    return key.replace("%", "%25").replace(":", "%3A")


def _unescaped(text: str) -> str:
    return text.replace("%3A", ":").replace("%25", "%")


class StmSessionRepository(SessionRepository):
    """Sessions of agents, message by message, shared by every process; for `RepositorySessionManager`.

    ```
    with stm_backends.sync.open_backend("redis://host:6379/0") as backend:
        sessions = StmSessionRepository(backend.asynchronous, "acme", "u123", run=backend.run)
        agent = Agent(session_manager=RepositorySessionManager("chat_001", sessions))
    ```

    A message is one addition to the agent's log, so a turn costs the same however long the conversation is.
    If two processes speak in one session, neither loses a message: both see what either said when they next
    begin. Of an agent's states, the last one saved wins. Sessions belong to the user, and are erased with
    the user.

    All methods block, and must not be called on the thread of the backend's loop. They raise `StorageError`,
    `InvalidKey` for an id that is blank or contains "/", and Strands' `SessionException` for anything that
    does not exist; an outage is never an empty session. The constructor reads and writes nothing.
    """

    def __init__(self, backend: Backend, tenant_id: str, user_id: str, *, run: Waits) -> None:
        require_backend(backend)
        MemoryKey(tenant_id, user_id, "-").composite()  # raises `InvalidKey` for an invalid tenant or user
        self._backend = backend
        self._states = backend.state_store
        self._owner = (tenant_id, user_id)
        self._run = run

    def create_session(self, session: Session, **kwargs: Any) -> Session:
        """Store a new session. Raises `SessionException` if one with its id exists."""
        name = self._name(session.session_id)
        if not self._run(self._states.save_if(name, {**session.to_dict()}, expect=None)):
            raise SessionException("a session with this id already exists")
        return session

    def read_session(self, session_id: str, **kwargs: Any) -> Session | None:
        """Return a session; `None` only if there is none."""
        state = self._load(self._name(session_id))
        return None if state is None else Session.from_dict(state)

    def delete_session(self, session_id: str) -> None:
        """Erase a session with its agents and messages. Raises `SessionException` if it does not exist."""
        self._run(self._delete(session_id))

    def create_agent(self, session_id: str, session_agent: SessionAgent, **kwargs: Any) -> None:
        """Store the state of an agent, replacing any that is there."""
        self._save(self._name(session_id, "agent", session_agent.agent_id), session_agent.to_dict())

    def read_agent(self, session_id: str, agent_id: str, **kwargs: Any) -> SessionAgent | None:
        """Return the state of an agent; `None` only if there is none."""
        state = self._load(self._name(session_id, "agent", agent_id))
        return None if state is None else SessionAgent.from_dict(state)

    def update_agent(self, session_id: str, session_agent: SessionAgent, **kwargs: Any) -> None:
        """Replace the state of an agent. Raises `SessionException` if there is none."""
        before = self.read_agent(session_id, session_agent.agent_id)
        if before is None:
            raise SessionException("the session has no agent with this id")
        session_agent.created_at = before.created_at
        self.create_agent(session_id, session_agent)

    def create_message(
        self, session_id: str, agent_id: str, session_message: SessionMessage, **kwargs: Any
    ) -> None:
        """Add a message at the end, in one round trip; a repeated message is added once.

        Text that a guardrail has redacted is not stored. Raises `InvalidState`, naming the path, for values
        that are not JSON, `LimitReached` and `TooLarge`.
        """
        item = _item(session_message)
        require_json(item, "message", deepest=DEEPEST_IN_TURN)
        self._run(self._log(session_id, agent_id).add([item], id=_digest(item)))

    def read_message(
        self, session_id: str, agent_id: str, message_id: int, **kwargs: Any
    ) -> SessionMessage | None:
        """Return the message with a number, the newest if two processes used it; `None` if there is none."""
        found = (one for one in self._messages(session_id, agent_id)[::-1] if one.message_id == message_id)
        return next(found, None)

    def update_message(
        self, session_id: str, agent_id: str, session_message: SessionMessage, **kwargs: Any
    ) -> None:
        """Replace a message in one step; its old content is no longer stored.

        Raises `SessionException` if no message has its number, and `Unavailable` if others keep adding
        messages.
        """
        if not self._run(self._replace(self._log(session_id, agent_id), session_message)):
            raise Unavailable(
                "others kept adding messages, and nothing was replaced; try again",
                backend=self._backend.name,
                operation="update_message",
            )

    def list_messages(
        self, session_id: str, agent_id: str, limit: int | None = None, offset: int = 0, **kwargs: Any
    ) -> list[SessionMessage]:
        """Return the messages after the first `offset`, at most `limit`, oldest first."""
        end = None if limit is None else offset + limit
        return self._messages(session_id, agent_id)[offset:end]

    def create_multi_agent(self, session_id: str, multi_agent: MultiAgentBase, **kwargs: Any) -> None:
        """Store the state of a graph or a swarm, replacing any that is there."""
        self._save(self._name(session_id, "multi", multi_agent.id), multi_agent.serialize_state())

    def read_multi_agent(self, session_id: str, multi_agent_id: str, **kwargs: Any) -> dict[str, Any] | None:
        """Return the state of a graph or a swarm; `None` only if there is none."""
        return self._load(self._name(session_id, "multi", multi_agent_id))

    def update_multi_agent(self, session_id: str, multi_agent: MultiAgentBase, **kwargs: Any) -> None:
        """Replace the state of a graph or a swarm. Raises `SessionException` if it does not exist."""
        if self.read_multi_agent(session_id, multi_agent.id) is None:
            raise SessionException("the session has no graph or swarm with this id")
        self.create_multi_agent(session_id, multi_agent)

    # On the backend's loop

    async def _delete(self, session_id: str) -> None:
        names = [
            name async for name in self._states.states_of(*self._owner, self._name(session_id, "agent", ""))
        ]
        start = len(self._name(session_id, "agent", ""))
        for agent_id in {_DEFAULT_AGENT, *(_unquoted(name[start:]) for name in names)}:
            await self._log(session_id, agent_id).clear()
        names += [
            name async for name in self._states.states_of(*self._owner, self._name(session_id, "multi", ""))
        ]
        for name in names:
            await self._states.delete_memory_state(name)
        # Erased last, so that a call that fails earlier can be repeated.
        if not await self._states.delete_memory_state(self._name(session_id)):
            raise SessionException("no session has this id")

    async def _replace(self, log: ItemLog, message: SessionMessage) -> bool:
        async def attempt() -> bool | races.Lost:
            read = await log.read()
            items = [*read.items]
            place = _place(self._read(items), message)
            if place is None:
                raise SessionException("the agent has no message with this number")
            items[place] = _item(replace(message, created_at=_facts(items[place])["created_at"]))
            return True if await log.rewrite(read.tip, items) is not None else races.Lost(read.tip)

        return await races.contend(attempt) or False

    # In the caller's thread

    def _save(self, name: str, state: Mapping[str, Any]) -> None:
        self._run(self._states.save_memory_state(name, {**state}))

    def _load(self, name: str) -> dict[str, Any] | None:
        return self._run(self._states.load_memory_state(name))

    def _messages(self, session_id: str, agent_id: str) -> list[SessionMessage]:
        return self._read(self._run(self._log(session_id, agent_id).items()))

    def _read(self, items: Iterable[Mapping[str, Any]]) -> list[SessionMessage]:
        with located(self._backend.name, "list_messages"):
            try:
                return [_message(item) for item in items]
            except (AttributeError, KeyError, TypeError, ValueError):
                # The cause may quote the conversation.
                raise Corrupt("a stored message is not one that Strands knows") from None

    def _log(self, session_id: str, agent_id: str) -> ItemLog:
        session = (
            _part(session_id) if agent_id == _DEFAULT_AGENT else f"{_part(session_id)}/{_part(agent_id)}"
        )
        return self._backend.item_log(MemoryKey(*self._owner, session), "strands")

    def _name(self, session_id: str, kind: str = "session", of: str = "") -> str:
        """Return the key of a state. The state is erased with the conversation that has the session's id."""
        whose = MemoryKey(*self._owner, _part(session_id)).composite()
        return f"kv:v1:{whose}:strands/{kind}" + ("" if kind == "session" else f"/{_quoted(of)}")


def _part(given: str) -> str:
    """Return the id of a session or an agent. Raises `InvalidKey` unless it is valid in a key."""
    if not isinstance(given, str) or not given.strip() or "/" in given:  # pyright: ignore[reportUnnecessaryIsInstance] -- callers are not all typed
        raise InvalidKey("the id of a session or an agent must be a non-blank string without '/'")
    return given


def _quoted(given: str) -> str:
    return quote(given, safe="", errors="surrogatepass")


def _unquoted(text: str) -> str:
    return unquote(text, errors="surrogatepass")


def _item(message: SessionMessage) -> dict[str, Any]:
    """Return a message as it is stored: the content that an agent sees, and Strands' notes on it."""
    facts = message.to_dict()
    given, redacted = facts.pop("message"), facts.pop("redact_message")
    return {**(redacted or given), "strands": facts}


def _message(item: Mapping[str, Any]) -> SessionMessage:
    message = {name: value for name, value in item.items() if name != "strands"}
    return SessionMessage.from_dict({"message": message, **_facts(item)})


def _facts(item: Mapping[str, Any]) -> dict[str, Any]:
    return cast("dict[str, Any]", item["strands"])


def _place(messages: list[SessionMessage], sought: SessionMessage) -> int | None:
    """Return the index of the message with this number and time, or else the newest with that number."""
    places = [place for place, one in enumerate(messages) if one.message_id == sought.message_id]
    exact = [place for place in places if messages[place].created_at == sought.created_at]
    return next(reversed(exact or places), None)


def _digest(item: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(item, sort_keys=True).encode()).hexdigest()
