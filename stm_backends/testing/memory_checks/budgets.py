"""Checks of the model's view, measured in tokens."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable
from typing import Any

import pytest

from stm_backends.errors import MemoryBudgetExceeded
from stm_backends.testing.workbench.check import Contract, check
from stm_backends.testing.workbench.expectations import must_be, must_raise
from stm_backends.testing.workbench.memories import MemoryBench, config, shown, turn
from stm_backends.testing.workbench.summarizers import LedgerSummarizer
from stm_backends.types import ConversationTurn, MemoryHealth


class Budgets(Contract):
    """Checks of the model's view, measured in tokens."""

    @pytest.mark.parametrize("policy", ["truncate_oldest", "truncate_summary", "error"])
    @pytest.mark.parametrize("total", [1, 5, 6, 7, 20, 40, 60, 200])
    @check("memory.budget", slow={"total": (1, 5, 6, 20, 40, 200)})
    async def test_what_the_model_sees_is_within_the_budget(
        self, bench: MemoryBench, policy: str, total: int
    ) -> None:
        summarizer = LedgerSummarizer()
        memory = await bench.memory(
            config(zone=3, total_max_tokens=total, summary_max_tokens=min(20, total), overflow_policy=policy),
            summarizer,
        )
        for number in range(8):
            try:
                await memory.add_turn(turn(number, "a fairly long answer " * 3))
            except MemoryBudgetExceeded:
                must_be(policy, "error", "no other policy refuses a turn")
            view = await memory.get_llm_context()
            if view:
                text = json.dumps(view["conversation_memory"], ensure_ascii=False, sort_keys=True)
                assert len(text) // 4 + 1 <= total, "the view must be within `total_max_tokens`"
                assert memory.estimate_tokens() <= total, "the estimate must be within `total_max_tokens`"
        await memory.flush()

    @pytest.mark.parametrize("policy", ["truncate_oldest", "truncate_summary"])
    @pytest.mark.parametrize("strategy", ["truncation", "rolling_summary"])
    @check("memory.budget", slow={"strategy": ("truncation",)})
    async def test_a_turn_larger_than_the_budget_is_shown_in_part(
        self, bench: MemoryBench, policy: str, strategy: str
    ) -> None:
        memory = await bench.memory(
            config(strategy, zone=3, total_max_tokens=100, summary_max_tokens=10, overflow_policy=policy),
            LedgerSummarizer(),
        )
        await memory.add_turn(turn(1))
        await memory.add_turn(turn(2, "begin " + "x" * 5000 + " end"))
        view = (await memory.get_llm_context())["conversation_memory"]
        users = [item["user"] for item in view["recent_turns"]]
        must_be(users, ["u2"], "the newest turn comes first, and is not dropped for its size")
        answer = view["recent_turns"][0]["assistant"]
        must_be((answer[:6], answer[-4:]), ("begin ", " end"), "it is cut in the middle")
        assert "characters omitted" in answer, "the view must say that text is missing"
        text = json.dumps(view, ensure_ascii=False, sort_keys=True)
        assert len(text) // 4 + 1 <= 100, "the view must be within `total_max_tokens`"
        assert memory.estimate_tokens() <= 100, "the estimate must be within `total_max_tokens`"
        await memory.add_turn(turn(3))
        users = [
            item["user"] for item in (await memory.get_llm_context())["conversation_memory"]["recent_turns"]
        ]
        must_be(users, ["u2", "u3"], "newer turns are shown whole, and the large one gets the rest")

    @check("memory.budget")
    async def test_a_summary_as_large_as_the_budget_does_not_hide_the_turns(self, bench: MemoryBench) -> None:
        summarizer = LedgerSummarizer()
        summarizer.answers = [{"summary": "S" * 1000}]
        memory = await bench.memory(config(zone=2, total_max_tokens=50, summary_max_tokens=50), summarizer)
        for number in range(3):
            await memory.add_turn(turn(number))
        await memory.flush()
        must_be(
            (await shown(memory))["recent"],
            ["u1", "u2"],
            "there is no room for the summary next to the turns",
        )

    @check("memory.budget")
    async def test_a_budget_of_zero_is_unlimited(self, bench: MemoryBench) -> None:
        memory = await bench.memory(config("truncation", zone=50, total_max_tokens=0))
        for number in range(50):
            await memory.add_turn(turn(number, "x" * 5000))
        must_be(len((await shown(memory))["recent"]), 50, "`total_max_tokens=0` sets no limit")

    @check("memory.budget")
    async def test_the_budget_does_not_change_what_is_stored(self, bench: MemoryBench) -> None:
        memory = await bench.memory(
            config(zone=4, total_max_tokens=40, summary_max_tokens=10), LedgerSummarizer()
        )
        for number in range(4):
            await memory.add_turn(turn(number, "x" * 60))
        assert len((await shown(memory))["recent"]) < 4, "four turns must not be within this budget"
        must_be(len(await memory.turns()), 4, "the budget limits the view, not the stored turns")

    @check("memory.budget")
    async def test_the_policy_error_refuses_a_turn_before_anything_is_stored(
        self, bench: MemoryBench
    ) -> None:
        seen: list[Any] = []

        async def note(added: ConversationTurn) -> None:
            seen.append(added)

        memory = await bench.memory(
            config(
                "truncation",
                zone=5,
                total_max_tokens=30,
                summary_max_tokens=1,
                overflow_policy="error",
                on_turn_added=note,
            )
        )
        await memory.add_turn(turn(1))
        with must_raise(MemoryBudgetExceeded, "the turn does not fit, and the policy is `error`"):
            await memory.add_turn(turn(2, "x" * 500))
        await asyncio.sleep(0.01)
        must_be((await shown(memory))["recent"], ["u1"], "the second turn was refused")
        must_be([item.user_message for item in seen], ["u1"], "a refused turn is not reported as added")
        must_be([item.user_message for item in await memory.turns()], ["u1"], "a refused turn is not stored")

    @check("memory.budget")
    async def test_no_summary_tokens_means_no_summary(self, bench: MemoryBench) -> None:
        memory = await bench.memory(config(summary_max_tokens=0), LedgerSummarizer())
        for number in range(5):
            await memory.add_turn(turn(number))
        await memory.flush()
        view = await memory.get_llm_context()
        assert "summary" not in view["conversation_memory"], "`summary_max_tokens=0` must show no summary"
        recent = [item["user"] for item in view["conversation_memory"]["recent_turns"]]
        must_be(recent, ["u3", "u4"], "the full zone is two turns")

    @check("memory.budget")
    async def test_the_estimate_measures_what_is_shown(self, bench: MemoryBench) -> None:
        memory = await bench.memory(config("truncation", token_estimator=len))
        await memory.add_turn(turn(1))
        view = (await memory.get_llm_context())["conversation_memory"]
        size = len(json.dumps(view, ensure_ascii=False, sort_keys=True))
        must_be(memory.estimate_tokens(), size, "the estimator is `len`, and this is the view")

    @pytest.mark.parametrize("failure", ["raises", "nothing", "nan", "coroutine"])
    @check("memory.budget", slow={"failure": ("nan", "coroutine")})
    async def test_an_estimator_that_fails_for_a_text_disables_nothing(
        self, bench: MemoryBench, failure: str
    ) -> None:
        """Like tiktoken for the text of a special token."""
        bench.needs("failing_estimator")

        async def coroutine(text: str) -> int:
            return len(text)

        def raises(text: str) -> Any:
            raise ValueError("not this text")

        answers: dict[str, Callable[[str], Any]] = {
            "raises": raises,
            "nothing": lambda text: None,
            "nan": lambda text: math.nan,
            "coroutine": coroutine,
        }

        def estimate(text: str) -> Any:
            return answers[failure](text) if "u1" in text else len(text) // 4

        memory = await bench.memory(config(zone=1, token_estimator=estimate), LedgerSummarizer())
        for number in range(3):
            await memory.add_turn(turn(number))
        await memory.flush()
        expected = {"summary": ["u0", "u1"], "pending": [], "recent": ["u2"]}
        must_be(await shown(memory), expected, "the text is counted in another way, and nothing is lost")
        must_be(memory.health, MemoryHealth.HEALTHY, "the summarizer has not failed")
