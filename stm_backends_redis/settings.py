"""Settings of the Redis backend, as keyword arguments or as a URL."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Literal
from urllib.parse import SplitResult, unquote, urlsplit

from stm_backends.drivers.checks import require_count, require_seconds
from stm_backends.drivers.settings import BAD_PORT, MIB, Settings, require_no_placeholder, setting
from stm_backends.errors import ConfigurationError

Mode = Literal["single", "cluster", "sentinel"]
Address = tuple[str, int]

_SCHEMES: Final[Mapping[str, tuple[Mode, bool]]] = {
    "redis": ("single", False),
    "rediss": ("single", True),
    "redis+cluster": ("cluster", False),
    "rediss+cluster": ("cluster", True),
    "redis+sentinel": ("sentinel", False),
    "rediss+sentinel": ("sentinel", True),
}

_ELSEWHERE: Final[Mapping[str, str]] = {
    "client_name": "connections have no name; pass your own client to set one",
    "db": "the database is the URL's path, as in redis://localhost:6379/0",
    "decode_responses": "answers are read as bytes",
    "family": "both kinds of addresses are used",
    "health_check_interval": "a dead connection is noticed within deadline_s",
    "max_connections": "pool_size limits the connections",
    "password": "user and password precede the host, as in redis://user:password@host",
    "protocol": "the protocol version makes no difference",
    "retry_on_timeout": "reads are retried, and writes if that is safe",
    "socket_connect_timeout": "connect_timeout_s limits how long a new connection may take",
    "socket_keepalive": "connections are always kept alive",
    "socket_timeout": "deadline_s limits how long an operation may take",
    "ssl": "rediss:// does this",
    "ssl_ca_certs": "tls_ca_file names the authority",
    "ssl_cert_reqs": (
        "the server's certificate is always checked; name its authority as tls_ca_file, or pass your own "
        "client"
    ),
    "ssl_certfile": "tls_cert_file names the certificate",
    "ssl_check_hostname": "tls_check_hostname sets this",
    "ssl_keyfile": "tls_key_file names the key",
    "tls": "rediss:// does this",
    "username": "user and password precede the host, as in redis://user:password@host",
}
"""Parameters of other clients, and what to do instead."""


@dataclass(frozen=True, kw_only=True)
class RedisSettings(Settings):
    """The servers to use, the login, and the durability of writes.

    `mode` is one server, a Redis Cluster found through any of `hosts`, or the master that the sentinels at
    `hosts` name for `service`. `username` and `password` are for the servers; sentinels have another login.

    `pool_size` limits the connections, in a cluster to each node; concurrent operations share one of them.
    `connect_timeout_s` limits the time to open a connection, and is capped at half of `deadline_s`.

    `wait_replicas=n` acknowledges a write once n replicas have it. `wait_fsync=True` (Redis 7.2) does so once
    it is in the append-only file on the disk of the server and of n replicas. A write that is not confirmed
    in time raises `OutcomeUnknown`: it was done, but not as durably as requested.

    `max_record_bytes` limits a body together with its tail.
    """

    backend: ClassVar = "redis"
    url_schemes: ClassVar = tuple(_SCHEMES)
    # The largest argument of a command, unless the server is configured otherwise.
    largest_entry: ClassVar = 512 * MIB
    elsewhere: ClassVar = _ELSEWHERE

    mode: Mode = setting("single", query=False, connection=True)  # noqa: RUF009 -- returns a field
    hosts: tuple[Address, ...] = setting((("localhost", 6379),), connection=True)
    service: str = setting("", query=False, connection=True)
    db: int = setting(0, query=False, connection=True)
    username: str = setting("", query=False, connection=True)
    password: str = setting("", query=False, connection=True, secret=True)
    sentinel_username: str = setting("", connection=True)
    sentinel_password: str = setting("", connection=True, secret=True)
    tls: bool = setting(False, query=False, connection=True)
    tls_ca_file: str = setting("", connection=True)
    tls_cert_file: str = setting("", connection=True)
    tls_key_file: str = setting("", connection=True)
    tls_check_hostname: bool = setting(True, connection=True)
    pool_size: int = setting(32, connection=True)
    connect_timeout_s: float = setting(2.0, connection=True)
    key_prefix: str = "stm:"
    wait_replicas: int = 0
    wait_fsync: bool = False
    max_record_bytes: int = 64 * MIB

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.hosts or (self.mode == "single" and len(self.hosts) > 1):
            raise ConfigurationError(
                "several hosts mean a cluster (redis+cluster://) or sentinels (redis+sentinel://); redis:// "
                "takes one"
            )
        if (self.mode == "sentinel") != bool(self.service):
            raise ConfigurationError(
                "sentinels need a service, and nothing else has one: redis+sentinel://host:26379/service"
            )
        if self.mode == "cluster" and self.db:
            raise ConfigurationError("a cluster has one database, so its URL has no path")
        if self.mode != "sentinel" and (self.sentinel_username or self.sentinel_password):
            raise ConfigurationError("sentinel_username and sentinel_password are for redis+sentinel:// only")
        if not self.tls and (self.tls_ca_file or self.tls_cert_file or self.tls_key_file):
            raise ConfigurationError("certificates need TLS: write rediss:// instead of redis://")
        if self.db < 0:
            raise ConfigurationError("db must be the number of a database, at least 0")
        if "{" in self.key_prefix or "}" in self.key_prefix:
            raise ConfigurationError(
                "key_prefix must contain no braces: in a cluster, braces determine the node of a key"
            )
        if self.wait_replicas < 0:
            raise ConfigurationError("wait_replicas must be at least 0")
        require_seconds("connect_timeout_s", self.connect_timeout_s)
        require_count("pool_size", self.pool_size)
        require_count("max_record_bytes", self.max_record_bytes)

    @classmethod
    def before_query(cls, parts: SplitResult) -> dict[str, Any]:
        """Return the servers, the login and the database of a URL, percent-decoded.

        `redis://user:password@host:6379/0`, `redis+cluster://host:7000,host:7001`,
        `redis+sentinel://host:26379,host:26379/service/0`; `rediss` instead of `redis` means TLS.
        """
        if "@" in parts.path:
            raise ConfigurationError("in a redis URL, percent-encode '/' in a user name or password, as %2F")
        mode, tls = _SCHEMES[parts.scheme]
        user, _, hosts = parts.netloc.rpartition("@")
        require_no_placeholder(user)
        username, _, password = user.partition(":")
        login = {"username": unquote(username), "password": unquote(password)}
        return {
            "mode": mode,
            "tls": tls,
            "hosts": _hosts(hosts, default_port=26379 if mode == "sentinel" else 6379),
            **{name: text for name, text in login.items() if text},
            **_path(parts, mode),
        }


def _hosts(hosts: str, *, default_port: int) -> tuple[Address, ...]:
    found: list[Address] = []
    for host in hosts.split(","):
        try:
            one = urlsplit(f"//{host}")
            name, port = one.hostname, one.port
        except ValueError:
            name, port = None, 0
        if port == 0:
            raise ConfigurationError(BAD_PORT)
        if not name:
            raise ConfigurationError("a redis URL needs a host: redis://localhost:6379/0")
        found.append((name, port or default_port))
    return tuple(found)


def _path(parts: SplitResult, mode: Mode) -> dict[str, Any]:
    """Return the service and the database in a URL's path."""
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
