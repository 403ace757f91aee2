"""Runs the tests that a framework has for its own back ends, on ours."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path


def passed(plugin: str, *arguments: str, folder: Path, url: str) -> int:
    """Return how many tests passed in a folder; one that fails is an error. The plugin puts ours in."""
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", plugin, "-p", "no:cacheprovider", "-ra", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent), "STM_TEST_KIT_URL": url},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    found = re.search(r"(\d+) passed", ran.stdout)
    assert ran.returncode == 0, ran.stdout[-20_000:]
    assert found is not None
    return int(found[1])
