"""The meaning of each error of the client library or the server for the caller."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from redis import exceptions as client
from redis.asyncio import sentinel

from stm_backends.drivers.edge import Meaning, passed_through
from stm_backends.errors import Corrupt, Denied, OutcomeUnknown, Unavailable
from stm_backends_redis.statements import CORRUPT


class NotConnected(client.ConnectionError):
    """A new connection failed, for the reason in `__cause__`: nothing was sent."""


class Unreachable(NotConnected):
    """`NotConnected` to a cluster node that never answered at the address that the cluster announces."""


NODE: Final = "the server is a node of a cluster; its URL begins with redis+cluster://"

_LOST: Final[Meaning] = (OutcomeUnknown, "the connection was lost")
_NO_CONNECTION: Final[Meaning] = (Unavailable, "no connection to the server")
_UNREACHABLE: Final[Meaning] = (
    Unavailable,
    (
        "a node cannot be reached at the address that the cluster announces; if it is not down, set "
        "cluster-announce-ip or cluster-announce-hostname, or pass a RedisCluster with address_remap=..."
    ),
)
_BUSY_CLIENT: Final[Meaning] = (Unavailable, "all connections of the client are in use")
_LOADING: Final[Meaning] = (Unavailable, "the server is still loading its data")
_REPLICA: Final[Meaning] = (Unavailable, "the server is a replica and accepts no writes")
_FULL: Final[Meaning] = (Unavailable, "the server's memory is full; nothing was written")
_MOVING: Final[Meaning] = (Unavailable, "the cluster is moving this slot, or failing over")
_NO_CLUSTER: Final[Meaning] = (
    Unavailable,
    "no node of the cluster answered; if it is not a cluster, its URL begins with redis://",
)
_LOGIN: Final[Meaning] = (
    Denied,
    (
        "the server rejects this user and password, or requires them; in a URL, percent-encode them: "
        "redis://user:password@host"
    ),
)
_FORBIDDEN: Final[Meaning] = (
    Denied,
    "this user lacks permission for a command or a key that the driver uses",
)

_NO_DATABASE: Final[Meaning] = (
    Unavailable,
    "the server has no database with this number (the path of the URL, or `db`)",
)

_UNEXPECTED: Final[Meaning] = (
    OutcomeUnknown,
    "the server returned an unknown error",
)

_CODES: Final[Mapping[str, Meaning]] = {
    CORRUPT: (Corrupt, "a part of the record is missing, or was written by another program"),
    "WRONGTYPE": (Corrupt, "the key of the record holds data of another type"),
    "OOM": _FULL,
    "MISCONF": (Unavailable, "the server cannot save to its disk and accepts no writes"),
    "NOREPLICAS": (Unavailable, "the server has too few replicas and accepts no writes"),
    "READONLY": _REPLICA,
    "MASTERDOWN": (Unavailable, "the replica has lost its master"),
    "LOADING": _LOADING,
    "BUSY": (Unavailable, "the server is busy running another script"),
    "TRYAGAIN": _MOVING,
    "CLUSTERDOWN": _MOVING,
    "ASK": _MOVING,
    "MOVED": (Unavailable, NODE),
    "NOAUTH": _LOGIN,
    "WRONGPASS": _LOGIN,
    "NOPERM": _FORBIDDEN,
}
"""By the first word of the server's answer."""

_CLASSES: Final[Mapping[type[Exception], Meaning]] = {
    client.MaxConnectionsError: _BUSY_CLIENT,
    client.AuthenticationError: _LOGIN,
    client.AuthenticationWrongNumberOfArgsError: _LOGIN,
    client.AuthorizationError: _FORBIDDEN,
    client.NoPermissionError: _FORBIDDEN,
    client.BusyLoadingError: _LOADING,
    client.ReadOnlyError: _REPLICA,
    client.OutOfMemoryError: _FULL,
    client.MovedError: _CODES["MOVED"],
    client.AskError: _MOVING,
    client.TryAgainError: _MOVING,
    client.MasterDownError: _CODES["MASTERDOWN"],
    client.ClusterError: _MOVING,
    client.InvalidResponse: (OutcomeUnknown, "the answer is not from a Redis server"),
    sentinel.MasterNotFoundError: (Unavailable, "no reachable sentinel knows the service"),
    client.RedisClusterException: _NO_CLUSTER,
    # The remaining errors of these classes may come after the command was sent.
    client.ConnectionError: _LOST,
    client.TimeoutError: _LOST,
    OSError: _LOST,
}
"""By class, or by the nearest base class that is listed."""

_COMMAND: Final = re.compile(r"run the '([a-z|]+)' command")
"""The server's text about a denied command; within a script it names no command."""

REFUSALS: Final = (client.TryAgainError, client.ClusterError)
"""Answers of a cluster while it moves slots: the command was not executed; a retry soon succeeds."""

_NOT_SENT: Final = re.compile(
    r" connecting to |^No connection available|^max number of clients|^Too many connections"
)
"""Messages of a `ConnectionError` or `TimeoutError` that came before anything was sent."""

_WORDLESS: Final[Mapping[str, Meaning]] = {
    "This instance has cluster support disabled": _NO_CLUSTER,
    "DB index is out of range": _NO_DATABASE,
    "invalid DB index": _NO_DATABASE,
}
"""Answers without such a word, or with the generic `ERR`, which is left out."""

_NO_COMMAND: Final[Meaning] = (
    Unavailable,
    "the server does not know a required command: it is not a sentinel, or too old",
)

_FORBIDDEN_IN_SCRIPT: Final = "The user executing the script can't"

_IN_SCRIPT: Final = re.compile(f"(?:^|: -?)({'|'.join(_CODES)}|{_FORBIDDEN_IN_SCRIPT})\\b")
"""Before 7.0, a server embeds the error that ends a script in another message."""


def meaning(error: BaseException) -> Meaning | None:
    """Return what an error means; `None` if it does not come from the datastore."""
    found = _meaning(error)
    if found is _FORBIDDEN and (command := _COMMAND.search(str(error))):
        return Denied, f"this user lacks permission for the command {command[1]!r}"
    return found


def before_sending(error: BaseException) -> bool:
    """Return whether an error that is not in the tables was raised before anything was sent.

    A new connection logs in with the `credential_provider` of its client.
    """
    return passed_through(error, {"redis"}, {"connect"})


def _meaning(error: BaseException) -> Meaning | None:
    if isinstance(error, Unreachable):
        return _UNREACHABLE
    if isinstance(error, NotConnected):
        why = error.__cause__ and meaning(error.__cause__)
        return why if why and why[0] is not OutcomeUnknown else _NO_CONNECTION
    found = next((_CLASSES[kind] for kind in type(error).__mro__ if kind in _CLASSES), None)
    if found is _LOST:
        if _NOT_SENT.search(str(error)):
            return _NO_CONNECTION
        if isinstance(error.__context__, client.ReadOnlyError):  # raised by a connection managed by sentinels
            return _REPLICA
    if found is None and isinstance(error, client.ResponseError):
        code = _IN_SCRIPT.search(str(error))
        if code is None:
            if str(error).startswith("unknown command"):
                return _NO_COMMAND
            return _WORDLESS.get(str(error), _UNEXPECTED)
        return _CODES.get(code[1], _FORBIDDEN)
    return found


def is_read_only(error: BaseException) -> bool:
    """Return whether a server refused a write because it is a replica."""
    return meaning(error) is _REPLICA


def not_connected(error: BaseException) -> BaseException:
    """Return the error for a command that was not sent because there was no connection.

    An error that does not come from the client library is returned unchanged.
    """
    if meaning(error) is None:
        return error
    failure = NotConnected()
    failure.__cause__ = error
    return failure


def unconnected(error: BaseException) -> str | None:
    """Return why a command got no connection; `None` if it had one and may have been sent."""
    found = meaning(error)
    return found[1] if found in (_NO_CONNECTION, _BUSY_CLIENT) else None
