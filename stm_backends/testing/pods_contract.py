"""The contract of a memory that several processes share, in addition to the contract of every memory."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Final

from stm_backends.errors import Corrupt, StmError, StorageError
from stm_backends.testing.memory_checks.failover import Failover
from stm_backends.testing.memory_checks.sealing import Sealed
from stm_backends.testing.memory_checks.transcripts import Transcripts
from stm_backends.testing.memory_contract import MemoryContract
from stm_backends.testing.pods import LONGEST_SUMMARY_S
from stm_backends.testing.workbench.check import check, not_asked
from stm_backends.testing.workbench.expectations import must_be, must_raise
from stm_backends.testing.workbench.memories import Memory, MemoryBench, config, shown, turn, until
from stm_backends.testing.workbench.summarizers import LedgerSummarizer
from stm_backends.types import MemoryHealth

INTERVAL_S: Final = 0.25
"""Seconds that a degraded memory waits before its next attempt, in the check that counts attempts."""


class PodsContract(Failover, Sealed, Transcripts, MemoryContract):
    """Checks of everything in a memory shared by pods that an agent may rely on."""

    @check("memory.pods")
    async def test_what_one_pod_adds_every_other_shows_at_once(self, bench: MemoryBench) -> None:
        """Each process answers from its own copy."""
        pods = await _pods(bench, 3, strategy="truncation", zone=50)
        for number in range(12):
            await pods[number % 3].add_turn(turn(number))
            for pod in pods:
                recent = (await shown(pod))["recent"]
                must_be(recent, [f"u{one}" for one in range(number + 1)], "these turns were added")

    @check("memory.pods")
    async def test_concurrent_turns_are_all_stored_in_each_pods_order(self, bench: MemoryBench) -> None:
        """A turn is added by loading the state and saving it back, or turns are ordered by their clocks."""
        pods = await _pods(bench, 4, strategy="truncation", zone=200)

        async def write(number: int) -> None:
            for place in range(15):
                # Clocks differ between machines, and this one runs backwards.
                each = turn(f"{number}-{place}")
                each.ts = 1_000.0 - place
                await pods[number].add_turn(each)

        await asyncio.gather(*(write(number) for number in range(4)))
        for pod in pods:
            recent = (await shown(pod))["recent"]
            must_be(len(recent), 60, "four pods have added 15 turns each")
            for number in range(4):
                mine = [user for user in recent if user.startswith(f"u{number}-")]
                added = [f"u{number}-{place}" for place in range(15)]
                must_be(mine, added, f"pod {number} added its turns in this order")

    @check("memory.pods")
    async def test_all_pods_share_a_summary_that_covers_each_turn_once(self, bench: MemoryBench) -> None:
        """A summary stored by another pod is overwritten or applied to other turns."""
        summarizers = [LedgerSummarizer() for _ in range(3)]
        pods = await _pods(bench, 3, summarizers=summarizers)

        async def write(number: int) -> None:
            for place in range(10):
                await pods[number].add_turn(turn(f"{number}-{place}"))
                await asyncio.sleep(0.001 * (place % 3))

        await asyncio.gather(*(write(number) for number in range(3)))
        await asyncio.gather(*(pod.flush() for pod in pods))
        views = [await shown(pod) for pod in pods]
        must_be(views, [views[0]] * 3, "every pod shows the same conversation")
        everything = views[0]["summary"] + views[0]["pending"] + views[0]["recent"]
        added = sorted(f"u{n}-{place}" for n in range(3) for place in range(10))
        must_be(sorted(everything), added, "each turn is summarized, pending or recent, and once")
        must_be(len(views[0]["recent"]), 2, "the full zone is two turns")

    @check("memory.pods")
    async def test_turns_that_another_pod_adds_during_a_summary_survive_it(self, bench: MemoryBench) -> None:
        """All pending turns are cleared when the summary is stored, instead of the covered ones."""
        summarizer = LedgerSummarizer()
        summarizer.hold()
        one, two = await _pods(bench, 2, summarizers=[summarizer, LedgerSummarizer()])
        for number in range(3):
            await one.add_turn(turn(number))
        await until(summarizer.called.is_set, "a summary is begun")
        for number in range(3, 6):
            await two.add_turn(turn(number))
        pending = (await shown(two))["pending"]
        must_be(pending, ["u0", "u1", "u2", "u3"], "the first summary is still being written")
        summarizer.release()
        await one.flush()
        await two.flush()
        expected = {"summary": ["u0", "u1", "u2", "u3"], "pending": [], "recent": ["u4", "u5"]}
        must_be(await shown(two), expected, "both pods have flushed, and every turn is in one place")

    @check("memory.pods")
    async def test_a_turn_id_added_by_two_pods_is_stored_once(self, bench: MemoryBench) -> None:
        """Each process remembers only the ids that it has added itself."""
        one, two = await _pods(bench, 2, zone=1)
        for number in (1, 2, 3):
            await asyncio.gather(*(pod.add_turn(turn(number), turn_id=f"id-{number}") for pod in (one, two)))
            await one.flush()
        await two.add_turn(turn(1), turn_id="id-1")
        await two.flush()
        expected = {"summary": ["u1", "u2"], "pending": [], "recent": ["u3"]}
        must_be(await shown(one), expected, "each turn id is stored once")

    @check("memory.pods")
    async def test_health_is_the_same_on_every_pod(self, bench: MemoryBench) -> None:
        """Each process counts failures for itself."""
        broken = LedgerSummarizer()
        broken.fail = 100
        one, two = await _pods(
            bench,
            2,
            zone=1,
            summarizers=[broken, broken],
            retry_attempts=1,
            degraded_retry_interval_s=60.0,
        )
        for number in range(3):
            await one.add_turn(turn(number))
        await until(lambda: one.health is MemoryHealth.DEGRADED, "the health of one pod is `degraded`")
        expected = {"summary": [], "pending": [], "recent": ["u2"]}
        must_be(await shown(two), expected, "another pod has found the memory degraded")
        must_be(two.health, MemoryHealth.DEGRADED, "another pod has found the memory degraded")

    @check("memory.lease")
    async def test_one_pod_summarizes_at_a_time(self, bench: MemoryBench) -> None:
        """Every pod that sees pending turns calls the model."""
        summarizer = LedgerSummarizer()
        summarizer.hold()
        pods = await _pods(bench, 3, summarizers=[summarizer] * 3)
        for number in range(6):
            await pods[number % 3].add_turn(turn(number))
            await shown(pods[(number + 1) % 3])
        await until(summarizer.called.is_set, "a summary is begun")
        await asyncio.sleep(0.3)
        must_be(summarizer.running, 1, "one pod has the lease, and the others wait")
        summarizer.release()
        await asyncio.gather(*(pod.flush() for pod in pods))
        must_be(summarizer.most_running, 1, "one pod summarizes at a time")

    @check("memory.lease")
    async def test_no_turn_is_dropped_under_a_summary_that_another_pod_is_writing(
        self, bench: MemoryBench
    ) -> None:
        """A backlog is trimmed without the lease, and the summary covers turns that no longer exist."""
        summarizer = LedgerSummarizer()
        summarizer.fail = 1
        one, two = await _pods(
            bench,
            2,
            zone=1,
            summarizers=[summarizer] * 2,
            retry_attempts=0,
            recovery_backlog_limit=2,
            degraded_retry_interval_s=0.3,
        )
        for number in range(2):
            await one.add_turn(turn(number))
        await until(lambda: one.health is MemoryHealth.DEGRADED, "the health of one pod is `degraded`")
        summarizer.hold()
        await two.add_turn(turn(2))
        await until(summarizer.called.is_set, "a pod tries again")
        for number in range(3, 9):
            await (one, two)[number % 2].add_turn(turn(number))
            await shown((one, two)[number % 2])
        await asyncio.sleep(0.3)
        summarizer.release()
        await until(lambda: _summarized(two), "the summary is stored")
        await asyncio.gather(one.flush(), two.flush())
        summarized = [f"u{number}" for number in range(8)]
        expected = {"summary": summarized, "pending": [], "recent": ["u8"]}
        must_be(await shown(one), expected, "the model was answering when these turns were added")

    @check("memory.waiting")
    async def test_flush_waits_for_the_attempt_that_another_pod_makes(self, bench: MemoryBench) -> None:
        """A flush returns because the memory is degraded, although the model is back and being called."""
        summarizer = LedgerSummarizer()
        summarizer.fail = 1
        one, two = await _pods(
            bench,
            2,
            zone=1,
            summarizers=[summarizer] * 2,
            retry_attempts=0,
            degraded_retry_interval_s=0.3,
        )
        for number in range(3):
            await one.add_turn(turn(number))
        await until(lambda: one.health is MemoryHealth.DEGRADED, "the health of one pod is `degraded`")
        summarizer.hold()
        await until(summarizer.called.is_set, "the pod tries again")
        flushing = asyncio.create_task(two.flush())
        await asyncio.wait({flushing}, timeout=0.2)
        must_be(flushing.done(), False, "the other pod's attempt is under way")
        summarizer.release()
        await flushing
        expected = {"summary": ["u0", "u1"], "pending": [], "recent": ["u2"]}
        must_be(await shown(two), expected, "the attempt has succeeded")

    @check("memory.health")
    async def test_all_pods_together_call_a_failing_summarizer_once_an_interval(
        self, bench: MemoryBench
    ) -> None:
        """A failure is not stored when it loses its race, and the next call follows at once."""
        calls: list[float] = []

        async def failing(request: object) -> Mapping[str, Any]:
            calls.append(asyncio.get_running_loop().time())
            await asyncio.sleep(0.05)
            raise RuntimeError("the summarizer was told to fail")

        pods = await _pods(
            bench,
            2,
            zone=1,
            summarizers=[failing] * 2,
            retry_attempts=0,
            recovery_backlog_limit=2,
            degraded_retry_interval_s=INTERVAL_S,
        )
        number, give_up_at = 0, asyncio.get_running_loop().time() + 10
        while len(calls) < 3:
            assert asyncio.get_running_loop().time() < give_up_at, "the summarizer must be called again"
            await pods[number % 2].add_turn(turn(number))
            await asyncio.sleep(0.01)
            number += 1
        gaps = [later - earlier for earlier, later in itertools.pairwise(calls)]
        assert min(gaps) >= INTERVAL_S, "the next call must wait for the interval after a stored failure"
        await pods[0].get_llm_context()
        unwell = MemoryHealth.DEGRADED, MemoryHealth.RECOVERING
        assert pods[0].health in unwell, "a failure must be stored, so that every pod knows about it"

    @check("memory.background")
    async def test_memory_objects_of_one_process_share_one_background(self, bench: MemoryBench) -> None:
        """Each memory object has its own task, which waits for the next attempt forever."""
        broken = LedgerSummarizer()
        broken.fail = 10_000
        (memory,) = await _pods(
            bench, 1, zone=1, summarizers=[broken], retry_attempts=0, degraded_retry_interval_s=60.0
        )
        for number in range(3):
            await memory.add_turn(turn(number))
        await until(lambda: memory.health is MemoryHealth.DEGRADED, "the health is `degraded`")
        await asyncio.sleep(0.1)
        before, objects = len(asyncio.all_tasks()), [bench.again(memory) for _ in range(40)]
        for one in objects:
            await one.get_llm_context()
        await asyncio.sleep(0.3)
        more = len(asyncio.all_tasks()) - before
        assert more <= 10, f"40 memory objects of a waiting conversation have left {more} tasks"

    @check("memory.lease", slow=True)
    async def test_another_pod_takes_over_from_one_killed_while_it_summarizes(
        self, bench: MemoryBench
    ) -> None:
        """A lease never expires, or pending turns are removed when a summary begins."""
        if bench.memories.kill is None:
            not_asked("needs `Memories.kill`")
        hanging = LedgerSummarizer()
        hanging.hold()
        one, two = await _pods(
            bench,
            2,
            summarizers=[hanging, LedgerSummarizer()],
            summarizer_timeout_s=LONGEST_SUMMARY_S,
        )
        for number in range(4):
            await one.add_turn(turn(number))
        await until(hanging.called.is_set, "a summary is begun")
        await bench.kill(one)
        expected = {"summary": [], "pending": ["u0", "u1"], "recent": ["u2", "u3"]}
        must_be(await shown(two), expected, "the summary was not finished, and nothing is lost")
        within = bench.memories.lease_s
        await until(lambda: _summarized(two), "another pod takes the lease and summarizes", within=within)
        expected = {"summary": ["u0", "u1"], "pending": [], "recent": ["u2", "u3"]}
        must_be(await shown(two), expected, "another pod has summarized")

    @check("memory.round-trips")
    async def test_adding_a_turn_and_reading_take_one_round_trip_each(self, bench: MemoryBench) -> None:
        """Turns are fetched one by one, or the state is read before it is written."""
        trips = bench.memories.round_trips
        if trips is None:
            not_asked("needs `Memories.round_trips`")
        (memory,) = await _pods(bench, 1, strategy="truncation", zone=200)
        # The first turn creates the record, which may start background work once.
        await memory.add_turn(turn("first"))
        start = -1
        while start != trips():
            start = trips()
            await asyncio.sleep(0.1)
        for number in range(100):
            await memory.add_turn(turn(number))
        must_be(trips() - start, 100, "adding a turn is one round trip, and 100 were added")
        for _ in range(10):
            await memory.get_llm_context()
        must_be(trips() - start, 110, "reading is one round trip, and was done ten times since")

    @check("memory.outage")
    async def test_an_outage_raises_and_never_shows_an_empty_memory(self, bench: MemoryBench) -> None:
        """A failed read is only logged, and the model sees an empty conversation."""
        if bench.memories.outage is None:
            not_asked("needs `Memories.outage`")
        (memory,) = await _pods(bench, 1, strategy="truncation")
        await memory.add_turn(turn(1))
        async with bench.memories.outage():
            with must_raise(StorageError, "the datastore cannot be reached"):
                await memory.get_llm_context()
            with must_raise(StorageError, "the datastore cannot be reached"):
                await memory.add_turn(turn(2))
        must_be((await shown(memory))["recent"], ["u1"], "the second turn was not added")
        await memory.add_turn(turn(3))
        must_be((await shown(memory))["recent"], ["u1", "u3"], "the outage is over")

    @check("memory.corruption")
    async def test_data_of_a_later_version_raises_and_is_never_overwritten(self, bench: MemoryBench) -> None:
        """Data that cannot be parsed is replaced by an empty state and saved."""
        damage, stored = bench.memories.damage, bench.memories.stored
        if damage is None or stored is None:
            not_asked("needs `Memories.damage` and `Memories.stored`")
        key = bench.key()
        memory = await bench.memory(config(zone=1), LedgerSummarizer(), key=key)
        await memory.add_turn(turn(1))
        await damage(key)
        before = await stored(key)
        with must_raise(Corrupt, "the stored data were written by a later version"):
            await memory.get_llm_context()
        other = await bench.memory(config(zone=1), LedgerSummarizer(), key=key)
        with must_raise(StmError, "unreadable data cannot be summarized"):
            await other.flush(timeout=0.2)
        must_be(await stored(key), before, "unreadable data are left as they are")


async def _summarized(memory: Memory) -> bool:
    return bool((await shown(memory))["summary"])


async def _pods(
    bench: MemoryBench,
    count: int,
    *,
    strategy: str = "rolling_summary",
    zone: int = 2,
    summarizers: Sequence[Any] | None = None,
    **settings: object,
) -> list[Memory]:
    """Return `count` memories of one new conversation, as if each were in its own process."""
    key = bench.key()
    return [
        await bench.memory(
            config(strategy, zone=zone, **settings),
            summarizers[number] if summarizers else LedgerSummarizer(),
            key=key,
        )
        for number in range(count)
    ]
