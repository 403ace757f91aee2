"""The default estimate knows scripts. `languages.json` has public texts and the counts of two tokenizers.

The texts are the first articles of the Universal Declaration of Human Rights, and made ones of emoji and
Base64. js-tiktoken counted them with its encodings o200k_base and cl100k_base.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stm_backends.tokens import PER_TOKEN, default_token_estimator, tokens_of, weigh

LANGUAGES: dict[str, Any] = json.loads(Path(__file__).with_name("languages.json").read_text("utf-8"))
PAGE = Path(__file__).parent.parent.parent / "docs/explanation/tokens.md"
LIMITS = {"Base64"}
"""Texts of ASCII, which is counted as PenguiFlow counts it."""


@pytest.mark.parametrize("language", sorted(LANGUAGES.keys() - LIMITS))
def test_no_tokenizer_counts_more_than_1_3_times_the_estimate(language: str) -> None:
    sample = LANGUAGES[language]
    counted = sample["o200k"], sample["cl100k"]
    estimate = default_token_estimator(sample["text"])
    assert max(counted) <= 1.3 * estimate
    # Where the tokenizers themselves are further apart, the larger count decides.
    assert estimate <= max(1.3 * max(counted), 1.41 * min(counted))


@given(st.text(st.characters(codec="ascii")))
def test_four_characters_of_ascii_are_a_token(text: str) -> None:
    assert default_token_estimator(text) == len(text) // 4 + 1


@given(st.lists(st.text(st.characters()), max_size=5))
def test_the_weight_of_a_text_is_that_of_its_parts(parts: list[str]) -> None:
    text = "".join(parts)
    assert weigh(text) == sum(map(weigh, parts))
    assert default_token_estimator(text) == tokens_of(weigh(text)) == weigh(text) // PER_TOKEN + 1


@given(st.characters())
def test_no_character_weighs_nothing_and_none_more_than_three_tokens(character: str) -> None:
    assert 4 <= weigh(character) <= 3 * PER_TOKEN


def test_lone_surrogates_are_counted() -> None:
    assert weigh("\ud800") == weigh("\udfff") > 0


class _Encoding:
    """Stands in for tiktoken's: `encode` refuses the texts of special tokens, `encode_ordinary` none."""

    def encode(self, text: str) -> list[int]:
        if "<|endoftext|>" in text:
            raise ValueError(text)
        return self.encode_ordinary(text)

    def encode_ordinary(self, text: str) -> list[int]:
        return [*text.encode("utf-8", "replace")]


def test_the_example_with_tiktoken_raises_for_no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    stub: Any = ModuleType("tiktoken")
    stub.get_encoding = lambda name: {"o200k_base": _Encoding()}[name]
    monkeypatch.setitem(sys.modules, "tiktoken", stub)
    [program] = [one.partition("```")[0] for one in PAGE.read_text("utf-8").split("```python\n")[1:]]
    names: dict[str, Any] = {}
    exec(program, names)  # noqa: S102 -- the example of the page
    config = names["config"]
    for text in ("hello", "<|endoftext|>", "\ud800"):
        assert config.estimate(text) == len(text.encode("utf-8", "replace"))
