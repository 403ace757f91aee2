"""Microsoft Agent Framework: histories of agents and checkpoints of workflows on any backend.

Needs the extra `agent-framework`. The framework's experimental store of whole sessions is not supported.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final, NamedTuple, cast
from urllib.parse import quote, unquote

from stm_backends import races
from stm_backends.backend import Backend
from stm_backends.drivers.bounded import Bounded
from stm_backends.drivers.checks import require_backend, require_integer, require_items, require_seconds
from stm_backends.drivers.tasks import all_of, to_its_end
from stm_backends.errors import Corrupt, InvalidKey, InvalidState, Unavailable, located
from stm_backends.extras import missing_extra
from stm_backends.history.items import Tip
from stm_backends.history.log import ItemLog
from stm_backends.integrations.whose import key_from
from stm_backends.plain_json import DEEPEST_IN_TURN, require_json
from stm_backends.types import MemoryKey

try:
    from agent_framework import HistoryProvider, Message, WorkflowCheckpoint, WorkflowCheckpointException
except ModuleNotFoundError as error:
    raise missing_extra("agent-framework", error) from error

# The framework exports no public equivalents; its own storages import these, too.
from agent_framework._workflows._checkpoint_encoding import decode_checkpoint_value, encode_checkpoint_value

REMEMBERED: Final = 10_000
"""Maximum number of sessions whose first message a provider remembers, to tell new messages from repeats."""

MOST_READ: Final = 1_000
"""Maximum number of messages compared with the beginning of a history."""

AT_ONCE: Final = 8
"""Number of checkpoints loaded concurrently."""

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


class StmHistoryProvider(HistoryProvider):
    """The messages of an agent's sessions, shared by every process that uses the same keys.

    ```
    history = StmHistoryProvider(backend, lambda session_id: MemoryKey("acme", "u123", session_id))
    agent = Agent(client=client, context_providers=[history])
    ```

    The framework passes only a session's id. `key` returns the key of the session with that id, and must
    return the same key in every process. Erasing a user erases the histories under the user's keys.

    With a `limit`, an agent is given at most that many of the newest messages, and they never begin with
    tool results; all messages stay stored. A history expires `ttl_s` seconds after the last message was
    constructor reads and writes nothing. All methods raise `InvalidKey` for a session without an id or a
    valid key, and `StorageError`; an outage is never an empty history.
    `StorageError`; an outage is never an empty history.
    """

    def __init__(  # noqa: PLR0913 -- five of them are the framework's
        self,
        backend: Backend,
        key: Callable[[str], MemoryKey],
        *,
        source_id: str = "stm_history",
        ttl_s: float | None = None,
        limit: int | None = None,
        load_messages: bool = True,
        store_inputs: bool = True,
        store_context_messages: bool = False,
        store_context_from: set[str] | None = None,
        store_outputs: bool = True,
    ) -> None:
        require_backend(backend)
        if limit is not None:
            require_integer("limit", limit, least=0)
        if ttl_s is not None:
            require_seconds("ttl_s", ttl_s)
        super().__init__(
            source_id,
            load_messages=load_messages,
            store_inputs=store_inputs,
            store_context_messages=store_context_messages,
            store_context_from=store_context_from,
            store_outputs=store_outputs,
        )
        self._backend = backend
        self._key = key
        self._ttl_s = ttl_s
        self._limit = limit
        # The first message of a history remains the first until its log is cleared.
        self._first: Bounded[MemoryKey, tuple[str, _Identity]] = Bounded(REMEMBERED)

    async def get_messages(
        self, session_id: str | None, *, state: dict[str, Any] | None = None, **kwargs: Any
    ) -> list[Message]:
        """Return all messages of a session, or the newest `limit`, oldest first, in one round trip.

        Raises `Corrupt` for an item that the framework cannot read as a message.
        """
        key = self._key_of(session_id)
        log = self._log(key)
        if self._limit is None:
            read = await log.read()
            messages = self._stored(read.items)
            if messages:
                self._first[key] = Tip.of(read.tip).life, _identity(messages[0])
        else:
            messages = self._stored(await log.items(self._limit))
            # Model providers reject tool results without the call, which the limit cut off.
            while messages and messages[0].role == "tool":
                del messages[0]
        return messages

    async def save_messages(
        self,
        session_id: str | None,
        messages: Sequence[Message],
        *,
        state: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Add the messages that the session does not have yet, all or none.

        Skips messages that repeat the whole history or its end, as the framework's own providers do, and two
        or more messages that repeat its beginning. So a client may send everything again, also several at
        once. Takes one round trip to read as many of the newest messages as are given, two for the addition,
        and two more if the first message is that of the history. A cancelled call has added all or none.
        Raises `InvalidState` for anything that is not a message or not JSON, `TooLarge`, `LimitReached`, and
        `Unavailable` if others keep adding to the session.
        """
        key = self._key_of(session_id)
        require_items("messages", messages)
        for index, message in enumerate(messages):
            if not isinstance(message, Message):  # pyright: ignore[reportUnnecessaryIsInstance] -- callers are not all typed
                raise InvalidState(f"messages[{index}] is {type(message).__name__}, not a Message")
        items: list[dict[str, Any]] = []
        for index, message in enumerate(messages):
            try:
                items.append(message.to_dict())
            except (RecursionError, ValueError):
                raise InvalidState(f"messages[{index}] refers to itself") from None
            require_json(items[-1], f"messages[{index}]", deepest=DEEPEST_IN_TURN)
        if items and not await to_its_end(self._add_new(key, items)):
            raise Unavailable(
                "others kept adding to the session, and nothing was stored; try again",
                backend=self._backend.name,
                operation="save_messages",
            )

    async def clear(self, session_id: str | None) -> None:
        """Erase the messages of a session."""
        key = self._key_of(session_id)
        await self._log(key).clear()

    async def _add_new(self, key: MemoryKey, items: list[dict[str, Any]]) -> bool:
        log = self._log(key)
        # Compare them as they will be read: fields that are not stored make no difference.
        read = _messages(items)
        if read is None:
            raise InvalidState("a message is of a class that the Agent Framework could not read again")
        given = [_identity(message) for message in read]

        async def attempt() -> bool | races.Lost:
            # The given messages cannot repeat more than that.
            stored = await log.read(len(items))
            known = [_identity(message) for message in self._stored(stored.items)]
            new = items[_repeated(known, given, complete=stored.count == len(known)) :]
            comparable = 2 <= len(given) <= MOST_READ and stored.count > len(given) == len(new)
            if not new or (comparable and await self._begins_with(key, log, given, stored.tip)):
                return True
            return await log.add_after(stored.tip, new) is not None or races.Lost(stored.tip)

        return await races.contend(attempt) or False

    async def _begins_with(self, key: MemoryKey, log: ItemLog, given: Sequence[_Identity], tip: str) -> bool:
        """Return whether a longer history begins with these messages; `tip` is its moment."""
        life, first = Tip.of(tip).life, self._first.get(key)
        if first is not None and first[0] == life and first[1] != given[0]:
            return False
        page = await log.transcript(after=-1, limit=len(given))
        known = [_identity(message) for message in self._stored([one.item for one in page.items])]
        if known:
            self._first[key] = life, known[0]
        return known == given

    def _key_of(self, session_id: str | None) -> MemoryKey:
        if not session_id:
            raise InvalidKey("the session has no id, so nothing says whose history it is")
        return key_from("key", self._key, session_id)

    def _log(self, key: MemoryKey) -> ItemLog:
        return self._backend.item_log(key, "agent-framework", ttl_s=self._ttl_s)

    def _stored(self, items: Sequence[Mapping[str, Any]]) -> list[Message]:
        messages = _messages(items)
        if messages is None:
            with located(self._backend.name, "get_messages"):
                raise Corrupt("a stored message is not one that the Agent Framework knows")
        return messages


def _messages(items: Sequence[Mapping[str, Any]]) -> list[Message] | None:
    """Return the messages of items; `None` if one is not a message. Raises nothing: it might quote them."""
    try:
        return [Message.from_dict({**item}) for item in items]
    except (AttributeError, KeyError, TypeError, ValueError):
        return None


class _Identity(NamedTuple):
    """The identity of a message: its id, or else its role and content."""

    id: str | None
    role: str = ""
    contents: str = ""


def _identity(message: Message) -> _Identity:
    if message.message_id is not None:
        return _Identity(message.message_id)
    contents = json.dumps([content.to_dict() for content in message.contents], sort_keys=True)
    return _Identity(None, message.role, contents)


def _repeated(known: Sequence[_Identity], given: Sequence[_Identity], *, complete: bool) -> int:
    """Return how many of the `given` messages, from the first, are already `known` or precede known ones.

    `known` are the newest messages of the session, and all of them if `complete`. As in the framework, a
    person who says the same again, without an id, has said it twice.
    """
    if not known:
        return 0
    said_again = known[-1].id is None and known[-1].role == "user"
    if complete:
        for start in range(len(given) - len(known) + 1):
            if given[start : start + len(known)] == known:
                if start == 0 and len(known) == 1 and said_again:
                    break
                return start + len(known)
    for overlap in range(min(len(known), len(given)), 0, -1):
        if known[-overlap:] == given[:overlap] and not (overlap == 1 and said_again):
            return overlap
    return 0


class StmCheckpointStorage:
    """The checkpoints of a user's workflows, shared by every process; a `CheckpointStorage`.

    ```
    storage = StmCheckpointStorage(backend, "acme", "u123", allowed_checkpoint_types=["my_app:MyState"])
    workflow = WorkflowBuilder(start_executor=first, checkpoint_storage=storage).build()
    ```

    Checkpoints belong to the user and are erased with the user. Each is one record, written and erased as a
    whole. It expires `ttl_s` seconds after it was saved; `None` means never. A checkpoint holds pickled
    objects. Only the framework's types, common Python types and `allowed_checkpoint_types`, each named as
    `"module:qualname"`, are restored. This does not protect against someone who can write to the datastore;
    `sealing` does.

    The constructor reads and writes nothing, and raises `InvalidKey` for an invalid tenant or user. All
    methods raise `StorageError`; an outage is never a missing checkpoint.
    """

    def __init__(
        self,
        backend: Backend,
        tenant_id: str,
        user_id: str,
        *,
        ttl_s: float | None = None,
        allowed_checkpoint_types: Sequence[str] | None = None,
    ) -> None:
        require_backend(backend)
        if ttl_s is not None:
            require_seconds("ttl_s", ttl_s)
        if allowed_checkpoint_types is not None:
            require_items("allowed_checkpoint_types", allowed_checkpoint_types)
        self._states = backend.state_store
        self._owner = (tenant_id, user_id)
        self._names = _Names(MemoryKey(tenant_id, user_id, "agent-framework/checkpoint/").composite())
        self._ttl_s = ttl_s
        self._allowed = frozenset(allowed_checkpoint_types or ())

    async def save(self, checkpoint: WorkflowCheckpoint) -> str:
        """Store a copy of a checkpoint and return its id; one with the same id is replaced.

        A cancelled call has stored it. Raises `WorkflowCheckpointException` for a checkpoint that could not
        be read again because its types are not allowed or its `timestamp` is invalid; then nothing is stored.
        """
        try:
            encoded = encode_checkpoint_value(checkpoint.to_dict())
            self._decoded(encoded)
            name = self._names.of(checkpoint)
        except WorkflowCheckpointException:
            raise
        except Exception as error:
            raise WorkflowCheckpointException(
                "the checkpoint cannot be stored and read again: its values must be of types that can be "
                "pickled and are allowed"
            ) from error
        await to_its_end(self._states.save_memory_state(name, encoded, ttl=self._ttl_s))
        return checkpoint.checkpoint_id

    async def load(self, checkpoint_id: str) -> WorkflowCheckpoint:
        """Return a checkpoint in three round trips. Raises `WorkflowCheckpointException` if it is missing."""
        found = await self._first(await self._found(checkpoint_id))
        if found is None:
            raise WorkflowCheckpointException(f"No checkpoint found with ID {checkpoint_id}")
        return found

    async def list_checkpoints(self, *, workflow_name: str) -> list[WorkflowCheckpoint]:
        """Return the checkpoints of a workflow, oldest first.

        Raises `WorkflowCheckpointException` if the types of one are not allowed here.
        """
        names = await self._of(workflow_name)
        found: list[WorkflowCheckpoint | None] = []
        for start in range(0, len(names), AT_ONCE):
            found += await all_of(map(self._read, names[start : start + AT_ONCE]))
        return [one for one in found if one is not None]

    async def list_checkpoint_ids(self, *, workflow_name: str) -> list[str]:
        """Return the ids of a workflow's checkpoints, oldest first; no checkpoint is loaded."""
        return [self._names.parts(name).id for name in await self._of(workflow_name)]

    async def get_latest(self, *, workflow_name: str) -> WorkflowCheckpoint | None:
        """Return the checkpoint of a workflow with the latest `timestamp`; loads no other."""
        return await self._first((await self._of(workflow_name))[::-1])

    async def delete(self, checkpoint_id: str) -> bool:
        """Erase a checkpoint; returns whether it existed."""
        names = await self._found(checkpoint_id)
        return any([await to_its_end(self._states.delete_memory_state(name)) for name in names])

    async def _found(self, checkpoint_id: str) -> list[str]:
        """Return the names of the states of a checkpoint, the last saved first.

        A checkpoint saved again under another workflow or with another time has several.
        """
        return sorted(await self._listed(self._names.beginning(checkpoint_id)), key=self._at, reverse=True)

    async def _of(self, workflow: str) -> list[str]:
        """Return the names of a workflow's checkpoints, oldest first."""
        names = sorted(await self._listed(self._names.beginning()), key=self._at)
        newest = {self._names.parts(name).id: name for name in names}
        return [name for name in newest.values() if self._names.parts(name).workflow == workflow]

    async def _listed(self, beginning: str) -> list[str]:
        return [name async for name in self._states.states_of(*self._owner, beginning)]

    def _at(self, name: str) -> tuple[int, str]:
        parts = self._names.parts(name)
        return parts.at, parts.id

    async def _first(self, names: Sequence[str]) -> WorkflowCheckpoint | None:
        """Return the first checkpoint that still exists."""
        for name in names:
            if (found := await self._read(name)) is not None:
                return found
        return None

    async def _read(self, name: str) -> WorkflowCheckpoint | None:
        encoded = await self._states.load_memory_state(name)
        return None if encoded is None else WorkflowCheckpoint.from_dict(self._decoded(encoded))

    def _decoded(self, encoded: Any) -> dict[str, Any]:
        return cast("dict[str, Any]", decode_checkpoint_value(encoded, allowed_types=self._allowed))


class _Parts(NamedTuple):
    """The parts of the name of a checkpoint's state; the time is in microseconds since the epoch."""

    id: str
    at: int
    workflow: str


class _Names:
    """The names of the states that hold a user's checkpoints: `BASE` `ID/TIME/WORKFLOW`.

    One write stores a checkpoint, and a listing of names finds a workflow's checkpoints and their order.
    """

    def __init__(self, base: str) -> None:
        self._base = base

    def of(self, checkpoint: WorkflowCheckpoint) -> str:
        """Return the name for a checkpoint. Raises `ValueError` if its timestamp is invalid."""
        at = datetime.fromisoformat(checkpoint.timestamp)
        # The framework writes UTC.
        since = (at if at.tzinfo else at.replace(tzinfo=UTC)) - _EPOCH
        workflow = _escaped(checkpoint.workflow_name)
        return f"{self.beginning(checkpoint.checkpoint_id)}{since // timedelta(microseconds=1)}/{workflow}"

    def beginning(self, checkpoint_id: str | None = None) -> str:
        """Return the prefix of all names, or of those of one checkpoint."""
        return self._base if checkpoint_id is None else f"{self._base}{_escaped(checkpoint_id)}/"

    def parts(self, name: str) -> _Parts:
        """Return the parts of a name."""
        checkpoint_id, at, workflow = name.removeprefix(self._base).split("/")
        return _Parts(_unescaped(checkpoint_id), int(at), _unescaped(workflow))


def _escaped(text: str) -> str:
    """Escape a part of a name, then escape the result as `MemoryKey.composite` does."""
    return quote(text, safe="", errors="surrogatepass").replace("%", "%25")


def _unescaped(part: str) -> str:
    return unquote(part.replace("%25", "%"), errors="surrogatepass")
