"""What both memories say in the log, in the same words: what happened, and never what was talked about."""

from __future__ import annotations

import functools
import logging

logger = logging.getLogger("stm_backends")


def retrying(attempt: int, cause: BaseException) -> None:
    """Say that a summarizer call failed and will be repeated. What the cause says may quote a turn."""
    logger.warning("summarizing failed (%s), attempt %d will be repeated", type(cause).__name__, attempt)


def degraded(cause: BaseException) -> None:
    """Say that every retry failed, once on the way into `DEGRADED`."""
    logger.warning("summarizing is unavailable (%s): recent turns only until it works", type(cause).__name__)


def recovered() -> None:
    """Say that a summary was written after attempts that failed."""
    logger.info("summarizing works again")


def trimmed_for_reading() -> None:
    """Say that `overflow_policy="error"`, which never refuses a read, has trimmed one."""
    logger.warning("the memory exceeds total_max_tokens and was trimmed for reading")


def dropped(count: int) -> None:
    """Say that turns which no summary covers were let go."""
    logger.warning("%d turns beyond recovery_backlog_limit were dropped", count)


@functools.cache  # once in a process
def keeps_nothing() -> None:
    """Say that a turn was added to a memory whose strategy, the default one, stores none."""
    logger.warning(
        'strategy="none", the default of ShortTermMemoryConfig, stores no turns; '
        'for a memory choose "rolling_summary" or "truncation"'
    )


def dropped_for_room(count: int) -> None:
    """Say that turns which no summary covers were let go because the record was full."""
    logger.warning("%d turns of a full record were dropped, because summarizing fails", count)
