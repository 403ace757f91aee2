"""The edge where a driver meets its client library: every call has the deadline, every error is ours."""

from __future__ import annotations

import asyncio
import errno
import math
import random
import socket
import ssl
from collections.abc import Awaitable, Callable
from typing import Final, NamedTuple, TypeAlias, TypeVar

from stm_backends.errors import OutcomeUnknown, StorageError, Unavailable

T = TypeVar("T")

Meaning: TypeAlias = tuple[type[StorageError], str]
"""The error of this library that a client's exception amounts to, and what it says; nothing of the data."""

_LATE: Final[Meaning] = (OutcomeUnknown, "no answer within the deadline")

_READS: Final = frozenset({"open", "load", "scan"})
"""Operations that change no record, so that their outcome does not matter once they have failed."""

_REPEATED: Final = frozenset({"load", "scan"})
_PAUSES_S: Final = (0.02, 0.1, 0.3)
"""A read that fails for a passing reason is repeated after each of these pauses at most, with jitter."""


class _Cause(NamedTuple):
    """Why no connection came about: the system's own errors, words of clients that hide them, what to say.

    What says little by itself is looked for only where a connection is opened.
    """

    kinds: tuple[type[BaseException], ...]
    words: tuple[str, ...]
    message: str
    opening: bool = False


_CAUSES: Final = (
    _Cause(
        (socket.gaierror,),
        tuple(f"[Errno {number}]" for number in (socket.EAI_NONAME, socket.EAI_AGAIN, socket.EAI_FAIL)),
        "the name of the host is not known",
    ),
    # Of a name with several addresses, asyncio tells all refusals in the words of one error.
    _Cause((ConnectionRefusedError,), (f"[Errno {errno.ECONNREFUSED}]",), "refused: nothing listens there"),
    _Cause(
        (ssl.SSLCertVerificationError,),
        ("CERTIFICATE_VERIFY_FAILED",),
        "TLS was not agreed on: the server's certificate is not trusted here",
    ),
    _Cause(
        (),
        ("WRONG_VERSION_NUMBER", "rejected SSL upgrade"),
        "TLS was not agreed on: the server speaks none at this port",
    ),
    _Cause((ssl.SSLError,), ("SSL handshake failed",), "TLS was not agreed on"),
    _Cause(
        (ConnectionResetError,),
        (
            f"[Errno {errno.ECONNRESET}]",
            "closed by server",
            "onnection is closed",
            "onnection is already closed",
            "onnection closed",
            "connection_lost()",
        ),
        "the server hung up: it may expect TLS, or be of another kind",
        opening=True,
    ),
    _Cause(
        (TimeoutError,),
        ("No servers found yet", "timed out"),
        "no answer: the server is frozen or overloaded, or a firewall is in between",
        opening=True,
    ),
)
"""What the system said when no connection came about, which clients tell in many ways or not at all."""

_FURTHEST_CAUSE: Final = 10


def with_cause(meaning: Meaning, error: BaseException, *, opening: bool = False) -> Meaning:
    """Return what an error amounts to, with what the system said of the connection if nothing was done."""
    kind, message = meaning
    if kind is not Unavailable:
        return meaning
    cause: BaseException | None = error
    for _ in range(_FURTHEST_CAUSE):
        for one in _CAUSES if cause else ():
            known = isinstance(cause, one.kinds) or any(words in str(cause) for words in one.words)
            if known and (opening or not one.opening):
                return kind, f"{message} ({one.message})"
        cause = cause and (cause.__cause__ or cause.__context__)
    return meaning


class ConcurrencyLimit:
    """Lets so many operations of a driver through to its client at once; the others wait for a place.

    What waited in vain was never sent, which clients that have a queue of their own cannot always tell.
    """

    def __init__(self, count: int, *, patience_s: float) -> None:
        self._count = count
        self._patience_s = patience_s
        self._free = asyncio.Semaphore(count)

    async def __aenter__(self) -> None:
        """Take a place; raises `Unavailable` if none becomes free in time."""
        if not self._free.locked():
            await self._free.acquire()  # at once, so it needs no timer
            return
        try:
            async with asyncio.timeout(self._patience_s):
                await self._free.acquire()
        except TimeoutError:
            raise Unavailable("more operations are under way than pool_size allows") from None

    async def __aexit__(self, *_: object) -> None:
        self._free.release()

    async def drain(self) -> None:
        """Wait until nothing is under way, and let nothing through any more."""
        for _ in range(self._count):
            await self._free.acquire()


class Edge:
    """Runs the calls of one driver to its client library.

    `meaning` looks a client's exception up in the driver's table, and returns `None` for what is no
    matter of the datastore: a mistake in the driver, which is raised as it is.
    """

    def __init__(
        self, *, backend: str, deadline_s: float, meaning: Callable[[Exception], Meaning | None]
    ) -> None:
        self._backend = backend
        self._deadline_s = deadline_s
        self._meaning = meaning

    async def run(self, operation: str, work: Callable[[], Awaitable[T]]) -> T:
        """Call `work` within the deadline; raises `StorageError` for whatever the client raises.

        A write that did not end in time is `OutcomeUnknown`, and so is what the driver's table says so of.
        A read never is: nothing depends on whether it was done. A `load` or `scan` that failed for a passing
        reason is repeated within the deadline; a write never is.
        """
        deadline = asyncio.timeout(self._deadline_s)
        try:
            async with deadline:
                for longest in _PAUSES_S if operation in _REPEATED else ():
                    try:
                        return await work()
                    except Exception as error:
                        pause = random.uniform(longest / 2, longest)
                        if not self._passes(error) or pause >= _left(deadline):
                            raise
                    await asyncio.sleep(pause)
                return await work()
        except StorageError:
            raise
        except Exception as error:
            late = deadline.expired() and isinstance(error, TimeoutError)
            meaning = _LATE if late else self._meaning(error)
            if meaning is None:
                raise
            raise self._error(operation, with_cause(meaning, error, opening=operation == "open")) from error

    def _passes(self, error: Exception) -> bool:
        """Say whether what failed may succeed a moment later."""
        meaning = self._meaning(error)
        kind = type(error) if isinstance(error, StorageError) else meaning and meaning[0]
        return kind in (Unavailable, OutcomeUnknown)

    def _error(self, operation: str, meaning: Meaning) -> StorageError:
        kind, message = meaning
        if kind is OutcomeUnknown and operation in _READS:
            kind = Unavailable
        return kind(message, backend=self._backend, operation=operation)


def _left(deadline: asyncio.Timeout) -> float:
    """Return how many seconds are left."""
    when = deadline.when()
    return math.inf if when is None else when - asyncio.get_running_loop().time()
