"""Checks of a driver's optional methods, besides the five operations."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import math
import time
from collections.abc import Awaitable, Callable, Generator, Iterable
from typing import Any, Final

from stm_backends.drivers.contract import Driver, Key
from stm_backends.drivers.erasing import Erasing, Remains
from stm_backends.drivers.purges import Purges, purges_of
from stm_backends.drivers.scopes import next_scope_of
from stm_backends.drivers.wrapper import layer_with
from stm_backends.errors import OutcomeUnknown, Unavailable
from stm_backends.testing.driver_checks.samples import NAMES
from stm_backends.testing.driver_checks.steps import append_all, loaded, longest
from stm_backends.testing.workbench.check import Contract, check, not_asked
from stm_backends.testing.workbench.drivers import Bench, Positions
from stm_backends.testing.workbench.expectations import must_be, must_end

LONG_S: Final = 86_400.0
"""A time to live that does not end during a check."""

MANY: Final = 1_000
"""Limit of a purge that should leave no expired records."""

CREATED_S: Final = 1.0
"""Seconds for which a purge is paused while records are recreated."""

LOCKED_S: Final = 0.05
"""The same, once such a record had to wait for the purge."""

PATIENCE: Final = 20
"""Tenths of a second that another purge may take to remove the records in its hands."""

SCOPES: Final = ("a", "a:b", "a;", "b%", "é", "\uffff", "\U0001f680")
"""Ends of scopes, in the order of their UTF-8 bytes, which differs from that of UTF-16."""


class Interleaved:
    """Awaits `work`, and does something else each time that `work` has waited, before it continues."""

    def __init__(self, work: Awaitable[object], between: Callable[[], Awaitable[object]]) -> None:
        self._work, self._between = work, between

    def __await__(self) -> Generator[Any, Any, None]:
        """Go through the steps of `work`; errors while it waits, as at a deadline, are raised in it."""
        steps: Any = self._work.__await__()
        go_on: Callable[[], Any] = functools.partial(next, steps)
        while True:
            try:
                waiting = go_on()
            except StopIteration:
                return
            try:
                yield waiting
                yield from self._between().__await__()
            except BaseException as error:  # noqa: BLE001 -- it is raised in `work`
                go_on = functools.partial(steps.throw, error)
            else:
                go_on = functools.partial(next, steps)


class Optional(Contract):
    """Checks of a driver's optional methods, besides the five operations."""

    @check("driver.optional")
    async def test_scan_expired_lists_names_of_expired_records_alone(self, bench: Bench) -> None:
        """The time is compared wrongly or not at all, or a page contains the name that it begins after."""
        driver, scope, other = await bench.driver(), bench.scope(), bench.scope()
        listing = _erasing(driver, "scan_expired")
        await _append_to_each(driver, scope, NAMES[::3], ttl=None)
        await _append_to_each(driver, scope, NAMES[1::3], ttl=LONG_S)
        await _append_to_each(driver, scope, NAMES[2::3], ttl=bench.tick)
        await _append_to_each(driver, other, NAMES, ttl=bench.tick)
        await bench.pass_time(bench.tick * 1.1)
        expired = sorted(NAMES[2::3], key=str.encode)
        listed = expired
        for limit in (1, 3, 1000):
            # The datastore may remove some of them at any moment, but brings none back.
            found = await _names(listing, scope, limit=limit)
            remaining = [name for name in listed if name in set(found)]
            must_be(found, remaining, "these have expired, and are listed in order, each once")
            listed = found

    @check("driver.optional")
    async def test_a_delete_removes_an_expired_record_that_scan_expired_lists(self, bench: Bench) -> None:
        """A delete looks for records like a load, and so finds nothing to remove."""
        driver, scope = await bench.driver(), bench.scope()
        listing = _erasing(driver, "scan_expired")
        await _append_to_each(driver, scope, "abc", ttl=bench.tick)
        await bench.pass_time(bench.tick * 1.1)
        for name in await _names(listing, scope):
            assert await driver.delete(Key(scope, name)) is False, "an expired record is absent"
        must_be(await _names(listing, scope), [], "each of them was deleted")

    @check("driver.optional")
    async def test_finish_erasure_says_what_remains_and_keeps_other_records(self, bench: Bench) -> None:
        """It waits for other connections without a limit, or raises errors that concern only its own work."""
        driver, key, gone = await bench.driver(), bench.key(), bench.key()
        erasing = _erasing(driver, "finish_erasure")
        await append_all(driver, key, b"a", b"b")
        await append_all(driver, gone, b"secret")
        await driver.delete(gone)
        async with must_end(longest(driver.traits), "it takes about one deadline"):
            remains = await erasing.finish_erasure()
        assert isinstance(remains, Remains), f"it must return `Remains`, not {type(remains).__name__}"
        assert remains.text.strip(), "the text must say what remains of deleted records, and where"
        assert remains.finished in (True, False, None), "`finished` must be True, False or None"
        must_be((await loaded(driver, key)).tail, (b"a", b"b"), "only the other record was deleted")

    @check("driver.optional")
    async def test_a_purge_removes_what_has_expired_and_no_more_than_its_limit(self, bench: Bench) -> None:
        """Records that will expire are taken as expired, or a step may go beyond the limit."""
        driver, scope = await bench.driver(), bench.scope()
        purges = purges_of(driver) or not_asked("the driver has no `purge` and `expired`")
        gone = [f"gone {number}" for number in range(7)]
        await _append_to_each(driver, scope, ("lasting",), ttl=None)
        await _append_to_each(driver, scope, ("mortal",), ttl=LONG_S)
        await _append_to_each(driver, scope, gone, ttl=bench.tick)
        await bench.pass_time(bench.tick * 1.1)
        assert await purges.expired() >= 0, "`expired` must return a number of records"
        listing: Erasing | None = layer_with(driver, "scan_expired")
        await _purge_all(purges)
        if listing is not None:
            if not await _nothing_left(listing, scope):
                # Another purge that held some of them may have been abandoned.
                await _purge_all(purges)
                await _nothing_left(listing, scope)
            must_be(await _names(listing, scope), [], "a purge that removes fewer than its limit leaves none")
        for name in ("lasting", "mortal"):
            must_be((await loaded(driver, Key(scope, name))).tail, (b"a",), "it has not expired")

    @check("driver.optional")
    async def test_a_purge_keeps_a_record_that_is_created_anew_meanwhile(self, bench: Bench) -> None:
        """A purge reads which records have expired, and then removes them by their names."""
        one, two, scope = await bench.driver(), await bench.driver(), bench.scope()
        purges = purges_of(one) or not_asked("the driver has no `purge` and `expired`")
        # Records left by others would be removed first.
        await purges.purge(MANY)
        names = [f"{number:03}" for number in range(120)]
        began = time.monotonic()
        await _append_to_each(two, scope, names, ttl=None)
        # None may expire while the others are written, because writes may remove expired records.
        ttl = bench.tick * max(1, math.ceil(2 * (time.monotonic() - began) / bench.tick))
        await _append_to_each(two, scope, names, ttl=ttl)
        await bench.pass_time(ttl * 1.1)
        left, created = iter(names), list[asyncio.Task[None]]()
        patience = CREATED_S

        async def create() -> None:
            nonlocal patience
            for name in itertools.islice(left, 2):
                created.append(asyncio.create_task(_append_to_each(two, scope, (name,), ttl=None)))
            # They may have to wait for a lock of the purge, which then continues. Without a lock, they must
            # be done before it continues, which takes a server on a busy machine a while.
            _, waiting = await asyncio.wait(created[-2:], timeout=patience)
            if waiting:
                patience = LOCKED_S

        with contextlib.suppress(Unavailable, OutcomeUnknown):
            await Interleaved(purges.purge(len(names)), create)
        await asyncio.gather(*created)
        for name in names[: len(created)]:
            tail = (await loaded(one, Key(scope, name))).tail
            must_be(tail, (b"a",), "it was created during the purge")

    @check("driver.optional")
    async def test_next_scope_finds_each_scope_in_the_order_of_their_utf8_bytes(self, bench: Bench) -> None:
        """Scopes are compared by a collation, or the given scope is found again."""
        driver, first = await bench.driver(), bench.scope()
        next_scope = next_scope_of(driver) or not_asked("the driver has no `next_scope`")
        scopes = [f"{first}:{end}" for end in SCOPES]
        for scope in reversed(scopes):
            bench.clean(scope)
            await _append_to_each(driver, scope, ("x", "y"), ttl=None)

        async def found() -> list[str]:
            listed, after = list[str](), f"{first}:"
            while (scope := await next_scope(after)) is not None and scope.startswith(f"{first}:"):
                assert scope.encode() > after.encode(), f"{scope!r} must be greater than {after!r}"
                listed.append(scope)
                after = scope
            return listed

        must_be(await found(), scopes, "these scopes have records")
        must_be(
            await next_scope(f"{scopes[0]}:a"), scopes[1], "it is the first one after that, which has none"
        )
        for name in ("x", "y"):
            await driver.delete(Key(scopes[1], name))
        must_be(await found(), [scopes[0], *scopes[2:]], "the records of the other one were deleted")


def _erasing(driver: Driver, method: str) -> Erasing:
    """Return the driver, or its inner driver, that has an optional method for erasure."""
    layer: Any = layer_with(driver, method)
    return not_asked(f"the driver has no `{method}`") if layer is None else layer


async def _purge_all(purges: Purges) -> None:
    """Purge until nothing is left; after the first time many at once, because others may have left many."""
    for limit in itertools.chain((3,), itertools.repeat(MANY)):
        removed = await purges.purge(limit)
        assert 0 <= removed <= limit, f"a purge with limit={limit} must not remove {removed} records"
        if removed < limit:
            return


async def _nothing_left(erasing: Erasing, scope: str) -> bool:
    """Return whether no expired record is left; another purge may hold some, and end soon."""
    for _ in range(PATIENCE):
        if not await _names(erasing, scope):
            return True
        await asyncio.sleep(0.1)
    return False


async def _append_to_each(driver: Driver, scope: str, names: Iterable[str], *, ttl: float | None) -> None:
    for name in names:
        await driver.append(Key(scope, name), b"a", initial_version="initial", ttl=ttl)


async def _names(erasing: Erasing, scope: str, *, limit: int = 100) -> list[str]:
    """Return the names of expired records that are still stored, from a listing in pages."""
    listed, positions = list[str](), Positions()
    after: str | None = ""
    while after is not None:
        page = await erasing.scan_expired(scope, after=after, limit=limit)
        assert len(page.names) <= limit, f"a page with limit={limit} must hold no more names"
        for name in page.names:
            assert name.encode() > after.encode(), f"a page after {after!r} must not hold {name!r}"
        listed += page.names
        after = positions.next(page.after)
    return listed
