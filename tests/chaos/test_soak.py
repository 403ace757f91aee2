"""Short soaks: nothing is lost in the library as it is, and what leaks is found."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.chaos import soak
from tests.chaos.mutants import LEAKS

pytestmark = pytest.mark.full

SHORT = ("--minutes", "1.4", "--every", "0.8", "--users", "3", "--pause", "0.06", "--lasts", "15")


def run(out: Path, *options: str) -> tuple[int, dict[str, Any]]:
    """Run the command on one datastore; returns its exit status and the results."""
    status = soak.main([*options, *SHORT, "--out", str(out)])
    (results,) = out.glob("*/results.json")
    return status, json.loads(results.read_text(encoding="utf-8"))


@pytest.mark.parametrize("stand", soak.DATASTORES, ids="on {}".format)  # not in the group of its server
def test_conversations_come_and_go_and_nothing_is_lost(
    stand: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, results = run(tmp_path, stand, "--kill-every", "30")
    # So short a run has hardly more than its warm-up, in which a datastore still grows.
    assert [one for one in results["violations"] if f" of {stand} climbs" not in one] == []
    assert results["figures"]["erasures ok"] > 3
    assert results["figures"]["summaries ok"] > 3
    assert results["faults"] == {"pod-kill": 2}
    judged = {(one["process"], one["name"]) for one in results["figures"]["series"]}
    assert {("p0.1", name) for name in soak.ALLOWED} < judged
    assert any(process == stand for process, _ in judged)
    assert f"| {stand} | pod p0 | memory |" in capsys.readouterr().out
    assert soak.main(["--table", "--out", str(tmp_path)]) == 0
    assert f"| {stand} | pod p0 | memory |" in capsys.readouterr().out


FOUND_IN = {"keeps-answers": "allocated of p", "keeps-descriptors": "descriptors of p"}


@pytest.mark.parametrize("mutant", sorted(LEAKS))
def test_a_short_soak_finds_the_leak(mutant: str, tmp_path: Path) -> None:
    status, results = run(tmp_path, "sqlite", "--mutant", mutant)
    assert status == 1
    assert any(one.startswith(FOUND_IN[mutant]) for one in results["violations"]), results["violations"]


def test_an_interrupt_stops_what_was_started(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.chaos.soak", "sqlite", "redis", "--out", str(tmp_path)]
    running = subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        start_new_session=True,
        # Where this test itself runs in the background, an interrupt would be ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # noqa: PLW1509 -- as above
    )
    try:
        while not all((tmp_path / stand / "events" / "p1.1.jsonl").exists() for stand in ("sqlite", "redis")):
            assert running.poll() is None
            time.sleep(0.1)
        os.killpg(running.pid, signal.SIGINT)
        _, said = running.communicate(timeout=60)
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(running.pid, signal.SIGKILL)
        raise
    assert running.returncode == 130
    assert b"what was started is stopped" in said
    assert not [one for one in Path("/proc").glob("[0-9]*/cmdline") if str(tmp_path).encode() in text(one)]
    assert str(tmp_path) not in Path("/proc/mounts").read_text("ascii")


def text(file: Path) -> bytes:
    """Return a file of a process, which may have ended."""
    try:
        return file.read_bytes()
    except OSError:
        return b""
