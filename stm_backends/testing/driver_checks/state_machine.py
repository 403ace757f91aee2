"""Random sequences of operations, on whose results a driver and a small model must agree.

Needs hypothesis. `driver_machine(...)` returns a state machine for `run_state_machine_as_test` of
`hypothesis.stateful`, or for pytest by its `TestCase`. A failure is shrunk to the shortest history.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from stm_backends.drivers.contract import (
    ABSENT,
    ANY,
    KEEP,
    AbsentType,
    AnyType,
    Driver,
    KeepType,
    Key,
    Record,
)
from stm_backends.drivers.wrapper import with_last
from stm_backends.testing.workbench.check import LONGEST_CHECK_S
from stm_backends.testing.workbench.drivers import Datastore, names_in
from stm_backends.testing.workbench.expectations import must_be
from stm_backends.testing.workbench.watchdog import WATCHDOG

T = TypeVar("T")

# Histories are short, so most of each is about the same record.
NAMES: Final = st.sampled_from(["a", "a", "a", "a:", "\U0001f600"])
SCOPES: Final = st.sampled_from([0, 0, 0, 1])
VALUES: Final = st.binary(max_size=4)
TICKS: Final = (1.0, 2.0, 3.0)
TTLS: Final = st.none() | st.sampled_from(TICKS)
WHICH: Final = st.integers(0, 1)

EARLY: Final = 0.2
"""Maximum number of ticks by which a real clock may be ahead of the model when an operation begins."""
LATE: Final = 0.45
"""The same when it ends. Records expire half a tick after a whole one, so the model's answer is certain."""

MOST_WAITED: Final = 8
"""Number of ticks of a real clock to wait for in a history; most records live for three or fewer."""

_WATCHED: Final = "an operation of a random history (clause driver.model)"


@dataclass
class Modelled:
    """A record as the contract describes it; times are ticks."""

    version: str
    body: bytes | None = None
    tail: list[bytes] = field(default_factory=list[bytes])
    expires: float | None = None


class DriverMachine(RuleBasedStateMachine):
    """Two instances of a driver on one datastore, compared with a dictionary.

    The model's time passes in whole ticks, in a separate rule. A real clock also runs during operations:
    before it is too far ahead of the model, the two meet again at the next whole tick. An operation that
    takes longer leaves open which records expired during it, and is not judged.
    """

    loop: asyncio.AbstractEventLoop
    datastore: Datastore
    times: tuple[float, ...] = TICKS

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.datastore = self.make_datastore()
        with contextlib.ExitStack() as watch:
            watch.enter_context(WATCHDOG.watching(_WATCHED, LONGEST_CHECK_S))
            self.drivers: list[Driver] = [self.run(_open(self.datastore)) for _ in range(2)]
            self.watch = watch.pop_all()
        self.scopes = [f"machine:{uuid.uuid4().hex}:{number}" for number in range(2)]
        self.model: dict[Key, Modelled] = {}
        self.now = 0.0
        self.began = time.monotonic()
        self.versions = 0
        self.waited = 0.0

    def make_datastore(self) -> Datastore:
        """Return the datastore of one history."""
        raise NotImplementedError

    def run(self, work: Awaitable[T]) -> T:
        """Run one operation to its end."""
        WATCHDOG.go_on()
        return self.loop.run_until_complete(work)

    def teardown(self) -> None:
        """Remove the machine's records, and close its drivers."""
        try:
            for scope in self.scopes:
                for name in self.run(names_in(self.drivers[0], scope)):
                    self.run(self.drivers[0].delete(Key(scope, name)))
        finally:
            # An open loop would complain when it is garbage-collected, long after this check.
            with self.watch, contextlib.closing(self.loop):
                for driver in self.drivers:
                    self.run(driver.close())

    def ahead(self) -> float:
        """Return the number of ticks by which a real clock is ahead of the model."""
        if not self.datastore.waits:
            return 0.0
        return (time.monotonic() - self.began) / self.datastore.tick - self.now

    def catch_up(self) -> None:
        """Let the model meet a real clock at the next whole tick, if operations have taken their time."""
        if (ahead := self.ahead()) > EARLY:
            ticks = math.ceil(ahead)
            self.now += ticks
            self.run(self.datastore.pass_time((ticks - ahead) * self.datastore.tick))

    def ended_in_time(self, key: Key) -> bool:
        """Return whether a write has ended in time; if not, make sure that the record does not exist."""
        if self.ahead() < LATE:
            return True
        self.run(self.drivers[0].delete(key))
        self.model.pop(key, None)
        return False

    def find(self, key: Key) -> Modelled | None:
        """Return the model of a record that has not expired."""
        found = self.model.get(key)
        if found and found.expires is not None and found.expires <= self.now:
            del self.model[key]
            return None
        return found

    def mint(self) -> str:
        """Return a version that was never used."""
        self.versions += 1
        return f"v{self.versions}"

    def lasting(self, ttl: float | None) -> tuple[float | None, float | None]:
        """Return a time to live in the forms for the driver and for the model."""
        # Half a tick keeps the two from being on different sides of an expiry.
        return (None, None) if ttl is None else ((ttl - 0.5) * self.datastore.tick, self.now + ttl - 0.5)

    @rule(which=WHICH, scope=SCOPES, name=NAMES, entry=VALUES, ttl=TTLS)
    def append(self, which: int, scope: int, name: str, entry: bytes, ttl: float | None) -> None:
        """Append an entry."""
        self.catch_up()
        key, initial_version = Key(self.scopes[scope], name), self.mint()
        seconds, expires = self.lasting(ttl)
        found = self.find(key) or Modelled(initial_version)
        found.tail.append(entry)
        found.expires = expires
        self.model[key] = found
        length = self.run(
            self.drivers[which].append(key, entry, initial_version=initial_version, ttl=seconds)
        )
        if self.ended_in_time(key):
            must_be(length, len(found.tail), "an append returns the new length of the tail")

    @rule(which=WHICH, scope=SCOPES, name=NAMES, body=VALUES, ttl=TTLS, expect=st.sampled_from([ABSENT, ANY]))
    def save(
        self, which: int, scope: int, name: str, body: bytes, ttl: float | None, expect: AbsentType | AnyType
    ) -> None:
        """Replace with ANY or ABSENT."""
        self._replace(which, Key(self.scopes[scope], name), body, self.mint(), expect, ttl)

    @rule(
        which=WHICH,
        scope=SCOPES,
        name=NAMES,
        body=VALUES,
        drop=st.integers(0, 4),
        ttl=TTLS | st.just(KEEP),
        stale=st.booleans(),
        twice=st.booleans(),
    )
    def fold(
        self,
        which: int,
        scope: int,
        name: str,
        body: bytes,
        drop: int,
        ttl: float | None | KeepType,
        stale: bool,
        twice: bool,
    ) -> None:
        """Replace a version, perhaps a stale one, perhaps twice."""
        key = Key(self.scopes[scope], name)
        found = self.find(key)
        expect = "stale" if stale or found is None else found.version
        version = self.mint()
        for _ in range(1 + twice):
            self._replace(which, key, body, version, expect, ttl, drop=drop)

    @rule(
        which=WHICH,
        scope=SCOPES,
        name=NAMES,
        body=VALUES,
        entries=st.lists(VALUES, min_size=1, max_size=4),
        ttl=TTLS | st.just(KEEP),
        stale=st.booleans(),
        twice=st.booleans(),
    )
    def rewrite(
        self,
        which: int,
        scope: int,
        name: str,
        body: bytes,
        entries: list[bytes],
        ttl: float | None | KeepType,
        stale: bool,
        twice: bool,
    ) -> None:
        """Rewrite the oldest entries of a version, perhaps of a stale one, perhaps twice."""
        key = Key(self.scopes[scope], name)
        found = self.find(key)
        expect = "stale" if stale or found is None else found.version
        version = self.mint()
        for _ in range(1 + twice):
            self._replace(which, key, body, version, expect, ttl, rewrite=entries)

    @rule(which=WHICH, scope=SCOPES, name=NAMES, stale=st.booleans(), any_=st.booleans())
    def delete(self, which: int, scope: int, name: str, stale: bool, any_: bool) -> None:
        """Delete a record, or one version of it."""
        self.catch_up()
        key = Key(self.scopes[scope], name)
        found = self.find(key)
        expect = ANY if any_ else "stale" if stale or found is None else found.version
        expected = found is not None and expect in (ANY, found.version)
        if expected:
            del self.model[key]
        answer = self.run(self.drivers[which].delete(key, expect=expect))
        if self.ended_in_time(key):
            must_be(answer, expected, "a delete returns whether it removed the record")

    @precondition(lambda self: bool(self.times) and self.waited < MOST_WAITED)
    @rule(pick=st.integers(0, 2))
    def pass_time(self, pick: int) -> None:
        """Let time pass."""
        ticks = self.times[pick % len(self.times)]
        self.now += ticks
        self.waited += ticks * self.datastore.waits
        self.run(self.datastore.pass_time(ticks * self.datastore.tick))

    @rule(which=WHICH, scope=SCOPES, limit=st.integers(1, 5))
    def scan(self, which: int, scope: int, limit: int) -> None:
        """List a scope in pages."""
        self.catch_up()
        names = [key.name for key in list(self.model) if key.scope == self.scopes[scope] and self.find(key)]
        listed = self.run(names_in(self.drivers[which], self.scopes[scope], limit=limit))
        if self.ahead() < LATE:
            must_be(listed, sorted(names, key=str.encode), "these names have a record that has not expired")

    @rule(which=WHICH, scope=SCOPES, name=NAMES, last=st.integers(0, 5))
    def newest(self, which: int, scope: int, name: str, last: int) -> None:
        """Load the newest entries of a record."""
        self.catch_up()
        key = Key(self.scopes[scope], name)
        found = self.find(key)
        expected = found and Record(found.version, found.body, tuple(found.tail)).newest(last)
        loaded = self.run(with_last(self.drivers[which]).load(key, last=last))
        if self.ahead() < LATE:
            must_be(loaded, expected, f"these are the newest {last} entries")

    @rule(which=WHICH)
    def reopen(self, which: int) -> None:
        """Close an instance and open another in its place."""
        self.run(self.drivers[which].close())
        self.drivers[which] = self.run(_open(self.datastore))

    @precondition(lambda self: bool(self.model))
    @invariant()
    def records_are_as_modelled(self) -> None:
        """Load every record through both instances."""
        for key in list(self.model):
            for driver in self.drivers:
                self.catch_up()
                found = self.find(key)
                expected = found and Record(found.version, found.body, tuple(found.tail))
                loaded = self.run(driver.load(key))
                if self.ahead() < LATE:
                    must_be(loaded, expected, "this is the result of the operations so far")

    def _replace(
        self,
        which: int,
        key: Key,
        body: bytes,
        version: str,
        expect: str | AbsentType | AnyType,
        ttl: float | None | KeepType,
        *,
        drop: int = 0,
        rewrite: Sequence[bytes] = (),
    ) -> None:
        going = drop or len(rewrite)
        self.catch_up()
        found = self.find(key)
        seconds: float | None | KeepType = KEEP
        expires = found.expires if found else None
        if ttl is not KEEP:
            seconds, expires = self.lasting(ttl)
        if found and found.version == version:
            expected = True
        else:
            expected = (
                expect is ANY
                or (expect is ABSENT and found is None)
                or (found is not None and found.version == expect and going <= len(found.tail))
            )
            if expected:
                tail = [*rewrite, *found.tail[going:]] if found and isinstance(expect, str) else []
                self.model[key] = Modelled(version, body, tail, expires)
        answer = self.run(
            self.drivers[which].replace(
                key, body, version=version, expect=expect, drop=drop, rewrite=rewrite, ttl=seconds
            )
        )
        if self.ended_in_time(key):
            must_be(answer, expected, "a replace returns whether it stored its version")


async def _open(datastore: Datastore) -> Driver:
    return await datastore.open()


def driver_machine(
    make_datastore: Callable[[], Datastore], *, times: tuple[float, ...] = TICKS
) -> type[DriverMachine]:
    """Return a state machine for the drivers of a datastore, which is created for each history.

    `times` are the numbers of ticks that may pass at once; if empty, no time passes.
    """
    which_times = times

    class Machine(DriverMachine):
        times = which_times

        def make_datastore(self) -> Datastore:
            return make_datastore()

    return Machine
