"""Memories of one process that are broken: each is the correct one with one promise taken away."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from stm_backends.errors import MemoryBudgetExceeded
from stm_backends.memory.local.memory import DefaultShortTermMemory
from stm_backends.types import ConversationTurn, MemoryBudget, ShortTermMemoryConfig, as_config


class Broken:
    """A memory around the correct one. `change` says with which settings, `summarizer` with which model."""

    def __init__(self, config: object, summarizer: Any) -> None:
        self.asked: ShortTermMemoryConfig = as_config(config)
        self.model = summarizer
        self.inner = self.build()

    def build(self) -> DefaultShortTermMemory:
        """Return the memory that does the work."""
        summarizer = None if self.model is None else self.summarize
        return DefaultShortTermMemory(config=self.change(self.asked), summarizer=summarizer)

    def change(self, config: ShortTermMemoryConfig) -> ShortTermMemoryConfig:
        """Return the settings that are used instead of those asked for."""
        return config

    async def summarize(self, request: Mapping[str, Any]) -> Any:
        """Ask the summarizer."""
        return await self.model(request)

    async def add_turn(self, turn: ConversationTurn, *, turn_id: str | None = None) -> None:
        await self.inner.add_turn(turn, turn_id=turn_id)

    async def get_llm_context(self) -> dict[str, Any]:
        return await self.inner.get_llm_context()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class SharedByAllConversations(Broken):
    """One memory object for the whole process."""

    shared: ClassVar[DefaultShortTermMemory | None] = None

    def build(self) -> DefaultShortTermMemory:
        cls = type(self)
        cls.shared = cls.shared or super().build()
        return cls.shared


class AddWaitsForTheSummary(Broken):
    """Summarizes before it lets the caller go on."""

    async def add_turn(self, turn: ConversationTurn, *, turn_id: str | None = None) -> None:
        await super().add_turn(turn, turn_id=turn_id)
        await self.inner.flush()


class ForgetsWhileItSummarizes(Broken):
    """Takes pending turns away when the summary begins, not when it is stored."""

    async def get_llm_context(self) -> dict[str, Any]:
        context = await super().get_llm_context()
        context.get("conversation_memory", {}).pop("pending_turns", None)
        return context


class IgnoresTheBudget(Broken):
    """Shows all there is."""

    def change(self, config: ShortTermMemoryConfig) -> ShortTermMemoryConfig:
        return replace(config, budget=replace(config.budget, total_max_tokens=0))


class StoresBeforeItRefuses(Broken):
    """Notices that a turn does not fit after having stored it."""

    def change(self, config: ShortTermMemoryConfig) -> ShortTermMemoryConfig:
        return replace(
            config, budget=MemoryBudget(full_zone_turns=config.budget.full_zone_turns, total_max_tokens=0)
        )

    async def add_turn(self, turn: ConversationTurn, *, turn_id: str | None = None) -> None:
        await super().add_turn(turn, turn_id=turn_id)
        if self.inner.estimate_tokens() > self.asked.budget.total_max_tokens:
            raise MemoryBudgetExceeded("too much, too late")


class WaitsForCallbacks(Broken):
    """Awaits a callback before it lets the caller go on."""

    def change(self, config: ShortTermMemoryConfig) -> ShortTermMemoryConfig:
        return replace(config, on_turn_added=None)

    async def add_turn(self, turn: ConversationTurn, *, turn_id: str | None = None) -> None:
        await super().add_turn(turn, turn_id=turn_id)
        if self.asked.on_turn_added is not None:
            await self.asked.on_turn_added(turn)


class TrustsCallbacks(WaitsForCallbacks):
    """Lets errors of callbacks reach the caller."""


class IgnoresTurnIds(Broken):
    """Adds a turn again whose answer got lost."""

    async def add_turn(self, turn: ConversationTurn, *, turn_id: str | None = None) -> None:
        await super().add_turn(turn, turn_id=None)


class KeepsTheCallersTurn(Broken):
    """Shows the caller's objects, even after they were changed."""

    def build(self) -> DefaultShortTermMemory:
        self.given: list[ConversationTurn] = []
        return super().build()

    async def add_turn(self, turn: ConversationTurn, *, turn_id: str | None = None) -> None:
        await super().add_turn(turn, turn_id=turn_id)
        self.given.append(turn)

    async def get_llm_context(self) -> dict[str, Any]:
        turns = [{"user": turn.user_message, "assistant": turn.assistant_response} for turn in self.given]
        return {"conversation_memory": {"recent_turns": turns}}


class FoldsWithoutBound(Broken):
    """Asks the summarizer for everything at once."""

    def change(self, config: ShortTermMemoryConfig) -> ShortTermMemoryConfig:
        return replace(config, fold_max_turns=1_000, fold_max_tokens=10**6)


class GivesUp(Broken):
    """Never tries again what has failed."""

    def change(self, config: ShortTermMemoryConfig) -> ShortTermMemoryConfig:
        return replace(config, retry_attempts=0, degraded_retry_interval_s=1e6)


class BelievesNonsense(Broken):
    """Stores every result of the summarizer, valid or not."""

    async def summarize(self, request: Mapping[str, Any]) -> Any:
        answer: Any = await super().summarize(request)
        try:
            return {"summary": answer["summary"] + ""}
        except (TypeError, KeyError):
            return {"summary": f"<session_summary>{answer}</session_summary>"}


class RepeatsAfterAPanic(Broken):
    """Backs off after an `Exception` alone."""

    async def summarize(self, request: Mapping[str, Any]) -> Any:
        while True:
            try:
                return await super().summarize(request)
            except Exception:
                raise
            except BaseException:  # noqa: BLE001, S110 -- the mistake
                pass


class TrustsTheEstimator(Broken):
    """Lets the errors of a token estimator reach the caller."""

    async def get_llm_context(self) -> dict[str, Any]:
        context = await super().get_llm_context()
        if self.asked.token_estimator is not None:
            assert self.asked.token_estimator(str(context)) >= 0
        return context


class SummarizesFromScratch(Broken):
    """Does not tell the summarizer what the last summary was."""

    async def summarize(self, request: Mapping[str, Any]) -> Any:
        return await super().summarize({**request, "previous_summary": ""})


class WaitsForEver(Broken):
    """Has no patience to lose with a summarizer that hangs."""

    def change(self, config: ShortTermMemoryConfig) -> ShortTermMemoryConfig:
        return replace(config, summarizer_timeout_s=1e6)


class FlushHasNoDeadline(Broken):
    """Waits for the summary and ignores the timeout."""

    async def flush(self, timeout: float | None = None) -> None:
        del timeout
        await self.inner.flush()


class FlushSitsOutItsTime(Broken):
    """Waits for a summary that will not come."""

    async def flush(self, timeout: float | None = None) -> None:
        await self.inner.flush(timeout)
        if self.inner.to_dict()["backlog"]:
            await asyncio.sleep(3600.0 if timeout is None else timeout)


class BlanksTheSummary(Broken):
    """Takes what the budget leaves of a summary for a summary, be it nothing."""

    async def summarize(self, request: Mapping[str, Any]) -> Any:
        answer = await super().summarize(request)
        limit = self.asked.budget.summary_max_tokens
        return answer if self.asked.estimate(answer["summary"]) <= limit else {"summary": "-"}


class LosesTheEndOfASummary(Broken):
    """Cuts a summary at its end, where its newest facts stand."""

    async def summarize(self, request: Mapping[str, Any]) -> Any:
        answer = await super().summarize(request)
        most = 4 * self.asked.budget.summary_max_tokens - 20
        return answer if len(answer["summary"]) <= most else {"summary": answer["summary"][:most]}


class DropsWhatIsLarge(Broken):
    """Shows nothing of a turn that is not within the budget as a whole."""

    async def get_llm_context(self) -> dict[str, Any]:
        context = await super().get_llm_context()
        turns = context.get("conversation_memory", {}).get("recent_turns", [])
        turns[:] = [turn for turn in turns if "characters omitted" not in turn["assistant"]]
        return context


class SummaryBeforeAll(Broken):
    """Makes room for the summary at the cost of all turns."""

    async def get_llm_context(self) -> dict[str, Any]:
        context = await super().get_llm_context()
        if "summary" not in context.get("conversation_memory", {}) and self.inner.to_dict()["summary"]:
            return {"conversation_memory": {"recent_turns": []}}
        return context


class HidesArtifacts(Broken):
    """Stores what is meant for the model, and does not show it."""

    async def get_llm_context(self) -> dict[str, Any]:
        context = await super().get_llm_context()
        for turn in context.get("conversation_memory", {}).get("recent_turns", []):
            turn.pop("artifacts_shown", None)
        return context


class ShowsOneTooMany(Broken):
    """Counts the turns of the full zone from zero."""

    def change(self, config: ShortTermMemoryConfig) -> ShortTermMemoryConfig:
        zone = config.budget.full_zone_turns + 1
        return replace(config, budget=replace(config.budget, full_zone_turns=zone))


class NoneIsSome(Broken):
    """Stores turns though it was told to keep nothing."""

    def change(self, config: ShortTermMemoryConfig) -> ShortTermMemoryConfig:
        return replace(config, strategy="truncation") if config.strategy == "none" else config
