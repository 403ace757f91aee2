"""Processes that speak in messages, are killed, lose answers and have no model.

Each message is then there once, in order and with the others of its call, and no number ever has another
message. Of an answer with checkpoints, the last part is there, and the others are not, unless something was
said in between. No reader is shown a call of a tool without its result, nor a result without its call. Each
answer is counted once. The summary covers exactly the first messages: it is a chain of hashes over them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from stm_backends.drivers.contract import Driver
from stm_backends.errors import StorageError
from stm_backends.memory.shared.conversation import Conversation, HistoryMessage
from stm_backends.messages import Message
from stm_backends.messages.turns import NO_RESULT
from stm_backends.types import MemoryHealth, MemoryKey, ShortTermMemoryConfig
from tests.support.transcript_sim import Faults, Pod, Said, World

RULES: Message = {"role": "system", "content": "rules"}


class MessageSim(Faults[Conversation, HistoryMessage]):
    """One run. With one writer to a conversation, its turns are one after the other."""

    def __init__(self, world: World, make: Callable[[], Driver] | None = None) -> None:
        super().__init__(world, make)
        self._answered = set[str]()
        self._cut_off = dict[str, set[str]]()
        self._answers: dict[MemoryKey, int] = {}
        self._numbers: dict[Conversation, dict[int, str]] = {}

    def open_on(self, pod: Pod, key: MemoryKey, config: ShortTermMemoryConfig) -> Conversation:
        return self._open(pod.driver, key, config, backgrounds=pod.backgrounds)

    def _open(self, driver: Driver, key: MemoryKey, config: Any = None, **options: Any) -> Conversation:
        return Conversation(driver, key, config, summarizer=self.summarize, **options)

    def words_of(self, turn: Any) -> list[str]:
        # The results of tools have been told by then, but for those of another writer's turn.
        if self.world.writers == 1 and NO_RESULT in str(turn.get("trajectory_digest")):
            self.problems.append("a summarizer was told of a call without its result")
        return [_word(text) for text in f"{turn['user']}\n{turn['assistant']}".split("\n") if text]

    # What is said

    async def writer(self, key: MemoryKey, name: str, turns: int, said: Said) -> None:
        for number in range(turns):
            await self._turn(key, f"{name}-{number}", said)
            if self.chance.random() < 0.6:
                await asyncio.sleep(self.chance.random() * 0.02)

    async def _turn(self, key: MemoryKey, turn: str, said: Said) -> None:
        chance = self.chance
        question: list[Message] = [{"role": "user", "content": self._text(f"{turn}q")}]
        if not said and self.world.writers == 1:
            question.insert(0, RULES)
        elif chance.random() < 0.1:
            question.append({"role": "system", "content": f"{turn}s"})
        await self._say(key, said, f"{turn}q", question)
        # A record that is full of one turn has no room for the rest of it.
        steps = 20 if chance.random() < 0.05 and not self.world.full else chance.choice([0, 0, 1, 2])
        for step in range(steps):
            ids = [f"{turn}t{step}.{place}" for place in range(chance.choice([1, 1, 2]))]
            call, results = _call(ids), [self._result(one) for one in ids]
            if chance.random() < 0.5:
                await self._say(key, said, f"{turn}t{step}", [call, *results])
            else:
                await self._say(key, said, f"{turn}t{step}", [call])
                for result in results:
                    await self._say(key, said, f"{turn}r{result['tool_call_id']}", [result])
            self._answered.update(ids)
        answer, last = f"{turn}a", ""
        for part in range(chance.choice([0, 0, 1, 3])):
            last = self._text(f"{turn}c{part}")
            await self._say(key, None, answer, [_answer(last)], cut=True, usage={"parts": 1})
        if last and chance.random() < 0.3:
            self._cut_off.setdefault(turn.partition("w")[0], set()).add(last)
            return
        await self._say(
            key, said, answer, [_answer(self._text(answer))], usage={"answers": 1, "of": {"cost": 0.1}}
        )
        self._answers[key] = self._answers.get(key, 0) + 1

    async def _say(
        self, key: MemoryKey, said: Said | None, entry_id: str, messages: Sequence[Message], **options: Any
    ) -> None:
        """Add messages until that is acknowledged."""
        now = asyncio.get_running_loop().time
        start = now()
        while True:
            try:
                pod = await self.any_pod()
                await self.memory(pod, key).add(*messages, id=entry_id, **options)
                break
            except StorageError:
                self.counts["turns added again"] += 1
        if said is not None:
            said |= {f"{entry_id}.{place}": (start, now()) for place in range(len(messages))}

    def _text(self, word: str) -> str:
        return f"{word}#{'x' * 3_000 if self.world.full and self.chance.random() < 0.15 else ''}"

    def _result(self, call: str) -> Message:
        return {"role": "tool", "tool_call_id": call, "content": self._text(f"result {call}")}

    # What is read

    async def reader(self, key: MemoryKey, said: Said, stop: asyncio.Event) -> None:
        whole = self._open(self.plain, key)
        while not stop.is_set():
            await self._window(key)
            before, limit = set(said), self.chance.choice([7, 50, 200])
            found = await self.read(whole, limit)
            if missed := before.difference(one.id for one in found):
                self.problems.append(f"a reader missed {len(missed)} of {len(before)} messages")
            await asyncio.sleep(0.05 + len(found) / 200)

    async def page(
        self, memory: Conversation, **place: int
    ) -> tuple[Sequence[HistoryMessage], Sequence[int]]:
        page = await memory.history(**place)
        numbers = self._numbers.setdefault(memory, {})
        for one in page.messages:
            # Another part of its answer may take the place of a part at the end.
            settled = one.number < page.newest or not one.cut
            if settled and numbers.setdefault(one.number, one.id) != one.id:
                self.problems.append(f"number {one.number} was {numbers[one.number]}, and is {one.id}")
        return page.messages, page.missing

    async def _window(self, key: MemoryKey) -> None:
        """Look at what a model is shown."""
        answered, most = {*self._answered}, self.chance.choice([None, None, 2_000])
        try:
            shown = await self.memory(await self.any_pod(), key).messages(max_tokens=most)
        except StorageError:
            return
        self.counts["windows"] += 1
        waiting = dict[str, None]()
        for message in shown:
            if message["role"] == "tool":
                call = str(message["tool_call_id"])
                if call not in waiting:
                    self.problems.append(f"a result without its call: {call}")
                elif call in answered and not str(message["content"]).startswith(f"result {call}"):
                    self.problems.append(f"a call without its result: {call}")
                waiting.pop(call, None)
                continue
            if waiting:
                self.problems.append(f"calls without results: {[*waiting]}")
            waiting = {call["id"]: None for call in message.get("tool_calls", ())}
        if waiting:
            self.problems.append(f"calls without results at the end: {[*waiting]}")
        if shown and self.world.writers == 1 and shown[0] != RULES:
            self.problems.append("a model was not shown its instructions")

    # What is there in the end

    async def settle(self, memory: Conversation) -> None:
        for number in range(40):
            await memory.flush(timeout=3)
            if memory.health is MemoryHealth.HEALTHY and not memory.waiting:
                return
            await memory.add({"role": "user", "content": f"nudge{number}#"}, id=f"nudge{number}")
            await asyncio.sleep(0.3)

    async def check(self, key: MemoryKey, memory: Conversation, said: Said) -> None:
        found, record = await self.at_rest(key, memory.each_message)
        self.require_once(said, [one.id for one in found])
        for one, following in pairwise(found):
            same = _entry(one) == _entry(following)
            if one.cut and not same and _entry(following).partition("~")[0] == _entry(one).partition("~")[0]:
                self.problems.append(f"{one.id} is there beside {following.id}")
            if not same and _place(following):
                self.problems.append(f"{following.id} is not with the others of its call")
        texts = [one.message["content"] for one in found]
        if len({*texts}) != len(texts):
            self.problems.append("a text is there twice")
        if lost := self._cut_off.get(key.session_id[1:], set[str]()).difference(map(str, texts)):
            self.problems.append(f"{len(lost)} answers that were cut off are gone")
        self.counts["messages"] += len(found)
        await self._check_usage(key, memory, found)
        if not self.world.truncates:
            words = [_word(text) for one in found if one.summarized and (text := _spoken(one.message))]
            self.require_summary(record, words)

    async def _check_usage(
        self, key: MemoryKey, memory: Conversation, found: Sequence[HistoryMessage]
    ) -> None:
        count, parts = self._answers.get(key, 0), sum(one.cut for one in found)
        total = (await memory.usage()).total
        expected = {"answers": count, "of.cost": round(count * 0.1, 6), **({"parts": parts} if parts else {})}
        if total != expected:
            self.problems.append(f"the answers took {expected}, and {total} is the sum")
        self.counts["checkpoints that stayed"] += parts


def _word(text: str) -> str:
    return text.partition("#")[0]


def _spoken(message: Message) -> str:
    """Return what a summarizer is told of a message as the user's or the assistant's text."""
    return str(message["content"] or "") if message["role"] in ("user", "assistant") else ""


def _call(ids: Sequence[str]) -> Message:
    calls = [{"id": one, "type": "function", "function": {"name": "look", "arguments": "{}"}} for one in ids]
    return {"role": "assistant", "content": f"{ids[0]}#", "tool_calls": calls}


def _answer(text: str) -> Message:
    return {"role": "assistant", "content": text}


def _entry(one: HistoryMessage) -> str:
    return one.id.rpartition(".")[0]


def _place(one: HistoryMessage) -> int:
    return int(one.id.rpartition(".")[2])
