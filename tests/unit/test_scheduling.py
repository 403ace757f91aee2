"""How the tests are distributed to workers: one that crashes does not hold up the run."""

from __future__ import annotations

from pathlib import Path

from tests.conformance.running import run

CONFTEST = """
from tests.support.scheduling import ByServer

def pytest_xdist_make_scheduler(config, log):
    return ByServer(config, log)
"""

TESTS = """
import os
import pytest

@pytest.mark.parametrize("number", range(30))
def test_of_thirty(number):
    if number == 12:
        os._exit(1)
"""


def test_a_run_ends_in_which_a_worker_crashes(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_crash.py").write_text(TESTS)
    root = Path(__file__).parents[2]
    _, printed = run("-m", "pytest", "-n", "2", "-p", "no:cacheprovider", cwd=tmp_path, path=root)
    assert "1 failed, 29 passed" in printed
    assert "crashed while running 'test_crash.py::test_of_thirty[12]'" in printed
