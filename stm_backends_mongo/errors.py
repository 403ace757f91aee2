"""The meaning of PyMongo's exceptions and MongoDB's error codes for the caller."""

from __future__ import annotations

from typing import Final

from pymongo.errors import (
    AutoReconnect,
    ConfigurationError,
    ConnectionFailure,
    InvalidOperation,
    NetworkTimeout,
    NotPrimaryError,
    OperationFailure,
    PyMongoError,
    ServerSelectionTimeoutError,
    WaitQueueTimeoutError,
    WriteConcernError,
)

from stm_backends.drivers.edge import Meaning, passed_through
from stm_backends.errors import Corrupt, Denied, OutcomeUnknown, Unavailable

NOT_SET_UP: Final = frozenset({26})
"""NamespaceNotFound: the collection does not exist."""

OF_ANOTHER_KIND: Final = frozenset({67, 72, 85, 86, 166})
"""Setup errors for a capped collection, a time series, a conflicting index, and a view."""

BEYOND_A_DOCUMENT: Final = frozenset({10334, 17419, 17420})
"""BSONObjectTooLarge, and an update whose result would be too large for a document; nothing was done."""

_ALTERED: Final = "the document was changed by another program and is no longer a record"
_INTERRUPTED: Final = "the server was shut down or stepped down as primary during the operation"
_ELSEWHERE: Final = "this member is not the primary; nothing was done"
_LATE: Final = "the server gave up at the deadline"

_BROKEN: Final[Meaning] = (
    OutcomeUnknown,
    "a call of this client was cancelled, which broke its lock on Python 3.11; another client is needed",
)

_NOT_FOUND: Final = "no suitable server was found within the deadline; check hosts, ports and replicaSet"

_REASONS: Final[dict[str, str]] = {
    "No replica set members available": "the server that answers is not a member of that replica set",
    "ProtocolError(": "the server that answers is not MongoDB",
    "internal hostnames": (
        "the addresses that the members of the set announce, as rs.conf() shows them, cannot be reached from "
        "here; for one member alone, set directConnection=true"
    ),
}
"""Causes that only PyMongo reports when it finds no server. The edge knows the system's."""

_CODES: Final[dict[int, Meaning]] = {
    13: (Denied, "this user lacks permission in this database"),
    18: (
        Denied,
        (
            "MongoDB does not accept these credentials; it looks for the user in the database of the URL's "
            "path, or in the one that authSource names, as in authSource=admin"
        ),
    ),
    8000: (Denied, "MongoDB Atlas does not accept these credentials"),
    50: (OutcomeUnknown, _LATE),
    262: (OutcomeUnknown, _LATE),
    10107: (Unavailable, _ELSEWHERE),
    13435: (Unavailable, _ELSEWHERE),
    13436: (Unavailable, "this member is starting up or recovering; nothing was done"),
    123: (Unavailable, "linearizable reads need a replica set, and this server is not a member of one"),
    134: (Unavailable, "the replica set has no majority-committed data yet"),
    11000: (Unavailable, "another writer created the same record at the same moment; nothing was done"),
    112: (Unavailable, "too many concurrent writers; nothing was done"),
    14031: (Unavailable, "the server's disk is full; nothing was written"),
    91: (OutcomeUnknown, _INTERRUPTED),
    189: (OutcomeUnknown, _INTERRUPTED),
    11600: (OutcomeUnknown, _INTERRUPTED),
    11602: (OutcomeUnknown, _INTERRUPTED),
    # The expressions of `statements` found a type that the driver does not store.
    16554: (Corrupt, _ALTERED),
    16556: (Corrupt, _ALTERED),
    17124: (Corrupt, _ALTERED),
    28664: (Corrupt, _ALTERED),
    28724: (Corrupt, _ALTERED),
    51276: (Corrupt, _ALTERED),
}

_REFUSED_BEFORE_WRITING: Final = frozenset({10107, 13435, 13436})

_KINDS: Final[dict[type[Exception], Meaning]] = {
    WriteConcernError: (
        OutcomeUnknown,
        "written by the primary, but not acknowledged in time by as many members as the durability requires",
    ),
    WaitQueueTimeoutError: (Unavailable, "no connection was free within the deadline"),
    NetworkTimeout: (OutcomeUnknown, "no answer within the deadline"),
    AutoReconnect: (OutcomeUnknown, "the connection was lost"),
    ConnectionFailure: (OutcomeUnknown, "the connection was lost"),
    InvalidOperation: (Unavailable, "the client is closed"),
    ConfigurationError: (Unavailable, "PyMongo cannot connect as configured, or found no DNS record"),
    PyMongoError: (OutcomeUnknown, "PyMongo raised an unknown error"),
}


def meaning(error: Exception) -> Meaning | None:
    """Return the meaning of an exception; `None` if it does not come from the datastore.

    The server's code decides, unless the primary wrote and only the confirmation of other members is missing.
    """
    if isinstance(error, ServerSelectionTimeoutError):
        reasons = (words for said, words in _REASONS.items() if said in str(error))
        reason = next(reasons, None)
        return Unavailable, f"{_NOT_FOUND} ({reason})" if reason else _NOT_FOUND
    if isinstance(error, RuntimeError) and "acquired" in str(error):
        return _BROKEN
    if not isinstance(error, WriteConcernError):
        code = _code_of(error)
        if code in _CODES:
            return _CODES[code]
        if isinstance(error, OperationFailure):
            return OutcomeUnknown, f"MongoDB answered with the error code {code}"
    for kind in type(error).__mro__:
        if kind in _KINDS:
            return _KINDS[kind]
    return None


def meaning_of_last(error: Exception) -> Meaning | None:
    """Return the meaning of the last attempt's error for a client that retries writes by itself.

    The attempt before it may have been done. The server marks an error that nothing was written before.
    """
    found = meaning(error)
    refused = isinstance(error, WaitQueueTimeoutError) or _code_of(error) in _REFUSED_BEFORE_WRITING
    if refused and isinstance(error, PyMongoError) and not error.has_error_label("NoWritesPerformed"):
        return OutcomeUnknown, "the client may have sent it before, with an unknown outcome"
    return found


def before_sending(error: BaseException) -> bool:
    """Return whether an error that is not in the tables was raised before anything was sent.

    A new connection calls the client's own login function, such as an OIDC callback.
    """
    return passed_through(error, {"pymongo"}, {"connect", "authenticate"})


def _code_of(error: Exception) -> int | None:
    if isinstance(error, NotPrimaryError):
        details = error.details
        return details.get("code") if isinstance(details, dict) else None
    return error.code if isinstance(error, OperationFailure) else None
