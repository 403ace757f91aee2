"""LlamaIndex: the messages of its memories on any backend (extra `llama-index`)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, Self, TypeVar, cast

from stm_backends import races
from stm_backends.backend import Backend
from stm_backends.drivers.checks import require_backend, require_integer, require_items, require_seconds
from stm_backends.errors import ConfigurationError, Corrupt, InvalidState, Unavailable, located
from stm_backends.extras import missing_extra
from stm_backends.history.items import Item
from stm_backends.history.log import ItemLog
from stm_backends.integrations.blocking import Waits, elsewhere
from stm_backends.integrations.converting import Converter
from stm_backends.plain_json import DEEPEST_IN_TURN
from stm_backends.records import keys, operations
from stm_backends.types import MemoryKey

try:
    from llama_index.core.llms import ChatMessage
    from llama_index.core.storage.chat_store import BaseChatStore
except ModuleNotFoundError as error:
    raise missing_extra("llama-index", error) from error

logger = logging.getLogger("stm_backends")

_T = TypeVar("_T")


class StmChatStore(BaseChatStore):
    """The conversations of one user as LlamaIndex's chat store, shared by every process.

    ```
    store = StmChatStore(backend, "acme", "u123")
    memory = ChatMemoryBuffer.from_defaults(chat_store=store, chat_store_key="chat_001")
    ```

    A key is the id of a conversation, and must be unique only within the user. Adding a message, and removing
    the last one, never conflict with other writers. Other changes are one conditional write, so they lose
    nothing that another process adds meanwhile; `set_messages` and `delete_messages` remove all previous
    messages. A conversation expires `ttl_s` seconds after the last change; `None` means never.

    The blocking methods must be called from another thread than that of the backend's event loop, as
    LlamaIndex itself calls some of them. They run on the loop that the store was created or used on, or by
    `run`, which runs a coroutine on the backend's loop and returns its result; `stm_backends.sync` has one.
    Elsewhere they raise `ConfigurationError`. With `run`, the asynchronous methods work on every event loop.

    The constructor reads and writes nothing, and raises `InvalidKey` for an invalid tenant or user. All
    methods raise `StorageError`, and `InvalidKey` for a key that is blank or too long; an outage is never an
    empty conversation. A cancelled call has ended when the cancellation is raised.
    """

    _backend: Backend
    _owner: tuple[str, str]
    _ttl_s: float | None
    _run: Waits | None
    _loop: asyncio.AbstractEventLoop | None

    def __init__(
        self,
        backend: Backend,
        tenant: str,
        user: str,
        *,
        run: Waits | None = None,
        ttl_s: float | None = None,
    ) -> None:
        super().__init__()
        require_backend(backend)
        if ttl_s is not None:
            require_seconds("ttl_s", ttl_s)
        MemoryKey(tenant, user, "-").composite()  # raises `InvalidKey` for an invalid tenant or user
        self._backend = backend
        self._owner = (tenant, user)
        self._ttl_s = ttl_s
        self._run = run
        self._loop = _running_loop()

    @classmethod
    def class_name(cls) -> str:
        """Return the name that LlamaIndex writes when it serializes a memory with this store."""
        return "StmChatStore"

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        """Return the store itself: a workflow copies its state with each edit, but the backend is shared."""
        return self

    def __getstate__(self) -> dict[str, Any]:
        raise ConfigurationError(
            "a chat store belongs to an open backend and cannot be pickled: create one in each process"
        )

    # On an event loop

    async def aget_messages(self, key: str) -> list[ChatMessage]:
        """Return all messages, oldest first; `[]` if there are none. Raises `Corrupt` for invalid messages.

        Takes one round trip, and one more for each 512 messages of a long conversation.
        """
        return await self._do(self._get(key))

    async def aset_messages(self, key: str, messages: list[ChatMessage]) -> None:
        """Replace all messages in one step. Raises the same errors as `async_add_message`."""
        await self._do(self._set(key, messages))

    async def async_add_message(self, key: str, message: ChatMessage, idx: int | None = None) -> None:
        """Add a message at the end, in one round trip, or before the one at `idx`, as `list.insert` does.

        Values in `additional_kwargs` that are not JSON are converted, or left out with a warning that names
        their type. Raises `InvalidState` for a message that could not be read again, such as one with the
        path of a local file, `LimitReached`, `TooLarge`, and `OutcomeUnknown` if it may have been added.
        """
        await self._do(self._add(key, message, idx))

    async def adelete_messages(self, key: str) -> list[ChatMessage] | None:
        """Erase a conversation and return its messages; `None` if there is none.

        A message that another process adds meanwhile is erased, or starts the conversation anew.
        """
        return await self._do(self._clear(key))

    async def adelete_message(self, key: str, idx: int) -> ChatMessage | None:
        """Remove the message at an index and return it; `None` if there is none.

        A negative index counts from the end. The other messages keep their order; they are rewritten in one
        step. Raises `Unavailable` if others keep changing the conversation.
        """
        return await self._do(self._delete(key, idx))

    async def adelete_last_message(self, key: str) -> ChatMessage | None:
        """Remove the last message and return it; no other caller gets the same. `None` if there is none.

        Raises `OutcomeUnknown` if one may have been removed and cannot be returned.
        """
        return await self._do(self._pop(key))

    async def aget_keys(self) -> list[str]:
        """Return the ids of the user's conversations, sorted. Reads the end of each."""
        return await self._do(self._keys())

    # In other threads

    def get_messages(self, key: str) -> list[ChatMessage]:
        """Return all messages, oldest first; see `aget_messages`."""
        return self._wait("aget_messages", self._get(key))

    def set_messages(self, key: str, messages: list[ChatMessage]) -> None:
        """Replace all messages in one step; see `aset_messages`."""
        self._wait("aset_messages", self._set(key, messages))

    def add_message(self, key: str, message: ChatMessage, idx: int | None = None) -> None:
        """Add a message at the end, or before the one at `idx`; see `async_add_message`."""
        self._wait("async_add_message", self._add(key, message, idx))

    def delete_messages(self, key: str) -> list[ChatMessage] | None:
        """Erase a conversation and return its messages; see `adelete_messages`."""
        return self._wait("adelete_messages", self._clear(key))

    def delete_message(self, key: str, idx: int) -> ChatMessage | None:
        """Remove the message at an index and return it; see `adelete_message`."""
        return self._wait("adelete_message", self._delete(key, idx))

    def delete_last_message(self, key: str) -> ChatMessage | None:
        """Remove the last message and return it; see `adelete_last_message`."""
        return self._wait("adelete_last_message", self._pop(key))

    def get_keys(self) -> list[str]:
        """Return the ids of the user's conversations, sorted; see `aget_keys`."""
        return self._wait("aget_keys", self._keys())

    async def _do(self, work: Coroutine[Any, Any, _T]) -> _T:
        if self._run is not None:
            return await elsewhere(self._run, work)
        result = await work
        # Also for a store that was created before the loop ran.
        self._loop = _running_loop()
        return result

    def _wait(self, instead: str, work: Coroutine[Any, Any, _T]) -> _T:
        if self._run is not None:
            return self._run(work)
        loop = self._loop
        if loop is None or loop.is_closed() or loop is _running_loop():
            work.close()
            raise ConfigurationError(
                "this method blocks and needs the backend's event loop in another thread: "
                f"await {instead}(), or create the store on that loop and call this from another thread, or "
                "pass run=..., a function that runs a coroutine on that loop"
            )
        return asyncio.run_coroutine_threadsafe(work, loop).result()

    # The same calls, on the backend's loop

    async def _get(self, key: str) -> list[ChatMessage]:
        return self._read("get_messages", await self._log(key).items())

    async def _set(self, key: str, messages: Sequence[ChatMessage]) -> None:
        require_items("messages", messages)
        items = [self._dumped(key, one, f"messages[{index}]") for index, one in enumerate(messages)]
        await self._edit("set_messages", key, lambda _: (items, None), limit=0)

    async def _add(self, key: str, message: ChatMessage, idx: int | None) -> None:
        item = self._dumped(key, message, "message")
        if idx is None:
            await self._log(key).add([item])
        else:
            require_integer("idx", idx)
            await self._edit("add_message", key, lambda found: ([*found[:idx], item, *found[idx:]], None))

    async def _clear(self, key: str) -> list[ChatMessage] | None:
        log = self._log(key)
        state = await log.read()
        await log.clear()
        return self._read("delete_messages", state.items) if state.exists else None

    async def _delete(self, key: str, idx: int) -> ChatMessage | None:
        require_integer("idx", idx)

        def without(found: Sequence[Item]) -> tuple[list[Item] | None, Item | None]:
            if not -len(found) <= idx < len(found):
                return None, None
            place = idx % len(found)
            return [*found[:place], *found[place + 1 :]], found[place]

        removed = await self._edit("delete_message", key, without)
        return None if removed is None else self._read("delete_message", [removed])[0]

    async def _pop(self, key: str) -> ChatMessage | None:
        removed = await self._log(key).pop()
        return None if removed is None else self._read("delete_last_message", [removed])[0]

    async def _keys(self) -> list[str]:
        found: list[str] = []

        async def note(at: tuple[object, MemoryKey]) -> None:
            key = at[1].session_id
            log = self._log(key)
            newest = await log.newest(1)
            # A conversation may have only a record left. Without messages, all entries must be read.
            if newest.items or (newest.exists and (await log.read(0)).exists):
                found.append(key)

        await operations.each(self._backend.sessions.logs(*self._owner, "llama-index"), note)
        return sorted(found)

    async def _edit(
        self,
        operation: str,
        key: str,
        edit: Callable[[Sequence[Item]], tuple[list[Item] | None, _T]],
        *,
        limit: int | None = None,
    ) -> _T:
        """Replace the messages by the result of `edit`, in one step; change nothing if that is `None`.

        `edit` gets the newest `limit` messages, and is called again after each lost race.
        """
        log = self._log(key)

        async def attempt() -> tuple[_T] | races.Lost:
            read = await log.read(limit)
            items, result = edit(read.items)
            if items is None or await log.rewrite(read.tip, items) is not None:
                return (result,)
            return races.Lost(read.tip)

        done = await races.contend(attempt)
        if done is None:
            raise Unavailable(
                "others kept changing the conversation, and nothing was done; try again",
                backend=self._backend.name,
                operation=operation,
            )
        return done[0]

    def _log(self, key: str) -> ItemLog:
        return self._backend.item_log(MemoryKey(*self._owner, key), "llama-index", ttl_s=self._ttl_s)

    # Messages

    def _read(self, operation: str, items: Iterable[Item]) -> list[ChatMessage]:
        with located(self._backend.name, operation):
            try:
                return [ChatMessage.model_validate(item) for item in items]
            except Exception:  # noqa: BLE001 -- LlamaIndex's validators raise whatever they meet
                # The cause may quote the conversation.
                raise Corrupt("a stored message is not one that LlamaIndex knows") from None

    def _dumped(self, key: str, message: object, path: str) -> Item:
        """Return a message as it is stored. Raises `InvalidState` if it could not be read again."""
        if not isinstance(message, ChatMessage):
            raise InvalidState(f"{path} is {type(message).__name__}, not a message of LlamaIndex")
        converter = Converter()
        try:
            said = message.model_copy(update={"additional_kwargs": {}})
            item = said.model_dump(mode="json", warnings=False)
            # Not dumped as JSON, which would reject the message for one value.
            bare = message.model_copy(update={"blocks": []}).model_dump(warnings=False)["additional_kwargs"]
            # Images are among the blocks as well. LlamaIndex fails to read a message that has them here.
            bare.pop("images", None)
            item["additional_kwargs"] = converter.plain(bare, DEEPEST_IN_TURN - 1)
            ChatMessage.model_validate(item)
        except Exception as error:  # noqa: BLE001 -- values in a message have serializers of their users
            what = type(error).__name__
            raise InvalidState(f"{path} is not a message that LlamaIndex could read again ({what})") from None
        if _names_a_file(item):
            raise InvalidState(f"{path} has the path of a local file: give the file's content")
        if converter.left_out:
            where = keys.log_name(keys.log_key(MemoryKey(*self._owner, key), "llama-index"))
            what = ", ".join(converter.left_out)
            logger.warning("left out of a message, not JSON: %s (conversation %s)", what, where)
        return item


def _names_a_file(value: object) -> bool:
    """Return whether a block of a message, or one within it, has its content in a file."""
    if isinstance(value, dict):
        inner = cast("dict[str, object]", value)
        return ("block_type" in inner and inner.get("path") is not None) or any(
            map(_names_a_file, inner.values())
        )
    return isinstance(value, list) and any(map(_names_a_file, cast("list[object]", value)))


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
