"""What a caller can conclude from each of asyncpg's exceptions and PostgreSQL's error codes.

PostgreSQL reports an error instead of committing: what it answered with an error was not done. Unknown is
only what became of a statement whose answer never came, or that met a fault of the server itself.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from typing import Final

from asyncpg import exceptions  # pyright: ignore[reportMissingTypeStubs] -- it has none

from stm_backends.drivers.edge import Meaning, with_cause
from stm_backends.errors import Corrupt, Denied, OutcomeUnknown, StorageError, Unavailable

_ALTERED: Final = "the tables of this library were altered by something else"
_BUSY: Final = (
    "gave way to other transactions, or to their locks; nothing was done, and it may be tried again"
)
MISSING: Final = (
    "the tables of this library are not there; open once with create=True (`stm-backends ping --create "
    "--url URL` does), or run what `stm-backends schema --url URL` prints"
)
_POOLER: Final = (
    "if a pooler in between gives each transaction another connection, set pgbouncer=True (or, on a pool "
    "handed in, statement_cache_size=0)"
)
_LOST: Final = "the connection was lost before the answer came"
_FAULT: Final = "the server met a fault of its own"

_STATES: Final[dict[str, Meaning]] = {
    # Codes, then the classes that they begin with.
    "08001": (Unavailable, "the server cannot be reached"),
    "08004": (Unavailable, "the server rejected the connection"),
    "08": (OutcomeUnknown, _LOST),
    "0A": (Unavailable, "the server, or a pooler in between, does not support this"),
    "22": (Corrupt, _ALTERED),
    "23": (Corrupt, _ALTERED),
    "25006": (Unavailable, "the server or the connection is read-only; perhaps this is a standby now"),
    "26": (Unavailable, _POOLER),
    "28": (Denied, "the server did not accept the user and the password, or the certificate"),
    "3D": (Unavailable, "there is no such database"),
    "3F": (Unavailable, MISSING),
    "40003": (OutcomeUnknown, "the server does not know whether the statement was completed"),
    "40": (Unavailable, _BUSY),
    "42501": (Denied, "the role may not do this; the README of the package lists what it needs"),
    "42704": (Denied, "the connection does not say whose rows it may see (stm.tenant)"),
    "42P01": (Unavailable, MISSING),
    "42P05": (Unavailable, _POOLER),
    "42": (Corrupt, _ALTERED),
    "53100": (Unavailable, "the server's disk is full; nothing was written"),
    "53300": (Unavailable, "the server accepts no more connections; a smaller pool_size may help"),
    "53": (Unavailable, "the server is short of resources; nothing was done"),
    "54": (Unavailable, "the server's limits are too small for this; nothing was done"),
    "55": (Unavailable, _BUSY),
    "57014": (Unavailable, "cancelled by the server's time limit or by an administrator; nothing was done"),
    "57P02": (OutcomeUnknown, "the server crashed"),
    "57": (Unavailable, "the server is starting, stopping or ending connections; nothing was done"),
    "58": (OutcomeUnknown, _FAULT),
    "XX001": (Corrupt, "the server found its own data damaged"),
    "XX002": (Corrupt, "the server found its own data damaged"),
    "XX": (OutcomeUnknown, _FAULT),
}

_SPENT: Final = ("25006", "26", "42P05")
"""What the server refuses because of what the connection is, or of what is prepared on it."""

_CLIENT: Final[dict[type[Exception], Meaning]] = {
    # Raised by asyncpg itself, before anything is sent.
    exceptions.InterfaceError: (Unavailable, "the pool or the connection is closed, or was never made ready"),
    exceptions.InternalClientError: (OutcomeUnknown, "asyncpg did not understand the server"),
    # Its own time limit, which is the pool's; the driver's deadline is seen at the edge.
    TimeoutError: (OutcomeUnknown, "no answer within the client's own time limit"),
    OSError: (OutcomeUnknown, _LOST),
}

_CONNECTING: Final[dict[type[Exception], Meaning]] = {
    FileNotFoundError: (Unavailable, "there is no such socket, or no such file as the settings name"),
    ssl.SSLError: (
        Unavailable,
        "TLS was not agreed on; perhaps the server's certificate is not trusted here",
    ),
    TimeoutError: (Unavailable, "no connection was free, or could be made, within half of the deadline"),
    OSError: (Unavailable, "the server cannot be reached"),
    # How a pooler refuses what it cannot keep.
    exceptions.ProtocolViolationError: (Unavailable, f"the connection was refused; {_POOLER}"),
}


def meaning(error: Exception) -> Meaning | None:
    """Return what an exception amounts to; `None` for what is no matter of the datastore."""
    if isinstance(error, exceptions.PostgresError):
        state = _state(error)
        unexpected = (OutcomeUnknown, f"unexpected {type(error).__name__}")
        return _STATES.get(state) or _STATES.get(state[:2]) or unexpected
    if isinstance(error, exceptions.ClientConfigurationError):
        return None
    return _look_up(_CLIENT, error)


def is_spent(error: BaseException) -> bool:
    """Return whether a statement was refused that another connection may do; it was not done."""
    return isinstance(error, exceptions.PostgresError) and _state(error).startswith(_SPENT)


def unsent(error: Exception, operation: str) -> StorageError | None:
    """Return the error for a connection that could not be had: whatever it was, nothing had been sent."""
    found = _look_up(_CONNECTING, error) or meaning(error)
    if found is None:
        return None
    kind, message = found
    if kind is OutcomeUnknown:
        kind = Unavailable
    kind, message = with_cause((kind, message), error, opening=operation == "open")
    return kind(message)


def _state(error: exceptions.PostgresError) -> str:
    return getattr(error, "sqlstate", None) or ""


def _look_up(table: Mapping[type[Exception], Meaning], error: Exception) -> Meaning | None:
    return next((found for kind, found in table.items() if isinstance(error, kind)), None)
