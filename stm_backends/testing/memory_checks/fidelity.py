"""Checks that a turn is stored once and unchanged."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from stm_backends.errors import InvalidState
from stm_backends.testing.workbench.check import Contract, check
from stm_backends.testing.workbench.expectations import must_be, must_raise
from stm_backends.testing.workbench.memories import MemoryBench, config, shown, turn
from stm_backends.testing.workbench.summarizers import LedgerSummarizer
from stm_backends.types import ConversationTurn, MemoryBudget, TrajectoryDigest


class Fidelity(Contract):
    """Checks that a turn is stored once and unchanged."""

    @pytest.mark.parametrize("text", ["", "a\0b", "\ud800", "\ud83d\ude00", "\U0001f600", "日本" * 500])
    @check("memory.fidelity", slow={"text": ("", "\U0001f600", "日本" * 500)})
    async def test_text_comes_back_unchanged(self, bench: MemoryBench, text: str) -> None:
        memory = await bench.memory(config("truncation"))
        await memory.add_turn(ConversationTurn(f"q{text}", text))
        (stored,) = await memory.turns()
        must_be((stored.user_message, stored.assistant_response), (f"q{text}", text), "this was given")

    @check("memory.fidelity")
    async def test_a_turn_comes_back_with_every_field(self, bench: MemoryBench) -> None:
        memory = await bench.memory(config("truncation"))
        whole = ConversationTurn(
            "u",
            "a",
            TrajectoryDigest(["t"], "o", None, ["r"]),
            {"big": 2**80, "deep": [{"x": None}], "inf": float("inf")},
            ["h"],
            12.5,
        )
        await memory.add_turn(whole)
        must_be(await memory.turns(), [whole], "this was given, with every field")

    @check("memory.fidelity")
    async def test_a_turn_that_is_not_json_is_refused_whole(self, bench: MemoryBench) -> None:
        seen: list[Any] = []

        async def note(added: ConversationTurn) -> None:
            seen.append(added)

        memory = await bench.memory(config("truncation", on_turn_added=note))
        for what, value in {"an object": object(), "a key that is a number": {1: 2}}.items():
            with must_raise(InvalidState, f"JSON cannot represent {what}") as caught:
                await memory.add_turn(ConversationTurn("u", "a", artifacts_shown={"x": value}))
            assert "artifacts_shown" in str(caught.value), "the error must name the field"
        await asyncio.sleep(0)
        must_be(await memory.turns(), [], "no part of a refused turn is stored")
        must_be(seen, [], "a refused turn is not reported as added")

    @check("memory.fidelity")
    async def test_a_changed_turn_object_does_not_change_what_is_stored(self, bench: MemoryBench) -> None:
        memory = await bench.memory(config("truncation"))
        mine = turn(1)
        await memory.add_turn(mine)
        mine.user_message = "something else"
        must_be((await shown(memory))["recent"], ["u1"], "the turn was changed only after it was added")

    @check("memory.identity")
    async def test_adding_the_same_turn_id_again_changes_nothing(self, bench: MemoryBench) -> None:
        memory = await bench.memory(config("rolling_summary"), LedgerSummarizer())
        for number in (1, 1, 2, 1, 3, 4, 2, 5, 1, 3):
            await memory.add_turn(turn(number), turn_id=f"id-{number}")
            await memory.flush()
        await memory.flush()
        expected = {"summary": ["u1", "u2", "u3"], "pending": [], "recent": ["u4", "u5"]}
        must_be(await shown(memory), expected, "each turn id is stored once, where it was added first")

    @check("memory.fidelity")
    async def test_other_turn_and_config_classes_work(self, bench: MemoryBench) -> None:
        bench.needs("their_classes")

        class OtherTurn:
            user_message = "u1"
            assistant_response = "hi"
            trajectory_digest = None

        class OtherConfig:
            strategy = "truncation"
            budget = MemoryBudget(full_zone_turns=1)

        memory = await bench.memory(OtherConfig())
        await memory.add_turn(OtherTurn())  # pyright: ignore[reportArgumentType] -- this is the point
        must_be((await shown(memory))["recent"], ["u1"], "an object with a turn's fields is a turn")
