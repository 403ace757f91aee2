"""Every benchmark runs at its smallest size, and writes its pages; the figures mean nothing here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(module: str, *arguments: object) -> None:
    done = subprocess.run(
        [sys.executable, "-m", module, *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-2_000:]


@pytest.mark.full
def test_the_comparison_with_bare_clients_measures_each_datastore(tmp_path: Path) -> None:
    page = tmp_path / "RESULTS.md"
    run("benchmarks.run", "--tiny", "--write", page)
    text = page.read_text("utf-8")
    assert "is missing" not in text
    assert "is incomplete" not in text
    figures = json.loads((tmp_path / "results.json").read_text("utf-8"))
    assert [len(one["cells"]) for one in figures["datastores"]] == [4] * 5
    assert (tmp_path / "results.svg").read_text("utf-8").startswith("<svg")


@pytest.mark.full
def test_scale_is_measured_on_each_datastore_that_it_names(tmp_path: Path) -> None:
    page = tmp_path / "SCALE.md"
    run("benchmarks.scale", "--small", "--write", page)
    text = page.read_text("utf-8")
    assert "is missing" not in text
    assert "is incomplete" not in text
    assert all(text.count(f"| {name} |") == 4 for name in ("SQLite", "Redis", "PostgreSQL"))
    cost = page.with_name("COST.md").read_text("utf-8")
    assert "Not measured" not in cost
