"""Google ADK's sessions: what its own services do, its runner, many machines, outages, and administration."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from google.adk.agents import BaseAgent, LlmAgent
from google.adk.agents.invocation_context import InvocationContext
from google.adk.errors import StaleSessionError
from google.adk.errors.already_exists_error import AlreadyExistsError
from google.adk.errors.session_not_found_error import SessionNotFoundError
from google.adk.events import Event, EventActions
from google.adk.models.base_llm import BaseLlm
from google.adk.models.llm_request import LlmRequest
from google.adk.models.llm_response import LlmResponse
from google.adk.platform import time as adk_time
from google.adk.runners import Runner
from google.adk.sessions import BaseSessionService, InMemorySessionService, Session
from google.adk.sessions.base_session_service import GetSessionConfig
from google.adk.tools.tool_confirmation import ToolConfirmation
from google.genai import types
from typer.testing import CliRunner

from stm_backends import (
    Backend,
    ConfigurationError,
    Corrupt,
    InvalidKey,
    InvalidState,
    LimitReached,
    Limits,
    MemoryKey,
    OutcomeUnknown,
    Sealing,
    StaticKeys,
    StorageError,
    Unavailable,
    open_backend,
    sync,
)
from stm_backends.admin.copying import Copy, Owner
from stm_backends.cli.app import app as command
from stm_backends.drivers.contract import Driver, Key, Record
from stm_backends.drivers.in_memory import MemoryDriver, MemoryStore
from stm_backends.drivers.wrapper import Operation, WrapperDriver
from stm_backends.integrations import google_adk
from stm_backends.integrations.google_adk import StmSessionService
from stm_backends.records import keys

APP, USER = "travel", "u1"
KIND = "google-adk"


def said(text: str = "Hello", *, author: str = "user", **more: Any) -> Event:
    return Event(
        invocation_id="i1",
        author=author,
        content=types.Content(role="user" if author == "user" else "model", parts=[types.Part(text=text)]),
        **more,
    )


def changing(**state: Any) -> Event:
    """Return an event that changes the state; `app_a` stands for `app:a`."""
    delta = {name.replace("_", ":", 1): value for name, value in state.items()}
    return Event(author="clerk", actions=EventActions(state_delta=delta))


async def begun(service: BaseSessionService, session_id: str | None = "s1", **options: Any) -> Session:
    of = {"app_name": APP, "user_id": USER, **options}
    return await service.create_session(session_id=session_id, **of)


async def read(service: BaseSessionService, session_id: str = "s1", **options: Any) -> Session:
    found = await service.get_session(app_name=APP, user_id=USER, session_id=session_id, **options)
    assert found is not None
    return found


def texts(session: Session) -> list[str]:
    return [
        event.content.parts[0].text or "" for event in session.events if event.content and event.content.parts
    ]


@pytest.fixture(params=["memory", "sqlite", "ADK's own"])
async def service(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[BaseSessionService]:
    """What ours are expected to do, ADK's own has to do as well."""
    if request.param == "ADK's own":
        yield InMemorySessionService()
        return
    url = "memory://" if request.param == "memory" else f"sqlite:///{tmp_path}/stm.db"
    async with open_backend(url) as backend:
        yield StmSessionService(backend)


@pytest.fixture
async def ours(backend: Backend) -> StmSessionService:
    return StmSessionService(backend)


# What ADK expects of a service


async def test_a_session_begins_with_its_state_and_without_events(service: BaseSessionService) -> None:
    session = await begun(service, state={"key": "value", "n": None})
    assert (session.app_name, session.user_id, session.id) == (APP, USER, "s1")
    assert session.state == {"key": "value", "n": None}
    assert session.events == []
    assert 0 < session.last_update_time <= adk_time.get_time()
    assert await read(service) == session


async def test_a_session_without_an_id_gets_one(service: BaseSessionService) -> None:
    one, two, three = [await begun(service, given) for given in (None, "", "   ")]
    assert len({one.id.strip(), two.id.strip(), three.id.strip(), ""}) == 4


async def test_a_session_that_is_not_there_is_none(service: BaseSessionService) -> None:
    await begun(service)
    for session_id in ("other", "", "  "):
        found = await service.get_session(app_name=APP, user_id=USER, session_id=session_id)
        assert found is None


async def test_an_id_that_exists_is_refused_and_its_session_stays(service: BaseSessionService) -> None:
    await begun(service, state={"keep": "this"})
    for session_id in ("s1", " s1\n"):
        with pytest.raises(AlreadyExistsError):
            await begun(service, session_id, state={"keep": "not this", "user:not": 1, "app:not": 1})
    found = await read(service)
    assert found.state["keep"] == "this"


async def test_white_space_around_an_id_is_no_part_of_it(service: BaseSessionService) -> None:
    assert (await begun(service, "order-42\n", state={"cart": "book"})).id == "order-42"
    found = await read(service, " order-42")
    assert (found.id, found.state) == ("order-42", {"cart": "book"})
    await service.delete_session(app_name=APP, user_id=USER, session_id="order-42 ")
    assert await service.get_session(app_name=APP, user_id=USER, session_id="order-42") is None


async def test_a_deleted_session_is_gone_and_may_begin_again(service: BaseSessionService) -> None:
    session = await begun(service, state={"old": 1})
    await service.append_event(session, said("old"))
    for _ in range(2):
        await service.delete_session(app_name=APP, user_id=USER, session_id="s1")
        assert await service.get_session(app_name=APP, user_id=USER, session_id="s1") is None
        assert (await service.list_sessions(app_name=APP, user_id=USER)).sessions == []
    again = await begun(service)
    assert (again.state, again.events) == ({}, [])
    await service.append_event(again, said("new"))
    assert texts(await read(service)) == ["new"]


async def test_an_event_for_a_deleted_session_is_refused(service: BaseSessionService) -> None:
    session = await begun(service)
    await service.delete_session(app_name=APP, user_id=USER, session_id="s1")
    with pytest.raises(SessionNotFoundError):
        await service.append_event(session, changing(a=1, user_a=1, app_a=1))
    assert await service.get_session(app_name=APP, user_id=USER, session_id="s1") is None
    assert await service.get_user_state(app_name=APP, user_id=USER) == {}


async def test_a_list_has_the_sessions_the_latest_last_with_state_and_no_events(
    service: BaseSessionService,
) -> None:
    for session_id in "abc":
        await begun(service, session_id, state={"name": session_id})
        await asyncio.sleep(0.002)
    await service.append_event(await read(service, "a"), said())
    listed = (await service.list_sessions(app_name=APP, user_id=USER)).sessions
    assert [(one.id, one.state, one.events) for one in listed] == [(c, {"name": c}, []) for c in "bca"]


async def test_a_list_is_of_one_user_or_of_all_of_an_app(service: BaseSessionService) -> None:
    for app, user, session_id in [(APP, "u1", "a"), (APP, "u2", "a"), (APP, "u1", "b"), ("other", "u1", "c")]:
        await begun(service, session_id, app_name=app, user_id=user, state={"user:name": user})
    of_one = (await service.list_sessions(app_name=APP, user_id="u1")).sessions
    assert sorted((one.user_id, one.id) for one in of_one) == [("u1", "a"), ("u1", "b")]
    of_all = (await service.list_sessions(app_name=APP)).sessions
    assert sorted((one.user_id, one.id, one.state["user:name"]) for one in of_all) == [
        ("u1", "a", "u1"),
        ("u1", "b", "u1"),
        ("u2", "a", "u2"),
    ]
    assert (await service.list_sessions(app_name="unknown")).sessions == []
    assert (await service.list_sessions(app_name=APP, user_id="unknown")).sessions == []


async def test_each_part_of_the_state_is_seen_by_those_whom_it_concerns(service: BaseSessionService) -> None:
    session = await begun(service, state={"own": 1, "user:name": "Ada", "app:open": True, "temp:x": 1})
    await service.append_event(session, changing(own=2, user_likes="tea", app_open=False, temp_y=2))
    expected = {"own": 2, "user:name": "Ada", "user:likes": "tea", "app:open": False}
    assert (await read(service)).state == expected
    assert (await begun(service, "s2")).state == {k: v for k, v in expected.items() if k != "own"}
    assert (await begun(service, "s3", user_id="u2")).state == {"app:open": False}
    assert (await begun(service, "s4", app_name="other")).state == {}
    assert await service.get_user_state(app_name=APP, user_id=USER) == {"name": "Ada", "likes": "tea"}
    assert await service.get_user_state(app_name=APP, user_id="u2") == {}
    assert await service.get_user_state(app_name="other", user_id=USER) == {}


async def test_temporary_state_ends_with_the_object(service: BaseSessionService) -> None:
    session = await begun(service)
    event = changing(temp_out="x", kept=1)
    await service.append_event(session, event)
    assert (session.state["temp:out"], session.state["kept"]) == ("x", 1)
    assert event.actions.state_delta == {"kept": 1}
    found = await read(service)
    assert found.state == {"kept": 1}
    assert found.events[0].actions.state_delta == {"kept": 1}


async def test_a_value_replaces_the_one_before_and_null_is_a_value(service: BaseSessionService) -> None:
    first = {
        "profile": {"name": "ada", "role": "admin"},
        "flag": False,
        "user:pref": "dark",
        "app:c": {"a": 1},
    }
    session = await begun(service, state=first)
    await service.append_event(session, changing(profile={"name": "bob"}, user_pref=None, app_c={"b": 2}))
    expected = {"profile": {"name": "bob"}, "flag": False, "user:pref": None, "app:c": {"b": 2}}
    assert session.state == expected
    assert (await read(service)).state == expected


async def test_an_event_comes_back_as_it_was(service: BaseSessionService) -> None:
    session = await begun(service)
    event = Event(
        invocation_id="invocation",
        author="clerk",
        content=types.Content(
            role="model",
            parts=[
                types.Part(text="é \0 text"),
                types.Part.from_bytes(data=b"\xff\x00image", mime_type="image/png"),
                types.Part.from_function_call(name="book", args={"seats": 2, "note": None}),
            ],
        ),
        turn_complete=True,
        partial=False,
        actions=EventActions(
            artifact_delta={"file": 0},
            transfer_to_agent="other",
            escalate=True,
            requested_tool_confirmations={"t": ToolConfirmation(hint="sure?", payload={"a": [1]})},
        ),
        long_running_tool_ids={"tool1"},
        error_code="code",
        interrupted=True,
        grounding_metadata=types.GroundingMetadata(
            search_entry_point=types.SearchEntryPoint(sdk_blob=b"blob")
        ),
        usage_metadata=types.GenerateContentResponseUsageMetadata(prompt_token_count=1, total_token_count=2),
        custom_metadata={"key": "value"},
        timestamp=1_700_000_000.123,
        input_transcription=types.Transcription(text="heard", finished=True),
    )
    assert await service.append_event(session, event) is event
    assert await read(service) == session
    assert session.events == [event]


async def test_the_time_of_a_session_is_that_of_its_last_event(service: BaseSessionService) -> None:
    session = await begun(service)
    at = session.last_update_time + 10
    await service.append_event(session, said(timestamp=at))
    assert session.last_update_time == at
    assert (await read(service)).last_update_time == at


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({}, [1, 2, 3, 4, 5]),
        ({"num_recent_events": 0}, []),
        ({"num_recent_events": 3}, [3, 4, 5]),
        ({"num_recent_events": 50}, [1, 2, 3, 4, 5]),
        ({"after_timestamp": 4.0}, [4, 5]),
        ({"after_timestamp": 50.0}, []),
        ({"after_timestamp": 0.0}, [1, 2, 3, 4, 5]),
        ({"after_timestamp": 4.0, "num_recent_events": 3}, [4, 5]),
        ({"after_timestamp": 2.0, "num_recent_events": 2}, [4, 5]),
    ],
)
async def test_a_session_is_read_with_the_events_that_are_asked_for(
    service: BaseSessionService, asked: dict[str, Any], expected: list[int]
) -> None:
    session = await begun(service, state={"a": 1})
    for number in range(1, 6):
        await service.append_event(session, Event(author="user", timestamp=float(number)))
    found = await read(service, config=GetSessionConfig(**asked))
    assert [event.timestamp for event in found.events] == expected
    assert found.state == {"a": 1}


async def test_a_partial_event_is_not_stored(service: BaseSessionService) -> None:
    session = await begun(service)
    event = said(partial=True, actions=EventActions(state_delta={"a": 1}))
    assert await service.append_event(session, event) is event
    assert session.events == []
    assert (await read(service)).events == []


async def test_an_event_that_is_delivered_twice_is_stored_once(service: BaseSessionService) -> None:
    session = await begun(service)
    event = said(actions=EventActions(state_delta={"n": 1}))
    await service.append_event(session, event)
    await service.append_event(session, changing(n=2))
    await service.append_event(session, event)
    await service.append_event(session, event.model_copy(deep=True))
    found = await read(service)
    assert len(session.events) == len(found.events) == 2
    assert found.state == {"n": 2}


async def test_events_with_one_id_that_differ_are_both_stored(service: BaseSessionService) -> None:
    session = await begun(service)
    for text in ("one", "two"):
        await service.append_event(session, said(text, id="fixed"))
    assert texts(await read(service)) == ["one", "two"]


async def test_what_was_handed_out_is_the_callers_to_change(service: BaseSessionService) -> None:
    session = await begun(service, state={"a": {"b": 1}, "user:a": {"b": 1}, "app:a": {"b": 1}})
    for state in (session.state, (await read(service)).state):
        for name in ("a", "user:a", "app:a"):
            state[name]["b"] = 2
    (await service.get_user_state(app_name=APP, user_id=USER))["a"]["b"] = 2
    assert (await read(service)).state == {"a": {"b": 1}, "user:a": {"b": 1}, "app:a": {"b": 1}}


@pytest.fixture
def clock() -> Iterator[list[float]]:
    """The time that ADK's services see, which moves by a second with each look."""
    now = [1_800_000_000.0]

    def tick() -> float:
        now[0] += 1.0
        return now[0]

    adk_time.set_time_provider(tick)
    yield now
    adk_time.reset_time_provider()


async def answer(
    service: BaseSessionService,
    what: str,
    place: dict[str, str],
    delta: dict[str, Any],
    asked: Any,
    step: int,
) -> Any:
    of = {name: value for name, value in place.items() if name != "session_id"}
    match what:
        case "create":
            return await service.create_session(**place, state=dict(delta))
        case "get":
            return await service.get_session(**place, config=asked)
        case "append":
            found = await service.get_session(**place)
            if found is not None:
                event = Event(id=f"e{step}", author="a", actions=EventActions(state_delta=dict(delta)))
                await service.append_event(found, event)
            return found
        case "delete":
            return await service.delete_session(**place)
        case "list":
            return (await service.list_sessions(**of)).sessions
        case "list all":
            return (await service.list_sessions(app_name=place["app_name"])).sessions
        case _:
            return await service.get_user_state(**of)


def as_json(answered: Any) -> Any:
    if isinstance(answered, list):
        return [as_json(one) for one in answered]
    return answered.model_dump(mode="json") if isinstance(answered, Session) else answered


@pytest.mark.parametrize("seed", range(6))
async def test_random_operations_are_answered_as_by_adks_own(
    backend: Backend, clock: list[float], seed: int
) -> None:
    chance = random.Random(seed)
    works = ["create", "get", "append", "append", "append", "delete", "list", "list all", "user state"]
    services: list[BaseSessionService] = [InMemorySessionService(), StmSessionService(backend)]
    for step in range(150):
        what, scope = chance.choice(works), chance.choice(["", "user:", "app:", "temp:"])
        place = {
            name: chance.choice(ids)
            for name, ids in {"app_name": "ab", "user_id": "uv", "session_id": "st"}.items()
        }
        delta = {f"{scope}{chance.choice('xyz')}": chance.choice([step, None, [step], {"s": step}])}
        asked = [
            None,
            GetSessionConfig(num_recent_events=chance.randrange(4)),
            GetSessionConfig(after_timestamp=clock[0] - chance.randrange(20)),
        ]
        config, started, answers = chance.choice(asked), clock[0], list[Any]()
        for service in services:
            clock[0] = started
            try:
                answers.append(as_json(await answer(service, what, place, delta, config, step)))
            except AlreadyExistsError as error:
                answers.append(type(error))
        assert answers[0] == answers[1], (step, what)


# ADK's runner


class Scripted(BaseLlm):
    """A model that says what a test tells it to, and remembers what it was asked."""

    answers: list[str]
    asked: list[list[str]]

    async def generate_content_async(
        self, llm_request: LlmRequest, stream: bool = False
    ) -> AsyncGenerator[LlmResponse, None]:
        del stream
        self.asked.append(
            [part.text or "" for content in llm_request.contents for part in content.parts or []]
        )
        yield LlmResponse(content=types.ModelContent(self.answers.pop(0)))


class Counter(BaseAgent):
    """Counts its runs in each part of the state, as of the event before."""

    async def _run_async_impl(self, ctx: InvocationContext) -> AsyncGenerator[Event, None]:
        for prefix in ("", "user:", "app:"):
            count = ctx.session.state.get(f"{prefix}count", 0) + 1
            yield Event(
                author=self.name,
                invocation_id=ctx.invocation_id,
                actions=EventActions(state_delta={f"{prefix}count": count}),
            )


async def run(agent: BaseAgent, service: BaseSessionService, text: str, session_id: str = "s1") -> list[str]:
    runner = Runner(app_name=APP, agent=agent, session_service=service, auto_create_session=True)
    said = types.UserContent(text)
    found = runner.run_async(user_id=USER, session_id=session_id, new_message=said)
    return [part.text or "" async for event in found if event.content for part in event.content.parts or []]


async def test_a_run_knows_what_an_earlier_one_was_about(service: BaseSessionService) -> None:
    model = Scripted(model="scripted", answers=["I will remember.", "Teal."], asked=[])
    for text in ("My favourite colour is teal.", "What is it?"):
        await run(LlmAgent(name="a", model=model), service, text)
    assert model.asked[1] == ["My favourite colour is teal.", "I will remember.", "What is it?"]
    assert texts(await read(service)) == [*model.asked[1], "Teal."]


async def test_runs_count_in_each_part_of_the_state(service: BaseSessionService) -> None:
    for session_id in ("s1", "s1", "s2"):
        await run(Counter(name="counter"), service, "Count!", session_id)
    assert (await read(service, "s1")).state == {"count": 2, "user:count": 3, "app:count": 3}
    assert (await read(service, "s2")).state == {"count": 1, "user:count": 3, "app:count": 3}


def test_the_blocking_run_works_with_a_backend_that_has_a_loop_of_its_own(tmp_path: Path) -> None:
    with sync.open_backend(f"sqlite:///{tmp_path}/stm.db") as backend:
        service = StmSessionService(backend.asynchronous, run=backend.run)
        runner = Runner(
            app_name=APP, agent=Counter(name="counter"), session_service=service, auto_create_session=True
        )
        for _ in range(2):
            hello = types.UserContent("Count!")
            assert len([*runner.run(user_id=USER, session_id="s1", new_message=hello)]) == 3
        found = asyncio.run(read(service))
        assert found.state == {"count": 2, "user:count": 2, "app:count": 2}
        assert len(found.events) == 8


def test_the_blocking_run_says_what_to_do_about_a_loop_of_another_thread(tmp_path: Path) -> None:
    async def main() -> None:
        async with open_backend(f"sqlite:///{tmp_path}/stm.db") as backend:
            runner = Runner(
                app_name=APP, agent=Counter(name="counter"), session_service=StmSessionService(backend)
            )
            hello = types.UserContent("Count!")
            with pytest.raises(ConfigurationError, match="event loop"):
                await asyncio.to_thread(
                    lambda: [*runner.run(user_id=USER, session_id="s1", new_message=hello)]
                )

    asyncio.run(main())


# Ours: stale writers


async def test_a_writer_who_is_behind_is_refused_and_changes_nothing(ours: StmSessionService) -> None:
    session = await begun(ours)
    behind = await read(ours)
    await ours.append_event(session, changing(a=1))
    with pytest.raises(StaleSessionError, match="modified in storage") as refused:
        await ours.append_event(behind, changing(b=1, user_b=1, app_b=1))
    assert isinstance(refused.value, ValueError)
    assert behind.events == []
    found = await read(ours)
    assert found.state == {"a": 1}
    assert len(found.events) == 1
    await ours.append_event(found, changing(b=1, user_b=1, app_b=1))
    assert (await read(ours)).state == {"a": 1, "b": 1, "user:b": 1, "app:b": 1}


async def test_of_two_who_append_at_once_exactly_one_is_refused(ours: StmSessionService) -> None:
    session = await begun(ours)
    for number in range(8):
        rivals = [session.model_copy(deep=True) for _ in range(2)]
        done = await asyncio.gather(
            *(
                ours.append_event(one, changing(**{f"k{number}": of, f"user_k{number}": of}))
                for of, one in enumerate(rivals)
            ),
            return_exceptions=True,
        )
        assert {type(one) for one in done} == {Event, StaleSessionError}
        (won,) = [of for of, one in enumerate(done) if isinstance(one, Event)]
        session = await read(ours)
        assert len(session.events) == number + 1
        assert session.state[f"k{number}"] == session.state[f"user:k{number}"] == won


async def test_two_machines_with_one_session_refuse_whoever_is_behind(pods: tuple[Backend, Backend]) -> None:
    one, two = map(StmSessionService, pods)
    mine, theirs = await begun(one), await read(two)
    await one.append_event(mine, said("first"))
    with pytest.raises(StaleSessionError):
        await two.append_event(theirs, said("second"))
    theirs = await read(two)
    await two.append_event(theirs, said("second"))
    assert texts(await read(one)) == ["first", "second"]


async def test_branches_of_one_run_append_to_one_object_at_once(ours: StmSessionService) -> None:
    session = await begun(ours)
    await asyncio.gather(*(ours.append_event(session, changing(**{f"k{n}": n})) for n in range(10)))
    found = await read(ours)
    assert [event.id for event in found.events] == [event.id for event in session.events]
    assert found.state == {f"k{n}": n for n in range(10)}
    assert found == session


async def test_an_object_made_by_hand_may_append_if_it_has_the_last_event(ours: StmSessionService) -> None:
    await ours.append_event(await begun(ours), said("first"))
    found = await read(ours)
    by_hand = Session.model_validate(found.model_dump())
    await ours.append_event(by_hand, said("second"))
    assert texts(await read(ours)) == ["first", "second"]
    with pytest.raises(StaleSessionError):
        await ours.append_event(Session.model_validate(found.model_dump()), said("third"))
    unknown = Session(id="unknown", app_name=APP, user_id=USER)
    with pytest.raises(SessionNotFoundError):
        await ours.append_event(unknown, said())


async def test_many_users_change_the_state_of_their_app_at_once(ours: StmSessionService) -> None:
    async def work(number: int) -> None:
        session = await begun(ours, user_id=f"u{number}")
        for step in range(3):
            key = f"{number}_{step}"
            await ours.append_event(session, changing(**{f"app_{key}": step, f"user_{key}": step}))

    await asyncio.gather(*(work(number) for number in range(20)))
    state = (await begun(ours, "after")).state
    assert len([name for name in state if name.startswith("app:")]) == 60


# What it costs


class Counting(WrapperDriver):
    """Notes each operation with its kind, and how many entries each load returns."""

    def __init__(self, inner: Driver) -> None:
        super().__init__(inner)
        self.calls: list[tuple[str, str]] = []
        self.entries = 0

    async def call(self, operation: Operation, key: Key | str, send: Callable[[], Awaitable[Any]]) -> Any:
        scope = key if isinstance(key, str) else key.scope
        self.calls.append((operation, scope.rpartition(":")[2]))
        answer = await send()
        if isinstance(answer, Record):
            self.entries += len(answer.tail)
        return answer

    def clear(self) -> None:
        self.calls, self.entries = [], 0


@pytest.fixture
async def counted() -> AsyncIterator[tuple[StmSessionService, Counting]]:
    driver = Counting(MemoryDriver(MemoryStore()))
    async with Backend(driver) as backend:
        yield StmSessionService(backend), driver


async def test_a_list_reads_no_event() -> None:
    driver = Counting(MemoryDriver(MemoryStore()))
    async with Backend(driver) as backend:
        service = StmSessionService(backend)
        for number in range(10):
            session = await begun(service, f"s{number}", state={"n": number})
            for step in range(20):
                await service.append_event(session, said(actions=EventActions(state_delta={"step": step})))
        await service.flush()
        for reader in (service, StmSessionService(backend)):
            driver.clear()
            listed = (await reader.list_sessions(app_name=APP, user_id=USER)).sessions
            assert [(one.id, one.state) for one in listed] == [
                (f"s{number}", {"n": number, "step": 19}) for number in range(10)
            ]
            assert driver.entries == 0
            assert [kind for operation, kind in driver.calls if operation == "load"].count(KIND) == 10
            assert {operation for operation, _ in driver.calls} == {"load", "scan"}


async def test_the_newest_events_of_a_long_session_are_read_alone(
    counted: tuple[StmSessionService, Counting],
) -> None:
    service, driver = counted
    session = await begun(service, state={"a": 1, "user:a": 1})
    for number in range(300):
        await service.append_event(session, said(str(number)))
    await service.flush()
    driver.clear()
    found = await read(service, config=GetSessionConfig(num_recent_events=10))
    assert texts(found) == [str(number) for number in range(290, 300)]
    assert found.state == {"a": 1, "user:a": 1}
    # Those before the ten say whether they are the newest.
    assert driver.entries <= 10 + 32
    assert ("load", "page") not in driver.calls
    driver.clear()
    since = session.events[-5].timestamp
    assert len((await read(service, config=GetSessionConfig(after_timestamp=since))).events) == 5
    assert driver.entries <= 16 + 32
    assert texts(await read(service)) == [str(number) for number in range(300)]


class Held(WrapperDriver):
    """Holds up what is saved as a state until it may go on, and counts it."""

    def __init__(self, inner: Driver) -> None:
        super().__init__(inner)
        self.goes_on = asyncio.Event()
        self.saved = 0
        self.waited_for: list[str] = []

    async def call(self, operation: Operation, key: Key | str, send: Callable[[], Awaitable[Any]]) -> Any:
        scope = key if isinstance(key, str) else key.scope
        if operation == "replace" and scope.endswith(":blob"):
            self.saved += 1
            await self.goes_on.wait()
        elif scope.endswith(f":{KIND}"):
            self.waited_for.append(operation)
        return await send()


@pytest.fixture
async def held() -> AsyncIterator[tuple[Held, StmSessionService, StmSessionService]]:
    """A driver that holds up heads, a service on it, and that of another process."""
    store = MemoryStore()
    driver = Held(MemoryDriver(store))
    async with Backend(driver) as one, Backend(MemoryDriver(store)) as two:
        yield driver, StmSessionService(one), StmSessionService(two)
        driver.goes_on.set()


async def test_no_event_waits_for_the_head_and_many_are_saved_as_one(
    held: tuple[Held, StmSessionService, StmSessionService],
) -> None:
    driver, mine, theirs = held
    session = await begun(mine, state={"n": 0})
    await asyncio.sleep(0.05)  # The catalogue is told by a task of its own, at most once a minute.
    for number in range(1, 20):
        driver.waited_for.clear()
        await mine.append_event(session, changing(n=number))
        assert driver.waited_for == ["append", "load"]
    for service in (mine, theirs):
        (listed,) = (await service.list_sessions(app_name=APP, user_id=USER)).sessions
        assert (listed.state, listed.last_update_time) == ({"n": 19}, session.last_update_time)
        assert await read(service) == session
    driver.goes_on.set()
    await mine.flush()
    assert driver.saved <= 3
    assert (await read(theirs)).state == (await read(mine)).state == {"n": 19}


async def test_a_session_deleted_before_its_head_is_saved_leaves_none(
    held: tuple[Held, StmSessionService, StmSessionService],
) -> None:
    driver, mine, theirs = held
    for by in (theirs, mine):
        driver.goes_on.clear()
        session = await begun(mine, state={"secret": 1})
        await mine.append_event(session, changing(secret=2))
        await by.delete_session(app_name=APP, user_id=USER, session_id="s1")
        driver.goes_on.set()
        await mine.flush()
        assert await records(theirs._backend) == []  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]


async def test_a_head_that_another_process_has_saved_is_continued(
    held: tuple[Held, StmSessionService, StmSessionService],
) -> None:
    driver, mine, theirs = held
    session = await begun(mine, state={"n": 0})
    await mine.append_event(session, changing(n=1))
    await theirs.append_event(await read(theirs), changing(n=2))
    await theirs.flush()
    driver.goes_on.set()
    await mine.flush()
    with pytest.raises(StaleSessionError):
        await mine.append_event(session, changing(n=3))
    await mine.append_event(await read(mine), changing(n=3))
    await mine.flush()
    (listed,) = (await theirs.list_sessions(app_name=APP, user_id=USER)).sessions
    assert listed.state == {"n": 3}


async def test_an_event_is_one_append_one_load_and_later_one_write_of_the_head(
    counted: tuple[StmSessionService, Counting],
) -> None:
    service, driver = counted
    session = await begun(service)
    await service.append_event(session, said())
    await service.flush()
    await asyncio.sleep(0.05)  # as above
    driver.clear()
    await service.append_event(session, said())
    await service.flush()
    written = [(operation, kind) for operation, kind in driver.calls if kind in (KIND, "blob")]
    assert written == [("append", KIND), ("load", KIND), ("replace", "blob")]


# Outages and crashes


class Failing(WrapperDriver):
    """Fails from its n-th operation on: before it, or after it, when the answer is lost."""

    def __init__(self, inner: Driver) -> None:
        super().__init__(inner)
        self.left: int | None = None
        self.after = False

    async def call(self, operation: Operation, key: Key | str, send: Callable[[], Awaitable[Any]]) -> Any:
        if self.left is None:
            return await send()
        self.left -= 1
        if self.left > 0:
            return await send()
        if self.left == 0 and self.after and operation != "load":
            await send()
            raise OutcomeUnknown("the answer was lost")
        raise Unavailable("down")


def numbers(state: dict[str, Any], prefix: str) -> set[str]:
    return {name.removeprefix(prefix) for name in state if name.startswith(prefix)}


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
async def test_an_outage_at_any_operation_leaves_no_event_without_its_state(after: bool) -> None:
    for at in range(1, 40):
        driver = Failing(MemoryDriver(MemoryStore()))
        async with Backend(driver) as backend:
            service = StmSessionService(backend)
            session = await begun(service, state={"k0": 0, "user:k0": 0, "app:k0": 0})
            driver.left, driver.after = at, after
            acknowledged, complete = 0, True
            try:
                for number in range(1, 3):
                    event = changing(**{f"{scope}k{number}": number for scope in ("", "user_", "app_")})
                    await service.append_event(session, event)
                    acknowledged = number
            except StorageError:
                complete = False
            driver.left = None
            other = StmSessionService(backend)
            of_user = await other.get_user_state(app_name=APP, user_id=USER)
            of_app = (await other.create_session(app_name=APP, user_id="u2")).state
            listed = (await other.list_sessions(app_name=APP, user_id=USER)).sessions[0]
            found = await read(other)
            stored = {f"k{number}" for number in range(len(found.events) + 1)}
            assert acknowledged <= len(found.events) <= acknowledged + 1, at
            assert numbers(of_user, "") == stored, at
            assert numbers(of_app, "app:") == stored, at
            assert listed.state == found.state, at
            for prefix in ("k", "user:k", "app:k"):
                assert {f"k{one}" for one in numbers(found.state, prefix)} == stored, at
            await other.append_event(found, said("goes on"))
            assert texts(await read(service)) == ["goes on"]
        if complete and driver.left is None and at > 30:
            break


async def test_an_event_whose_writer_died_is_not_shown_before_it_is_stored(backend: Backend) -> None:
    service = StmSessionService(backend)
    await begun(service)
    state = service._of_user(APP, USER)  # noqa: SLF001 # pyright: ignore[reportPrivateUsage] -- as a process leaves it that dies
    seen = await service._read(MemoryKey(APP, USER, "s1"), 1)  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]
    assert seen is not None
    note = {
        "user": USER,
        "session": "s1",
        "after": seen.head.last,
        "at": adk_time.get_time(),
        "set": {"a": 1},
    }
    await state.announce("unstored", note)
    assert await service.get_user_state(app_name=APP, user_id=USER) == {}
    # Once another event has come after the same one, it never will be.
    await service.append_event(await read(service), changing(user_b=2))
    assert await service.get_user_state(app_name=APP, user_id=USER) == {"b": 2}
    content = await backend.state_store.load_memory_state(_user_state_name())
    assert content == {"state": {"b": 2}, "coming": {}}


def _user_state_name() -> str:
    return f"kv:v1:{APP}:{USER}:%{KIND}"


async def test_an_announced_event_that_did_not_come_within_an_hour_is_dropped(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = StmSessionService(backend)
    state = service._of_app(APP)  # noqa: SLF001 # pyright: ignore[reportPrivateUsage] -- as a process leaves it that dies
    note = {"user": USER, "session": "s1", "after": "", "at": adk_time.get_time(), "set": {"a": 1}}
    await state.announce("unstored", note)
    assert (await begun(service, "other")).state == {}
    assert "unstored" in str(await backend.tenant_state(APP).load_versioned(KIND))
    monkeypatch.setattr(google_adk, "GIVEN_UP_S", -1.0)
    assert (await read(service, "other")).state == {}
    assert "unstored" not in str(await backend.tenant_state(APP).load_versioned(KIND))


async def test_a_cancelled_append_has_ended_when_the_cancellation_is_raised(backend: Backend) -> None:
    service = StmSessionService(backend)
    session = await begun(service)
    for number in range(12):
        task = asyncio.create_task(
            service.append_event(session, changing(**{f"k{number}": 1, "user_n": number}))
        )
        for _ in range(number):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        found = await read(service)
        await asyncio.sleep(0.01)
        assert await read(service) == found
        assert len(found.events) == len(session.events)
        assert found.state == session.state


async def test_an_outage_is_an_error_and_never_an_empty_session(tmp_path: Path) -> None:
    backend = open_backend(f"sqlite:///{tmp_path}/stm.db")
    service = StmSessionService(backend)
    async with backend:
        session = await begun(service)
    for work in (
        read(service),
        service.list_sessions(app_name=APP, user_id=USER),
        service.list_sessions(app_name=APP),
        service.get_user_state(app_name=APP, user_id=USER),
        begun(service, "s2"),
        service.append_event(session, said()),
        service.delete_session(app_name=APP, user_id=USER, session_id="s1"),
    ):
        with pytest.raises(Unavailable):
            await work
    assert session.events == []


async def test_a_head_that_is_behind_or_gone_is_made_up_for(backend: Backend) -> None:
    service = StmSessionService(backend)
    session = await begun(service, state={"a": 0, "b": 0})
    for number in range(1, 40):
        await service.append_event(session, changing(a=number))
    await service.flush()
    name = f"kv:v1:{APP}:{USER}:s1:{KIND}"
    head = await backend.state_store.load_memory_state(name)
    assert head is not None
    assert head["state"] == {"a": 39, "b": 0}
    damaged = (
        {"tip": "no tip"},
        None,
        {**head, "last": "unknown", "tip": "5:x", "state": {"a": 7, "b": 0}},
    )
    for reader, made in itertools.product((service, StmSessionService(backend)), damaged):
        if made is None:
            await backend.state_store.delete_memory_state(name)
        else:
            await backend.state_store.save_memory_state(name, made)
        (listed,) = (await reader.list_sessions(app_name=APP, user_id=USER)).sessions
        assert listed.state == {"a": 39, "b": 0}
        assert listed.last_update_time == session.last_update_time
        await reader.flush()
        assert await backend.state_store.load_memory_state(name) == head


async def test_a_damaged_event_is_an_error_that_quotes_nothing(backend: Backend) -> None:
    service = StmSessionService(backend)
    await begun(service)
    log = backend.item_log(MemoryKey(APP, USER, "s1"), KIND)
    await log.add([{"type": "event", "id": "x", "data": {"actions": "SECRET"}}])
    with pytest.raises(Corrupt) as error:
        await read(service)
    assert "SECRET" not in str(error.value)


# What is refused


@pytest.mark.parametrize(("app", "user"), [("", "u"), (" ", "u"), ("a", ""), ("a", None)])
async def test_without_an_app_and_a_user_there_is_no_session(
    ours: StmSessionService, app: str, user: Any
) -> None:
    for work in (
        ours.create_session(app_name=app, user_id=user),
        ours.get_session(app_name=app, user_id=user, session_id="s"),
        ours.delete_session(app_name=app, user_id=user, session_id="s"),
        ours.get_user_state(app_name=app, user_id=user),
    ):
        with pytest.raises(InvalidKey):
            await work


async def test_what_is_no_backend_and_no_time_to_live_is_refused(backend: Backend) -> None:
    given: Any = "sqlite:///memory.db"
    with pytest.raises(ConfigurationError, match=r"backend must come from open_backend\(\.\.\.\), not str"):
        StmSessionService(given)
    with pytest.raises(ConfigurationError, match="ttl_s"):
        StmSessionService(backend, ttl_s=0)


async def test_values_that_json_does_not_have_are_converted_in_state_and_refused_in_events(
    ours: StmSessionService,
) -> None:
    session = await begun(ours)
    await ours.append_event(session, changing(ok=2, call=lambda: 1, several={1}, user_pair=(1, 2)))
    found = await read(ours)
    assert found.state["ok"] == 2
    assert isinstance(found.state["call"], str)
    assert (found.state["several"], found.state["user:pair"]) == ([1], [1, 2])
    with pytest.raises(InvalidState, match="cannot be written as JSON"):
        await ours.append_event(session, said(custom_metadata={"SECRET": object()}))
    given: Any = {1: "SECRET"}
    with pytest.raises(InvalidState) as refused:
        await begun(ours, "s2", state=given)
    assert "SECRET" not in str(refused.value)
    assert len((await read(ours)).events) == 1
    await ours.append_event(session, said("goes on"))


async def test_ids_with_any_characters_never_meet(ours: StmSessionService) -> None:
    odd = [
        ("a", "u", "s"),
        ("a:u", "s", "s"),
        ("a", "u:s", "s"),
        ("a%3Au", "s", "s"),
        ("kv", "v1", "é/%google-adk"),
    ]
    for number, (app, user, session_id) in enumerate(odd):
        state = {"n": number, "user:n": number, "app:n": number}
        await ours.create_session(app_name=app, user_id=user, session_id=session_id, state=state)
    for number, (app, user, session_id) in enumerate(odd):
        found = await ours.get_session(app_name=app, user_id=user, session_id=session_id)
        assert found is not None
        assert (found.state["n"], found.state["user:n"]) == (number, number)
        assert await ours.get_user_state(app_name=app, user_id=user) == {"n": number}


async def test_a_limit_refuses_an_event_with_all_that_it_changes() -> None:
    async with open_backend("memory://", limits=Limits(turn_characters=500)) as backend:
        service = StmSessionService(backend)
        session = await begun(service)
        with pytest.raises(LimitReached):
            await service.append_event(
                session, said("x" * 600, actions=EventActions(state_delta={"user:a": 1}))
            )
        assert await service.get_user_state(app_name=APP, user_id=USER) == {}
        await service.append_event(session, changing(user_a=2))
        assert (await read(service)).state == {"user:a": 2}


# What everything stored here can do


async def filled(service: BaseSessionService, events: int = 3) -> Session:
    session = await begun(service, state={"own": 0, "user:k": 0, "app:k": 0})
    for number in range(events):
        delta = {"own": number, "user:k": number, f"app:k{number}": number}
        await service.append_event(session, said(f"MARKER {number}", actions=EventActions(state_delta=delta)))
    await service.flush()
    return session


async def records(backend: Backend) -> list[Key]:
    found: list[Key] = []
    for kind in (*keys.LOG_KINDS, "blob", "page"):
        scope = keys.scope(APP, USER, kind)
        page = await backend.driver.scan(scope, limit=1_000)
        found += [Key(scope, name) for name in page.names]
    return found


async def test_erasing_a_conversation_erases_the_session_and_keeps_the_users_state(backend: Backend) -> None:
    service = StmSessionService(backend)
    await filled(service)
    await begun(service, "s2")
    receipt = await backend.sessions.erase_with_receipt(APP, USER, "s1")
    assert receipt.complete
    assert (receipt.erased["logs"], receipt.erased["states"]) == (1, 1)
    assert await service.get_session(app_name=APP, user_id=USER, session_id="s1") is None
    assert [one.id for one in (await service.list_sessions(app_name=APP)).sessions] == ["s2"]
    assert await service.get_user_state(app_name=APP, user_id=USER) == {"k": 2}


async def test_erasing_a_user_leaves_nothing_of_them(backend: Backend) -> None:
    service = StmSessionService(backend)
    await filled(service)
    assert (await backend.sessions.erase_with_receipt(APP, USER)).complete
    assert await records(backend) == []
    assert await service.get_user_state(app_name=APP, user_id=USER) == {}
    assert (await begun(service, "s1", user_id="u2")).state["app:k"] == 0


async def test_erasing_a_tenant_erases_the_state_of_the_app(backend: Backend) -> None:
    service = StmSessionService(backend)
    await filled(service)
    assert (await backend.sessions.erase_with_receipt(APP)).complete
    assert await records(backend) == []
    assert (await begun(service)).state == {}


async def test_a_deleted_session_leaves_nothing_but_the_state_of_the_user(backend: Backend) -> None:
    service = StmSessionService(backend)
    await filled(service, events=150)
    await service.delete_session(app_name=APP, user_id=USER, session_id="s1")
    assert await records(backend) == [keys.blob_key(_user_state_name())]


async def test_what_is_refused_for_a_deleted_session_is_not_kept() -> None:
    async with open_backend("memory://") as backend:
        service = StmSessionService(backend)
        session = await filled(service)
        await service.delete_session(app_name=APP, user_id=USER, session_id="s1")
        with pytest.raises(SessionNotFoundError):
            await service.append_event(session, said("MARKER"))
        assert not any(b"MARKER" in entry for entry in await stored_bytes(backend))
        again = await begun(service)
        await service.append_event(again, said("new"))
        assert texts(await read(service)) == ["new"]


async def stored_bytes(backend: Backend) -> list[bytes]:
    found = [await backend.driver.load(key) for key in await records(backend)]
    return [part for one in found if one is not None for part in (one.body or b"", *one.tail)]


async def test_a_session_of_adks_own_service_can_be_moved_here(ours: StmSessionService) -> None:
    own = InMemorySessionService()
    await filled(own)
    old = await read(own)
    new = await begun(ours, state=old.state)
    for event in old.events:
        await ours.append_event(new, event)
    found = await read(ours)
    assert (found.events, found.state, found.last_update_time) == (
        old.events,
        old.state,
        old.last_update_time,
    )


async def test_an_exported_session_is_the_same_where_it_is_imported(backend: Backend, tmp_path: Path) -> None:
    session = await filled(StmSessionService(backend), events=20)
    lines = [line async for line in backend.sessions.export_log_lines(MemoryKey(APP, USER, "s1"), KIND)]
    lines = json.loads(json.dumps(lines))
    async with open_backend(f"sqlite:///{tmp_path}/other.db") as other:
        importing = other.sessions.importing()
        for line in lines:
            await importing.add(line)
        service = StmSessionService(other)
        (listed,) = (await service.list_sessions(app_name=APP)).sessions
        found = await read(service)
        assert found.events == session.events
        assert listed.state == found.state == session.state
        assert await service.get_user_state(app_name=APP, user_id=USER) == {"k": 19}
        await service.append_event(found, changing(user_k=20))
        assert (await read(service)).state["user:k"] == 20


async def test_a_copy_of_a_tenant_has_its_sessions_and_every_state(backend: Backend, tmp_path: Path) -> None:
    session = await filled(StmSessionService(backend))
    async with open_backend(f"sqlite:///{tmp_path}/other.db") as other:
        copy = Copy(backend.driver, other.driver, [Owner(APP)])
        await copy.copy()
        service = StmSessionService(other)
        found = await read(service)
        assert (found.events, found.state) == (session.events, session.state)
        assert [one.state for one in (await service.list_sessions(app_name=APP)).sessions] == [session.state]


async def test_a_purge_removes_an_old_session_with_its_state(backend: Backend) -> None:
    service = StmSessionService(backend)
    await filled(service)
    await asyncio.sleep(0.25)
    await begun(service, "young")
    purged = await backend.sessions.purge(APP, USER, older_than=0.2)
    assert purged.logs == 1
    assert await service.get_session(app_name=APP, user_id=USER, session_id="s1") is None
    assert [one.id for one in (await service.list_sessions(app_name=APP)).sessions] == ["young"]
    assert keys.blob_key(f"kv:v1:{APP}:{USER}:s1:{KIND}") not in await records(backend)
    again = await begun(service, "s1", state={"new": 1})
    assert {name: value for name, value in again.state.items() if ":" not in name} == {"new": 1}
    await service.append_event(again, said("new"))
    assert texts(await read(service)) == ["new"]


async def test_a_session_that_nobody_continues_is_forgotten_after_its_time(backend: Backend) -> None:
    brief, kept = StmSessionService(backend, ttl_s=2.0), StmSessionService(backend)
    session = await begun(brief, "brief", state={"user:a": 1, "own": 1})
    await begun(kept, "kept")
    await asyncio.sleep(1.0)
    await brief.append_event(session, said())
    await asyncio.sleep(1.4)
    assert len((await read(brief, "brief")).events) == 1
    await asyncio.sleep(1.0)
    assert [one.id for one in (await kept.list_sessions(app_name=APP)).sessions] == ["kept"]
    assert await kept.get_session(app_name=APP, user_id=USER, session_id="brief") is None
    assert await kept.get_user_state(app_name=APP, user_id=USER) == {"a": 1}
    assert (await begun(brief, "brief")).state == {"user:a": 1}


async def test_sealed_sessions_show_nothing_and_are_read_with_the_key() -> None:
    store = MemoryStore()
    sealing = Sealing(StaticKeys({"k": bytes(range(32))}, primary="k"))
    async with Backend(MemoryDriver(store), sealing=sealing) as backend:
        service = StmSessionService(backend)
        session = await filled(service, events=140)
        assert await read(service) == session
        assert (await backend.sessions.reseal(APP)).ok
        assert await read(StmSessionService(backend)) == session
    assert "MARKER" not in repr(vars(store))


async def test_the_command_line_shows_lists_and_counts_sessions(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/stm.db"
    async with open_backend(url) as backend:
        await filled(StmSessionService(backend))

    def cli(*arguments: str) -> str:
        done = CliRunner().invoke(command, [*arguments, "--url", url])
        assert done.exit_code == 0, done.output
        return done.output

    shown, listed, recent, stats = await asyncio.to_thread(
        lambda: (
            cli("show", f"{APP}:{USER}:s1"),
            cli("ls", f"{APP}:{USER}"),
            cli("ls", f"{APP}:{USER}", "--recent", "5"),
            cli("stats", APP, "--json"),
        )
    )
    assert "MARKER 2" in shown
    assert "log of google-adk items 4" in " ".join(shown.split())
    assert "s1" in listed
    assert "MARKER 0" in recent
    assert json.loads(stats.splitlines()[0])["logs"] == 1
