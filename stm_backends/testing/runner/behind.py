"""The means for tests of a bare URL: a proxy before its server, and deadlines that suit each check."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from math import inf
from typing import Any, Final, NamedTuple
from urllib.parse import quote, unquote

from stm_backends.drivers.contract import Driver, Key
from stm_backends.drivers.plugins import open_driver
from stm_backends.errors import OutcomeUnknown, Unavailable
from stm_backends.testing.workbench.drivers import open_at
from stm_backends.testing.workbench.failures import cut, told
from stm_backends.testing.workbench.proxy import Proxy
from stm_backends.testing.workbench.watchdog import WATCHDOG

AMPLE_S: Final = 30.0
"""The deadline of drivers that have this setting and are not stalled; even a busy machine meets it."""

DEADLINES_S: Final = (2.0, 6.0)
"""The deadlines of drivers behind the proxy, which stalls must outlast; the longer one on slow machines."""

PROMPT: Final = 0.1
"""The share of its deadline in which a driver must load a missing record, or the machine counts as slow."""

NO_HOST: Final = "the URL names no host with its port"
SEVERAL: Final = "the URL names several hosts, and a client goes around a proxy before one of them"
ENCRYPTED: Final = "the connection uses TLS"
AROUND: Final = "the driver goes around it, to addresses that its server names, as clients of a cluster do"

_LONGEST_S: Final = 10.0
"""The time limit for each step of trying the driver through the proxy, in seconds."""

_LONGEST_MESSAGE: Final = 200

_URL: Final = re.compile(
    r"(?P<before>[A-Za-z][\w+.\-]*://(?:[^/?#]*@)?)(?P<hosts>[^/?#]*)(?P<after>.*)", re.DOTALL
)
_HOST_AND_PORT: Final = re.compile(r"(\[[^\]]+\]|[^:,\[\]]+):\d+")


class Server(NamedTuple):
    """The server of a URL: its `host:port`, and a function that returns the same URL with another one."""

    address: str
    at: Callable[[str], str]


def means(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return `address` and `through` for the server of a backend's URL, or `no_proxy` with the reason.

    `options` are the arguments of `open_at`. The driver is tried through a proxy, which is then cut.
    """
    server = server_in(options.get("url") or "")
    if isinstance(server, str):
        return {"no_proxy": server}
    found: dict[str, Any] = {}
    for seconds in DEADLINES_S:
        given = with_deadline(options, seconds)
        first = functools.partial(_through, given, server.at, create=bool(options.get("create")))
        with WATCHDOG.watching("the first use of the driver by way of a proxy", 4 * _LONGEST_S):
            why_not, took = asyncio.run(_tried(server.address, first))
        through = functools.partial(_through, given, server.at, create=False)
        found = {"no_proxy": why_not} if why_not else {"address": server.address, "through": through}
        # A deadline set by the author is kept.
        if took < PROMPT * seconds or "deadline_s" not in given:
            break
    return found


async def _through(
    given: Mapping[str, Any], at: Callable[[str], str], address: str, *, create: bool
) -> Driver:
    changed: dict[str, Any] = {**given, "url": at(address), "create": create}
    return await open_at(**changed)


def server_in(url: str) -> Server | str:
    """Return the one server of a URL, named as its host or by a URL in its query; otherwise the reason."""
    parts = _URL.fullmatch(url)
    if parts is None:
        return NO_HOST
    if "," in parts["hosts"]:
        return SEVERAL
    if _HOST_AND_PORT.fullmatch(parts["hosts"]):
        return Server(parts["hosts"], functools.partial(_in_place, parts["before"], parts["after"]))
    for value in re.finditer(r"[?&][^=&]*=([^&]*)", url):
        inner = server_in(unquote(value[1]))
        if not isinstance(inner, str):
            return Server(inner.address, functools.partial(_in_query, url, value.span(1), inner.at))
    return NO_HOST


def _in_place(before: str, after: str, address: str) -> str:
    return f"{before}{address}{after}"


def _in_query(url: str, place: tuple[int, int], at: Callable[[str], str], address: str) -> str:
    """Return a URL with another address in the URL that it contains."""
    begin, end = place
    return f"{url[:begin]}{quote(at(address), safe='')}{url[end:]}"


def with_deadline(options: Mapping[str, Any], seconds: float) -> dict[str, Any]:
    """Return options with a deadline, if the backend has the setting and the URL does not set it."""
    changed: dict[str, Any] = {**options, "deadline_s": seconds}
    try:
        if open_driver(**changed).traits.deadline == seconds:
            return changed
    except Exception:  # noqa: BLE001, S110 -- a third-party plugin may refuse it in any way
        pass
    return {**options}


async def _tried(address: str, through: Callable[[str], Awaitable[Driver]]) -> tuple[str, float]:
    """Return why a proxy cannot get between a server and a driver, or `""`, and the seconds of a load.

    The time is infinite if the driver gave up, and zero if something else was wrong.
    """
    with Proxy(address) as proxy:
        driver: Driver | None = None
        try:
            async with asyncio.timeout(_LONGEST_S):
                driver = await through(proxy.address)
                await _load(driver)
                began = time.monotonic()
                await _load(driver)
                took = time.monotonic() - began
        # The author's own errors are reported by the checks that need no proxy.
        except (Exception, SystemExit) as error:  # noqa: BLE001 -- as said above
            if driver is not None:
                await _closed(driver)
            gave_up = inf if isinstance(error, Unavailable | OutcomeUnknown | TimeoutError) else 0.0
            if proxy.encrypted:
                return ENCRYPTED, 0.0
            return f"a driver by way of it fails: {_short(error)}", gave_up
        try:
            return ENCRYPTED if proxy.encrypted else await _goes_around(proxy, driver), took
        finally:
            await _closed(driver)


async def _goes_around(proxy: Proxy, driver: Driver) -> str:
    try:
        async with proxy.cut(), asyncio.timeout(_LONGEST_S):
            await _load(driver)
    # Of any kind: the checks judge which error a driver raises in an outage, and when.
    except (Exception, SystemExit):  # noqa: BLE001 -- as said above
        return ""
    return AROUND


async def _load(driver: Driver) -> None:
    await driver.load(Key("check:conformance:memory", "record"))


async def _closed(driver: Driver) -> None:
    with contextlib.suppress(Exception, SystemExit):
        async with asyncio.timeout(_LONGEST_S):
            await driver.close()


def _short(error: BaseException) -> str:
    return cut(told(error).partition("\n")[0], _LONGEST_MESSAGE)
