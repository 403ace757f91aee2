"""Tell stm-backends of the backend `lmdb`; imports no client library."""

from pathlib import Path
from urllib.parse import unquote, urlsplit

from stm_backends import ConfigurationError
from stm_backends.drivers import BackendPlugin, Driver, hookimpl


def open_driver(url: str | None, *, create: bool = False) -> Driver:
    """Return the driver of the folder in `lmdb:///relative/folder` or `lmdb:////absolute/folder`."""
    from stm_backends_lmdb.driver import LmdbDriver

    del create  # the folder is made when it is not there
    parts = urlsplit(url or "")
    path = unquote(parts.path.removeprefix("/"))
    if not path or parts.netloc or parts.query or parts.fragment:
        raise ConfigurationError("an lmdb URL names a folder and nothing else: lmdb:///conversations")
    return LmdbDriver(Path(path))


@hookimpl
def stm_backend() -> BackendPlugin:
    """Bring the backend `lmdb`."""
    return BackendPlugin(name="lmdb", url_schemes=("lmdb",), requires=("lmdb",), open=open_driver)
