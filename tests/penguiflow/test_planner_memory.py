"""PenguiFlow's planner with one memory object for all of its conversations, on many pods."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import subprocess
import sys
from contextlib import AsyncExitStack
from typing import Any

import penguiflow.planner.memory as pf
import pytest
from penguiflow.planner import ReactPlanner

from stm_backends import ConfigurationError, MemoryBudget, MemoryKey, ShortTermMemoryConfig
from tests.penguiflow import planning
from tests.penguiflow.planning import KEY, OTHER, ROLLING, Pod, pod, tools
from tests.support.places import on_each_datastore

TRUNCATION = ShortTermMemoryConfig(strategy="truncation")


async def queries(one: Pod, key: MemoryKey = KEY) -> list[str]:
    """Return what the user asked, as the datastore has it."""
    return [turn.user_message for turn in await one.backend.memory(key, TRUNCATION).turns()]


async def summarized(one: Pod, text: str) -> None:
    """Wait until a summary that says so is stored."""
    async with asyncio.timeout(10):
        while text not in (await one.backend.sessions.export(KEY))["body"]["summary"]:  # noqa: ASYNC110 -- another pod writes it
            await asyncio.sleep(0.01)


async def test_the_planner_is_shown_earlier_turns_with_what_their_tools_did(datastore: str) -> None:
    async with pod(datastore) as one:
        assert (await one.run("note: milk")).known == []
        prompt = await one.run("and?")
        assert prompt.query == "and?"
        (turn,) = prompt.memory["recent_turns"]
        assert (turn["user"], turn["assistant"]) == ("note: milk", "answer to note: milk")
        assert turn["trajectory_digest"]["tools_invoked"] == ["note"]
        assert "None" in turn["trajectory_digest"]["observations_summary"]


async def test_a_conversation_wanders_over_pods_and_each_is_shown_all_of_it(datastore: str) -> None:
    async with AsyncExitStack() as stack:
        pods = [await stack.enter_async_context(pod(datastore, config=TRUNCATION)) for _ in range(3)]
        asked: list[str] = []
        for number in range(5):
            prompt = await pods[number % 3].run(f"q{number}")
            assert prompt.known == asked
            asked.append(f"q{number}")


async def test_concurrent_conversations_through_one_planner_never_meet(datastore: str) -> None:
    keys = [MemoryKey(f"t{n % 3}", f"u{n % 2}", f"s{n // 6}") for n in range(12)]

    async def talk(one: Pod, key: MemoryKey) -> None:
        for number in range(4):
            await one.run(f"{key.composite()} {number}", key)

    async with pod(datastore, config=TRUNCATION) as one:
        await asyncio.gather(*(talk(one, key) for key in keys))
        assert len(one.model.prompts) == 48
        for prompt in one.model.prompts:
            whose, number = prompt.query.split(" ")
            assert prompt.known == [f"{whose} {earlier}" for earlier in range(int(number))]
        for key in keys:
            assert await queries(one, key) == [f"{key.composite()} {number}" for number in range(4)]


@on_each_datastore
async def test_concurrent_runs_of_one_conversation_on_two_pods_lose_no_turn(datastore: str) -> None:
    async def talk(one: Pod, name: str) -> None:
        for number in range(5):
            await one.run(f"{name}{number}")

    config = ShortTermMemoryConfig(strategy="truncation", budget=MemoryBudget(full_zone_turns=10))
    async with pod(datastore, config=config) as one, pod(datastore, config=config) as two:
        await asyncio.gather(talk(one, "a"), talk(two, "b"))
        stored = await queries(one)
    assert sorted(stored) == sorted(f"{name}{number}" for name in "ab" for number in range(5))
    assert [item for item in stored if item[0] == "a"] == [f"a{number}" for number in range(5)]


@on_each_datastore
async def test_a_background_summary_of_one_pod_is_in_the_prompt_of_another(
    datastore: str,
) -> None:
    async with pod(datastore) as one, pod(datastore) as two:
        for number in range(3):
            await one.run(f"q{number}")
        await summarized(two, "q0")
        prompt = await two.run("q3")
        assert prompt.memory["summary"] == "q0"
        assert prompt.known == ["q1", "q2"]
        await summarized(one, "q1")
        assert (await one.run("q4")).memory["summary"] == "q0 q1"


def run_and_die(url: str, *arguments: str) -> dict[str, Any]:
    """Run one pod as an operating system process that is killed when it has answered."""
    done = subprocess.run(
        [sys.executable, "-W", "error", planning.__file__, url, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    return json.loads(done.stdout)


@on_each_datastore
def test_the_planner_keeps_its_memory_across_processes_that_are_killed(datastore: str) -> None:
    assert run_and_die(datastore, "run", "q0")["known"] == []
    assert run_and_die(datastore, "run", "q1")["known"] == ["q0"]
    assert run_and_die(datastore, "run", "q2")["known"] == ["q0", "q1"]


@on_each_datastore
def test_a_run_paused_in_a_process_that_is_killed_is_resumed_in_another(datastore: str) -> None:
    run_and_die(datastore, "run", "q0")
    paused = run_and_die(datastore, "run", "ask: may I?")
    assert paused["token"]
    resumed = run_and_die(datastore, "resume", paused["token"])
    assert resumed["known"] == ["q0"]
    assert resumed["since"][-1] == "Resume input: yes"
    assert run_and_die(datastore, "run", "q1")["known"] == ["q0", "ask: may I?"]


async def test_other_conversations_run_while_one_is_paused(datastore: str) -> None:
    async with pod(datastore) as one:
        await one.run("q0")
        token = await one.pause("ask: may I?")
        assert await queries(one) == ["q0"]
        assert (await one.run("theirs", OTHER)).known == []
        await one.planner.resume(token, "yes", memory_key=KEY)
        assert (await one.run("more", OTHER)).known == ["theirs"]
        assert await queries(one) == ["q0", "ask: may I?"]
        assert await queries(one, OTHER) == ["theirs", "more"]


async def test_a_conversation_inside_a_tool_of_another_keeps_its_own_turns(
    datastore: str,
) -> None:
    async with pod(datastore) as one:
        for number in range(2):
            await one.run(f"delegate: theirs {number}")
        assert await queries(one) == ["delegate: theirs 0", "delegate: theirs 1"]
        assert await queries(one, OTHER) == ["theirs 0", "theirs 1"]
        shown = {prompt.query: prompt.known for prompt in one.model.prompts}
        assert shown["theirs 1"] == ["theirs 0"]
        assert shown["delegate: theirs 1"] == ["delegate: theirs 0"]


@on_each_datastore
async def test_a_run_that_fails_stores_nothing_and_leaves_nothing_bound(datastore: str) -> None:
    def broken(_: object) -> dict[str, Any]:
        raise RuntimeError("the model is gone")

    async with pod(datastore) as one:
        script, one.model.script = one.model.script, broken
        with pytest.raises(RuntimeError, match="gone"):
            await one.run("q0")
        one.model.script = script
        await one.run("theirs", OTHER)
        assert await queries(one) == []
        assert await queries(one, OTHER) == ["theirs"]


async def test_without_a_key_nothing_is_shown_and_nothing_stored(datastore: str) -> None:
    async with pod(datastore) as one:
        await one.planner.run("secret")
        assert one.model.prompts[-1].memory is None
        assert [user async for user in one.backend.sessions.users("default")] == []


async def test_the_key_is_found_in_the_tool_context(datastore: str) -> None:
    async with pod(datastore) as one:
        for query in ("q0", "q1"):
            await one.planner.run(query, tool_context={"session_id": "s"})
        assert one.model.prompts[-1].known == ["q0"]
        assert await queries(one, MemoryKey("default", "anonymous", "s")) == ["q0", "q1"]


async def test_a_configuration_of_penguiflows_own_works_in_the_router(datastore: str) -> None:
    config = pf.ShortTermMemoryConfig(strategy="truncation", budget=pf.MemoryBudget(full_zone_turns=1))
    async with pod(datastore, config=config) as one:
        for number in range(3):
            await one.run(f"q{number}")
        assert one.model.prompts[-1].known == ["q1"]


async def test_a_colon_works_in_our_keys_and_fails_closed_in_theirs(
    datastore: str, caplog: pytest.LogCaptureFixture
) -> None:
    parts = ("acme", "mail:u", "50%")
    async with pod(datastore) as one:
        for query in ("q0", "q1"):
            await one.run(query, MemoryKey(*parts))
        assert one.model.prompts[-1].known == ["q0"]
        assert not caplog.records
        assert (await one.run("q2", pf.MemoryKey(*parts))).memory is None
        assert "memory_hydrate_failed" in caplog.text
        assert await queries(one, MemoryKey(*parts)) == ["q0", "q1"]


@pytest.mark.parametrize("with_store", [True, False])
async def test_a_configuration_of_ours_in_place_of_a_memory_says_what_to_write(
    datastore: str, with_store: bool
) -> None:
    async with pod(datastore, memory=ROLLING) as one:
        if not with_store:
            one.planner = ReactPlanner(llm_client=one.model, catalog=tools(), short_term_memory=ROLLING)
        with pytest.raises(ConfigurationError, match=r"write short_term_memory=backend\.router\(config, "):
            await one.run("q0")
        assert one.model.prompts == []


async def test_resuming_with_a_configuration_of_ours_says_what_to_write(datastore: str) -> None:
    async with pod(datastore) as one, pod(datastore, memory=ROLLING) as two:
        token = await one.pause("ask: may I?")
        with pytest.raises(ConfigurationError, match="in the place of a memory"):
            await two.planner.resume(token, "yes", memory_key=KEY)


@on_each_datastore
async def test_without_its_datastore_the_planner_answers_and_reports_it(
    datastore: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with pod(datastore) as one:
        await one.run("q0")
        await one.backend.driver.close()
        caplog.set_level(logging.WARNING)
        assert (await one.run("q1")).memory is None
        for said in ("memory_get_llm_context_failed", "memory_add_turn_failed"):
            assert said in caplog.text
        await one.backend.driver.open()
        assert (await one.run("q2")).known == ["q0"]
