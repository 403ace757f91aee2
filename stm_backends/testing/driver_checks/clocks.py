"""Checks of the clock that decides expiry."""

from __future__ import annotations

import asyncio
import functools
from typing import Final

from stm_backends.drivers.contract import Key
from stm_backends.testing.driver_checks.steps import loaded, shared
from stm_backends.testing.workbench.check import Contract, check, not_asked
from stm_backends.testing.workbench.drivers import Bench
from stm_backends.testing.workbench.expectations import must_be
from stm_backends.testing.workbench.processes import Task, Worker, look_and_write

WRONG_BY_S: Final = 240.0
"""Seconds by which a clock is wrong; less than a server that checks signatures tolerates."""


class Clocks(Contract):
    """Checks of the clock that decides expiry."""

    @check("driver.clock")
    async def test_a_wrong_clock_of_a_client_changes_no_expiry(self, bench: Bench) -> None:
        """Expiry is computed or compared with the client's clock, although the traits say the server's."""
        driver, _ = await shared(bench)
        if driver.traits.clock != "server":
            not_asked(f"expiry follows the clock of the {driver.traits.clock}, as the traits say")
        scope, wrong_by = bench.scope(), max(WRONG_BY_S, bench.tick * 4)
        lasting, mortal, ahead, behind = (
            Key(scope, name) for name in ("lasting", "mortal", "ahead", "behind")
        )
        await driver.append(lasting, b"a", initial_version="initial", ttl=wrong_by / 2)
        await driver.append(mortal, b"a", initial_version="initial", ttl=bench.tick)
        await bench.pass_time(bench.tick * 1.1)
        workers = [
            await Worker.start(
                Task(
                    open=bench.datastore.open,
                    key=seen,
                    label="",
                    count=0,
                    work=functools.partial(look_and_write, other=written, ttl=ttl),
                ),
                ahead_s=ahead_s,
            )
            for seen, written, ttl, ahead_s in (
                (lasting, ahead, bench.tick, wrong_by),
                (mortal, behind, wrong_by / 2, -wrong_by),
            )
        ]
        await asyncio.gather(*(worker.finish() for worker in workers))
        must_be(workers[0].acknowledged, ["there"], "only the clock of this process says that it has expired")
        must_be(workers[1].acknowledged, ["absent"], "only the clock of this process says that it is alive")
        must_be((await loaded(driver, behind)).tail, (b"a",), "its writer's clock was behind, and no other")
        await bench.pass_time(bench.tick * 1.1)
        must_be(await driver.load(ahead), None, "its writer's clock was ahead, and no other")
