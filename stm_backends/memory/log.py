"""The log messages that both memories share. None contains text of a conversation."""

from __future__ import annotations

import functools
import logging

logger = logging.getLogger("stm_backends")


def retrying(attempt: int, cause: BaseException) -> None:
    """Log that a summarizer call failed and will be retried. The message of the cause may quote a turn."""
    logger.warning("summarizing failed (%s), attempt %d will be retried", type(cause).__name__, attempt)


def degraded(cause: BaseException) -> None:
    """Log that all retries failed, once when the memory becomes `DEGRADED`."""
    logger.warning(
        "summarizing is unavailable (%s): only recent turns are shown until it works", type(cause).__name__
    )


def recovered() -> None:
    """Log that the memory is healthy again after failed attempts."""
    logger.info("summarizing works again")


def trimmed_for_reading() -> None:
    """Log that a read was trimmed, because `overflow_policy="error"` never rejects a read."""
    logger.warning("the memory exceeds total_max_tokens and was trimmed for reading")


def dropped(count: int) -> None:
    """Log that turns were dropped that no summary covers."""
    logger.warning("%d turns beyond recovery_backlog_limit were dropped", count)


@functools.cache  # once in a process
def keeps_nothing() -> None:
    """Log that a turn was added to a memory with the strategy `"none"`."""
    logger.warning(
        'strategy="none", the default of ShortTermMemoryConfig, stores no turns; '
        'for a memory choose "rolling_summary" or "truncation"'
    )


def dropped_for_room(count: int) -> None:
    """Log that turns were dropped that no summary covers, because the record was full."""
    logger.warning("%d turns of a full record were dropped, because summarizing fails", count)
