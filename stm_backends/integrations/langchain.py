"""LangChain: a conversation's message history on any backend (extra `langchain`)."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, TypeAlias, TypeVar

from stm_backends import logs
from stm_backends.backend import Backend
from stm_backends.drivers.checks import require_backend, require_integer, require_items
from stm_backends.errors import ConfigurationError, Corrupt, InvalidState, located
from stm_backends.extras import missing_extra
from stm_backends.handed_in import call
from stm_backends.integrations.blocking import Waits, refuse
from stm_backends.integrations.converting import GONE, Converter
from stm_backends.plain_json import DEEPEST_IN_TURN, require_json
from stm_backends.records import keys
from stm_backends.types import MemoryKey

try:
    from langchain_core.chat_history import BaseChatMessageHistory
    from langchain_core.messages import BaseMessage, ToolMessage, messages_from_dict, messages_to_dict
except ModuleNotFoundError as error:
    raise missing_extra("langchain", error) from error

logger = logging.getLogger("stm_backends")

_T = TypeVar("_T")

OnError: TypeAlias = Callable[[Exception], object]
"""A function or coroutine function called with an error before the error is raised."""

_ON_ERROR_S: Final = 60.0
"""The time limit of such a function, in seconds."""

_AS_IT_IS: Final = frozenset(("content", "tool_calls", "invalid_tool_calls"))
"""The fields of a message that a model reads. They are refused if they are not JSON."""


class StmChatMessageHistory(BaseChatMessageHistory):
    """A conversation as LangChain's message history, shared by every process that uses the same key.

    ```
    history = StmChatMessageHistory(backend, MemoryKey("acme", "u123", "chat_001"))
    await history.aadd_messages([HumanMessage("Hello")])
    ```

    Programs with an event loop use `aget_messages`, `aadd_messages` and `aclear`. The blocking `messages`,
    `add_messages` and `clear` need `run`, which runs a coroutine on the backend's loop, and must be called
    from another thread than that loop's. Without `run` they raise `ConfigurationError`.

    With a `limit`, at most that many of the newest messages are read and returned; all stay stored. The
    history expires `ttl_s` seconds after the last message was added; `None` means never. The constructor
    reads and writes nothing. Raises `InvalidKey` for an invalid key. All methods raise `StorageError`; an
    outage is never an empty history.

    `RunnableWithMessageHistory` only logs errors of saving, so its caller may get an answer that is not
    stored. `on_error`, a function or a coroutine function, is called with each error of reading or adding
    before the error is raised. It may take 60 seconds; its own errors are logged.
    """

    def __init__(
        self,
        backend: Backend,
        key: MemoryKey,
        *,
        ttl_s: float | None = None,
        run: Waits | None = None,
        limit: int | None = None,
        on_error: OnError | None = None,
    ) -> None:
        super().__init__()
        require_backend(backend)
        if on_error is not None and not callable(on_error):
            raise ConfigurationError(f"on_error must be a function, not {type(on_error).__name__}")
        if limit is not None:
            require_integer("limit", limit, least=0)
        self._limit = limit
        self._log = backend.item_log(key, "langchain", ttl_s=ttl_s)
        self._backend = backend.name
        self._observer = backend.observer
        self._name = keys.log_name(keys.log_key(key, "langchain"))
        self._run = run
        self._on_error = on_error

    async def aget_messages(self) -> list[BaseMessage]:
        """Return all messages, or the newest `limit`, oldest first, in one round trip.

        Only LangChain's own message types are created: no stored text is used as the name of a class.
        Raises `Corrupt` for anything else.
        """
        return await self._reported(self._get())

    async def _get(self) -> list[BaseMessage]:
        items = await self._log.items(self._limit)
        with located(self._backend, "aget_messages"):
            try:
                return messages_from_dict(items)
            except (KeyError, TypeError, ValueError):
                # The cause may quote the conversation.
                raise Corrupt("a stored message has a type that LangChain does not know") from None

    async def aadd_messages(self, messages: Sequence[BaseMessage]) -> None:
        """Add messages at the end, all or none, in one round trip.

        Values in artifacts and metadata that are not JSON are converted: bytes to base64, times to ISO 8601,
        decimals and errors to text, sets to lists. Others are left out, with a warning that names their type.
        Raises `InvalidState` for a message that LangChain could not load again, and for contents and tool
        calls that are not JSON; `TooLarge`.
        """
        await self._reported(self._add(messages))

    async def _add(self, messages: Sequence[BaseMessage]) -> None:
        require_items("messages", messages)
        messages = [*messages]
        for index, message in enumerate(messages):
            if not isinstance(message, BaseMessage):  # pyright: ignore[reportUnnecessaryIsInstance] -- callers are not all typed
                raise InvalidState(
                    f"messages[{index}] is {type(message).__name__}, not a message of LangChain"
                )
        items = [self._dumped(message, f"messages[{index}]") for index, message in enumerate(messages)]
        try:
            messages_from_dict(items)
        except (KeyError, TypeError, ValueError):
            raise InvalidState("a message has a type that LangChain could not load again") from None
        await self._log.add(items)

    def _dumped(self, message: BaseMessage, path: str) -> dict[str, Any]:
        """Return a message as LangChain stores it, with values that are not JSON converted or left out."""
        left_out = list[str]()
        try:
            item = messages_to_dict([message])[0]
        except (ValueError, TypeError, RecursionError):
            # It contains itself, or a value's own serializer fails.
            bare: dict[str, Any] = {"additional_kwargs": {}, "response_metadata": {}}
            if isinstance(message, ToolMessage):
                bare["artifact"] = None
            left_out += bare
            try:
                item = messages_to_dict([message.model_copy(update=bare)])[0]
            except (ValueError, TypeError, RecursionError):
                raise InvalidState(f"{path} cannot be serialized by LangChain") from None
        try:
            require_json(item, path, deepest=DEEPEST_IN_TURN)
        except InvalidState:
            data: dict[str, Any] = item["data"]
            for name in data.keys() - _AS_IT_IS:
                converter = Converter()
                found = converter.plain(data[name], DEEPEST_IN_TURN - 2)
                data[name] = None if found is GONE else found
                left_out += [f"{one} in {name}" for one in converter.left_out]
        if left_out:
            what = ", ".join(left_out)
            logger.warning("left out of a message, not JSON: %s (conversation %s)", what, self._name)
        return item

    async def _reported(self, work: Awaitable[_T]) -> _T:
        """Return the result of a call; passes its error to `on_error`."""
        try:
            return await work
        except Exception as error:
            if self._on_error is not None:
                try:
                    await call(self._on_error, error, within=_ON_ERROR_S)
                except Exception as failure:  # noqa: BLE001 -- a user's function may raise anything
                    logs.failed("the function on_error failed (%s)", failure)
                    self._observer.function_failed("callback", failure)
            raise

    async def aclear(self) -> None:
        """Erase the conversation's messages."""
        await self._log.clear()

    @property
    def messages(self) -> list[BaseMessage]:  # pyright: ignore[reportIncompatibleVariableOverride] -- LangChain's guide says to override it so
        """The messages, oldest first; see `aget_messages`."""
        if self._run is None:
            refuse("messages", "await aget_messages()")
        return self._run(self.aget_messages())

    def add_messages(self, messages: Sequence[BaseMessage]) -> None:
        """Add messages at the end, all or none; see `aadd_messages`."""
        if self._run is None:
            refuse("add_messages", "await aadd_messages()")
        self._run(self.aadd_messages(messages))

    def clear(self) -> None:
        """Erase the conversation's messages."""
        if self._run is None:
            refuse("clear", "await aclear()")
        self._run(self.aclear())
