"""What a check of a driver uses: a datastore, open drivers, fresh keys and the passing of time."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Final, cast

from stm_backends.drivers.contract import Driver, Key, Page, Record, Traits
from stm_backends.drivers.plugins import open_driver
from stm_backends.errors import ConfigurationError
from stm_backends.testing.workbench.failures import Untidy, told
from stm_backends.testing.workbench.history import History, Recorded, must_answer
from stm_backends.testing.workbench.proxy import Proxy

QUICK_HISTORIES: Final = 3
"""How many random histories a quick run tries. It does not shrink failures, which takes longest."""

QUICK_RACES_S: Final = 1.0
"""How many seconds the races of a quick run take at most."""

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
    """An open driver on a client of the caller, and how to ask whether that client is open."""

    driver: Driver
    is_open: Callable[[], Awaitable[bool]]
    close: Callable[[], Awaitable[None]]


@dataclass(frozen=True, kw_only=True)
class Datastore:
    """How a suite reaches one datastore.

    `open` returns an open driver, each time another instance on the same data. Where the driver's reach
    goes beyond the process it is called in other processes too, so it must pickle: a function at the top
    of an importable module, or a `functools.partial` of one.

    `pass_time` lets seconds go by on the clock that judges expiry; with a real clock it sleeps. `tick` is
    a time to live in seconds that is longer than any operation takes and short enough to wait for.
    `histories` is how many random histories of operations are tried, and `races_s` is how many seconds races
    of writers are repeated; a quick run tries fewer.

    The rest is optional; a check that needs what is missing is reported as not asked:

    - `damage(key)` makes the record's stored bytes unreadable, past the driver.
    - `peek(key)` returns the record as the datastore has it, past the driver.
    - `address` is the server's `host:port`, and `through(address)` returns an open driver that reaches the
      server at another address: the suite puts a proxy before the server, and does what networks do. The
      shorter the deadline of these drivers, the shorter the checks.
    - `outage()` is a context in which the datastore cannot be reached by drivers that are open already; where
      there is an `address`, the suite's proxy has one too.
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
    damage: Callable[[Key], Awaitable[None]] | None = None
    peek: Callable[[Key], Awaitable[Record | None]] | None = None
    address: str = ""
    through: Callable[[str], Awaitable[Driver]] | None = None
    outage: Callable[[], AbstractAsyncContextManager[object]] | None = None
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
    without it, the check fails.
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
        self.tick = datastore.tick
        self.history = History()
        self.loads_go_on = False  # while `hold` holds a record: once a check has seen it
        self.traits: Traits | None = None
        self._drivers: list[Driver] = []
        self._proxy: Proxy | None = None
        self._scopes: list[str] = []
        self._damaged: list[Key] = []

    async def driver(self) -> Driver:
        """Return a new open driver on the datastore."""
        return self.adopt(await self.datastore.open())

    def proxy(self) -> Proxy:
        """Return the check's proxy before the datastore, which it has an address for."""
        if self._proxy is None:
            proxy = Proxy(self.datastore.address)
            proxy.start()
            self._proxy = proxy
        return self._proxy

    def adopt(self, driver: Driver) -> Driver:
        """Record what an open driver does from now on, and close it in the end."""
        self._drivers.append(driver)
        self.traits = driver.traits
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

    async def pass_time(self, seconds: float) -> None:
        """Let seconds go by on the clock that judges expiry."""
        self.history.say(f"{seconds:g} s pass")
        await self.datastore.pass_time(seconds)

    async def damage(self, key: Key) -> None:
        """Make a record's stored bytes unreadable; the check has seen that `Datastore.damage` is there."""
        assert self.datastore.damage is not None
        self.history.say(f"{self.history.shown(key)} is damaged", key)
        self._damaged.append(key)
        await self.datastore.damage(key)

    async def __aenter__(self) -> Bench:
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
            # Also if the limit of the check cancels this; the thread would outlive it.
            if self._proxy is not None:
                self._proxy.stop()
        if error is None and failures:
            raise Untidy(failures[0]) from failures[0]

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
    after: str | None = ""
    while after is not None:
        page = await driver.scan(scope, after=after, limit=limit)
        must_answer("scan", page, ANSWERS["scan"])
        names += page.names
        after = page.after
    return names
