"""The default memory, which is used without a configuration: it remembers, and needs no model."""

from __future__ import annotations

from dataclasses import replace
from typing import Final, cast

from stm_backends.memory.summarizers import ExtractiveSummarizer
from stm_backends.protocols import ConfigLike, Summarizer
from stm_backends.types import MemoryBudget, ShortTermMemoryConfig

SUMMARY_TOKENS: Final = 750
TOTAL_TOKENS: Final = 3_000
"""Tokens that fit into a window of 8,000 besides the prompt, the tools and the answer."""

CONVERSATION_TOKENS: Final = 16_000
"""Tokens of messages and summary together before older messages are summarized."""

LEAST_SUMMARY_TOKENS: Final = 20
"""A smaller summary says nothing: then none is written."""

_TOKENS_OF_TURN: Final = 320
"""With turns of fewer tokens, their number bounds a record; an agent's turns have more."""


def remembering(
    config: ConfigLike | None, summarizer: Summarizer | None
) -> tuple[ConfigLike, Summarizer | None]:
    """Return a configuration and a summarizer as they were given or, without a configuration, the default.

    That is a rolling summary, by the given summarizer or the built-in one, with the transcript kept.
    """
    if config is not None:
        return config, summarizer
    default = ShortTermMemoryConfig(
        strategy="rolling_summary",
        budget=MemoryBudget(summary_max_tokens=SUMMARY_TOKENS, total_max_tokens=TOTAL_TOKENS),
        fold_batch_turns=5,
        transcript=True,
    )
    return default, ExtractiveSummarizer(max_tokens=SUMMARY_TOKENS) if summarizer is None else summarizer


def speaking(
    config: ConfigLike | None, summarizer: Summarizer | None, max_tokens: int = CONVERSATION_TOKENS
) -> tuple[ConfigLike, Summarizer | None]:
    """Return the same for a conversation of messages, which keeps more of them in full."""
    if config is not None:
        return config, summarizer
    summary = min(SUMMARY_TOKENS, max_tokens // 4)
    budget = MemoryBudget(
        full_zone_turns=max(max_tokens, CONVERSATION_TOKENS) // _TOKENS_OF_TURN,
        summary_max_tokens=summary if summary >= LEAST_SUMMARY_TOKENS else 0,
        total_max_tokens=max_tokens,
    )
    default, writer = remembering(None, summarizer)
    return replace(cast("ShortTermMemoryConfig", default), budget=budget), writer
