"""The examples run as they stand, and print what stands at their end."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def test_the_examples_were_found() -> None:
    names = {path.stem for path in EXAMPLES}
    assert names >= {
        "basic",
        "truncation",
        "persistence",
        "callbacks",
        "custom_memory",
        "planner",
        "openai_agents",
    }


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_begins_with_the_command_that_runs_it(example: Path) -> None:
    first = example.read_text("utf-8").splitlines()[0]
    assert re.fullmatch(rf"# (pip install .* && )?python examples/{example.name}", first)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs_and_prints_what_stands_at_its_end(example: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", str(example)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    end = example.read_text("utf-8").rpartition("\n\n")[2]
    assert end.startswith("# ")
    assert done.stdout.splitlines() == [line.removeprefix("# ") for line in end.splitlines()]
