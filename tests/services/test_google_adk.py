"""Sessions of Google ADK on each datastore: a round of everything, several processes, and killed ones."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from google.adk.errors import StaleSessionError
from google.adk.errors.already_exists_error import AlreadyExistsError
from google.adk.events import Event, EventActions
from google.adk.sessions.base_session_service import GetSessionConfig
from google.genai import types

from stm_backends import open_backend
from stm_backends.integrations.google_adk import StmSessionService
from tests.support.dying_adk import EVENTS, USER, event
from tests.support.places import EACH, Place, quick_on
from tests.support.selection import few

PlaceOn = Callable[[str], Place]

APP = "travel: é"


def said(text: str, **state: Any) -> Event:
    content = types.Content(
        role="user", parts=[types.Part(text=text), types.Part.from_bytes(data=b"\xff", mime_type="a/b")]
    )
    return Event(author="user", content=content, actions=EventActions(state_delta=state))


@pytest.mark.parametrize("datastore", quick_on("redis", EACH))
async def test_a_session_is_filled_read_listed_and_erased(datastore: str, place_on: PlaceOn) -> None:
    url = place_on(datastore).url
    async with open_backend(url, create=True) as one, open_backend(url) as two:
        mine, theirs = StmSessionService(one), StmSessionService(two)
        of = {"app_name": APP, "user_id": USER}
        session = await mine.create_session(**of, session_id="s:1", state={"own": 0, "user:a": 0, "app:a": 0})
        with pytest.raises(AlreadyExistsError):
            await theirs.create_session(**of, session_id="s:1")
        for number in range(140):
            await mine.append_event(session, said(f"é {number}", **{"own": number, "user:a": number}))
        found = await theirs.get_session(**of, session_id="s:1")
        assert found == session
        newest = await theirs.get_session(
            **of, session_id="s:1", config=GetSessionConfig(num_recent_events=3)
        )
        assert newest is not None
        assert newest.events == session.events[-3:]
        await mine.append_event(session, said("later"))
        with pytest.raises(StaleSessionError):
            await theirs.append_event(found, said("stale", **{"user:a": "stale"}))
        (listed,) = (await theirs.list_sessions(app_name=APP)).sessions
        assert listed.state == session.state == {"own": 139, "user:a": 139, "app:a": 0}
        assert await theirs.get_user_state(**of) == {"a": 139}
        assert (await one.sessions.erase_with_receipt(APP)).complete
        assert await theirs.get_session(**of, session_id="s:1") is None
        assert (await theirs.create_session(**of)).state == {}


WRITER = """
import asyncio, sys
from google.adk.errors import StaleSessionError
from google.adk.events import Event, EventActions
from google.adk.sessions.base_session_service import GetSessionConfig
from stm_backends import open_backend
from stm_backends.integrations.google_adk import StmSessionService

async def main(url, writer, events, session_id):
    async with open_backend(url) as backend:
        service = StmSessionService(backend)
        of = {"app_name": "travel", "user_id": "u1", "session_id": session_id}
        for number in range(int(events)):
            delta = {f"{scope}k{writer}-{number}": number for scope in ("", "user:", "app:")}
            event = Event(author=writer, actions=EventActions(state_delta=delta))
            while True:
                try:
                    session = await service.get_session(**of, config=GetSessionConfig(num_recent_events=1))
                    await service.append_event(session, event)
                    break
                except StaleSessionError:
                    await asyncio.sleep(0)

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.parametrize("sessions", few(1, [["s1"] * 4, ["s1", "s2", "s3", "s4"]]), ids=["one", "four"])
@pytest.mark.parametrize("datastore", quick_on("redis", ["sqlite", *EACH]))
async def test_of_four_processes_every_event_and_all_of_its_state_is_kept(
    datastore: str, sessions: list[str], place_on: PlaceOn
) -> None:
    url, each = place_on(datastore).url, 40
    async with open_backend(url, create=True) as backend:
        service = StmSessionService(backend)
        of = {"app_name": "travel", "user_id": "u1"}
        for session_id in set(sessions):
            await service.create_session(**of, session_id=session_id)
        writers = [
            await asyncio.create_subprocess_exec(
                sys.executable, "-c", WRITER, url, str(writer), str(each), session_id
            )
            for writer, session_id in enumerate(sessions)
        ]
        assert await asyncio.gather(*(writer.wait() for writer in writers)) == [0] * 4
        found = [await service.get_session(**of, session_id=session_id) for session_id in set(sessions)]
        assert sum(len(one.events) for one in found if one) == 160
        names = [name for one in found if one for name in one.state if ":" not in name]
        assert len(names) == 160
        for prefix in ("user:", "app:"):
            for one in found:
                assert one is not None
                assert len([name for name in one.state if name.startswith(prefix)]) == 160
        order = [event.author for one in found if one for event in one.events]
        assert all(order.count(str(writer)) == each for writer in range(4))


@pytest.mark.parametrize("datastore", few(1, ["sqlite", "redis"]))
@pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.full)])
async def test_a_process_killed_anywhere_leaves_no_event_without_its_state(
    datastore: str, every: int, place_on: PlaceOn
) -> None:
    url = place_on(datastore).url
    async with open_backend(url, create=True):
        pass
    program = [sys.executable, "-m", "tests.support.dying_adk", url, str(every)]
    ran = await asyncio.to_thread(subprocess.run, program, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    acknowledged: dict[str, int] = json.loads(ran.stdout)
    assert len(acknowledged) > 5
    async with open_backend(url) as backend:
        service = StmSessionService(backend)
        for app, told in acknowledged.items():
            of = {"app_name": app, "user_id": USER}
            of_user = await service.get_user_state(**of)
            of_app = (await service.create_session(app_name=app, user_id="other")).state
            session = await service.get_session(**of, session_id="s1")
            if session is None:
                assert (told, of_user, of_app) == (0, {}, {}), app
                continue
            stored = len(session.events)
            assert told <= stored <= min(told + 1, EVENTS), app
            for prefix in ("", "user:", "app:"):
                expected = {f"{prefix}k{number}": number for number in range(stored)}
                assert expected.items() <= session.state.items(), app
            assert len(session.state) == 3 * stored, app
            assert of_user == {f"k{number}": number for number in range(stored)}, app
            assert of_app == {f"app:k{number}": number for number in range(stored)}, app
            listed = (await service.list_sessions(**of)).sessions
            assert [one.state for one in listed] == [session.state], app
            await service.append_event(session, event(stored))
            again = await service.get_session(**of, session_id="s1")
            assert again == session, app
