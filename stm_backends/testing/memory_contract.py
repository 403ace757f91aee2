"""What every short-term memory does, in process or distributed: the shared contract of both."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

import pytest

from stm_backends.errors import InvalidState, MemoryBudgetExceeded
from stm_backends.testing.summarizers import LedgerSummarizer, covered
from stm_backends.types import (
    ConversationTurn,
    MemoryBudget,
    MemoryHealth,
    ShortTermMemoryConfig,
    TrajectoryDigest,
)


class Memory(Protocol):
    """What the contract calls."""

    @property
    def health(self) -> MemoryHealth: ...
    async def add_turn(self, turn: ConversationTurn, *, turn_id: str | None = None) -> None: ...
    async def get_llm_context(self) -> Mapping[str, Any]: ...
    async def turns(self) -> list[ConversationTurn]: ...
    def estimate_tokens(self) -> int: ...
    async def flush(self, timeout: float | None = None) -> None: ...


MakeMemory = Callable[..., Awaitable[Memory]]


def turn(number: int | str, text: str = "fine") -> ConversationTurn:
    """Return a turn whose user message is `u<number>`."""
    return ConversationTurn(f"u{number}", text, ts=1.0)


def config(strategy: Any = "rolling_summary", zone: int = 2, **settings: Any) -> ShortTermMemoryConfig:
    """Return a configuration with short waits; budget settings may be given by name."""
    budget = {
        name: settings.pop(name)
        for name in ("summary_max_tokens", "total_max_tokens", "overflow_policy")
        if name in settings
    }
    settings = {"retry_backoff_base_s": 0.0, "degraded_retry_interval_s": 0.0, **settings}
    return ShortTermMemoryConfig(
        strategy=strategy, budget=MemoryBudget(full_zone_turns=zone, **budget), **settings
    )


async def shown(memory: Memory) -> dict[str, Any]:
    """Return what the model sees: `summary`, and the user messages of `pending` and `recent`."""
    view = (await memory.get_llm_context()).get("conversation_memory", {})
    return {
        "summary": covered(view.get("summary", "")),
        "pending": [item["user"] for item in view.get("pending_turns", [])],
        "recent": [item["user"] for item in view.get("recent_turns", [])],
    }


async def until(condition: Callable[[], bool | Awaitable[bool]], *, within: float = 5.0) -> None:
    """Wait until a condition holds; fail if it does not in time."""
    async with asyncio.timeout(within):
        while True:
            held = condition()
            if held is True or (not isinstance(held, bool) and await held):
                return
            await asyncio.sleep(0.005)


class MemoryContract:
    """Subclass this and supply the fixture `make_memory`: `await make_memory(config, summarizer)`.

    Each call makes a memory of a conversation that nobody has used.
    """

    @pytest.fixture
    def make_memory(self) -> MakeMemory:
        raise LookupError("a subclass supplies the fixture make_memory")

    # Strategies

    async def test_none_stores_nothing_and_shows_nothing(self, make_memory: MakeMemory) -> None:
        memory = await make_memory(config("none"))
        await memory.add_turn(turn(1))
        assert await memory.get_llm_context() == {}
        assert await memory.turns() == []

    async def test_truncation_shows_the_last_turns_in_order(self, make_memory: MakeMemory) -> None:
        memory = await make_memory(config("truncation", zone=3))
        for number in range(10):
            await memory.add_turn(turn(number))
        assert await shown(memory) == {"summary": [], "pending": [], "recent": ["u7", "u8", "u9"]}

    async def test_truncation_keeps_a_bounded_number_of_turns(self, make_memory: MakeMemory) -> None:
        memory = await make_memory(config("truncation", zone=3))
        for number in range(30):
            await memory.add_turn(turn(number))

        async def trimmed() -> bool:
            return len(await memory.turns()) <= 6

        await until(trimmed)
        assert [item.user_message for item in (await memory.turns())[-3:]] == ["u27", "u28", "u29"]

    async def test_a_zone_of_no_turns_shows_none(self, make_memory: MakeMemory) -> None:
        memory = await make_memory(config("truncation", zone=0))
        await memory.add_turn(turn(1))
        assert await memory.get_llm_context() == {"conversation_memory": {"recent_turns": []}}

    async def test_the_patch_has_the_specified_shape(self, make_memory: MakeMemory) -> None:
        memory = await make_memory(config("truncation"))
        digest = TrajectoryDigest(["search"], "- search: 3 hits", "looked it up", ["a1"])
        await memory.add_turn(ConversationTurn("hello", "hi", digest, {"shown": 1}, ["hidden"], 5.0))
        assert await memory.get_llm_context() == {
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
                    }
                ]
            }
        }

    async def test_digests_are_left_out_on_demand(self, make_memory: MakeMemory) -> None:
        memory = await make_memory(config("truncation", include_trajectory_digest=False))
        await memory.add_turn(ConversationTurn("hello", "hi", TrajectoryDigest(["search"], "x")))
        assert await memory.get_llm_context() == {
            "conversation_memory": {"recent_turns": [{"user": "hello", "assistant": "hi"}]}
        }

    # Text

    @pytest.mark.parametrize("text", ["", "a\0b", "\ud800", "\ud83d\ude00", "\U0001f600", "日本" * 500])
    async def test_text_is_carried_character_by_character(self, make_memory: MakeMemory, text: str) -> None:
        memory = await make_memory(config("truncation"))
        await memory.add_turn(ConversationTurn(f"q{text}", text))
        (stored,) = await memory.turns()
        assert (stored.user_message, stored.assistant_response) == (f"q{text}", text)

    async def test_a_turn_comes_back_with_every_field(self, make_memory: MakeMemory) -> None:
        memory = await make_memory(config("truncation"))
        whole = ConversationTurn(
            "u",
            "a",
            TrajectoryDigest(["t"], "o", None, ["r"]),
            {"big": 2**80, "deep": [{"x": None}], "inf": float("inf")},
            ["h"],
            12.5,
        )
        await memory.add_turn(whole)
        assert await memory.turns() == [whole]

    async def test_a_turn_that_is_not_json_is_refused_whole(self, make_memory: MakeMemory) -> None:
        seen: list[Any] = []

        async def note(added: ConversationTurn) -> None:
            seen.append(added)

        memory = await make_memory(config("truncation", on_turn_added=note))
        with pytest.raises(InvalidState, match="artifacts_shown"):
            await memory.add_turn(ConversationTurn("u", "a", artifacts_shown={"x": object()}))
        with pytest.raises(InvalidState, match="artifacts_shown"):
            await memory.add_turn(ConversationTurn("u", "a", artifacts_shown={"x": {1: 2}}))
        await asyncio.sleep(0)
        assert await memory.turns() == []
        assert seen == []

    async def test_a_changed_turn_object_does_not_change_what_is_stored(
        self, make_memory: MakeMemory
    ) -> None:
        memory = await make_memory(config("truncation"))
        mine = turn(1)
        await memory.add_turn(mine)
        mine.user_message = "something else"
        assert (await shown(memory))["recent"] == ["u1"]

    async def test_adding_the_same_turn_id_again_changes_nothing(self, make_memory: MakeMemory) -> None:
        memory = await make_memory(config("rolling_summary"), LedgerSummarizer())
        for number in (1, 1, 2, 1, 3, 4, 2, 5, 1, 3):
            await memory.add_turn(turn(number), turn_id=f"id-{number}")
            await memory.flush()
        await memory.flush()
        assert await shown(memory) == {"summary": ["u1", "u2", "u3"], "pending": [], "recent": ["u4", "u5"]}

    # Rolling summary

    async def test_turns_that_leave_the_full_zone_are_summarized(self, make_memory: MakeMemory) -> None:
        summarizer = LedgerSummarizer()
        memory = await make_memory(config(), summarizer)
        for number in range(6):
            await memory.add_turn(turn(number))
        await memory.flush()
        assert await shown(memory) == {
            "summary": ["u0", "u1", "u2", "u3"],
            "pending": [],
            "recent": ["u4", "u5"],
        }
        assert memory.health is MemoryHealth.HEALTHY

    async def test_nothing_is_forgotten_while_a_summary_is_being_written(
        self, make_memory: MakeMemory
    ) -> None:
        summarizer = LedgerSummarizer()
        summarizer.hold()
        memory = await make_memory(config(), summarizer)
        for number in range(5):
            await memory.add_turn(turn(number))
        await asyncio.wait_for(summarizer.called.wait(), 5)
        assert await shown(memory) == {
            "summary": [],
            "pending": ["u0", "u1", "u2"],
            "recent": ["u3", "u4"],
        }
        summarizer.release()
        await memory.flush()

    async def test_turns_added_during_a_summary_survive_the_fold(self, make_memory: MakeMemory) -> None:
        summarizer = LedgerSummarizer()
        summarizer.hold()
        memory = await make_memory(config(), summarizer)
        for number in range(3):
            await memory.add_turn(turn(number))
        await asyncio.wait_for(summarizer.called.wait(), 5)
        for number in range(3, 8):
            await memory.add_turn(turn(number))
        summarizer.release()
        await memory.flush()
        assert await shown(memory) == {
            "summary": [f"u{number}" for number in range(6)],
            "pending": [],
            "recent": ["u6", "u7"],
        }
        asked = [item["user"] for request in summarizer.requests for item in request["turns"]]
        assert asked == [f"u{number}" for number in range(6)]

    async def test_adding_never_waits_for_a_summary(self, make_memory: MakeMemory) -> None:
        summarizer = LedgerSummarizer()
        summarizer.hold()
        memory = await make_memory(config(), summarizer)
        async with asyncio.timeout(5):
            for number in range(20):
                await memory.add_turn(turn(number))
        assert summarizer.most_running <= 1
        summarizer.release()
        await memory.flush()

    async def test_a_fold_waits_for_its_batch_and_flush_does_not(self, make_memory: MakeMemory) -> None:
        summarizer = LedgerSummarizer()
        memory = await make_memory(config(fold_batch_turns=3), summarizer)
        for number in range(4):
            await memory.add_turn(turn(number))
        await asyncio.sleep(0.05)
        assert summarizer.requests == []
        assert (await shown(memory))["pending"] == ["u0", "u1"]
        await memory.flush()
        assert (await shown(memory))["summary"] == ["u0", "u1"]

    async def test_the_summarizer_gets_the_previous_summary_and_the_turns(
        self, make_memory: MakeMemory
    ) -> None:
        summarizer = LedgerSummarizer()
        memory = await make_memory(config(zone=1), summarizer)
        for number in range(3):
            await memory.add_turn(turn(number))
            await memory.flush()
        assert [set(request) for request in summarizer.requests] == [{"previous_summary", "turns"}] * 2
        first, second = summarizer.requests
        assert (first["previous_summary"], first["turns"]) == ("", [{"user": "u0", "assistant": "fine"}])
        assert covered(second["previous_summary"]) == ["u0"]

    async def test_a_summary_over_its_budget_is_cut_and_keeps_its_closing_tag(
        self, make_memory: MakeMemory
    ) -> None:
        summarizer = LedgerSummarizer()
        summarizer.answers = [{"summary": f"<session_summary>{'word ' * 2000}</session_summary>"}]
        memory = await make_memory(config(summary_max_tokens=50, overflow_policy="error"), summarizer)
        for number in range(3):
            await memory.add_turn(turn(number))
        await memory.flush()
        summary = (await memory.get_llm_context())["conversation_memory"]["summary"]
        assert len(summary) // 4 + 1 <= 50
        assert summary.endswith("</session_summary>")
        assert len(summary) > 150

    @pytest.mark.parametrize(
        "nonsense",
        [
            None,
            "text",
            7,
            {},
            {"summary": None},
            {"summary": ["x"]},
            {"summary": "  "},
            {"summary": "<session_summary></session_summary>"},
        ],
    )
    async def test_a_summarizer_that_answers_nonsense_erases_nothing(
        self, make_memory: MakeMemory, nonsense: object
    ) -> None:
        summarizer = LedgerSummarizer()
        memory = await make_memory(config(zone=1), summarizer)
        for number in range(2):
            await memory.add_turn(turn(number))
        await memory.flush()
        summarizer.answers = [nonsense]
        await memory.add_turn(turn(2))
        await memory.flush()
        assert await shown(memory) == {"summary": ["u0", "u1"], "pending": [], "recent": ["u2"]}
        assert len(summarizer.requests) == 3

    async def test_a_summarizer_that_hangs_is_timed_out(self, make_memory: MakeMemory) -> None:
        summarizer = LedgerSummarizer()
        summarizer.hold()
        memory = await make_memory(config(summarizer_timeout_s=0.05, retry_attempts=50), summarizer)
        for number in range(3):
            await memory.add_turn(turn(number))
        await until(lambda: memory.health is MemoryHealth.RETRY)
        summarizer.release()
        await memory.flush()
        assert (await shown(memory))["summary"] == ["u0"]

    # Health

    async def test_failures_are_retried_without_a_new_turn(self, make_memory: MakeMemory) -> None:
        summarizer = LedgerSummarizer()
        summarizer.fail = 2
        memory = await make_memory(config(), summarizer)
        for number in range(3):
            await memory.add_turn(turn(number))
        await until(lambda: len(summarizer.requests) == 3)
        await until(lambda: memory.health is MemoryHealth.HEALTHY)
        assert (await shown(memory))["summary"] == ["u0"]

    async def test_while_retrying_the_old_summary_and_pending_turns_are_shown(
        self, make_memory: MakeMemory
    ) -> None:
        summarizer = LedgerSummarizer()
        memory = await make_memory(config(zone=1, retry_backoff_base_s=30.0), summarizer)
        for number in range(2):
            await memory.add_turn(turn(number))
        await memory.flush()
        summarizer.fail = 1
        await memory.add_turn(turn(2))
        await until(lambda: memory.health is MemoryHealth.RETRY)
        assert await shown(memory) == {"summary": ["u0"], "pending": ["u1"], "recent": ["u2"]}

    async def test_when_retries_are_used_up_only_recent_turns_are_shown(
        self, make_memory: MakeMemory
    ) -> None:
        summarizer = LedgerSummarizer()
        memory = await make_memory(
            config(zone=1, retry_attempts=1, degraded_retry_interval_s=60.0), summarizer
        )
        for number in range(2):
            await memory.add_turn(turn(number))
        await memory.flush()
        summarizer.fail = 100
        await memory.add_turn(turn(2))
        await until(lambda: memory.health is MemoryHealth.DEGRADED)
        assert await shown(memory) == {"summary": [], "pending": [], "recent": ["u2"]}
        assert len(summarizer.requests) == 3
        async with asyncio.timeout(2):
            await memory.flush()

    async def test_degraded_recovers_by_itself_with_the_backlog_in_one_batch(
        self, make_memory: MakeMemory
    ) -> None:
        summarizer = LedgerSummarizer()
        summarizer.fail = 2
        memory = await make_memory(
            config(zone=1, retry_attempts=0, degraded_retry_interval_s=0.3), summarizer
        )
        for number in range(4):
            await memory.add_turn(turn(number))
        await until(lambda: memory.health is MemoryHealth.DEGRADED)
        await until(lambda: memory.health is MemoryHealth.HEALTHY)
        assert await shown(memory) == {"summary": ["u0", "u1", "u2"], "pending": [], "recent": ["u3"]}
        assert [item["user"] for item in summarizer.requests[-1]["turns"]] == ["u0", "u1", "u2"]

    async def test_an_interval_of_zero_does_not_spin(self, make_memory: MakeMemory) -> None:
        summarizer = LedgerSummarizer()
        summarizer.fail = 10_000
        memory = await make_memory(config(retry_attempts=0), summarizer)
        for number in range(3):
            await memory.add_turn(turn(number))
        await until(lambda: memory.health is MemoryHealth.DEGRADED)
        before = len(summarizer.requests)
        await asyncio.sleep(0.5)
        assert len(summarizer.requests) - before <= 11

    async def test_the_backlog_is_bounded_and_its_oldest_turns_go(self, make_memory: MakeMemory) -> None:
        summarizer = LedgerSummarizer()
        summarizer.fail = 1
        memory = await make_memory(
            config(zone=1, retry_attempts=0, recovery_backlog_limit=2, degraded_retry_interval_s=0.5),
            summarizer,
        )
        for number in range(2):
            await memory.add_turn(turn(number))
        await until(lambda: memory.health is MemoryHealth.DEGRADED)
        for number in range(2, 6):
            await memory.add_turn(turn(number))

        async def bounded() -> bool:
            return len(await memory.turns()) <= 3

        await until(bounded)
        await until(lambda: memory.health is MemoryHealth.HEALTHY)
        assert await shown(memory) == {"summary": ["u3", "u4"], "pending": [], "recent": ["u5"]}

    async def test_without_a_backlog_a_degraded_memory_still_recovers(self, make_memory: MakeMemory) -> None:
        summarizer = LedgerSummarizer()
        summarizer.fail = 1
        memory = await make_memory(
            config(zone=1, retry_attempts=0, recovery_backlog_limit=0, degraded_retry_interval_s=0.2),
            summarizer,
        )
        for number in range(4):
            await memory.add_turn(turn(number))
        await until(lambda: memory.health is MemoryHealth.DEGRADED)
        await until(lambda: memory.health is MemoryHealth.HEALTHY)
        assert (await shown(memory))["recent"] == ["u3"]

    async def test_health_changes_are_reported_in_order(self, make_memory: MakeMemory) -> None:
        changes: list[tuple[str, str]] = []

        async def note(old: MemoryHealth, new: MemoryHealth) -> None:
            changes.append((old.value, new.value))

        summarizer = LedgerSummarizer()
        summarizer.fail = 3
        memory = await make_memory(
            config(retry_attempts=1, degraded_retry_interval_s=0.05, on_health_changed=note), summarizer
        )
        for number in range(3):
            await memory.add_turn(turn(number))
        await until(lambda: len(changes) >= 6)
        assert changes == [
            ("healthy", "retry"),
            ("retry", "degraded"),
            ("degraded", "recovering"),
            ("recovering", "degraded"),
            ("degraded", "recovering"),
            ("recovering", "healthy"),
        ]

    # Budgets

    @pytest.mark.parametrize("policy", ["truncate_oldest", "truncate_summary", "error"])
    @pytest.mark.parametrize("total", [1, 5, 6, 7, 20, 40, 60, 200])
    async def test_what_the_model_sees_is_within_the_budget(
        self, make_memory: MakeMemory, policy: str, total: int
    ) -> None:
        summarizer = LedgerSummarizer()
        memory = await make_memory(
            config(zone=3, total_max_tokens=total, summary_max_tokens=min(20, total), overflow_policy=policy),
            summarizer,
        )
        for number in range(8):
            try:
                await memory.add_turn(turn(number, "a fairly long answer " * 3))
            except MemoryBudgetExceeded:
                assert policy == "error"
            view = await memory.get_llm_context()
            if view:
                text = json.dumps(view["conversation_memory"], ensure_ascii=False, sort_keys=True)
                assert len(text) // 4 + 1 <= total
                assert memory.estimate_tokens() <= max(total, 1)
        await memory.flush()

    async def test_a_budget_of_zero_is_unlimited(self, make_memory: MakeMemory) -> None:
        memory = await make_memory(config("truncation", zone=50, total_max_tokens=0))
        for number in range(50):
            await memory.add_turn(turn(number, "x" * 5000))
        assert len((await shown(memory))["recent"]) == 50

    async def test_the_budget_leaves_the_store_alone(self, make_memory: MakeMemory) -> None:
        memory = await make_memory(
            config(zone=4, total_max_tokens=40, summary_max_tokens=10), LedgerSummarizer()
        )
        for number in range(4):
            await memory.add_turn(turn(number, "x" * 60))
        assert len((await shown(memory))["recent"]) < 4
        assert len(await memory.turns()) == 4

    async def test_error_refuses_a_turn_before_anything_is_stored(self, make_memory: MakeMemory) -> None:
        seen: list[Any] = []

        async def note(added: ConversationTurn) -> None:
            seen.append(added)

        memory = await make_memory(
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
        with pytest.raises(MemoryBudgetExceeded):
            await memory.add_turn(turn(2, "x" * 500))
        await asyncio.sleep(0.01)
        assert (await shown(memory))["recent"] == ["u1"]
        assert [item.user_message for item in seen] == ["u1"]
        assert [item.user_message for item in await memory.turns()] == ["u1"]

    async def test_no_summary_tokens_means_no_summary(self, make_memory: MakeMemory) -> None:
        memory = await make_memory(config(summary_max_tokens=0), LedgerSummarizer())
        for number in range(5):
            await memory.add_turn(turn(number))
        await memory.flush()
        view = await memory.get_llm_context()
        assert "summary" not in view["conversation_memory"]
        assert [item["user"] for item in view["conversation_memory"]["recent_turns"]] == ["u3", "u4"]

    async def test_the_estimate_is_of_what_is_shown(self, make_memory: MakeMemory) -> None:
        memory = await make_memory(config("truncation", token_estimator=len))
        await memory.add_turn(turn(1))
        view = (await memory.get_llm_context())["conversation_memory"]
        assert memory.estimate_tokens() == len(json.dumps(view, ensure_ascii=False, sort_keys=True))

    # Callbacks

    async def test_a_callback_that_raises_or_is_not_awaitable_harms_nobody(
        self, make_memory: MakeMemory
    ) -> None:
        def not_async(added: ConversationTurn) -> Any:
            return added.user_message

        async def raises(old: str, new: str) -> None:
            raise RuntimeError("a user's mistake")

        memory = await make_memory(
            config(zone=1, on_turn_added=not_async, on_summary_updated=raises), LedgerSummarizer()
        )
        for number in range(3):
            await memory.add_turn(turn(number))
        await memory.flush()
        assert (await shown(memory))["summary"] == ["u0", "u1"]

    async def test_a_slow_callback_delays_nobody(self, make_memory: MakeMemory) -> None:
        go = asyncio.Event()
        done: list[str] = []

        async def slow(added: ConversationTurn) -> None:
            await go.wait()
            done.append(added.user_message)

        memory = await make_memory(config("truncation", on_turn_added=slow))
        async with asyncio.timeout(2):
            await memory.add_turn(turn(1))
            await memory.add_turn(turn(2))
        assert done == []
        go.set()
        await until(lambda: sorted(done) == ["u1", "u2"])

    async def test_a_summary_is_reported_with_its_predecessor(self, make_memory: MakeMemory) -> None:
        updates: list[tuple[list[str], list[str]]] = []

        async def note(old: str, new: str) -> None:
            updates.append((covered(old), covered(new)))

        memory = await make_memory(config(zone=1, on_summary_updated=note), LedgerSummarizer())
        for number in range(3):
            await memory.add_turn(turn(number))
            await memory.flush()
        await until(lambda: len(updates) == 2)
        assert updates == [([], ["u0"]), (["u0"], ["u0", "u1"])]

    # Cancellation

    async def test_cancelling_a_flush_harms_nobody(self, make_memory: MakeMemory) -> None:
        summarizer = LedgerSummarizer()
        summarizer.hold()
        memory = await make_memory(config(zone=1), summarizer)
        for number in range(3):
            await memory.add_turn(turn(number))
        await asyncio.wait_for(summarizer.called.wait(), 5)
        impatient = asyncio.create_task(memory.flush())
        patient = asyncio.create_task(memory.flush())
        await asyncio.sleep(0.02)
        impatient.cancel()
        with pytest.raises(asyncio.CancelledError):
            await impatient
        summarizer.release()
        await asyncio.wait_for(patient, 10)
        assert (await shown(memory))["summary"] == ["u0", "u1"]

    async def test_flush_returns_at_its_deadline(self, make_memory: MakeMemory) -> None:
        summarizer = LedgerSummarizer()
        summarizer.hold()
        memory = await make_memory(config(zone=1), summarizer)
        for number in range(3):
            await memory.add_turn(turn(number))
        async with asyncio.timeout(3):
            await memory.flush(timeout=0.1)
        assert (await shown(memory))["pending"] == ["u0", "u1"]
        summarizer.release()
        await memory.flush()

    async def test_a_turn_class_and_a_config_class_of_somebody_else_work(
        self, make_memory: MakeMemory
    ) -> None:
        class TheirTurn:
            user_message = "u1"
            assistant_response = "hi"
            trajectory_digest = None

        class TheirConfig:
            strategy = "truncation"
            budget = MemoryBudget(full_zone_turns=1)

        memory = await make_memory(TheirConfig())
        await memory.add_turn(TheirTurn())  # pyright: ignore[reportArgumentType] -- this is the point
        assert (await shown(memory))["recent"] == ["u1"]
