"""The operations of a check and their results, shown when the check fails."""

from __future__ import annotations

import asyncio
import functools
import inspect
import itertools
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Final, cast

from stm_backends.drivers.contract import Expect, Key, Record, Ttl
from stm_backends.errors import StorageError
from stm_backends.testing.workbench.failures import Met, cut, told
from stm_backends.testing.workbench.heard import Message, marks_of, message_of

SHOWN: Final = 16
"""Maximum number of operations that a failing check shows; races produce hundreds."""

SHOWN_OF_LISTINGS: Final = 64
"""The same if it has listed a scope, because every write to the scope helps explain the listing."""

_LONGEST_VALUE: Final = 48
_LONGEST_TAIL: Final = 12
_LONGEST_TEXT: Final = 200
_LONGEST_ERROR: Final = 120

_LONGEST_COUNTED: Final = 1_000
"""Maximum size in bytes of entries whose appends are counted; larger ones are not kept in memory."""

_TIMES: Final = {1: "once", 2: "twice"}


@dataclass(slots=True)
class Event:
    """One operation. `place` is its subject; `ended` orders ends among begins.

    `seconds` is the time it took, and `raised` its error as formatted by `told`; both are set when it ends.
    """

    who: str
    call: str
    place: object
    began: int
    ended: int | None = None
    outcome: str = "(no result yet)"
    seconds: float = 0.0
    raised: str = ""


class History:
    """The operations of one check, in the order in which they began."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._instants = itertools.count()
        self._sent = Counter[tuple[Key, bytes]]()
        self._stood: dict[tuple[Key, bytes], int] = {}
        self._scopes: dict[str, str] = {}
        self.marks: dict[str, str] = {}
        """The recognisable parts of keys and stored bytes, with their origins."""
        self.errors: dict[Message, None] = {}
        """The messages of the operations' errors, each one once."""
        self.latest = 0.0
        """The time at which the last operation began or ended, by `time.monotonic`; 0 before the first."""
        self.shown_at_most = SHOWN
        """Maximum number of operations that a failing check shows if it has listed no scope."""

    def given(self, place: Key | str, *values: object) -> None:
        """Note the key or scope and the values passed to an operation."""
        self.marks |= marks_of(place, *(value for value in values if isinstance(value, bytes)))

    def begin(self, who: str, call: str, place: object) -> Event:
        """Note that an operation begins."""
        self.latest = time.monotonic()
        event = Event(who, call, place, next(self._instants))
        self.events.append(event)
        return event

    def end(self, event: Event, outcome: str) -> None:
        """Note the outcome of an operation."""
        self.latest = time.monotonic()
        event.ended, event.outcome = next(self._instants), outcome

    def longest_until(self, error: BaseException) -> float:
        """Return the seconds taken by the longest operation that raised this error or one like it."""
        like = told(error)
        return max((event.seconds for event in self.events if event.raised == like), default=0.0)

    def sends(self, key: Key, *entries: bytes) -> None:
        """Note that entries are sent to be stored in a record, each once."""
        self._sent.update((key, entry) for entry in entries if len(entry) <= _LONGEST_COUNTED)

    def found(self, key: Key, record: Record) -> None:
        """Note a record as it was loaded."""
        counts = Counter((key, entry) for entry in record.tail if len(entry) <= _LONGEST_COUNTED)
        for entry, count in counts.items():
            if count > 1:
                self._stood[entry] = max(count, self._stood.get(entry, 0))

    def stored_again(self) -> str:
        """Return a complaint about an entry found in a record more often than it was sent, or `""`."""
        for (key, entry), stood in self._stood.items():
            # Entries sent by other processes are unknown here.
            if 0 < (sent := self._sent[key, entry]) < stood:
                what = "this entry was" if sent == 1 else "these entries were"
                return (
                    f"{self.shown(entry)} stands {_times_in_words(stood)}, and {what} appended "
                    f"{_times_in_words(sent)}: the driver or its client sends an append again"
                )
        return ""

    def say(self, text: str, place: object = None) -> None:
        """Note something that is not an operation, such as time passing; `place` is its subject, if any."""
        event = self.begin("", text, place)
        self.end(event, "")

    def lines(self) -> list[str]:
        """Return the last operations in the scope of the last one, oldest first.

        If there is no room for all, operations on the same record take precedence over those on others.
        """
        places = [event.place for event in self.events if event.place is not None]
        last = places[-1] if places else None
        scope = _scope_of(last)
        about = [event for event in self.events if event.place is None or _scope_of(event.place) == scope]
        listed = {Key, str} <= {type(event.place) for event in about}
        # The sort is stable, so of equal ones, the latest are kept.
        first = about if listed else sorted(about, key=lambda event: event.place in (None, last))
        most = SHOWN_OF_LISTINGS if listed else self.shown_at_most
        shown = sorted(first[-most:], key=lambda event: event.began)
        lines = [self._line(event, after) for event, after in zip_longest(shown, shown[1:]) if event]
        lines = [_times(line, len(list(same))) for line, same in itertools.groupby(lines)]
        if len(about) > len(shown):
            lines.insert(0, f"... {len(about) - len(shown)} earlier operations")
        return lines

    @staticmethod
    def _line(event: Event, after: Event | None) -> str:
        overlaps = after is not None and (event.ended is None or event.ended > after.began)
        line = f"{event.who}.{event.call} -> {event.outcome}" if event.who else f"-- {event.call}"
        return f"{line}   (overlaps the next)" if overlaps else line

    def shown(self, value: object) -> str:
        """Return a short text for an argument or an answer."""
        if isinstance(value, (Expect, Ttl)):
            return value.name
        if isinstance(value, Key):
            return f"Key({self._scope(value.scope)}, {self.shown(value.name)})"
        if isinstance(value, str) and value in self._scopes:
            return self._scopes[value]
        if hasattr(value, "user_message"):
            return f"turn {value.user_message!r}"  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
        if isinstance(value, str | bytes) and len(value) > _LONGEST_VALUE:
            # Each byte that is not text takes four characters.
            return f"{repr(value[:_LONGEST_VALUE])[: _LONGEST_VALUE + 3]}... ({len(value):,} long)"
        if isinstance(value, Record):
            return f"Record({value.version!r}, {self.shown(value.body)}, {self._listed(value.tail)})"
        if type(value) in (tuple, list):
            return self._listed(cast("Sequence[object]", value))
        return cut(repr(value), _LONGEST_TEXT)

    def _listed(self, values: Sequence[object]) -> str:
        shown = [self.shown(value) for value in values[:_LONGEST_TAIL]]
        shown += [f"... ({len(values)} long)"] * (len(values) > _LONGEST_TAIL)
        return f"[{', '.join(shown)}]"

    def _scope(self, scope: str) -> str:
        # A scope of a check is a random word; a number is easier to follow.
        return self._scopes.setdefault(scope, f"scope{len(self._scopes) + 1}")


def _scope_of(place: object) -> object:
    return place.scope if isinstance(place, Key) else place


def _times(line: str, count: int) -> str:
    return line if count == 1 else f"{line}   ({count} times)"


def _times_in_words(count: int) -> str:
    return _TIMES.get(count, f"{count} times")


def must_answer(name: str, answer: object, types: tuple[type, ...]) -> None:
    """Fail unless the answer of an operation has one of the types in the contract."""
    __tracebackhide__ = True
    if not isinstance(answer, types):
        found, expected = _named(type(answer)), " or ".join(map(_named, types))
        raise Met(message := f"`{name}` returned {found}, and not {expected}", message)


def _named(kind: type) -> str:
    return "None" if kind is type(None) else f"`{kind.__name__}`"


class Recorded:
    """Passes everything on to `inner`, and records the calls of the methods in `recorded`.

    `answers` are the types of a method's answers, by method name; another type fails the check.
    """

    def __init__(
        self,
        inner: Any,
        history: History,
        who: str,
        recorded: Collection[str],
        answers: Mapping[str, tuple[type, ...]] | None = None,
    ) -> None:
        self.inner = inner
        self._history = history
        self._who = who
        self._recorded = recorded
        self._answers = answers or {}

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self.inner, name)
        if name in self._recorded and inspect.iscoroutinefunction(attribute):
            return self._noted(name, attribute)
        return attribute

    def _noted(self, name: str, method: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        @functools.wraps(method)
        async def call(*arguments: Any, **named: Any) -> Any:
            __tracebackhide__ = True
            history = self._history
            given = [history.shown(value) for value in arguments]
            given += [f"{key}={history.shown(value)}" for key, value in named.items()]
            place: object = arguments[0] if arguments and isinstance(arguments[0], (str, Key)) else self._who
            event = history.begin(self._who, f"{name}({', '.join(given)})", place)
            if isinstance(place, Key) and name in ("append", "replace"):
                history.sends(place, *(arguments[1:2] if name == "append" else named.get("rewrite", ())))
            if isinstance(place, Key) or name == "scan":
                history.given(place, *arguments[1:], *named.get("rewrite", ()))
            began = time.monotonic()
            try:
                answer = await method(*arguments, **named)
            except asyncio.CancelledError:
                history.end(event, "(cancelled)")
                raise
            except BaseException as error:
                history.end(event, cut(f"raised {type(error).__name__}: {error}", _LONGEST_ERROR))
                event.seconds, event.raised = time.monotonic() - began, told(error)
                if isinstance(error, StorageError | ValueError):
                    history.errors[message_of(error)] = None
                raise
            history.end(event, history.shown(answer))
            if isinstance(answer, Record) and isinstance(place, Key):
                history.found(place, answer)
            if name in self._answers:
                must_answer(name, answer, self._answers[name])
            return answer

        return call
