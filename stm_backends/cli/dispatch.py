"""Decide which turn goes to which pod: pure, so that the order it promises can be tested."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

from stm_backends.cli.conversations import Conversation
from stm_backends.cli.ledger import Place, marked
from stm_backends.cli.pods import Work

_WINDOW: Final = 16
"""How many conversations that wait are looked at to find one that the pod has served least."""


@dataclass(slots=True)
class _Running:
    conversation: Conversation
    place: Place = 0
    served: Counter[int] = field(default_factory=Counter[int])


class Dispatch:
    """The turns of many conversations, each handed out once all before it have been acknowledged.

    At most `at_once` conversations are under way. A pod that asks gets a turn of a conversation that it
    has served least, so that each wanders over all pods.
    """

    def __init__(self, conversations: Iterable[Conversation], *, at_once: int) -> None:
        self._waiting: Iterator[Conversation] = iter(conversations)
        self._at_once = at_once
        self._running: dict[str, _Running] = {}
        self._ready: deque[str] = deque()

    @property
    def finished(self) -> bool:
        """Whether every turn has been acknowledged."""
        self._admit()
        return not self._running

    def take(self, pod: int) -> Work | None:
        """Return the turn that a pod shall add next; `None` if there is none for now."""
        self._admit()
        window = [self._running[session] for session in list(self._ready)[:_WINDOW]]
        if not window:
            return None
        running = min(window, key=lambda running: running.served[pod])
        session = running.conversation.session
        self._ready.remove(session)
        running.served[pod] += 1
        return Work(
            session, running.place, marked(running.conversation.turns[running.place], session, running.place)
        )

    def acknowledged(self, session: str) -> None:
        """Move a conversation on to its next turn."""
        running = self._running[session]
        running.place += 1
        if running.place < len(running.conversation.turns):
            self._ready.append(session)
        else:
            del self._running[session]

    def unanswered(self, session: str) -> None:
        """Have the same turn handed out again, before any other."""
        self._ready.appendleft(session)

    def _admit(self) -> None:
        while len(self._running) < self._at_once and (conversation := next(self._waiting, None)):
            self._running[conversation.session] = _Running(conversation)
            self._ready.append(conversation.session)
