"""Logging: how often messages are logged, how conversations are named, and whether errors are shown.

All messages go to the logger `stm_backends`. The first message of a kind is logged; later ones at most once
in `every_s` seconds, with the number of those left out. A message about a conversation contains a keyed hash
of its key, so that two messages about one conversation can be related without its id. No message contains
text of a conversation, unless `show_errors` is set.

```python
from stm_backends import logs

logs.configure(show_errors=True)     # while you look for the cause of a failing summarizer
```
"""

from __future__ import annotations

import hmac
import logging
import math
import os
import time
from collections.abc import Callable
from typing import Final

from stm_backends.errors import ConfigurationError
from stm_backends.handed_in import described

EVERY_S: Final = 60.0
"""The default number of seconds between two messages of one kind."""

_HASH_DIGITS: Final = 12

logger = logging.getLogger("stm_backends")

_hash_key = os.urandom(32)
_show_errors = False


def configure(*, show_errors: bool = False, hash_key: bytes | None = None, every_s: float = EVERY_S) -> None:
    """Configure logging in this process; arguments that are omitted return to their defaults.

    `show_errors` adds the message and the traceback of an error to warnings about summarizers, callbacks and
    background work. These may quote conversations. `hash_key` is the key of the hashes, at least 16 bytes;
    with the same key, all processes name a conversation by the same hash. By default, each process has a
    random key. `every_s=0` logs every message. Raises `ConfigurationError` for other values.
    """
    global _hash_key, _show_errors  # noqa: PLW0603 -- there is one logger in a process
    if hash_key is not None and (not isinstance(hash_key, bytes) or len(hash_key) < 16):  # pyright: ignore[reportUnnecessaryIsInstance] -- a user gives it
        raise ConfigurationError("hash_key must be at least 16 bytes")
    if not 0 <= every_s < math.inf:
        raise ConfigurationError("every_s must be a number of seconds, at least 0")
    _show_errors = show_errors
    _hash_key = os.urandom(32) if hash_key is None else hash_key
    _limit.restart(every_s)


def shown(error: BaseException) -> BaseException | None:
    """Return the `exc_info` of a message: the error if `show_errors` is set."""
    return error if _show_errors else None


def failed(message: str, error: BaseException) -> None:
    """Warn that a user's function failed; `message` has a placeholder for the kind of the error."""
    logger.warning(message, described(error), exc_info=shown(error))


def conversation(composite: str) -> str:
    """Return the keyed hash of a conversation's composite key."""
    return hmac.new(_hash_key, composite.encode("utf-8", "surrogatepass"), "sha256").hexdigest()[
        :_HASH_DIGITS
    ]


class RateLimit(logging.Filter):
    """Passes one message of each kind in `every_s` seconds, and every message below INFO.

    A kind is the template of a message and the classes of the errors among its arguments. The next message
    of the kind says how many were left out.
    """

    def __init__(self, every_s: float = EVERY_S, *, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self.restart(every_s)

    def restart(self, every_s: float) -> None:
        """Forget all messages, and use another interval."""
        self._every_s = every_s
        self._kinds: dict[tuple[object, ...], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Say whether a message is logged."""
        args = record.args
        if record.levelno < logging.INFO or not isinstance(record.msg, str) or not isinstance(args, tuple):
            return True
        kind = (record.msg, *(type(arg) for arg in args if isinstance(arg, BaseException)))
        now = self._clock()
        last, left_out = self._kinds.get(kind, (-math.inf, 0))
        if now - last < self._every_s:
            self._kinds[kind] = last, left_out + 1
            return False
        self._kinds[kind] = now, 0
        if left_out:
            record.msg, record.args = f"{record.msg} (%d similar messages left out)", (*args, left_out)
        return True


_limit = RateLimit()
logger.addFilter(_limit)
