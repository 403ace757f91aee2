"""Settings that cannot work are refused at once; foreign objects are taken for what they have."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

from stm_backends.errors import ConfigurationError, InvalidKey, InvalidState, StmError
from stm_backends.types import (
    ConversationTurn,
    MemoryBudget,
    MemoryHealth,
    MemoryIsolation,
    MemoryKey,
    ShortTermMemoryConfig,
    TrajectoryDigest,
    as_config,
    as_turn,
    as_turn_id,
    default_token_estimator,
)


@pytest.mark.parametrize(
    ("make", "setting"),
    [
        (lambda: MemoryBudget(full_zone_turns=-1), "full_zone_turns"),
        (lambda: MemoryBudget(summary_max_tokens=-1), "summary_max_tokens"),
        (lambda: MemoryBudget(total_max_tokens=-1), "total_max_tokens"),
        (lambda: MemoryBudget(summary_max_tokens=11, total_max_tokens=10), "summary_max_tokens"),
        (lambda: MemoryBudget(overflow_policy="drop"), "truncate_oldest"),
        (lambda: MemoryIsolation(tenant_key=""), "tenant_key"),
        (lambda: MemoryIsolation(user_key=""), "user_key"),
        (lambda: MemoryIsolation(session_key=""), "session_key"),
        (lambda: ShortTermMemoryConfig(strategy="rolling"), "rolling_summary"),
        (lambda: ShortTermMemoryConfig(recovery_backlog_limit=-1), "recovery_backlog_limit"),
        (lambda: ShortTermMemoryConfig(retry_attempts=-1), "retry_attempts"),
        (lambda: ShortTermMemoryConfig(retry_backoff_base_s=-0.1), "retry_backoff_base_s"),
        (lambda: ShortTermMemoryConfig(retry_backoff_base_s=float("nan")), "retry_backoff_base_s"),
        (lambda: ShortTermMemoryConfig(degraded_retry_interval_s=-1), "degraded_retry_interval_s"),
        (lambda: ShortTermMemoryConfig(summarizer_timeout_s=0), "summarizer_timeout_s"),
        (lambda: ShortTermMemoryConfig(fold_batch_turns=0), "fold_batch_turns"),
        (lambda: ShortTermMemoryConfig(session_ttl_s=0), "session_ttl_s"),
        (lambda: MemoryBudget(full_zone_turns="5"), "full_zone_turns"),
        (lambda: MemoryBudget(full_zone_turns=2.5), "full_zone_turns"),
        (lambda: MemoryBudget(full_zone_turns=True), "full_zone_turns"),
        (lambda: MemoryBudget(total_max_tokens=None), "total_max_tokens"),
        (lambda: MemoryBudget(summary_max_tokens=float("inf")), "summary_max_tokens"),
        (lambda: MemoryBudget(overflow_policy=None), "overflow_policy"),
        (lambda: MemoryIsolation(user_key=7), "user_key"),
        (lambda: ShortTermMemoryConfig(strategy=["none"]), "strategy"),
        (lambda: ShortTermMemoryConfig(retry_attempts="3"), "retry_attempts"),
        (lambda: ShortTermMemoryConfig(recovery_backlog_limit=1.5), "recovery_backlog_limit"),
        (lambda: ShortTermMemoryConfig(fold_batch_turns=2.5), "fold_batch_turns"),
        (lambda: ShortTermMemoryConfig(token_estimator=7), "token_estimator"),
        (lambda: ShortTermMemoryConfig(on_turn_added="x"), "on_turn_added"),
        (lambda: ShortTermMemoryConfig(on_summary_updated=1), "on_summary_updated"),
        (lambda: ShortTermMemoryConfig(on_health_changed=[]), "on_health_changed"),
        (lambda: ShortTermMemoryConfig(summarizer_timeout_s=None), "summarizer_timeout_s"),
        (lambda: ShortTermMemoryConfig(session_ttl_s="60"), "session_ttl_s"),
        *[
            (lambda name=name, value=value: ShortTermMemoryConfig(**{name: value}), name)
            for name in (
                "summarizer_timeout_s",
                "session_ttl_s",
                "retry_backoff_base_s",
                "degraded_retry_interval_s",
            )
            for value in (float("inf"), float("nan"), float("-inf"), 10**400)
        ],
    ],
)
def test_a_setting_that_cannot_work_is_refused_by_its_name(make: Any, setting: str) -> None:
    with pytest.raises(ValueError, match=setting) as caught:
        make()
    assert isinstance(caught.value, StmError)


def test_a_summary_may_be_of_any_size_when_the_total_is_unlimited() -> None:
    assert MemoryBudget(summary_max_tokens=10**6, total_max_tokens=0).summary_max_tokens == 10**6


def test_health_is_its_text() -> None:
    assert [health.value for health in MemoryHealth] == ["healthy", "retry", "degraded", "recovering"]
    assert MemoryHealth.RETRY == "retry"


@pytest.mark.parametrize(("text", "tokens"), [("", 1), ("abc", 1), ("abcd", 2), ("a" * 400, 101)])
def test_tokens_are_a_quarter_of_the_characters_plus_one(text: str, tokens: int) -> None:
    assert default_token_estimator(text) == tokens
    assert ShortTermMemoryConfig().estimate(text) == tokens
    assert ShortTermMemoryConfig(token_estimator=len).estimate(text) == len(text)


@pytest.mark.parametrize("blank", ["", " ", "\t\n", None, 7])
def test_a_key_with_a_blank_part_has_no_composite(blank: Any) -> None:
    for parts in ((blank, "u", "s"), ("t", blank, "s"), ("t", "u", blank)):
        with pytest.raises(InvalidKey):
            MemoryKey(*parts).composite()


def test_a_foreign_configuration_is_copied_with_defaults_added() -> None:
    theirs = SimpleNamespace(
        strategy="truncation", budget=SimpleNamespace(full_zone_turns=2), retry_attempts=9
    )
    ours = as_config(theirs)
    assert ours == ShortTermMemoryConfig(
        strategy="truncation", budget=MemoryBudget(full_zone_turns=2), retry_attempts=9
    )
    theirs.budget.full_zone_turns = 50
    assert ours.budget.full_zone_turns == 2


def test_no_configuration_is_the_default_one_and_a_copy_is_another_object() -> None:
    assert as_config(None) == ShortTermMemoryConfig()
    mine = ShortTermMemoryConfig()
    assert as_config(mine).budget is not mine.budget


def test_a_foreign_configuration_is_validated() -> None:
    with pytest.raises(ConfigurationError, match="strategy"):
        as_config(SimpleNamespace(strategy="everything", budget=MemoryBudget()))


@pytest.mark.parametrize(
    "theirs",
    [
        {"strategy": "truncation", "budget": {"full_zone_turns": 2}},
        "truncation",
        len,
        7,
        MemoryBudget(),
        ShortTermMemoryConfig,
        SimpleNamespace(strategy="truncation"),
        SimpleNamespace(budget=MemoryBudget()),
    ],
    ids=repr,
)
def test_what_is_no_configuration_never_turns_the_memory_off_unnoticed(theirs: Any) -> None:
    with pytest.raises(ConfigurationError, match="ShortTermMemoryConfig\\(strategy="):
        as_config(theirs)


@pytest.mark.parametrize("budget", [{"full_zone_turns": 2}, None, 5, "5", MemoryBudget], ids=repr)
def test_a_budget_of_which_nothing_would_be_taken_is_refused(budget: Any) -> None:
    for make in (
        lambda: ShortTermMemoryConfig(strategy="truncation", budget=budget),
        lambda: as_config(SimpleNamespace(strategy="truncation", budget=budget)),
    ):
        with pytest.raises(ConfigurationError, match="budget must be a MemoryBudget"):
            make()


@pytest.mark.parametrize("isolation", [{"tenant_key": "t"}, None, "t"], ids=repr)
def test_an_isolation_of_which_nothing_would_be_taken_is_refused(isolation: Any) -> None:
    with pytest.raises(ConfigurationError, match="isolation must be a MemoryIsolation"):
        ShortTermMemoryConfig(isolation=isolation)


def test_a_foreign_turn_is_copied_with_its_digest() -> None:
    theirs = SimpleNamespace(
        user_message="u",
        assistant_response="a",
        trajectory_digest=SimpleNamespace(tools_invoked=["t"], observations_summary="o"),
    )
    assert as_turn(theirs) == ConversationTurn("u", "a", TrajectoryDigest(["t"], "o"))


@pytest.mark.parametrize(
    "theirs",
    [
        SimpleNamespace(user_message="u"),
        SimpleNamespace(user_message=b"u", assistant_response="a"),
        SimpleNamespace(user_message="u", assistant_response=None),
        {"user_message": "u", "assistant_response": "a"},
        "u",
        None,
    ],
    ids=repr,
)
def test_what_is_no_turn_is_refused(theirs: Any) -> None:
    with pytest.raises(ConfigurationError):
        as_turn(theirs)


def test_what_a_turn_lacks_is_named() -> None:
    with pytest.raises(
        InvalidState, match=r"^str is not a ConversationTurn: it has no user_message and no assis"
    ):
        as_turn("hello")


def test_a_turn_without_an_id_gets_a_new_one_and_an_id_is_kept() -> None:
    assert as_turn_id("mine") == "mine"
    assert len({as_turn_id(None) for _ in range(100)}) == 100


@pytest.mark.parametrize("turn_id", ["", 7, 0, False, b"id", ["id"]])
def test_what_is_no_turn_id_is_refused(turn_id: Any) -> None:
    with pytest.raises(InvalidState, match="the id of a turn"):
        as_turn_id(turn_id)


def test_settings_of_ours_come_after_all_of_penguiflows() -> None:
    names = [field.name for field in dataclasses.fields(ShortTermMemoryConfig)]
    assert names[names.index("on_health_changed") + 1 :] == [
        "summarizer_timeout_s",
        "fold_batch_turns",
        "session_ttl_s",
        "fold_max_turns",
        "fold_max_tokens",
        "transcript",
        "transcript_ttl_s",
        "summaries",
    ]


def test_a_key_can_be_a_dictionarys_and_never_changes() -> None:
    key = MemoryKey("acme", "u", "s")
    assert {key: 1}[MemoryKey("acme", "u", "s")] == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        key.user_id = "v"  # type: ignore[misc]
