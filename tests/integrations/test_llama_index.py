"""LlamaIndex's chat store: its memories, engines and agents, two machines, hostile messages, outages."""

from __future__ import annotations

import asyncio
import copy
import pickle
from collections.abc import Callable, Generator
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from llama_index.core.agent.workflow import ReActAgent
from llama_index.core.base.llms.types import (
    CitableBlock,
    DocumentBlock,
    ImageBlock,
    ThinkingBlock,
    ToolCallBlock,
)
from llama_index.core.chat_engine import SimpleChatEngine
from llama_index.core.llms import (
    ChatMessage,
    CompletionResponse,
    CompletionResponseGen,
    CustomLLM,
    LLMMetadata,
    TextBlock,
)
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.core.schema import ImageDocument
from llama_index.core.storage.chat_store import SimpleChatStore

from stm_backends import (
    Backend,
    ConfigurationError,
    Corrupt,
    InvalidKey,
    InvalidState,
    MemoryKey,
    TooLarge,
    Unavailable,
    logs,
    open_backend,
    races,
    sync,
)
from stm_backends.admin.copying import Copy, Owner
from stm_backends.history import log as log_module
from stm_backends.integrations.llama_index import StmChatStore
from tests.support.chat_walk import Walk
from tests.support.sealed import SEALING

KEY = MemoryKey("acme", "u1", "chat")

EVERY_KIND = [
    ChatMessage(role="system", content="Be brief."),
    ChatMessage(role="user", content="é \0"),
    ChatMessage(
        role="user",
        blocks=[
            TextBlock(text="What is it?"),
            ImageBlock(image=b"\x89PNG\r\n\x1a\n"),
            ImageBlock(url="https://example.com/a.png", detail="low"),
            DocumentBlock(data=b"%PDF-1.7", title="a"),
            CitableBlock(title="t", source="s", content="cited"),
        ],
    ),
    ChatMessage(
        role="assistant",
        blocks=[
            ThinkingBlock(content="hm", additional_information={"signature": "x"}),
            ToolCallBlock(tool_call_id="c", tool_name="stock", tool_kwargs={"item": "tea", "n": [1, None]}),
        ],
        additional_kwargs={"tool_calls": [{"id": "c"}]},
    ),
    ChatMessage(role="tool", content="3", additional_kwargs={"tool_call_id": "c"}),
    ChatMessage(role="assistant", blocks=[]),
]


def ours(backend: Backend, user: str = "u1", **options: Any) -> StmChatStore:
    return StmChatStore(backend, "acme", user, **options)


def said(*texts: str) -> list[ChatMessage]:
    return [ChatMessage(text) for text in texts]


async def texts(store: StmChatStore, key: str = "chat") -> list[str | None]:
    return [message.content for message in await store.aget_messages(key)]


class Scripted(CustomLLM):
    """A model that gives its answers one after another, and keeps what it was asked."""

    answers: list[str]
    asked: list[str] = []  # noqa: RUF012 -- pydantic copies it

    @property
    def metadata(self) -> LLMMetadata:
        return LLMMetadata()

    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        del formatted, kwargs
        self.asked.append(prompt)
        return CompletionResponse(text=self.answers.pop(0))

    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseGen:
        def answer() -> Generator[CompletionResponse]:
            text = self.complete(prompt, formatted, **kwargs).text
            yield CompletionResponse(text=text, delta=text)

        return answer()


def memory_of(store: StmChatStore) -> ChatMemoryBuffer:
    return ChatMemoryBuffer.from_defaults(
        chat_store=store, chat_store_key="chat", token_limit=1_000, tokenizer_fn=str.split
    )


@pytest.fixture
async def store(backend: Backend) -> StmChatStore:
    return ours(backend)


# What LlamaIndex expects of a chat store


async def test_every_kind_of_message_comes_back_as_it_was(store: StmChatStore) -> None:
    await store.async_add_message("chat", EVERY_KIND[0])
    await store.aset_messages("chat", EVERY_KIND[:-1])
    await store.async_add_message("chat", EVERY_KIND[-1])
    assert await store.aget_messages("chat") == EVERY_KIND


async def test_a_deleted_message_leaves_the_others_in_their_order(store: StmChatStore) -> None:
    await store.aset_messages("chat", said(*"abcde"))
    removed = await store.adelete_message("chat", 1)
    assert removed is not None
    assert removed.content == "b"
    assert await texts(store) == [*"acde"]


@pytest.mark.parametrize("length", ["short", "long"])
@pytest.mark.parametrize("seed", range(3))
async def test_random_calls_are_answered_as_by_the_official_store(
    backend: Backend, seed: int, length: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if length == "long":
        monkeypatch.setattr(log_module, "LONG", 8)
        monkeypatch.setattr(log_module, "KEPT", 4)
    walk = Walk(ours(backend), seed)
    for _ in range(150):
        await walk.step()
    await walk.compare()
    assert walk.said >= {"get", "delete", "last", "clear"}


async def test_a_conversation_is_there_from_its_first_change_until_it_is_deleted(store: StmChatStore) -> None:
    own = SimpleChatStore()
    assert await store.aget_messages("chat") == own.get_messages("chat") == []
    assert await store.adelete_messages("chat") is None
    assert await store.adelete_message("chat", 0) is None
    assert await store.adelete_last_message("chat") is None
    assert await store.aget_keys() == []
    await store.aset_messages("chat", [])
    await store.async_add_message("other", ChatMessage("a"))
    assert await store.adelete_last_message("other") == ChatMessage("a")
    assert await store.adelete_last_message("other") is None
    assert await store.aget_keys() == ["chat", "other"]
    assert await store.adelete_messages("chat") == []
    assert await store.adelete_messages("other") == []
    assert await store.aget_keys() == []


async def test_what_was_handed_out_is_the_callers_to_change(store: StmChatStore) -> None:
    given = said("a")
    await store.aset_messages("chat", given)
    given[0].content = "changed"
    (await store.aget_messages("chat"))[0].content = "changed"
    assert await texts(store) == ["a"]


# Memories, engines and agents


async def test_a_memory_works_on_the_loop_of_the_backend(store: StmChatStore) -> None:
    memory = memory_of(store)
    await memory.aput(ChatMessage("a"))
    await memory.aput_messages(said("b", "c"))  # which LlamaIndex does in another thread
    assert [one.content for one in await memory.aget()] == ["a", "b", "c"]
    assert [one.content for one in await memory.aget_all()] == ["a", "b", "c"]
    await memory.aset(said("d"))
    assert await texts(store) == ["d"]
    await memory.areset()
    assert await store.aget_keys() == []


# LlamaIndex's agents use what Pydantic, and LlamaIndex itself, have deprecated.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
async def test_an_agent_knows_on_another_machine_what_was_said(pods: tuple[Backend, Backend]) -> None:
    model = Scripted(answers=["Thought: I can answer.\nAnswer: Noted.", "Thought: I know.\nAnswer: Teal."])
    for backend, query in zip(pods, ("It is teal.", "What is it?"), strict=True):
        answer = await ReActAgent(tools=[], llm=model).run(query, memory=memory_of(ours(backend)))
    assert str(answer) == "Teal."
    assert "It is teal." in model.asked[-1]
    found = await texts(ours(pods[0]))
    assert [text for text in found if text in ("It is teal.", "What is it?")] == [
        "It is teal.",
        "What is it?",
    ]


async def test_an_engine_goes_on_where_another_one_was(store: StmChatStore) -> None:
    model = Scripted(answers=["Noted.", "Teal."])
    for query in ("It is teal.", "What is it?"):
        await SimpleChatEngine.from_defaults(llm=model, memory=memory_of(store)).achat(query)
    assert await texts(store) == ["It is teal.", "Noted.", "What is it?", "Teal."]


def test_an_engine_that_blocks_works_without_an_event_loop(tmp_path: Path) -> None:
    with sync.open_backend(f"sqlite:///{tmp_path}/stm.db") as backend:
        store = ours(backend.asynchronous, run=backend.run)
        model = Scripted(answers=["Noted.", "Teal.", "Yes."])
        for query in ("It is teal.", "What is it?"):
            SimpleChatEngine.from_defaults(llm=model, memory=memory_of(store)).chat(query)
        assert [one.content for one in store.get_messages("chat")][-1] == "Teal."
        # On an event loop of another thread, too.
        asyncio.run(SimpleChatEngine.from_defaults(llm=model, memory=memory_of(store)).achat("Sure?"))
        assert [one.content for one in asyncio.run(store.aget_messages("chat"))][-2:] == ["Sure?", "Yes."]


def test_every_blocking_method_does_what_the_other_one_does(tmp_path: Path) -> None:
    with sync.open_backend(f"sqlite:///{tmp_path}/stm.db") as backend:
        store = ours(backend.asynchronous, run=backend.run)
        store.add_message("chat", ChatMessage("b"))
        store.add_message("chat", ChatMessage("a"), 0)
        assert [one.content for one in store.get_messages("chat")] == ["a", "b"]
        store.set_messages("chat", said(*"abc"))
        assert store.delete_message("chat", 0) == ChatMessage("a")
        assert store.delete_last_message("chat") == ChatMessage("c")
        assert store.get_keys() == ["chat"]
        assert store.delete_messages("chat") == said("b")
        assert store.get_keys() == []


async def test_blocking_calls_on_a_loop_or_without_one_are_refused(store: StmChatStore) -> None:
    for call in (store.get_keys, lambda: store.add_message("chat", ChatMessage("a"))):
        with pytest.raises(ConfigurationError, match="needs the backend's event loop in another thread"):
            call()
    assert await asyncio.to_thread(store.get_messages, "chat") == []


def test_a_store_that_was_made_without_a_loop_blocks_once_it_was_used_on_one() -> None:
    backend = open_backend("memory://")
    store = ours(backend)
    with pytest.raises(ConfigurationError, match="await aget_keys"):
        store.get_keys()

    async def use() -> list[str]:
        async with backend:
            await store.async_add_message("chat", ChatMessage("a"))
            return await asyncio.to_thread(store.get_keys)

    assert asyncio.run(use()) == ["chat"]


def test_a_store_whose_loop_has_ended_is_not_waited_for() -> None:
    async def make() -> StmChatStore:
        async with open_backend("memory://") as backend:
            return ours(backend)

    store = asyncio.run(make())
    with pytest.raises(ConfigurationError, match="needs the backend's event loop"):
        store.get_keys()


async def test_copies_are_the_same_store_and_no_pickle_holds_one(store: StmChatStore) -> None:
    memory = memory_of(store)
    assert copy.deepcopy(memory).chat_store is store
    assert "u1" not in repr(store)
    assert memory.to_dict()["chat_store"] == {"class_name": "StmChatStore"}
    with pytest.raises(ConfigurationError, match="create one in each process"):
        pickle.dumps(store)


# Two who change a conversation


async def test_machines_that_add_at_once_lose_nothing(pods: tuple[Backend, Backend]) -> None:
    async def many(backend: Backend, name: str) -> None:
        for number in range(20):
            await ours(backend).async_add_message("chat", ChatMessage(f"{name}{number}"))

    await asyncio.gather(*(many(backend, name) for backend, name in zip(pods, "ab", strict=True)))
    found = await texts(ours(pods[0]))
    for name in "ab":
        assert [text for text in found if str(text)[0] == name] == [f"{name}{number}" for number in range(20)]


async def test_machines_that_remove_at_once_get_different_messages(pods: tuple[Backend, Backend]) -> None:
    await ours(pods[0]).aset_messages("chat", said(*map(str, range(12))))
    removed = await asyncio.gather(
        *(ours(backend).adelete_last_message("chat") for _ in range(8) for backend in pods)
    )
    assert sorted(str(one.content) for one in removed if one) == sorted(map(str, range(12)))


def before_its_write(backend: Backend, patch: pytest.MonkeyPatch, *meanwhile: Callable[[], Any]) -> None:
    """Let others act before the next writes of a backend, one before each."""
    driver, waiting = backend.driver.inner, [*meanwhile]
    inner = driver.append

    async def append(*given: Any, **options: Any) -> Any:
        if waiting:
            await waiting.pop(0)()
        return await inner(*given, **options)

    patch.setattr(driver, "append", append)


EDITS: dict[str, tuple[Callable[[StmChatStore], Any], list[str]]] = {
    "delete": (lambda store: store.adelete_message("chat", 0), [*"bcxy"]),
    "delete from the end": (lambda store: store.adelete_message("chat", -1), [*"abcx"]),
    "insert": (lambda store: store.async_add_message("chat", ChatMessage("z"), 1), [*"azbcxy"]),
    "set": (lambda store: store.aset_messages("chat", said("z")), ["z"]),
    "last": (lambda store: store.adelete_last_message("chat"), [*"abc"]),
}


@pytest.mark.parametrize("edit", EDITS)
async def test_an_edit_changes_what_stands_there_when_it_is_done(
    pods: tuple[Backend, Backend], edit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    call, left = EDITS[edit]
    one, other = map(ours, pods)
    await one.aset_messages("chat", said(*"abc"))
    adding = [lambda text=text: other.async_add_message("chat", ChatMessage(text)) for text in "xy"]
    # The place of a removal of the last one decides which that is; the others are refused and repeated.
    before_its_write(pods[0], monkeypatch, *(adding[:1] if edit == "last" else adding))
    await call(one)
    assert await texts(one) == left


async def test_a_conversation_that_is_deleted_during_an_edit_does_not_come_back(
    pods: tuple[Backend, Backend], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = map(ours, pods)
    await one.aset_messages("chat", said(*"abc"))
    before_its_write(pods[0], monkeypatch, lambda: other.adelete_messages("chat"))
    assert await one.adelete_message("chat", 0) is None
    assert await texts(one) == []
    assert await one.aget_keys() == await other.aget_keys() == []
    await other.async_add_message("chat", ChatMessage("new"))
    assert await texts(one) == ["new"]
    assert await one.aget_keys() == ["chat"]


async def test_an_edit_that_others_never_let_through_says_so(
    pods: tuple[Backend, Backend], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = map(ours, pods)
    await one.aset_messages("chat", said(*"abc"))
    monkeypatch.setattr(races, "CONTENDED", 3)
    before_its_write(pods[0], monkeypatch, *[lambda: other.async_add_message("chat", ChatMessage("x"))] * 3)
    with pytest.raises(Unavailable, match=r"sqlite\.delete_message: others kept changing the conversation"):
        await one.adelete_message("chat", 0)
    assert await texts(one) == [*"abcxxx"]


@pytest.mark.parametrize(
    ("name", "given", "left"),
    [
        ("async_add_message", [ChatMessage("c")], [*"abc"]),
        ("adelete_message", [0], ["b"]),
        ("adelete_last_message", [], ["a"]),
        ("aset_messages", [said("z")], ["z"]),
        ("adelete_messages", [], []),
    ],
)
async def test_a_cancelled_call_is_settled_when_the_cancellation_is_raised(
    backend: Backend, store: StmChatStore, name: str, given: list[Any], left: list[str]
) -> None:
    await store.aset_messages("chat", said(*"ab"))
    reached, goes_on = asyncio.Event(), asyncio.Event()
    driver, write = backend.driver.inner, "delete" if name == "adelete_messages" else "append"
    inner = getattr(driver, write)

    async def slow(*arguments: Any, **options: Any) -> Any:
        reached.set()
        await goes_on.wait()
        return await inner(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(driver, write, slow)
        call = asyncio.create_task(getattr(store, name)("chat", *given))
        await reached.wait()
        call.cancel()
        await asyncio.sleep(0)
        assert not call.done()
        goes_on.set()
        with pytest.raises(asyncio.CancelledError):
            await call
    assert await texts(store) == left


# Messages that are not stored as they are


async def test_what_is_not_json_beside_a_message_is_converted(store: StmChatStore) -> None:
    at = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    beside = {
        "bytes": b"\xff",
        "at": at,
        "price": Decimal("1.50"),
        "tags": {"a"},
        "error": ValueError("late"),
    }
    await store.async_add_message("chat", ChatMessage("a", additional_kwargs=beside))
    (found,) = await store.aget_messages("chat")
    assert found.additional_kwargs == {
        "bytes": "/w==",
        "at": at.isoformat(),
        "price": "1.50",
        "tags": ["a"],
        "error": "ValueError: late",
    }


async def test_what_has_no_form_in_json_is_left_out_with_a_warning(
    store: StmChatStore, caplog: pytest.LogCaptureFixture
) -> None:
    logs.configure(every_s=0)
    secret = {"kept": 1, "gone": object(), "list": [object(), "SECRET"]}
    await store.async_add_message("chat", ChatMessage("a", additional_kwargs=secret))
    (found,) = await store.aget_messages("chat")
    assert found.additional_kwargs == {"kept": 1, "list": ["SECRET"]}
    assert "left out of a message, not JSON: object" in caplog.text
    assert "SECRET" not in caplog.text
    logs.configure()


async def test_images_in_the_old_place_come_back_as_blocks(store: StmChatStore) -> None:
    image = ImageDocument(image=ImageBlock(image=b"\x89PNG\r\n\x1a\n").image)
    given = ChatMessage("What is it?", additional_kwargs={"images": [image]})
    await store.async_add_message("chat", given)
    (found,) = await store.aget_messages("chat")
    assert found.blocks == given.blocks
    assert len(found.blocks) == 2
    assert found.additional_kwargs == {}


class Odd:
    """A value that no one can write as JSON."""

    def __repr__(self) -> str:
        return "SECRET"


async def test_what_could_not_be_read_again_is_refused_and_not_quoted(
    store: StmChatStore, tmp_path: Path
) -> None:
    file = tmp_path / "SECRET.png"
    file.write_bytes(b"\x89PNG\r\n\x1a\n")
    cyclic: dict[str, Any] = {}
    cyclic["self"] = cyclic
    hostile: list[Any] = [
        None,
        "SECRET",
        {"role": "user", "content": "SECRET"},
        ChatMessage(blocks=[ToolCallBlock(tool_name="f", tool_kwargs={"a": Odd()})]),
        ChatMessage(blocks=[ImageBlock(path=file)]),
        ChatMessage(blocks=[CitableBlock(title="t", source="s", content=[ImageBlock(path=file)])]),
        ChatMessage.model_construct(role="SECRET", blocks=[], additional_kwargs={}),
        ChatMessage.model_construct(role="user", blocks=5, additional_kwargs={}),
        ChatMessage("a", additional_kwargs=cyclic),
    ]
    for message in hostile:
        for work in (store.async_add_message("chat", message), store.aset_messages("chat", [message])):
            with pytest.raises(InvalidState, match=r"^message") as raised:
                await work
            assert "SECRET" not in str(raised.value)
            assert raised.value.__cause__ is None
    for messages in (None, "SECRET", {"a": 1}, 5):
        given: Any = messages
        with pytest.raises(InvalidState, match="messages must be a list"):
            await store.aset_messages("chat", given)
    assert await store.aget_keys() == []


@pytest.mark.parametrize("idx", ["0", 1.0, None, True])
async def test_a_place_is_an_integer(store: StmChatStore, idx: Any) -> None:
    await store.aset_messages("chat", said("a"))
    with pytest.raises(ConfigurationError, match="idx must be an integer"):
        await store.adelete_message("chat", idx)
    assert await texts(store) == ["a"]


@pytest.mark.parametrize(
    "item",
    [
        {"role": "alien", "blocks": [], "additional_kwargs": {"a": "secret"}},
        {"role": "user", "blocks": [{"block_type": "secret"}], "additional_kwargs": {}},
        {"role": "user", "blocks": "secret"},
        {"role": "user", "blocks": [], "additional_kwargs": {"images": ["secret"]}},
        {"role": "user", "blocks": [{"block_type": "image", "path": "/secret"}]},
    ],
)
async def test_what_is_no_message_is_corrupt(
    backend: Backend, store: StmChatStore, item: dict[str, Any]
) -> None:
    await backend.item_log(KEY, "llama-index").add([item])
    with pytest.raises(Corrupt, match=rf"{backend.name}\.get_messages") as raised:
        await store.aget_messages("chat")
    assert "secret" not in str(raised.value)
    assert raised.value.__suppress_context__


async def test_messages_that_are_too_large_are_refused_all_together(tmp_path: Path) -> None:
    async with open_backend(f"sqlite:///{tmp_path}/stm.db", max_entry_bytes=1_000) as backend:
        store = ours(backend)
        await store.async_add_message("chat", ChatMessage("a"))
        with pytest.raises(TooLarge):
            await store.aset_messages("chat", said("b", "x" * 5_000))
        assert await texts(store) == ["a"]


# Keys, times, outages, and what everything stored here can do


async def test_tenants_users_and_keys_never_meet(backend: Backend) -> None:
    owners = [("acme", "u1"), ("acme", "u2"), ("globex", "u1"), ("acme:u1", "chat"), ("acme", "u1:chat")]
    names = ["chat", "chat:chat", "%63hat", "*", "chat/"]
    for number, owner in enumerate(owners):
        for name in names:
            await StmChatStore(backend, *owner).async_add_message(name, ChatMessage(f"{number} {name}"))
    for number, owner in enumerate(owners):
        store = StmChatStore(backend, *owner)
        assert await store.aget_keys() == sorted(names)
        assert [await texts(store, name) for name in names] == [[f"{number} {name}"] for name in names]


async def test_without_a_tenant_a_user_or_a_key_there_is_no_conversation(backend: Backend) -> None:
    for owner in (("", "u1"), ("acme", " "), (None, "u1")):
        given: Any = owner
        with pytest.raises(InvalidKey):
            StmChatStore(backend, *given)
    for key in ("", " ", "x" * 2000, None):
        given = key
        for work in (ours(backend).aget_messages(given), ours(backend).aset_messages(given, said("a"))):
            with pytest.raises(InvalidKey):
                await work
    given = "sqlite:///memory.db"
    with pytest.raises(ConfigurationError, match="not str"):
        StmChatStore(given, "acme", "u1")
    with pytest.raises(ConfigurationError, match="ttl_s"):
        ours(backend, ttl_s=0)


async def test_a_conversation_that_nobody_changes_is_forgotten_after_its_time(backend: Backend) -> None:
    brief, kept = ours(backend, ttl_s=0.3), ours(backend)
    await brief.async_add_message("brief", ChatMessage("a"))
    await kept.async_add_message("kept", ChatMessage("a"))
    await asyncio.sleep(0.5)
    assert await texts(brief, "brief") == []
    assert await kept.aget_keys() == ["kept"]


async def test_a_conversation_is_listed_exported_imported_and_erased_with_its_user(backend: Backend) -> None:
    store = ours(backend)
    await store.aset_messages("chat", said("A red bike", "Noted."))
    assert [user async for user in backend.sessions.users("acme")] == ["u1"]
    assert [one async for one in backend.sessions.logs("acme", "u1")] == [("llama-index", KEY)]
    lines = [line async for line in backend.sessions.export_log_lines(KEY, "llama-index")]
    assert await backend.sessions.erase_tenant("acme") == 1
    assert await texts(store) == []
    importing = backend.sessions.importing()
    assert KEY in [await importing.add(line) for line in lines]
    assert await texts(store) == ["A red bike", "Noted."]
    receipt = await backend.sessions.erase_with_receipt("acme", "u1")
    assert receipt.complete
    assert receipt.erased["logs"] == 1
    assert await store.aget_keys() == []


async def test_the_list_of_all_conversations_shows_its_beginning_and_its_last_message(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/stm.db"
    async with open_backend(url) as backend:
        await ours(backend).aset_messages("chat", said("A red bike", "Noted."))
    async with open_backend(url) as backend:
        (found,) = (await backend.conversations.list("acme", "u1")).cards
        assert (found.key, found.kinds, found.turns) == (KEY, ("llama-index",), 2)
        assert (found.title, found.preview) == ("A red bike", "Noted.")


async def test_what_is_stored_is_copied_and_sealed_as_everything_is(tmp_path: Path) -> None:
    urls = [f"sqlite:///{tmp_path}/{name}.db" for name in ("one", "two")]
    async with open_backend(urls[0], sealing=SEALING) as backend:
        await ours(backend).aset_messages("chat", said("MARKER", "b"))
        await ours(backend).adelete_message("chat", 1)
    # As it is stored, without the keys.
    async with open_backend(urls[0]) as one, open_backend(urls[1]) as two:
        copying = Copy(one.driver, two.driver, [Owner("acme")])
        await copying.copy()
        await copying.verify()
        assert copying.ok
    async with open_backend(urls[1], sealing=SEALING) as backend:
        assert await texts(ours(backend)) == ["MARKER"]
    stored = await asyncio.to_thread(lambda: [file.read_bytes() for file in tmp_path.iterdir()])
    assert not any(b"MARKER" in file for file in stored)


async def test_an_outage_is_never_an_empty_conversation(tmp_path: Path) -> None:
    backend = open_backend(f"sqlite:///{tmp_path}/stm.db")
    async with backend:
        store = ours(backend)
        await store.async_add_message("chat", ChatMessage("a"))
    for work in (
        store.aget_messages("chat"),
        store.aset_messages("chat", said("b")),
        store.async_add_message("chat", ChatMessage("b")),
        store.adelete_messages("chat"),
        store.adelete_message("chat", 0),
        store.adelete_last_message("chat"),
        store.aget_keys(),
    ):
        with pytest.raises(Unavailable):
            await work
