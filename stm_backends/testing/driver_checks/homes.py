"""Checks that an open driver is used only by the process and the event loop that opened it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import sys
import warnings
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Final

from stm_backends.drivers.contract import Driver, Key
from stm_backends.drivers.wrapper import layer_with
from stm_backends.errors import ConfigurationError
from stm_backends.testing.driver_checks.steps import append_all, loaded, longest
from stm_backends.testing.workbench.check import Contract, check, not_asked
from stm_backends.testing.workbench.drivers import Bench
from stm_backends.testing.workbench.expectations import must_be, must_end, must_raise
from stm_backends.testing.workbench.forks import CAN_FORK, in_a_forked_process

READERS: Final = 16
"""Number of tasks that read while a driver is used where it does not belong."""

_OPTIONAL: Final[dict[str, tuple[tuple[object, ...], dict[str, Any]]]] = {
    "scan_expired": (("scope",), {"limit": 1}),
    "next_scope": (("",), {}),
    "expired": ((), {}),
    "purge": ((1,), {}),
}
"""The other methods that access the datastore, besides the five operations, and their calls."""

_REFUSED: Final = "an open driver belongs to the process and the event loop that opened it"
_AT_ONCE: Final = "it is refused before anything is sent"
_OWN: Final = "each reader loads its own record"


class Homes(Contract):
    """Checks that an open driver is used only by the process and the event loop that opened it."""

    @check("driver.home")
    async def test_the_event_loop_of_another_thread_is_refused_undisturbed(self, bench: Bench) -> None:
        """Two event loops share a connection, and one receives the answers of the other."""
        driver, key = await bench.driver(), bench.key()

        async def use() -> None:
            await _each_is_refused(driver, key)
            with contextlib.suppress(ConfigurationError):
                async with must_end(longest(driver.traits), _AT_ONCE):
                    await driver.close()

        async with _reading(bench, driver):
            await asyncio.to_thread(asyncio.run, use())
        await append_all(driver, key, b"a")

    @check("driver.home")
    async def test_a_forked_process_is_refused_and_disturbs_nothing(self, bench: Bench) -> None:
        """A forked process uses a connection of its parent, or sends a goodbye on it when it closes."""
        if not CAN_FORK:
            not_asked("this system cannot fork")
        driver, key, one = await bench.driver(), bench.key(), bench.key()
        await append_all(driver, one, b"one")

        async def use() -> None:
            await _each_is_refused(driver, key)
            async with must_end(longest(driver.traits), "closing it in a forked process does nothing"):
                await driver.close()
            if driver.traits.reach != "process":
                another = await bench.datastore.open()
                must_be((await loaded(another, one)).tail, (b"one",), "a driver opened after the fork works")
                await another.close()

        async with _reading(bench, driver):
            said = await in_a_forked_process(use, within=4 * longest(driver.traits))
            must_be(said, "", "a forked process is refused, closes nothing, and can open its own driver")
        await append_all(driver, key, b"a")

    @check("driver.home")
    async def test_a_driver_on_a_client_of_the_caller_is_refused_elsewhere(self, bench: Bench) -> None:
        """Only a client that the driver created itself is guarded."""
        if bench.datastore.handed_in is None:
            not_asked("needs `Datastore.handed_in`")
        handed_in = await bench.datastore.handed_in()
        try:
            driver, key = bench.adopt(handed_in.driver), bench.key()
            await append_all(driver, key, b"a")
            await asyncio.to_thread(asyncio.run, _each_is_refused(driver, key))
            if CAN_FORK:
                limit = 2 * longest(driver.traits)
                said = await in_a_forked_process(lambda: _each_is_refused(driver, key), within=limit)
                must_be(said, "", "a forked process is refused")
            must_be((await loaded(driver, key)).tail, (b"a",), "nothing was written elsewhere")
            await driver.close()
        finally:
            await handed_in.close()

    @check("driver.home")
    async def test_a_driver_whose_event_loop_has_ended_can_be_opened_again(self, bench: Bench) -> None:
        """It waits for connections that nothing serves any more, or belongs to the first event loop forever.

        Another cause is an `asyncio.Lock`, a task or a timer that is kept from one event loop to the next.
        """
        key, limit = bench.key(), 0.0
        drivers: list[Driver] = []

        async def leave_open() -> None:
            nonlocal limit
            driver = await bench.driver()
            drivers.append(driver)
            limit = longest(driver.traits)
            await append_all(driver, key, b"a")

        async def use() -> None:
            for driver in drivers:
                with must_raise(ConfigurationError, "the event loop has ended, and `open` was not called"):
                    async with must_end(limit, _AT_ONCE):
                        await driver.load(key)

        async def open_again() -> None:
            first, second = drivers
            async with must_end(4 * limit, "the remains of an ended event loop are not waited for"):
                await second.close()
                for driver in (first, second):
                    await driver.open()
                    must_be((await loaded(driver, key)).tail[:1], (b"a",), "nothing is lost")
                    await append_all(driver, key, b"b")
                    await driver.close()

        def in_turn() -> None:
            with _without_reports_of_clients():
                for work in (leave_open, leave_open, use, open_again):
                    asyncio.run(work())
                gc.collect()

        await asyncio.to_thread(in_turn)


@contextmanager
def _without_reports_of_clients() -> Generator[None]:
    """Ignore clients' reports about connections and tasks left by ended event loops."""

    def ignored(_: object) -> None:
        pass

    hook, sys.unraisablehook = sys.unraisablehook, ignored
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            yield
    finally:
        sys.unraisablehook = hook


async def _each_is_refused(driver: Driver, key: Key) -> None:
    """Call each operation, and `open`, where the driver does not belong."""
    for name, call in _calls(driver, key):
        with must_raise(ConfigurationError, f"{_REFUSED}, and `{name}` is called elsewhere"):
            async with must_end(longest(driver.traits), _AT_ONCE):
                await call()


def _calls(driver: Driver, key: Key) -> Iterator[tuple[str, Callable[[], Awaitable[object]]]]:
    yield "load", lambda: driver.load(key)
    yield "append", lambda: driver.append(key, b"b", initial_version="initial", ttl=None)
    yield "replace", lambda: driver.replace(key, b"body", version="v", expect="initial", ttl=None)
    yield "delete", lambda: driver.delete(key)
    yield "scan", lambda: driver.scan(key.scope, limit=1)
    for name, (given, named) in _OPTIONAL.items():
        method = getattr(layer_with(driver, name), name, None)
        if method is not None:
            yield name, lambda method=method, given=given, named=named: method(*given, **named)
    yield "open", driver.open


@asynccontextmanager
async def _reading(bench: Bench, driver: Driver) -> AsyncGenerator[None]:
    """Let tasks read continuously; each must load its own record, and none may fail."""
    keys = {bench.key(): b"%d" % number for number in range(READERS)}
    for key, entry in keys.items():
        await append_all(driver, key, entry)
    # Not recorded, because thousands of loads would fill the history.
    plain: Driver = getattr(driver, "inner", driver)
    is_over = asyncio.Event()

    async def read(key: Key, entry: bytes) -> None:
        rounds = 0
        while rounds < 2:
            must_be((await loaded(plain, key)).tail, (entry,), _OWN)
            rounds += is_over.is_set()
            await asyncio.sleep(0)

    async with asyncio.TaskGroup() as group:
        for key, entry in keys.items():
            group.create_task(read(key, entry))
        try:
            yield
        finally:
            is_over.set()
