"""The tools of a driver check: a datastore, open drivers, fresh keys and the passing of time."""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Final, cast

from stm_backends.drivers.contract import Driver, Key, Page, Record, Traits
from stm_backends.drivers.plugins import open_driver
from stm_backends.errors import ConfigurationError
from stm_backends.testing.workbench.failures import Met, Overheard, Untidy, told
from stm_backends.testing.workbench.heard import Heard, hearing, packages_of
from stm_backends.testing.workbench.history import History, Recorded, must_answer
from stm_backends.testing.workbench.proxy import Proxy

QUICK_HISTORIES: Final = 3
"""Number of random histories in a quick run. It does not shrink failures, which takes longest."""

QUICK_RACES_S: Final = 1.0
"""The time limit of a race in a quick run, in seconds."""

LONGEST_TICK_S: Final = 2.0
"""The maximum tick of a check that is repeated with a tick four times as long."""

REPEATED: Final = 3
"""Number of pages of a listing that may end at one position before it counts as not advancing."""

STANDS_STILL: Final = (
    f"the listing does not advance: {REPEATED} of its pages have ended at the same position, so it has no end"
)

ANSWERS: Final[Mapping[str, tuple[type, ...]]] = {
    "load": (Record, type(None)),
    "append": (int,),
    "replace": (bool,),
    "delete": (bool,),
    "scan": (Page,),
}
OPERATIONS: Final = tuple(ANSWERS)


@dataclass(frozen=True, kw_only=True)
class HandedIn:
    """An open driver on a caller's client, with functions to test whether that is open and to close it.

    `kept()` returns what the client still holds for its users, in any form: subscriptions, listeners,
    sessions. An empty collection means nothing. It is optional.
    """

    driver: Driver
    is_open: Callable[[], Awaitable[bool]]
    close: Callable[[], Awaitable[None]]
    kept: Callable[[], Awaitable[Collection[object]]] | None = None


@dataclass(frozen=True, kw_only=True)
class Datastore:
    """Gives a suite access to one datastore.

    `open` returns an open driver, a new instance on the same data each time. If the driver's reach goes
    beyond the process, it is also called in other processes, so it must be picklable: a function at the top
    of an importable module, or a `functools.partial` of one.

    `pass_time` lets seconds pass on the clock that judges expiry; with a real clock it sleeps. `tick` is a
    time to live in seconds that is longer than any operation takes and short enough to wait for; the driver's
    `min_ttl` replaces it if longer. `histories` is the number of random histories of operations to try, and
    `races_s` the maximum number of seconds for which a race of writers is repeated; a quick run uses less.
    Races and histories are random, from a `seed` that is new each time unless set.

    The rest is optional; a check that needs a missing part is reported as not asked:

    - `damage(key)` makes the record's stored bytes unreadable, bypassing the driver.
    - `cut(key)` removes a part of the stored record, bypassing the driver: an entry, or the end of one.
    - `peek(key)` returns the stored record, bypassing the driver.
    - `stored(key)` returns everything that the datastore still holds of a key's record, bypassing the driver:
      its rows, keys or items, in any form. Nothing is an empty collection.
    - `lag()` is a context in which replicas do not follow: writes in it do not reach them.
    - `address` is the server's `host:port`, and `through(address)` returns an open driver that reaches the
      server at another address. The suite puts a proxy there that does what networks do. The shorter the
      deadline of these drivers, the shorter the checks.
    - `outage()` is a context in which drivers that are already open cannot reach the datastore. With an
      `address`, the suite's proxy provides one.
    - `refusal()` is a context in which the server is reachable and answers each request with an error, like a
      cluster without a leader.
    - `handed_in()` returns a driver on a client of the caller's.
    - `hold(key)` is a context in which writers to the record wait because the test holds the datastore's own
      lock on it. Loads continue; if they wait for the same lock, leave this out. It may lock more than this
      record.
    - `transactions()` returns the number of transactions open in the datastore.
    - `round_trips()` returns the number of requests sent to the datastore so far.
    - `server` is the datastore's version, for the report.
    """

    open: Callable[[], Awaitable[Driver]]
    pass_time: Callable[[float], Awaitable[None]] = asyncio.sleep
    tick: float = 0.5
    histories: int = 30
    races_s: float = 20.0
    seed: int | None = None
    damage: Callable[[Key], Awaitable[None]] | None = None
    cut: Callable[[Key], Awaitable[None]] | None = None
    stored: Callable[[Key], Awaitable[Collection[object]]] | None = None
    lag: Callable[[], AbstractAsyncContextManager[object]] | None = None
    peek: Callable[[Key], Awaitable[Record | None]] | None = None
    address: str = ""
    through: Callable[[str], Awaitable[Driver]] | None = None
    outage: Callable[[], AbstractAsyncContextManager[object]] | None = None
    refusal: Callable[[], AbstractAsyncContextManager[object]] | None = None
    handed_in: Callable[[], Awaitable[HandedIn]] | None = None
    hold: Callable[[Key], AbstractAsyncContextManager[object]] | None = None
    transactions: Callable[[], Awaitable[int]] | None = None
    round_trips: Callable[[], int] | None = None
    server: str = ""

    def __post_init__(self) -> None:
        if bool(self.address) != (self.through is not None):
            raise ConfigurationError("`Datastore.address` and `Datastore.through` need each other")

    @property
    def waits(self) -> bool:
        """True if the passing of time means waiting."""
        return self.pass_time is asyncio.sleep


@dataclass(frozen=True, kw_only=True)
class NamedDatastore(Datastore):
    """The datastore of a backend's name and a URL.

    `no_proxy` says why no proxy is put before its server, if none is.
    """

    no_proxy: str = ""


def no_network(datastore: Datastore) -> str:
    """Return the reason why checks with a proxy before the server are not asked."""
    why = datastore.no_proxy if isinstance(datastore, NamedDatastore) else ""
    return "needs `Datastore.address` and `Datastore.through`" + (f": {why}" if why else "")


@dataclass
class FakeClock:
    """A clock that only `pass_time` moves; for drivers that accept a `clock`."""

    now: float = 1_000_000.0

    def __call__(self) -> float:
        return self.now

    async def pass_time(self, seconds: float) -> None:
        """Move the clock."""
        self.now += seconds


async def open_at(name_or_url: str, *, create: bool = False, **options: Any) -> Driver:
    """Return an open driver of an installed backend; `functools.partial(open_at, url)` pickles.

    `create=True` first sets up the datastore, for example its tables, and keeps existing data. If opening
    fails, nothing is left open.
    """
    driver = open_driver(name_or_url, create=create, **options)
    try:
        await driver.open()
    except BaseException:
        with contextlib.suppress(Exception):
            await driver.close()
        raise
    return driver


class Bench:
    """The workbench of one check; leaving it removes the check's records and closes its drivers.

    `tell_untidy` is called with any problem while leaving after the check has passed, and an explanation;
    without it, the check fails. A key or stored bytes in a log line or error is also such a problem.
    """

    def __init__(
        self,
        datastore: Datastore,
        *,
        quick: bool = False,
        tell_untidy: Callable[[Untidy, str], None] | None = None,
    ) -> None:
        if quick:
            datastore = replace(
                datastore,
                histories=min(datastore.histories, QUICK_HISTORIES),
                races_s=min(datastore.races_s, QUICK_RACES_S),
            )
        self.datastore = datastore
        self.quick = quick
        self.tell_untidy = tell_untidy
        self.history = History()
        self.loads_go_on = False  # while `hold` holds a record; set once a check has seen it
        self.traits: Traits | None = None
        self._drivers: list[Driver] = []
        self._proxy: Proxy | None = None
        self._scopes: list[str] = []
        self._damaged: list[Key] = []
        self._entered = 0.0
        self._waited_s = 0.0  # for drivers to open, before any time to live begins, and for time to pass
        self._hearing = contextlib.ExitStack()
        self._heard: Heard | None = None

    @property
    def tick(self) -> float:
        """A time to live in seconds that all drivers opened so far can honour."""
        return max(self.datastore.tick, self.traits.min_ttl if self.traits else 0.0)

    @property
    def is_late(self) -> bool:
        """True if the tick may have been too short for the operations.

        That is so if they took half a tick longer than the time that was to pass, on a clock that nobody can
        stop. Behind a proxy, a check itself tests whether a record has expired before an operation goes on.
        """
        took = self.history.latest - self._entered - self._waited_s
        return took > self.tick / 2 and self.datastore.waits and self._proxy is None

    def patient(self) -> Bench | None:
        """Return the same bench with a longer tick, if its own may have been too short."""
        if not self.is_late or self.tick > LONGEST_TICK_S:
            return None
        longer = replace(self.datastore, tick=4 * self.tick)
        return Bench(longer, quick=self.quick, tell_untidy=self.tell_untidy)

    def chance(self) -> random.Random:
        """Return the check's random generator; the history shows its seed."""
        seed = secrets.randbits(32) if self.datastore.seed is None else self.datastore.seed
        self.history.say(f"the chances are those of `Datastore.seed` {seed}")
        return random.Random(seed)

    async def driver(self) -> Driver:
        """Return a new open driver on the datastore."""
        return self.adopt(await self._opened(self.datastore.open))

    async def unnoted(self) -> Driver:
        """Return a new open driver whose operations and log lines are not recorded."""
        return self._add(await self._opened(self.datastore.open))

    async def driver_at(self, address: str) -> Driver:
        """Return a new open driver that reaches the server at an address; requires `Datastore.through`."""
        through = self.datastore.through
        assert through is not None, "a check must require `Datastore.through` first"
        return self.adopt(await self._opened(lambda: through(address)))

    async def _opened(self, open_one: Callable[[], Awaitable[Driver]]) -> Driver:
        began = time.monotonic()
        driver = await open_one()
        self._waited_s += time.monotonic() - began
        return driver

    def _add(self, driver: Driver) -> Driver:
        self._drivers.append(driver)
        self.traits = driver.traits
        return driver

    def proxy(self) -> Proxy:
        """Return the check's proxy before the datastore, which must have an address."""
        if self._proxy is None:
            proxy = Proxy(self.datastore.address)
            proxy.start()
            self._proxy = proxy
        return self._proxy

    def adopt(self, driver: Driver) -> Driver:
        """Record an open driver's operations and log lines from now on, and close it at the end."""
        self._add(driver)
        if self._entered and self._heard is None:
            self._heard = self._hearing.enter_context(hearing(self.history.marks, *packages_of(driver)))
        who = f"driver{len(self._drivers)}"
        noted = (*OPERATIONS, "open", "close")
        return cast("Driver", Recorded(driver, self.history, who, noted, ANSWERS))

    def scope(self) -> str:
        """Return a scope that was never used."""
        scope = f"check:{uuid.uuid4().hex}:memory"
        self.clean(scope)
        return scope

    def key(self) -> Key:
        """Return a key that was never used."""
        return Key(self.scope(), "record")

    def clean(self, scope: str) -> None:
        """Remember to remove everything in `scope` at the end."""
        self._scopes.append(scope)
        self.history.given(scope)

    async def pass_time(self, seconds: float) -> None:
        """Let seconds pass on the clock that judges expiry."""
        self.history.say(f"{seconds:g} s pass")
        self._waited_s += seconds
        await self.datastore.pass_time(seconds)

    async def damage(self, key: Key) -> None:
        """Make a record's stored bytes unreadable; requires `Datastore.damage`."""
        assert self.datastore.damage is not None
        self.history.say(f"{self.history.shown(key)} is damaged", key)
        self._damaged.append(key)
        await self.datastore.damage(key)

    async def cut(self, key: Key) -> None:
        """Remove a part of a stored record; requires `Datastore.cut`."""
        assert self.datastore.cut is not None
        self.history.say(f"a part of {self.history.shown(key)} is removed", key)
        self._damaged.append(key)
        await self.datastore.cut(key)

    async def __aenter__(self) -> Bench:
        self._entered = time.monotonic()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # The check's finding matters more than problems while tidying up after it, and a driver that cannot
        # be closed must not keep the others open.
        failures = [error] if error is not None else []
        try:
            for work in (self._remove_all, *(driver.close for driver in self._drivers)):
                try:
                    await work()
                except Exception as failure:  # noqa: BLE001 -- raised below
                    if failures and told(failure) != told(failures[0]):
                        failures[0].add_note(f"Tidying up after the check failed too: {told(failure)}")
                    failures.append(failure)
        finally:
            self._hearing.close()
            # Also if the check's time limit cancels this; otherwise the thread would outlive it.
            if self._proxy is not None:
                self._proxy.stop()
        if error is None and failures:
            raise Untidy(failures[0]) from failures[0]
        if error is None:
            self._require_discretion()

    def _require_discretion(self) -> None:
        """Fail if a log line or error names a key or shows stored bytes."""
        if self._heard is None:
            return
        for error in self.history.errors:
            self._heard.judge(error)
        for message, found in self._heard.told.items():
            raise Overheard(Met(found, f"said by {message.where}"))

    async def _remove_all(self) -> None:
        # The check's own drivers may be closed by now, so this one is new.
        driver = await self.datastore.open()
        try:
            for key in self._damaged:
                # Deleted first, because a scan may be unable to read the name of a damaged record.
                await driver.delete(key)
            for scope in self._scopes:
                for name in await names_in(driver, scope):
                    await driver.delete(Key(scope, name))
        finally:
            await driver.close()


async def names_in(driver: Driver, scope: str, *, limit: int = 100) -> list[str]:
    """Return every name of a scope, from a listing in pages."""
    names: list[str] = []
    positions = Positions()
    after: str | None = ""
    while after is not None:
        page = await driver.scan(scope, after=after, limit=limit)
        must_answer("scan", page, ANSWERS["scan"])
        names += page.names
        after = positions.next(page.after)
    return names


class Positions:
    """The end positions of the pages of one listing."""

    def __init__(self) -> None:
        self._ended = Counter[str]()

    def next(self, after: str | None) -> str | None:
        """Return the start of the next page; fail if too many pages have ended there."""
        __tracebackhide__ = True
        if after is not None:
            self._ended[after] += 1
            if self._ended[after] == REPEATED:
                raise Met(STANDS_STILL, STANDS_STILL)
        return after
