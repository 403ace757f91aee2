"""Pydantic AI: its only store of conversations, which is in memory, and ours there."""

from __future__ import annotations

import asyncio
from collections import Counter
from functools import partial

from pydantic_ai import Conversation
from pydantic_ai.conversation_store import ConversationConflict, ConversationStore, InMemoryConversationStore
from pydantic_ai.messages import ModelMessage, ModelRequest, ModelResponse, TextPart, UserPromptPart

from benchmarks.peers.figures import Side
from benchmarks.peers.frameworks.trial import Plan, lost_in, report, time_both, turn_of
from benchmarks.peers.losses import count
from benchmarks.peers.measure import reporting
from benchmarks.peers.places import Place
from stm_backends import open_backend
from stm_backends.integrations.pydantic_ai import StmConversationStore

_RACERS = 4


async def measure(place: Place, plan: Plan) -> None:
    """Race for a conversation, and time saves, loads and listings."""
    async with open_backend(place.backend_url, create=True) as backend:
        stores = (InMemoryConversationStore(), StmConversationStore(backend, "acme", "u1"))
        with reporting("races"):
            what = f"turns lost or doubled, of those saved in {plan.races} races of {_RACERS}"
            report(what, "count", *[await _races(store, plan.races) for store in stores])
        for length in (plan.short, plan.long):
            with reporting(f"{length:,} messages"):
                grown = [(store, await _grown(store, str(length), length)) for store in stores]
                saves = (partial(_save, *each) for each in grown)
                await time_both(f"save a turn, after {length:,} messages", plan, *saves)
        with reporting("a load"):
            loads = (partial(store.load, str(plan.long)) for store in stores)
            await time_both(f"load the conversation of {plan.long:,} messages", plan, *loads)
        with reporting("a listing"):
            for store in stores:
                for number in range(plan.sessions):
                    await _grown(store, f"listed {number}", plan.events)
            lists = (partial(store.list_conversations, limit=plan.sessions) for store in stores)
            what = f"list {plan.sessions} conversations of {plan.events} messages"
            await time_both(what, plan, *lists)


async def _grown(store: ConversationStore, name: str, messages: int) -> Conversation:
    conversation = Conversation(conversation_id=name)
    for number in range(messages // 2):
        conversation.messages += _turn(*turn_of(number))
    await store.save(conversation)
    return conversation


async def _save(store: ConversationStore, conversation: Conversation) -> None:
    conversation.messages += _turn(*turn_of(0))
    await store.save(conversation)


async def _races(store: ConversationStore, races: int) -> Side:
    """Save what several have loaded at the same time, again and again."""
    await _grown(store, "raced", 2)
    saved, errors = list[str](), Counter[str]()

    async def save(conversation: Conversation, text: str) -> None:
        conversation.messages += _turn(text, "Done.")
        try:
            await store.save(conversation)
            saved.append(text)
        except ConversationConflict as error:
            errors[type(error).__name__] += 1

    for race in range(races):
        loaded = [await store.load("raced") for _ in range(_RACERS)]
        texts = (f"race {race}, {number}" for number in range(_RACERS))
        await asyncio.gather(*(save(one, text) for one, text in zip(loaded, texts, strict=True) if one))
    after = await store.load("raced")
    asked = [one.parts[-1] for one in (after.messages if after else [])]
    found = [str(part.content) for part in asked if isinstance(part, UserPromptPart)]
    return lost_in(count(saved, found, [errors]))


def _turn(user: str, assistant: str) -> list[ModelMessage]:
    return [ModelRequest(parts=[UserPromptPart(user)]), ModelResponse(parts=[TextPart(assistant)])]
