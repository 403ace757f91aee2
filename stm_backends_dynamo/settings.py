"""Settings of the DynamoDB backend, as keyword arguments or as a URL."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Final
from urllib.parse import urlsplit

from stm_backends.drivers.checks import require_count, require_known, require_seconds
from stm_backends.drivers.contract import DEFAULT_DEADLINE_S
from stm_backends.drivers.urls import from_query, merged
from stm_backends.errors import ConfigurationError

DEFAULT_TABLE: Final = "stm_backends"

MAX_ENTRY: Final = 396 * 1024
"""What an item surely has room for: 400 KiB without 4 KiB for keys, names and numbers."""

_TABLE: Final = re.compile(r"[A-Za-z0-9_.-]{3,255}")

_FROM_TEXT: Final[Mapping[str, Callable[[str], object]]] = {
    "region": str,
    "endpoint_url": str,
    "profile": str,
    "pool_size": int,
    "deadline_s": float,
    "max_entry_bytes": int,
}


@dataclass(frozen=True, kw_only=True)
class DynamoSettings:
    """Which table, where and as whom, how patient and how large.

    What is `None` is looked up where every AWS program looks: in the environment, the shared files under
    `~/.aws`, and the role of the machine or container. `profile` names a section of those files. The keys
    of `access_key_id`, `secret_access_key` and `session_token` are never shown, and never part of a URL.
    `endpoint_url` is another place than the region's own: a VPC endpoint, or DynamoDB Local. `pool_size`
    is how many requests may be under way at once. `deadline_s` is how long one operation may take.
    `max_entry_bytes` limits an entry, and a body.
    """

    table: str = DEFAULT_TABLE
    region: str | None = None
    endpoint_url: str | None = None
    profile: str | None = None
    access_key_id: str | None = field(default=None, repr=False)
    secret_access_key: str | None = field(default=None, repr=False)
    session_token: str | None = field(default=None, repr=False)
    pool_size: int = 50
    deadline_s: float = DEFAULT_DEADLINE_S
    max_entry_bytes: int = MAX_ENTRY

    def __post_init__(self) -> None:
        if not isinstance(self.table, str) or not _TABLE.fullmatch(self.table):  # pyright: ignore[reportUnnecessaryIsInstance] -- callers are not all typed
            raise ConfigurationError(
                "table is the name of a DynamoDB table: 3 to 255 letters, digits, '_', '-' and '.'"
            )
        for name in ("region", "profile", "access_key_id", "secret_access_key", "session_token"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, str) and value):
                raise ConfigurationError(f"{name} is a string that is not empty, or None")
        if self.endpoint_url is not None:
            _require_endpoint(self.endpoint_url)
        if (self.access_key_id is None) != (self.secret_access_key is None):
            raise ConfigurationError("access_key_id and secret_access_key are given together, or neither")
        if self.session_token is not None and self.access_key_id is None:
            raise ConfigurationError("session_token goes with an access_key_id and a secret_access_key")
        require_count("pool_size", self.pool_size, most=10_000)
        require_seconds("deadline_s", self.deadline_s)
        require_count("max_entry_bytes", self.max_entry_bytes, most=MAX_ENTRY)

    @classmethod
    def from_url(cls, url: str, **options: Any) -> DynamoSettings:
        """Return the settings that a URL spells out, and beside it keyword arguments.

        `dynamodb://TABLE?region=eu-west-1&endpoint_url=http://127.0.0.1:8000`. Credentials have no place
        in a URL. A setting that the two give differently is refused.
        """
        try:
            parts = urlsplit(url)
        except ValueError:
            raise ConfigurationError("the dynamo URL has a bracket too many or too few") from None
        if parts.scheme != "dynamodb":
            raise ConfigurationError("a dynamo URL begins with dynamodb://, as in dynamodb://TABLE")
        if "@" in parts.netloc:
            raise ConfigurationError(
                "a dynamo URL holds no credentials; leave them to the environment, a profile or a role, or "
                "give them as access_key_id=... and secret_access_key=..."
            )
        if parts.path not in ("", "/") or parts.fragment:
            raise ConfigurationError(
                "a dynamo URL names a table and nothing below it, as in dynamodb://TABLE?region=eu-west-1"
            )
        if ":" in parts.netloc:
            raise ConfigurationError(
                "a dynamo URL names a table where others name a host; a host and port of your own are "
                "written dynamodb://TABLE?endpoint_url=http://HOST:PORT"
            )
        given = from_query(parts.query, _FROM_TEXT, backend="dynamo")
        if parts.netloc:
            given["table"] = parts.netloc
        return cls.from_options(**merged(given, options))

    @classmethod
    def from_options(cls, **options: Any) -> DynamoSettings:
        """Return the settings that keyword arguments spell out; an unknown one raises."""
        require_known(options, (one.name for one in fields(cls)), backend="dynamo")
        return cls(**options)


def _require_endpoint(url: object) -> None:
    """Raise `ConfigurationError` unless this is the URL of a host, and of nobody in particular."""
    try:
        parts = urlsplit(url) if isinstance(url, str) else None
    except ValueError:
        parts = None
    if parts is None or parts.scheme not in ("http", "https") or not parts.netloc or "@" in parts.netloc:
        raise ConfigurationError(
            "endpoint_url is a URL such as http://127.0.0.1:8000, with http or https, a host and no user"
        )
