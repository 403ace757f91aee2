r"""From turns, bodies and states to bytes, and back: one versioned envelope around JSON.

```
stm/1 turn\n{"id":"...","user_message":"...", ...}
stm/1 turn zlib\n<what the transform named zlib made of that JSON>
```

The first line names the format's major version, the kind of content, and the applied transforms. A
major version or a transform that this process does not know, and bytes that are not an envelope, raise
`Corrupt`, so nothing is rewritten that could not be read. JSON is UTF-8 with lone surrogates kept (as
`surrogatepass`), so text is restored exactly.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from json.encoder import encode_basestring as _quoted
from typing import Any, Final, Literal, Protocol, TypeAlias, cast, get_args

from stm_backends.errors import ConfigurationError, Corrupt, InvalidState, SealMismatch, TooLarge, Unavailable
from stm_backends.handed_in import Report, WrongType, call_now, described, ignore
from stm_backends.plain_json import (
    DEEPEST,
    DEEPEST_IN_TURN,
    below,
    decode_json,
    encode_json,
    encoded,
    is_deeper,
    raw_decode,
    require_json,
)
from stm_backends.records import usage
from stm_backends.records.body import (
    Body,
    Branch,
    Forgotten,
    Fork,
    Lease,
    Overdue,
    Patch,
    Transcript,
    as_title,
)
from stm_backends.records.steps import STEP, Steps
from stm_backends.types import ConversationTurn, MemoryHealth, StoredTurn, TrajectoryDigest, seconds_of

FORMAT: Final = 1
"""The major version that this library writes, and the only one that it reads, except for `_NEWER`."""

_NEWER: Final = {"paged-log": 2, "conversation": 2, "items-after": 2, "binary-state": 2}
"""The kinds with another major version: older versions of this library must neither show nor change them.

A `conversation` is the body of a conversation that has had messages. A `binary-state` has bytes (`binary`).
"""

LARGEST_CONTENT: Final = 256 * 1024 * 1024
"""Maximum bytes of JSON in a transformed envelope, so that few stored bytes cannot fill the memory."""

EnvelopeKind: TypeAlias = Literal[
    "turn",
    "body",
    "conversation",
    "state",
    "binary-state",
    "user",
    "items",
    "items-after",
    "log",
    "paged-log",
    "keys",
    "seal",
    "vertex",
    "edge",
    "postings",
    "heads",
    "page",
    "card",
    "recent",
    "portion",
    "note",
    "work",
]


class Transform(Protocol):
    """A compression of the bytes before they are stored.

    A transform sees neither the key nor the kind of the bytes, so it cannot encrypt safely. To encrypt,
    use `Sealing`.
    """

    @property
    def name(self) -> str:
        """A word of ASCII letters, digits and `-`, stored with the bytes; its meaning must never change."""
        ...

    def encode(self, data: bytes, /) -> bytes | None:
        """Return the bytes to store, or `None` to store `data` as it is."""
        ...

    def decode(self, data: bytes, limit: int, /) -> bytes:
        """Return what `encode` received. Raises any exception, early, if that is more than `limit` bytes."""
        ...


class Codec:
    """Writes JSON objects as envelopes and reads them.

    Writing applies the `transforms` in order; reading undoes those that the envelope names. An envelope names
    each at most once, in the order of the list. `failed` receives the failures of transforms.
    """

    def __init__(self, transforms: Sequence[Transform] = (), failed: Report = ignore) -> None:
        self._transforms = _by_name(transforms)
        self._failed = failed
        self._headers = {kind: f"{_major(kind)} {kind}\n".encode("ascii") for kind in get_args(EnvelopeKind)}

    def after(self, first: Transform) -> Codec:
        """Return the codec that applies this transform before all others."""
        return Codec((first, *self._transforms.values()), self._failed)

    def seal(self, kind: EnvelopeKind, content: Mapping[str, Any]) -> bytes:
        """Return the envelope of one JSON object whose values `require_json` has accepted."""
        return self.seal_encoded(kind, encode_json(content))

    def seal_steps(self, kind: EnvelopeKind, content: Mapping[str, Any]) -> Steps[bytes]:
        """Check like `require_json` and seal like `seal`, in steps."""
        return self.seal_encoded(kind, (yield from _encode_steps(content, kind)))

    def seal_encoded(self, kind: EnvelopeKind, data: bytes) -> bytes:
        """Return the envelope of one JSON object that is encoded already."""
        if not self._transforms:
            return self._headers[kind] + data
        if len(data) > LARGEST_CONTENT:
            raise TooLarge("entry", size=len(data), limit=LARGEST_CONTENT)
        header = self._headers[kind][:-1]
        for name, transform in self._transforms.items():
            try:
                encoded = call_now(transform.encode, data)
                if encoded is not None:
                    encoded = _as_bytes(encoded, "bytes or None")
            except Exception as error:
                self._failed("transform", error)
                raise Unavailable(
                    f"the transform {name!r} failed ({described(error)}); nothing was written"
                ) from error
            if encoded is not None:
                data, header = encoded, header + b" " + name.encode("ascii")
        return header + b"\n" + data

    def open(self, kind: EnvelopeKind, envelope: bytes) -> dict[str, Any]:
        """Return the JSON object in an envelope. Raises `Corrupt` if it cannot be read."""
        data = self.open_encoded(kind, envelope)
        try:
            content = decode_json(data)
        except (ValueError, RecursionError):
            raise Corrupt(f"the stored {kind} is not JSON") from None
        return _as_object(kind, content, data)

    def open_steps(self, kind: EnvelopeKind, envelope: bytes) -> Steps[dict[str, Any]]:
        """Open an envelope like `open`, in steps."""
        data = self.open_encoded(kind, envelope)
        try:
            content = yield from _decode_steps(data)
        except (ValueError, RecursionError):
            raise Corrupt(f"the stored {kind} is not JSON") from None
        return _as_object(kind, content, data)

    def open_encoded(self, kind: EnvelopeKind, envelope: bytes) -> bytes:
        """Return the JSON in an envelope, which is not decoded. Raises `Corrupt` if it cannot be read."""
        header = self._headers[kind]
        if envelope.startswith(header):
            return envelope[len(header) :]
        data, transforms = self._read_header(kind, envelope)
        for name in reversed(transforms):
            try:
                data = _as_bytes(call_now(self._transforms[name].decode, data, LARGEST_CONTENT), "bytes")
            except Exception as error:
                self._failed("transform", error)
                raise Corrupt(
                    f"the transform {name!r} could not read the stored bytes ({described(error)})"
                ) from error
            if len(data) > LARGEST_CONTENT:
                raise Corrupt(f"the transform {name!r} returned more than it may")
        return data

    def _read_header(self, kind: EnvelopeKind, envelope: bytes) -> tuple[bytes, list[str]]:
        """Return the bytes after the first line, and the transforms that it names."""
        line, newline, data = envelope.partition(b"\n")
        words = line.decode("ascii", "replace").split(" ")
        if not newline or not words[0].startswith("stm/"):
            raise Corrupt("the stored bytes are not an envelope of this library")
        if words[:2] == ["stm/2", "sealed"]:
            raise SealMismatch(
                "the stored bytes are sealed; open the backend with the sealing that wrote them"
            )
        if words[0] != _major(kind):
            raise Corrupt(
                f"stored in format {words[0].removeprefix('stm/')!r} by another version of this library; "
                f"this one reads format {FORMAT} and leaves it untouched"
            )
        if words[1:2] != [kind]:
            raise Corrupt(f"the stored bytes hold a {' '.join(words[1:2])!r}, not a {kind!r}")
        for name in words[2:]:
            if name not in self._transforms:
                raise Corrupt(f"stored through the transform {name!r}, which this process does not have")
        if words[2:] != [name for name in self._transforms if name in words[2:]]:
            raise Corrupt("stored through transforms in another order than this process applies them")
        return data, words[2:]

    def is_of(self, kind: EnvelopeKind, envelope: bytes) -> bool:
        """Say whether an envelope claims to be of this kind."""
        return envelope.partition(b"\n")[0].split(b" ")[:2] == self._headers[kind].split()

    def seal_turn(self, stored: StoredTurn) -> bytes:
        """Return the entry of one turn. Raises `InvalidState` if it is not JSON."""
        return self.seal_encoded("turn", encode_turn(stored))

    def open_turn(self, entry: bytes) -> StoredTurn:
        """Return the turn of one entry. Raises `Corrupt` if it cannot be read."""
        return stored_turn(self.open("turn", entry))

    def seal_body(self, body: Body) -> bytes:
        """Return the bytes of a conversation's body, including fields of a newer version."""
        return self.seal("conversation" if body.messages else "body", dump_body(body))

    def open_body(self, data: bytes | None) -> Body:
        """Return a conversation's body; fields that an older version did not write have defaults."""
        if not data:
            return Body()
        kind = "conversation" if self.is_of("conversation", data) else "body"
        try:
            return load_body(self.open(kind, data))
        except ValueError:
            raise Corrupt("the stored body has a field of the wrong type") from None


def _major(kind: str) -> str:
    return f"stm/{_NEWER.get(kind, FORMAT)}"


def _as_object(kind: EnvelopeKind, content: object, data: bytes) -> dict[str, Any]:
    if not isinstance(content, dict):
        raise Corrupt(f"the stored {kind} is not a JSON object")
    deepest = DEEPEST_IN_TURN + 1 if kind == "turn" else DEEPEST
    # Counting is fast; only data with this many brackets are examined.
    if data.count(b"{") + data.count(b"[") > deepest and is_deeper(cast("object", content), deepest):
        raise Corrupt(f"the stored {kind} is nested more deeply than this version writes it")
    return cast("dict[str, Any]", content)


def _as_bytes(returned: object, expected: str) -> bytes:
    if not isinstance(returned, (bytes, bytearray, memoryview)):
        raise WrongType("it", returned, expected)
    return bytes(cast("bytes", returned))  # the same object if it is `bytes`


def _by_name(transforms: object) -> dict[str, Transform]:
    """Return transforms by name, in order. Raises `ConfigurationError` for invalid transforms."""
    if not isinstance(transforms, (list, tuple)):
        raise ConfigurationError(
            "transforms must be a list of objects with name, encode and decode; "
            f"not {type(transforms).__name__}"
        )
    found: dict[str, Transform] = {}
    for transform in cast("Sequence[object]", transforms):
        methods = (getattr(transform, "encode", None), getattr(transform, "decode", None))
        name: object = getattr(transform, "name", None)
        if isinstance(transform, type) or not (isinstance(name, str) and all(map(callable, methods))):
            raise ConfigurationError(
                "a transform must be an object with name, encode and decode; "
                f"not {'a class' if isinstance(transform, type) else type(transform).__name__}"
            )
        if not (name.isascii() and name.replace("-", "").isalnum()):
            raise ConfigurationError("a transform's name must consist of ASCII letters, digits and '-'")
        if name in found:
            raise ConfigurationError(f"two transforms have the name {name!r}")
        found[name] = cast("Transform", transform)
    return found


def stored_turn(content: Mapping[str, Any]) -> StoredTurn:
    """Return a turn as it was stored. Raises `Corrupt` if it cannot be read."""
    turn_id = content.get("turn_id")
    if not isinstance(turn_id, str):
        raise Corrupt("the stored turn has no id")
    try:
        return StoredTurn(turn_id, load_turn(content))
    except ValueError:
        raise Corrupt("the stored turn lacks a required field") from None


_BODY_FIELDS = (
    "summary",
    "health",
    "attempts",
    "next_attempt_at",
    "folded",
    "dropped",
    "forgotten",
    "lease",
    "overdue",
    "transcript",
    "messages",
    "lead",
    "asked",
    "usage",
    "title",
    "fork",
)


def dump_body(body: Body) -> dict[str, Any]:
    """Return a conversation's body as JSON, including fields of a newer version."""
    return {
        **body.extra,
        "summary": body.summary,
        "health": body.health.value,
        "attempts": body.attempts,
        "next_attempt_at": body.next_attempt_at,
        "folded": body.folded,
        "dropped": body.dropped,
        "forgotten": dump_forgotten(body.forgotten),
        **({"lease": list(body.lease)} if body.lease else {}),
        **({"overdue": list(body.overdue)} if body.overdue else {}),
        **({"transcript": dump_transcript(body.transcript)} if body.transcript else {}),
        **({"messages": True} if body.messages else {}),
        **({"lead": list(body.lead)} if body.lead else {}),
        **({"asked": body.asked} if body.asked is not None else {}),
        **({"usage": usage.dump(body.usage)} if body.usage else {}),
        **({"title": body.title} if body.title else {}),
        **({"fork": list(body.fork)} if body.fork is not None else {}),
    }


def load_body(content: Mapping[str, Any]) -> Body:
    """Return the body that this or an older version wrote. Raises `ValueError` if it is invalid."""
    try:
        forgotten, messages = load_forgotten(content.get("forgotten", {})), content.get("messages") is True
        return Body(
            summary=str(content.get("summary", "")),
            health=MemoryHealth(content.get("health", "healthy")),
            attempts=int(content.get("attempts", 0)),
            next_attempt_at=float(content.get("next_attempt_at", 0.0)),
            folded=int(content.get("folded", 0)),
            dropped=int(content.get("dropped", 0)),
            forgotten=forgotten,
            lease=None if content.get("lease") is None else Lease(*map(float, content["lease"])),
            overdue=None if content.get("overdue") is None else Overdue(*map(float, content["overdue"])),
            # Versions that drop without pages neither read nor change what has had messages.
            transcript=load_transcript(content.get("transcript"), None if messages else forgotten),
            messages=messages,
            lead=tuple(map(_object, content.get("lead", ()))),
            asked=None if content.get("asked") is None else _object(content["asked"]),
            usage=usage.load(content["usage"]) if "usage" in content else {},
            title=as_title(content.get("title")),
            fork=None if content.get("fork") is None else _fork(*content["fork"]),
            extra={name: value for name, value in content.items() if name not in _BODY_FIELDS},
        )
    except (TypeError, OverflowError):
        raise ValueError("a field of the body has the wrong type") from None


def _fork(of: object, to: object, entry: object) -> Fork:
    if not (isinstance(of, str) and isinstance(to, int) and isinstance(entry, str)):
        raise TypeError("a fork is a session, a number and an entry")
    return Fork(of, to, entry)


def _object(content: object) -> Mapping[str, Any]:
    if not isinstance(content, dict):
        raise TypeError("a message is an object")
    return cast("Mapping[str, Any]", content)


_TRANSCRIPT_FIELDS = ("epoch", "base", "last", "gap", "rev", "first", "branches", "patches")


def dump_transcript(transcript: Transcript) -> dict[str, Any]:
    """Return a transcript as JSON, without fields that are 0 or `None`."""
    optional = {"gap": transcript.gap, "rev": transcript.rev or None, "first": transcript.first or None}
    return {
        **transcript.extra,
        "epoch": transcript.epoch,
        "base": transcript.base,
        "last": transcript.last,
        **{name: value for name, value in optional.items() if value is not None},
        **({"branches": [one._asdict() for one in transcript.branches]} if transcript.branches else {}),
        **({"patches": [one._asdict() for one in transcript.patches]} if transcript.patches else {}),
    }


def load_transcript(content: Any, forgotten: Forgotten | None = None) -> Transcript | None:
    """Return the transcript in a body. Raises `ValueError` if it is invalid.

    `forgotten` are the remembered ids of a conversation; see `Transcript.recounted`.
    """
    if content is None:
        return None
    try:
        fields = cast("Mapping[str, Any]", content)
        gap = fields.get("gap")
        transcript = Transcript(
            epoch=str(fields["epoch"]),
            base=int(fields["base"]),
            last=str(fields.get("last", "")),
            gap=None if gap is None else int(gap),
            rev=int(fields.get("rev", 0)),
            first=int(fields.get("first", 0)),
            branches=tuple(
                Branch(int(one["rev"]), int(one["first"]), int(one["end"]), str(one["last"]))
                for one in fields.get("branches", ())
            ),
            patches=tuple(
                Patch(int(one["rev"]), int(one["number"]), _object(one["turn"]))
                for one in fields.get("patches", ())
            ),
            extra={name: value for name, value in fields.items() if name not in _TRANSCRIPT_FIELDS},
        )
        return transcript if forgotten is None else transcript.recounted(forgotten)
    except (KeyError, TypeError, AttributeError, OverflowError):
        raise ValueError("the transcript in the body is of the wrong type") from None


def dump_forgotten(forgotten: Forgotten) -> dict[str, Any]:
    """Return the remembered ids as JSON."""
    return {"digests": forgotten.digests, "ages": [list(age) for age in forgotten.ages]}


def load_forgotten(content: Any) -> Forgotten:
    """Return the remembered ids of a body. Raises `ValueError` if they are invalid."""
    try:
        digests = str(content.get("digests", ","))
        ages = tuple((float(when), int(count)) for when, count in content.get("ages", ()))
    except (TypeError, AttributeError, OverflowError):
        raise ValueError("the remembered ids are of the wrong type") from None
    if sum(count for _, count in ages) != max(0, digests.count(",") - 1):
        raise ValueError("the remembered ids do not match their ages")
    return Forgotten(digests, ages)


TURN_FIELDS: Final = (
    "turn_id",
    "user_message",
    "assistant_response",
    "trajectory_digest",
    "artifacts_shown",
    "artifacts_hidden_refs",
    "ts",
)
"""The fields of a saved turn; others belong to a newer version or another library."""


def dump_turn(stored: StoredTurn) -> dict[str, Any]:
    """Return a turn as JSON: PenguiFlow's fields, the id, and the fields in `extra`.

    Raises `InvalidState` for artifacts that are not JSON.
    """
    turn = stored.turn
    optional: dict[str, Any] = {
        "trajectory_digest": dump_digest(turn.trajectory_digest),
        "artifacts_shown": turn.artifacts_shown,
        "artifacts_hidden_refs": turn.artifacts_hidden_refs,
        "ts": turn.ts,
    }
    for name, value in optional.items():
        require_json(value, f"turn.{name}", deepest=DEEPEST_IN_TURN)
    return {
        **stored.extra,
        "turn_id": stored.id,
        "user_message": turn.user_message,
        "assistant_response": turn.assistant_response,
        **optional,
        "artifacts_shown": dict(turn.artifacts_shown),
        "artifacts_hidden_refs": list(turn.artifacts_hidden_refs),
    }


def encode_turn(stored: StoredTurn) -> bytes:
    """Return the JSON of `dump_turn`, compact and without empty fields.

    Written piece by piece, because every turn passes through here and nearly all of it is three strings.
    """
    turn_id, turn, extra, _ = stored
    try:
        text = (
            f'"turn_id":{_quoted(turn_id)},"user_message":{_quoted(turn.user_message)},'
            f'"assistant_response":{_quoted(turn.assistant_response)}'
        )
    except TypeError:
        raise InvalidState("turn_id, user_message or assistant_response is not a string") from None
    if turn.trajectory_digest or turn.artifacts_shown or turn.artifacts_hidden_refs:
        text += _members_of(
            trajectory_digest=dump_digest(turn.trajectory_digest),
            artifacts_shown=turn.artifacts_shown,
            artifacts_hidden_refs=turn.artifacts_hidden_refs,
        )
    ts = turn.ts
    if ts:
        text += f',"ts":{ts!r}' if type(ts) is float and math.isfinite(ts) else _members_of(ts=ts)
    if extra:
        text = f"{encoded({**extra})[1:-1]},{text}"
    return f"{{{text}}}".encode("utf-8", "surrogatepass")


def _members_of(**fields: Any) -> str:
    """Return those fields of a turn that are not empty as JSON, each after a comma."""
    text = ""
    for name, value in fields.items():
        if value:
            require_json(value, f"turn.{name}", deepest=DEEPEST_IN_TURN)
            text += f',"{name}":{encoded(value)}'
    return text


def dump_digest(digest: TrajectoryDigest | None) -> dict[str, Any] | None:
    """Return the digest of a turn as JSON."""
    return (
        None
        if digest is None
        else {
            "tools_invoked": list(digest.tools_invoked),
            "observations_summary": digest.observations_summary,
            "reasoning_summary": digest.reasoning_summary,
            "artifacts_refs": list(digest.artifacts_refs),
        }
    )


def load_turn(payload: object) -> ConversationTurn:
    """Return the turn of a state of this library or PenguiFlow. Raises `ValueError` if it is invalid.

    Accepts what PenguiFlow 3.11.2 accepts, with the same result: missing and null fields are empty. Only a
    `ts` that is not a time in seconds is mended; see `seconds_of`.
    """
    if not isinstance(payload, (dict, Mapping)):
        raise ValueError("Invalid turn payload")
    fields = cast("Mapping[str, Any]", payload)
    digest, shown = fields.get("trajectory_digest"), fields.get("artifacts_shown")
    hidden, ts = fields.get("artifacts_hidden_refs"), fields.get("ts")
    if digest is not None and not isinstance(digest, (dict, Mapping)):
        raise ValueError("Invalid trajectory_digest payload")
    try:
        return ConversationTurn(
            user_message=str(fields.get("user_message") or ""),
            assistant_response=str(fields.get("assistant_response") or ""),
            trajectory_digest=None if digest is None else _load_digest(cast("Mapping[str, Any]", digest)),
            artifacts_shown=dict(shown) if shown else {},
            artifacts_hidden_refs=list(hidden) if hidden else [],
            ts=0.0 if isinstance(ts, bool) else seconds_of(float(ts or 0.0)),
        )
    except (TypeError, ValueError, OverflowError):
        # The cause may quote the conversation.
        raise ValueError("Invalid turn payload") from None


def _load_digest(fields: Mapping[str, Any]) -> TrajectoryDigest:
    reasoning = fields.get("reasoning_summary")
    return TrajectoryDigest(
        tools_invoked=list(fields.get("tools_invoked") or []),
        observations_summary=str(fields.get("observations_summary") or ""),
        reasoning_summary=None if reasoning is None else str(reasoning),
        artifacts_refs=list(fields.get("artifacts_refs") or []),
    )


def _as_list(value: object) -> object:
    """Return a new list for a list or a tuple, and any other value as it is."""
    return [*cast("Sequence[object]", value)] if isinstance(value, (list, tuple)) else value


def _encode_steps(content: Mapping[str, Any], path: str) -> Steps[bytes]:
    """Check and encode an object like `require_json` and `encode_json`, in steps over its long lists."""
    # Copied, so that a list that changes between steps is saved as it was.
    members = [(name, _as_list(value)) for name, value in content.items()]
    pieces: list[bytes] = []
    for name, value in members:
        require_json({name: None}, path)
        pieces += (b"," if pieces else b"{", encode_json(name), b":")
        within = below(path, f".{name}")
        if not isinstance(value, list):
            require_json(value, within, deepest=DEEPEST - 1)
            pieces.append(encode_json(value))
            continue
        opening = b"["
        items = cast("list[object]", value)
        for start in range(0, len(items), STEP):
            some = items[start : start + STEP]
            for index, item in enumerate(some, start):
                require_json(item, below(within, f"[{index}]"), deepest=DEEPEST - 2)
            pieces += (opening, encode_json(some)[1:-1])
            opening = b","
            yield
        pieces.append(b"]" if items else b"[]")
    return b"".join((*pieces, b"}")) if pieces else b"{}"


def _decode_steps(data: bytes) -> Steps[object]:
    """Decode like `decode_json`, in steps if it is an object as `encode_json` writes it."""
    text = data.decode("utf-8", "surrogatepass")
    try:
        return (yield from _members(text))
    except (ValueError, IndexError):
        return decode_json(data)


def _members(text: str) -> Steps[dict[str, Any]]:
    """Read an object without white space. Raises `ValueError` or `IndexError` for anything else."""
    content: dict[str, Any] = {}
    at, end = 0, "{"
    while end != "}":
        if text[at] != end:
            raise ValueError("not where a member begins")
        name, at = raw_decode(text, at + 1)
        if not isinstance(name, str) or text[at] != ":":
            raise ValueError("not a member")
        if text.startswith("[{", at + 1):
            value, at = yield from _items(text, at + 1)
        else:
            value, at = raw_decode(text, at + 1)
        content[name] = value
        end = text[at] if text[at] == "}" else ","
    if at + 1 != len(text):
        raise ValueError("data follows the JSON document")
    return content


def _items(text: str, at: int) -> Steps[tuple[list[object], int]]:
    """Read a list without white space that begins at an index; return it and where it ends."""
    items: list[object] = []
    while text[at] in "[,":
        item, at = raw_decode(text, at + 1)
        items.append(item)
        if len(items) % STEP == 0:
            yield
    if text[at] != "]":
        raise ValueError("not the end of a list")
    return items, at + 1
