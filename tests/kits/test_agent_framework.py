"""The Agent Framework's own tests of storages of checkpoints, with ours in the place of theirs.

Neither its wheel nor its source distribution has tests, so they come from its repository. Where that cannot
be reached, `STM_TEST_AGENT_FRAMEWORK` names a folder with them.
"""

from __future__ import annotations

import os
import shutil
import urllib.request
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.kits.running import passed

THEIRS = "tests/workflow/test_checkpoint.py"

LEFT_OUT = (
    # What looks at files.
    "test_file_checkpoint_storage_save_and_load",
    "test_file_checkpoint_storage_delete",
    "test_file_checkpoint_storage_directory_creation",
    "test_file_checkpoint_storage_json_serialization",
)
"""Tests of what ours does not have."""


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with their tests, of the installed release."""
    folder = tmp_path_factory.mktemp("agent-framework")
    file = folder / THEIRS
    file.parent.mkdir(parents=True)
    for package in (file.parent, file.parent.parent):
        (package / "__init__.py").touch()
    if given := os.environ.get("STM_TEST_AGENT_FRAMEWORK"):
        shutil.copy(Path(given) / file.name, file)
        return folder
    tag = f"python-{version('agent-framework-core')}"
    url = f"https://raw.githubusercontent.com/microsoft/agent-framework/{tag}/python/packages/core/{THEIRS}"
    try:
        with urllib.request.urlopen(url, timeout=30) as answer:
            file.write_bytes(answer.read())
    except OSError as error:
        pytest.skip(f"the tests of {tag} cannot be had: {error}")
    return folder


@pytest.mark.full
@pytest.mark.parametrize("url", ["memory://", "sqlite:///kit.db"])
def test_what_the_framework_asks_of_its_own_storages_ours_does(theirs: Path, url: str) -> None:
    options = ("-o", "asyncio_mode=auto", "--import-mode=prepend", "--rootdir", str(theirs))
    left_out = [f"--deselect={THEIRS}::{test}" for test in LEFT_OUT]
    assert passed("our_agent_framework", *options, *left_out, THEIRS, folder=theirs, url=url) >= 40
