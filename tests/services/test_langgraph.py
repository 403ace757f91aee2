"""LangGraph on real datastores: a round of everything, processes at the same time, and killed ones."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stm_backends import open_backend
from stm_backends.integrations.langgraph import StmSaver, StmStore
from tests.support.dying_graph import asked, graph_with, on
from tests.support.places import EACH, Place, quick_on
from tests.support.selection import few

ON_EACH = pytest.mark.parametrize("datastore", quick_on("redis", EACH))


async def contents(graph: Any, thread: str) -> list[str]:
    values = (await graph.aget_state(on(thread))).values
    return [one.content for one in values.get("messages", [])]


@pytest.mark.parametrize("datastore", quick_on("redis", EACH))
async def test_threads_and_items_are_kept_branched_pruned_copied_and_erased(
    datastore: str, place_on: Callable[[str], Place]
) -> None:
    url = place_on(datastore).url
    async with open_backend(url, create=True) as one, open_backend(url) as two:
        savers = StmSaver(one), StmSaver(two)
        for turn in range(12):
            await graph_with(savers[turn % 2]).ainvoke(asked(str(turn)), on("chat"))
        whole = [one for turn in range(12) for one in (f"q{turn}", f"a{turn}")]
        graph = graph_with(StmSaver(two))
        assert await contents(graph, "chat") == whole
        history = [state async for state in graph.aget_state_history(on("chat"))]
        older = next(state for state in history if len(state.values["messages"]) == 4 and not state.next)
        await graph.ainvoke(asked("branch"), older.config)
        assert await contents(graph, "chat") == [*whole[:4], "qbranch", "abranch"]
        values = (await graph.aget_state(on("chat"))).values
        assert values["steps"] == [*whole[:4], "qbranch", "abranch"]
        await savers[0].acopy_thread("chat", "copy")
        await savers[1].aprune(["chat"])
        for saver in (*savers, StmSaver(one)):
            assert (await graph_with(saver).aget_state(on("chat"))).values == values
            assert (await graph_with(saver).aget_state(on("copy"))).values == values
        assert len([state async for state in graph.aget_state_history(on("copy"))]) > len(history)
        store = StmStore(one, owner_of=lambda _: ("default", "anonymous"))
        await store.aput(("notes",), "n", {"text": "é"})
        assert [
            item.value
            for item in await StmStore(two, owner_of=lambda _: ("default", "anonymous")).asearch(())
        ]
        receipt = await two.sessions.erase_with_receipt("default", "anonymous")
        assert receipt.complete
        assert receipt.erased["logs"] == 2
        assert await contents(graph, "chat") == await contents(graph, "copy") == []
        assert await store.aget(("notes",), "n") is None


POD = """
import asyncio, random, sys
from contextlib import nullcontext
from stm_backends import EditConflict, open_backend
from stm_backends.integrations.langgraph import StmSaver
from tests.support.dying_graph import asked, graph_with, on

async def main(url, pod, waits):
    async with open_backend(url) as backend:
        saver, refused = StmSaver(backend), 0
        graph = graph_with(saver)
        print("ready", flush=True)
        sys.stdin.readline()
        for turn in range(8):
            while True:
                try:
                    async with saver.turn("chat") if waits == "True" else nullcontext():
                        await graph.ainvoke(asked(f"{pod}.{turn}.{refused}"), on("chat"))
                    print(f"{pod}.{turn}.{refused}", flush=True)
                    break
                except EditConflict:
                    refused += 1
                    await asyncio.sleep(random.uniform(0, 0.05))

asyncio.run(main(*sys.argv[1:]))
"""


@ON_EACH
@pytest.mark.parametrize("waits", few(1, [True, False]))
def test_no_turn_of_four_processes_at_once_is_lost(
    datastore: str, place_on: Callable[[str], Place], waits: bool
) -> None:
    url = place_on(datastore).url

    async def made() -> None:
        async with open_backend(url, create=True):
            pass

    asyncio.run(made())
    pods = [
        subprocess.Popen(
            [sys.executable, "-c", POD, url, str(pod), str(waits)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for pod in range(4)
    ]
    for pod in pods:
        assert pod.stdout is not None
        assert pod.stdout.readline() == "ready\n"
    for pod in pods:
        assert pod.stdin is not None
        pod.stdin.write("go\n")
        pod.stdin.flush()
    acknowledged = " ".join(pod.communicate(timeout=240)[0] for pod in pods).split()
    assert [pod.returncode for pod in pods] == [0] * 4
    assert len(acknowledged) == 4 * 8

    async def read() -> list[str]:
        async with open_backend(url) as backend:
            return await contents(graph_with(StmSaver(backend)), "chat")

    found = asyncio.run(read())
    assert len(found) == len({*found})
    turns = [one for turn in acknowledged for one in (f"q{turn}", f"a{turn}")]
    if waits:
        assert sorted(found) == sorted(turns)
    # What was refused has left questions at most.
    assert {*turns} <= {*found}
    assert {one for one in found if one.startswith("a")} == {one for one in turns if one.startswith("a")}


@pytest.mark.parametrize("datastore", few(1, ["sqlite", "redis"]))
@pytest.mark.parametrize("every", [13, pytest.param(1, marks=pytest.mark.full)])
async def test_a_graph_killed_anywhere_keeps_each_acknowledged_turn_once(
    place_on: Callable[[str], Place], datastore: str, every: int, tmp_path: Path
) -> None:
    url = place_on(datastore).url
    async with open_backend(url, create=True):
        pass
    program = [sys.executable, "-m", "tests.support.dying_graph", url, str(every), str(tmp_path)]
    ran = await asyncio.to_thread(subprocess.run, program, capture_output=True, text=True, timeout=500)
    assert ran.returncode == 0, ran.stderr
    operations = int(ran.stdout)
    assert operations > 20
    async with open_backend(url) as backend:
        for thread in ("whole", *(f"t{at}" for at in range(1, operations + 1, every))):
            graph = graph_with(StmSaver(backend))
            lines = (tmp_path / thread).read_text("utf-8").split() if (tmp_path / thread).exists() else []
            turns = [line for line in lines if line != "pruned"]
            expected = [one for turn in turns for one in (f"q{turn}", f"a{turn}")]
            values = (await graph.aget_state(on(thread))).values
            found = [one.content for one in values.get("messages", [])]
            assert found[: len(expected)] == expected, thread
            assert len(found) == len({*found}) <= len(expected) + 2, thread
            assert values.get("steps", [])[: len(expected)] == expected, thread
            # Another process goes on. LangGraph drops what was half done for a new question.
            await graph.ainvoke(asked("more"), on(thread))
            after = (await graph_with(StmSaver(backend)).aget_state(on(thread))).values
            said = [one.content for one in after["messages"]]
            assert said[: len(expected)] == expected, thread
            assert said[-2:] == ["qmore", "amore"], thread
            assert after["steps"][: len(expected)] == expected, thread
            assert after["steps"][-2:] == ["qmore", "amore"], thread
