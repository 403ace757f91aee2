"""A driver that blocks the event loop ends the run, which says which check it was and what its threads do."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conformance.running import MINE, SUITE, install, run, stranger

CHECK = "test_a_record_that_is_not_there_is_none"

SOON = """
from stm_backends.cli import conformance
from stm_backends.testing.driver_checks import first_look, state_machine
from stm_backends.testing.workbench import check, watchdog

check.LONGEST_CHECK_S = state_machine.LONGEST_CHECK_S = 0.5
conformance._SLACK_S = first_look._SLACK_S = first_look._LONGEST_S = 1.0
watchdog.STUCK_S = 1.0
"""
"""Limits that end in a test."""

BLOCKING = (
    SOON
    + """
import os, threading
from concurrent.futures import ThreadPoolExecutor
from stm_backends.testing.workbench import faulty

def stuck_for_ever():
    threading.Event().wait()

class Blocks(faulty.FaultyDriver):
    thread = None

    def __init__(self, *given, **named):
        super().__init__(*given, **{{**named, "deadline_s": 0.1}})

    async def open(self):
        await super().open()
        if os.environ["PYTEST_CURRENT_TEST"].endswith("({when})"):
            self.thread = ThreadPoolExecutor(1)
            self.thread.submit(stuck_for_ever)

    async def close(self):
        await super().close()
        if self.thread is not None:
            self.thread.shutdown()

faulty.faulty_datastore.__defaults__ = (Blocks,)
"""
)
"""A driver with a thread that never ends, for which `close` waits on the event loop."""


def blocked(folder: Path, *options: str, when: str = "call") -> tuple[int, str]:
    """Run one check of the driver that blocks in this phase of it."""
    (folder / "conftest.py").write_text(BLOCKING.format(when=when), "utf-8")
    (folder / "test_mine.py").write_text(MINE.format(extra="", other=False), "utf-8")
    return run("-m", "pytest", *SUITE, *stranger(folder, "-k", CHECK, *options), cwd=folder, timeout=60)


def test_a_check_that_blocks_the_event_loop_ends_the_run_and_is_named(tmp_path: Path) -> None:
    status, printed = blocked(tmp_path)
    assert status == 1
    assert f"the check TestMine.{CHECK} has not ended within 0.5 s" in printed
    assert "the driver blocks the event loop" in printed
    assert "in stuck_for_ever" in printed
    assert "in close" in printed


def test_a_random_history_that_blocks_the_event_loop_ends_the_run(tmp_path: Path) -> None:
    status, printed = blocked(tmp_path, "-k", "test_any_history_without_expiry")
    assert status == 1
    assert "an operation of a random history (clause driver.model) has not ended within 0.5 s" in printed
    assert "in stuck_for_ever" in printed


@pytest.mark.full
def test_a_first_look_that_blocks_the_event_loop_ends_the_run(tmp_path: Path) -> None:
    status, printed = blocked(tmp_path, when="setup")
    assert status == 1
    assert "the first use of two instances has not ended within " in printed
    assert "in stuck_for_ever" in printed


@pytest.mark.full
def test_a_process_of_xdist_that_is_blocked_ends_and_is_named(tmp_path: Path) -> None:
    pytest.importorskip("xdist")
    status, printed = blocked(tmp_path, "-n1", f"--stm-json={tmp_path}/found.json")
    assert status == 1
    assert f"the check TestMine.{CHECK} has not ended within 0.5 s" in printed
    assert "in stuck_for_ever" in printed
    assert f"could not be run: test_mine.py::TestMine::{CHECK} ended its process" in printed


def test_the_command_ends_for_a_driver_that_blocks_the_event_loop(tmp_path: Path) -> None:
    source = SOON + "import time\nclass Made(SqliteDriver):\n    async def load(self, key): time.sleep(1e6)\n"
    status, printed = run(
        *("-m", "stm_backends.cli", "conformance", "blocking"),
        *("--url", f"blocking:///{tmp_path}/x.db?deadline_s=0.2"),
        cwd=tmp_path,
        path=install(tmp_path, "blocking", source),
        timeout=60,
    )
    assert status == 1
    assert "the first use of the driver has not ended within" in printed
    assert "in load" in printed
