"""The page about SQL servers prints a package that compiles, and passes the suite where there is a server."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conformance.pages import printed_files, write_files
from tests.conformance.running import pytest_in, run
from tests.support import mariadb

PACKAGE = "stm_backends_mariadb"
FILES = printed_files("sql-server-driver.md", "stm-backends-mariadb")
MODULES = sorted(path for path in FILES if path.startswith(PACKAGE) and path.endswith(".py"))
TEST = "tests/test_conformance.py"


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A folder with the package that the page prints."""
    folder = tmp_path / "package"
    folder.mkdir()
    write_files(FILES, folder)
    return folder


def test_the_page_prints_the_files_of_a_driver() -> None:
    names = ("__init__", "driver", "errors", "plugin", "settings", "statements")
    assert [f"{PACKAGE}/{name}.py" for name in names] == MODULES


@pytest.mark.parametrize("path", [*MODULES, TEST])
def test_a_module_compiles_and_imports_names_that_exist(path: str) -> None:
    tree = ast.parse(FILES[path], path)
    compile(tree, path, "exec")
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module]
    missing = [
        f"{node.module}.{alias.name}"
        for node in imports
        for alias in node.names
        if (node.module or "").split(".")[0] == "stm_backends"
        and not hasattr(importlib.import_module(node.module or ""), alias.name)
    ]
    assert missing == []


def test_the_driver_sends_each_printed_statement_and_no_other() -> None:
    defined = set(re.findall(r"^([A-Z]+) = ", FILES[f"{PACKAGE}/statements.py"], re.MULTILINE))
    sent = set(re.findall(r"\bsql\.([A-Z]+)", FILES[f"{PACKAGE}/driver.py"]))
    assert sent == defined - {"ALIVE", "END"}


def test_the_plugin_reads_urls_and_prints_tables_without_a_client(package: Path, tmp_path: Path) -> None:
    program = """
from stm_backends import ConfigurationError
from stm_backends_mariadb.plugin import stm_backend
from stm_backends_mariadb.settings import MariadbSettings
settings = MariadbSettings.from_url("mariadb://me:s%40crt@db:3307/stm?pool_size=20", deadline_s=2.0)
print(settings.host, settings.port, settings.password, settings.database)
print(settings.pool_size, settings.deadline_s)
print("hidden:", "s@crt" not in repr(settings))
for url in ("mariadb://me@db", "mariadb://me@db:port/stm", "mariadb://me@db/stm?pol_size=2"):
    try:
        print(MariadbSettings.from_url(url))
    except ConfigurationError as error:
        print("refused:", error)
print(stm_backend().schema(None).count("CREATE TABLE IF NOT EXISTS"), "tables")
"""
    status, printed = run("-c", program, cwd=tmp_path, path=package)
    assert status == 0, printed
    assert printed.splitlines() == [
        "db 3307 s@crt stm",
        "20 2.0",
        "hidden: True",
        "refused: name a database: mariadb://user:password@host:3306/database",
        "refused: the port in the URL is not a number between 1 and 65535",
        *[line for line in printed.splitlines() if "has no such setting in a URL" in line],
        "2 tables",
    ]
    assert "did you mean 'pool_size'" in printed


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a database."""
    with mariadb.reached(tmp_path_factory.mktemp("mariadb")) as url:
        yield url


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the package is installed, as pip does it."""
    source, folder = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("installed")
    write_files(FILES, source)
    status, printed = run(
        *("-m", "pip", "install", "--quiet", "--no-deps", "--target", folder, source), cwd=source
    )
    assert status == 0, printed
    return folder


@pytest.mark.full
def test_the_driver_passes_the_full_suite_on_a_server(installed: Path, tmp_path: Path, url: str) -> None:
    status, printed = pytest_in(
        tmp_path,
        *("--stm-backend=mariadb", f"--stm-url={url}", "--stm-create"),
        *("--pyargs", "stm_backends.testing"),
        path=installed,
    )
    assert status == 0, printed


@pytest.mark.full
def test_the_test_class_with_all_means_passes(
    installed: Path, package: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only a test class can damage records, hold locks and cut connections."""
    monkeypatch.setenv("MARIADB_URL", url)
    status, printed = pytest_in(package / "tests", Path(TEST).name, "--stm-quick", path=installed)
    assert status == 0, printed
    not_asked = "".join(line for line in printed.splitlines() if "not asked: " in line)
    for clause in ("corruption", "outage", "races"):
        assert f"driver.{clause}" not in not_asked, printed
