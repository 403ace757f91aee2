"""The MongoDB client, created here from the settings or passed in."""

from __future__ import annotations

from typing import Any

from pymongo import AsyncMongoClient, MongoClient
from pymongo.common import validate
from pymongo.errors import PyMongoError

from stm_backends.drivers.tls_files import require_authorities, require_files
from stm_backends.errors import ConfigurationError
from stm_backends_mongo.settings import MongoSettings


def require_client(client: object) -> None:
    """Raise `ConfigurationError` for PyMongo's synchronous client and for other objects."""
    if isinstance(client, MongoClient):
        raise ConfigurationError("this driver is asynchronous: pass pymongo.AsyncMongoClient(...)")
    if not hasattr(client, "get_database"):
        raise ConfigurationError(f"client must be a pymongo.AsyncMongoClient, not {type(client).__name__}")


def retries_writes(client: Any) -> bool:
    """Return whether a client retries writes by itself; PyMongo does unless told otherwise."""
    options = getattr(client, "options", None)
    return bool(getattr(options, "retry_writes", True))


def make_client(settings: MongoSettings) -> AsyncMongoClient[dict[str, Any]]:
    """Return a client that has not connected yet. It belongs to the event loop that first uses it.

    It does not retry writes by itself unless the settings say `retryWrites`. If a server does not answer its
    monitor for one and a half deadlines, all connections to it are closed, because they may have been dropped
    silently. Raises `ConfigurationError` for a URL or an option that PyMongo does not accept, and never shows
    its value, which may be a secret.
    """
    given = settings.given_options
    require_authorities({name: given.get(name) for name in ("tlsCAFile", "tlsCRLFile")})
    require_files({"tlsCertificateKeyFile": given.get("tlsCertificateKeyFile")})
    for name, value in given.items():
        # PyMongo itself only warns about an invalid value and ignores it.
        try:
            validate(name, value)
        except (PyMongoError, ValueError, TypeError, OSError):
            raise ConfigurationError(f"PyMongo does not accept the value of {name}") from None
    deadline_ms = int(settings.deadline_s * 1000)
    chosen: dict[str, Any] = {
        "appName": "stm-backends",
        "retryWrites": False,
        # PyMongo keeps other connections after one got no answer until its monitor gets none either: after
        # the sum of these two, which would be 30 seconds. A busy machine needs two to connect.
        "heartbeatFrequencyMS": min(max(deadline_ms // 2, 500), 10_000),
        "connectTimeoutMS": min(max(deadline_ms, 2_000), 20_000),
    }
    beside = {name: value for name, value in chosen.items() if name not in given}
    try:
        return AsyncMongoClient(settings.url, **beside, **settings.client_options)
    except (PyMongoError, ValueError, TypeError, OSError) as error:
        raise ConfigurationError(
            f"PyMongo does not accept this URL and these options ({type(error).__name__}); percent-encode "
            "characters such as ':', '/', '@' and '%' in a user name or password"
        ) from None
