"""Our types stand in for PenguiFlow's: the same names, fields, order and defaults."""

from __future__ import annotations

from typing import Any

import pytest
from penguiflow.planner import memory as theirs

import stm_backends as ours
from stm_backends.types import ShortTermMemoryConfig, as_config


@pytest.mark.parametrize("name", theirs.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert hasattr(ours, name)


def test_health_has_the_same_values_and_is_equal_to_theirs() -> None:
    assert list(ours.MemoryHealth) == list(theirs.MemoryHealth)


@pytest.mark.parametrize(
    "name", ["ShortTermMemory", "ShortTermMemoryPersistence", "ShortTermMemorySerializable"]
)
def test_the_protocols_ask_for_the_same_methods(name: str) -> None:
    def asked(protocol: Any) -> set[str]:
        return {attribute for attribute in vars(protocol) if not attribute.startswith("_")}

    assert asked(getattr(ours, name)) == asked(getattr(theirs, name))


def test_a_configuration_of_theirs_is_one_of_ours() -> None:
    config = theirs.ShortTermMemoryConfig(
        strategy="rolling_summary", budget=theirs.MemoryBudget(full_zone_turns=3), retry_attempts=7
    )
    assert as_config(config) == ShortTermMemoryConfig(
        strategy="rolling_summary", budget=ours.MemoryBudget(full_zone_turns=3), retry_attempts=7
    )


def test_their_own_validation_refuses_what_ours_does() -> None:
    for settings in ({"full_zone_turns": -1}, {"summary_max_tokens": 2, "total_max_tokens": 1}):
        for module in (ours, theirs):
            with pytest.raises(ValueError, match="must be"):
                module.MemoryBudget(**settings)


def test_a_simple_composite_is_byte_for_byte_theirs() -> None:
    parts = ("acme", "user 1", "chat/ü?")
    assert ours.MemoryKey(*parts).composite() == theirs.MemoryKey(*parts).composite()
