"""Google ADK: `DatabaseSessionService` and ours."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from google.adk.errors import StaleSessionError
from google.adk.events import Event, EventActions
from google.adk.sessions import BaseSessionService
from google.adk.sessions.base_session_service import GetSessionConfig
from google.genai import types

from benchmarks.peers import adk_sessions
from benchmarks.peers.figures import Side
from benchmarks.peers.frameworks.trial import Plan, report, time_both, turn_of
from benchmarks.peers.losses import PROCESSES, Ready, in_processes
from benchmarks.peers.measure import reporting
from benchmarks.peers.places import Place
from stm_backends import open_backend
from stm_backends.integrations.google_adk import StmSessionService

_OF = {"app_name": "acme", "user_id": "u1"}
_SHARED = {**_OF, "session_id": "shared"}
_LISTED = {**_OF, "user_id": "u2"}
_NEWEST = GetSessionConfig(num_recent_events=10)

_KEPT = ("events", "keys of the session's state", "keys of the user's state", "keys of the app's state")


async def measure(place: Place, plan: Plan) -> None:
    """Time events and listings, and count what several processes keep."""
    both = (place, place.beside)
    async with adk_sessions.database(place) as own, _ours(place.beside) as ours:
        services: tuple[BaseSessionService, BaseSessionService] = (own, ours)
        for length in (plan.short, plan.long):
            with reporting(f"{length:,} events"):
                await _time_events(length, plan, services)
        with reporting("the newest events"):
            reads = (
                partial(one.get_session, **_OF, session_id=str(plan.long), config=_NEWEST) for one in services
            )
            await time_both(f"read the newest 10 of {plan.long:,} events", plan, *reads)
        with reporting("a listing"):
            for service in services:
                for number in range(plan.sessions):
                    await _grow(service, {**_LISTED, "session_id": f"session {number}"}, plan.events)
            lists = (partial(one.list_sessions, **_LISTED) for one in services)
            await time_both(f"list {plan.sessions} sessions of {plan.events} events", plan, *lists)
        for service in services:
            await service.create_session(**_SHARED)
    with reporting(f"{PROCESSES} processes"):
        kept = [
            await _kept_of_processes(each, plan.writes, is_ours=is_ours)
            for each, is_ours in zip(both, (False, True), strict=True)
        ]
        for what, theirs, mine in zip(_KEPT, *kept, strict=True):
            report(f"{what} kept, of those that {PROCESSES} processes stored", "count", theirs, mine)


@asynccontextmanager
async def _ours(place: Place) -> AsyncIterator[StmSessionService]:
    async with open_backend(place.backend_url, create=True) as backend:
        yield StmSessionService(backend)


def _event(text: str, **state: Any) -> Event:
    content = types.Content(role="model", parts=[types.Part(text=text)])
    return Event(
        invocation_id="one", author="agent", content=content, actions=EventActions(state_delta=state)
    )


async def _grow(service: BaseSessionService, key: dict[str, str], events: int) -> Any:
    session = await service.create_session(**key)
    for number in range(events):
        await service.append_event(session, _event(turn_of(number)[0], **{f"k{number % 10}": number}))
    return session


async def _time_events(
    length: int, plan: Plan, services: tuple[BaseSessionService, BaseSessionService]
) -> None:
    sessions = [await _grow(one, {**_OF, "session_id": str(length)}, length) for one in services]
    for what, changed in (
        ("append an event", ()),
        ("append an event that changes the user's and the app's state", ("user:a", "app:a")),
    ):
        appends = (
            partial(_append, service, session, changed)
            for service, session in zip(services, sessions, strict=True)
        )
        await time_both(f"{what}, after {length:,}", plan, *appends)


async def _append(service: BaseSessionService, session: Any, changed: Sequence[str]) -> None:
    # What is not changed need not be written.
    state = {name: random.random() for name in changed}
    await service.append_event(session, _event("Done: Sino at 12:00.", **state))


# Several processes, which append to one session


async def _kept_of_processes(place: Place, events: int, *, is_ours: bool) -> list[Side]:
    work = partial(_store, is_ours, place, events)
    said = await asyncio.to_thread(in_processes, work, __name__)
    acknowledged = {name for names, _ in said for name in names}
    errors = Counter[str]()
    for _, raised in said:
        errors.update(raised)
    async with _ours(place) if is_ours else adk_sessions.database(place) as service:
        session = await service.get_session(**_SHARED)
    stored = {event.content.parts[0].text for event in session.events}
    found = (stored, *({name for name in acknowledged if scope + name in session.state} for scope in _SCOPES))
    first, *others = (len(acknowledged & names) for names in found)
    right = len(acknowledged)
    return [Side(first, right, right, dict(errors)), *(Side(kept, right, right) for kept in others)]


_SCOPES = ("", "user:", "app:")


async def _store(
    is_ours: bool, place: Place, events: int, number: int, ready: Ready
) -> tuple[list[str], dict[str, int]]:
    """Append events; return the names of those that were acknowledged, and the classes of the errors."""
    acknowledged, errors = list[str](), Counter[str]()
    async with _ours(place) if is_ours else adk_sessions.database(place) as service:
        await service.get_session(**_SHARED)
        await ready()
        for event in range(events):
            name = f"event {event} of {number}"
            try:
                await _append_at_last(service, name)
                acknowledged.append(name)
            except Exception as error:  # noqa: BLE001 -- what it raises is what is counted
                errors[type(error).__name__] += 1
    return acknowledged, dict(errors)


async def _append_at_last(service: BaseSessionService, name: str) -> None:
    """Read the session and append to it, again for as long as others come first, as ADK asks for."""
    while True:
        session: Any = await service.get_session(**_SHARED, config=GetSessionConfig(num_recent_events=1))
        try:
            await service.append_event(session, _event(name, **{scope + name: 1 for scope in _SCOPES}))
        except StaleSessionError:
            await asyncio.sleep(random.uniform(0, 0.005))
        else:
            return
