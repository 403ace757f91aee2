"""Each stand: its faults begin and end, and what was acknowledged meanwhile is stored once."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import os
import random
from collections import Counter
from pathlib import Path

import pytest

from stm_backends.drivers.contract import Driver, Key, new_version
from stm_backends.errors import OutcomeUnknown, StorageError
from stm_backends.testing.workbench.processes import fold, ledger
from tests.chaos.stands import Stand
from tests.support.contract import opened
from tests.support.places import with_query

pytestmark = pytest.mark.full

logger = logging.getLogger(__name__)

STANDS = (
    "redis",
    "postgres",
    "mongo",
    "dynamo",
    "redis_sentinel",
    "redis_cluster",
    "postgres_standby",
    "mongo_set",
)
HELD_S = 2.0


class Writers:
    """Tasks that append numbered entries to records of their own, and now and then fold them."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.acknowledged: dict[Key, list[str]] = {Key(f"acme:u{n}:memory", f"c{n}"): [] for n in range(3)}
        self.unknown: set[str] = set()
        self.outcomes: Counter[str] = Counter()
        self._over = False

    async def write(self, key: Key) -> None:
        number = 0
        while not self._over:
            number += 1
            entry = f"{key.name}:{number}"
            try:
                await self.driver.append(key, entry.encode(), initial_version=new_version(), ttl=None)
                self.acknowledged[key].append(entry)
                self.outcomes["ok"] += 1
                if number % 10 == 0:
                    await fold(self.driver, key, 5)
            except OutcomeUnknown:
                self.unknown.add(entry)
                self.outcomes["unknown"] += 1
            except StorageError as error:
                self.outcomes[type(error).__name__] += 1
            await asyncio.sleep(0.01)

    @contextlib.asynccontextmanager
    async def at_work(self):
        tasks = [asyncio.ensure_future(self.write(key)) for key in self.acknowledged]
        try:
            yield
        finally:
            self._over = True
            await asyncio.gather(*tasks)

    async def go_on(self) -> None:
        """Wait until each of them was acknowledged something that it sent from now on."""
        before = {key: len(entries) for key, entries in self.acknowledged.items()}

        async def goes_on() -> bool:
            # The first may have been sent before.
            return all(len(self.acknowledged[key]) >= count + 2 for key, count in before.items())

        await until(goes_on)

    async def check(self, direct: Driver) -> None:
        for key, acknowledged in self.acknowledged.items():
            stored = await ledger(direct, key)
            known = [entry for entry in stored if entry in set(acknowledged)]
            assert known == acknowledged, f"lost: {set(acknowledged) - set(stored)}"
            assert len(stored) == len(set(stored))
            assert set(stored) <= {*acknowledged, *self.unknown}, "refused, and stored"


async def until(is_so):
    """Wait for the fact, on a machine that may be busy."""
    async with asyncio.timeout(60):
        while not await is_so():  # noqa: ASYNC110 -- servers tell nobody
            await asyncio.sleep(0.05)


def mounted() -> str:
    return Path("/proc/mounts").read_text("ascii")


def children() -> set[str]:
    tasks = Path("/proc/self/task").glob("*/children")
    return {child for task in tasks for child in task.read_text("ascii").split()}


@pytest.mark.parametrize("name", STANDS)
async def test_acknowledged_writes_outlive_every_fault(name, tmp_path):
    before, environment = children(), dict(os.environ)
    stand: Stand = importlib.import_module(f"tests.chaos.stands.{name}").stand(tmp_path)
    chance = random.Random(name)
    await stand.start()
    try:
        assert stand.versions
        async with opened(with_query(stand.url, deadline_s=1.5)) as driver:
            writers = Writers(driver)
            async with writers.at_work():
                await writers.go_on()
                for kind, fault in stand.faults().items():
                    at_first = Counter(writers.outcomes)
                    async with fault(chance, HELD_S) as figures:
                        await asyncio.sleep(HELD_S)
                    await writers.go_on()
                    logger.info("%s %s: %s", kind, figures, dict(writers.outcomes - at_first))
            async with opened(stand.direct_url) as direct:
                await writers.check(direct)
    finally:
        await stand.stop()
    await stand.stop()
    assert children() <= before
    assert dict(os.environ) == environment
    assert str(stand.folder) not in mounted()
    assert not (stand.folder / "disk").exists()
