"""A graph of LangGraph whose process is killed at its n-th operation on the datastore.

    python -m tests.support.dying_graph URL EVERY FOLDER

Runs some turns of the thread `whole` and prunes it, and then does so with the threads `t1`, `t1 + EVERY`, ...
in processes that are killed before that operation. What was acknowledged of each thread is in a file of its
name in the folder, a line for each turn. Prints how many operations the whole takes.
"""

from __future__ import annotations

import asyncio
import operator
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypedDict

from langchain_core.messages import AIMessage, AnyMessage, HumanMessage
from langgraph.channels import DeltaChannel
from langgraph.graph import START, StateGraph, add_messages

from stm_backends.backend import Backend
from stm_backends.drivers import plugins
from stm_backends.integrations.langgraph import StmSaver
from stm_backends.integrations.langgraph.threads import View
from tests.support.dying_session import DyingDriver, forked

TURNS = 3


def extended(state: list[str], writes: list[list[str]]) -> list[str]:
    return [*state, *(one for write in writes for one in write)]


class State(TypedDict, total=False):
    messages: Annotated[list[AnyMessage], add_messages]
    steps: Annotated[list[str], DeltaChannel(extended, snapshot_frequency=4)]
    count: Annotated[int, operator.add]


def answer(state: State) -> State:
    asked = state["messages"][-1]
    return {"messages": [AIMessage(f"a{asked.id}", id=f"a{asked.id}")], "steps": [f"a{asked.id}"], "count": 1}


def graph_with(saver: StmSaver) -> Any:
    builder: Any = StateGraph(State)
    builder.add_node("answer", answer)
    builder.add_edge(START, "answer")
    return builder.compile(checkpointer=saver)


def on(thread: str) -> Any:
    return {"configurable": {"thread_id": thread}}


def asked(turn: str) -> State:
    return {"messages": [HumanMessage(f"q{turn}", id=turn)], "steps": [f"q{turn}"]}


async def run(url: str, thread: str, at: int, acknowledged: Path) -> int:
    """Run the turns on a backend that kills this process; returns the operations if it does not."""
    driver = DyingDriver(plugins.open_driver(url), at)
    async with Backend(driver) as backend:
        saver = StmSaver(backend)
        with acknowledged.open("a", encoding="utf-8") as lines:
            for turn in map(str, range(TURNS)):
                await graph_with(saver).ainvoke(asked(turn), on(thread))
                print(turn, file=lines, flush=True)
            await saver.aprune([thread])
            print("pruned", file=lines, flush=True)
        return driver.done


def main(url: str, every: int, folder: Path) -> None:
    # What is rarely stored shall be among what is interrupted.
    View.is_frame_due = property(lambda view: view.count > 3)  # type: ignore[method-assign,assignment]
    status, operations = forked(lambda: asyncio.run(run(url, "whole", 0, folder / "whole")))
    assert status == 0, status
    for at in range(1, operations + 1, every):
        thread = f"t{at}"
        status, _ = forked(partial(_run_now, url, thread, at, folder))
        # Concurrent steps may take fewer operations than in the first run.
        assert status in (0, int(signal.SIGKILL)), status
    sys.stdout.write(f"{operations}\n")


def _run_now(url: str, thread: str, at: int, folder: Path) -> int:
    return asyncio.run(run(url, thread, at, folder / thread))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
