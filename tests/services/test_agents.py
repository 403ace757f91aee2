"""The Agent Framework and Strands on each datastore: sessions that go on elsewhere, and killed processes.

Processes of the OpenAI Agents SDK and of LangChain are killed, too.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable

import pytest
from agent_framework import Message, WorkflowCheckpoint
from strands.session import RepositorySessionManager
from strands.types.session import SessionMessage

from stm_backends import MemoryKey, open_backend, sync
from stm_backends.integrations.agent_framework import StmCheckpointStorage, StmHistoryProvider
from stm_backends.integrations.strands import StmSessionRepository, StmStorage
from tests.support.dying_agents import WORKS
from tests.support.places import EACH, Place
from tests.support.selection import few

PlaceOn = Callable[[str], Place]

USER = ("acme:co", "MARKER é")


@pytest.mark.parametrize("datastore", EACH)
async def test_what_the_agent_framework_keeps_is_shared_listed_and_erased(
    datastore: str, place_on: PlaceOn
) -> None:
    url = place_on(datastore).url
    async with open_backend(url, create=True) as one, open_backend(url) as other:
        histories = [
            StmHistoryProvider(backend, lambda session: MemoryKey(*USER, session)) for backend in (one, other)
        ]
        said = [Message("assistant" if n % 2 else "user", [f"{n} é \0"]) for n in range(20)]
        await asyncio.gather(*(history.save_messages("chat/1", said) for history in histories * 2))
        found = await histories[0].get_messages("chat/1")
        assert [message.text for message in found] == [message.text for message in said]
        storages = [StmCheckpointStorage(backend, *USER) for backend in (one, other)]
        for number in range(5):
            state = {"number": number, "bytes": b"\0\xff" * 50_000}
            await storages[number % 2].save(WorkflowCheckpoint("flow: é", "hash", f"c/{number}", state=state))
        assert await storages[0].list_checkpoint_ids(workflow_name="flow: é") == [f"c/{n}" for n in range(5)]
        latest = await storages[0].get_latest(workflow_name="flow: é")
        assert latest is not None
        assert latest.state["number"] == 4
        assert await storages[1].delete("c/4")
        assert not await storages[0].delete("c/4")
        receipt = await one.sessions.erase_with_receipt(USER[0])
        assert receipt.complete
        assert (receipt.erased["logs"], receipt.erased["states"]) == (1, 4)
        assert await histories[1].get_messages("chat/1") == []
        assert await storages[1].list_checkpoint_ids(workflow_name="flow: é") == []


@pytest.mark.parametrize("datastore", EACH)
def test_what_strands_keeps_is_shared_listed_and_erased(datastore: str, place_on: PlaceOn) -> None:
    url = place_on(datastore).url
    with sync.open_backend(url, create=True) as one, sync.open_backend(url) as other:
        storages = [StmStorage(pod.asynchronous, *USER, run=pod.run) for pod in (one, other)]
        sessions = [StmSessionRepository(pod.asynchronous, *USER, run=pod.run) for pod in (one, other)]

        async def work() -> None:
            for number in range(5):
                await storages[number % 2].write(f"a:%/{number}", b"\0\xff" * 100_000)
            await storages[0].write("b", b"")
            assert await storages[1].list("a:%/") == [f"a:%/{number}" for number in range(5)]
            assert await storages[1].read("a:%/3") == b"\0\xff" * 100_000
            await storages[1].delete("a:%/3")
            assert await storages[0].read("a:%/3") is None
            assert await storages[0].list() == ["a:%/0", "a:%/1", "a:%/2", "a:%/4", "b"]

        asyncio.run(work())
        RepositorySessionManager("chat: 1", sessions[0])
        messages = [
            SessionMessage.from_message({"role": "user", "content": [{"text": f"{number} é \0"}]}, number)
            for number in range(10)
        ]
        for number, message in enumerate(messages):
            sessions[number % 2].create_message("chat: 1", "default", message)
        messages[4].redact_message = {"role": "user", "content": [{"text": "[redacted]"}]}
        sessions[1].update_message("chat: 1", "default", messages[4])
        found = [message.to_message() for message in sessions[0].list_messages("chat: 1", "default")]
        assert found == [message.to_message() for message in messages]
        receipt = one.run(one.asynchronous.sessions.erase_with_receipt(USER[0]))
        assert receipt.complete
        assert (receipt.erased["logs"], receipt.erased["states"]) == (1, 6)
        assert sessions[1].read_session("chat: 1") is None
        assert asyncio.run(storages[1].list()) == []


@pytest.mark.parametrize("framework", few(1, WORKS))
@pytest.mark.parametrize("datastore", few(1, ["sqlite", "redis"]))
@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.full)])
async def test_processes_killed_anywhere_lose_and_double_nothing(
    place_on: PlaceOn, datastore: str, framework: str, every: int
) -> None:
    place = place_on(datastore)
    async with open_backend(place.url, create=True):
        pass
    program = [sys.executable, "-m", "tests.support.dying_agents", framework, place.url, str(every)]
    ran = await asyncio.to_thread(subprocess.run, program, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    assert int(ran.stdout) > 15
