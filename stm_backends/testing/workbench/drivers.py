"""What a check of a driver uses: a datastore, open drivers, fresh keys and the passing of time."""

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
"""How many random histories a quick run tries. It does not shrink failures, which takes longest."""

QUICK_RACES_S: Final = 1.0
"""How many seconds the races of a quick run take at most."""

LONGEST_TICK_S: Final = 2.0
"""The longest tick with which a check is repeated with one that is four times as long."""

REPEATED: Final = 3
"""How many pages of a listing end at one position until it counts as one that does not advance."""

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
    """An open driver on a client of the caller, and how to ask whether that client is open.

    `kept()` returns what the client still has of its users, in any form: subscriptions, listeners, sessions.
    Nothing is an empty collection. It is optional.
    """

    driver: Driver
    is_open: Callable[[], Awaitable[bool]]
    close: Callable[[], Awaitable[None]]
    kept: Callable[[], Awaitable[Collection[object]]] | None = None


@dataclass(frozen=True, kw_only=True)
class Datastore:
    """How a suite reaches one datastore.

    `open` returns an open driver, each time another instance on the same data. Where the driver's reach
    goes beyond the process it is called in other processes too, so it must pickle: a function at the top
    of an importable module, or a `functools.partial` of one.

    `pass_time` lets seconds go by on the clock that judges expiry; with a real clock it sleeps. `tick` is
    a time to live in seconds that is longer than any operation takes and short enough to wait for.
    Where its driver's `min_ttl` is longer, that is the tick. `histories` is how many random histories of
    operations are tried, and `races_s` is how many seconds a race of writers is repeated, at most; a quick
    run tries fewer. Races and histories take their chances from a `seed`, which is a new one each time unless
    it is given.

    The rest is optional; a check that needs what is missing is reported as not asked:

    - `damage(key)` makes the record's stored bytes unreadable, past the driver.
    - `cut(key)` removes a part of what is stored of the record, past the driver: an entry, or the end of one.
    - `peek(key)` returns the record as the datastore has it, past the driver.
    - `stored(key)` returns everything that the datastore still holds of a key's record, past the driver: its
      rows, keys or items, in any form. Nothing is an empty collection.
    - `lag()` is a context in which replicas do not follow: what is written in it does not reach them.
    - `address` is the server's `host:port`, and `through(address)` returns an open driver that reaches the
      server at another address: the suite puts a proxy before the server, and does what networks do. The
      shorter the deadline of these drivers, the shorter the checks.
    - `outage()` is a context in which the datastore cannot be reached by drivers that are open already; where
      there is an `address`, the suite's proxy has one too.
    - `refusal()` is a context in which the server can be reached and answers each request with an error, as a
      cluster does that has no leader.
    - `handed_in()` returns a driver on a client of the caller's.
    - `hold(key)` is a context in which writers to the record wait, because the test holds the datastore's own
      lock on it. Loads go on; where they wait for the same lock, leave it out. It may lock more than this
      record.
    - `transactions()` returns how many transactions are open in the datastore.
    - `round_trips()` returns how many requests the datastore has been sent so far.
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
        """Whether time has to be waited for."""
        return self.pass_time is asyncio.sleep


@dataclass(frozen=True, kw_only=True)
class NamedDatastore(Datastore):
    """The datastore that a backend's name and a URL stand for.

    `no_proxy` says why no proxy is put before its server, where none is.
    """

    no_proxy: str = ""


def no_network(datastore: Datastore) -> str:
    """Return why the checks that put a proxy before the server are not asked."""
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

    `create=True` first sets up what the datastore needs, such as tables, and keeps what exists. If opening
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
    """The workplace of one check; leaving it removes what the check stored and closes its drivers.

    `tell_untidy` is called with what leaving it met after the check had passed, and with an explanation;
    without it, the check fails. That is also a key or stored bytes in what was logged or raised meanwhile.
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
        self.loads_go_on = False  # while `hold` holds a record: once a check has seen it
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
        """A time to live in seconds, which the drivers that were opened so far can honour."""
        return max(self.datastore.tick, self.traits.min_ttl if self.traits else 0.0)

    @property
    def is_late(self) -> bool:
        """Whether the tick may have been too short for what was done.

        It took half a tick beyond the time that was to pass, on a clock that nobody can stop. Behind a proxy,
        a check looks itself whether a record has expired before it lets an operation go on.
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
        """Return what the check takes its chances from; the history says its seed."""
        seed = secrets.randbits(32) if self.datastore.seed is None else self.datastore.seed
        self.history.say(f"the chances are those of `Datastore.seed` {seed}")
        return random.Random(seed)

    async def driver(self) -> Driver:
        """Return a new open driver on the datastore."""
        return self.adopt(await self._opened(self.datastore.open))

    async def unnoted(self) -> Driver:
        """Return a new open driver of which nothing is kept: neither what it does, nor what it logs."""
        return self._add(await self._opened(self.datastore.open))

    async def driver_at(self, address: str) -> Driver:
        """Return a new open driver that reaches the server at an address; there is a `Datastore.through`."""
        through = self.datastore.through
        assert through is not None, "a check asks for `Datastore.through` first"
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
        """Return the check's proxy before the datastore, which it has an address for."""
        if self._proxy is None:
            proxy = Proxy(self.datastore.address)
            proxy.start()
            self._proxy = proxy
        return self._proxy

    def adopt(self, driver: Driver) -> Driver:
        """Record what an open driver does and logs from now on, and close it in the end."""
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
        """Remember to remove everything in `scope` in the end."""
        self._scopes.append(scope)
        self.history.given(scope)

    async def pass_time(self, seconds: float) -> None:
        """Let seconds go by on the clock that judges expiry."""
        self.history.say(f"{seconds:g} s pass")
        self._waited_s += seconds
        await self.datastore.pass_time(seconds)

    async def damage(self, key: Key) -> None:
        """Make a record's stored bytes unreadable; the check has seen that `Datastore.damage` is there."""
        assert self.datastore.damage is not None
        self.history.say(f"{self.history.shown(key)} is damaged", key)
        self._damaged.append(key)
        await self.datastore.damage(key)

    async def cut(self, key: Key) -> None:
        """Remove a part of what is stored of a record; the check has seen that `Datastore.cut` is there."""
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
        # What the check has found matters more than what tidying up after it meets, and a driver that cannot
        # be closed does not keep the others open.
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
            # Also if the limit of the check cancels this; the thread would outlive it.
            if self._proxy is not None:
                self._proxy.stop()
        if error is None and failures:
            raise Untidy(failures[0]) from failures[0]
        if error is None:
            self._require_discretion()

    def _require_discretion(self) -> None:
        """Fail if anything that was logged or raised names a key, or shows stored bytes."""
        if self._heard is None:
            return
        for error in self.history.errors:
            self._heard.judge(error)
        for message, found in self._heard.told.items():
            raise Overheard(Met(found, f"said by {message.where}"))

    async def _remove_all(self) -> None:
        # One of the check's own drivers may be closed by now, so this one is new.
        driver = await self.datastore.open()
        try:
            for key in self._damaged:
                # First, because the name of a damaged record may be what a scan cannot read.
                await driver.delete(key)
            for scope in self._scopes:
                for name in await names_in(driver, scope):
                    await driver.delete(Key(scope, name))
        finally:
            await driver.close()


async def names_in(driver: Driver, scope: str, *, limit: int = 100) -> list[str]:
    """Return every name of a scope, as a listing in pages gives them."""
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
    """Where the pages of one listing have ended."""

    def __init__(self) -> None:
        self._ended = Counter[str]()

    def next(self, after: str | None) -> str | None:
        """Return where the next page begins; fail if pages have ended there again and again."""
        __tracebackhide__ = True
        if after is not None:
            self._ended[after] += 1
            if self._ended[after] == REPEATED:
                raise Met(STANDS_STILL, STANDS_STILL)
        return after
