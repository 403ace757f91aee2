"""The envelope: what was sealed is what is opened, by this version, an older or a newer one."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import sys
import traceback
import tracemalloc
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stm_backends.errors import ConfigurationError, Corrupt, InvalidState, TooLarge
from stm_backends.plain_json import require_json
from stm_backends.records import codec as codec_module
from stm_backends.records.body import Body, Forgotten
from stm_backends.records.codec import (
    Codec,
    EnvelopeKind,
    Transform,
    dump_body,
    dump_turn,
    load_body,
    load_turn,
)
from stm_backends.records.compression import Zlib, Zstd
from stm_backends.records.steps import STEP, run_now
from stm_backends.types import ConversationTurn, MemoryHealth, StoredTurn, TrajectoryDigest

CODEC = Codec()


text = st.text(st.characters(codec=None))
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=8,
)
turns = st.builds(
    ConversationTurn,
    user_message=text,
    assistant_response=text,
    trajectory_digest=st.none()
    | st.builds(
        TrajectoryDigest,
        tools_invoked=st.lists(text, max_size=3),
        observations_summary=text,
        reasoning_summary=st.none() | text,
        artifacts_refs=st.lists(text, max_size=3),
    ),
    artifacts_shown=st.dictionaries(text, json_values, max_size=3),
    artifacts_hidden_refs=st.lists(text, max_size=3),
    ts=st.floats(0, 1e11, exclude_max=True),
)
bodies = st.builds(
    Body,
    summary=text,
    health=st.sampled_from([MemoryHealth.HEALTHY, MemoryHealth.RETRY, MemoryHealth.DEGRADED]),
    attempts=st.integers(min_value=0),
    next_attempt_at=st.floats(allow_nan=False),
    folded=st.integers(min_value=0),
    dropped=st.integers(min_value=0),
    forgotten=st.lists(st.lists(text, min_size=1, max_size=3), max_size=3).map(
        lambda folds: _forgotten([[f"{number}{name}" for name in fold] for number, fold in enumerate(folds)])
    ),
    extra=st.dictionaries(text.map("newer {}".format), json_values, max_size=3),
)


def _forgotten(folds: list[list[str]]) -> Forgotten:
    forgotten = Forgotten()
    for number, names in enumerate(folds):
        forgotten = forgotten.adding(names, now=float(number), keep_for=60.0)
    return forgotten


class Rot:
    name = "rot-13"

    def encode(self, data: bytes) -> bytes:
        return bytes((byte + 13) % 256 for byte in data)

    def decode(self, data: bytes, limit: int = 0) -> bytes:
        return bytes((byte - 13) % 256 for byte in data)


CODECS = [
    Codec(),
    Codec([Zlib(threshold=1)]),
    Codec([Zlib(threshold=1), Rot()]),
    Codec([Rot(), Zlib(threshold=1)]),
]


@given(turn=turns, turn_id=text, codec=st.sampled_from(CODECS))
def test_a_turn_comes_back_with_every_field(turn: ConversationTurn, turn_id: str, codec: Codec) -> None:
    assert codec.open_turn(codec.seal_turn(StoredTurn(turn_id, turn))) == StoredTurn(turn_id, turn)


@given(turns, text, st.dictionaries(st.text().map("x-{}".format), st.none() | text | st.floats()))
def test_a_sealed_turn_is_the_turn_as_json_without_empty_fields(
    turn: ConversationTurn, turn_id: str, extra: dict[str, Any]
) -> None:
    stored = StoredTurn(turn_id, turn, extra)
    always = {"turn_id", "user_message", "assistant_response", *extra}
    content = {name: value for name, value in dump_turn(stored).items() if name in always or value}
    assert CODEC.seal_turn(stored) == CODEC.seal("turn", content)


@given(body=bodies, codec=st.sampled_from(CODECS))
def test_a_body_comes_back_with_every_field_and_those_of_a_newer_version(body: Body, codec: Codec) -> None:
    assert codec.open_body(codec.seal_body(body)) == body


@given(bodies)
def test_a_body_survives_being_a_document(body: Body) -> None:
    assert load_body(json.loads(json.dumps(dump_body(body)))) == body


@given(turns, text)
def test_a_turn_survives_being_in_a_state(turn: ConversationTurn, turn_id: str) -> None:
    dumped = dump_turn(StoredTurn(turn_id, turn))
    assert dumped["turn_id"] == turn_id
    assert load_turn(json.loads(json.dumps(dumped))) == turn


def test_a_sealed_turn_leaves_out_what_is_empty() -> None:
    sealed = CODEC.seal_turn(StoredTurn("id", ConversationTurn("hi", "")))
    assert sealed == b'stm/1 turn\n{"turn_id":"id","user_message":"hi","assistant_response":""}'


def test_what_is_sealed_is_a_copy() -> None:
    turn = ConversationTurn("a", "b", artifacts_shown={"x": [1]})
    sealed = CODEC.seal_turn(StoredTurn("id", turn))
    turn.artifacts_shown["x"].append(2)
    assert CODEC.open_turn(sealed).turn.artifacts_shown == {"x": [1]}


HIGH, LOW = "\ud83d", "\ude00"


@pytest.mark.parametrize("text", [HIGH + LOW, LOW + HIGH, HIGH + HIGH, HIGH, LOW, "\U0001f600", "a\0b"])
def test_surrogates_are_kept_unchanged(text: str) -> None:
    state = CODEC.open("state", CODEC.seal("state", {"text": text, text: 1}))
    assert list(state["text"]) == list(text)
    assert list(state) == ["text", text]


# Other versions


def test_no_record_yet_is_an_empty_body() -> None:
    assert CODEC.open_body(None) == Body()


def test_a_body_of_an_older_version_without_newer_fields_is_read() -> None:
    assert CODEC.open_body(b"stm/1 body\n{}") == Body()
    old = CODEC.open_body(b'stm/1 body\n{"summary":"so far","health":"degraded"}')
    assert old == Body(summary="so far", health=MemoryHealth.DEGRADED)


def test_fields_of_a_newer_version_survive_a_rewrite() -> None:
    newer = CODEC.seal("body", {"summary": "so far", "mood": {"a": [1, None]}, "forgotten": {"digests": ","}})
    body = CODEC.open_body(newer)
    assert body.extra == {"mood": {"a": [1, None]}}
    assert CODEC.open("body", CODEC.seal_body(body))["mood"] == {"a": [1, None]}


def test_a_field_of_ours_is_never_taken_from_the_extra_ones() -> None:
    body = Body(summary="ours", extra={"summary": "theirs"})
    assert CODEC.open_body(CODEC.seal_body(body)).summary == "ours"


def test_a_turn_of_a_newer_version_is_read() -> None:
    entry = CODEC.seal("turn", {"turn_id": "t", "user_message": "u", "assistant_response": "a", "mood": 1})
    assert CODEC.open_turn(entry) == StoredTurn("t", ConversationTurn("u", "a"))


@pytest.mark.parametrize("version", ["stm/2", "stm/10", "stm/0", "stm/", "stm/1.1", "stm/x"])
@pytest.mark.parametrize("kind", ["turn", "body", "state"])
def test_another_major_version_is_refused(version: str, kind: Any) -> None:
    with pytest.raises(Corrupt, match="another version"):
        CODEC.open(kind, f"{version} {kind}\n{{}}".encode())


@pytest.mark.parametrize(
    "envelope",
    [
        b"",
        b"\n",
        b"stm/1 state",
        b"{}",
        b"\xff\xfe\n{}",
        b"stm/1\n{}",
        b"stm/1 \n{}",
        b"stm/1 turn\n{}",
        b"stm/1 state\n",
        b"stm/1 state\n[]",
        b"stm/1 state\n{",
        b"stm/1 state\n\xff",
        b"stm/1 state \n{}",
    ],
)
def test_bytes_that_are_no_envelope_are_refused(envelope: bytes) -> None:
    with pytest.raises(Corrupt):
        CODEC.open("state", envelope)


@given(st.binary(max_size=60))
def test_any_bytes_are_read_or_refused_and_nothing_else(data: bytes) -> None:
    for envelope in (data, b"stm/1 body\n" + data, b"stm/1 turn\n" + data):
        for read in (CODEC.open_body, CODEC.open_turn):
            with contextlib.suppress(Corrupt):
                read(envelope)


@pytest.mark.parametrize(
    "content",
    [
        {"health": "superb"},
        {"health": None},
        {"attempts": "many"},
        {"attempts": None},
        {"folded": float("inf")},
        {"next_attempt_at": []},
        {"forgotten": 3},
        {"forgotten": {"ages": 3}},
        {"forgotten": {"ages": [[1]]}},
        {"forgotten": {"ages": [["x", "y"]]}},
    ],
)
def test_a_body_with_a_field_of_another_type_is_refused(content: dict[str, Any]) -> None:
    with pytest.raises(Corrupt):
        CODEC.open_body(CODEC.seal("body", content))


@pytest.mark.parametrize(
    "content", [{}, {"turn_id": 1}, {"turn_id": "t", "trajectory_digest": 3}, {"turn_id": None}]
)
def test_an_invalid_turn_raises(content: dict[str, Any]) -> None:
    with pytest.raises(Corrupt):
        CODEC.open_turn(CODEC.seal("turn", content))


# Transforms


def test_transforms_are_applied_in_order_and_undone_in_reverse() -> None:
    sealed = Codec([Zlib(threshold=1), Rot()]).seal("state", {"a": "x" * 1000})
    line, _, data = sealed.partition(b"\n")
    assert line == b"stm/1 state zlib rot-13"
    assert zlib.decompress(Rot().decode(data)) == b'{"a":"%s"}' % (b"x" * 1000)


def test_what_was_stored_before_a_transform_came_is_still_read() -> None:
    sealed = CODEC.seal("state", {"a": 1})
    assert Codec([Zlib(threshold=1)]).open("state", sealed) == {"a": 1}
    longer = {"a": "x" * 1000}
    compressed = Codec([Zlib(threshold=1)]).seal("state", longer)
    assert Codec([Rot(), Zlib(threshold=1)]).open("state", compressed) == longer


def test_a_transform_that_is_not_here_is_named() -> None:
    with pytest.raises(Corrupt, match="'zlib'"):
        CODEC.open("state", Codec([Zlib(threshold=1)]).seal("state", {"a": "x" * 1000}))


@pytest.mark.parametrize(
    "data", [b"not compressed", zlib.compress(b"{}")[:-1], zlib.compress(b"{}") + b"x", b""]
)
def test_bytes_that_a_transform_cannot_read_are_corrupt(data: bytes) -> None:
    with pytest.raises(Corrupt, match="'zlib'"):
        Codec([Zlib()]).open("state", b"stm/1 state zlib\n" + data)


@pytest.mark.parametrize(
    "names",
    [b"zlib zlib", b"zlib zlib zlib", b"rot-13 zlib rot-13", b"rot-13 zlib", b"zlib ", b"zlib  rot-13"],
)
def test_an_envelope_cannot_choose_its_transforms(names: bytes) -> None:
    data = b"{}"
    for name in names.split():
        data = zlib.compress(data) if name == b"zlib" else Rot().encode(data)
    with pytest.raises(Corrupt, match="transform"):
        Codec([Zlib(), Rot()]).open("state", b"stm/1 state " + names + b"\n" + data)


def test_a_bomb_is_refused_before_it_fills_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec_module, "LARGEST_CONTENT", 100_000)
    bomb = b"stm/1 state zlib\n" + zlib.compress(b'{"a":"' + b"x" * 50_000_000 + b'"}')
    tracemalloc.start()
    try:
        with pytest.raises(Corrupt, match="'zlib'"):
            Codec([Zlib()]).open("state", bomb)
        assert tracemalloc.get_traced_memory()[1] < 2_000_000
    finally:
        tracemalloc.stop()
    with pytest.raises(TooLarge):
        Codec([Zlib()]).seal("state", {"a": "x" * 100_000})


def test_a_transform_that_ignores_its_limit_is_refused_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec_module, "LARGEST_CONTENT", 10)
    with pytest.raises(Corrupt, match="rot-13"):
        Codec([Rot()]).open("state", b"stm/1 state rot-13\n" + Rot().encode(b'{"a": "longer"}'))


def test_small_and_incompressible_values_are_stored_as_they_are() -> None:
    codec = Codec([Zlib(threshold=100)])
    for content in ({"a": "x" * 10}, {"a": base64.b64encode(bytes(os.urandom(90))).decode()}):
        assert codec.seal("state", content) == CODEC.seal("state", content)
    assert codec.seal("state", {"a": "x" * 200}).startswith(b"stm/1 state zlib\n")


@pytest.mark.parametrize("options", [{"level": 0}, {"level": 10}, {"threshold": -1}, {"threshold": "1"}])
def test_settings_of_compression_that_cannot_work_are_refused(options: Any) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(options))):
        Zlib(**options)


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="has the module")
def test_zstandard_says_which_python_it_needs() -> None:
    with pytest.raises(ConfigurationError, match=r"3\.14"):
        Zstd()


@pytest.mark.skipif(sys.version_info < (3, 14), reason="Zstandard is in the standard library from 3.14 on")
def test_zstandard_compresses_within_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    codec = Codec([Zstd()])
    content = {"a": "x" * 100_000}
    sealed = codec.seal("state", content)
    assert len(sealed) < 1_000
    assert codec.open("state", sealed) == content
    monkeypatch.setattr(codec_module, "LARGEST_CONTENT", 1_000)
    with pytest.raises(Corrupt, match="'zstd'"):
        codec.open("state", sealed)


# Depth, and what errors show


@pytest.mark.parametrize("kind", ["turn", "state"])
def test_what_is_nested_too_deeply_to_be_written_again_is_corrupt(kind: EnvelopeKind) -> None:
    for depth in (100, 120, 130, 900):
        value = b"[" * depth + b"]" * depth
        envelope = b"stm/1 " + kind.encode() + b'\n{"artifacts_shown":' + value + b"}"
        if depth > (100 if kind == "turn" else 119):
            with pytest.raises(Corrupt):
                CODEC.open(kind, envelope)
        else:
            assert CODEC.open(kind, envelope)


@pytest.mark.parametrize(
    "envelope",
    [
        b'stm/1 body\n{"next_attempt_at": "my HIV test"}',
        b'stm/1 body\n{"health": "my HIV test"}',
        b'stm/1 body\n{"attempts": "my HIV test"}',
        b'stm/1 body\n{"summary": "my HIV test"',
    ],
)
def test_no_error_shows_stored_text_in_its_traceback(envelope: bytes) -> None:
    with pytest.raises(Corrupt) as found:
        CODEC.open_body(envelope)
    assert "HIV" not in "".join(traceback.format_exception(found.value))


@pytest.mark.parametrize("name", ["", "two words", "new\nline", "é", "-", "a/b"])
def test_a_transforms_name_must_fit_on_the_first_line(name: str) -> None:
    transform: Transform = Zlib(threshold=1)
    transform.name = name  # type: ignore[misc]
    with pytest.raises(ConfigurationError):
        Codec([transform])


# What is JSON


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ({"a": {"b": [0, {1: 2}]}}, r"^turn\.a\.b\[1\] has a key"),
        ((0, (1, b"")), r"^turn\[1\]\[1\] is bytes"),
        (object(), "^turn is object"),
    ],
)
def test_what_is_not_json_is_refused_with_its_path(value: object, path: str) -> None:
    with pytest.raises(InvalidState, match=path):
        require_json(value, "turn")


def run_out_of_stack(work: Callable[[], object]) -> None:
    """Run in a thread of its own: what uses up a thread's stack ends the measuring of coverage there."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(work).result()


def test_what_is_nested_without_end_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(InvalidState, match="nested"):
        run_out_of_stack(lambda: require_json(loop, "turn"))


def test_stored_bytes_that_are_nested_without_end_are_refused() -> None:
    with pytest.raises(Corrupt):
        run_out_of_stack(lambda: CODEC.open("state", b"stm/1 state\n" + b"[" * 200_000))


@pytest.mark.parametrize("transforms", ["gzip", None, 7, ["gzip"], [Rot], [Rot(), Rot()]])
def test_an_invalid_list_of_transforms_raises(transforms: Any) -> None:
    with pytest.raises(ConfigurationError, match="transform"):
        Codec(transforms)


def test_the_limit_on_depth_does_not_depend_on_the_caller() -> None:
    value: Any = []
    for _ in range(119):
        value = [value]
    require_json(value, "state")
    for deeper in ([value], {"a": value}, ([value],)):
        with pytest.raises(InvalidState, match=r"state.* is nested too deeply"):
            require_json(deeper, "state")
    value.append(value)
    with pytest.raises(InvalidState, match="contains itself"):
        require_json(value, "state")


def test_a_turn_whose_id_is_not_a_string_is_never_written() -> None:
    with pytest.raises(InvalidState, match="turn_id"):
        Codec().seal_turn(StoredTurn(cast("str", 7), ConversationTurn("u", "a")))


# In steps


TRICKY = st.text('a"\\\u00e4\ud800,:[]{}', max_size=5)
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TRICKY,
    lambda inner: st.lists(inner) | st.dictionaries(TRICKY, inner),
)

# Longer than one step.
MANY = st.lists(st.integers() | TRICKY, max_size=200)


@given(st.dictionaries(st.text('a":[{\ud800', max_size=4), ANYTHING | MANY))
def test_steps_seal_and_open_what_is_sealed_and_opened_at_once(content: dict[str, Any]) -> None:
    codec = Codec()
    envelope = run_now(codec.seal_steps("state", content))
    assert envelope == codec.seal("state", content)
    assert run_now(codec.open_steps("state", envelope)) == codec.open("state", envelope)


@given(TRICKY | st.builds(json.dumps, ANYTHING, indent=st.sampled_from([None, 1])))
def test_steps_open_any_bytes_as_they_are_opened_at_once(text: str) -> None:
    codec, envelope = Codec(), b"stm/1 state\n" + text.encode("utf-8", "surrogatepass")
    try:
        expected = codec.open("state", envelope)
    except Corrupt:
        with pytest.raises(Corrupt):
            run_now(codec.open_steps("state", envelope))
    else:
        assert run_now(codec.open_steps("state", envelope)) == expected


def test_steps_refuse_what_is_not_json_with_its_path() -> None:
    codec, deep = Codec(), []
    for _ in range(120):
        deep = [deep]
    for content, path in (
        ({"a": {"b": object()}}, "state.a.b"),
        ({"a": [1, {"b": {1: 2}}]}, r"state\.a\[1\]\.b"),
        ({"a": deep}, "state.a"),
        ({"a": {"b": deep}}, "state.a"),
        ({1: 2}, "state has a key"),
    ):
        with pytest.raises(InvalidState, match=path):
            run_now(codec.seal_steps("state", content))  # type: ignore[arg-type]


def test_a_long_list_is_many_steps() -> None:
    codec, content = Codec(), {"turns": [{"n": number} for number in range(10 * STEP)]}
    assert sum(1 for _ in codec.seal_steps("state", content)) == 10
    assert sum(1 for _ in codec.open_steps("state", codec.seal("state", content))) == 10
