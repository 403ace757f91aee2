"""PenguiFlow's planner with a model that is scripted, and pods of it; as a program, one pod's one run.

`python planning.py URL run QUERY` and `python planning.py URL resume TOKEN` print what the model was shown
and what came of it, and then die without closing anything.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from penguiflow import ModelRegistry, Node
from penguiflow.catalog import NodeSpec, build_catalog, tool
from penguiflow.planner import PlannerPause, ReactPlanner, ToolContext
from pydantic import BaseModel

from stm_backends import Backend, MemoryBudget, MemoryKey, ShortTermMemoryConfig, open_backend

KEY = MemoryKey("acme", "u", "chat")
OTHER = MemoryKey("acme", "v", "other chat")
ROLLING = ShortTermMemoryConfig(
    strategy="rolling_summary", budget=MemoryBudget(full_zone_turns=2), fold_batch_turns=1
)


def tool_context(key: MemoryKey) -> dict[str, Any]:
    """Return what tools need to know, and `ctx.kv` above all."""
    ids = {"tenant_id": key.tenant_id, "user_id": key.user_id, "session_id": key.session_id}
    return {**ids, "task_id": "task", "trace_id": "trace"}


class Text(BaseModel):
    text: str


@tool(desc="Write something down and say what was there before", side_effects="write")
async def note(args: Text, ctx: ToolContext) -> Text:
    before = await ctx.kv.get("note", namespace="notes")
    await ctx.kv.set("note", args.text, namespace="notes")
    return Text(text=str(before))


@tool(desc="Ask a person", side_effects="external")
async def ask(args: Text, ctx: ToolContext) -> Text:
    await ctx.pause("approval_required", {"question": args.text})
    raise AssertionError("a pause ends the run")


@tool(desc="Have the same planner run another user's conversation", side_effects="external")
async def delegate(args: Text, ctx: ToolContext) -> Text:
    await ctx.tool_context["pod"].run(args.text, OTHER)
    return Text(text="done")


def tools() -> Sequence[NodeSpec]:
    registry, functions = ModelRegistry(), {"note": note, "ask": ask, "delegate": delegate}
    for name in functions:
        registry.register(name, Text, Text)
    return build_catalog([Node(function, name=name) for name, function in functions.items()], registry)


# The model


class Prompt(NamedTuple):
    """What the model was shown: the live request, the memory message's JSON, and what came since."""

    query: str
    memory: Any
    since: list[str]

    @classmethod
    def of(cls, messages: Sequence[Mapping[str, Any]]) -> Prompt:
        texts = [str(message["content"]) for message in messages]
        (at,) = [index for index, text in enumerate(texts) if text.startswith('{"query"')]
        memories = [text for text in texts[:at] if "<read_only_conversation_memory_json>" in text]
        return cls(json.loads(texts[at])["query"], _json_of(memories), texts[at + 1 :])

    @property
    def known(self) -> list[str]:
        """The queries that the memory shows, oldest first."""
        memory = self.memory or {}
        turns = [*memory.get("pending_turns", ()), *memory.get("recent_turns", ())]
        return [turn["user"] for turn in turns]


def _json_of(memories: list[str]) -> Any:
    if not memories:
        return None
    (message,) = memories
    text = message.split("<read_only_conversation_memory_json>")[1]
    return json.loads(text.split("</read_only_conversation_memory_json>")[0])


def final(answer: str) -> dict[str, Any]:
    return {"next_node": "final_response", "args": {"answer": answer}}


def use(name: str, text: str) -> dict[str, Any]:
    return {"next_node": name, "args": {"text": text}}


def obey(prompt: Prompt) -> dict[str, Any]:
    """Use the tool that a query like `note: milk` begins with; then, and otherwise, answer."""
    name, _, text = prompt.query.partition(": ")
    return use(name, text) if text and not prompt.since else final(f"answer to {prompt.query}")


class Model:
    """A model that follows a script; `prompts` is what it was shown."""

    def __init__(self, script: Callable[[Prompt], dict[str, Any]] = obey) -> None:
        self.script = script
        self.prompts: list[Prompt] = []

    async def complete(self, *, messages: Sequence[Mapping[str, Any]], **_: Any) -> str:
        # Others get their turn here, as they would with a model far away.
        await asyncio.sleep(0.001)
        prompt = Prompt.of(messages)
        self.prompts.append(prompt)
        return json.dumps(self.script(prompt))


# Pods


@dataclass
class Pod:
    """One process's worth of planner: a backend, a planner and the model that it asks."""

    backend: Backend
    planner: ReactPlanner
    model: Model

    async def run(self, query: str, key: Any = KEY) -> Prompt:
        """Run a query to its end and return what the model was shown at first."""
        seen = len(self.model.prompts)
        await self.planner.run(query, memory_key=key, tool_context={**tool_context(key), "pod": self})
        return self.model.prompts[seen]

    async def pause(self, query: str, key: MemoryKey = KEY) -> str:
        """Run a query that pauses, and return the token that resumes it."""
        result = await self.planner.run(query, memory_key=key, tool_context=tool_context(key))
        assert isinstance(result, PlannerPause)
        assert result.resume_token
        return result.resume_token


async def summarize(request: Mapping[str, Any]) -> Mapping[str, Any]:
    """Summarize by listing what the user said."""
    said = [request["previous_summary"], *(turn["user"] for turn in request["turns"])]
    return {"summary": " ".join(filter(None, said))}


@asynccontextmanager
async def pod(
    url: str, *, memory: Any = None, config: Any = ROLLING, adopt_from: Any = None
) -> AsyncIterator[Pod]:
    """A pod whose planner has one memory object for all conversations, unless it is given another.

    `adopt_from` is a store, or the name of the backend's own that has one.
    """
    async with open_backend(url, create=True) as backend:
        model, old = Model(), getattr(backend, adopt_from) if isinstance(adopt_from, str) else adopt_from
        planner = ReactPlanner(
            llm_client=model,
            catalog=tools(),
            short_term_memory=memory or backend.router(config, summarizer=summarize, adopt_from=old),
            state_store=backend.state_store,
        )
        yield Pod(backend, planner, model)


async def main(url: str, command: str, argument: str) -> None:
    async with pod(url) as one:
        if command == "run":
            result = await one.planner.run(argument, memory_key=KEY, tool_context=tool_context(KEY))
        else:
            result = await one.planner.resume(argument, "yes", memory_key=KEY)
        shown = {"known": one.model.prompts[0].known, "since": one.model.prompts[0].since}
        print(json.dumps(shown | {"token": getattr(result, "resume_token", None)}), flush=True)  # noqa: T201 -- read by the test
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
