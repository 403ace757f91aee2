"""The settings of the backend `lmdb`; imports no client library."""

from dataclasses import dataclass
from typing import Any, ClassVar
from urllib.parse import SplitResult, unquote

from stm_backends import ConfigurationError
from stm_backends.drivers import Settings, setting

MIB = 1024 * 1024


@dataclass(frozen=True, kw_only=True)
class LmdbSettings(Settings):
    """The folder that holds the records; `deadline_s` and `max_entry_bytes` are inherited."""

    backend: ClassVar = "lmdb"
    url_schemes: ClassVar = ("lmdb",)
    largest_entry: ClassVar = 16 * MIB

    path: str = setting("", query=False)
    max_entry_bytes: int = 4 * MIB

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.path:
            raise ConfigurationError("name a folder: lmdb:///relative/folder or lmdb:////absolute/folder")

    @classmethod
    def before_query(cls, parts: SplitResult) -> dict[str, Any]:
        if parts.netloc:
            raise ConfigurationError(
                "an lmdb URL has no host; three slashes precede the folder: lmdb:///folder"
            )
        return {"path": unquote(parts.path[1:])}
