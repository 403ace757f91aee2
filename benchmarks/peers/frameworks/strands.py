"""Strands Agents: `FileSessionManager` and ours, with agents that answer at once."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeAlias

from strands import Agent
from strands.models import Model
from strands.session import FileSessionManager, RepositorySessionManager

from benchmarks.peers.figures import Side
from benchmarks.peers.frameworks.trial import Plan, lost_in, report, time_both, turn_of
from benchmarks.peers.losses import PROCESSES, Ready, count, in_processes
from benchmarks.peers.measure import reporting
from benchmarks.peers.places import Place
from stm_backends import sync
from stm_backends.integrations.strands import StmSessionRepository

_AGENT = "agent"

Managers: TypeAlias = Callable[[str], RepositorySessionManager]


async def measure(place: Place, plan: Plan) -> None:
    """Time exchanges and openings of sessions, and lose exchanges of several processes."""
    with _own(place) as theirs, _ours(place.beside) as mine:
        both = (theirs, mine)
        for length in (plan.short, plan.long):
            with reporting(f"{length:,} messages"):
                agents = [_agent(managers(str(length))) for managers in both]
                for agent in agents:
                    for number in range(length // 2):
                        await agent.invoke_async(turn_of(number)[0])
                speak = (partial(agent.invoke_async, turn_of(length)[0]) for agent in agents)
                await time_both(f"one exchange, after {length:,} messages", plan, *speak)
                opening = (partial(_open, managers, str(length)) for managers in both)
                await time_both(f"make the agent again, after {length:,} messages", plan, *opening)
    with reporting(f"{PROCESSES} processes"):
        what = f"exchanges lost or doubled, of those that {PROCESSES} processes had in one session"
        report(what, "count", await _lost(place, plan, _own), await _lost(place.beside, plan, _ours))


@contextmanager
def _own(place: Place) -> Iterator[Managers]:
    yield lambda name: FileSessionManager(name, storage_dir=f"{place.folder}/{place.name}/sessions")


@contextmanager
def _ours(place: Place) -> Iterator[Managers]:
    with sync.open_backend(place.backend_url, create=True) as backend:
        sessions = StmSessionRepository(backend.asynchronous, "acme", "u1", run=backend.run)
        yield lambda name: RepositorySessionManager(name, sessions)


class _Answering(Model):
    """A model that answers at once, always the same."""

    def update_config(self, **model_config: Any) -> None: ...

    def get_config(self) -> Any:
        return {}

    def structured_output(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    async def stream(self, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        yield {"messageStart": {"role": "assistant"}}
        yield {"contentBlockDelta": {"delta": {"text": turn_of(0)[1]}}}
        yield {"contentBlockStop": {}}
        yield {"messageStop": {"stopReason": "end_turn"}}


def _agent(manager: RepositorySessionManager) -> Agent:
    # By default, it prints what it says.
    return Agent(model=_Answering(), session_manager=manager, callback_handler=None, agent_id=_AGENT)


async def _open(managers: Managers, name: str) -> None:
    _agent(managers(name))


async def _lost(place: Place, plan: Plan, opened: Any) -> Side:
    with opened(place) as managers:
        # Nobody has to make the session while others do.
        _agent(managers("shared"))
    said = await asyncio.to_thread(in_processes, partial(_speak, opened, place, plan.writes // 2), __name__)
    with opened(place) as managers:
        stored = managers("shared").session_repository.list_messages("shared", _AGENT)
    found = [one.message["content"][0].get("text", "") for one in stored if one.message["role"] == "user"]
    acknowledged = (question for questions, _ in said for question in questions)
    return lost_in(count(acknowledged, found, (errors for _, errors in said)))


async def _speak(
    opened: Any, place: Place, exchanges: int, number: int, ready: Ready
) -> tuple[list[str], dict[str, int]]:
    """Make the agent again for each exchange, as a service does for each request."""
    acknowledged, errors = list[str](), Counter[str]()
    with opened(place) as managers:
        await ready()
        for exchange in range(exchanges):
            question = f"Question {exchange} of {number}?"
            try:
                await _agent(managers("shared")).invoke_async(question)
                acknowledged.append(question)
            except Exception as error:  # noqa: BLE001 -- what it raises is what is counted
                errors[type(error).__name__] += 1
    return acknowledged, dict(errors)
