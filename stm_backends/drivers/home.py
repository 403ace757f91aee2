"""The home of an open driver: the one process and the one event loop that its connections belong to.

On a connection that two processes or two event loops use, one receives the other's answers. A thread with its
own event loop is such a case, and so is a forked process, which inherits every open connection.

```python
self._home = Home(self._start_over, client=client)  # once for a driver

await self._home.open(self._begin, self._end)  # all that `open` does
self._home.require()  # at the start of every operation; `Edge.run` does it
await self._home.close(self._end)  # all that `close` does
```
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import weakref
from collections.abc import Awaitable, Callable
from typing import Final

from stm_backends.errors import ConfigurationError

_INHERITED: Final = (
    "{} belongs to another process, and a forked process cannot use its connections; nothing was sent. Open "
    "a separate backend in each process, after the fork"
)
_ELSEWHERE: Final = (
    "{} belongs to another event loop, and its connections cannot be used in this one; nothing was sent. "
    "Open a separate backend in each event loop; threads can share one of `stm_backends.sync`"
)
_ENDED: Final = (
    "the event loop that this backend was opened in has ended; nothing was sent. Open it again in this one, "
    "for example with `async with backend`"
)

OF_ANOTHER_LOOP: Final = (
    "the client that was handed in belongs to an event loop that has ended, or to another one; hand in a "
    "client that was created in this one"
)


class Home:
    """The process and the event loop of one driver, which every operation checks before anything is sent.

    Entering makes the running event loop the home. Once that loop has ended, or was left, the next one may
    enter: then `start_over`, a method of the driver, recreates the objects of one event loop. It awaits
    nothing, and does not touch the leftovers of an ended loop. Without `start_over`, the first operation in
    the next loop enters. A `client` that was handed in keeps its first home for good, in all drivers that use
    it; if it is not `asynchronous`, any event loop of its process may use it.

    In a forked process, nothing that was open before the fork is used, closed or garbage collected: a
    farewell of the child would end the parent's session.
    """

    __slots__ = (
        *("__weakref__", "_client", "_is_inherited", "_is_left", "_loop", "_start_over"),
        *("changing", "is_open", "was_entered"),
    )

    _name = "this backend"

    def __init__(
        self,
        start_over: Callable[[], None] | None = None,
        *,
        client: object = None,
        asynchronous: bool = True,
    ) -> None:
        # Weak, so that a driver is collected as soon as it is not used any more.
        self._start_over = None if start_over is None else weakref.WeakMethod(start_over)
        self._client = None if client is None else _home_of(client, asynchronous=asynchronous)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_left = True
        self._is_inherited = False
        self.changing = asyncio.Lock()
        """Held while it opens or closes. The next event loop, and a forked process, get another one."""
        self.is_open = False
        """It was opened, and has not been closed."""
        self.was_entered = False
        """It was entered at some time, successfully or not."""

    async def open(self, begin: Callable[[], Awaitable[None]], end: Callable[[], Awaitable[None]]) -> None:
        """Enter, and await `begin` unless it is open; if that fails, await `end` and leave.

        Opening and closing wait for each other. A caller that is cancelled meanwhile has changed nothing.
        """
        self.enter()
        async with self.changing:
            self.enter()  # again, because the one before may have left
            if self.is_open:
                return
            try:
                await begin()
            except BaseException:
                await self._leave_after(end)
                raise
            self.is_open = True

    async def close(self, end: Callable[[], Awaitable[None]]) -> None:
        """Await `end`, and leave. In a forked process, the parent does that."""
        if self.may_close():
            async with self.changing:
                await self._leave_after(end)

    async def _leave_after(self, end: Callable[[], Awaitable[None]]) -> None:
        self.is_open = False
        try:
            await end()
        finally:
            self.leave()

    def require(self) -> None:
        """Raise `ConfigurationError` unless this is the home; the first call makes it the home."""
        try:
            if asyncio.get_running_loop() is self._loop:
                return
        except RuntimeError:
            # A coroutine of the parent that goes on in a forked process: no event loop runs there.
            raise ConfigurationError(_INHERITED.format(self._name)) from None
        if self._start_over and self._loop and not self._is_left and self._loop.is_closed():
            raise ConfigurationError(_ENDED)
        self.enter()

    def enter(self) -> None:
        """Make the running event loop the home; starts over if another one was it.

        Raises `ConfigurationError` while the other event loop exists, and in a forked process.
        """
        here = asyncio.get_running_loop()
        # Of two threads that enter at once, one is refused.
        with _ENTERING:
            if self._loop is not here:
                self._give_up()
                if self._client is not None:
                    self._client.enter()
                self._loop, self.was_entered = here, True
                _HOMES.add(self)
            self._is_left = False

    def may_close(self) -> bool:
        """Return whether to close what is open; in a forked process, the parent does that.

        Starts over if the event loop of the home has ended, so that nothing is left to close. Raises
        `ConfigurationError` while another event loop is the home.
        """
        if self._is_inherited:
            return False
        if not self._is_left and self._loop is not asyncio.get_running_loop():
            self._give_up()
        return True

    def leave(self) -> None:
        """Let the next event loop that enters become the home."""
        self._is_left = True

    def inherit(self) -> object:
        """Become the home of the parent, in a forked process; returns objects not to collect there."""
        kept = None if self._is_left else (self._loop, self.changing, self._start_over and self._start_over())
        # A home that was left has nothing open, so the forked process may enter.
        self._loop, self._is_inherited = None, not self._is_left
        self.is_open, self.changing = False, asyncio.Lock()
        return kept

    def _give_up(self) -> None:
        """Give up a home that was left or whose event loop has ended; raise if it cannot be given up."""
        if self._is_inherited:
            raise ConfigurationError(_INHERITED.format(self._name))
        if self._loop is None:
            return
        if not self._is_left and not self._loop.is_closed():
            raise ConfigurationError(_ELSEWHERE.format(self._name))
        self._loop, self._is_left = None, True
        self.is_open, self.changing = False, asyncio.Lock()
        start_over = self._start_over and self._start_over()
        if start_over is not None:
            start_over()


class _HomeOfClient(Home):
    """The home of a client that was handed in: nothing of the client can be recreated."""

    __slots__ = ("_asynchronous",)

    _name = "the client that was handed in"

    def __init__(self, *, asynchronous: bool) -> None:
        super().__init__()
        self._asynchronous = asynchronous

    def _give_up(self) -> None:
        if not self._is_inherited and not self._asynchronous:
            return
        if self._loop is not None and self._loop.is_closed():
            raise ConfigurationError(OF_ANOTHER_LOOP)
        super()._give_up()


_ENTERING: Final = threading.RLock()
"""Held while a home is entered, and while the process forks; reentrant for the home of a client."""

_HOMES: Final[weakref.WeakSet[Home]] = weakref.WeakSet()

_OF_CLIENTS: Final[dict[int, _HomeOfClient]] = {}
"""The homes of clients that exist, by identity: PyMongo's clients of the same servers are equal."""

_KEPT: Final[list[object]] = []
"""Objects inherited by a forked process: collecting a client closes its connections, for the parent too."""


def _home_of(client: object, *, asynchronous: bool) -> Home:
    """Return the home of a client, the same for all drivers that use it."""
    with _ENTERING:
        home = _OF_CLIENTS.get(id(client))
        if home is None:
            home = _HomeOfClient(asynchronous=asynchronous)
            # A client that cannot be referenced weakly has a home for each driver.
            with contextlib.suppress(TypeError):
                weakref.finalize(client, _OF_CLIENTS.pop, id(client), None).atexit = False
                _OF_CLIENTS[id(client)] = home
        return home


def _inherit() -> None:
    _KEPT.extend([home.inherit() for home in _HOMES])


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(
        before=_ENTERING.acquire, after_in_parent=_ENTERING.release, after_in_child=_ENTERING.release
    )
    os.register_at_fork(after_in_child=_inherit)
