"""How these tests run pytest and the command: as a stranger would, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

CHECKS = 82
"""How many checks there are of a driver, and of a store: noted here, so that none goes missing unnoticed."""
SLOW_CHECKS = 16
STORE_CHECKS = 30

BROKEN = """
from stm_backends.drivers.plugins import BackendPlugin, hookimpl
from stm_backends.drivers.sqlite.driver import SqliteDriver
from stm_backends.drivers.sqlite.settings import SqliteSettings

class Broken(SqliteDriver):
    async def append(self, key, entry, *, initial_version, ttl):
        if key.name == "record" and entry == b"d":
            entry = b"another entry"
        return await super().append(key, entry, initial_version=initial_version, ttl=ttl)

def open_broken(url, *, create=False):
    return Broken(SqliteSettings.from_url(url.replace("broken:", "sqlite:")))

@hookimpl
def stm_backend():
    return BackendPlugin(name="broken", url_schemes=("broken",), open=open_broken)
"""
"""A backend that stores another entry than it was given, if that is `b"d"`."""

TORN = """
import asyncio
from stm_backends.drivers.contract import Record
from stm_backends.drivers.plugins import BackendPlugin, hookimpl
from stm_backends.drivers.sqlite.driver import SqliteDriver
from stm_backends.drivers.sqlite.settings import SqliteSettings

class Torn(SqliteDriver):
    busy = False

    async def alone(self, work):
        while Torn.busy:
            await asyncio.sleep(0)
        Torn.busy = True
        try:
            return await work
        finally:
            Torn.busy = False

    async def load_twice(self, key):
        first, second = await super().load(key), await super().load(key)
        return Record(first.version, first.body, second.tail) if first and second else first

    async def load(self, key):
        return await self.alone(self.load_twice(key))

    async def append(self, key, entry, **rest):
        return await self.alone(super().append(key, entry, **rest))

    async def replace(self, key, body, **rest):
        return await self.alone(super().replace(key, body, **rest))

def open_torn(url, *, create=False):
    return Torn(SqliteSettings.from_url(url.replace("torn:", "sqlite:")))

@hookimpl
def stm_backend():
    return BackendPlugin(name="torn", url_schemes=("torn",), open=open_torn)
"""
"""A backend that loads in two reads, which only a lock of its own process keeps together."""


def run(*command: object, cwd: Path, path: Path | None = None, timeout: float = 200) -> tuple[int, str]:
    """Run Python with arguments; returns the exit status and what was printed."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("COV", "PYTEST"))}
    # A plugin that is only installed beside us, and that takes seconds to import.
    kept["PYTEST_ADDOPTS"] = "-p no:langsmith_plugin"
    extra = {"PYTHONPATH": os.pathsep.join([str(path), kept.get("PYTHONPATH", "")])} if path else {}
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=cwd,
        env={**kept, "COLUMNS": "200", **extra},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
        check=False,
    )
    return done.returncode, done.stdout


def pytest_in(folder: Path, *options: object, path: Path | None = None) -> tuple[int, str]:
    """Run pytest in a folder that has nothing to do with this project."""
    return run(
        *("-m", "pytest", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", folder, *options),
        cwd=folder,
        path=path,
    )


def command(folder: Path, *options: object, path: Path | None = None) -> tuple[int, str]:
    """Run `stm-backends conformance`."""
    return run("-m", "stm_backends.cli", "conformance", *options, cwd=folder, path=path)


def install(folder: Path, name: str, source: str) -> Path:
    """Write a module that brings a backend, as if it were installed in `folder`."""
    (folder / f"{name}.py").write_text(textwrap.dedent(source), "utf-8")
    metadata = folder / f"{name}-1.5.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.5\n")
    (metadata / "entry_points.txt").write_text(f"[stm_backends]\n{name} = {name}\n")
    return folder
