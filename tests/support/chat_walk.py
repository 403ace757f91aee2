"""Random calls on two chat stores of LlamaIndex, which have to answer alike."""

from __future__ import annotations

import itertools
import random
from contextlib import suppress
from typing import Any

from llama_index.core.base.llms.types import ImageBlock, ThinkingBlock, ToolCallBlock
from llama_index.core.llms import ChatMessage, TextBlock
from llama_index.core.storage.chat_store import SimpleChatStore

from stm_backends.integrations.llama_index import StmChatStore

KEYS = ("a", "b:%é", "c/d")
CALLS = ("add",) * 8 + ("insert", "get", "delete", "delete", "last", "last", "set", "clear")


class Walk:
    """Calls `theirs`, the store that comes with LlamaIndex, and `ours`, and compares all that they say."""

    def __init__(self, ours: StmChatStore, seed: int) -> None:
        self.ours, self.theirs = ours, SimpleChatStore()
        self.random = random.Random(seed)
        self.said: set[str] = set()
        self._numbers = itertools.count()

    def message(self) -> ChatMessage:
        """Return a message that says something else than all before it."""
        text = TextBlock(text=f"{next(self._numbers)} é")
        return self.random.choice(
            [
                ChatMessage(role="user", blocks=[text]),
                ChatMessage(role="user", blocks=[text, ImageBlock(image=b"\x89PNG\r\n\x1a\n")]),
                ChatMessage(
                    role="assistant",
                    blocks=[
                        ThinkingBlock(content="hm"),
                        ToolCallBlock(tool_name="f", tool_kwargs={"a": [1]}),
                    ],
                    additional_kwargs={"n": str(text.text)},
                ),
                ChatMessage(role="tool", blocks=[text], additional_kwargs={"tool_call_id": None}),
            ]
        )

    async def step(self) -> None:
        """Make one call."""
        key, call = self.random.choice(KEYS), self.random.choice(CALLS)
        answers = await self._both(key, call, self.random.randint(-8, 8))
        assert answers[0] == answers[1], call
        if answers[0]:
            self.said.add(call)

    async def compare(self) -> None:
        """Compare all that is stored."""
        assert await self.ours.aget_keys() == sorted(self.theirs.get_keys())
        for key in KEYS:
            assert await self.ours.aget_messages(key) == self.theirs.get_messages(key), key

    async def _both(self, key: str, call: str, idx: int) -> tuple[Any, Any]:
        ours, theirs, answer = self.ours, self.theirs, None
        if call in ("add", "insert"):
            message, place = self.message(), idx if call == "insert" else None
            theirs.add_message(key, message, place)
            return None, await ours.async_add_message(key, message, place)
        if call == "set":
            messages = [self.message() for _ in range(self.random.randint(0, 3))]
            theirs.set_messages(key, [*messages])
            return None, await ours.aset_messages(key, messages)
        if call == "get":
            return [*theirs.get_messages(key)], await ours.aget_messages(key)
        if call == "clear":
            return theirs.delete_messages(key), await ours.adelete_messages(key)
        # Theirs raises for some places without a message, and returns `None` for others.
        if call == "delete":
            with suppress(IndexError):
                answer = theirs.delete_message(key, idx)
            return answer, await ours.adelete_message(key, idx)
        with suppress(IndexError):
            answer = theirs.delete_last_message(key)
        return answer, await ours.adelete_last_message(key)
