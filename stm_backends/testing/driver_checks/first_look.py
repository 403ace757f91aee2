"""The first look at a driver: a problem that would fail every check is reported once, before the checks."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import pickle
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

import pytest

from stm_backends.drivers.contract import ABSENT, ANY, KEEP, Driver, Key, Traits
from stm_backends.errors import Unavailable
from stm_backends.testing.workbench.check import NotReached, Unfit
from stm_backends.testing.workbench.drivers import Datastore
from stm_backends.testing.workbench.processes import UNREACHABLE

_LOOKED: Final = pytest.StashKey[str]()

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
"""How the checks call a driver: with the least and with the most that the contract allows."""

_ALONE: Final = (
    "two instances do not see each other's records, because each has its own store. Every check needs "
    "instances on the same data. Give a URL (or options) that names a shared store, such as memory://try for "
    "the backend `memory`"
)

_CREATE: Final = (
    "To set it up for the suite: `--stm-create` with pytest, `--create` with `stm-backends conformance`, "
    "`open_at(url, create=True)` in your own class"
)


def look(request: pytest.FixtureRequest, datastore: Datastore) -> None:
    """Raise `Unfit` if a datastore cannot be tested, and `NotReached` for the next checks of the class."""
    # Of the class, so that two in one run are looked at apart.
    stash = request.node.parent.stash
    if _LOOKED in stash:
        if stash[_LOOKED]:
            raise NotReached(f"not reached: {stash[_LOOKED]}", _use_item_location=True)
        return
    stash[_LOOKED] = asyncio.run(_unfit(datastore))
    if stash[_LOOKED]:
        raise Unfit(stash[_LOOKED], pytrace=False)


async def _unfit(datastore: Datastore) -> str:
    """Return why a datastore cannot be tested, or `""`."""
    try:
        driver = await datastore.open()
    except Exception as error:  # noqa: BLE001 -- every check would meet it
        return f"`Datastore.open` failed: {_told(error)}"
    if problem := _lacking(driver) or await _unusable(driver) or await _alone(driver, datastore):
        with contextlib.suppress(Exception):
            await driver.close()
        return problem
    try:
        await driver.close()
    except Exception as error:  # noqa: BLE001 -- as above
        return f"closing the driver failed: {type(error).__name__}: {error}"
    if driver.traits.reach != "process" and not _pickles(datastore.open):
        return f"{UNREACHABLE} (the driver's reach is {driver.traits.reach!r}, so checks start processes)"
    return ""


async def _unusable(driver: Driver) -> str:
    """Return what to say if the datastore cannot be used at all, such as without its tables."""
    try:
        await driver.load(Key(f"check:{uuid.uuid4().hex}:memory", "record"))
    except Unavailable as error:
        return f"the datastore cannot be used: {_told(error)}"
    except Exception:  # noqa: BLE001, S110 -- the checks say more about other errors
        pass
    return ""


def _told(error: Exception) -> str:
    hint = f". {_CREATE}" if "create=True" in str(error) else ""
    return f"{type(error).__name__}: {error}{hint}"


async def _alone(driver: Driver, datastore: Datastore) -> str:
    """Return what to say if another instance does not see what this one has stored and reads back.

    The checks report other errors.
    """
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
        return f"the driver {kind} lacks {', '.join(missing)}; see `stm_backends.drivers.contract.Driver`"
    if not isinstance(cast("object", driver.traits), Traits):
        return f"the traits of the driver {kind} are not a `stm_backends.drivers.contract.Traits`"
    for name, calls in _CALLS.items():
        try:
            signature = inspect.signature(getattr(driver, name))
        except ValueError:
            # Not everything that can be called says how.
            continue
        except TypeError:
            return f"{kind}.{name} cannot be called"
        for given, named in calls:
            try:
                signature.bind(*given, **named)
            except TypeError as error:
                return (
                    f"{kind}.{name} cannot be called as `stm_backends.drivers.contract.Driver` says: {error}"
                )
    return ""


def _pickles(function: object) -> bool:
    try:
        pickle.dumps(function)
    except (pickle.PicklingError, AttributeError, TypeError):
        return False
    return True
