"""moto's server, which many programs are tested with."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server


@contextlib.contextmanager
def moto_server() -> Iterator[str]:
    """Yield the URL of a server, which is atomic because it does one thing at a time."""
    server = make_server("127.0.0.1", 0, DomainDispatcherApplication(create_backend_app), threaded=False)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()
