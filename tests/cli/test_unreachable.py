"""A server that is frozen, one that speaks no TLS and one that is not there: each is told as what it is."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Generator, Iterator
from typing import Final

import pytest

from tests.support.command_line import cli
from tests.support.servers import free_port

FROZEN: Final = "no answer: the server is frozen or overloaded, or a firewall blocks the connection"
NO_TLS: Final = "TLS failed: the server does not use TLS at this port"
REFUSED: Final = "connection refused: nothing listens there"
HUNG_UP: Final = "the server closed the connection: it may expect TLS, or not be this kind of server"


@pytest.fixture
def frozen() -> Iterator[int]:
    """The port of a server that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@contextlib.contextmanager
def answering(answer: bytes) -> Generator[int]:
    """Yield the port of a server that answers all that it is sent with the same, and hangs up."""
    server = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = server.accept()
                with connection, contextlib.suppress(OSError):
                    connection.settimeout(1.0)
                    if answer and connection.recv(4096):
                        connection.sendall(answer)

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield server.getsockname()[1]
    finally:
        with contextlib.suppress(OSError):
            server.shutdown(socket.SHUT_RDWR)
        server.close()


def said(url: str) -> str:
    """Return the error with which `ping` ends."""
    credentials = dict.fromkeys(("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"), "pretended")
    done = cli("ping", url, COLUMNS="200", **credentials)
    assert done.returncode == 1, done.stdout
    assert "Traceback" not in done.stderr
    return done.stderr.splitlines()[0]


DYNAMO: Final = "dynamodb://table?region=eu-west-1&endpoint_url={scheme}://127.0.0.1:{port}"

PLAIN: Final = {
    "redis": "redis://127.0.0.1:{port}/0?",
    "asyncpg": "postgresql://u@127.0.0.1:{port}/d?",
    "pymongo": "mongodb://127.0.0.1:{port}/d?",
    "aiobotocore": DYNAMO.replace("{scheme}", "http") + "&",
}

TLS: Final = {
    "redis": "rediss://127.0.0.1:{port}/0",
    "asyncpg": "postgresql://u@127.0.0.1:{port}/d?sslmode=require",
    "pymongo": "mongodb://127.0.0.1:{port}/d?tls=true",
    "aiobotocore": DYNAMO.replace("{scheme}", "https"),
}


@pytest.mark.parametrize("client", PLAIN)
def test_a_server_that_is_not_there_is_told_as_that(client: str) -> None:
    pytest.importorskip(client)
    assert f"({REFUSED})" in said(PLAIN[client].format(port=free_port()))


@pytest.mark.parametrize("client", PLAIN)
def test_a_frozen_server_is_told_as_that(client: str, frozen: int) -> None:
    pytest.importorskip(client)
    error = said(PLAIN[client].format(port=frozen) + "deadline_s=1")
    # DynamoDB has no connection that is opened first.
    assert ("no answer within the deadline" if client == "aiobotocore" else f"({FROZEN})") in error


@pytest.mark.parametrize("client", TLS)
def test_a_server_that_speaks_no_tls_is_told_as_that(client: str) -> None:
    pytest.importorskip(client)
    # How PostgreSQL says that it has no TLS; to the others it is no TLS either.
    with answering(b"N" * 16) as port:
        assert f"({NO_TLS})" in said(TLS[client].format(port=port))


@pytest.mark.parametrize("client", ["redis", "asyncpg", "pymongo"])
def test_a_server_that_hangs_up_is_told_as_that(client: str) -> None:
    pytest.importorskip(client)
    with answering(b"") as port:
        assert f"({HUNG_UP})" in said(PLAIN[client].format(port=port))
