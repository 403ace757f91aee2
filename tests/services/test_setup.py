"""Setting a datastore up: by many processes at once."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable

import pytest

from stm_backends.drivers.contract import Key
from stm_backends.testing import open_at
from stm_backends.testing.workbench.processes import Task, Worker, ledger
from tests.support.contract import opened
from tests.support.places import EACH, Place

KEY = Key("acme:u1:memory", "chat")


@pytest.mark.full
@pytest.mark.parametrize("datastore", EACH)
async def test_ten_processes_that_create_at_once_all_write(
    datastore: str, place_on: Callable[[str], Place]
) -> None:
    url = place_on(datastore).options(deadline_s=30)
    opening = functools.partial(open_at, url, create=True)
    workers = [await Worker.start(Task(open=opening, key=KEY, label=f"w{n}", count=1)) for n in range(10)]
    await asyncio.gather(*(worker.finish() for worker in workers))
    async with opened(url) as driver:
        assert sorted(await ledger(driver, KEY)) == [f"w{n}:0" for n in range(10)]
