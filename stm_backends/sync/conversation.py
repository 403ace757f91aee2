"""A conversation of messages, for programs without an event loop."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from stm_backends.memory.shared import conversation
from stm_backends.memory.shared.conversation import History, HistoryMessage
from stm_backends.messages import Message
from stm_backends.records.usage import Usage
from stm_backends.sync.memory import Run, Shared, each


class Conversation(Shared):
    """The asynchronous `Conversation` with blocking methods; `backend.conversation` returns one.

    Its methods guarantee and raise the same as the asynchronous ones.
    """

    def __init__(self, behind: conversation.Conversation, run: Run) -> None:
        super().__init__(behind, run)
        self._behind = behind

    @property
    def asynchronous(self) -> conversation.Conversation:
        """The asynchronous conversation, which belongs to the loop's thread."""
        return self._behind

    def add(
        self,
        *messages: Message,
        id: str | None = None,  # noqa: A002 -- what providers call it
        cut: bool = False,
        usage: Mapping[str, Any] | None = None,
    ) -> None:
        """Add messages at the end, all or none, in one round trip."""
        self._run(self._behind.add(*messages, id=id, cut=cut, usage=usage))

    def messages(self, *, max_tokens: int | None = None) -> list[Message]:
        """Return messages for the model in one round trip: the summary, then recent messages unchanged."""
        return self._run(self._behind.messages(max_tokens=max_tokens))

    def history(
        self,
        *,
        before: int | None = None,
        after: int | None = None,
        at: int | None = None,
        limit: int = 50,
        revision: int | None = None,
    ) -> History:
        """Return up to `limit` messages of the whole conversation by their numbers, oldest first."""
        found = self._behind.history(before=before, after=after, at=at, limit=limit, revision=revision)
        return self._run(found)

    def usage(self) -> Usage:
        """Return the usage of all answers, by day and in total, in one round trip."""
        return self._run(self._behind.usage())

    def each_message(
        self, *, after: int | None = None, revision: int | None = None
    ) -> Iterator[HistoryMessage]:
        """Yield all messages of the conversation after a number, oldest first, in memory of a few pages."""
        return each(self._behind.each_message(after=after, revision=revision), self._run)

    def rewind(self, to: int, *, revision: int | None = None) -> None:
        """Continue after the message with this number; later messages leave the view, for every process."""
        self._run(self._behind.rewind(to, revision=revision))

    def replace(self, number: int, message: Message, *, revision: int | None = None) -> None:
        """Replace the message with this number; its former content is deleted."""
        self._run(self._behind.replace(number, message, revision=revision))

    def remove(self, first: int, last: int | None = None, *, revision: int | None = None) -> None:
        """Remove a message, or all messages from one number to another; their content is deleted."""
        self._run(self._behind.remove(first, last, revision=revision))

    def summarize_again(self, *, since: int = 0) -> None:
        """Write the summary again, from the last one before the number `since`."""
        self._run(self._behind.summarize_again(since=since))

    def fork(self, id: str, *, to: int | None = None) -> Conversation:  # noqa: A002 -- as above
        """Copy the messages up to a number, by default all, into a new conversation, and return that."""
        return Conversation(self._run(self._behind.fork(id, to=to)), self._run)
