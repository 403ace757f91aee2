"""Checks of the turns that each strategy shows and keeps."""

from __future__ import annotations

from stm_backends.testing.workbench.check import Contract, check
from stm_backends.testing.workbench.expectations import must_be
from stm_backends.testing.workbench.memories import MemoryBench, config, shown, turn, until
from stm_backends.types import ConversationTurn, TrajectoryDigest


class Strategies(Contract):
    """Checks of the turns that each strategy shows and keeps."""

    @check("memory.strategies")
    async def test_none_stores_nothing_and_shows_nothing(self, bench: MemoryBench) -> None:
        memory = await bench.memory(config("none"))
        await memory.add_turn(turn(1))
        must_be(await memory.get_llm_context(), {}, "`none` shows nothing")
        must_be(await memory.turns(), [], "`none` stores nothing")

    @check("memory.strategies")
    async def test_truncation_shows_the_last_turns_in_order(self, bench: MemoryBench) -> None:
        memory = await bench.memory(config("truncation", zone=3))
        for number in range(10):
            await memory.add_turn(turn(number))
        expected = {"summary": [], "pending": [], "recent": ["u7", "u8", "u9"]}
        must_be(await shown(memory), expected, "the full zone is three turns")

    @check("memory.strategies")
    async def test_truncation_keeps_a_bounded_number_of_turns(self, bench: MemoryBench) -> None:
        memory = await bench.memory(config("truncation", zone=3))
        for number in range(30):
            await memory.add_turn(turn(number))

        async def trimmed() -> bool:
            return len(await memory.turns()) <= 6

        await until(trimmed, "no more than twice the full zone is kept")
        kept = [item.user_message for item in (await memory.turns())[-3:]]
        must_be(kept, ["u27", "u28", "u29"], "the last turns are kept")

    @check("memory.strategies")
    async def test_a_zone_of_no_turns_shows_none(self, bench: MemoryBench) -> None:
        memory = await bench.memory(config("truncation", zone=0))
        await memory.add_turn(turn(1))
        view = await memory.get_llm_context()
        must_be(view, {"conversation_memory": {"recent_turns": []}}, "the full zone is no turns")

    @check("memory.strategies")
    async def test_the_patch_has_the_specified_shape(self, bench: MemoryBench) -> None:
        memory = await bench.memory(config("truncation"))
        digest = TrajectoryDigest(["search"], "- search: 3 hits", "looked it up", ["a1"])
        await memory.add_turn(ConversationTurn("hello", "hi", digest, {"shown": 1}, ["hidden"], 5.0))
        view = {
            "conversation_memory": {
                "recent_turns": [
                    {
                        "user": "hello",
                        "assistant": "hi",
                        "trajectory_digest": {
                            "tools_invoked": ["search"],
                            "observations_summary": "- search: 3 hits",
                            "reasoning_summary": "looked it up",
                            "artifacts_refs": ["a1"],
                        },
                        "artifacts_shown": {"shown": 1},
                    }
                ]
            }
        }
        must_be(await memory.get_llm_context(), view, "this is the shape that agents are promised")

    @check("memory.strategies")
    async def test_digests_are_left_out_on_demand(self, bench: MemoryBench) -> None:
        memory = await bench.memory(config("truncation", include_trajectory_digest=False))
        await memory.add_turn(ConversationTurn("hello", "hi", TrajectoryDigest(["search"], "x")))
        view = {"conversation_memory": {"recent_turns": [{"user": "hello", "assistant": "hi"}]}}
        must_be(await memory.get_llm_context(), view, "`include_trajectory_digest` is False")
