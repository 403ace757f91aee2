"""The effects of a session's operations on its short-term memory: pure functions, no clock, no I/O.

A session is the result of its operations in order, so every process that applies the same operations has the
same session. An operation is a dict with its name under `op` and an `id`. An operation that depends on data
that its process has read refers to them by number: `content_at` is the number of the operation that set an
entry's content, and `changed_at` that of its last change of any kind. If the entry has a different number,
the operation has no effect. Numbers restart after a session has expired or was erased, so such an operation
also names the session, under `of`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Final, NamedTuple, TypeAlias

from stm_backends.errors import Corrupt
from stm_backends.tiers import relevance
from stm_backends.tiers.entry import MemoryEntry

Operation: TypeAlias = dict[str, Any]

SUMMARY_KEY: Final = "__summary__"

_REMEMBERED: Final = 256
"""Number of ids kept in `Session.done`."""


@dataclass(frozen=True, slots=True)
class Held:
    """An entry in a session.

    `session` is the number of the session in which its content was set, and `promoted_at` the value of
    `changed_at` when long-term memory last received it.
    """

    entry: MemoryEntry
    content_at: int
    changed_at: int
    session: int = 0
    promoted_at: int = 0

    @property
    def is_due(self) -> bool:
        """True if long-term memory should receive the current state of the entry."""
        due = relevance.is_promoted(self.entry.importance, self.entry.access_count)
        return due and self.promoted_at != self.changed_at

    def long_term_key(self, name: str) -> str:
        """Return the key in long-term memory; the key of a summary contains the name of its session.

        This keeps the summaries of two sessions from replacing each other.
        """
        if self.entry.key != SUMMARY_KEY:
            return self.entry.key
        return f"{SUMMARY_KEY}:{name}:{self.session}" if self.session else f"{SUMMARY_KEY}:{name}"


class Promotion(NamedTuple):
    """A state of an entry that is due for long-term memory.

    `entry` has its long-term key. `again` says that its content was promoted before, so only its accesses,
    importance and tags are new. `of` is the id of the session.
    """

    entry: MemoryEntry
    again: bool
    of: str
    key: str
    changed_at: int


@dataclass(slots=True)
class Session:
    """The entries of a session in the order in which they were stored.

    `aside` has removed entries that are still to be promoted. `number` counts the sessions of one memory;
    after `ended`, the next entry begins a new one. `pruned` counts the entries removed because of their
    relevance or to make room. `id` is the id of the first operation. `done` has the ids of conditional
    operations that had an effect.
    """

    entries: dict[str, Held] = field(default_factory=dict[str, Held])
    aside: list[Held] = field(default_factory=list[Held])
    id: str = ""
    operations: int = 0
    remembered: int = 0
    number: int = 0
    ended: bool = False
    pruned: int = 0
    done: list[str] = field(default_factory=list[str])

    def to_dict(self) -> dict[str, Any]:
        """Return the session as a JSON object. Raises `InvalidState` if a content is not JSON."""
        return {
            **{name: getattr(self, name) for name in _PLAIN},
            "entries": [_to_dict(one) for one in self.entries.values()],
            "aside": [_to_dict(one) for one in self.aside],
            "done": [*self.done],
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Session:
        """Return the session from the dictionary of `to_dict`."""
        return cls(
            entries={one.entry.key: one for one in map(_of_dict, data["entries"])},
            aside=[*map(_of_dict, data["aside"])],
            done=[*data["done"]],
            **{name: data[name] for name in _PLAIN},
        )

    def apply(self, operation: Operation) -> None:
        """Carry out an operation. Raises `Corrupt` for one that this version does not know."""
        effect = EFFECTS.get(operation["op"])
        if effect is None:
            raise Corrupt("a session has an operation that this version of the library does not know")
        self.id = self.id or operation["id"]
        self.operations += 1
        if operation.get("of", self.id) == self.id and effect(self, operation):
            self.done = [*self.done, operation["id"]][-_REMEMBERED:]

    def after(self, operation: Operation) -> Session:
        """Return the session after an operation; this one is not changed."""
        session = replace(self, entries={**self.entries}, aside=[*self.aside])
        session.apply(operation)
        return session

    def promotions(self, name: str) -> list[Promotion]:
        """Return the promotions due for long-term memory, for the session with this name."""
        return [
            Promotion(
                one.entry.copied(key=one.long_term_key(name)),
                one.promoted_at >= one.content_at,
                self.id,
                one.entry.key,
                one.changed_at,
            )
            for one in (*self.aside, *self.entries.values())
            if one.is_due
        ]

    def has(self, key: str, content_at: int) -> bool:
        """Return whether an entry still has the content that this operation set."""
        return key in self.entries and self.entries[key].content_at == content_at

    def put(self, entry: MemoryEntry) -> Held:
        """Return an entry with content set now, no older than the entry that it replaces."""
        replaced = self.entries.get(entry.key)
        if replaced is not None and replaced.entry.created_at > entry.created_at:
            # The replaced entry was stored by another process whose clock is ahead.
            entry = entry.copied(created_at=replaced.entry.created_at)
        return Held(entry, self.operations, self.operations, self.number)

    def change(self, key: str, entry: MemoryEntry) -> None:
        """Replace the fields of an entry other than its content."""
        self.entries[key] = replace(self.entries[key], entry=entry, changed_at=self.operations)

    def remove(self, key: str) -> None:
        """Remove an entry; it will not be promoted."""
        self.entries.pop(key, None)
        self.aside = [one for one in self.aside if one.entry.key != key]

    def set_aside(self, key: str) -> None:
        """Remove an entry, and keep it for long-term memory if it is due."""
        one = self.entries.pop(key)
        if one.is_due:
            self.aside.append(one)
            if key == SUMMARY_KEY:
                # The next summary will not cover this one, so it needs another key.
                self.number += 1

    def refresh(self, at: datetime, below: float, most: int) -> None:
        """Remove entries with a relevance below a threshold, and the least relevant beyond `most`."""
        scores = {key: one.entry.relevance_at(at) for key, one in self.entries.items()}
        # The sort is stable: of equally relevant entries, the oldest is removed first.
        ranked = sorted(scores, key=lambda key: scores[key])
        for position, key in enumerate(ranked):
            if position < len(ranked) - most or scores[key] < below:
                self.set_aside(key)
                self.pruned += 1


_PLAIN: Final = ("id", "operations", "remembered", "number", "ended", "pruned")


def _to_dict(one: Held) -> dict[str, Any]:
    return {
        "entry": one.entry.to_dict(),
        "content_at": one.content_at,
        "changed_at": one.changed_at,
        "session": one.session,
        "promoted_at": one.promoted_at,
    }


def _of_dict(data: dict[str, Any]) -> Held:
    fields: dict[str, Any] = {**data, "entry": MemoryEntry.from_dict(data["entry"])}
    return Held(**fields)


def _remember(session: Session, do: Operation) -> None:
    if session.ended:
        session.number, session.ended = session.number + 1, False
    entry: MemoryEntry = do["entry"]
    known = session.entries.get(entry.key)
    # Operations that earlier versions have stored lack `renews`, and had no such effect.
    if known is not None and do.get("renews"):
        entry = replace(entry, **relevance.renewed(vars(known.entry), vars(entry)))
    held = session.put(entry)
    # Popped, so that it becomes the most recent. An old state set aside would be promoted over it.
    session.entries.pop(entry.key, None)
    session.aside = [one for one in session.aside if one.long_term_key("") != held.long_term_key("")]
    session.entries[entry.key] = held
    session.remembered += 1
    if session.remembered % do["every"] == 0 or len(session.entries) > do["most"]:
        session.refresh(do["at"], do["below"], do["most"])


def _access(session: Session, do: Operation) -> None:
    for key, content_at in do["entries"]:
        if session.has(key, content_at):
            session.change(key, session.entries[key].entry.accessed(do["at"]))


def _forget(session: Session, do: Operation) -> None:
    session.remove(do["key"])


def _clear(session: Session, do: Operation) -> None:
    del do
    session.entries, session.aside = {}, []


def _summarize(session: Session, do: Operation) -> bool:
    previous = session.entries.get(SUMMARY_KEY)
    if (previous.content_at if previous else 0) != do["previous"]:
        return False
    if not all(key in session.entries for key, _ in do["covered"]):
        return False
    summary = session.put(do["entry"])
    for key, content_at in do["covered"]:
        if session.has(key, content_at):
            session.set_aside(key)
    # The summary becomes the oldest entry, because it covers everything before the others.
    session.entries.pop(SUMMARY_KEY, None)
    session.entries = {SUMMARY_KEY: summary, **session.entries}
    return True


def _discard(session: Session, do: Operation) -> bool:
    one = session.entries.get(do["key"])
    if one is None or one.changed_at != do["changed_at"]:
        return False
    session.set_aside(do["key"])
    return True


def _absorb(session: Session, do: Operation) -> bool:
    (loser, loser_at), (survivor, survivor_at) = do["loser"], do["survivor"]
    if not session.has(loser, loser_at) or not session.has(survivor, survivor_at):
        return False
    kept, merged = session.entries[survivor].entry, session.entries[loser].entry
    session.change(survivor, replace(kept, **relevance.absorbed(vars(kept), vars(merged))))
    del session.entries[loser]
    return True


def _rewrite(session: Session, do: Operation) -> bool:
    key: str = do["key"]
    if not session.has(key, do["content_at"]):
        return False
    session.change(key, session.entries[key].entry.copied(content=do["content"]))
    session.entries[key] = replace(session.entries[key], content_at=session.operations)
    return True


def _promoted(session: Session, do: Operation) -> None:
    for key, changed_at in do["entries"]:
        session.aside = [one for one in session.aside if (one.entry.key, one.changed_at) != (key, changed_at)]
        one = session.entries.get(key)
        if one is not None and one.changed_at >= changed_at >= one.content_at:
            session.entries[key] = replace(one, promoted_at=max(one.promoted_at, changed_at))


def _end(session: Session, do: Operation) -> None:
    # Another process may have begun the next session.
    session.ended = session.ended or do["number"] == session.number


EFFECTS: Final[dict[str, Callable[[Session, Operation], bool | None]]] = {
    "remember": _remember,
    "access": _access,
    "forget": _forget,
    "clear": _clear,
    "summarize": _summarize,
    "discard": _discard,
    "absorb": _absorb,
    "rewrite": _rewrite,
    "promoted": _promoted,
    "end": _end,
}
