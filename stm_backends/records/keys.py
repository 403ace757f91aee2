"""Conversions between the key of a conversation and the keys of its records; injective in both directions.

```
MemoryKey("acme", "u1", "chat")  <->  "acme:u1:chat"                          (composite)
                                 <->  Key("acme:u1:memory", "chat")           (its conversation)
                                 <->  Key("acme:u1:langchain", "chat")        (a framework's items of it)
```

The scope `acme:u1:page` has the pages of transcripts (see `pages`), and `acme:u1:part` the parts of values
that are too large for a record (see `large`).

A scope is `tenant:user:kind`, so that conversations, logs and saved states never share a scope, and an
access rule on a prefix of scopes is an access rule on a tenant. The parts of a scope are escaped before they
are joined, which makes the result unambiguous: `%`, `:`, NUL and lone surrogates become `%XX` of their UTF-8
bytes, and empty text becomes a single `%`.
"""

from __future__ import annotations

import hashlib
import re
from typing import Final, Literal, TypeAlias, get_args

from stm_backends import logs
from stm_backends.drivers.contract import MAX_KEY_BYTES, Key
from stm_backends.errors import ConfigurationError, Corrupt, InvalidKey
from stm_backends.types import MemoryKey

LogKind: TypeAlias = Literal[
    "openai-agents",
    "langchain",
    "langgraph",
    "claude-agent-sdk",
    "google-adk",
    "pydantic-ai",
    "agent-framework",
    "strands",
    "llama-index",
]
"""The framework whose items a log holds. Items of frameworks differ in shape, so each has its own logs."""

Kind: TypeAlias = (
    Literal["memory", "blob", "planner", "graph", "page", "card", "recent", "words", "part"] | LogKind
)
"""The kinds of a user's records: a conversation, a saved state, a note of a paused run, a vertex or words of
a graph, a log, a page of a transcript, a card of the catalogue, a name or words in its index, or a part of a
value that is too large for any of these."""

LOG_KINDS: Final[tuple[LogKind, ...]] = get_args(LogKind)
KINDS: Final[tuple[Kind, ...]] = (
    "memory",
    "blob",
    "planner",
    *LOG_KINDS,
    "graph",
    "page",
    "recent",
    "card",
    "words",
    "part",
)
"""All kinds. Pages come after the conversations that they belong to, cards after their names, and parts last:
erasing in this order leaves no record that refers to one that was erased, and no card without a name."""

VERTICES: Final = "vertex:"
"""The prefix of the names of vertices."""

NO_NAME: Final = "%%"
"""The name of no record: `name` writes two hexadecimal digits after a "%"."""

OTHER_BLOBS: Final = "::blob"
"""The scope of saved states whose key names no tenant and user. No tenant is empty, so no user owns it.

The states of a tenant as a whole are in a scope that ends so; see `shared_scope`.
"""

PAUSED_RUNS: Final = "::planner"
"""The scope of paused runs. A token names no tenant and user; a note in the user's scope does."""

WORK: Final = "::work"
"""The scope of the queue of work. Its notes name conversations of all tenants."""

RESERVED_PREFIX: Final = "kv:v1:"

_SHORT_TERM: Final = "#short-term"
"""The suffix of session ids of conversations that hold the short-term memory of a session."""

_BESIDE: Final = "+beside/"
"""The separator in the session id of a log that belongs to another, before its own name; see `beside`."""

WITH_BESIDE: Final[tuple[LogKind, ...]] = ("claude-agent-sdk",)
"""The frameworks with possibly several logs of a conversation."""

_SCOPES_WITH_BESIDE: Final = tuple(f":{kind}" for kind in WITH_BESIDE)

_SLOT_BYTES: Final = len("00000000:")

_PARTS_AFTER: Final = {"session": 2, "task": 3}
"""Minimum number of parts that PenguiFlow writes after these words in a `kv:v1:` key."""

_UNSAFE = re.compile("[%\0\ud800-\udfff]")
_UNSAFE_IN_PART = re.compile("[%:\0\ud800-\udfff]")
_ESCAPED = re.compile(rb"%([0-9A-F]{2})")


def memory_key(key: MemoryKey) -> Key:
    """Return the key of a conversation's record."""
    return Key(scope(key.tenant_id, key.user_id, "memory"), name(require_part("session_id", key.session_id)))


def require_key(key: object) -> None:
    """Raise `InvalidKey` for anything without the parts of a `MemoryKey`, each a text that is not blank."""
    if not all(hasattr(key, part) for part in ("tenant_id", "user_id", "session_id")):
        raise InvalidKey(
            f"a conversation's key must be a MemoryKey(tenant, user, session), not {type(key).__name__}"
        )
    for part in ("tenant_id", "user_id", "session_id"):
        require_part(part, getattr(key, part))


def short_term_of(key: MemoryKey) -> MemoryKey:
    """Return the key of the conversation with an agent's short-term memory of a session (see `tiers`)."""
    return MemoryKey(key.tenant_id, key.user_id, f"{key.session_id}{_SHORT_TERM}")


def is_dialogue(key: MemoryKey) -> bool:
    """Say whether this is not the key of a conversation that `short_term_of` names, which has no dialogue."""
    return not (isinstance(key.session_id, str) and key.session_id.endswith(_SHORT_TERM))  # pyright: ignore[reportUnnecessaryIsInstance] -- a user gives it


def require_dialogue(key: MemoryKey) -> None:
    """Raise `InvalidKey` for an invalid key, and for that of a conversation that `short_term_of` names."""
    require_key(key)
    if not is_dialogue(key):
        raise InvalidKey(
            f"a session id that ends with {_SHORT_TERM!r} names the short-term memory of a session, which "
            "SharedShortTermMemory opens; give the conversation another id"
        )


def log_key(key: MemoryKey, kind: LogKind) -> Key:
    """Return the key of the items that an agent framework keeps of a conversation.

    Raises `ConfigurationError` for another framework: no erasure would find its log.
    """
    require_key(key)
    if kind not in LOG_KINDS:
        raise ConfigurationError(f"the kind of a log is one of: {', '.join(LOG_KINDS)}")
    return Key(scope(key.tenant_id, key.user_id, kind), name(require_part("session_id", key.session_id)))


def beside(key: MemoryKey, kind: LogKind, own: str = "") -> MemoryKey:
    """Return the key of a log of this name that belongs to the log of a conversation, as one of its parts.

    Without a name, the session id is the prefix of theirs. Raises `InvalidKey` for the key of such a log,
    which has no such logs, and `ConfigurationError` for a framework without them.
    """
    if kind not in WITH_BESIDE:
        raise ConfigurationError(f"a conversation has one log of {kind}")
    if is_beside(log_key(key, kind)):
        raise InvalidKey(
            f"a session id with {_BESIDE!r} names a part of a conversation of {kind}; give it another id"
        )
    return MemoryKey(key.tenant_id, key.user_id, f"{key.session_id}{_BESIDE}{own}")


def beside_of(where: Key) -> list[Key]:
    """Return the scope of the logs that belong to a record, and the prefix of their names; none if none may.

    A record other than a log has none, and so has one whose name leaves no room for theirs.
    """
    prefix = f"{where.name}{_BESIDE}"
    fits = where.scope.endswith(_SCOPES_WITH_BESIDE) and len(prefix.encode()) < MAX_KEY_BYTES
    return [Key(where.scope, prefix)] if fits else []


def is_beside(where: Key) -> bool:
    """Say whether a record is a log that belongs to another, see `beside`."""
    return _BESIDE in where.name and where.scope.endswith(_SCOPES_WITH_BESIDE)


def log_with(where: Key) -> Key:
    """Return the key of the log that a log belongs to, for which `is_beside` holds."""
    return Key(where.scope, where.name.partition(_BESIDE)[0])


def state_beside(key: MemoryKey, kind: LogKind) -> str:
    """Return the key of the state that belongs to a log: erased and purged with it, and with the user.

    The same holds for states whose keys continue with "/" after it.
    """
    return f"{RESERVED_PREFIX}{key.composite()}:{kind}"


def user_state(tenant_id: str, user_id: str, own: str) -> str:
    """Return the key of a state that belongs to a user and to no conversation; `own` is not like `ID:...`."""
    return f"{RESERVED_PREFIX}{MemoryKey(tenant_id, user_id, '-').composite()[:-1]}{own}"


def card_key(key: MemoryKey) -> Key:
    """Return the key of a conversation's card, one for all kinds of its records.

    A session id that is too long for a name in the index is hashed; its card has it.
    """
    session = name(require_part("session_id", key.session_id))
    if len(session.encode()) > MAX_KEY_BYTES - _SLOT_BYTES:
        session = f"{NO_NAME}:{hashlib.sha256(session.encode()).hexdigest()}"
    return Key(scope(key.tenant_id, key.user_id, "card"), session)


def recent_key(tenant_id: str, user_id: str, slot: str, card: str) -> Key:
    """Return the key of the name of a card in the index, in a slot of eight digits; see `catalogue`."""
    return Key(scope(tenant_id, user_id, "recent"), f"{slot}:{card}")


def words_key(tenant_id: str, user_id: str, record: str) -> Key:
    """Return the key of a record of the words of a user's conversations; see `catalogue.word_index`."""
    return Key(scope(tenant_id, user_id, "words"), record)


def slot_and_card(recent: str) -> tuple[str, str]:
    """Return the slot, and the name of the card, of a name in the index."""
    slot, _, card = recent.partition(":")
    return slot, card


def vertex_key(tenant_id: str, user_id: str, vertex_id: str) -> Key:
    """Return the key of a vertex of a user's graph. The id may be long, so the name has its hash."""
    digest = hashlib.blake2b(vertex_id.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
    return Key(scope(tenant_id, user_id, "graph"), f"{VERTICES}{digest}")


def postings_key(tenant_id: str, user_id: str, bucket: int) -> Key:
    """Return the key of one bucket of the index of a user's graph."""
    return Key(scope(tenant_id, user_id, "graph"), f"index:{bucket:02x}")


def heads_key(tenant_id: str, user_id: str) -> Key:
    """Return the key of the heads of a user's graph."""
    return Key(scope(tenant_id, user_id, "graph"), "heads")


def parts_of(key: Key) -> Key:
    """Return the scope of a record's parts, and the prefix of their names.

    The scope belongs to the owner of the record. Raises `InvalidKey` if it would be too long.
    """
    return _beneath(key, "part")


def pages_of(key: Key) -> Key:
    """Return the scope of a transcript's pages, and the prefix of their names; `key` is that of the record.

    Raises `InvalidKey` if the scope would be too long.
    """
    return _beneath(key, "page")


def prefix_in(name: str) -> str:
    """Return the prefix in the name of a page or part: that of all that belong to the same record."""
    return f"{name.partition(':')[0]}:"


def page_key(key: Key, epoch: str, page: int, spill: int = 0) -> Key:
    """Return the key of one page of one epoch of a transcript, or of the record that it spills to.

    The number has ten hexadecimal digits, so that the pages of an epoch are listed in order.
    """
    scope, prefix = pages_of(key)
    return Key(scope, name(f"{prefix}{epoch}:{page:010x}" + (f".{spill}" if spill else "")))


def pages_of_epoch(key: Key, epoch: str) -> Key:
    """Return the scope of a transcript's pages, and the prefix of the names of those of one epoch."""
    scope, first = page_key(key, epoch, 0)
    return Key(scope, first.rpartition(":")[0] + ":")


def page_number(name: str) -> int:
    """Return the number of the page in the name of its record. Raises `ValueError` for any other name."""
    return int(name.rpartition(":")[2].partition(".")[0], 16)


def page_epoch(name: str) -> str:
    """Return the epoch in the name of a page's record."""
    return unname(name.rpartition(":")[0].partition(":")[2])


def _beneath(key: Key, kind: Kind) -> Key:
    """Return the scope of the data that belongs to a record, and the prefix of its names there."""
    owner, _, _ = key.scope.rpartition(":")
    digest = hashlib.sha256(f"{key.scope}\0{key.name}".encode()).hexdigest()[:32]
    return Key(_bounded(f"{owner or key.scope}:{kind}"), f"{digest}:")


def directory_key(tenant_id: str, user_id: str) -> Key:
    """Return the key of the record that lists a user of a tenant."""
    return Key(directory_scope(tenant_id), name(require_part("user_id", user_id)))


def directory_scope(tenant_id: str) -> str:
    """Return the scope whose names are the users of a tenant."""
    return _bounded(f"{_escape(require_part('tenant_id', tenant_id), _UNSAFE_IN_PART)}::users")


def work_key(shard: str) -> Key:
    """Return the key of a shard of the queue of work."""
    return Key(WORK, shard)


def data_keys_key(tenant_id: str, user_id: str) -> Key:
    """Return the key of the record with the data keys of a user or, with `""`, of a tenant as a whole."""
    return Key(data_keys_scope(tenant_id), name(user_id))


def data_keys_scope(tenant_id: str) -> str:
    """Return the scope of all data keys of a tenant and its users, or with `""` of data without a tenant."""
    return _bounded(f"{_escape(tenant_id, _UNSAFE_IN_PART) if tenant_id else ''}::keys")


def mark_key(tenant_id: str) -> Key:
    """Return the key of the mark that a tenant's data is sealed or, with `""`, of data without a tenant."""
    return Key(_bounded(f"{_escape(tenant_id, _UNSAFE_IN_PART) if tenant_id else ''}::seal"), "keys")


def erased_data_key(key_id: str) -> Key:
    """Return the key of the note that a data key was erased. It names no owner: the id is random."""
    return Key("::erased", key_id)


def scope(tenant_id: str, user_id: str, kind: Kind) -> str:
    """Return the scope of one kind of record of one user."""
    tenant = _escape(require_part("tenant_id", tenant_id), _UNSAFE_IN_PART)
    user = _escape(require_part("user_id", user_id), _UNSAFE_IN_PART)
    return _bounded(f"{tenant}:{user}:{kind}")


def owner_of(scope: str) -> tuple[str, str]:
    """Return the tenant and the user of a scope; `""` for either that it does not name."""
    tenant, _, rest = scope.partition(":")
    user, _, kind = rest.partition(":")
    if not tenant or not kind or ":" in kind:
        return "", ""
    return unname(tenant), unname(user) if user else ""


def log_name(key: Key) -> str:
    """Return the hash that names the conversation of a record in log messages; see `logs`."""
    tenant, user = owner_of(key.scope)
    text = unname(key.name)
    if user and not key.scope.endswith(":blob"):
        text = MemoryKey(tenant, user, text).composite()
    return logs.conversation(text)


def name(text: str) -> str:
    """Escape arbitrary text to a record's name; `unname` is its inverse."""
    return _bounded(_escape(text, _UNSAFE))


def unname(escaped: str) -> str:
    """Return the text that `name` escaped. Raises `Corrupt` for a name that it did not write."""
    if escaped == "%":
        return ""
    try:
        raw = _ESCAPED.sub(lambda match: bytes.fromhex(match[1].decode()), escaped.encode())
        return raw.decode("utf-8", "surrogatepass")
    except UnicodeError:
        raise Corrupt("a stored name was not written by this library") from None


def blob_key(key: str) -> Key:
    """Return the key of the record for a saved state; see `blob`."""
    return blob(key)[0]


def blob(key: str) -> tuple[Key, tuple[str, str] | None]:
    """Return the key of the record for a saved state, and the tenant and user that it belongs to.

    A composite, and a `kv:v1:` key, belong to the tenant and user that they name, see `blob_owner`, so that
    erasing the user erases them; every other string belongs to `OTHER_BLOBS`. Raises `InvalidKey` for an
    invalid key.
    """
    owner = blob_owner(_checked_state_key(key))
    return Key(OTHER_BLOBS if owner is None else scope(*owner, "blob"), name(key)), owner


def shared_blob(tenant_id: str, key: str) -> Key:
    """Return the key of the record for a state of a tenant as a whole. Raises `InvalidKey`."""
    return Key(shared_scope(tenant_id), name(_checked_state_key(key)))


def _checked_state_key(key: object) -> str:
    if not isinstance(key, str):
        raise InvalidKey(f"the key of a saved state is a string, not {type(key).__name__}")
    return key


def shared_scope(tenant_id: str) -> str:
    """Return the scope of the states of a tenant as a whole or, with `""`, of those that name no tenant."""
    if not tenant_id:
        return OTHER_BLOBS
    return _bounded(f"{_escape(require_part('tenant_id', tenant_id), _UNSAFE_IN_PART)}{OTHER_BLOBS}")


def planner_key(token: str) -> Key:
    """Return the key of the paused run of a token."""
    return Key(PAUSED_RUNS, name(token))


def planner_note_key(tenant_id: str, user_id: str, token: str) -> Key:
    """Return the key of the note that a paused run belongs to a user, so that an erasure finds it."""
    return Key(scope(tenant_id, user_id, "planner"), name(token))


def blob_owner(key: str) -> tuple[str, str] | None:
    """Return the tenant and user that a saved state's key names, or `None` if it may name several or none.

    The ids in a `kv:v1:` key are written in one of two ways: as in a composite; or unchanged, by PenguiFlow,
    as in `kv:v1:tenant:user:session:session:namespace:key`. With ':' in an id, the latter names a session
    of the tenant `a` or of the tenant `a:b`. So a key with the word `session` or `task` belongs to a user
    only if there is one such word where PenguiFlow writes it, after exactly three ids.
    """
    composite = key
    if key.startswith(RESERVED_PREFIX):
        parts = key.removeprefix(RESERVED_PREFIX).split(":")
        words = [
            place
            for place, part in enumerate(parts)
            if place >= 3 and len(parts) - place > _PARTS_AFTER.get(part, len(parts))
        ]
        if words:
            decided = words == [3] and all(part.strip() and _unquote(part) == part for part in parts[:2])
            return (parts[0], parts[1]) if decided else None
        if len(parts) < 3:
            return None
        composite = f"{parts[0]}:{parts[1]}:-"
    try:
        parsed = parse_composite(composite)
    except InvalidKey:
        return None
    return parsed.tenant_id, parsed.user_id


def undecided_prefixes(tenant_id: str, user_id: str) -> list[Key]:
    """Return the scope, and prefixes of names, of saved states that may be of this user or of another."""
    parts = (f"{tenant_id}:{user_id}", MemoryKey(tenant_id, user_id, "-").composite()[:-2])
    return [Key(OTHER_BLOBS, name(f"{RESERVED_PREFIX}{part}:")) for part in dict.fromkeys(parts)]


def parse_composite(composite: str) -> MemoryKey:
    """Return the key whose `composite()` this is.

    Raises `InvalidKey` for every other string: for too few or too many parts, a blank part, and an encoding
    that `composite()` does not produce. The last rule keeps a tenant `a` apart from a tenant `%61` whose
    composite was written without encoding.
    """
    parts = composite.split(":")
    if len(parts) != 3:
        raise InvalidKey(
            f"a conversation's key has three parts joined by ':' (tenant:user:session), this one has "
            f"{len(parts)}; write ':' within a part as %3A and '%' as %25, as MemoryKey.composite() does"
        )
    try:
        key = MemoryKey(*(_unquote(part) for part in parts))
        canonical = key.composite() == composite
    except ValueError:
        canonical = False
        key = None
    if key is None or not canonical:
        raise InvalidKey(
            "a conversation's key has a blank part or a '%' that MemoryKey.composite() would not have "
            "written; build keys with MemoryKey(tenant, user, session).composite()"
        )
    return key


def _unquote(part: str) -> str:
    return re.sub("%(25|3A|6B)", lambda match: chr(int(match[1], 16)), part)


def require_part(which: str, part: object) -> str:
    """Return a part of a key. Raises `InvalidKey` unless it is a text that is not blank."""
    if not isinstance(part, str) or not part.strip():
        raise InvalidKey(f"{which} must be a string that is not blank")
    return part


def _escape(text: str, unsafe: re.Pattern[str]) -> str:
    if not text:
        return "%"
    return unsafe.sub(
        lambda match: "".join(f"%{byte:02X}" for byte in match[0].encode("utf-8", "surrogatepass")), text
    )


def _bounded(text: str) -> str:
    size = len(text.encode())
    if size > MAX_KEY_BYTES:
        raise InvalidKey(f"a part of the key takes {size:,} bytes once escaped; {MAX_KEY_BYTES:,} fit")
    return text
