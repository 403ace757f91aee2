"""The driver that the page prints for a store without locks keeps the contract."""

from __future__ import annotations

import asyncio
import bisect
import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from stm_backends.drivers import Key
from stm_backends.testing import Datastore, DriverContract, FakeClock
from tests.conformance.pages import ROOT

PAGE = (ROOT / "docs" / "how-to" / "writing-a-backend.md").read_text("utf-8")

LONGEST = 200
"""Lines of the example."""


class Kv:
    """Ordered keys, with commits on conditions; a call yields to others before it begins."""

    def __init__(self) -> None:
        self.rows: dict[bytes, tuple[bytes, int]] = {}
        self.revision = 0
        self.is_down = False

    async def range(self, first: bytes, last: bytes, limit: int | None) -> list[tuple[bytes, bytes, int]]:
        await asyncio.sleep(0)
        keys = sorted(self.rows)
        found = keys[bisect.bisect_left(keys, first) : bisect.bisect_left(keys, last)][:limit]
        return [(key, *self.rows[key]) for key in found]

    async def commit(
        self, conditions: dict[bytes, int], puts: dict[bytes, bytes], deletes: Iterable[bytes]
    ) -> bool:
        await asyncio.sleep(0)
        for key, revision in conditions.items():
            if self.rows.get(key, (b"", 0))[1] != revision:
                return False
        self.revision += 1
        for key in deletes:
            self.rows.pop(key, None)
        self.rows |= {key: (value, self.revision) for key, value in puts.items()}
        return True


def printed() -> dict[str, Any]:
    """Return what the block of the page defines."""
    section = PAGE.partition("## A store without locks\n")[2]
    found = re.search(r"^```python\n(.*?)^```$", section, re.DOTALL | re.MULTILINE)
    assert found
    assert len([line for line in found[1].splitlines() if line.strip()]) < LONGEST
    names: dict[str, Any] = {"__name__": "printed"}
    exec(compile(found[1], "printed", "exec"), names)  # noqa: S102 -- our own page
    return names


class TestOptimisticDriver(DriverContract):
    quick = True

    @pytest.fixture
    def datastore(self) -> Datastore:
        kv, clock, kind = Kv(), FakeClock(), printed()["KvDriver"]

        async def open_one() -> Any:
            driver = kind(kv, max_record=100_000, clock=clock)
            # The store is in this process.
            driver.traits = replace(driver.traits, reach="process", clock="process")
            await driver.open()
            return driver

        def keys_of(key: Key) -> list[bytes]:
            ours = key.scope.encode() + b"\0" + key.name.encode()
            name, place = b"name\0" + ours, b"record\0" + ours + b"\0"
            return [at for at in kv.rows if at == name or at.startswith(place)]

        async def stored(key: Key) -> list[bytes]:
            return keys_of(key)

        async def cut(key: Key) -> None:
            last = max(keys_of(key))
            value, revision = kv.rows[last]
            kv.rows[last] = value[:-1], revision

        async def damage(key: Key) -> None:
            head = next(at for at in keys_of(key) if at.endswith(b"\0") and at.startswith(b"record"))
            value, revision = kv.rows[head]
            kv.rows[head] = value[:-1], revision

        return Datastore(
            open=open_one,
            pass_time=clock.pass_time,
            tick=60.0,
            races_s=0.3,
            damage=damage,
            cut=cut,
            stored=stored,
        )
