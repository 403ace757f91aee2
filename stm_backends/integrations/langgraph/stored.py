"""Threads in their logs. Reading starts with the newest items; an addition fails if others added since."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final
from weakref import WeakValueDictionary

from stm_backends.backend import Backend
from stm_backends.drivers.bounded import Bounded
from stm_backends.errors import (
    ConfigurationError,
    Corrupt,
    EditConflict,
    SessionExists,
    StorageError,
    Unavailable,
    located,
)
from stm_backends.history.log import ItemLog
from stm_backends.integrations.langgraph.items import EMPTY, Item, New, NewPut, VersionsOf
from stm_backends.integrations.langgraph.threads import (
    View,
    continued,
    latest_view,
    rebuilt,
    widest_view,
)
from stm_backends.integrations.whose import key_from
from stm_backends.logs import conversation
from stm_backends.races import Lost, contend
from stm_backends.records.identity import DEFAULT_TENANT, DEFAULT_USER
from stm_backends.types import MemoryKey

logger = logging.getLogger("stm_backends")

KIND: Final = "langgraph"

FIRST: Final = 64
"""Number of a thread's newest items read first."""

NEWS: Final = 16
"""Number of newest items read to find what others have added to a known thread."""

REMEMBERED_BYTES: Final = 64 * 1024 * 1024
"""Maximum size of the recently used threads that a saver remembers, in bytes of their items."""

MOST_LOGS: Final = 1_000

CHUNK_BYTES: Final = 32 * 1024
"""Maximum size of an addition to a copy. Readers of a log read such an entry as a whole."""


def thread_key(thread_id: str) -> MemoryKey:
    """Return the key of a thread without a particular user: the tenant `default`, the user `anonymous`."""
    return MemoryKey(DEFAULT_TENANT, DEFAULT_USER, thread_id)


@dataclass(frozen=True, slots=True)
class _Known:
    """A thread as it was last read or written."""

    view: View
    tip: str
    size: int


class Threads:
    """The threads of LangGraph on one backend."""

    def __init__(
        self,
        backend: Backend,
        key_of: Callable[[str], MemoryKey],
        tenants: Sequence[str] | None,
        versions_of: VersionsOf,
    ) -> None:
        self._backend = backend
        self._key_of = key_of
        self._tenants = tenants
        self._versions_of = versions_of
        self._known: Bounded[str, _Known] = Bounded(REMEMBERED_BYTES, size_of=lambda known: known.size)
        # Keep the log object: it counts what was added to it.
        self._logs: Bounded[str, ItemLog] = Bounded(MOST_LOGS)
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def views(self, thread: str) -> AsyncGenerator[View]:
        """Yield growing parts of a thread: from its last frame on, and then more and more, up to all of it.

        Takes one round trip, another one if others have added to a known thread, and one for each further
        view, which has four times as many items.
        """
        log = self._log(thread)
        async with self._lock(thread):
            view = (await self._current(thread, log)).view
        yield view
        limit = max(FIRST, view.count)
        while not view.whole:
            limit *= 4
            state = await log.read(limit)
            whole = len(state.items) >= state.count or len(state.items) < limit
            with located(self._backend.name, "read"):
                wider = widest_view(thread, state.items, whole=whole)
                if wider is None and whole:
                    raise _without_beginning()
            if wider is not None:
                yield (view := wider)

    async def add(
        self, thread: str, new: New, *, refused: Callable[[View], bool] = lambda view: False
    ) -> None:
        """Store a checkpoint or writes, in two round trips unless others have added to the thread.

        Raises `EditConflict`, and stores nothing, if `refused` returns true for the thread at that moment.
        """
        log = self._log(thread)
        lost = False

        async def attempt() -> bool | Lost:
            nonlocal lost
            known = (None if lost else self._known.use(thread)) or await self._current(thread, log)
            if refused(known.view):
                known = await self._current(thread, log)
                if refused(known.view):
                    raise EditConflict(
                        "another run has continued this thread since this run read it; nothing of this step "
                        "was stored: run it again"
                    )
            item = known.view.item(await self._complete(thread, known.view, new))
            # Until the outcome is known, the remembered thread may be outdated.
            self._known.pop(thread)
            tip = await log.add_after(known.tip, [item])
            if tip is None:
                lost = True
                self._remember(thread, known.view, known.tip)
                return Lost(known.tip)
            view = continued(known.view, [item])
            self._remember(thread, view, tip)
            if view.is_frame_due:
                await self._frame(thread, log, view, tip)
            return True

        async with self._lock(thread):
            if await contend(attempt) is None:
                raise _contended(self._backend.name)

    async def keep(self, thread: str, keeping: Callable[[View], Callable[[str, str], bool]]) -> None:
        """Erase all checkpoints of a thread but those that a function of its view keeps, in one step.

        The function gets the namespace and the id of each. Kept ones lose nothing, see `threads.rebuilt`.
        """
        log = self._log(thread)

        async def attempt() -> bool | Lost:
            view, tip = await self._whole(log, thread)
            keep = keeping(view)
            if all(keep(name, one) for name, space in view.spaces.items() for one in space.puts):
                return True
            items = rebuilt(view, keep, self._versions_of)
            self._known.pop(thread)
            done = await (log.rewrite(tip, items) if items else log.clear_after(tip))
            return True if done else Lost(tip)

        async with self._lock(thread):
            if await contend(attempt) is None:
                raise _contended(self._backend.name)

    async def copy(self, source: str, target: str) -> None:
        """Copy a thread to one that does not exist. Raises `SessionExists`."""
        view, _ = await self._whole(self._log(source), source)
        items = rebuilt(view, lambda name, one: True, self._versions_of, target)
        log, tip = self._log(target), ""
        for nth, chunk in enumerate(_chunks(items)):
            after = await log.add_after(tip, chunk)
            if after is None and nth == 0:
                raise SessionExists("the thread to copy to is not empty")
            if after is None:
                raise Unavailable(
                    "others added to the copy before it was complete: delete it and copy again",
                    backend=self._backend.name,
                    operation="copy",
                )
            tip = after

    async def erase(self, thread: str) -> None:
        """Erase a thread."""
        async with self._lock(thread):
            self._known.pop(thread)
            await self._log(thread).clear()

    async def ids(self) -> AsyncIterator[str]:
        """Yield the ids of all threads of the tenants, as far as `key_of` maps them back to their keys."""
        if self._tenants is None:
            raise ConfigurationError(
                "all tenants' threads cannot be found: pass tenants=[...] to say which to search"
            )
        for tenant in self._tenants:
            async for user in self._backend.sessions.users(tenant):
                async for kind, key in self._backend.sessions.logs(tenant, user):
                    if kind == KIND:
                        view, _ = await self._latest(self._backend.item_log(key, KIND), "")
                        thread = view.thread
                        if thread and self.key(thread) == key:
                            yield thread

    async def _complete(self, thread: str, view: View, new: New) -> New:
        """Return the new item with the channels that a view lacks, such as those of an old branch."""
        if view.whole or not isinstance(new, NewPut) or not (missing := view.missing(new)):
            return new
        whole, _ = await self._whole(self._log(thread), thread)
        stored = whole.space(new.space).blobs
        return new._replace(blobs=[*new.blobs, *((*one, stored.get(one, EMPTY)) for one in missing)])

    async def _whole(self, log: ItemLog, thread: str) -> tuple[View, str]:
        """Read the whole thread."""
        state = await log.read()
        with located(self._backend.name, "read"):
            view = widest_view(thread, state.items, whole=True)
            if view is None:
                raise _without_beginning()
            return view, state.tip

    async def _frame(self, thread: str, log: ItemLog, view: View, tip: str) -> None:
        """Add a frame, so that the next reader needs no older items; only logs a failure."""
        try:
            frame = view.frame(self._versions_of)
            if frame is None:
                return
            self._known.pop(thread)
            after = await log.add_after(tip, [frame])
            if after is not None:
                self._remember(thread, continued(view, [frame]), after)
        except StorageError as error:
            view.start = view.size  # so that the next additions do not try again
            logger.warning(
                "could not add a frame to a thread, so reads stay long: %s (conversation %s)",
                type(error).__name__,
                conversation(self.key(thread).composite()),
            )

    async def _current(self, thread: str, log: ItemLog) -> _Known:
        """Return the current state of a thread, reading only what is new."""
        known = self._known.use(thread)
        if known is None:
            return self._remember(thread, *await self._latest(log, thread))
        now = await log.newest(0)
        if known.tip == (now.tip if now.exists else ""):
            return known
        state = await log.newest(NEWS)
        places = (place for place, item in enumerate(state.items, 1) if item.get("i") == known.view.last)
        place = next(places, None)
        self._known.pop(thread)
        if place is None:
            return self._remember(thread, *await self._latest(log, thread))
        with located(self._backend.name, "read"):
            return self._remember(thread, continued(known.view, state.items[place:]), state.tip)

    async def _latest(self, log: ItemLog, thread: str) -> tuple[View, str]:
        """Read a thread from its last frame on, in one round trip, or two if the frame is far back."""
        limit = FIRST
        while True:
            state = await log.read(limit)
            whole = len(state.items) >= state.count or len(state.items) < limit
            with located(self._backend.name, "read"):
                view = latest_view(thread, state.items, whole=whole)
                if view is not None:
                    return view, state.tip
                if whole:
                    raise _without_beginning()
            since = state.items[-1].get("k")
            limit = max(4 * limit, since + FIRST if isinstance(since, int) else 0)

    def _remember(self, thread: str, view: View, tip: str) -> _Known:
        self._known[thread] = known = _Known(view, tip, view.size)
        return known

    def _lock(self, thread: str) -> asyncio.Lock:
        return self._locks.setdefault(thread, asyncio.Lock())

    def _log(self, thread: str) -> ItemLog:
        log = self._logs.use(thread)
        if log is None:
            self._logs[thread] = log = self._backend.item_log(self.key(thread), KIND)
        return log

    def key(self, thread: str) -> MemoryKey:
        """Return the key of a thread: its owner and the name of its log. Raises `InvalidKey`."""
        return key_from("key_of", self._key_of, thread)


def _chunks(items: Iterable[Item]) -> Iterator[list[Item]]:
    chunk, size = list[Item](), 0
    for item in items:
        chunk.append(item)
        size += len(str(item))
        if size > CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _without_beginning() -> Corrupt:
    return Corrupt("the older items of the thread are missing, and it cannot be read without them")


def _contended(backend: str) -> Unavailable:
    return Unavailable("others keep adding to this thread", backend=backend, operation="add")
