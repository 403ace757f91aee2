"""Settings of the PostgreSQL backend, as keyword arguments or as a URL."""

from __future__ import annotations

import re
import ssl as tls
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Final, Literal, TypeAlias, get_args
from urllib.parse import parse_qsl, urlencode, urlsplit

from stm_backends.drivers.checks import require_count, require_known, require_seconds
from stm_backends.drivers.contract import DEFAULT_DEADLINE_S
from stm_backends.drivers.urls import from_query, merged, truth
from stm_backends.errors import ConfigurationError
from stm_backends_postgres.statements import RowSecurity

SynchronousCommit: TypeAlias = Literal["off", "local", "remote_write", "on", "remote_apply"]
Password: TypeAlias = str | Callable[[], str | Awaitable[str]]

_MIB: Final = 1024 * 1024
_MAX_BYTES: Final = 256 * _MIB
"""PostgreSQL ends an answer at 1 GB, and has it in memory several times."""

_MAX_TENANT: Final = 200
"""Characters; PostgreSQL ends an index entry at some 2,700 bytes, and a key may have 2,000."""

_FROM_TEXT: Final[Mapping[str, Callable[[str], object]]] = {
    "schema": str,
    "pool_size": int,
    "synchronous_commit": str,
    "pgbouncer": truth,
    "row_security": str,
    "tenant": str,
    "deadline_s": float,
    "max_entry_bytes": int,
    "max_record_bytes": int,
}

_LIBPQ: Final = frozenset(
    {
        "application_name",
        "dbname",
        "gsslib",
        "host",
        "krbsrvname",
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
"""The parameters of libpq that asyncpg knows; it would take any other for a setting of the server."""

_CHOICES: Final = {
    "sslmode": ("disable", "allow", "prefer", "require", "verify-ca", "verify-full"),
    "target_session_attrs": ("any", "primary", "standby", "read-write", "read-only", "prefer-standby"),
}


@dataclass(frozen=True, kw_only=True)
class PostgresSettings:
    """Which server, which tables in it, how durable, how patient and how large.

    `dsn` is a URL as libpq reads it; without one, the environment says where the server is (`PGHOST`,
    `PGUSER`, ...). `password` may be a function that is asked for each connection, and `ssl` a context
    made by hand. `pool_size` bounds the connections. `schema` is where the tables are.

    `synchronous_commit` is PostgreSQL's: with `on`, its default here, what was acknowledged survives a
    crash of the server; with `off` a crash may take the last moments. `pgbouncer=True` keeps nothing on a
    connection, for poolers that change it with each transaction; what else there is to set on a
    connection is then refused, and belongs to the role (`ALTER ROLE ... SET`).

    `row_security` says what the policies on the tables go by: the `role` that connects, or a `setting` of
    the connection, `stm.tenant`, whose value is `tenant`.

    `deadline_s` is how long one operation may take: half of it for a connection, half for the statement.
    `max_entry_bytes` limits an entry, and a body; `max_record_bytes` a body with its tail.
    """

    dsn: str = field(default="", repr=False)
    password: Password | None = field(default=None, repr=False)
    ssl: tls.SSLContext | None = field(default=None, repr=False)
    pool_size: int = 10
    schema: str = "public"
    synchronous_commit: SynchronousCommit | None = None
    pgbouncer: bool = False
    row_security: RowSecurity = "off"
    tenant: str | None = None
    deadline_s: float = DEFAULT_DEADLINE_S
    max_entry_bytes: int = 16 * _MIB
    max_record_bytes: int = 64 * _MIB

    def __post_init__(self) -> None:
        require_count("pool_size", self.pool_size, most=10_000)
        require_seconds("deadline_s", self.deadline_s)
        require_count("max_entry_bytes", self.max_entry_bytes, most=_MAX_BYTES)
        require_count("max_record_bytes", self.max_record_bytes, most=_MAX_BYTES)
        if self.max_entry_bytes > self.max_record_bytes:
            raise ConfigurationError("max_record_bytes is at least max_entry_bytes")
        if not isinstance(self.password, str) and not callable(self.password) and self.password is not None:
            raise ConfigurationError(f"password is text or a function, not {type(self.password).__name__}")
        if self.ssl is not None and not isinstance(self.ssl, tls.SSLContext):  # pyright: ignore[reportUnnecessaryIsInstance] -- callers are not all typed
            raise ConfigurationError(f"ssl is an ssl.SSLContext, not {type(self.ssl).__name__}")
        if not isinstance(self.pgbouncer, bool):  # pyright: ignore[reportUnnecessaryIsInstance] -- as above
            raise ConfigurationError("pgbouncer is True or False")
        if not isinstance(self.schema, str) or not _SCHEMA.fullmatch(self.schema):  # pyright: ignore[reportUnnecessaryIsInstance] -- as above
            raise ConfigurationError(
                "schema is a name of at most 63 ASCII letters, digits and underscores, which begins with no "
                "digit and not with pg_"
            )
        _require_choice("synchronous_commit", self.synchronous_commit, (None, *get_args(SynchronousCommit)))
        _require_choice("row_security", self.row_security, get_args(RowSecurity))
        self._require_tenant()
        if self.pgbouncer and (self.synchronous_commit is not None or self.tenant is not None):
            raise ConfigurationError(
                "with pgbouncer=True a connection keeps no settings: leave out synchronous_commit and "
                "tenant, and set them on the role (ALTER ROLE)"
            )

    def _require_tenant(self) -> None:
        if self.tenant is None:
            return
        if self.row_security != "setting":
            raise ConfigurationError("tenant goes with row_security='setting'")
        if (
            not isinstance(self.tenant, str)  # pyright: ignore[reportUnnecessaryIsInstance] -- callers are not all typed
            or not 0 < len(self.tenant) <= _MAX_TENANT
            or not self.tenant.isprintable()
            or not self.tenant.isascii()
        ):
            raise ConfigurationError(f"tenant is at most {_MAX_TENANT} printable ASCII characters")

    def server_settings(self) -> dict[str, str]:
        """Return what a connection of ours says once, when it is made; behind PgBouncer nothing."""
        if self.pgbouncer:
            return {}
        settings = {
            "synchronous_commit": self.synchronous_commit or "on",
            # The statements are written for this level, and fail in others, where they would wait.
            "default_transaction_isolation": "read committed",
            # Ends before the caller gives up, so that the answer is `not done` and not `perhaps done`.
            "statement_timeout": f"{max(1, round(self.deadline_s * 500))}",
            # A plan that was made while the tables were empty reads them from end to end when they no longer
            # are, until something analyses them.
            "enable_seqscan": "off",
            # Compiling takes hundreds of milliseconds, and up to PostgreSQL 17 it is what the setting above
            # leads to where a table is read from end to end all the same.
            "jit": "off",
        }
        if self.tenant is not None:
            settings["stm.tenant"] = self.tenant
        return settings

    @classmethod
    def from_url(cls, url: str, **options: Any) -> PostgresSettings:
        """Return the settings that a URL spells out, and beside it keyword arguments.

        `postgresql://user@host:5432/database?sslmode=verify-full`, as libpq reads it, several hosts and
        Unix sockets (`?host=/run/postgresql`) included. Settings of this library stand among the
        parameters: `&schema=memory`. What the two give differently is refused, and so is what nobody knows.
        """
        try:
            parts = urlsplit(url)
        except ValueError:
            raise ConfigurationError("this is no URL: its host cannot be read") from None
        if parts.scheme not in ("postgresql", "postgres"):
            raise ConfigurationError("a postgres URL begins with postgresql:// or postgres://")
        if not url.partition(":")[2].startswith("//"):
            raise ConfigurationError("a postgres URL has two slashes: postgresql://user@host:5432/database")
        if parts.fragment:
            raise ConfigurationError("a postgres URL has no fragment; '#' in a password is written %23")
        ours: list[tuple[str, str]] = []
        libpq: dict[str, str] = {}
        for name, text in parse_qsl(parts.query, keep_blank_values=True):
            require_known([name], {*_FROM_TEXT, *_LIBPQ}, backend="postgres")
            if name not in _LIBPQ:
                ours.append((name, text))
            elif name in libpq:
                raise ConfigurationError(f"the URL sets {name} twice")
            else:
                libpq[name] = text
        for name, choices in _CHOICES.items():
            if name in libpq:
                _require_choice(name, libpq[name], choices)
        _require_ports(parts.netloc.rpartition("@")[2], libpq.get("port", ""))
        if "password" in options and ("password" in libpq or ":" in parts.netloc.rpartition("@")[0]):
            raise ConfigurationError("the password is given twice; leave one of them out")
        if "ssl" in options and any(name.startswith("ssl") for name in libpq):
            raise ConfigurationError("TLS is set up twice, by the URL and as ssl=...; leave one of them out")
        given = from_query(urlencode(ours), _FROM_TEXT, backend="postgres")
        dsn = f"postgresql://{parts.netloc}{parts.path}?{urlencode(libpq)}".removesuffix("?")
        return cls.from_options(**merged(given, options), dsn=dsn)

    @classmethod
    def from_options(cls, **options: Any) -> PostgresSettings:
        """Return the settings that keyword arguments spell out; an unknown one raises."""
        require_known(options, (field.name for field in fields(cls)), backend="postgres")
        return cls(**options)


_SCHEMA: Final = re.compile(r"(?!pg_)[A-Za-z_][A-Za-z0-9_]{0,62}")


def _require_choice(name: str, value: object, choices: tuple[object, ...]) -> None:
    if value not in choices:
        known = ", ".join(repr(choice) for choice in choices if choice is not None)
        raise ConfigurationError(f"{name} is one of {known}")


def _require_ports(hosts: str, ports: str) -> None:
    """Raise `ConfigurationError` unless every port is a number; the text itself may be part of a secret."""
    stated = [re.sub(r"\[.*\]", "", host).partition(":")[2] for host in hosts.split(",")]
    for port in (*stated, *ports.split(",")):
        if port and not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
            raise ConfigurationError("a port in the URL is not a number between 1 and 65535")
