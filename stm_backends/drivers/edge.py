"""The edge where a driver meets its client library: it enforces the deadline and translates every error."""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
import traceback
from collections.abc import Awaitable, Callable, Collection, Iterator
from typing import Final, Literal, NamedTuple, TypeAlias, TypeVar

from stm_backends.drivers.checks import not_open, require_fits
from stm_backends.drivers.contract import Traits
from stm_backends.drivers.deadlines import Deadlines
from stm_backends.drivers.home import OF_ANOTHER_LOOP, Home
from stm_backends.errors import (
    ConfigurationError,
    OutcomeUnknown,
    StmError,
    StorageError,
    Unavailable,
    located,
)
from stm_backends.handed_in import PASSED
from stm_backends.races import pause

T = TypeVar("T")

Meaning: TypeAlias = tuple[type[StorageError], str]
"""The error of this library that a client's exception becomes, and its message, which never quotes data."""

_LATE: Final[Meaning] = (OutcomeUnknown, "no answer within the deadline")

_READS: Final = frozenset({"open", "load", "scan"})
"""Operations that change no record, so an unknown outcome is the same as a failure."""

_REPEATED: Final = frozenset({"load", "scan"})
_PAUSES_S: Final = (0.02, 0.1, 0.3)
"""The longest pauses before a read is retried after a transient error; each is shortened by jitter."""


class _Cause(NamedTuple):
    """A cause of failed connections: the system's errors, words of clients that hide these, and the message.

    `opening=True` marks causes that are too vague to be named except while a connection is opened.
    """

    kinds: tuple[type[BaseException], ...]
    words: tuple[str, ...]
    message: str
    opening: bool = False


_CAUSES: Final = (
    _Cause(
        (socket.gaierror,),
        tuple(f"[Errno {number}]" for number in (socket.EAI_NONAME, socket.EAI_AGAIN, socket.EAI_FAIL)),
        "the host name is unknown",
    ),
    # For a name with several addresses, asyncio reports all refusals in the message of one error.
    _Cause(
        (ConnectionRefusedError,),
        (f"[Errno {errno.ECONNREFUSED}]",),
        "connection refused: nothing listens there",
    ),
    _Cause(
        (),
        ("mismatch, certificate is not valid for", "doesn't match"),
        "TLS failed: the server's certificate is for another host name than the one in the settings",
    ),
    _Cause(
        (),
        ("certificate has expired",),
        "TLS failed: the server's certificate has expired",
    ),
    _Cause(
        (ssl.SSLCertVerificationError,),
        ("CERTIFICATE_VERIFY_FAILED",),
        "TLS failed: the server's certificate is not trusted here",
    ),
    _Cause(
        (),
        ("WRONG_VERSION_NUMBER", "rejected SSL upgrade"),
        "TLS failed: the server does not use TLS at this port",
    ),
    _Cause((ssl.SSLError,), ("SSL handshake failed",), "TLS failed"),
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
        "the server closed the connection: it may expect TLS, or not be this kind of server",
        opening=True,
    ),
    _Cause(
        (TimeoutError,),
        ("No servers found yet", "timed out"),
        "no answer: the server is frozen or overloaded, a firewall blocks the connection, or only one side "
        "uses TLS",
        opening=True,
    ),
)
"""The causes of a failed connection, which clients report in many ways or not at all."""

_FURTHEST_CAUSE: Final = 10

_OTHER_LOOP: Final = ("Event loop is closed", "different loop", "different event loop")
"""Words of the `RuntimeError` that asyncio and clients raise for objects of another event loop."""


def with_cause(meaning: Meaning, error: BaseException, *, opening: bool = False) -> Meaning:
    """Return a meaning with the cause of a failed connection in its message, if nothing was done."""
    kind, message = meaning
    if kind is not Unavailable:
        return meaning
    for cause in _causes(error):
        for one in _CAUSES:
            known = isinstance(cause, one.kinds) or any(words in str(cause) for words in one.words)
            if known and (opening or not one.opening):
                return kind, f"{message} ({one.message})"
    return meaning


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and its causes."""
    cause: BaseException | None = error
    for _ in range(_FURTHEST_CAUSE):
        if cause is not None:
            yield cause
            cause = cause.__cause__ or cause.__context__


def _is_of_another_loop(error: BaseException) -> bool:
    """Return whether a client raised because it was used on another event loop before."""
    return any(
        isinstance(cause, RuntimeError) and any(words in str(cause) for words in _OTHER_LOOP)
        for cause in _causes(error)
    )


def passed_through(error: BaseException, packages: Collection[str], functions: Collection[str]) -> bool:
    """Return whether one of these functions, of one of these packages, called what raised an error."""
    return any(package in packages and name in functions for package, name in _frames(error))


def _is_of_the_client(error: BaseException, work: Callable[..., object]) -> bool:
    """Return whether an unknown error is no bug: it was not raised by the package of `work`, or by this one.

    Clients call functions that their user handed in, which may raise anything.
    """
    *_, (package, _) = _frames(error)
    return not isinstance(error, StmError) and package not in (_package(work.__module__), "stm_backends")


def _frames(error: BaseException) -> list[tuple[str, str]]:
    """Return the package and the name of each function that an error passed through, its origin last."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return [(_package(one.f_globals.get("__name__", "")), one.f_code.co_name) for one in frames]


def _package(module: str) -> str:
    return module.partition(".")[0]


def _never(_: BaseException) -> bool:
    return False


class ConcurrencyLimit:
    """Limits how many operations of a driver are in progress at once; the others wait.

    An operation that times out while waiting here was certainly never sent, which a client with its own queue
    cannot always tell.
    """

    def __init__(self, count: int, *, patience_s: float) -> None:
        self._count = count
        self._patience = Deadlines(patience_s)
        self._free = asyncio.Semaphore(count)
        self._is_draining = self._is_over = False

    async def __aenter__(self) -> None:
        """Wait for another operation to end if need be; raises `Unavailable` if none does in time."""
        __tracebackhide__ = True
        if self._is_draining:
            raise not_open()
        if not self._free.locked():
            await self._free.acquire()  # does not wait, so it needs no timer
        else:
            try:
                with self._patience.start():
                    await self._free.acquire()
            except TimeoutError:
                raise Unavailable("too many operations in progress; see pool_size") from None
        if self._is_over:
            self._free.release()
            raise not_open()

    async def __aexit__(self, *_: object) -> None:
        self._free.release()

    async def drain(self) -> None:
        """Wait until no operation is in progress, and let none begin: later ones are refused at once."""
        held, self._is_draining = 0, True
        try:
            for _ in range(self._count):
                await self._free.acquire()
                held += 1
        finally:
            # Operations that wait for a place fail at once, and not when their patience ends.
            self._is_over = True
            for _ in range(held):
                self._free.release()


class Edge:
    """Runs the calls of one driver to its client library, and says in each error where it happened.

    `meaning` looks a client's exception up in the driver's table, and returns `None` for one that is not in
    it. Such an exception is raised as it is if it is a bug in the driver; otherwise, `before_sending` says
    whether it was raised before anything was sent. No call is made outside of the driver's `home`; without
    one, the event loop of the first call is the home.
    """

    def __init__(
        self,
        *,
        backend: str,
        traits: Traits,
        meaning: Callable[[Exception], Meaning | None],
        before_sending: Callable[[BaseException], bool] = _never,
        home: Home | None = None,
    ) -> None:
        self._home = home or Home()
        self._backend = backend
        self._traits = traits
        self._meaning = meaning
        self._before_sending = before_sending
        self._deadlines = Deadlines(traits.deadline)

    async def run(
        self, operation: str, work: Callable[[], Awaitable[T]], *, deadline_s: float | None = None
    ) -> T:
        """Call `work` within the deadline; raises `StorageError` for any exception of the client.

        A `StorageError` that `work` raises gets the backend and the operation. A write that did not end in
        time is `OutcomeUnknown`; a read never is, because nothing depends on whether it was done. A `load` or
        `scan` that failed with a transient error is retried within the deadline; a write never is.
        `deadline_s` replaces the driver's deadline. Raises `ConfigurationError` outside of the driver's home,
        before `work` is called.
        """
        __tracebackhide__ = True  # pytest shows what `work` does, and not this
        self._home.require()
        deadline = (self._deadlines if deadline_s is None else Deadlines(deadline_s)).start()
        with located(self._backend, operation):
            try:
                with deadline:
                    for longest in _PAUSES_S if operation in _REPEATED else ():
                        try:
                            return await work()
                        except Exception as error:
                            seconds = pause(longest)
                            if not self._passes(error) or seconds >= deadline.left_s():
                                raise
                        await asyncio.sleep(seconds)
                    return await work()
            except (StorageError, asyncio.CancelledError, GeneratorExit, *PASSED):
                raise
            except BaseException as error:
                late = deadline.expired and isinstance(error, TimeoutError)
                if _is_of_another_loop(error):
                    if operation in _READS:
                        raise ConfigurationError(OF_ANOTHER_LOOP) from error
                    raise OutcomeUnknown(OF_ANOTHER_LOOP) from error
                meaning = _LATE if late else self._meaning_of(error, work)
                if meaning is None:
                    raise
                kind, message = with_cause(meaning, error, opening=operation == "open")
                if kind is OutcomeUnknown and operation in _READS:
                    kind = Unavailable
                raise kind(message) from error

    def require_fits(self, operation: str, what: Literal["entry", "record"], size: int) -> None:
        """Raise `TooLarge` if `size` bytes are more than the driver's traits allow."""
        limit = self._traits.max_entry if what == "entry" else self._traits.max_record
        require_fits(what, size, limit, backend=self._backend, operation=operation)

    def not_open(self, operation: str) -> StmError:
        """Return the error of a driver that was never opened or is closed; see `checks.not_open`."""
        return not_open(opened=self._home.was_entered, backend=self._backend, operation=operation)

    def _meaning_of(self, error: BaseException, work: Callable[..., object]) -> Meaning | None:
        """Return the meaning of an error; `None` for a bug of the driver."""
        if isinstance(error, StmError):
            return None  # such as a `ConfigurationError`, which is a `ValueError` for a table, too
        known = self._meaning(error) if isinstance(error, Exception) else None
        if known is not None or not _is_of_the_client(error, work):
            return known
        kind = Unavailable if self._before_sending(error) else OutcomeUnknown
        return kind, f"the client, or a function that it calls, failed ({type(error).__name__})"

    def _passes(self, error: Exception) -> bool:
        """Return whether an error is transient, so that a retry may succeed."""
        meaning = self._meaning(error)
        kind = type(error) if isinstance(error, StorageError) else meaning and meaning[0]
        return kind in (Unavailable, OutcomeUnknown)
