"""Whatever bytes a datastore holds, reading them ends with a value or a `StorageError`."""

from __future__ import annotations

import asyncio
import io
import json
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stm_backends.backend import Backend
from stm_backends.cli.exports import ExportFile, FileLimits
from stm_backends.drivers.contract import ANY, Key, Record, new_version
from stm_backends.drivers.in_memory import MemoryDriver, MemoryStore
from stm_backends.errors import Corrupt, StmError, StorageError
from stm_backends.history import items
from stm_backends.memory.shared.snapshot import Snapshot
from stm_backends.memory.speech import waits_for_answer
from stm_backends.memory.units import page_json, stored_unit
from stm_backends.records import keys
from stm_backends.records.body import Body
from stm_backends.records.codec import Codec
from stm_backends.records.large.pointers import MARK, open_part, open_pointer
from stm_backends.records.steps import run_now
from stm_backends.sealing.data_keys import EnvelopeKeys
from stm_backends.sealing.keys import Owner
from stm_backends.testing.memory_contract import config
from stm_backends.types import ConversationTurn, MemoryKey, StoredTurn

CODEC = Codec()
KEY = MemoryKey("acme", "u1", "chat")
CONFIG = config("rolling_summary")

FIELDS = st.sampled_from(
    (
        *("turn_id", "user_message", "assistant_response", "trajectory_digest", "artifacts_shown", "ts"),
        *("artifacts_hidden_refs", "tools_invoked", "observations_summary", "summary", "health", "attempts"),
        *(
            "next_attempt_at",
            "folded",
            "dropped",
            "forgotten",
            "digests",
            "ages",
            "lease",
            "overdue",
            "id",
            "add",
            "pop",
        ),
        *("items", "popped", "primary", "keys", "size", "digest", "parts", "ttl", "at", "format", "version"),
        *("key", "body", "turns", "tenant_id", "user_id", "session_id"),
    )
)

MESSAGE_FIELDS = st.sampled_from(
    (
        *("role", "type", "content", "text", "data", "parts", "kind", "tool_calls", "tool_call_id", "name"),
        *("arguments", "output", "call_id", "input", "id", "function", "refusal", "source", "audio"),
    )
)

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from((0, 1, -1, 10**400, -(10**400), 2**63, float("inf"), float("nan"), 1e308, -0.0)),
    st.sampled_from(("healthy", "degraded", ",", ",a,", "stm-session", "\ud800", "\0", "1", "k1")),
    st.text(max_size=5),
)

VALUES = st.recursive(
    SCALARS,
    lambda below: (
        st.lists(below, max_size=3) | st.dictionaries(FIELDS | st.text(max_size=3), below, max_size=4)
    ),
    max_leaves=12,
)

OBJECTS = st.dictionaries(FIELDS, VALUES, max_size=8)

KINDS = ("turn", "body", "state", "user", "items", "log", "keys", "vertex", "edge", "postings", "heads")


def nested(depth: int) -> bytes:
    """Return the JSON of an object that is nested as deeply."""
    return b'{"turn_id":"t","artifacts_shown":' + b'{"a":' * depth + b"1" + b"}" * depth + b"}"


def encoded(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")


ENVELOPES = st.one_of(
    st.binary(max_size=40),
    st.builds(
        lambda kind, value: f"stm/1 {kind}\n".encode() + encoded(value), st.sampled_from(KINDS), OBJECTS
    ),
    st.builds(
        lambda kind, data: f"stm/1 {kind}\n".encode() + data, st.sampled_from(KINDS), st.binary(max_size=20)
    ),
)


def of_kind(kind: str) -> st.SearchStrategy[bytes]:
    """Return bytes that are often an envelope of this kind."""
    return ENVELOPES | OBJECTS.map(lambda value: f"stm/1 {kind}\n".encode() + encoded(value))


def reads(read: Callable[[], object]) -> None:
    """Read; an error other than `StorageError` fails the test, and so does a chain that quotes the cause."""
    said: list[str] = []
    try:
        read()
    except StorageError as error:
        said = traceback.format_exception(error)
    assert "The above exception was the direct cause" not in "".join(said)


@given(of_kind("turn"))
def test_a_stored_turn_is_read_or_corrupt(entry: bytes) -> None:
    reads(lambda: Snapshot.of(Record("v", None, (entry,)), CODEC).view(CONFIG).patch())


@given(of_kind("body"), st.booleans())
def test_a_stored_body_is_read_or_corrupt(body: bytes, with_turn: bool) -> None:
    tail = (CODEC.seal_turn(StoredTurn("t", ConversationTurn("u", "a"))),) if with_turn else ()

    def read() -> None:
        snapshot = Snapshot.of(Record("v", body, tail), CODEC)
        snapshot.view(CONFIG).patch()
        CODEC.seal_body(snapshot.body)

    reads(read)


TYPES = st.sampled_from(("user", "assistant", "tool", "system", "tool_use", "tool_result", "text", "human"))

MESSAGES = st.builds(
    lambda entry, more: {"id": "x", "add": entry, **more},
    st.lists(st.dictionaries(MESSAGE_FIELDS, VALUES | TYPES, max_size=5), max_size=4),
    st.dictionaries(st.sampled_from(("at", "begins", "cut", "usage")), VALUES, max_size=3),
)


@given(of_kind("items") | MESSAGES.map(lambda value: b"stm/1 items\n" + encoded(value)), OBJECTS)
def test_stored_messages_are_read_or_corrupt(entry: bytes, body: dict[str, object]) -> None:
    told = {**body, "messages": True}

    def read() -> None:
        record = Record("v", b"stm/2 conversation\n" + encoded(told), (entry,))
        snapshot = Snapshot.of(record, CODEC)
        snapshot.view(CONFIG).patch()
        waits_for_answer(snapshot.turns)
        CODEC.seal_body(snapshot.body)
        for unit in snapshot.turns:
            assert stored_unit(json.loads(page_json(CODEC, unit, entry))) == unit

    reads(read)


@given(of_kind("items"), of_kind("log") | st.none())
def test_a_stored_log_is_read_or_corrupt(entry: bytes, body: bytes | None) -> None:
    def read() -> None:
        log = items.read(Record("v", body, (entry,)), CODEC)
        items.seal_folded(log.fold(log.length, now=1.0, keep_for=60.0), CODEC)

    reads(read)


@given(of_kind("state"))
def test_a_stored_state_is_read_or_corrupt(body: bytes) -> None:
    reads(lambda: run_now(CODEC.open_steps("state", body)))


@given(OBJECTS.map(encoded) | st.binary(max_size=60))
def test_a_pointer_and_a_part_are_read_or_corrupt(data: bytes) -> None:
    reads(lambda: open_pointer(MARK + data))
    for header in (data, b"stm/1 part\n" + data, MARK + data):
        reads(lambda header=header: open_part(header))


@given(st.text("%0123456789ABCDEFabcxyz:", max_size=12))
def test_a_stored_name_is_read_or_corrupt(name: str) -> None:
    reads(lambda: keys.unname(name))
    reads(lambda: keys.owner_of(f"{name}:u:memory"))


@given(of_kind("keys"))
@settings(max_examples=50)
def test_stored_data_keys_are_read_or_corrupt(body: bytes) -> None:
    pytest.importorskip("cryptography")

    class Plain:
        async def wrap(self, secret: bytes, owner: Owner, key_id: str) -> bytes:
            del owner, key_id
            return secret

        async def unwrap(self, wrapped: bytes, owner: Owner, key_id: str) -> bytes:
            del owner, key_id
            return wrapped

    async def read() -> None:
        driver = MemoryDriver(MemoryStore())
        await driver.open()
        await driver.replace(keys.data_keys_key("acme", "u1"), body, version="v", expect=ANY, ttl=None)
        await EnvelopeKeys(driver, Plain()).primary(Owner("acme", "u1"))

    reads(lambda: asyncio.run(read()))


def exported(line: bytes) -> ExportFile:
    """Return a file of one line, as `import` reads it."""
    return ExportFile("file", io.StringIO(line.decode("utf-8", "replace")), limits=FileLimits(), only=None)


@given(OBJECTS.map(encoded) | st.binary(max_size=40))
@settings(max_examples=50)
def test_a_line_of_an_import_is_read_or_a_typed_error(line: bytes) -> None:
    async def read() -> None:
        async with Backend(MemoryDriver(MemoryStore())) as backend:
            for one in exported(line):
                await backend.sessions.import_({"format": "stm-session", "version": 1, **one.document})

    with suppress(StmError):
        asyncio.run(read())


DEPTHS = (99, 100, 101, 102, 119, 120, 121, *range(960, 1_000), 5_000, 100_000)


@pytest.mark.parametrize("kind", KINDS)
def test_nesting_of_any_depth_is_read_or_corrupt(kind: Any) -> None:
    for depth in DEPTHS:
        data = f"stm/1 {kind}\n".encode() + nested(depth)
        reads(lambda data=data: CODEC.open(kind, data))
        reads(lambda data=data: run_now(CODEC.open_steps(kind, data)))
        if depth > 120:
            with pytest.raises(Corrupt):
                CODEC.open(kind, data)


def test_a_pointer_nested_deeply_is_corrupt() -> None:
    for depth in DEPTHS:
        reads(lambda depth=depth: open_pointer(MARK + nested(depth)))
    with pytest.raises(Corrupt):
        open_pointer(MARK + b'{"id":"0","size":1e999,"digest":"","parts":1,"ttl":null}')


def test_a_pop_at_a_time_beyond_every_number_is_corrupt() -> None:
    entry = b'stm/1 items\n{"id":"a","pop":1%s}' % (b"0" * 400)
    with pytest.raises(Corrupt):
        items.read(Record("v", None, (entry,)), CODEC)


async def test_a_listing_meets_a_name_of_another_program() -> None:
    async with Backend(MemoryDriver(MemoryStore())) as backend:
        for name in ("%FF", "fine"):
            where = Key(keys.scope("acme", "u1", "memory"), name)
            await backend.driver.replace(
                where, CODEC.seal_body(Body()), version=new_version(), expect=ANY, ttl=None
            )
        with pytest.raises(Corrupt, match="name"):
            [key async for key in backend.sessions.list("acme", "u1")]
        assert await backend.sessions.erase_user("acme", "u1") == 2


def test_hostile_lines_of_a_file_are_typed_errors() -> None:
    for line in (b'{"a":' * 100_000, b"[" * 990, b"1" * 5_000, b'"\\ud800"', b"NaN", b"\xff"):
        with pytest.raises(StmError):
            exported(line)
