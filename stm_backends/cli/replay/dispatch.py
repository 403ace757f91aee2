"""Decide which turn goes to which pod: pure, so that the order it promises can be tested."""

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
    """The turns of many conversations, each handed out once all before it have been acknowledged.

    At most `at_once` conversations are under way. Each wanders over the pods `0` to `pods - 1`: none gets
    a second turn of a conversation before every other has had one, however fast it is. A pod that is
    started in place of another goes by the number of that one.
    """

    def __init__(self, conversations: Iterable[Conversation], *, pods: int, at_once: int) -> None:
        self._waiting: Iterator[Conversation] = iter(conversations)
        self._pods = pods
        self._at_once = at_once
        self._running: dict[str, _Running] = {}
        self._ready: deque[str] = deque()

    @property
    def finished(self) -> bool:
        """Whether every turn has been acknowledged."""
        self._admit()
        return not self._running

    def take(self, pod: int) -> Work | None:
        """Return the turn that a pod shall add next; `None` if there is none for it now."""
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
