"""Settings of the PostgreSQL backend, as keyword arguments or as a URL."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import ssl as tls
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Literal, TypeAlias
from urllib.parse import SplitResult, parse_qsl, unquote, urlencode

from stm_backends.drivers.checks import require_count, require_known, require_seconds
from stm_backends.drivers.settings import (
    BAD_PORT,
    MIB,
    Settings,
    query_parsers,
    require_no_placeholder,
    setting,
)
from stm_backends.drivers.tls_files import require_authorities, require_files
from stm_backends.errors import ConfigurationError
from stm_backends_postgres.statements import RowSecurity

SynchronousCommit: TypeAlias = Literal["off", "local", "remote_write", "on", "remote_apply"]
Password: TypeAlias = str | Callable[[], str | Awaitable[str]]

_MAX_TENANT: Final = 200
"""Maximum length in characters. An index entry has at most about 2,700 bytes; a key may have 2,000."""

_LIBPQ: Final = frozenset(
    {
        "application_name",
        "dbname",
        "gsslib",
        "host",
        "krbsrvname",
        "options",
        "passfile",
        "password",
        "port",
        "service",
        "ssl_max_protocol_version",
        "ssl_min_protocol_version",
        "sslcert",
        "sslcrl",
        "sslkey",
        "sslmode",
        "sslpassword",
        "sslrootcert",
        "target_session_attrs",
        "user",
    }
)
"""The parameters of libpq that asyncpg knows, and `options`, which it passes to the server like any other."""

_CHECKED: Final = "with sslmode=verify-full and sslrootcert=system, no other server can be in between"
_ALIVE: Final = "a dead connection is noticed within deadline_s"
_LIMITED: Final = "deadline_s limits how long a statement may take"

_ELSEWHERE: Final[Mapping[str, str]] = {
    "channel_binding": f"asyncpg cannot bind the password to the TLS connection; leave it out: {_CHECKED}",
    "client_encoding": "text is sent as UTF8",
    "connection_limit": "pool_size limits the connections",
    "currentSchema": "schema names the schema",
    "fallback_application_name": "application_name sets this",
    "gssencmode": "asyncpg does not encrypt by Kerberos",
    "keepalives": _ALIVE,
    "keepalives_count": _ALIVE,
    "keepalives_idle": _ALIVE,
    "keepalives_interval": _ALIVE,
    "load_balance_hosts": "the hosts are tried in order",
    "pool_timeout": "deadline_s limits how long an operation waits for a connection",
    "require_auth": f"asyncpg accepts each way to log in; leave it out: {_CHECKED}",
    "search_path": "schema names the schema",
    "ssl": "sslmode=require does this",
    "sslaccept": "sslmode sets this",
    "sslcompression": "TLS is not compressed",
    "sslnegotiation": "TLS is negotiated as in all versions of PostgreSQL",
    "sslsni": "the name of the host is always sent",
    "statement_cache_size": "pgbouncer=true does this",
    "statement_timeout": _LIMITED,
    "supa": "leave it out",
    "tcp_user_timeout": _ALIVE,
    "uselibpqcompat": "leave it out",
}
"""Parameters of libpq and other clients in hosts' URLs, and what to do instead."""

_CHOICES: Final = {
    "sslmode": ("disable", "allow", "prefer", "require", "verify-ca", "verify-full"),
    "target_session_attrs": ("any", "primary", "standby", "read-write", "read-only", "prefer-standby"),
}


@dataclass(frozen=True, kw_only=True)
class PostgresSettings(Settings):
    """The server and tables to use, and the durability of writes.

    `dsn` is a URL as libpq reads it; without one, the environment determines the server (`PGHOST`, `PGUSER`,
    ...). `password` may be a function, which is called for each connection, and `ssl` is an `ssl.SSLContext`.
    `pool_size` limits the connections. `schema` names the schema that holds the tables.

    `synchronous_commit` is PostgreSQL's own setting. With `on`, the default here, an acknowledged write
    survives a crash of the server; with `off`, a crash may lose the last moments. `pgbouncer=True` keeps no
    state on a connection, for poolers that switch connections with each transaction. Settings of the
    connection are then refused, and belong to the role (`ALTER ROLE ... SET`).

    `row_security` selects what the policies on the tables compare: the `role` that connects, or a `setting`
    of the connection, `stm.tenant`, with the value of `tenant`.

    Half of `deadline_s` is for getting a connection, and half for the statement. `connect_timeout_s` limits
    the time to open another one; libpq's `connect_timeout` in a URL sets the same limit. `max_record_bytes`
    limits a body together with its tail.
    """

    backend: ClassVar = "postgres"
    url_schemes: ClassVar = ("postgresql", "postgres")
    # PostgreSQL limits an answer to 1 GB, and holds it in memory several times.
    largest_entry: ClassVar = 256 * MIB
    elsewhere: ClassVar = _ELSEWHERE

    dsn: str = setting("", query=False, connection=True, secret=True)
    password: Password | None = setting(None, connection=True, secret=True)  # noqa: RUF009 -- returns a field
    ssl: tls.SSLContext | None = setting(None, connection=True, secret=True)  # noqa: RUF009 -- returns a field
    pool_size: int = setting(10, connection=True)
    connect_timeout_s: float | None = setting(None, connection=True)
    schema: str = "public"
    synchronous_commit: SynchronousCommit | None = setting(None, connection=True)  # noqa: RUF009 -- returns a field
    pgbouncer: bool = setting(False, connection=True)
    row_security: RowSecurity = "off"
    tenant: str | None = setting(None, connection=True)
    max_record_bytes: int = 64 * MIB

    def __post_init__(self) -> None:
        super().__post_init__()
        require_count("pool_size", self.pool_size, most=10_000)
        if self.connect_timeout_s is not None:
            require_seconds("connect_timeout_s", self.connect_timeout_s)
        require_count("max_record_bytes", self.max_record_bytes, most=self.largest_entry)
        if self.max_entry_bytes > self.max_record_bytes:
            raise ConfigurationError("max_record_bytes must be at least max_entry_bytes")
        if not _SCHEMA.fullmatch(self.schema):
            raise ConfigurationError(
                "schema must be a name of at most 63 ASCII letters, digits and underscores that does not "
                "begin with a digit or with pg_"
            )
        self._require_tenant()
        if self.pgbouncer and (self.synchronous_commit is not None or self.tenant is not None):
            raise ConfigurationError(
                "with pgbouncer=True, a connection keeps no settings: leave out synchronous_commit and "
                "tenant, and set them on the role (ALTER ROLE)"
            )
        address, _, query = self.dsn.partition("://")[2].partition("?")
        libpq = _libpq(query)
        if self.password is not None and ("password" in libpq or ":" in address.rpartition("@")[0]):
            raise ConfigurationError("the URL and the options both set a password; leave one of them out")
        if self.ssl is not None and any(name.startswith("ssl") for name in libpq):
            raise ConfigurationError("the URL and ssl=... both configure TLS; leave one of them out")

    def _require_tenant(self) -> None:
        if self.tenant is None:
            return
        if self.row_security != "setting":
            raise ConfigurationError("tenant needs row_security='setting'")
        if not (0 < len(self.tenant) <= _MAX_TENANT and self.tenant.isprintable() and self.tenant.isascii()):
            raise ConfigurationError(f"tenant must be 1 to {_MAX_TENANT} printable ASCII characters")

    def server_settings(self) -> dict[str, str]:
        """Return the settings sent once on each new connection; none behind PgBouncer."""
        if self.pgbouncer:
            return {}
        settings = {
            "synchronous_commit": self.synchronous_commit or "on",
            # A warning tells that a standby was not waited for.
            "client_min_messages": "warning",
            # The statements are written for this level, and fail in others, where they would wait.
            "default_transaction_isolation": "read committed",
            # Ends before the caller gives up, so that the answer is `not done` instead of `perhaps done`.
            "statement_timeout": f"{max(1, round(self.deadline_s * 500))}",
            # A plan made while the tables were empty reads them from end to end when they no longer are,
            # until they are analysed.
            "enable_seqscan": "off",
            # Compiling takes hundreds of milliseconds. Up to PostgreSQL 17, the setting above leads to it
            # when a table is read from end to end all the same.
            "jit": "off",
        }
        if self.tenant is not None:
            settings["stm.tenant"] = self.tenant
        return settings

    def require_files(self) -> None:
        """Raise `ConfigurationError` if the URL names a file for TLS that cannot be used."""
        libpq = _libpq(self.dsn.partition("?")[2])
        if self.ssl is None and libpq.get("sslmode") in _CHOICES["sslmode"][3:]:
            named = {name: libpq.get(name) for name in ("sslrootcert", "sslcrl") if libpq.get(name) != SYSTEM}
            require_authorities(named)
            require_files({name: libpq.get(name) for name in ("sslcert", "sslkey")})

    @property
    def trusts_system(self) -> bool:
        """True if the URL names the system's trusted authorities, as is possible since libpq 16."""
        return _libpq(self.dsn.partition("?")[2]).get("sslrootcert") == SYSTEM

    @property
    def is_open_to_others(self) -> bool:
        """True if a server on another host may be used without TLS, or without a check of its certificate.

        That is possible with `sslmode=prefer`, the default of PostgreSQL's clients, and with `allow`. Other
        modes were chosen deliberately, and a service file may choose one.
        """
        netloc, _, query = self.dsn.partition("://")[2].partition("?")
        libpq = _libpq(query)
        if self.ssl is not None or libpq.get("service", os.environ.get("PGSERVICE")):
            return False
        mode = libpq.get("sslmode") or os.environ.get("PGSSLMODE") or "prefer"
        hosts = (
            netloc.partition("/")[0].rpartition("@")[2] or libpq.get("host") or os.environ.get("PGHOST", "")
        )
        return mode in ("allow", "prefer") and not all(map(_is_local, hosts.split(",")))

    @classmethod
    def read_url(cls, url: str) -> dict[str, Any]:
        """Return the settings in a URL. The rest of it becomes the `dsn`, as libpq reads it.

        `postgresql://user@host:5432/database?sslmode=verify-full`, including several hosts and Unix sockets
        (`?host=/run/postgresql`). Settings of this library are further parameters: `&schema=memory`.
        """
        if not url.partition(":")[2].startswith("//"):
            raise ConfigurationError("a postgres URL begins with postgresql:// or postgres://")
        return super().read_url(url)

    @classmethod
    def before_query(cls, parts: SplitResult) -> dict[str, Any]:
        """Return the `dsn`: the URL without the settings of this library."""
        if "@" in parts.path:
            raise ConfigurationError(
                "in a postgres URL, percent-encode '/' in a user name or password, as %2F"
            )
        libpq = _libpq(parts.query)
        for name, choices in _CHOICES.items():
            if name in libpq and libpq[name] not in choices:
                raise ConfigurationError(f"{name} must be one of {', '.join(map(repr, choices))}")
        if libpq.get("sslrootcert") == SYSTEM:
            _require_system_alone(libpq)
            libpq["sslmode"] = "verify-full"
        login, at, hosts = parts.netloc.rpartition("@")
        require_no_placeholder(login)
        _require_ports(hosts, libpq.get("port", ""))
        # asyncpg takes the first '@' as the one before the host.
        dsn = f"postgresql://{login.replace('@', '%40')}{at}{hosts}{parts.path}?{urlencode(libpq)}"
        return {"dsn": dsn.removesuffix("?")}

    @classmethod
    def read_query(cls, query: str) -> dict[str, Any]:
        """Return the settings of this library in a URL's query."""
        given = parse_qsl(query, keep_blank_values=True)
        known = {*query_parsers(cls), *_LIBPQ, "connect_timeout"}
        names = [name for name, _ in given if name not in _ELSEWHERE]
        require_known(names, known, backend=cls.backend, shown=False)
        ours = [pair for pair in given if pair[0] not in _LIBPQ and pair != ("connect_timeout", "0")]
        renamed = [("connect_timeout_s" if name == "connect_timeout" else name, text) for name, text in ours]
        return super().read_query(urlencode(renamed))


SYSTEM: Final = "system"
"""The `sslrootcert` that stands for the system's trusted authorities."""

_SCHEMA: Final = re.compile(r"(?!pg_)[A-Za-z_][A-Za-z0-9_]{0,62}")


def _libpq(query: str) -> dict[str, str]:
    """Return the parameters of libpq in a query. Raises `ConfigurationError` for a repeated one."""
    found: dict[str, str] = {}
    for name, text in parse_qsl(query, keep_blank_values=True):
        if name in found and name in _LIBPQ:
            raise ConfigurationError(f"the URL sets {name} twice")
        found[name] = text
    return {name: text for name, text in found.items() if name in _LIBPQ}


def _is_local(host: str) -> bool:
    """Return whether a host, which may have a port, is this one or the directory of a Unix socket."""
    name = unquote(host)
    if name.startswith(("/", "@")):
        return True
    name = name[1:].partition("]")[0] if name.startswith("[") else name.partition(":")[0]
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(name).is_loopback
    return name in ("", "localhost")


def _require_ports(hosts: str, ports: str) -> None:
    """Raise `ConfigurationError` unless every port is a number; the text itself may be part of a secret."""
    stated = [re.sub(r"\[.*\]", "", host).partition(":")[2] for host in hosts.split(",")]
    for port in (*stated, *ports.split(",")):
        if port and not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
            raise ConfigurationError(BAD_PORT)


def _require_system_alone(libpq: Mapping[str, str]) -> None:
    """Raise `ConfigurationError` for parameters that do not go together with `sslrootcert=system`."""
    if libpq.get("sslmode", "verify-full") != "verify-full":
        raise ConfigurationError(
            "sslrootcert=system needs sslmode=verify-full: other hosts have trusted certificates, too"
        )
    others = [name for name in libpq if name.startswith("ssl") and name not in ("sslmode", "sslrootcert")]
    if others:
        raise ConfigurationError(
            f"sslrootcert=system is used without {', '.join(others)}; pass ssl=..., an ssl.SSLContext"
        )
