"""etcd for tests: a server of its own, from Debian's or Ubuntu's archive."""

from __future__ import annotations

import contextlib
import http.client
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import apt
from tests.support.servers import Server, free_port

VARIABLE = "STM_TEST_ETCD_URL"
"""Names a running server."""


@contextlib.contextmanager
def reached(folder: Path) -> Iterator[str]:
    """Yield the URL of a server: the one that the environment names, or one that is started in a folder.

    Skips the test where there is neither, or no client.
    """
    pytest.importorskip("httpx", reason="the dependency group `strangers` brings it")
    with contextlib.ExitStack() as stack:
        try:
            url = os.environ.get(VARIABLE) or stack.enter_context(server_in(folder))
        except apt.NotAtHand as error:
            # It is not in the package index, so its absence is never a failure.
            pytest.skip(f"{error}; {VARIABLE} may name a server")
        yield url


@contextlib.contextmanager
def server_in(folder: Path) -> Iterator[str]:
    """Start a server in a folder, and yield its URL. Raises `apt.NotAtHand`."""
    program = apt.find("etcd", "etcd-server")
    port = free_port()
    clients, peers = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{free_port()}"
    options = {
        "data-dir": folder / "data",
        "listen-client-urls": clients,
        "advertise-client-urls": clients,
        "listen-peer-urls": peers,
        "initial-advertise-peer-urls": peers,
        "initial-cluster": f"default={peers}",
        "auto-compaction-mode": "revision",
        "auto-compaction-retention": 1000,
        "unsafe-no-fsync": "true",
        "log-level": "error",
    }
    command = [program.path, *(f"--{name}={value}" for name, value in options.items())]

    def answers() -> bool:
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=5)) as connection:
            connection.request("GET", "/health")
            return connection.getresponse().status == http.HTTPStatus.OK

    server = Server([str(part) for part in command], folder, answers, environment=program.environment)
    server.start()
    try:
        yield f"etcd://127.0.0.1:{port}"
    finally:
        server.stop()
