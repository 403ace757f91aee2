"""The meaning of asyncpg's exceptions and PostgreSQL's error codes for the caller.

PostgreSQL does not commit a statement that it answers with an error. The outcome is unknown only if the
answer never came, or if the server itself failed.
"""

from __future__ import annotations

import copy
import ssl
import traceback
from collections.abc import Mapping
from typing import Final

from asyncpg import exceptions  # pyright: ignore[reportMissingTypeStubs] -- it has none

from stm_backends.drivers.edge import Meaning, passed_through, with_cause
from stm_backends.errors import Corrupt, Denied, OutcomeUnknown, StmError, StorageError, Unavailable
from stm_backends.handed_in import PASSED

_ALTERED: Final = "the tables of this library were changed by another program"
_BUSY: Final = (
    "aborted because of concurrent transactions or their locks; nothing was done, and a retry may succeed"
)
MISSING: Final = (
    "the tables of this library do not exist; open once with create=True (`stm-backends ping --create "
    "--url URL` does), or run what `stm-backends schema --url URL` prints"
)
_POOLER: Final = (
    "if a pooler in between gives each transaction another connection, set pgbouncer=True (or, on a pool "
    "passed in, statement_cache_size=0)"
)
_ENDED: Final[Meaning] = (
    Unavailable,
    "the server or an administrator has ended this connection; nothing was done",
)
_LOST: Final = "the connection was lost before the answer came"
NO_CONNECTION: Final = "no connection was free, or could be opened, within half of the deadline"
_FAULT: Final = "the server failed internally"
_FAILED: Final = "the client, or a function that it calls, failed"
_CANCELED: Final = "57014"
_OURS: Final = ("stm_backends", "stm_backends_postgres")
_FURTHEST_CAUSE: Final = 10

_STATES: Final[dict[str, Meaning]] = {
    # Codes, followed by the classes that they begin with.
    "08001": (Unavailable, "the server cannot be reached"),
    "08004": (Unavailable, "the server rejected the connection"),
    "08": (OutcomeUnknown, _LOST),
    "0A": (Unavailable, "the server, or a pooler in between, does not support this"),
    "22": (Corrupt, _ALTERED),
    "23": (Corrupt, _ALTERED),
    "25006": (Unavailable, "the server or the connection is read-only; the server may have become a standby"),
    "26": (Unavailable, _POOLER),
    "28": (
        Denied,
        (
            "the server rejected the user and password, or the certificate; in a URL, both are "
            "percent-encoded: postgresql://user:password@host/database"
        ),
    ),
    "3D": (Unavailable, "the database does not exist"),
    "3F": (Unavailable, MISSING),
    "40003": (OutcomeUnknown, "the server does not know whether the statement was completed"),
    "40": (Unavailable, _BUSY),
    "42501": (Denied, "the role lacks a permission; the README of the package lists those it needs"),
    "42704": (Denied, "the connection does not set stm.tenant, which row security needs"),
    "42P01": (Unavailable, MISSING),
    "42P05": (Unavailable, _POOLER),
    "42": (Corrupt, _ALTERED),
    "53100": (Unavailable, "the server's disk is full; nothing was written"),
    "53300": (Unavailable, "the server accepts no more connections; a smaller pool_size may help"),
    "53": (Unavailable, "the server is short of resources; nothing was done"),
    "54": (Unavailable, "the server's limits are too small for this; nothing was done"),
    "55": (Unavailable, _BUSY),
    _CANCELED: (Unavailable, "cancelled by the server's time limit or an administrator; nothing was done"),
    "57P02": (OutcomeUnknown, "the server crashed"),
    "57": (Unavailable, "the server is starting, stopping or ending connections; nothing was done"),
    "58": (OutcomeUnknown, _FAULT),
    "XX001": (Corrupt, "the server found its own data damaged"),
    "XX002": (Corrupt, "the server found its own data damaged"),
    "XX": (OutcomeUnknown, _FAULT),
}

_SPENT: Final = ("25006", "26", "42P05")
"""Errors that depend on the state of the connection, or its prepared statements."""

_CLIENT: Final[dict[type[Exception], Meaning]] = {
    # Raised by asyncpg itself before anything is sent.
    exceptions.InterfaceError: (
        Unavailable,
        "the pool or the connection is closed, or was never initialized",
    ),
    exceptions.InternalClientError: (OutcomeUnknown, "asyncpg did not understand the server"),
    # The time limit of the pool; the edge enforces the driver's deadline.
    TimeoutError: (OutcomeUnknown, "no answer within the client's own time limit"),
    OSError: (OutcomeUnknown, _LOST),
}

_CONNECTING: Final[dict[type[Exception], Meaning]] = {
    FileNotFoundError: (Unavailable, "a socket or file named by the settings does not exist"),
    ssl.SSLError: (Unavailable, "no secure connection could be made"),
    TimeoutError: (Unavailable, NO_CONNECTION),
    OSError: (Unavailable, "the server cannot be reached"),
    # Raised if a pooler refuses state that it cannot keep.
    exceptions.ProtocolViolationError: (Unavailable, f"the connection was refused; {_POOLER}"),
}


def meaning(error: Exception) -> Meaning | None:
    """Return the meaning of an exception; `None` if it does not come from the datastore."""
    if isinstance(error, exceptions.PostgresError):
        state = _state(error)
        unexpected = (OutcomeUnknown, f"unexpected {type(error).__name__}")
        return _STATES.get(state) or _STATES.get(state[:2]) or unexpected
    if isinstance(error, exceptions.ClientConfigurationError):
        return None
    return _ENDED if _is_unsent(error) else _look_up(_CLIENT, error)


def before_sending(error: BaseException) -> bool:
    """Return whether an error that is not in the tables was raised before anything was sent.

    A new connection requests its password, and a pool calls its `init` and `setup`.
    """
    return passed_through(error, {"asyncpg"}, {"connect", "_acquire"})


def is_spent(error: BaseException) -> bool:
    """Return whether a statement was refused because of its connection; it was not done."""
    if isinstance(error, exceptions.PostgresError):
        return _state(error).startswith(_SPENT)
    return _is_unsent(error)


def is_refused(error: BaseException) -> bool:
    """Return whether the server refused a statement, which was not done, and there is time for another one.

    A cancelled statement has used up the server's time limit, or is no longer wanted.
    """
    if not isinstance(error, exceptions.PostgresError) or _state(error) == _CANCELED:
        return False
    found = meaning(error)
    return found is not None and found[0] is not OutcomeUnknown


def unsent(error: Exception, operation: str) -> StorageError | None:
    """Return the error for a failure to get a connection, in which case nothing was sent."""
    found = _look_up(_CONNECTING, error) or meaning(error)
    if found is None:
        return None
    kind, message = found
    if kind is OutcomeUnknown:
        kind = Unavailable
    kind, message = with_cause((kind, message), error, opening=operation == "open")
    return kind(message)


def copied(error: BaseException) -> BaseException:
    """Return the error of a shared statement for one of its callers: a copy without the frames.

    The frames hold the entries of all callers, and tools that report errors record them. The edge judges an
    error that is not in the tables by its frames, so it is judged here.
    """
    own = _without_frames(error)
    found = meaning(error) if isinstance(error, Exception) else None
    is_judged = found is not None or isinstance(error, (StmError, *PASSED))
    if own is not None and not is_judged and _origin(error) in _OURS:
        # A bug. These lines of code say where it is, and hold no data.
        own.add_note("".join(traceback.format_tb(error.__traceback__)))
        is_judged = True
    if own is not None and is_judged:
        return own
    unknown = Unavailable if before_sending(error) else OutcomeUnknown
    kind, message = found or (unknown, f"{_FAILED} ({type(error).__name__})")
    failure = kind(message)
    failure.__cause__ = own
    return failure


def _without_frames(error: BaseException | None, depth: int = _FURTHEST_CAUSE) -> BaseException | None:
    """Return a copy of an error and its causes without frames; `None` if it cannot be copied."""
    if error is None or not depth:
        return None
    try:
        own = copy.copy(error).with_traceback(None)
    except Exception:  # noqa: BLE001 -- the class may be anyone's
        return None
    context = None if error.__suppress_context__ else error.__context__
    own.__cause__ = _without_frames(error.__cause__ or context, depth - 1)
    return own


def _origin(error: BaseException) -> str:
    """Return the package whose code raised an error."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    name: str = frames[-1].f_globals.get("__name__", "") if frames else ""
    return name.partition(".")[0]


def _is_unsent(error: BaseException) -> bool:
    """Return whether nothing was sent because asyncpg was still reading why the connection ended."""
    return isinstance(error, exceptions.InternalClientError) and "another operation" in str(error)


def _state(error: exceptions.PostgresError) -> str:
    return getattr(error, "sqlstate", None) or ""


def _look_up(table: Mapping[type[Exception], Meaning], error: Exception) -> Meaning | None:
    return next((found for kind, found in table.items() if isinstance(error, kind)), None)
