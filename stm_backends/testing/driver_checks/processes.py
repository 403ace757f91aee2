"""Checks that need operating-system processes."""

from __future__ import annotations

import asyncio
from typing import Final

from stm_backends.drivers.contract import ABSENT, Key
from stm_backends.testing.driver_checks.steps import assert_complete_and_in_order, shared
from stm_backends.testing.workbench.check import Contract, check
from stm_backends.testing.workbench.drivers import Bench
from stm_backends.testing.workbench.expectations import must_be
from stm_backends.testing.workbench.processes import Task, Worker, ledger

LEASE_S: Final = 3.0
"""The length of the lease taken by a process that is then killed, in seconds."""


class Processes(Contract):
    """Checks that need operating-system processes."""

    @check("driver.processes", slow=True)
    async def test_entries_of_four_processes_are_all_stored_in_order(self, bench: Bench) -> None:
        """Atomicity rests on a lock or a cache of one process instead of on the datastore."""
        driver, key = await shared(bench)
        workers = [
            await Worker.start(
                Task(open=bench.datastore.open, key=key, label=f"w{n}", count=60, fold_every=8 * (n % 2))
            )
            for n in range(4)
        ]
        await asyncio.gather(*(worker.finish() for worker in workers))
        counts = [len(worker.acknowledged) for worker in workers]
        must_be(counts, [60] * 4, "each process was to append 60 entries")
        assert_complete_and_in_order(await ledger(driver, key), {f"w{n}": 60 for n in range(4)})

    @check("driver.processes")
    async def test_acknowledged_writes_survive_a_kill_and_nothing_is_half_written(self, bench: Bench) -> None:
        """A write is acknowledged before it is stored, or a fold is stored in two steps."""
        driver, key = await shared(bench)
        # As many as one may write before the other begins: a record has room for all of them.
        many = 2_000
        victims = [
            await Worker.start(
                Task(
                    open=bench.datastore.open,
                    key=key,
                    label=f"w{n}",
                    count=many,
                    fold_every=5 * n,
                    stays=True,
                )
            )
            for n in range(2)
        ]
        await asyncio.gather(*(victim.read(until=25) for victim in victims))
        await asyncio.gather(*(victim.kill() for victim in victims))
        # A write comes first, because a victim's last request may still be done after its death.
        await driver.append(key, b"after", initial_version="initial", ttl=None)
        entries = await ledger(driver, key)
        assert len(entries) == len(set(entries)), "an entry must not be in the body and in the tail"
        assert "after" in entries, "an entry appended after the processes' death must be there"
        for n, victim in enumerate(victims):
            label = f"w{n}"
            there = [entry for entry in entries if entry.startswith(f"{label}:")]
            without_a_gap = [f"{label}:{number}" for number in range(len(there))]
            must_be(there, without_a_gap, "the process appended one entry after the other")
            # One more may be stored: the process may not have reported its acknowledgement before its death.
            unreported = len(there) - len(victim.acknowledged)
            assert unreported in (0, 1), "acknowledged entries must be there, and at most one more"

    @check("driver.processes", slow=True)
    async def test_the_lease_of_a_killed_process_is_free_once_expired_and_not_before(
        self, bench: Bench
    ) -> None:
        """A lease is bound to a connection, or its end is judged by its holder's clock."""
        driver, _ = await shared(bench)
        ttl = max(bench.tick, LEASE_S)
        key = await _left_by_a_killed_process(bench, ttl)
        taken = await driver.replace(key, b"", version="early", expect=ABSENT, ttl=ttl)
        if taken:
            # On a busy machine, it may have expired.
            ttl *= 4
            key = await _left_by_a_killed_process(bench, ttl)
            taken = await driver.replace(key, b"", version="early", expect=ABSENT, ttl=ttl)
        must_be(taken, False, "a lease outlives its holder until it expires")
        await bench.pass_time(ttl * 1.1)
        taken = await driver.replace(key, b"", version="late", expect=ABSENT, ttl=ttl)
        must_be(taken, True, "the lease has expired")


async def _left_by_a_killed_process(bench: Bench, ttl: float) -> Key:
    """Return the key of a lease of `ttl` seconds, whose holder was killed in the meantime."""
    key = bench.key()
    holder = await Worker.start(Task(open=bench.datastore.open, key=key, label="lease", count=0, lease_s=ttl))
    await holder.read(until=1)
    await holder.kill()
    must_be(holder.acknowledged, ["lease"], "the process takes the lease and keeps running")
    return key
