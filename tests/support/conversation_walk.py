"""Random calls on two stores of Pydantic AI's conversations, which have to answer alike."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import random
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from typing import Any

import pytest
from pydantic_ai import Conversation, UserError, conversation_store
from pydantic_ai.conversation_store import ConversationRecord, ConversationStore, InMemoryConversationStore
from pydantic_ai.messages import (
    BinaryContent,
    ModelMessage,
    ModelRequest,
    ModelResponse,
    TextPart,
    ToolCallPart,
    ToolReturnPart,
    UserPromptPart,
)
from pydantic_ai.tools import DeferredToolRequests
from pydantic_ai.usage import RequestUsage, RunUsage

IDS = ("a", "b", "c", "d")
SCOPES = (None, None, "x", "y")
SOME_TIME = datetime(2030, 1, 1, tzinfo=UTC)

Call = Callable[[ConversationStore, int], Awaitable[Any]]


class Walk:
    """Calls `theirs`, the store that comes with Pydantic AI, and `ours`, and compares all that they say.

    Both mint the same ids. What a call is given, such as a conversation that was loaded long ago, each store
    has a copy of.
    """

    def __init__(self, ours: ConversationStore, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.stores = (InMemoryConversationStore(), ours)
        self.random = random.Random(seed)
        self.held: list[tuple[Conversation, Conversation]] = []
        self.entries = ["unknown"]
        self.answers: list[str] = []
        self._next = itertools.count()
        self._round = itertools.count()
        monkeypatch.setattr(conversation_store, "uuid7", lambda: f"{self._now}-{next(self._next)}")

    async def both(self, call: Call) -> tuple[Any, Any]:
        """Call both stores, with 0 and 1 for the copy to take; returns what they answered."""
        self._now = next(self._round)
        answers: list[Any] = []
        for which, store in enumerate(self.stores):
            self._next = itertools.count()
            try:
                answers.append(await call(store, which))
            except (UserError, LookupError) as error:
                answers.append(error)
        theirs, ours = answers
        assert shown(ours) == shown(theirs)
        self.answers.append(type(theirs).__name__)
        return theirs, ours

    async def step(self) -> None:
        """Make one random call."""
        works = [self.begin, self.load, self.list, self.read, self.look, self.branch, self.fork, self.write]
        if self.held:
            works += [self.extend, self.extend, self.extend, self.rewrite, self.send_back, self.note]
            works += [self.branch, self.read, self.delete]
        await self.random.choice(works)()

    async def compare(self) -> None:
        """Compare everything that is stored."""
        records, _ = await self.both(lambda store, _: store.list_conversations())
        for record in records:
            await self.both(lambda store, _, one=record: store.load_entries(one.conversation_id))
            for tip in record.branches:
                await self.both(lambda store, _, tip=tip: store.read_history(tip))
        for entry_id in self.entries:
            await self.both(lambda store, _, one=entry_id: store.read_entry(one))

    # Steps

    async def begin(self) -> None:
        scope, messages = self.scope(), self.messages()
        name, used = self.name(), self.random.randrange(3)
        self.held.append(
            tuple(  # pyright: ignore[reportArgumentType] -- a pair
                Conversation(conversation_id=name, messages=[*messages], usage=RunUsage(requests=used))
                for _ in self.stores
            )
        )
        await self.save(self.held[-1], scope)

    async def load(self) -> None:
        name, limit, scope = self.name(), self.limit(), self.scope()
        pair = await self.both(lambda store, _: store.load(name, limit=limit, scope=scope))
        if isinstance(pair[0], Conversation):
            self.held.append(pair)

    async def extend(self) -> None:
        await self.changed(lambda messages, new: [*messages, *new])

    async def rewrite(self) -> None:
        place = self.random.random()

        def replaced(messages: list[ModelMessage], new: Sequence[ModelMessage]) -> list[ModelMessage]:
            at = int(place * len(messages))
            return [*messages[:at], *new, *messages[at + 1 :]]

        await self.changed(replaced)

    async def changed(self, change: Callable[..., list[ModelMessage]]) -> None:
        pair, new, scope = self.pair(), self.messages(), self.scope()
        for one in pair:
            one.messages = change(one.messages, new)
        await self.save(pair, scope)

    async def send_back(self) -> None:
        """Save what a client has sent back, which lacks what the store has noted in it."""
        pair, window = self.pair(), self.random.random() < 0.5
        back: Any = tuple(
            Conversation(
                conversation_id=one.conversation_id,
                messages=copy.deepcopy(one.messages),
                usage=one.usage,
                revision=one.revision,
                new_message_index=one.new_message_index if window else None,
            )
            for one in pair
        )
        self.held.append(back)
        await self.save(back, self.scope())

    async def note(self) -> None:
        """Save without a new message."""
        pair, waits = self.pair(), self.random.random() < 0.5
        for one in pair:
            one.usage = RunUsage(requests=7, input_tokens=3, details={"cached": 2})
            one.deferred_tool_requests = (
                DeferredToolRequests(
                    approvals=[ToolCallPart("book", {"at": [1, None]}, tool_call_id="t")],
                    metadata={"t": {"why": "é \0"}},
                )
                if waits
                else None
            )
        await self.save(pair, self.scope())

    async def branch(self) -> None:
        name, scope, place, stale = self.name(), self.scope(), self.place(), self.random.random() < 0.2
        records, _ = await self.both(lambda store, _: store.read_record(name))
        revision = "stale" if stale or not isinstance(records, ConversationRecord) else records.revision
        pair = await self.both(
            lambda store, _: store.branch(name, expected_revision=revision, scope=scope, **place)
        )
        if isinstance(pair[0], Conversation):
            self.held.append(pair)

    async def fork(self) -> None:
        name, new, scope, source = self.name(), self.name(), self.scope(), self.scope()
        place = self.place() if self.random.random() < 0.7 else {}
        pair = await self.both(
            lambda store, _: store.fork(
                name, new_conversation_id=new, scope=scope, source_scope=source, **place
            )
        )
        if isinstance(pair[0], Conversation):
            self.held.append(pair)

    async def delete(self) -> None:
        name, scope = self.name(), self.scope()
        if self.random.random() < 0.6:
            await self.both(lambda store, _: store.delete(name, scope=scope))
        else:
            await self.both(lambda store, _: store.delete_record(name, expected_revision="stale"))

    async def list(self) -> None:
        scope, limit = self.scope(), self.limit()
        await self.both(lambda store, _: store.list_conversations(scope=scope, limit=limit))

    async def read(self) -> None:
        name, limit = self.name(), self.limit()
        entries, _ = await self.both(lambda store, _: store.load_entries(name, limit=limit))
        if isinstance(entries, list) and entries:
            self.entries = [*self.entries[-20:], self.random.choice(entries).id]

    async def look(self) -> None:
        entry_id, limit = self.random.choice(self.entries), self.random.choice([None, 0, 1, 3])
        await self.both(lambda store, _: store.read_entry(entry_id))
        await self.both(lambda store, _: store.read_history(entry_id, limit=limit))

    async def write(self) -> None:
        """Write a record alone, on a revision that is stored or not, with a head that is or not."""
        name, scope = self.name(), self.random.choice(SCOPES)
        records, _ = await self.both(lambda store, _: store.read_record(name))
        stored = records if isinstance(records, ConversationRecord) else None
        head = self.random.choice(self.entries) if stored is None else stored.head_id
        revision = self.random.choice([stored.revision if stored else None, None, "stale"])
        record = ConversationRecord(
            conversation_id=name,
            head_id=head,
            scope=scope,
            branches=stored.branches if stored else [],
            revision=f"written-{next(self._round)}",
        )
        await self.both(lambda store, _: store.write_record(record, expected_revision=revision))

    async def save(self, pair: tuple[Conversation, Conversation], scope: str | None) -> None:
        await self.both(lambda store, which: store.save(pair[which], scope=scope))

    # What they are given

    def name(self) -> str:
        return self.random.choice(IDS)

    def scope(self) -> str | None:
        return self.random.choice(SCOPES) if self.random.random() < 0.3 else None

    def limit(self) -> int | None:
        return self.random.choice([None, None, 0, 1, 3, -1])

    def pair(self) -> tuple[Conversation, Conversation]:
        """Return something that was loaded or saved, as a rule not long ago."""
        newest = self.held[-4:] if self.random.random() < 0.8 else self.held
        return self.random.choice(newest)

    def place(self) -> dict[str, Any]:
        if self.random.random() < 0.5:
            return {"at": self.random.randrange(-1, 6)}
        return {"from_entry": self.random.choice(self.entries)}

    def messages(self) -> list[ModelMessage]:
        number = next(self._round)
        some: list[ModelMessage] = [
            ModelRequest(parts=[UserPromptPart(f"{number}?", timestamp=SOME_TIME)], timestamp=SOME_TIME),
            ModelResponse(
                parts=[
                    TextPart(f"{number}!"),
                    ToolCallPart("look", {"at": number}, tool_call_id=f"{number}"),
                ],
                timestamp=SOME_TIME,
                usage=RequestUsage(input_tokens=number),
            ),
            ModelRequest(
                parts=[
                    ToolReturnPart("look", {"seen": [number, None]}, f"{number}", timestamp=SOME_TIME),
                    UserPromptPart([BinaryContent(b"\xff\0", media_type="audio/wav")], timestamp=SOME_TIME),
                ],
                metadata={"number": number},
            ),
        ]
        return some[: self.random.randrange(4)]


def shown(answer: Any) -> Any:
    """Return what is to be equal of two answers."""
    if isinstance(answer, LookupError):
        return "LookupError"
    if isinstance(answer, UserError):
        return type(answer).__name__, str(answer)
    if isinstance(answer, Conversation):
        return answer, answer.new_message_index
    if isinstance(answer, ConversationRecord):
        return dataclasses.replace(answer, updated_at=SOME_TIME)
    if isinstance(answer, (list, tuple)):
        return [shown(one) for one in answer]  # pyright: ignore[reportUnknownVariableType]
    return answer
