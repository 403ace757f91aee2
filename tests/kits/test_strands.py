"""Strands' own tests of what stores something, with ours in the place of theirs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.kits.running import passed

THEIRS = "tests/strands"

LEFT_OUT = {
    # What is in memory alone.
    "storage/test_in_memory_storage.py::TestInMemoryStorage": (
        "test_clear",
        "test_namespace_clear_only_clears_prefix",
        "test_namespace_passes_scoped_instance_to_strategy",
        "test_write_indexes_with_search_strategy",
        "test_search_delegates_to_strategy",
    ),
}
"""Tests of what ours does not have."""

FILES = (
    *("storage/test_in_memory_storage.py", "storage/test_storage.py"),
    *("session/test_snapshot_session_manager.py", "session/test_repository_session_manager.py"),
)


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source of the installed release; its wheel has no tests."""
    folder = tmp_path_factory.mktemp("strands")
    release = f"strands-agents=={version('strands-agents')}"
    download = (sys.executable, "-m", "pip", "download", "--quiet", "--no-binary", ":all:", "--no-deps")
    got = subprocess.run(
        [*download, "--dest", str(folder), release], capture_output=True, text=True, check=False, timeout=300
    )
    if got.returncode and os.environ.get("CI", "").lower() != "true":
        pytest.skip(f"the source of {release} cannot be had")
    assert not got.returncode, got.stderr
    (sdist,) = folder.glob("*.tar.gz")
    shutil.unpack_archive(sdist, folder, filter="data")
    return sdist.with_name(sdist.name.removesuffix(".tar.gz"))


@pytest.mark.full
@pytest.mark.parametrize("url", ["memory://", "sqlite:///kit.db"])
def test_what_strands_asks_of_its_own_storages_ours_does(theirs: Path, url: str) -> None:
    left_out = [f"--deselect={THEIRS}/{place}::{test}" for place, tests in LEFT_OUT.items() for test in tests]
    files = [f"{THEIRS}/{file}" for file in FILES]
    assert passed("our_strands", *left_out, *files, folder=theirs, url=url) >= 190
