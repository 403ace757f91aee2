"""The log messages that both memories share. None contains text of a conversation.

`name` is the hash of the conversation's key; see `stm_backends.logs`.
"""

from __future__ import annotations

import functools
import logging

from stm_backends import logs
from stm_backends.handed_in import described

logger = logging.getLogger("stm_backends")


def retrying(name: str, attempt: int, cause: BaseException) -> None:
    """Log that a summarizer call failed and will be retried. The message of the cause may quote a turn."""
    logger.warning(
        "summarizing failed (%s), attempt %d will be retried (conversation %s)",
        described(cause),
        attempt,
        name,
        exc_info=logs.shown(cause),
    )


def degraded(name: str, cause: BaseException) -> None:
    """Log that all retries failed, once when the memory becomes `DEGRADED`."""
    logger.warning(
        "summarizing is unavailable (%s): only recent turns are shown until it works (conversation %s)",
        described(cause),
        name,
        exc_info=logs.shown(cause),
    )


def recovered(name: str) -> None:
    """Log that the memory is healthy again after failed attempts."""
    logger.info("summarizing works again (conversation %s)", name)


def background_stopped(name: str, error: BaseException) -> None:
    """Log an unexpected error; its message may quote a turn."""
    logger.error(
        "the memory's background stopped: %s (conversation %s)",
        type(error).__name__,
        name,
        exc_info=logs.shown(error),
    )


def trimmed_for_reading(name: str) -> None:
    """Log that a read was trimmed, because `overflow_policy="error"` never rejects a read."""
    logger.warning("the memory exceeds total_max_tokens and was trimmed for reading (conversation %s)", name)


def dropped(name: str, count: int) -> None:
    """Log that turns were dropped that no summary covers."""
    logger.warning("%d turns beyond recovery_backlog_limit were dropped (conversation %s)", count, name)


def moved(name: str, count: int) -> None:
    """Log that turns left the record without a summary, which is to cover them later."""
    logger.info("%d turns were moved to pages before a summary covers them (conversation %s)", count, name)


def hole(name: str, count: int, first: int, end: int) -> None:
    """Log how many of the turns from `first` to `end - 1` no summary covers, because no page has them."""
    logger.error(
        "%d of the turns %d to %d of a transcript are missing and no summary covers them (conversation %s)",
        count,
        first,
        end - 1,
        name,
    )


def damaged(name: str, error: Exception) -> None:
    """Log that a part of a page of a transcript cannot be read, so that no summary covers its turns."""
    logger.error("a damaged page of a transcript is not summarized: %s (conversation %s)", error, name)


@functools.cache  # once in a process
def keeps_nothing() -> None:
    """Log that a turn was added to a memory with the strategy `"none"`."""
    logger.warning(
        'strategy="none", the default of ShortTermMemoryConfig, stores no turns; '
        'for a memory choose "rolling_summary" or "truncation"'
    )


def dropped_for_room(name: str, count: int) -> None:
    """Log that turns were dropped that no summary covers, because the record was full."""
    logger.warning(
        "%d turns of a full record were dropped, because summarizing fails (conversation %s)", count, name
    )
