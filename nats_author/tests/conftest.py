"""A server of NATS for the tests: that of `$STM_TEST_NATS_URL`, or one that is started here."""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest


def answers(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1) as connection:
            return connection.recv(4) == b"INFO"
    except OSError:
        return False


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The host and the port of a server with JetStream."""
    if url := os.environ.get("STM_TEST_NATS_URL"):
        yield urlsplit(url).netloc
        return
    program = os.environ.get("NATS_SERVER") or shutil.which("nats-server")
    if program is None:
        pytest.skip("no nats-server: set NATS_SERVER or STM_TEST_NATS_URL")
    folder: Path = tmp_path_factory.mktemp("nats")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        program,
        "-js",
        "-sd",
        str(folder),
        "-a",
        "127.0.0.1",
        "-p",
        str(port),
        "-l",
        str(folder / "log"),
    ]
    with subprocess.Popen(command) as process:
        try:
            while not answers(port):
                assert process.poll() is None, (folder / "log").read_text()
                time.sleep(0.05)
            yield f"127.0.0.1:{port}"
        finally:
            process.terminate()
