"""The limits of a backend: on turns, conversations, users and saved states."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Final, Literal, NamedTuple, TypeAlias

from stm_backends.drivers.checks import require_count
from stm_backends.errors import ConfigurationError, LimitReached
from stm_backends.plain_json import encode_json
from stm_backends.records.codec import dump_digest
from stm_backends.types import ConversationTurn

LimitName: TypeAlias = Literal[
    "turn_characters",
    "conversation_turns",
    "conversation_bytes",
    "user_conversations",
    "user_memories",
    "memory_characters",
    "state_bytes",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits of a backend; `None` means no limit. A call beyond a limit raises `LimitReached`.

    The exception is `transcript_turns`: beyond it, the oldest turns are removed, and nothing is refused.

    - `turn_characters`: the characters of one turn: its two texts, and its digest and artifacts as JSON. For
      an item log, the characters of one item as JSON.
    - `conversation_turns`: the turns in a conversation's record: those that no summary covers and that were
      not dropped. Repeats of a turn that the background has not removed yet count, too.
    - `conversation_bytes`: the bytes of a conversation's record: its turns, its summary and the ids that it
      remembers, after compression and before sealing. Each item log of the conversation may take as many.
    - `user_conversations`: the conversations of one user that have not expired. Item logs of each framework,
      and saved states under a `MemoryKey.composite()`, are counted separately.
    - `user_memories`: the vertices of one user's graph, which are the entries of the long-term memory. An
      edge to a vertex that does not exist counts as one, too, and is not refused.
    - `memory_characters`: the characters of one such vertex: its key, content and tags as JSON. Vertices
      that were stored before the limit was set stay, and can be recalled.
    - `state_bytes`: the bytes of one saved state or paused run, after compression and before sealing.
    - `transcript_turns`: the turns in the pages of a transcript, which the other limits do not count. Turns
      that no summary covers yet are kept beyond it. Pages are removed as a whole, so up to 63 more turns are
      stored, but not shown. An imported transcript is shortened by the next summary.

    The call that would exceed a limit is refused before anything is written. Summaries are never refused.

    Adding a turn takes no further round trip if the process has loaded the conversation or added to it, and
    its time to live has not passed since. Otherwise, adding loads it first. Creating a conversation scans at
    most `user_conversations` names, and creating a vertex at most `user_memories`. Refusing takes a load, so
    nothing is refused because of data that another process has removed since.

    Within one process the limits are exact. Between processes, each of which knows the length from its last
    answer, they can be exceeded:

    - `conversation_turns`, by each other process: by as many turns as it adds before the first answer.
    - `conversation_bytes`: by what other processes have added since this one loaded the conversation.
    - `user_conversations` and `user_memories`: by what other processes create at the same moment.

    A conversation that expires or is erased between the last load and the next turn is created again without
    being counted.
    """

    turn_characters: int | None = None
    conversation_turns: int | None = None
    conversation_bytes: int | None = None
    user_conversations: int | None = None
    user_memories: int | None = None
    memory_characters: int | None = None
    state_bytes: int | None = None
    transcript_turns: int | None = None

    def __post_init__(self) -> None:
        for one in dataclasses.fields(self):
            value: object = getattr(self, one.name)
            if value is not None:
                require_count(one.name, value)


class Whose(NamedTuple):
    """The tenant, user and session that a refusal is about; `""` for an unknown one."""

    tenant: str = ""
    user: str = ""
    session: str = ""


class Guard:
    """Refuses calls that exceed the limits of a backend, and reports each refusal to `reached`."""

    def __init__(
        self,
        limits: Limits | None = None,
        *,
        backend: str = "",
        reached: Callable[[Whose, str], None] = lambda whose, limit: None,
    ) -> None:
        if not isinstance(limits, Limits | None):  # pyright: ignore[reportUnnecessaryIsInstance] -- a user gives it
            raise ConfigurationError(f"limits is a Limits, not {type(limits).__name__}")
        self.limits = limits or Limits()
        self._backend = backend
        self._reached = reached

    def require(self, name: LimitName, given: int | Callable[[], int]) -> None:
        """Raise `LimitReached` if `given` is more than a limit; a function is called only if there is one."""
        most: int | None = getattr(self.limits, name)
        if most is not None and (count := given() if callable(given) else given) > most:
            raise LimitReached(name, given=count, most=most)

    def reporting(self, whose: Whose, operation: str) -> Reporting:
        """Return a context manager that reports a refusal within it, once, as one of this operation."""
        return Reporting(self._backend, operation, partial(self._reached, whose))


class Reporting:
    """Reports a `LimitReached` that leaves the context, and completes it; see `Guard.reporting`."""

    __slots__ = ("_backend", "_operation", "_reached")

    def __init__(self, backend: str, operation: str, reached: Callable[[str], None]) -> None:
        self._backend = backend
        self._operation = operation
        self._reached = reached

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # An operation is named already if the error comes from a context within this one.
        if isinstance(error, LimitReached) and not error.operation:
            error.backend, error.operation = self._backend, self._operation
            self._reached(error.limit)


UNLIMITED: Final = Guard()
"""The guard that refuses nothing."""


def characters_of(turn: ConversationTurn) -> int:
    """Return the number of characters of a turn: its texts, and its digest and artifacts as JSON."""
    count = len(turn.user_message) + len(turn.assistant_response)
    for extra in (dump_digest(turn.trajectory_digest), turn.artifacts_shown, turn.artifacts_hidden_refs):
        if extra:
            count += characters_in(extra)
    return count


def characters_in(value: object) -> int:
    """Return the number of characters of a value's compact JSON."""
    return len(encode_json(value).decode("utf-8", "surrogatepass"))
