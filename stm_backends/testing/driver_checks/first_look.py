"""The first look at a driver: a problem that would fail every check is reported once, before them.

The same applies to an operation that fails in its simplest form, and to problems while tidying up.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import pickle
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, cast

import pytest

from stm_backends.drivers.contract import ABSENT, ANY, KEEP, Driver, Key, Traits
from stm_backends.errors import Unavailable
from stm_backends.testing.workbench.check import Finding, NotReached, Unfit
from stm_backends.testing.workbench.drivers import ANSWERS, Datastore
from stm_backends.testing.workbench.failures import Met, Untidy, cause, cut, origin, told
from stm_backends.testing.workbench.history import must_answer
from stm_backends.testing.workbench.processes import UNREACHABLE
from stm_backends.testing.workbench.watchdog import WATCHDOG

_LOOKED: Final = pytest.StashKey[str]()
_TOLD: Final = pytest.StashKey[set[str]]()

_LONGEST_S: Final = 30.0
"""The time limit of opening and closing, in seconds; without one, they could hold up every check."""

_SLACK_S: Final = 5.0
"""Seconds that a busy machine may add to a driver's deadline."""

_LONGEST_MESSAGE: Final = 300

_KEY: Final = Key("scope", "name")
_WRITE: Final[Mapping[str, Any]] = {"version": "v", "ttl": None}

_CALLS: Final[Mapping[str, Sequence[tuple[tuple[object, ...], Mapping[str, Any]]]]] = {
    "open": [((), {})],
    "close": [((), {})],
    "load": [((_KEY,), {})],
    "append": [((_KEY, b""), {"initial_version": "v", "ttl": None})],
    "replace": [
        ((_KEY, b""), {**_WRITE, "expect": ABSENT}),
        ((_KEY, b""), {**_WRITE, "expect": "v", "drop": 1, "ttl": KEEP}),
        ((_KEY, b""), {**_WRITE, "expect": "v", "rewrite": (b"",)}),
    ],
    "delete": [((_KEY,), {}), ((_KEY,), {"expect": ANY})],
    "scan": [(("scope",), {"limit": 1}), (("scope",), {"after": "", "limit": 1})],
}
"""The checks' calls of a driver, with the fewest and the most arguments that the contract allows."""

_ALONE: Final = (
    "two instances do not see each other's records, because each has its own store. Every check needs "
    "instances on the same data. Pass a URL (or options) that names a shared store, such as memory://try for "
    "the backend `memory`"
)

_CREATE: Final = (
    "To set it up for the suite: `--stm-create` with pytest, `--create` with `stm-backends conformance`, "
    "`open_at(url, create=True)` in your own class"
)


def look(request: pytest.FixtureRequest, datastore: Datastore) -> None:
    """Raise `Unfit` if a datastore cannot be tested, and `NotReached` for the next checks of the class."""
    # Kept for the class, so that two classes in one run are examined separately.
    stash = request.node.parent.stash
    if _LOOKED in stash:
        if stash[_LOOKED]:
            raise NotReached(f"not reached: {stash[_LOOKED]}", _use_item_location=True)
        return
    failed: dict[str, BaseException] = {}
    stash[_LOOKED] = asyncio.run(_unfit(datastore, failed))
    if stash[_LOOKED]:
        raise Unfit(stash[_LOOKED], pytrace=False)
    for name, error in failed.items():
        what = str(error) if isinstance(error, Met) else f"`{name}` fails: {_told(error)}"
        _tell(request, cause(error) or told(error), what)


def teller(request: pytest.FixtureRequest) -> Callable[[Untidy, str], None]:
    """Return a function that reports a problem while tidying up once for each class."""

    def tell(error: Untidy, explanation: str) -> None:
        _tell(request, error.cause, f"{error.heading}: {told(error.error)}\n{explanation}")

    return tell


def _tell(request: pytest.FixtureRequest, why: str, text: str) -> None:
    """Raise a finding after the current check, unless one with this cause was already reported."""
    known = request.node.parent.stash.setdefault(_TOLD, set[str]())
    if why in known:
        return
    known.add(why)
    finding = Finding(text, pytrace=False)
    finding.cause = why

    def tell() -> None:
        raise finding

    request.addfinalizer(tell)


async def _unfit(datastore: Datastore, failed: dict[str, BaseException]) -> str:
    """Return why a datastore cannot be tested, or `""`; then `failed` has the errors of operations."""
    opened = await _tried("`Datastore.open`", datastore.open, _LONGEST_S)
    if not isinstance(opened, _Answer):
        return f"`Datastore.open` failed: {_told(opened)}"
    driver: Driver = opened.value

    async def close() -> None:
        # A driver may lack this, too.
        await driver.close()

    problem = _lacking(driver) or await _unusable(driver, failed) or await _alone(driver, datastore)
    if problem:
        await _tried("`close`", close, _LONGEST_S)
        return problem
    closed = await _tried("`close`", close, _LONGEST_S)
    if not isinstance(closed, _Answer):
        return f"closing the driver failed: {_told(closed)}"
    if driver.traits.reach != "process" and not _pickles(datastore.open):
        return f"{UNREACHABLE} (the driver's reach is {driver.traits.reach!r}, so checks start processes)"
    return ""


async def _unusable(driver: Driver, failed: dict[str, BaseException]) -> str:
    """Return the complaint if every check would fail in the same way, for example without the tables.

    `failed` gets the errors of operations, by name. If only some fail, the checks say more about the others.
    """
    key = Key(f"check:{uuid.uuid4().hex}:memory", "record")
    calls: Mapping[str, Callable[[], Awaitable[object]]] = {
        "load": lambda: driver.load(key),
        "append": lambda: driver.append(key, b"a", initial_version="initial", ttl=None),
        "replace": lambda: driver.replace(key, b"a", version="v", expect=ANY, ttl=None),
        "scan": lambda: driver.scan(key.scope, limit=1),
        "delete": lambda: driver.delete(key),
    }
    limit = driver.traits.deadline + _SLACK_S
    for name, call in calls.items():
        answer = await _tried(f"`{name}`", functools.partial(_answered, name, call), limit)
        if isinstance(answer, Unavailable) and name == "load":
            return f"the datastore cannot be used: {_told(answer)}"
        if isinstance(answer, _Endless):
            return f"`{name}` {answer}; the deadline in the driver's traits is {driver.traits.deadline:g} s"
        if isinstance(answer, BaseException):
            failed[name] = answer
    if len(failed) < len(calls):
        return ""
    what = {name: _told(error) for name, error in failed.items()}
    if len(set(what.values())) == 1:
        return f"every operation fails: {what['load']}"
    return "every operation fails: " + "; ".join(f"`{name}`: {each}" for name, each in what.items())


async def _answered(name: str, call: Callable[[], Awaitable[object]]) -> object:
    answer = await call()
    must_answer(name, answer, ANSWERS[name])
    return answer


class _Answer(NamedTuple):
    value: Any


class _Endless(Exception):
    """A call that did not end."""


async def _tried(name: str, call: Callable[[], Awaitable[object]], limit: float) -> _Answer | BaseException:
    """Return the answer or the error, of any type, of a call of the author's code."""
    timeout = asyncio.timeout(limit)
    try:
        with WATCHDOG.watching(f"the first {name}", limit):
            async with timeout:
                return _Answer(await call())
    # Any error is reported, because every check would meet it.
    except (Exception, SystemExit, asyncio.CancelledError) as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise  # raised by Ctrl-C, not by the driver
        return _Endless(f"does not end within {limit:g} s") if timeout.expired() else error


def _told(error: BaseException) -> str:
    hint = f". {_CREATE}" if "create=True" in str(error) else ""
    where = origin(error)
    shown = str(error) if isinstance(error, _Endless) else cut(told(error), _LONGEST_MESSAGE)
    return f"{shown}{hint}" + (f" (raised at {where})" if where else "")


async def _alone(driver: Driver, datastore: Datastore) -> str:
    """Return the complaint if another instance does not see a record that this one can read back.

    The checks report other errors.
    """
    limit = 2 * _LONGEST_S + 4 * (driver.traits.deadline + _SLACK_S)
    answer = await _tried("use of two instances", lambda: _compared(driver, datastore), limit)
    if isinstance(answer, _Endless):
        return f"the use of two instances {answer}"
    return answer.value if isinstance(answer, _Answer) else ""


async def _compared(driver: Driver, datastore: Datastore) -> str:
    key = Key(f"check:{uuid.uuid4().hex}:memory", "record")
    with contextlib.suppress(Exception):
        await driver.append(key, b"a", initial_version="initial", ttl=None)
        try:
            other = await datastore.open()
            try:
                seen = await other.load(key)
            finally:
                await other.close()
            if seen is None and await driver.load(key) is not None:
                return _ALONE
        finally:
            await driver.delete(key)
    return ""


def _lacking(driver: Driver) -> str:
    kind = type(driver).__name__
    missing = [name for name in ("name", "traits", *_CALLS) if not hasattr(driver, name)]
    if missing:
        return f"the driver {kind} lacks {', '.join(missing)}; see `stm_backends.drivers.Driver`"
    if not isinstance(cast("object", driver.traits), Traits):
        return f"the traits of the driver {kind} are not a `stm_backends.drivers.Traits`"
    for name, calls in _CALLS.items():
        try:
            signature = inspect.signature(getattr(driver, name))
        except ValueError:
            # Not every callable has a signature.
            continue
        except TypeError:
            return f"{kind}.{name} cannot be called"
        for given, named in calls:
            try:
                signature.bind(*given, **named)
            except TypeError as error:
                return f"{kind}.{name} cannot be called as `stm_backends.drivers.Driver` says: {error}"
    return ""


def _pickles(function: object) -> bool:
    try:
        pickle.dumps(function)
    except (pickle.PicklingError, AttributeError, TypeError):
        return False
    return True
