"""A worker process that ends otherwise than it should says how, and what it had to say."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from stm_backends.drivers.contract import Driver, Key
from stm_backends.testing import open_at
from stm_backends.testing.workbench.processes import Task, Worker


async def dies(words: str) -> Driver:
    """Stand in for a client library that ends the process, with something to say."""
    sys.stderr.write("much\n" * 100_000 + f"{words}\n")
    sys.stderr.flush()
    os._exit(7)


def task(open_one: Callable[[], Awaitable[Driver]]) -> Task:
    return Task(open=open_one, key=Key("scope", "name"), label="w", count=1_000_000)


@pytest.fixture
def store(tmp_path: Path) -> Callable[[], Awaitable[Driver]]:
    return functools.partial(open_at, f"sqlite:///{tmp_path}/x.db", create=True)


@pytest.mark.parametrize("until", [None, 3])
async def test_a_worker_that_died_tells_its_status_and_its_last_words(until: int | None) -> None:
    worker = await Worker.start(task(functools.partial(dies, "the library is gone")))
    with pytest.raises(AssertionError) as caught:
        await (worker.finish() if until is None else worker.read(until=until))
    message = str(caught.value)
    assert "ended by itself with status 7, after 0 acknowledged writes; its last words:" in message
    assert message.endswith("the library is gone")
    assert message.count("much") < 20


async def test_a_worker_that_was_dead_before_it_was_killed_is_no_lookup_error() -> None:
    worker = await Worker.start(task(functools.partial(dies, "the library is gone")))
    with pytest.raises(AssertionError):
        await worker.read(until=1)
    with pytest.raises(AssertionError, match="ended by itself with status 7"):
        await worker.kill()


async def test_a_worker_that_is_killed_at_work_has_ended_as_it_should(store) -> None:
    worker = await Worker.start(task(store))
    await worker.read(until=3)
    await worker.kill()
    assert worker.acknowledged[:3] == ["w:0", "w:1", "w:2"]


async def test_a_worker_that_cannot_import_its_task_says_what_to_use_instead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "only_here.py").write_text("async def open_one(): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    import only_here  # noqa: PLC0415 -- it has just been written

    (tmp_path / "only_here.py").unlink()
    worker = await Worker.start(task(only_here.open_one))
    with pytest.raises(AssertionError, match="must be importable by other processes; use `open_at`"):
        await worker.finish()
