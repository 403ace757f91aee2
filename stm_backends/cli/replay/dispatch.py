"""Assign turns to pods. Pure, so that the order can be tested."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from stm_backends.cli.replay.conversations import Conversation
from stm_backends.cli.replay.ledger import Place, marked
from stm_backends.cli.replay.pods import Work


@dataclass(slots=True)
class _Running:
    conversation: Conversation
    place: Place = 0
    round: set[int] = field(default_factory=set[int])


class Dispatch:
    """The turns of many conversations; a turn is handed out once all earlier ones are acknowledged.

    At most `at_once` conversations are in progress. Each visits all pods `0` to `pods - 1` in rounds: no pod
    gets a second turn of a conversation before every other pod has had one. A pod that is started in place
    of another takes over its number.
    """

    def __init__(self, conversations: Iterable[Conversation], *, pods: int, at_once: int) -> None:
        self._waiting: Iterator[Conversation] = iter(conversations)
        self._pods = pods
        self._at_once = at_once
        self._running: dict[str, _Running] = {}
        self._ready: deque[str] = deque()

    @property
    def finished(self) -> bool:
        """True once every turn has been acknowledged."""
        self._admit()
        return not self._running

    def take(self, pod: int) -> Work | None:
        """Return the turn that a pod adds next; `None` if there is none at the moment."""
        self._admit()
        for session in self._ready:
            running = self._running[session]
            if pod not in running.round:
                break
        else:
            return None
        self._ready.remove(session)
        running.round.add(pod)
        if len(running.round) == self._pods:
            running.round.clear()
        return Work(
            session, running.place, marked(running.conversation.turns[running.place], session, running.place)
        )

    def acknowledged(self, session: str) -> None:
        """Continue a conversation with its next turn."""
        running = self._running[session]
        running.place += 1
        if running.place < len(running.conversation.turns):
            self._ready.append(session)
        else:
            del self._running[session]

    def unanswered(self, session: str) -> None:
        """Hand out the same turn again, before any other."""
        self._ready.appendleft(session)

    def _admit(self) -> None:
        while len(self._running) < self._at_once and (conversation := next(self._waiting, None)):
            self._running[conversation.session] = _Running(conversation)
            self._ready.append(conversation.session)
