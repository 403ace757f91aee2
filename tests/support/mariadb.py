"""MariaDB for tests: a server without users, from Debian's or Ubuntu's archive, on a database of its own."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import apt
from tests.support.servers import Server, free_port

VARIABLE = "STM_TEST_MARIADB_URL"
"""Names a running server."""

LIBRARIES = ("liburing2", "libaio1", "libnuma1", "libsnappy1v5")


@contextlib.contextmanager
def reached(folder: Path) -> Iterator[str]:
    """Yield the URL of a database: the one that the environment names, or in a server that is started here.

    Skips the test where there is neither, or no client.
    """
    pytest.importorskip("asyncmy", reason="the dependency group `strangers` brings it")
    with contextlib.ExitStack() as stack:
        try:
            url = os.environ.get(VARIABLE) or stack.enter_context(server_in(folder))
        except apt.NotAtHand as error:
            pytest.skip(f"{error}; {VARIABLE} may name a server")
        yield url


@contextlib.contextmanager
def server_in(folder: Path) -> Iterator[str]:
    """Start a server in a folder, and yield the URL of a database in it. Raises `apt.NotAtHand`."""
    program = apt.find("mariadbd", "mariadb-server-core", *LIBRARIES)
    port, data = free_port(), folder / "data"
    data.mkdir()
    first = folder / "first.sql"
    first.write_text("CREATE DATABASE stm;\n")
    # Without its tables of users the server needs no installation; it then lets everyone do everything.
    options = {
        "user": "root",
        "datadir": data,
        "socket": folder / "socket",
        "port": port,
        "bind-address": "127.0.0.1",
        "init-file": first,
    }
    messages = program.path.parents[1] / "share" / "mysql"
    command = [
        *(program.path, "--no-defaults", "--skip-grant-tables"),
        *(f"--{name}={value}" for name, value in options.items()),
        *([f"--lc-messages-dir={messages}"] if messages.exists() else []),
    ]

    def answers() -> None:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()

    server = Server([str(part) for part in command], folder, answers, environment=program.environment)
    server.start()
    try:
        yield f"mariadb://stm:secret@127.0.0.1:{port}/stm"
    finally:
        server.stop()
