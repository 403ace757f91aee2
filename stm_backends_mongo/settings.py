"""Settings of the MongoDB backend, as keyword arguments or as a URL."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Final, Literal, Self
from urllib.parse import quote, unquote

from stm_backends.drivers.checks import require_count, require_known
from stm_backends.drivers.settings import MIB, Settings, query_parsers, require_no_placeholder, setting
from stm_backends.errors import ConfigurationError

Durability = Literal["majority", "primary"]

CLIENT_OPTIONS: Final = (
    *("appName", "authMechanism", "authMechanismProperties", "authSource", "compressors", "connectTimeoutMS"),
    *("directConnection", "heartbeatFrequencyMS", "journal", "loadBalanced", "localThresholdMS"),
    *("maxConnecting", "maxIdleTimeMS", "maxPoolSize", "minPoolSize", "readConcernLevel", "readPreference"),
    *("replicaSet", "retryReads", "retryWrites", "serverMonitoringMode", "serverSelectionTimeoutMS"),
    *("socketTimeoutMS", "srvMaxHosts", "srvServiceName", "ssl", "tls", "tlsAllowInvalidCertificates"),
    *("tlsAllowInvalidHostnames", "tlsCAFile", "tlsCertificateKeyFile", "tlsCertificateKeyFilePassword"),
    *("tlsCRLFile", "tlsDisableOCSPEndpointCheck", "tlsInsecure", "w", "waitQueueTimeoutMS"),
    "zlibCompressionLevel",
)
"""MongoDB's own connection options, which are passed to PyMongo unchanged. They are case-insensitive."""

_CANONICAL: Final = {name.lower(): name for name in CLIENT_OPTIONS}

_CREDENTIALS: Final = ("username", "password")

_NOT_HERE: Final[Mapping[str, str]] = {
    "timeoutms": "deadline_s limits how long an operation may take",
    "wtimeoutms": "deadline_s limits how long an operation may take",
    "maxstalenessseconds": "nothing is read from a secondary",
    "readpreferencetags": "nothing is read from a secondary",
    **dict.fromkeys(_CREDENTIALS, "in a URL, user and password precede the host"),
    "database": "the database is the URL's path, as in mongodb://localhost/database",
    "ssl_ca_certs": "tlsCAFile names the authority",
    "sslcafile": "tlsCAFile names the authority",
    "uuidrepresentation": "no UUID is stored",
}
"""Options that are refused, and why."""

_DECIDED: Final[Mapping[str, tuple[str, str]]] = {
    "w": ("majority", "the setting durability decides it"),
    "journal": ("true", "the setting durability decides it"),
    "readConcernLevel": ("majority", "the settings durability and linearizable decide it"),
    "readPreference": ("primary", "nothing is read from a secondary, which may be behind"),
}
"""Options that this driver sets itself: the only value that may be given, and why."""


@dataclass(frozen=True, kw_only=True)
class MongoSettings(Settings):
    """The servers and collection to use, and the durability of writes.

    `url` holds MongoDB's own options (`tls`, `authSource`, `maxPoolSize` and so on), and `client_options`
    those passed separately; the repr shows neither. With `durability="majority"`, an acknowledged write is in
    the journals of a majority of the replica set. With `"primary"`, it is only in the primary's, and a
    failover may undo it. With `linearizable=True`, a read never comes from a former primary that does not yet
    know that another was elected. That needs a replica set, and a round trip to the majority for each read.
    `max_record_bytes` limits a body together with its tail.
    """

    backend: ClassVar = "mongo"
    url_schemes: ClassVar = ("mongodb", "mongodb+srv")
    # A document has at most 16 MiB, including field names and the numbers of the entries.
    largest_entry: ClassVar = 15 * MIB

    url: str = setting("mongodb://localhost:27017", query=False, connection=True, secret=True)
    database: str = setting("stm", query=False)
    collection: str = "stm_records"
    durability: Durability = "majority"
    linearizable: bool = False
    max_entry_bytes: int = 15 * MIB
    max_record_bytes: int = 15 * MIB
    client_options: Mapping[str, Any] = field(
        default_factory=dict[str, Any], repr=False, hash=False, metadata={"connection": True}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_name("database", self.database, forbidden='/\\. "$*<>:|?', longest=63)
        _require_name("collection", self.collection, forbidden="$", longest=200)
        if self.collection.startswith("system."):
            raise ConfigurationError("collections whose names begin with system. are MongoDB's own")
        if self.linearizable and self.durability != "majority":
            raise ConfigurationError("linearizable reads need durability='majority'")
        require_count("max_record_bytes", self.max_record_bytes, most=self.largest_entry)
        _require_undecided(self)

    @property
    def given_options(self) -> dict[str, Any]:
        """All options for PyMongo, by canonical name."""
        in_url = _options_in(_parts(self.url)[-1])
        for name in in_url.keys() & self.client_options.keys():
            raise ConfigurationError(f"the URL and the options both set {name}; leave one of them out")
        return {**in_url, **self.client_options}

    @classmethod
    def from_options(cls, /, **options: Any) -> Self:
        """Return the settings in keyword arguments, which may include PyMongo's options."""
        known = {"client", *(one.name for one in fields(cls))} - {"client_options"}
        theirs = {name: options.pop(name) for name in [*options] if name not in known}
        if theirs:
            options["client_options"] = {
                name if name in _CREDENTIALS else _canonical(name): value for name, value in theirs.items()
            }
        return super().from_options(**options)

    @classmethod
    def read_url(cls, url: str) -> dict[str, Any]:
        """Return the settings in a URL. The rest of it becomes `url`, as MongoDB reads it.

        `mongodb://user:password@host1,host2/database?replicaSet=rs0`, or `mongodb+srv://`. Settings of this
        library are further parameters: `&collection=chats`.
        """
        address, database, query = _parts(url)
        pairs = [pair for pair in query.split("&") if pair]
        ours = [pair for pair in pairs if pair.partition("=")[0] in query_parsers(cls)]
        rest = "&".join(pair for pair in pairs if pair not in ours)
        return {
            "url": f"{address}/{quote(database)}?{rest}".removesuffix("?"),
            **({"database": database} if database else {}),
            **cls.read_query("&".join(ours)),
        }


def _parts(url: str) -> tuple[str, str, str]:
    """Return a URL's scheme and hosts, its database and its query.

    `urlsplit` cannot be used: it does not accept several hosts, or the path of a socket.
    """
    scheme, separator, rest = url.partition("://")
    if scheme.lower() not in ("mongodb", "mongodb+srv") or not separator:
        raise ConfigurationError("a MongoDB URL begins with mongodb:// or mongodb+srv://")
    rest, _, query = rest.partition("?")
    hosts, _, database = rest.partition("/")
    if not hosts:
        raise ConfigurationError("a MongoDB URL needs a host, as in mongodb://localhost:27017/database")
    if "@" in database:
        raise ConfigurationError("in a MongoDB URL, percent-encode '/' in a user name or password, as %2F")
    if "@" in (user := hosts.rpartition("@")[0]):
        raise ConfigurationError("in a MongoDB URL, percent-encode '@' in a user name or password, as %40")
    require_no_placeholder(user)
    if "#" in rest + query or ";" in query:
        raise ConfigurationError("in a MongoDB URL, write '#' as %23, and join options by '&'")
    return f"{scheme.lower()}://{hosts}", unquote(database), query


def _options_in(query: str) -> dict[str, str]:
    """Return PyMongo's options in a query. Raises for an unknown or repeated one."""
    found: dict[str, str] = {}
    for pair in query.split("&") if query else ():
        name, _, text = pair.partition("=")
        name = _canonical(unquote(name), shown=False)
        if name in found:
            raise ConfigurationError(f"the URL sets {name} twice")
        found[name] = unquote(text)
    return found


def _canonical(name: str, *, shown: bool = True) -> str:
    """Return the name of a client's option as MongoDB writes it. Raises for an unknown name."""
    if name.lower() in _NOT_HERE:
        raise ConfigurationError(f"{name} cannot be given here: {_NOT_HERE[name.lower()]}")
    if name in query_parsers(MongoSettings):
        raise ConfigurationError(f"{name} in this URL is read by MongoSettings.from_url(...) only")
    if name.lower() not in _CANONICAL:
        known = [*query_parsers(MongoSettings), *CLIENT_OPTIONS]
        require_known([name], known, backend="mongo", shown=shown)
    return _CANONICAL[name.lower()]


def _require_undecided(settings: MongoSettings) -> None:
    """Raise `ConfigurationError` for an option of the client that contradicts the settings."""
    given = settings.given_options
    for name, (same, why) in _DECIDED.items():
        # MongoDB Atlas puts w=majority into its connection strings.
        says_the_same = str(given.get(name, same)).lower() == same
        if name in given and not (says_the_same and settings.durability == "majority"):
            raise ConfigurationError(f"leave out {name}: {why}")


def _require_name(what: str, name: str, *, forbidden: str, longest: int) -> None:
    """Raise `ConfigurationError` for a name that MongoDB does not accept."""
    if not name or len(name.encode()) > longest:
        raise ConfigurationError(f"{what} must be a name of at most {longest} bytes")
    if any(character in name for character in (*forbidden, "\0")):
        raise ConfigurationError(f"the name of a {what} cannot contain any of {forbidden!r}, or NUL")
