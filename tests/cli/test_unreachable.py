"""A server that is frozen, one that speaks no TLS and one that is not there: each is told as what it is."""

from __future__ import annotations

import contextlib
import io
import socket
import threading
from collections.abc import Generator, Iterator
from typing import Final

import pytest
import typer

from stm_backends.cli.outcome import fail, reported
from stm_backends.errors import Corrupt, Unavailable
from tests.support.command_line import cli
from tests.support.servers import free_port

FROZEN: Final = (
    "no answer: the server is frozen or overloaded, a firewall blocks the connection, "
    "or only one side uses TLS"
)
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


SLOW: Final = pytest.param("pymongo", marks=pytest.mark.full)
"""It tries again until its time is over."""


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


@pytest.mark.parametrize("client", [*(client for client in TLS if client != "pymongo"), SLOW])
def test_a_server_that_speaks_no_tls_is_told_as_that(client: str) -> None:
    pytest.importorskip(client)
    # How PostgreSQL says that it has no TLS; to the others it is no TLS either.
    with answering(b"N" * 16) as port:
        assert f"({NO_TLS})" in said(TLS[client].format(port=port))


@pytest.mark.parametrize("client", ["redis", "asyncpg", SLOW])
def test_a_server_that_hangs_up_is_told_as_that(client: str) -> None:
    pytest.importorskip(client)
    with answering(b"") as port:
        assert f"({HUNG_UP})" in said(PLAIN[client].format(port=port))


def test_a_remedy_fits_the_cause_of_a_failed_opening() -> None:
    for message, creates, said in (
        ("there is no database file at x.db", False, "Check the URL."),
        ("the server cannot be reached (connection refused)", False, "Check the URL, and whether the"),
        ("the server is still loading its data", False, "The operation that failed changed nothing."),
        ("the store of the data keys failed: redis.open: no connection", False, "The operation that failed"),
        ("the tables do not exist; open once with create=True", False, ""),
        ("the tables do not exist; open once with create=True", True, "Or run this command again with --c"),
    ):
        shown = io.StringIO()
        with contextlib.redirect_stderr(shown), pytest.raises(typer.Exit), reported(creates=creates):
            raise Unavailable(message, backend="redis", operation="open")
        _, _, remedy = shown.getvalue().partition("\n")
        assert remedy.startswith(said)
        assert bool(remedy) == bool(said)


def test_a_remedy_is_said_once_for_many_errors_of_a_command() -> None:
    shown, told = io.StringIO(), set[str]()
    with contextlib.redirect_stderr(shown):
        for name in ("acme:u1:a", "acme:u1:b"):
            fail(Corrupt("damaged"), what=name, told=told)
    assert shown.getvalue().count("Nothing was overwritten.") == 1
    assert shown.getvalue().count("damaged") == 2
