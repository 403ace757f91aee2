"""The card of a conversation: the entry that lists of conversations show; pure functions.

```
{"slot": "fff86d2b", "at": 1790000000.5, "created": 1789990000.0, "counts": {"memory": 12, "langchain": 40},
 "opening": "the first message", "preview": "the last message",
 "title": ..., "metadata": {...}, "pinned": true, "archived": true,          as far as they were set
 "put": true,                      its name was put as this was written, and has yet to be looked for
 "until": 1790090000.0,            until when the name in the index lives, if it expires
 "guessed": true,                  how long its conversation lives is unknown: a reader looks for its records
 "named": "a title",               by the summarizer, if it has given one
 "usage": {...},                   the usage of its answers, if given; see `records.usage`
 "session": ...}                   if the card's name is a hash of the session id
```

`slot` is the hour of the last activity, counted backwards, so that names that begin with it are in the order
of a list: latest first. It may also say up to which millisecond of the hour the last activity is, counted
backwards as well. So the names of an hour need not all be read. Other fields are those of a newer version of
this library and are kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias, cast

from stm_backends.drivers.contract import Key
from stm_backends.errors import Corrupt, InvalidState
from stm_backends.plain_json import encode_json, require_json
from stm_backends.records import keys, usage
from stm_backends.records.usage import Sums
from stm_backends.types import MemoryKey

SLOT_S: Final = 3600
"""Seconds for which an active conversation keeps its name in the index."""

GOES_ON_S: Final = 60
"""Seconds for which a new name allows for activities after the one that it was put for.

Later touches within them leave the name. A process touches a conversation as often.
"""

_HOUR: Final = 8
_MOMENT: Final = 15
"""Number of characters of a slot for the hour, and for the hour and the millisecond."""

_MOVED: Final = "~"

PREVIEW_CHARACTERS: Final = 120
TITLE_CHARACTERS: Final = 500
METADATA_BYTES: Final = 4_096
"""Maximum lengths of a preview, of a title, and of metadata as JSON."""

SET_BY_USER: Final = ("title", "metadata", "pinned", "archived")
"""The fields that only `update` sets. The rest follows from the conversation."""

Content: TypeAlias = dict[str, Any]
"""A card as it is stored."""


@dataclass(frozen=True, slots=True)
class Activity:
    """The observed state of a conversation at its last activity, at `at` in epoch seconds.

    `counts` has the number of turns or items in the record of each kind; `None` where it is unknown.
    `preview` is the beginning of the last message, and `opening` that of the oldest known one. `created` is
    the time at which the first turn or item was added, 0 if it is unknown. `usage` is the usage of all
    answers; `None` if the record was not read. `title` is that of the summarizer, if it has given one.
    `is_answered` is true if the conversation is known to end with an answer, after which nothing more is
    expected at once.
    """

    counts: Mapping[str, int | None]
    at: float
    preview: str = ""
    opening: str = ""
    created: float = 0.0
    usage: Sums | None = None
    title: str = ""
    is_answered: bool = False


Look: TypeAlias = Callable[[], Activity | None]
"""Returns the activity of a conversation as a process knows it; `None`: its records must be read."""


@dataclass(frozen=True, slots=True)
class Card:
    """A conversation as the catalogue shows it.

    `title` is the one that was set, or that of the summarizer, or the beginning of the first message.
    `preview` is the beginning of the last message. `turns` counts all turns or messages of a conversation, in
    its record or not, and the items of an item log. `created` and `updated` are epoch seconds: of the first
    and the last activity.
    `kinds` has the kinds of its records: `"memory"`, and the frameworks that keep item logs.
    """

    key: MemoryKey
    title: str
    preview: str
    turns: int
    created: float
    updated: float
    metadata: Mapping[str, Any] = field(default_factory=dict[str, Any])
    pinned: bool = False
    archived: bool = False
    kinds: tuple[str, ...] = ()


def slot_of(at: float, within: float = SLOT_S) -> str:
    """Return a slot that allows for activities from a time in epoch seconds on: the later, the smaller.

    It allows for them for `within` seconds, at most to the end of the hour, which is the default.
    """
    hour, passed = divmod(int(1_000 * max(at, 0.0)), 1_000 * SLOT_S)
    left, name = 1_000 * SLOT_S - 1 - passed - int(1_000 * within), f"{0xFFFFFFFF - hour:0{_HOUR}x}"
    return f"{name}~{left:06x}" if left > 0 else name


def hour_of(slot: str) -> str:
    """Return the part of a slot by which a list is sorted first."""
    return slot[:_HOUR]


def is_before(slot: str, at: float) -> bool:
    """Say whether all activities of a slot, and of those that sort after it, are before a time."""
    return slot_of(at, 0) < slot[:_MOMENT]


def _slot_after(slot: str, at: float, within: float) -> str:
    """Return the slot of a conversation after an activity: the one that it had, if that allows for it.

    Within an hour, it changes twice at most: an active conversation must not be renamed each minute.
    """
    if hour_of(slot) != slot_of(at):
        return slot_of(at, within)
    if not is_before(slot, at):
        return slot
    again = slot_of(at, GOES_ON_S)
    return slot_of(at) if slot.endswith(_MOVED) or again == slot_of(at) else f"{again}{_MOVED}"


def beginning_of(text: str) -> str:
    """Return the beginning of a message, in one line."""
    line = " ".join(text[: 8 * PREVIEW_CHARACTERS].split())
    return line if len(line) <= PREVIEW_CHARACTERS else f"{line[: PREVIEW_CHARACTERS - 1].rstrip()}…"


def after_activity(
    before: Content | None,
    seen: Activity,
    *,
    at: float = 0.0,
    now: float,
    known: bool = False,
    reset: bool = False,
) -> Content:
    """Return the card after an activity, which moves it to the front unless a later one was noted.

    With `known`, the activity is the view of one process, which may lack the additions of others. If a later
    activity was noted, it takes no turns away, and its preview is ignored. With `reset`, the counts and texts
    of the card are ignored.
    """
    old = before or {}
    said: Content = {} if reset else old
    at = float(min(max(seen.at, at), now))
    latest = old.get("at", 0.0)
    behind = known and at < latest
    had = old.get("counts", {})
    counts = {
        kind: had.get(kind, 0) if count is None else max(count, had.get(kind, 0) if behind else 0)
        for kind, count in seen.counts.items()
    }
    previews = (seen.preview, said.get("preview", ""))
    if behind:
        previews = previews[::-1]
    at = max(at, latest)
    used = said.get("usage") if seen.usage is None else usage.dump(seen.usage) if seen.usage else None
    return {
        **{name: value for name, value in old.items() if name not in ("named", "usage")},
        "slot": _slot_after(old.get("slot", ""), at, 0 if seen.is_answered else GOES_ON_S),
        "at": at,
        "created": old.get("created") or min(seen.created or at, at),
        "counts": {**said.get("counts", {}), **counts},
        "opening": said.get("opening") or seen.opening,
        "preview": previews[0] or previews[1],
        **({"named": named} if (named := seen.title or said.get("named")) else {}),
        **({} if used is None else {"usage": used}),
    }


def checked_changes(**changes: Any) -> Content:
    """Return the given fields that are not `None`. Raises `InvalidState` for a value of the wrong type."""
    given = {name: value for name, value in changes.items() if value is not None}
    title, metadata = given.get("title", ""), given.get("metadata", {})
    if not isinstance(title, str) or len(title) > TITLE_CHARACTERS:
        raise InvalidState(f"title must be a string of at most {TITLE_CHARACTERS} characters")
    if not isinstance(metadata, Mapping):
        raise InvalidState("metadata must be an object")
    if "metadata" in given:
        given["metadata"] = stored = dict(cast("Mapping[str, Any]", metadata))
        require_json(stored, "metadata")
        if len(encode_json(stored)) > METADATA_BYTES:
            raise InvalidState(f"metadata takes at most {METADATA_BYTES:,} bytes as JSON")
    for name in ("pinned", "archived"):
        if not isinstance(given.get(name, False), bool):
            raise InvalidState(f"{name} must be true or false")
    return given


def usage_of(content: Content) -> Sums:
    """Return the usage of a conversation's answers. Raises `ValueError` if the card is damaged."""
    return usage.load(content["usage"]) if "usage" in content else {}


def title_of(content: Content) -> str:
    """Return the title that is shown: the one that was set, or the summarizer's, or how it began."""
    return str(content.get("title") or content.get("named") or content["opening"])


def card_of(where: Key, content: Content) -> Card:
    """Return the card in a record. Raises `Corrupt` if a field has the wrong type."""
    tenant, user = keys.owner_of(where.scope)
    try:
        if not math.isfinite(content["at"]) or not isinstance(content["slot"], str):
            raise ValueError("at")
        usage_of(content)
        return Card(
            MemoryKey(tenant, user, content.get("session") or keys.unname(where.name)),
            title_of(content),
            str(content["preview"]),
            sum(content["counts"].values()),
            float(content["created"]),
            float(content["at"]),
            dict(content.get("metadata", {})),
            bool(content.get("pinned", False)),
            bool(content.get("archived", False)),
            tuple(sorted(content["counts"])),
        )
    except (AttributeError, KeyError, TypeError, ValueError):
        # The cause may quote the conversation.
        raise Corrupt("a stored card lacks a field, or a field has the wrong type") from None
