"""Agents of a framework in processes of their own, each killed at its n-th operation on the datastore.

    python -m tests.support.dying_agents FRAMEWORK URL EVERY

FRAMEWORK is the name of an integration, see `WORKS`. Runs a few exchanges once for the user `whole`, and then
for the users `u1`, `u1 + EVERY`, ... in processes that are killed before that operation. Then another process
begins anew, and says what it misses of what was acknowledged, or what is there twice. Prints how many
operations the whole takes.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import signal
import sys
import traceback
from collections.abc import AsyncIterator, Callable
from typing import Any

from stm_backends import MemoryKey, sync
from stm_backends.backend import Backend
from stm_backends.drivers import plugins
from stm_backends.history import log as item_log
from stm_backends.records import pages
from tests.support.dying_session import DyingDriver

TENANT = "acme"
TURNS = 3
"""How many exchanges are whole at the end."""

Acknowledged = Callable[[], None]


def with_agent_framework(backend: sync.Backend, user: str, survived: int, done: Acknowledged) -> None:
    """Save exchanges, all of them each time, and checkpoints."""
    from agent_framework import Message, WorkflowCheckpoint  # noqa: PLC0415 -- the other framework is slow, too

    from stm_backends.integrations.agent_framework import (  # noqa: PLC0415 -- as above
        StmCheckpointStorage,
        StmHistoryProvider,
    )

    history = StmHistoryProvider(backend.asynchronous, lambda session: MemoryKey(TENANT, user, session))
    storage = StmCheckpointStorage(backend.asynchronous, TENANT, user)

    async def work() -> None:
        found = [message.text for message in await history.get_messages("chat")]
        ids = await storage.list_checkpoint_ids(workflow_name="flow")
        assert found == [f"{turn}{end}" for turn in range(TURNS) for end in "?!"][: len(found)], found
        assert len(found) >= 2 * survived, found
        assert ids[:survived] == [f"c{turn}" for turn in range(survived)], ids
        said: list[Message] = []
        for turn in range(TURNS):
            said += [Message("user", [f"{turn}?"]), Message("assistant", [f"{turn}!"])]
            await history.save_messages("chat", said)
            saved = WorkflowCheckpoint(
                "flow",
                "hash",
                checkpoint_id=f"c{turn}",
                timestamp=f"2030-01-01T00:00:0{turn}+00:00",
                state={"turn": turn},
            )
            await storage.save(saved)
            done()
        found = [message.text for message in await history.get_messages("chat")]
        assert found == [message.text for message in said], found
        kept = await storage.list_checkpoints(workflow_name="flow")
        assert [one.state["turn"] for one in kept] == [*range(TURNS)], kept

    backend.run(work())


def with_strands(backend: sync.Backend, user: str, survived: int, done: Acknowledged) -> None:
    """Let an agent speak that keeps its session, and store a value for each turn."""
    from strands import Agent  # noqa: PLC0415 -- as above
    from strands.models import Model  # noqa: PLC0415
    from strands.session import RepositorySessionManager  # noqa: PLC0415

    from stm_backends.integrations.strands import StmSessionRepository, StmStorage  # noqa: PLC0415

    class Answers(Model):
        def update_config(self, **model_config: Any) -> None: ...

        def get_config(self) -> Any:
            return {}

        def structured_output(self, *args: Any, **kwargs: Any) -> Any:
            raise NotImplementedError

        async def stream(self, messages: Any, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
            yield {"messageStart": {"role": "assistant"}}
            answer = messages[-1]["content"][0]["text"].replace("?", "!")
            yield {"contentBlockDelta": {"delta": {"text": answer}}}
            yield {"contentBlockStop": {}}
            yield {"messageStop": {"stopReason": "end_turn"}}

    def said(agent: Agent) -> list[str]:
        return [content["text"] for message in agent.messages for content in message["content"]]

    sessions = StmSessionRepository(backend.asynchronous, TENANT, user, run=backend.run)
    storage = StmStorage(backend.asynchronous, TENANT, user, run=backend.run)
    manager = RepositorySessionManager("chat", sessions)
    agent = Agent(model=Answers(), session_manager=manager, callback_handler=None)
    answered = [text for text in said(agent) if text.endswith("!")]
    assert answered == [f"{turn}!" for turn in range(len(answered))], answered
    assert len(answered) >= survived, answered
    for turn in range(len(answered), TURNS):
        agent(f"{turn}?")
        asyncio.run(storage.write(f"turn/{turn}", b"%d" % turn))
        done()
    again = Agent(
        model=Answers(), session_manager=RepositorySessionManager("chat", sessions), callback_handler=None
    )
    assert said(again) == said(agent)
    assert [text for text in said(again) if text.endswith("!")] == [f"{turn}!" for turn in range(TURNS)]
    # A question whose process died before the answer is asked again.
    asked = [text for text in said(again) if text.endswith("?")]
    assert list(dict.fromkeys(asked)) == [f"{turn}?" for turn in range(TURNS)], asked
    for turn in range(survived):
        assert asyncio.run(storage.read(f"turn/{turn}")) == b"%d" % turn


def shorten_logs() -> None:
    """Let logs of a few entries move to pages, in this process."""
    vars(item_log).update(LONG=4, KEPT=2)
    vars(pages).update(TURNS=4)


def left_of(found: list[str], survived: int) -> range:
    """Return the turns that are still to come after those that were found, each of them once and whole."""
    assert found == [f"{turn}{end}" for turn in range(TURNS) for end in "?!"][: len(found)], found
    assert len(found) % 2 == 0, found
    assert len(found) >= 2 * survived, found
    return range(len(found) // 2, TURNS)


def with_openai_agents(backend: sync.Backend, user: str, survived: int, done: Acknowledged) -> None:
    """Add turns to a session, and after one a draft that is taken back; fill another, and clear it."""
    from stm_backends.integrations.openai_agents import StmSession  # noqa: PLC0415 -- as above

    shorten_logs()
    session, other = (
        StmSession(backend.asynchronous, MemoryKey(TENANT, user, name)) for name in ("chat", "other")
    )

    def says(text: str) -> Any:
        return {"role": "user" if text.endswith("?") else "assistant", "content": text}

    async def said(one: StmSession) -> list[str]:
        return [str(item["content"]) for item in await one.get_items()]  # type: ignore[typeddict-item]

    async def work() -> None:
        found = await said(session)
        if found[-1:] == ["draft"]:
            assert await session.pop_item() == says(found.pop())
        for turn in left_of(found, survived):
            await session.add_items([says(f"{turn}?"), says(f"{turn}!")])
            if turn == 1:
                await session.add_items([says("draft")])
                assert await session.pop_item() == says("draft")
            await other.add_items([says(f"{turn}?")])
            done()
        assert not left_of(await said(session), TURNS)
        kept = await said(other)
        assert kept == sorted({*kept}), kept
        await other.clear_session()
        assert await said(other) == []

    backend.run(work())


def with_langchain(backend: sync.Backend, user: str, survived: int, done: Acknowledged) -> None:
    """Add turns to a history."""
    from langchain_core.messages import AIMessage, HumanMessage  # noqa: PLC0415 -- as above

    from stm_backends.integrations.langchain import StmChatMessageHistory  # noqa: PLC0415 -- as above

    shorten_logs()
    history = StmChatMessageHistory(backend.asynchronous, MemoryKey(TENANT, user, "chat"))

    async def said() -> list[str]:
        return [str(message.content) for message in await history.aget_messages()]

    async def work() -> None:
        for turn in left_of(await said(), survived):
            await history.aadd_messages([HumanMessage(f"{turn}?"), AIMessage(f"{turn}!")])
            done()
        assert not left_of(await said(), TURNS)

    backend.run(work())


WORKS: dict[str, Callable[[sync.Backend, str, int, Acknowledged], None]] = {
    "agent_framework": with_agent_framework,
    "langchain": with_langchain,
    "openai_agents": with_openai_agents,
    "strands": with_strands,
}


def forked(framework: str, url: str, user: str, at: int, survived: int) -> tuple[int, int, int]:
    """Work in a process that dies at an operation, or never for 0.

    Returns how it ended, how many turns it was told of, and how many operations it has done.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        status = 1
        try:
            driver = DyingDriver(plugins.open_driver(url), at)
            with sync.Backend(Backend(driver)) as backend:
                WORKS[framework](backend, user, survived, lambda: os.write(writing, b".") and None)
            os.write(writing, b"%d" % driver.done)
            status = 0
        except Exception:  # noqa: BLE001 -- it is said here, because the child ends below
            traceback.print_exc()
        finally:
            os._exit(status)
    os.close(writing)
    with os.fdopen(reading, "rb") as answer:
        text = answer.read()
    return os.waitpid(child, 0)[1], text.count(b"."), int(text.strip(b".") or b"0")


def main(framework: str, url: str, every: int) -> None:
    # Else each process would.
    importlib.import_module(f"stm_backends.integrations.{framework}")
    status, _, operations = forked(framework, url, "whole", 0, 0)
    assert status == 0, status
    for at in range(1, operations + 1, every):
        status, acknowledged, _ = forked(framework, url, f"u{at}", at, 0)
        # Concurrent steps may take fewer operations than in the first run.
        assert status == 0 or os.WTERMSIG(status) == signal.SIGKILL, (at, status)
        status, _, _ = forked(framework, url, f"u{at}", 0, acknowledged)
        assert status == 0, (at, status)
    sys.stdout.write(f"{operations}\n")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
