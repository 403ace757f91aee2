"""Serving the page on this machine, until the program is interrupted."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable
from typing import Final

from stm_backends.backend import Backend
from stm_backends.errors import ConfigurationError
from stm_backends.extras import missing_extra
from stm_backends.inspect.app import inspector
from stm_backends.types import ShortTermMemoryConfig

try:
    import uvicorn
except ModuleNotFoundError as error:
    raise missing_extra("inspect", error) from None

ADDRESS: Final = "127.0.0.1"


async def serve(
    backend: Backend,
    *,
    port: int,
    ready: Callable[[str], None],
    datastore: str = "",
    start: tuple[str, ...] = (),
    config: ShortTermMemoryConfig | None = None,
) -> None:
    """Open a backend and serve its page on a port of this machine, 0 for any; `ready` is given the URL.

    The URL has a new token. Ends when the process is interrupted or terminated. Raises `ConfigurationError`
    if the port is taken.
    """
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((ADDRESS, port))
        except OSError as error:
            raise ConfigurationError(f"port {port} cannot be used: {error.strerror}") from None
        listener.listen()
        port = listener.getsockname()[1]
        token = secrets.token_urlsafe(32)
        async with backend:
            app = inspector(
                backend,
                token=token,
                hosts=frozenset({f"{ADDRESS}:{port}", f"localhost:{port}"}),
                datastore=datastore,
                start=start,
                config=config,
            )
            # Its access log would have the token.
            settings = uvicorn.Config(
                app, lifespan="off", ws="none", access_log=False, log_level="error", server_header=False
            )
            ready(f"http://{ADDRESS}:{port}/{token}/")
            await uvicorn.Server(settings).serve(sockets=[listener])
