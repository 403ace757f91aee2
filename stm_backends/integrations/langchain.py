"""LangChain: a conversation's message history on any backend (extra `langchain`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from stm_backends.backend import Backend
from stm_backends.drivers.checks import require_backend, require_integer, require_items
from stm_backends.errors import ConfigurationError, Corrupt, InvalidState, located
from stm_backends.extras import missing_extra
from stm_backends.integrations.blocking import Waits
from stm_backends.types import MemoryKey

try:
    from langchain_core.chat_history import BaseChatMessageHistory
    from langchain_core.messages import BaseMessage, messages_from_dict, messages_to_dict
except ModuleNotFoundError as error:
    raise missing_extra("langchain", error) from error


class StmChatMessageHistory(BaseChatMessageHistory):
    """A conversation as LangChain's message history, shared by every process that uses the same key.

    ```
    history = StmChatMessageHistory(backend, MemoryKey("acme", "u123", "chat_001"))
    await history.aadd_messages([HumanMessage("Hello")])
    ```

    Programs with an event loop use `aget_messages`, `aadd_messages` and `aclear`. The blocking `messages`,
    `add_messages` and `clear` need `run`, which runs a coroutine on the backend's loop, and must be called
    from another thread than that loop's. Without `run` they raise `ConfigurationError`.

    With a `limit`, only the newest messages are read and returned, so many at most; all stay stored. The
    history expires `ttl_s` seconds after the last message was added; `None`: never. The constructor reads
    and writes nothing. Raises `InvalidKey` for an invalid key. All methods raise `StorageError`; an outage is
    never an empty history.
    """

    def __init__(
        self,
        backend: Backend,
        key: MemoryKey,
        *,
        ttl_s: float | None = None,
        run: Waits | None = None,
        limit: int | None = None,
    ) -> None:
        super().__init__()
        require_backend(backend)
        if limit is not None:
            require_integer("limit", limit, least=0)
        self._limit = limit
        self._log = backend.item_log(key, "langchain", ttl_s=ttl_s)
        self._backend = backend.name
        self._run = run

    async def aget_messages(self) -> list[BaseMessage]:
        """Return all messages, or the newest `limit`, oldest first, in one round trip.

        Only LangChain's own message types are created: no stored text is used as the name of a class.
        Raises `Corrupt` for anything else.
        """
        items = await self._log.items(self._limit)
        with located(self._backend, "aget_messages"):
            try:
                return messages_from_dict(items)
            except (KeyError, TypeError, ValueError):
                # The cause may quote the conversation.
                raise Corrupt("a stored message has a type that LangChain does not know") from None

    async def aadd_messages(self, messages: Sequence[BaseMessage]) -> None:
        """Add messages at the end, all or none, in one round trip.

        Raises `InvalidState` for a message that LangChain could not load again or that is not JSON, and
        `TooLarge`.
        """
        require_items("messages", messages)
        messages = [*messages]
        for index, message in enumerate(messages):
            if not isinstance(message, BaseMessage):  # pyright: ignore[reportUnnecessaryIsInstance] -- callers are not all typed
                raise InvalidState(
                    f"messages[{index}] is {type(message).__name__}, not a message of LangChain"
                )
        items = messages_to_dict(messages)
        try:
            messages_from_dict(items)
        except (KeyError, TypeError, ValueError):
            raise InvalidState("a message has a type that LangChain could not load again") from None
        await self._log.add(items)

    async def aclear(self) -> None:
        """Erase the conversation's messages."""
        await self._log.clear()

    @property
    def messages(self) -> list[BaseMessage]:  # pyright: ignore[reportIncompatibleVariableOverride] -- LangChain's guide says to override it so
        """The messages, oldest first; see `aget_messages`."""
        if self._run is None:
            _refuse("messages", "aget_messages")
        return self._run(self.aget_messages())

    def add_messages(self, messages: Sequence[BaseMessage]) -> None:
        """Add messages at the end, all or none; see `aadd_messages`."""
        if self._run is None:
            _refuse("add_messages", "aadd_messages")
        self._run(self.aadd_messages(messages))

    def clear(self) -> None:
        """Erase the conversation's messages."""
        if self._run is None:
            _refuse("clear", "aclear")
        self._run(self.aclear())


def _refuse(method: str, instead: str) -> NoReturn:
    raise ConfigurationError(
        f"{method} blocks and needs an event loop in another thread: await {instead}(), or pass run=..., "
        "a function that runs a coroutine on the loop that the backend was opened on"
    )
