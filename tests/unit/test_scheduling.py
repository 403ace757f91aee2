"""How the tests are distributed to workers: a worker that crashes does not hold up the run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

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
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-n", "2", "-p", "no:cacheprovider", "--color=no", tmp_path],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert "1 failed, 29 passed" in done.stdout
    assert "crashed while running 'test_crash.py::test_of_thirty[12]'" in done.stdout
