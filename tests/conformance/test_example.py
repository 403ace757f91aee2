"""The page for authors of backends is true: the package printed there passes the suite in all three ways."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from tests.conformance.running import command, pytest_in, run

pytest.importorskip("lmdb", reason="the dependency group `test` brings what the example stores in")

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "stm-backends-lmdb"
PAGE = (ROOT / "docs" / "writing-a-backend.md").read_text("utf-8")

# A paragraph that begins with a file's name, and the block below it.
_NAMED = re.compile(
    r"^`stm-backends-lmdb/([\w./]+)` (?:[^\n]+\n)+\n```\w+\n(.*?)```", re.MULTILINE | re.DOTALL
)

LONGEST_DRIVER = 150
"""Lines that are not blank, of everything that an author writes to store records."""


def printed_files() -> dict[str, str]:
    """Return the files that the page prints, each put together from its blocks."""
    files: dict[str, list[str]] = {}
    for path, block in _NAMED.findall(PAGE):
        files.setdefault(path, []).append(block)
    return {path: "\n".join(blocks) for path, blocks in files.items()}


def lines_of(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.strip()]


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package as the page prints it."""
    folder = tmp_path_factory.mktemp("printed")
    for path, text in printed_files().items():
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_text(text, "utf-8")
    return folder


@pytest.fixture(scope="module")
def installed(package: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory into which that package is installed, and nothing else."""
    folder = tmp_path_factory.mktemp("installed")
    status, printed = run(
        *("-m", "pip", "install", "--quiet", "--no-deps", "--target", folder, package), cwd=folder
    )
    assert status == 0, printed
    return folder


def test_the_page_prints_the_example_to_the_last_line() -> None:
    files = {
        path.relative_to(EXAMPLE).as_posix(): path.read_text("utf-8")
        for path in EXAMPLE.rglob("*")
        if path.suffix in (".py", ".toml")
    }
    assert printed_files().keys() == files.keys()
    for path, text in printed_files().items():
        assert lines_of(text) == lines_of(files[path]), path


def test_the_driver_is_as_short_as_was_promised() -> None:
    assert len(lines_of(printed_files()["stm_backends_lmdb/driver.py"])) < LONGEST_DRIVER


def test_by_its_name_it_passes_the_whole_suite_within_a_minute(installed: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    status, printed = pytest_in(
        tmp_path,
        *("--stm-backend=lmdb", f"--stm-url=lmdb:///{tmp_path}/data", f"--stm-json={report}"),
        *("--pyargs", "stm_backends.testing"),
        path=installed,
    )
    assert status == 0, printed
    found = json.loads(report.read_text())
    assert found["versions"]["driver"] == "stm-backends-lmdb 0.1.0"
    assert found["traits"]["reach"] == "host"


def test_its_own_tests_pass(installed: Path, package: Path, tmp_path: Path) -> None:
    status, printed = pytest_in(tmp_path, "--stm-quick", "-rs", package / "tests", path=installed)
    assert status == 0, printed
    assert "needs `Datastore.damage`" not in printed
    assert "needs `Datastore.outage`" in printed


def test_the_command_finds_and_passes_it(installed: Path, tmp_path: Path) -> None:
    status, printed = command(
        tmp_path, "lmdb", "--url", f"lmdb:///{tmp_path}/data", "--quick", path=installed
    )
    assert status == 0, printed
    assert "Nothing is broken on lmdb in a quick run" in printed


def test_what_is_built_on_it_passes_too(installed: Path, tmp_path: Path) -> None:
    status, printed = pytest_in(
        tmp_path,
        *("--stm-backend=lmdb", f"--stm-url=lmdb:///{tmp_path}/data", "--stm-quick"),
        *("--stm-profile=store", "--stm-profile=memory", "--pyargs", "stm_backends.testing"),
        path=installed,
    )
    assert status == 0, printed


def test_it_is_installed_as_a_backend_that_is_ready(installed: Path, tmp_path: Path) -> None:
    program = "from stm_backends.plugins import diagnose; print([(d.name, d.state) for d in diagnose()])"
    status, printed = run("-c", program, cwd=tmp_path, path=installed)
    assert status == 0
    assert "('lmdb', 'ready')" in printed
    assert sys.prefix not in str(installed)
