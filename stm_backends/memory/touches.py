"""Writing to the catalogue: at once for a first activity, then at most once a minute.

This applies to each kind of record of a conversation. The calls that add to a conversation only note it. A
touch that comes too early waits for a timer, so that the last activity of a conversation is never left out.
Work that waits is a key and no task.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

from stm_backends import logs
from stm_backends.drivers.bounded import Bounded
from stm_backends.errors import StorageError
from stm_backends.memory.tasks import Background
from stm_backends.records import keys
from stm_backends.types import MemoryKey

if TYPE_CHECKING:
    from stm_backends.catalogue.card import Look
    from stm_backends.catalogue.index import Catalogue
    from stm_backends.telemetry.observer import Observer

logger = logging.getLogger("stm_backends")

EVERY_S: Final = 60.0
"""Seconds between two touches of one conversation by a process."""

REMEMBERED: Final = 4_096
"""The number of conversations whose last touch a process remembers; it touches others more often.

At most as many touches of others wait.
"""

AT_ONCE: Final = 8
"""Number of touches that are made at once."""

FAULTS: Final = 3
"""Number of storage errors in a row that a waiting touch survives."""


_Place: TypeAlias = tuple[MemoryKey, str]
"""A conversation and the kind of its record."""


@dataclass(slots=True, eq=False)
class _Active:
    """A record of a conversation that this process adds to.

    `at` is the time of its last activity in epoch seconds, `due` that of the next touch by the loop's clock.
    `reset` is true if something was erased, so that counts and texts of the card are no longer valid.
    """

    key: MemoryKey
    kind: str
    look: Look | None
    at: float
    ttl: float | None
    reset: bool = False
    waits: bool = True
    running: bool = False
    due: float = -math.inf
    faults: int = 0
    timer: asyncio.TimerHandle | None = None


class Touches:
    """The touches that one process makes, for all conversations of a backend."""

    def __init__(
        self,
        catalogue: Catalogue,
        *,
        observer: Observer,
        every: float = EVERY_S,
        most: int = REMEMBERED,
    ) -> None:
        self._catalogue = catalogue
        self._every = every
        self._observer = observer
        self._noted: Bounded[_Place, _Active] = Bounded(most, forgotten=self._displaced)
        # Those that were displaced before their touch.
        self._leaving: Bounded[_Place, _Active] = Bounded(most, forgotten=self._given_up)
        self.start_over()

    def start_over(self) -> None:
        """Forget what was noted on an event loop that has ended."""
        self._noted.clear()
        self._leaving.clear()
        self._queue: OrderedDict[_Active, None] = OrderedDict()
        self._background = Background(self)
        self._workers = 0
        self._closing = False

    def note(
        self,
        key: MemoryKey,
        kind: str,
        look: Look | None,
        *,
        ttl: float | None,
        at: float | None = None,
        reset: bool = False,
        begins: bool = False,
    ) -> None:
        """Note an activity `at` epoch seconds, by default now, in the record of a kind; returns at once.

        `look` is called when the touch is made; without one, the touch reads the record. The conversation
        lives `ttl` seconds; `None` means forever. With `reset`, something of it was erased, and the counts
        and texts of the card are no longer valid. One that `begins` is touched at once, even if an earlier
        one under its key has just been touched.
        """
        at = self._catalogue.clock() if at is None else at
        place = key, kind
        noted = self._noted.use(place)
        if noted is None:
            noted = self._leaving.pop(place) or _Active(key, kind, look, at, ttl)
            self._noted[place] = noted
        noted.look, noted.ttl, noted.reset = look, ttl, noted.reset or reset
        noted.at, noted.waits = max(noted.at, at), True
        if begins:
            noted.due = -math.inf
            if noted.timer is not None:
                self._enter(noted)
        self._arm(noted)

    async def again(self, key: MemoryKey, *, ttl: float | None) -> None:
        """Write the card of a conversation that was edited anew, only from its records."""
        await self._catalogue.touch(key, at=self._catalogue.clock(), ttl=ttl)

    def _arm(self, noted: _Active) -> None:
        """Let a touch wait for its time, or for a worker if it is due."""
        loop = asyncio.get_running_loop()
        if noted.running or noted.timer is not None:
            return
        if self._closing or noted.due <= loop.time():
            self._enter(noted)
        else:
            noted.timer = loop.call_at(noted.due, self._enter, noted)

    def _enter(self, noted: _Active) -> None:
        if noted.timer is not None:
            noted.timer.cancel()
            noted.timer = None
        self._queue[noted] = None
        if self._workers < AT_ONCE:
            self._workers += 1
            self._background.start(self._work(), name="stm-catalogue")

    def _displaced(self, place: _Place, noted: _Active) -> None:
        if noted.waits or noted.running:
            self._leaving[place] = noted

    def _given_up(self, _: _Place, noted: _Active) -> None:
        if noted.timer is not None:
            noted.timer.cancel()
        noted.waits = False
        self._queue.pop(noted, None)
        self._observer.touches("lost", 1)
        logger.warning(
            "more conversations are active than the catalogue can follow: the others stay unchanged in the "
            "list until their next turn"
        )

    async def _work(self) -> None:
        try:
            with self._observer.background():
                while self._queue:
                    noted, _ = self._queue.popitem(last=False)
                    await self._touch(noted)
                    place = noted.key, noted.kind
                    if not noted.waits and self._leaving.get(place) is noted:
                        self._leaving.pop(place)
        finally:
            self._workers -= 1

    async def _touch(self, noted: _Active) -> None:
        reset, noted.reset = noted.reset, False
        noted.running, noted.waits = True, False
        noted.due = asyncio.get_running_loop().time() + self._every
        try:
            seen = None if reset or noted.look is None else noted.look()
            card = await self._catalogue.touch(
                noted.key, seen, kind=noted.kind, at=noted.at, ttl=noted.ttl, reset=reset
            )
            noted.faults = 0
            if card is not None:
                self._observer.touches("written", 1)
        except asyncio.CancelledError:
            # Closing counts it as lost.
            noted.waits = True
            raise
        except StorageError as error:
            noted.faults += 1
            noted.reset = noted.reset or reset
            noted.waits = noted.faults <= FAULTS and not self._closing
            if not noted.waits:
                self._observer.touches("lost", 1)
            name = keys.log_name(keys.card_key(noted.key))
            logger.warning("could not write to the catalogue: %s (conversation %s)", error, name)
        except Exception as error:
            # Of one conversation; others wait for this worker.
            self._observer.touches("lost", 1)
            logger.warning(
                "could not write to the catalogue: %s", type(error).__name__, exc_info=logs.shown(error)
            )
        finally:
            noted.running = False
        if noted.waits:
            self._arm(noted)

    async def close(self, *, timeout: float) -> None:
        """Make the touches that wait, for at most `timeout` seconds."""
        self._closing = True
        try:
            for noted in [*self._noted.values(), *self._leaving.values()]:
                if noted.timer is not None:
                    self._enter(noted)
            await self._background.close(timeout=timeout)
        finally:
            self._closing = False
            remembered = {*self._noted.values(), *self._leaving.values()}
            if late := sum(noted.waits or noted.running for noted in remembered):
                self._observer.touches("lost", late)
            self._noted.clear()
            self._leaving.clear()
            self._queue.clear()
