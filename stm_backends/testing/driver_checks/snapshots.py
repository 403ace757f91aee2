"""Checks that a load is a snapshot under constant writes."""

from __future__ import annotations

import asyncio
import functools
from typing import Final

from stm_backends.testing.driver_checks.numbered import watch_numbers, write_numbers
from stm_backends.testing.driver_checks.steps import shared
from stm_backends.testing.workbench.check import Contract, check
from stm_backends.testing.workbench.drivers import Bench
from stm_backends.testing.workbench.processes import Task, Worker

WRITING_S: Final = 1.0
"""Seconds for which another instance writes: long enough to hit the gap between two reads."""

QUICK_WRITING_S: Final = 0.25
"""The same in a quick run."""

WRITING_ELSEWHERE_S: Final = 1.5
"""Seconds for which another process writes."""


class Snapshots(Contract):
    """Checks that a load is a snapshot under constant writes."""

    @check("driver.load")
    async def test_a_load_is_a_snapshot_while_another_instance_appends_and_folds(self, bench: Bench) -> None:
        """The version, the body and the tail are read one after another, not in one snapshot."""
        reader, writer, key = await bench.driver(), await bench.driver(), bench.key()
        seconds = QUICK_WRITING_S if bench.quick else WRITING_S
        async with asyncio.TaskGroup() as tasks:
            writing = tasks.create_task(write_numbers(writer, key, seconds=seconds))
            await watch_numbers(reader, key, writing)

    @check("driver.load", slow=True)
    async def test_a_load_is_a_snapshot_while_another_process_appends_and_folds(self, bench: Bench) -> None:
        """A lock or a thread of the process keeps the reads of a load together, instead of the datastore."""
        reader, key = await shared(bench)
        work = functools.partial(write_numbers, seconds=WRITING_ELSEWHERE_S)
        task = Task(open=bench.datastore.open, key=key, label="writer", count=0, work=work)
        worker = await Worker.start(task)
        async with asyncio.TaskGroup() as tasks:
            await watch_numbers(reader, key, tasks.create_task(worker.finish()), starting_s=0.01)
