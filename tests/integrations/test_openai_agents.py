"""Sessions of the OpenAI Agents SDK: what the SDK expects of one, its own runner, two machines, outages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from agents import Agent, ModelResponse, RunConfig, Runner, SQLiteSession, function_tool
from agents.memory import OpenAIResponsesCompactionSession, Session, SessionSettings
from agents.run_internal.session_persistence import rewind_session_items

from stm_backends import (
    Backend,
    ConfigurationError,
    InvalidKey,
    InvalidState,
    MemoryKey,
    TooLarge,
    Unavailable,
    open_backend,
)
from stm_backends.integrations.openai_agents import StmSession
from tests.integrations.scripted import ScriptedModel, calls, says

KEY = MemoryKey("acme", "u1", "chat")

Sessions = Callable[..., Any]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def numbered(*numbers: int) -> list[Any]:
    return [user(str(number)) for number in numbers]


@pytest.fixture(autouse=True)
def _no_tracing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_AGENTS_DISABLE_TRACING", "1")


@pytest.fixture(params=["memory", "sqlite", "the SDK's own"])
async def sessions(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Sessions]:
    """Makes sessions by their id. What ours are expected to do, the SDK's own has to do as well."""
    if request.param == "the SDK's own":
        made: list[SQLiteSession] = []

        def make(session_id: str = "chat", **options: Any) -> Session:
            made.append(SQLiteSession(session_id, tmp_path / "sdk.db", **options))
            return made[-1]

        yield make
        for session in made:
            session.close()
        return
    url = "memory://" if request.param == "memory" else f"sqlite:///{tmp_path}/stm.db"
    async with open_backend(url) as backend:
        yield lambda session_id="chat", **options: StmSession(
            backend, MemoryKey("acme", "u1", session_id), **options
        )


# What the SDK expects of a session


async def test_it_is_a_session_with_an_id_and_settings(sessions: Sessions) -> None:
    session = sessions("chat")
    assert isinstance(session, Session)
    assert session.session_id == "chat"
    assert session.session_settings == SessionSettings()


async def test_settings_may_be_a_dictionary(sessions: Sessions) -> None:
    session = sessions(session_settings={"limit": 2})
    assert session.session_settings == SessionSettings(limit=2)
    await session.add_items(numbered(1, 2, 3))
    assert await session.get_items() == numbered(2, 3)
    assert await session.get_items(limit=1) == numbered(3)
    # The SDK reads what is assigned later in the same way.
    session.session_settings = {"limit": 1}
    assert await session.get_items() == numbered(3)
    session.session_settings = None
    assert await session.get_items() == numbered(1, 2, 3)
    with pytest.raises(TypeError, match="limt"):
        sessions(session_settings={"limt": 2})


async def test_items_come_back_in_order_as_they_were_added(sessions: Sessions) -> None:
    session = sessions()
    added = [
        user("Hello"),
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"a": 1}', "id": None},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "é \0"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "Hi", "annotations": []}]},
    ]
    await session.add_items(added[:1])
    await session.add_items(added[1:])
    assert await session.get_items() == added


async def test_a_new_session_is_empty_and_has_nothing_to_remove(sessions: Sessions) -> None:
    session = sessions()
    assert await session.get_items() == []
    assert await session.pop_item() is None
    await session.clear_session()
    assert await session.get_items() == []


async def test_adding_nothing_changes_nothing(sessions: Sessions) -> None:
    session = sessions()
    await session.add_items([])
    assert await session.get_items() == []


async def test_items_are_removed_from_the_end_one_by_one(sessions: Sessions) -> None:
    session = sessions()
    await session.add_items(numbered(1, 2))
    await session.add_items(numbered(3))
    assert [await session.pop_item() for _ in range(4)] == [user("3"), user("2"), user("1"), None]
    await session.add_items(numbered(4))
    assert await session.get_items() == numbered(4)


@pytest.mark.parametrize(("limit", "expected"), [(None, 6), (0, 0), (1, 1), (4, 4), (6, 6), (10, 6)])
async def test_a_limit_keeps_the_latest_in_order(
    sessions: Sessions, limit: int | None, expected: int
) -> None:
    session = sessions()
    await session.add_items(numbered(*range(6)))
    assert await session.get_items(limit=limit) == numbered(*range(6 - expected, 6))


async def test_a_limit_of_the_settings_holds_unless_a_call_has_its_own(sessions: Sessions) -> None:
    session = sessions(session_settings=SessionSettings(limit=2))
    await session.add_items(numbered(1, 2, 3, 4))
    assert await session.get_items() == numbered(3, 4)
    assert await session.get_items(3) == numbered(2, 3, 4)


async def test_a_cleared_session_is_empty_and_can_be_used_again(sessions: Sessions) -> None:
    session, other = sessions("chat"), sessions("other")
    await session.add_items(numbered(1))
    await other.add_items(numbered(2))
    await session.clear_session()
    assert await session.get_items() == []
    assert await other.get_items() == numbered(2)
    await session.add_items(numbered(3))
    assert await session.get_items() == numbered(3)


async def test_what_was_handed_out_is_the_callers_to_change(sessions: Sessions) -> None:
    session = sessions()
    added = numbered(1)
    await session.add_items(added)
    added[0]["content"] = "changed"
    (await session.get_items())[0]["content"] = "changed"
    assert await session.get_items() == numbered(1)


async def test_the_sdk_rewinds_what_it_has_just_added(sessions: Sessions) -> None:
    session = sessions()
    await session.add_items(numbered(1, 2, 3))
    await rewind_session_items(session, numbered(2, 3))
    assert await session.get_items() == numbered(1)


# The SDK's runner


async def by_run(agent: Agent, given: Any, **options: Any) -> Any:
    return await Runner.run(agent, given, **options)


async def by_run_streamed(agent: Agent, given: Any, **options: Any) -> Any:
    result = Runner.run_streamed(agent, given, **options)
    async for _ in result.stream_events():
        pass
    return result


RUNNERS = pytest.mark.parametrize("run", [by_run, by_run_streamed])


@RUNNERS
async def test_a_run_knows_what_an_earlier_one_was_about(sessions: Sessions, run: Any) -> None:
    model = ScriptedModel("I will remember.", "Teal.")
    agent = Agent(name="a", model=model)
    await run(agent, "My favourite colour is teal.", session=sessions())
    result = await run(agent, "What is it?", session=sessions())
    assert result.final_output == "Teal."
    assert [item.get("content") for item in model.asked[1] if item.get("role") == "user"] == [
        "My favourite colour is teal.",
        "What is it?",
    ]
    assert len(await sessions().get_items()) == 4


@RUNNERS
async def test_calls_of_tools_are_part_of_the_history(sessions: Sessions, run: Any) -> None:
    @function_tool
    def stock(item: str) -> str:
        """Say how many there are."""
        return f"3 {item}"

    model = ScriptedModel(calls("stock", '{"item": "teas"}'), "Three.", "Still three.")
    agent = Agent(name="a", model=model, tools=[stock])
    await run(agent, "How many?", session=sessions())
    await run(agent, "And now?", session=sessions())
    kinds = [item.get("type") or item.get("role") for item in await sessions().get_items()]
    history = ["user", "function_call", "function_call_output", "message"]
    assert kinds == [*history, "user", "message"]
    assert [item.get("type") or item.get("role") for item in model.asked[2]] == [*history, "user"]


@RUNNERS
async def test_a_limit_of_the_run_reaches_the_session(sessions: Sessions, run: Any) -> None:
    await sessions().add_items(numbered(1, 2, 3))
    model = ScriptedModel("Four.")
    settings = RunConfig(session_settings=SessionSettings(limit=1))
    await run(Agent(name="a", model=model), "4", session=sessions(), run_config=settings)
    assert model.asked == [numbered(3, 4)]


@RUNNERS
async def test_a_run_on_a_session_with_a_dictionary_shows_the_model_no_more(
    sessions: Sessions, run: Any
) -> None:
    model = ScriptedModel("Noted.", "Two.")
    agent = Agent(name="a", model=model)
    await run(agent, "I like cats.", session=sessions(session_settings={"limit": 1}))
    await run(agent, "And?", session=sessions(session_settings={"limit": 1}))
    assert "cats" not in str(model.asked[1])
    assert "Noted." in str(model.asked[1])


@RUNNERS
async def test_conversations_of_other_ids_stay_apart(sessions: Sessions, run: Any) -> None:
    model = ScriptedModel("Cats.", "Dogs.", "Cats, you said.")
    agent = Agent(name="a", model=model)
    await run(agent, "I like cats.", session=sessions("one"))
    await run(agent, "I like dogs.", session=sessions("two"))
    await run(agent, "What do I like?", session=sessions("one"))
    assert "dogs" not in str(model.asked[2])
    assert "cats" in str(model.asked[2])


# Ours: many machines, keys, errors


async def test_another_machine_goes_on_with_the_conversation(pods: tuple[Backend, Backend]) -> None:
    model = ScriptedModel("I will remember.", "Teal.")
    agent = Agent(name="a", model=model)
    for backend, query in zip(pods, ("It is teal.", "What is it?"), strict=True):
        await Runner.run(agent, query, session=StmSession(backend, KEY))
    assert "teal" in str(model.asked[1][0])


async def test_machines_that_remove_at_once_get_different_items(pods: tuple[Backend, Backend]) -> None:
    one, other = (StmSession(backend, KEY) for backend in pods)
    await one.add_items(numbered(*range(20)))
    removed = await asyncio.gather(*(session.pop_item() for _ in range(12) for session in (one, other)))
    texts = [item["content"] for item in removed if item is not None]
    assert sorted(texts, key=int) == [str(number) for number in range(20)]
    assert await one.get_items() == []


async def test_runs_on_two_machines_at_once_lose_nothing(pods: tuple[Backend, Backend]) -> None:
    async def many(backend: Backend, name: str) -> None:
        for number in range(5):
            agent = Agent(name="a", model=ScriptedModel(f"{name}{number}"))
            await Runner.run(agent, f"{name}{number}?", session=StmSession(backend, KEY))

    await asyncio.gather(*(many(backend, name) for backend, name in zip(pods, "ab", strict=True)))
    texts = str(await StmSession(pods[0], KEY).get_items())
    for name in "ab":
        places = [texts.index(f"'{name}{number}?'") for number in range(5)]
        assert places == sorted(places)
        assert all(f"'{name}{number}'" in texts for number in range(5))


async def test_tenants_and_users_never_meet(backend: Backend) -> None:
    keys = [
        MemoryKey("acme", "u1", "s"),
        MemoryKey("acme", "u2", "s"),
        MemoryKey("globex", "u1", "s"),
        MemoryKey("acme:u1", "s", "s"),
        MemoryKey("acme", "u1:s", "s"),
    ]
    for number, key in enumerate(keys):
        await StmSession(backend, key).add_items(numbered(number))
    for number, key in enumerate(keys):
        assert await StmSession(backend, key).get_items() == numbered(number)


@pytest.mark.parametrize(
    "key", [None, "acme:u1:chat", MemoryKey("acme", "u1", " "), MemoryKey("", "u1", "s")]
)
async def test_without_a_key_there_is_no_session(backend: Backend, key: Any) -> None:
    with pytest.raises(InvalidKey):
        StmSession(backend, key)


async def test_a_user_who_is_erased_has_no_history_any_more(backend: Backend) -> None:
    await StmSession(backend, KEY).add_items(numbered(1))
    assert [user async for user in backend.sessions.users("acme")] == ["u1"]
    assert await backend.sessions.erase_tenant("acme") == 1
    assert await StmSession(backend, KEY).get_items() == []
    assert [user async for user in backend.sessions.users("acme")] == []


async def test_an_outage_ends_the_run_and_is_never_an_empty_history(tmp_path: Path) -> None:
    backend = open_backend(f"sqlite:///{tmp_path}/stm.db")
    async with backend:
        await StmSession(backend, KEY).add_items(numbered(1))
    model = ScriptedModel("never said")
    for work in (
        Runner.run(Agent(name="a", model=model), "2", session=StmSession(backend, KEY)),
        StmSession(backend, KEY).get_items(),
        StmSession(backend, KEY).add_items(numbered(2)),
        StmSession(backend, KEY).pop_item(),
        StmSession(backend, KEY).clear_session(),
    ):
        with pytest.raises(Unavailable):
            await work
    assert model.asked == []


@pytest.mark.parametrize("items", [None, "Hello", {"role": "user"}, 5])
async def test_what_is_no_list_of_items_is_refused(backend: Backend, items: Any) -> None:
    session = StmSession(backend, KEY)
    with pytest.raises(InvalidState, match="items must be a list"):
        await session.add_items(items)
    assert await session.get_items() == []


async def test_a_negative_limit_and_what_is_no_backend_are_refused(backend: Backend) -> None:
    given: Any = "sqlite:///memory.db"
    with pytest.raises(ConfigurationError, match=r"backend must come from open_backend\(\.\.\.\), not str"):
        StmSession(given, KEY)
    for limit in (-1, 2.5):
        with pytest.raises(ConfigurationError, match="limit must be an integer of at least 0"):
            await StmSession(backend, KEY).get_items(limit)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigurationError, match="limit must be an integer of at least 0"):
        await StmSession(backend, KEY, session_settings={"limit": -1}).get_items()


async def test_items_that_json_does_not_have_are_refused_by_their_path(backend: Backend) -> None:
    session = StmSession(backend, KEY)
    with pytest.raises(InvalidState, match=r"items\[1\]\.content is object"):
        await session.add_items([user("1"), {"role": "user", "content": object()}])  # pyright: ignore[reportArgumentType]
    with pytest.raises(InvalidState, match=r"items\[0\] is ResponseOutputMessage"):
        await session.add_items([says("Hi")])  # pyright: ignore[reportArgumentType]
    assert await session.get_items() == []


async def test_items_that_are_too_large_are_refused_all_together(tmp_path: Path) -> None:
    async with open_backend(f"sqlite:///{tmp_path}/stm.db", max_entry_bytes=1_000) as backend:
        session = StmSession(backend, KEY)
        with pytest.raises(TooLarge) as refused:
            await session.add_items([user("small"), user("x" * 5_000)])
        assert refused.value.what == "entry"
        assert await session.get_items() == []


async def test_a_conversation_that_nobody_adds_to_is_forgotten_after_its_time(backend: Backend) -> None:
    brief, kept = StmSession(backend, KEY, ttl_s=0.2), StmSession(backend, MemoryKey("acme", "u1", "kept"))
    await brief.add_items(numbered(1))
    await kept.add_items(numbered(1))
    await asyncio.sleep(0.4)
    assert await brief.get_items() == []
    assert await kept.get_items() == numbered(1)


# Compaction by the SDK, around a session


class Compacts:
    """A client of OpenAI whose compaction says what a test tells it to, and lets others act meanwhile."""

    def __init__(self, meanwhile: Callable[[], Any] | None = None) -> None:
        self.responses = self
        self._meanwhile = meanwhile

    async def compact(self, **_: Any) -> Any:
        if self._meanwhile is not None:
            await self._meanwhile()
        return SimpleNamespace(output=[{"type": "compaction", "encrypted_content": "all"}], usage=None)


class Responds(ScriptedModel):
    """Its answers have ids, as those of OpenAI's API."""

    async def get_response(self, *given: Any, **named: Any) -> ModelResponse:
        response = await super().get_response(*given, **named)
        response.response_id = "r1"
        return response


def compacting(session: StmSession, client: Compacts) -> OpenAIResponsesCompactionSession:
    return OpenAIResponsesCompactionSession(
        "chat",
        session,
        client=cast("Any", client),
        compaction_mode="input",
        should_trigger_compaction=lambda context: len(context["session_items"]) >= 2,
    )


async def test_a_run_compacts_what_it_has_read(backend: Backend) -> None:
    session = StmSession(backend, KEY)
    agent = Agent("a", model=Responds("Hello.", "Yes."))
    await Runner.run(agent, "Hi", session=compacting(session, Compacts()))
    assert [item.get("type") for item in await items_of(session)] == ["compaction"]
    await Runner.run(agent, "And?", session=session)
    assert len(await items_of(session)) == 3


async def test_a_compaction_drops_nothing_that_another_process_adds_meanwhile(backend: Backend) -> None:
    session, other = StmSession(backend, KEY), StmSession(backend, KEY)
    client = Compacts(lambda: other.add_items([user("from elsewhere")]))
    agent = Agent("a", model=Responds("Hello."))
    await Runner.run(agent, "Hi", session=compacting(session, client))
    texts = [item.get("content") for item in await items_of(session)]
    assert "Hi" in texts
    assert "from elsewhere" in texts
    assert len(texts) == 3


async def test_a_snapshot_replaces_its_end_alone_if_nothing_has_changed(backend: Backend) -> None:
    session = StmSession(backend, KEY)
    await session.add_items(numbered(*range(10)))
    snapshot = await session._get_compaction_snapshot(4)  # noqa: SLF001 -- what the SDK calls
    assert (snapshot.items, snapshot.complete) == (numbered(6, 7, 8, 9), False)
    assert not await snapshot.replace_suffix(4, numbered(0))
    assert await snapshot.replace_suffix(1, numbered(100))
    assert await session.get_items() == numbered(*range(7), 100)
    assert not await snapshot.replace_suffix(1, numbered(200))
    snapshot = await session._get_compaction_snapshot(100, prune_prefix=lambda item: item in numbered(0, 1))  # noqa: SLF001
    assert snapshot.complete
    assert await snapshot.replace_suffix(7, [])
    assert await session.get_items() == numbered(*range(2, 7))


async def items_of(session: StmSession) -> list[dict[str, Any]]:
    return cast("list[dict[str, Any]]", await session.get_items())


# A cancelled call


@pytest.mark.parametrize(
    ("name", "left"), [("add_items", [0, 1, 2]), ("pop_item", [0]), ("clear_session", [])]
)
async def test_a_cancelled_call_is_settled_when_the_cancellation_is_raised(
    backend: Backend, name: str, left: list[int]
) -> None:
    session = StmSession(backend, KEY)
    await session.add_items(numbered(0, 1))
    reached, goes_on = asyncio.Event(), asyncio.Event()
    driver = backend.driver.inner
    inner = driver.delete if name == "clear_session" else driver.append

    async def slow(*given: Any, **options: Any) -> Any:
        reached.set()
        await goes_on.wait()
        return await inner(*given, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(driver, "delete" if name == "clear_session" else "append", slow)
        given = [numbered(2)] if name == "add_items" else []
        call = asyncio.create_task(getattr(session, name)(*given))
        await reached.wait()
        call.cancel()
        await asyncio.sleep(0)
        assert not call.done()
        goes_on.set()
        with pytest.raises(asyncio.CancelledError):
            await call
    assert await session.get_items() == numbered(*left)
