"""Durations on the command line."""

from __future__ import annotations

import pytest

from stm_backends.cli import durations
from stm_backends.errors import ConfigurationError


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90d", 7_776_000.0),
        ("12h", 43_200.0),
        ("30m", 1_800.0),
        ("45s", 45.0),
        ("2w", 1_209_600.0),
        ("1.5h", 5_400.0),
        (" 1d ", 86_400.0),
    ],
)
def test_a_number_and_a_unit_are_a_duration(text: str, seconds: float) -> None:
    assert durations.seconds("--ttl", text) == seconds
    assert durations.optional("--ttl", text) == seconds


def test_an_option_that_was_not_given_is_no_duration() -> None:
    assert durations.optional("--ttl", None) is None


@pytest.mark.parametrize(
    "text",
    [
        "90",
        "",
        "d",
        "-1d",
        "0d",
        "90 d",
        "90days",
        "90D",
        "1d12h",
        "1e3d",
        "inf",
        "nan",
        "٣d",
        "9" * 400 + "d",
    ],
)
def test_any_other_text_is_refused_with_the_spelling(text: str) -> None:
    with pytest.raises(ConfigurationError, match="--older-than") as refused:
        durations.seconds("--older-than", text)
    assert len(str(refused.value)) < 200
