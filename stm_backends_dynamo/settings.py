"""Settings of the DynamoDB backend, as keyword arguments or as a URL."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, ClassVar, Final
from urllib.parse import SplitResult, urlsplit

from stm_backends.drivers.checks import require_count
from stm_backends.drivers.settings import Settings, setting
from stm_backends.errors import ConfigurationError

DEFAULT_TABLE: Final = "stm_backends"

LARGEST_ENTRY: Final = 396 * 1024
"""The room in an item of DynamoDB: 400 KiB, less 4 KiB for keys, names and numbers."""

MAX_ENTRY: Final = 392 * 1024
"""The room in an item on moto, too, which limits items to 405,000 bytes."""

_TABLE: Final = re.compile(r"[A-Za-z0-9_.-]{3,255}")


@dataclass(frozen=True, kw_only=True)
class DynamoSettings(Settings):
    """The table to use, its region, and the credentials.

    A setting that is `None` comes from the usual places of AWS programs: the environment, the shared files
    under `~/.aws`, and the role of the machine or container. `profile` names a section of those files.
    `access_key_id`, `secret_access_key` and `session_token` are never shown, and never part of a URL.
    `endpoint_url` replaces the region's own endpoint: a VPC endpoint, or DynamoDB Local. `pool_size` limits
    the number of concurrent requests.
    """

    backend: ClassVar = "dynamo"
    url_schemes: ClassVar = ("dynamodb",)
    largest_entry: ClassVar = LARGEST_ENTRY

    table: str = setting(DEFAULT_TABLE, query=False)
    region: str | None = setting(None, connection=True)
    endpoint_url: str | None = setting(None, connection=True)
    profile: str | None = setting(None, connection=True)
    access_key_id: str | None = setting(None, query=False, connection=True, secret=True)
    secret_access_key: str | None = setting(None, query=False, connection=True, secret=True)
    session_token: str | None = setting(None, query=False, connection=True, secret=True)
    pool_size: int = setting(50, connection=True)
    max_entry_bytes: int = MAX_ENTRY

    def __post_init__(self) -> None:
        super().__post_init__()
        if not _TABLE.fullmatch(self.table):
            raise ConfigurationError(
                "table must be the name of a DynamoDB table: 3 to 255 letters, digits, '_', '-' and '.'"
            )
        for name in ("region", "profile", "access_key_id", "secret_access_key", "session_token"):
            if getattr(self, name) == "":
                raise ConfigurationError(f"{name} must be a non-empty string or None")
        if self.endpoint_url is not None:
            _require_endpoint(self.endpoint_url)
        if (self.access_key_id is None) != (self.secret_access_key is None):
            raise ConfigurationError("access_key_id and secret_access_key must be given together")
        if self.session_token is not None and self.access_key_id is None:
            raise ConfigurationError("session_token needs an access_key_id and a secret_access_key")
        require_count("pool_size", self.pool_size, most=10_000)

    @classmethod
    def before_query(cls, parts: SplitResult) -> dict[str, Any]:
        """Return the table in a URL: `dynamodb://TABLE?region=eu-west-1`.

        Raises `ConfigurationError` for credentials, which are never part of a URL.
        """
        if "@" in parts.netloc:
            raise ConfigurationError(
                "a dynamo URL cannot contain credentials; use the environment, a profile or a role, or "
                "pass them as access_key_id=... and secret_access_key=..."
            )
        if parts.path not in ("", "/"):
            raise ConfigurationError(
                "a dynamo URL names only a table, as in dynamodb://TABLE?region=eu-west-1"
            )
        if ":" in parts.netloc:
            raise ConfigurationError(
                "a dynamo URL names a table instead of a host; set another endpoint with "
                "dynamodb://TABLE?endpoint_url=http://HOST:PORT"
            )
        return {"table": parts.netloc} if parts.netloc else {}


def _require_endpoint(url: str) -> None:
    """Raise `ConfigurationError` unless `url` is the URL of a host, without a user."""
    try:
        parts = urlsplit(url)
    except ValueError:
        parts = None
    if parts is None or parts.scheme not in ("http", "https") or not parts.netloc or "@" in parts.netloc:
        raise ConfigurationError(
            "endpoint_url must be a URL such as http://127.0.0.1:8000, with http or https, a host and no user"
        )
