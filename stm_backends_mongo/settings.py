"""Settings of the MongoDB backend, as keyword arguments or as a URL."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Final, Literal, get_args
from urllib.parse import quote, unquote

from stm_backends.drivers.checks import require_count, require_known, require_seconds
from stm_backends.drivers.contract import DEFAULT_DEADLINE_S
from stm_backends.drivers.urls import from_query, merged, truth
from stm_backends.errors import ConfigurationError

Durability = Literal["majority", "primary"]

DEFAULT_URL: Final = "mongodb://localhost:27017"

_MIB: Final = 1024 * 1024
_MAX_BYTES: Final = 15 * _MIB
"""A document of MongoDB ends at 16 MiB, its field names and the numbers of its entries included."""

_FROM_TEXT: Final[Mapping[str, Callable[[str], object]]] = {
    "collection": str,
    "durability": str,
    "linearizable": truth,
    "deadline_s": float,
    "max_entry_bytes": int,
    "max_record_bytes": int,
}

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
"""MongoDB's own connection options, which go to PyMongo as they are; their case does not matter."""

_CANONICAL: Final = {name.lower(): name for name in CLIENT_OPTIONS}

_CREDENTIALS: Final = ("username", "password")

_NOT_HERE: Final[Mapping[str, str]] = {
    "timeoutms": "how long an operation may take is decided by deadline_s",
    "wtimeoutms": "how long an operation may take is decided by deadline_s",
    "maxstalenessseconds": "nothing is read from a secondary",
    "readpreferencetags": "nothing is read from a secondary",
    **dict.fromkeys(_CREDENTIALS, "in a URL, user and password stand before the host"),
    "database": "the database is the URL's path, as in mongodb://localhost/database",
    **dict.fromkeys(_FROM_TEXT, "this URL is PyMongo's alone; settings of ours are read by from_url(...)"),
}
"""What an option that cannot stand among PyMongo's is answered."""

_DECIDED: Final[Mapping[str, tuple[str, str]]] = {
    "w": ("majority", "durability"),
    "journal": ("true", "durability"),
    "readConcernLevel": ("majority", "durability and linearizable"),
    "readPreference": ("primary", "linearizable; nothing is read from a secondary, which may be behind"),
}
"""Options that this driver decides itself: the one value that says the same, and where it is decided."""


@dataclass(frozen=True, kw_only=True)
class MongoSettings:
    """Which servers, which collection, how durable, how patient and how large.

    `url` holds MongoDB's own options (`tls`, `authSource`, `maxPoolSize` and so on), and `client_options`
    those that were given beside it; neither shows in the repr. `durability="majority"`: what was
    acknowledged stands in the journals of a majority of the replica set. `"primary"`: in the primary's
    alone, and a failover may undo it. `linearizable=True`: a read never comes from a member that has been
    deposed without knowing it; that takes a replica set, and a round trip to its majority for each read.
    `deadline_s` is how long one operation may take. `max_entry_bytes` limits an entry, and a body;
    `max_record_bytes` a body with its tail.
    """

    url: str = field(default=DEFAULT_URL, repr=False)
    database: str = "stm"
    collection: str = "stm_records"
    durability: Durability = "majority"
    linearizable: bool = False
    deadline_s: float = DEFAULT_DEADLINE_S
    max_entry_bytes: int = _MAX_BYTES
    max_record_bytes: int = _MAX_BYTES
    client_options: Mapping[str, Any] = field(default_factory=dict[str, Any], repr=False, hash=False)

    def __post_init__(self) -> None:
        _require_name("database", self.database, forbidden='/\\. "$*<>:|?', longest=63)
        _require_name("collection", self.collection, forbidden="$", longest=200)
        if self.collection.startswith("system."):
            raise ConfigurationError("collections whose names begin with system. are MongoDB's own")
        if self.durability not in get_args(Durability):
            raise ConfigurationError(f"durability is 'majority' or 'primary', not {self.durability!r}")
        if not isinstance(self.linearizable, bool):  # pyright: ignore[reportUnnecessaryIsInstance] -- callers are not all typed
            raise ConfigurationError(f"linearizable is True or False, not {self.linearizable!r}")
        if self.linearizable and self.durability != "majority":
            raise ConfigurationError("linearizable reads need durability='majority'")
        require_seconds("deadline_s", self.deadline_s)
        require_count("max_entry_bytes", self.max_entry_bytes, most=_MAX_BYTES)
        require_count("max_record_bytes", self.max_record_bytes, most=_MAX_BYTES)
        _require_undecided(self)

    @property
    def given_options(self) -> dict[str, Any]:
        """Every option for PyMongo, by its canonical name, wherever it was given."""
        in_url = _options_in(_parts(self.url)[-1])
        for name in in_url.keys() & self.client_options.keys():
            raise ConfigurationError(f"the URL and the options both give {name}; leave one of them out")
        return {**in_url, **self.client_options}

    @classmethod
    def from_url(cls, url: str, **options: Any) -> MongoSettings:
        """Return the settings that a URL spells out, and beside it keyword arguments.

        The URL is MongoDB's own: `mongodb://user:password@host1,host2/database?replicaSet=rs0`, or
        `mongodb+srv://`. Our settings stand among its options, as `collection=chats` does. A setting that
        the two give differently is refused, and so is an option that neither we nor PyMongo know.
        """
        address, database, query = _parts(url)
        ours = [pair for pair in query.split("&") if pair.partition("=")[0] in _FROM_TEXT]
        theirs = [pair for pair in query.split("&") if pair and pair not in ours]
        given = from_query("&".join(ours), _FROM_TEXT, backend="mongo")
        if database:
            given["database"] = database
        rest = f"{address}/{quote(database)}?{'&'.join(theirs)}".removesuffix("?")
        return cls.from_options(url=rest, **merged(given, options))

    @classmethod
    def from_options(cls, **options: Any) -> MongoSettings:
        """Return the settings that keyword arguments spell out, PyMongo's options among them."""
        ours = {each.name for each in fields(cls)} - {"client_options"}
        theirs = {name: options.pop(name) for name in [*options] if name not in ours}
        named = {name if name in _CREDENTIALS else _canonical(name): value for name, value in theirs.items()}
        return cls(**options, client_options=named)


def _parts(url: str) -> tuple[str, str, str]:
    """Return a URL's scheme and hosts, its database and its query.

    Only what stands behind the hosts is looked at: several hosts, or a socket's path, are no URL to others.
    """
    scheme, separator, rest = url.partition("://")
    if scheme.lower() not in ("mongodb", "mongodb+srv") or not separator:
        raise ConfigurationError("a MongoDB URL begins with mongodb:// or mongodb+srv://")
    rest, _, query = rest.partition("?")
    hosts, _, database = rest.partition("/")
    if not hosts:
        raise ConfigurationError("a MongoDB URL names a host, as in mongodb://localhost:27017/database")
    if "#" in rest + query or ";" in query:
        raise ConfigurationError("in a MongoDB URL, '#' is written %23, and options are joined by '&'")
    return f"{scheme.lower()}://{hosts}", unquote(database), query


def _options_in(query: str) -> dict[str, str]:
    """Return PyMongo's options in a query; an unknown one, or one that stands there twice, is refused."""
    found: dict[str, str] = {}
    for pair in query.split("&") if query else ():
        name, _, text = pair.partition("=")
        name = _canonical(unquote(name))
        if name in found:
            raise ConfigurationError(f"the URL sets {name} twice")
        found[name] = unquote(text)
    return found


def _canonical(name: str) -> str:
    """Return the name of a client's option as MongoDB writes it. Raises, with a near miss, for no option."""
    if name.lower() in _NOT_HERE:
        raise ConfigurationError(f"{name} cannot be given here: {_NOT_HERE[name.lower()]}")
    if name.lower() not in _CANONICAL:
        require_known([name], [*_FROM_TEXT, *CLIENT_OPTIONS], backend="mongo")
    return _CANONICAL[name.lower()]


def _require_undecided(settings: MongoSettings) -> None:
    """Raise `ConfigurationError` for an option of the client that contradicts the settings."""
    given = settings.given_options
    for name, (same, where) in _DECIDED.items():
        # Connection strings as MongoDB Atlas hands them out say w=majority.
        says_the_same = str(given.get(name, same)).lower() == same
        if name in given and not (says_the_same and settings.durability == "majority"):
            raise ConfigurationError(f"{name} is decided here by the setting {where}; leave it out")


def _require_name(what: str, name: object, *, forbidden: str, longest: int) -> None:
    """Raise `ConfigurationError` for what MongoDB takes for no name."""
    if not isinstance(name, str) or not name or len(name.encode()) > longest:
        raise ConfigurationError(f"{what} is a name of at most {longest} bytes")
    if any(character in name for character in (*forbidden, "\0")):
        raise ConfigurationError(f"the name of a {what} contains none of {forbidden!r} and no NUL")
