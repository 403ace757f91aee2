"""Settings of the MariaDB backend, as keyword arguments or as a URL; imports no client library."""

from dataclasses import dataclass
from typing import Any, ClassVar
from urllib.parse import SplitResult, unquote

from stm_backends import ConfigurationError
from stm_backends.drivers import Settings, setting
from stm_backends.drivers.checks import require_count

MIB = 1024 * 1024


@dataclass(frozen=True, kw_only=True)
class MariadbSettings(Settings):
    """Where the server is, how many connections to open, and how large records may be."""

    backend: ClassVar = "mariadb"
    url_schemes: ClassVar = ("mariadb",)

    host: str = setting("localhost", query=False)
    port: int = setting(3306, query=False)
    user: str = setting("", query=False)
    password: str = setting("", query=False, secret=True)
    database: str = setting("", query=False)
    pool_size: int = 10
    max_entry_bytes: int = MIB
    max_record_bytes: int = 16 * MIB

    def __post_init__(self) -> None:
        super().__post_init__()
        require_count("pool_size", self.pool_size)
        require_count("max_record_bytes", self.max_record_bytes)
        if not self.database:
            raise ConfigurationError("name a database: mariadb://user:password@host:3306/database")

    @classmethod
    def before_query(cls, parts: SplitResult) -> dict[str, Any]:
        try:
            port = parts.port
        except ValueError:
            raise ConfigurationError("the port in the URL is not a number between 1 and 65535") from None
        text = {"user": parts.username, "password": parts.password, "database": parts.path[1:]}
        given = {"host": parts.hostname, "port": port} | {
            name: unquote(part or "") for name, part in text.items()
        }
        return {name: value for name, value in given.items() if value}
