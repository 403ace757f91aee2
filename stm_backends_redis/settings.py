"""Settings of the Redis backend, as keyword arguments or as a URL."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Final, Literal, cast, get_args
from urllib.parse import SplitResult, unquote, urlsplit

from stm_backends.drivers.checks import require_count, require_known, require_seconds
from stm_backends.drivers.contract import DEFAULT_DEADLINE_S
from stm_backends.drivers.urls import from_query, merged, truth
from stm_backends.errors import ConfigurationError

Mode = Literal["single", "cluster", "sentinel"]
Address = tuple[str, int]

_MIB: Final = 1024 * 1024
_MAX_BYTES: Final = 512 * _MIB
"""What Redis takes as one argument of a command, unless told otherwise."""

_SCHEMES: Final[Mapping[str, tuple[Mode, bool]]] = {
    "redis": ("single", False),
    "rediss": ("single", True),
    "redis+cluster": ("cluster", False),
    "rediss+cluster": ("cluster", True),
    "redis+sentinel": ("sentinel", False),
    "rediss+sentinel": ("sentinel", True),
}
URL_SCHEMES: Final = tuple(_SCHEMES)

_FROM_TEXT: Final[Mapping[str, Callable[[str], object]]] = {
    "sentinel_username": str,
    "sentinel_password": str,
    "tls_ca_file": str,
    "tls_cert_file": str,
    "tls_key_file": str,
    "tls_check_hostname": truth,
    "pool_size": int,
    "connect_timeout_s": float,
    "deadline_s": float,
    "key_prefix": str,
    "wait_replicas": int,
    "wait_fsync": truth,
    "max_entry_bytes": int,
    "max_record_bytes": int,
}

_OF_A_CLIENT: Final = frozenset(
    ("deadline_s", "key_prefix", "wait_replicas", "wait_fsync", "max_entry_bytes", "max_record_bytes")
)
"""The settings that are not those of a client, and so may stand beside one that is handed in."""


@dataclass(frozen=True, kw_only=True)
class RedisSettings:
    """Which servers, who we are to them, how durable, how patient and how large.

    `mode`: one server, a Redis Cluster found through any of its nodes, or the master called `service` that
    any of these sentinels knows. A user and password are the servers'; sentinels have their own.

    `pool_size` is how many operations may be under way at once, in a cluster with each node.
    `connect_timeout_s` is how long a new connection may take, at most half of `deadline_s`, which is how
    long one operation may take.

    `wait_replicas=n`: a write is acknowledged once n replicas have it. `wait_fsync=True` (Redis 7.2): once
    it is in the append-only file on the disk of the server, and of n replicas. A write that waited in vain
    is `OutcomeUnknown`: it was done, but not as safely as asked.

    `max_entry_bytes` limits an entry, and a body; `max_record_bytes` a body with its tail.
    """

    mode: Mode = "single"
    hosts: tuple[Address, ...] = (("localhost", 6379),)
    service: str = ""
    db: int = 0
    username: str = ""
    password: str = field(default="", repr=False)
    sentinel_username: str = ""
    sentinel_password: str = field(default="", repr=False)
    tls: bool = False
    tls_ca_file: str = ""
    tls_cert_file: str = ""
    tls_key_file: str = ""
    tls_check_hostname: bool = True
    pool_size: int = 32
    connect_timeout_s: float = 2.0
    deadline_s: float = DEFAULT_DEADLINE_S
    key_prefix: str = "stm:"
    wait_replicas: int = 0
    wait_fsync: bool = False
    max_entry_bytes: int = 16 * _MIB
    max_record_bytes: int = 64 * _MIB

    def __post_init__(self) -> None:
        self._require_types()
        if self.mode not in get_args(Mode):
            raise ConfigurationError(f"mode is 'single', 'cluster' or 'sentinel', not {self.mode!r}")
        if not self.hosts or (self.mode == "single" and len(self.hosts) > 1):
            raise ConfigurationError(
                "several servers are a cluster (redis+cluster://) or sentinels (redis+sentinel://); "
                "redis:// takes one"
            )
        if (self.mode == "sentinel") != bool(self.service):
            raise ConfigurationError(
                "sentinels, and nothing else, are asked for a service: redis+sentinel://host:26379/service"
            )
        if self.mode == "cluster" and self.db:
            raise ConfigurationError("a cluster has one database, and its URL no path")
        if self.mode != "sentinel" and (self.sentinel_username or self.sentinel_password):
            raise ConfigurationError("sentinel_username and sentinel_password are for redis+sentinel:// only")
        if not self.tls and (self.tls_ca_file or self.tls_cert_file or self.tls_key_file):
            raise ConfigurationError("certificates are for TLS: write rediss:// instead of redis://")
        if self.db < 0:
            raise ConfigurationError(f"db is the number of a database, at least 0, not {self.db}")
        if "{" in self.key_prefix or "}" in self.key_prefix:
            raise ConfigurationError(
                "key_prefix contains no braces: what stands in braces says to a cluster where a key belongs"
            )
        if self.wait_replicas < 0:
            raise ConfigurationError(f"wait_replicas is at least 0, not {self.wait_replicas}")
        require_seconds("deadline_s", self.deadline_s)
        require_seconds("connect_timeout_s", self.connect_timeout_s)
        require_count("pool_size", self.pool_size)
        require_count("max_entry_bytes", self.max_entry_bytes, most=_MAX_BYTES)
        require_count("max_record_bytes", self.max_record_bytes)

    def _require_types(self) -> None:
        """Raise `ConfigurationError` for a setting of another type than its default."""
        for one in fields(self):
            value: object = getattr(self, one.name)
            kind: type[object] = type(cast("object", one.default))
            if kind is float:
                continue  # `require_seconds` takes integers too
            if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
                raise ConfigurationError(f"{one.name} is of type {kind.__name__}, not {type(value).__name__}")

    @classmethod
    def from_url(cls, url: str, **options: Any) -> RedisSettings:
        """Return the settings that a URL spells out, and beside it keyword arguments.

        `redis://user:password@host:6379/0`, `redis+cluster://host:7000,host:7001`,
        `redis+sentinel://host:26379,host:26379/service/0`; with `rediss` instead of `redis` over TLS. User
        and password are percent-decoded; settings follow as `?key_prefix=mine:`. A setting that the two
        give differently is refused. No message shows any part of the URL before its query.
        """
        try:
            parts = urlsplit(url)
        except ValueError:
            raise ConfigurationError("a host of the redis URL has a bracket too many or too few") from None
        if parts.scheme not in _SCHEMES:
            raise ConfigurationError(
                f"a redis URL begins with {', '.join(f'{scheme}://' for scheme in _SCHEMES)}"
            )
        if parts.fragment:
            raise ConfigurationError("a redis URL has no fragment; '#' in a password is written %23")
        mode, tls = _SCHEMES[parts.scheme]
        user, _, places = parts.netloc.rpartition("@")
        username, _, password = user.partition(":")
        given = {
            "mode": mode,
            "tls": tls,
            "hosts": _hosts(places, default_port=26379 if mode == "sentinel" else 6379),
            **_path(parts, mode),
            **from_query(parts.query, _FROM_TEXT, backend="redis"),
        }
        if username:
            given["username"] = unquote(username)
        if password:
            given["password"] = unquote(password)
        return cls.from_options(**merged(given, options))

    @classmethod
    def from_options(cls, **options: Any) -> RedisSettings:
        """Return the settings that keyword arguments spell out; an unknown one raises."""
        require_known(options, (one.name for one in fields(cls)), backend="redis")
        return cls(**options)

    @classmethod
    def beside_client(cls, **options: Any) -> RedisSettings:
        """Return the settings of a driver on a client that is handed in, which has its connection already."""
        require_known(options, (one.name for one in fields(cls)), backend="redis")
        for name in sorted(options.keys() - _OF_A_CLIENT):
            raise ConfigurationError(f"{name} is for clients that we make; the one handed in has its own")
        return cls(**options)


def _hosts(places: str, *, default_port: int) -> tuple[Address, ...]:
    found: list[Address] = []
    for place in places.split(","):
        try:
            one = urlsplit(f"//{place}")
            port = one.port
        except ValueError:
            raise ConfigurationError(
                "a host of the redis URL has a port that is no number from 1 to 65535"
            ) from None
        if not one.hostname:
            raise ConfigurationError("a redis URL names a host: redis://localhost:6379/0")
        found.append((one.hostname, port or default_port))
    return tuple(found)


def _path(parts: SplitResult, mode: Mode) -> dict[str, Any]:
    """Return the service and the database that a URL's path names."""
    steps = [unquote(step) for step in parts.path.strip("/").split("/") if step]
    given: dict[str, Any] = {}
    if mode == "sentinel" and steps:
        given["service"] = steps.pop(0)
    if steps:
        number = steps.pop(0)
        if not (number.isascii() and number.isdigit()):
            raise ConfigurationError("the path of a redis URL is the number of a database, as in /0")
        given["db"] = int(number)
    if steps:
        raise ConfigurationError("the path of a redis URL is longer than /DATABASE or /SERVICE/DATABASE")
    return given
