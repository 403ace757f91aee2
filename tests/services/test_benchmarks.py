"""Every benchmark runs at its smallest size, and writes its pages; the figures mean nothing here."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.datastores import MOST_CONNECTIONS, TOGETHER, Address
from stm_backends_postgres import PostgresSettings
from tests.support.places import SERVERS

ROOT = Path(__file__).parents[2]

Run = Callable[..., Path]


@pytest.fixture
def run(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a benchmark on one datastore, on the server of the tests; returns the page."""

    def benchmark(module: str, size: str, datastore: str) -> Path:
        if datastore in SERVERS:
            server: Any = request.getfixturevalue(SERVERS[datastore])
            for name, value in getattr(server, "environment", {}).items():
                monkeypatch.setenv(name, value)
            monkeypatch.setenv(f"STM_TEST_{datastore.upper()}_URL", getattr(server, "url", server))
        page = tmp_path / "PAGE.md"
        options = ("-m", module, size, "--datastores", datastore, "--write", str(page))
        done = subprocess.run(
            [sys.executable, *options], cwd=ROOT, capture_output=True, text=True, check=False, timeout=280
        )
        assert done.returncode == 0, done.stderr[-2_000:]
        text = page.read_text("utf-8")
        assert "is missing" not in text, text
        assert "is incomplete" not in text, text
        return page

    return benchmark


@pytest.mark.full
@pytest.mark.parametrize("datastore", ["sqlite", *SERVERS])
def test_turns_are_compared_with_a_bare_client_and_without_pages(datastore: str, run: Run) -> None:
    page = run("benchmarks.run", "--tiny", datastore)
    (figures,) = json.loads(page.with_name("results.json").read_text("utf-8"))["datastores"]
    assert len(figures["cells"]) == 3
    assert all(figures["cells"][0]["blocks"].values())
    assert page.with_name("results.svg").read_text("utf-8").startswith("<svg")
    kept = page.with_name("TRANSCRIPTS.md").read_text("utf-8")
    assert "is incomplete" not in kept, kept
    assert kept.count("| ≤ 1.25 |") == 1
    assert ("Not measured" in kept) == (datastore != "dynamo")


@pytest.mark.full
@pytest.mark.parametrize("datastore", ["sqlite", *SERVERS])
def test_many_readers_of_the_newest_entries_are_measured(datastore: str, run: Run) -> None:
    assert "20 of 40" in run("benchmarks.readers", "--tiny", datastore).read_text("utf-8")


@pytest.mark.full
@pytest.mark.parametrize("datastore", ["sqlite", "redis"])
def test_searches_are_measured(datastore: str, run: Run) -> None:
    assert "the first search" in run("benchmarks.search", "--tiny", datastore).read_text("utf-8")


@pytest.mark.full
@pytest.mark.parametrize("datastore", ["sqlite", "redis", "postgres"])
def test_a_large_tenant_and_a_long_conversation_are_measured(datastore: str, run: Run) -> None:
    page = run("benchmarks.scale", "--small", datastore)
    sections = page.read_text("utf-8").split("\n## ")[1:]
    # Each section has a table with a row of this datastore.
    assert [section.count("\n| ") for section in sections] == [3] * 4


@pytest.mark.full
def test_the_cost_of_a_day_has_the_units_of_dynamodb(run: Run) -> None:
    cost = run("benchmarks.scale", "--small", "dynamo").with_name("COST.md").read_text("utf-8")
    assert "Not measured" not in cost
    assert "| folding on |" in cost


@pytest.mark.full
@pytest.mark.parametrize("datastore", ["sqlite", "redis"])
def test_recalls_are_measured_at_each_size(datastore: str, run: Run) -> None:
    page = run("benchmarks.recall", "--tiny", datastore).read_text("utf-8")
    assert "| 20 memories | 40 memories |" in page
    assert "| two words of an entry | " in page


def test_sealed_turns_are_compared_with_unsealed_ones(tmp_path: Path) -> None:
    page = tmp_path / "PAGE.md"
    options = ("-m", "benchmarks.sealing", "--tiny", "--write", str(page))
    subprocess.run([sys.executable, *options], cwd=ROOT, capture_output=True, check=True, timeout=100)
    rows = [line for line in page.read_text("utf-8").splitlines() if "Keys |" in line]
    assert len(rows) == 4
    assert "derive the key of a record" in page.read_text("utf-8")


@pytest.mark.parametrize("processes", [1, 2, 4, 8, 16])
def test_the_processes_of_a_benchmark_fit_in_one_postgresql(processes: int) -> None:
    address = Address("postgres", PostgresSettings(pool_size=TOGETHER), "")
    each = 2 * address.shared_by(processes).settings.pool_size
    assert 2 * TOGETHER + processes * each <= MOST_CONNECTIONS
