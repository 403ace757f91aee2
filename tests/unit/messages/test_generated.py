"""Windows of conversations at random: the real clients' request models accept them, and so would servers."""

from __future__ import annotations

import copy

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stm_backends.errors import MemoryBudgetExceeded
from stm_backends.messages import SHAPES, Message, begins_turn, tokens_of, window
from stm_backends.tokens import default_token_estimator
from tests.support.dialogues import Dialogue, System, dialogues, in_shape, require_accepted, require_valid

ESTIMATORS = {
    "the default estimate": default_token_estimator,
    "bytes": lambda text: len(text.encode()),
    "words, of which a shorter text may have more": lambda text: len(text.split()),
}

few = settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
every_shape = pytest.mark.parametrize("name", SHAPES)


def require_window(name: str, said: Dialogue, budget: int, summary: str, estimator: str) -> None:
    """Assert all that a window promises, for one conversation."""
    messages, estimate, shape = in_shape(name, said), ESTIMATORS[estimator], SHAPES[name]
    before = copy.deepcopy(messages)
    try:
        shown = window(summary, messages, max_tokens=budget, estimate=estimate, shape=name)
    except MemoryBudgetExceeded:
        assert budget < 1_000
        return
    assert messages == before
    assert tokens_of(shown, estimate=estimate, shape=name) <= budget
    require_accepted(name, shown)
    require_valid(name, shown)
    newest = [message for message in messages if begins_turn(message, shape)][-1]
    # By words: parts without text, which Anthropic refuses, are left out.
    words = " ".join(shape.text(newest).split())
    if words and tokens_of([newest], estimate=estimate, shape=name) + 50 <= budget:
        assert words in " ".join(" ".join(map(shape.text, shown)).split())


CONVERSATIONS = {
    "said": dialogues(),
    "budget": st.integers(40, 30_000) | st.integers(40, 2_000),
    "summary": st.sampled_from(["", "Ann wants a table for two.", "A long summary. " * 500]),
    "estimator": st.sampled_from([*ESTIMATORS]),
}


@every_shape
@few
@given(**CONVERSATIONS)
def test_a_window_fits_is_valid_and_has_the_newest_question(
    name: str, said: Dialogue, budget: int, summary: str, estimator: str
) -> None:
    require_window(name, said, budget, summary, estimator)


@pytest.mark.full
@every_shape
@settings(few, max_examples=2_000)
@given(**CONVERSATIONS)
def test_two_thousand_windows_fit_and_are_valid(
    name: str, said: Dialogue, budget: int, summary: str, estimator: str
) -> None:
    require_window(name, said, budget, summary, estimator)


@pytest.mark.parametrize("name", [name for name, shape in SHAPES.items() if not shape.joins])
@few
@given(dialogues(faults=False))
def test_what_fits_comes_back_as_it_was(name: str, said: Dialogue) -> None:
    messages = in_shape(name, said)
    assert window("", messages, max_tokens=10**9, estimate=len, shape=name) == messages


@pytest.mark.parametrize("name", [name for name, shape in SHAPES.items() if shape.joins])
@few
@given(dialogues(faults=False))
def test_what_fits_comes_back_in_turns_without_what_is_blank(name: str, said: Dialogue) -> None:
    messages = in_shape(name, [one for one in said if not isinstance(one, System)])
    shape = SHAPES[name]

    def read(some: list[Message]) -> list[tuple[str, str]]:
        parts = [part for one in some for part in shape.parts(one) if part.kind in ("text", "call", "media")]
        return [(part.kind, part.text) for part in parts if not part.blank and part.text != "[empty message]"]

    assert read(window("", messages, max_tokens=10**9, estimate=len, shape=name)) == read(messages)


@every_shape
@few
@given(dialogues())
def test_the_shape_of_a_conversation_with_tools_is_recognized(name: str, said: Dialogue) -> None:
    messages = in_shape(name, said)
    if any(SHAPES[name].calls(message) for message in messages):
        assert window("", messages, max_tokens=10**9, estimate=len) == window(
            "", messages, max_tokens=10**9, estimate=len, shape=name
        )
