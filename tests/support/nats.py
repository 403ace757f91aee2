"""NATS for tests: a server with JetStream from Debian's or Ubuntu's archive, and one that refuses all."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import socketserver
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import apt
from tests.support.servers import Server, free_port

VARIABLE = "STM_TEST_NATS_URL"
"""Names a running server."""


@contextlib.contextmanager
def reached(folder: Path) -> Iterator[str]:
    """Yield the URL of a server: the one that the environment names, or one that is started in a folder.

    Skips the test where there is neither, or no client.
    """
    pytest.importorskip("nats", reason="the dependency group `strangers` brings it")
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
    program = apt.find("nats-server", "nats-server")
    port = free_port()
    command = [program.path, "-js", "-sd", folder / "data", "-a", "127.0.0.1", "-p", port]

    def answers() -> bool:
        with socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
            return connection.recv(4) == b"INFO"

    server = Server([str(part) for part in command], folder, answers, environment=program.environment)
    server.start()
    try:
        yield f"nats://127.0.0.1:{port}"
    finally:
        server.stop()


NO_LEADER = json.dumps(
    {
        "type": "io.nats.jetstream.api.v1.error",
        "error": {
            "code": 503,
            "err_code": 10008,
            "description": "JetStream system temporarily unavailable",
        },
    }
).encode()

INFO = json.dumps(
    {
        "server_id": "REFUSES",
        "server_name": "refuses",
        "version": "2.9.10",
        "proto": 1,
        "headers": True,
        "max_payload": 1024 * 1024,
        "client_id": 1,
    }
).encode()


class _Refuses(socketserver.StreamRequestHandler):
    """Answers each request as a cluster does in which no server leads."""

    def handle(self) -> None:
        with contextlib.suppress(OSError):
            self._serve()

    def _serve(self) -> None:
        self.wfile.write(b"INFO " + INFO + b"\r\n")
        inboxes: dict[bytes, bytes] = {}
        while line := self.rfile.readline():
            verb, *words = line.split() or [b""]
            if verb == b"PING":
                self.wfile.write(b"PONG\r\n")
            elif verb == b"SUB":
                inboxes[words[0].removesuffix(b"*")] = words[-1]
            elif verb in (b"PUB", b"HPUB"):
                self.rfile.read(int(words[-1]) + 2)
                # A subject, perhaps where the answer goes, and one or two sizes.
                for inbox, number in inboxes.items():
                    if words[1].startswith(inbox):
                        head = b"MSG %s %s %d\r\n" % (words[1], number, len(NO_LEADER))
                        self.wfile.write(head + NO_LEADER + b"\r\n")


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    block_on_close = False


@contextlib.contextmanager
def without_a_leader() -> Iterator[str]:
    """Yield the address of a server that answers each request with an error."""
    with _Server(("127.0.0.1", 0), _Refuses) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), name="refuses", daemon=True)
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()
