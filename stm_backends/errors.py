"""Every error this library raises on purpose, and what a caller can conclude from each.

```
StmError
├── ConfigurationError      something in the program is wrong; trying again will not help
│   ├── UnknownBackend      no backend of that name or URL scheme is installed
│   ├── AmbiguousBackend    two installed packages claim the same name
│   ├── MissingExtra        the backend is known, its client library is not installed
│   ├── InvalidKey          a conversation key that cannot be used
│   └── InvalidState        a state that JSON cannot carry faithfully
├── StorageError            the datastore said no, or said nothing
│   ├── Unavailable         the operation was not done; it may be tried again
│   ├── OutcomeUnknown      the operation was perhaps done
│   ├── TooLarge            nothing was written: one entry, or the whole record, is past a limit
│   ├── Corrupt             what is stored cannot be read by this version; nothing was overwritten
│   └── Denied              the datastore refuses this user, database or file
├── SessionNotFound         there is no such conversation to export or copy
├── SessionExists           an import met a conversation and was not told to merge or replace
└── MemoryBudgetExceeded    `overflow_policy="error"` refused a turn
```

No message carries text of a conversation, a conversation's id, or a secret.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Literal


class StmError(Exception):
    """The root of every error this library raises on purpose."""


class ConfigurationError(StmError, ValueError):
    """The program asks for something that cannot work as written."""


class UnknownBackend(ConfigurationError, LookupError):
    """No installed package brings a backend of this name or URL scheme."""


class AmbiguousBackend(ConfigurationError, LookupError):
    """More than one installed package claims this backend name."""


class MissingExtra(ConfigurationError, ImportError):
    """The backend is known, but its client library is not installed."""


class InvalidKey(ConfigurationError):
    """A key that cannot name a conversation or a record."""


class InvalidState(ConfigurationError):
    """A value that JSON cannot carry there and back unchanged; the message names its path."""


class StorageError(StmError):
    """The datastore refused, failed or did not answer.

    `backend` and `operation` say where; `__cause__` holds the client library's own exception.
    """

    def __init__(self, message: str, *, backend: str = "", operation: str = "") -> None:
        super().__init__(message)
        self.backend = backend
        self.operation = operation

    def __str__(self) -> str:
        where = ".".join(part for part in (self.backend, self.operation) if part)
        message = super().__str__()
        return f"{where}: {message}" if where else message


class Unavailable(StorageError):
    """The operation was not done: nothing changed, and it may be tried again."""


class OutcomeUnknown(StorageError):
    """The operation was perhaps done: the answer was lost after the request had been sent."""


class TooLarge(StorageError):
    """Refused before anything was written.

    `what` is `"entry"` when the value alone is past the limit, and `"record"` when it would fit in a
    smaller record. `size` and `limit` are bytes.
    """

    def __init__(
        self,
        what: Literal["entry", "record"],
        *,
        size: int,
        limit: int,
        backend: str = "",
        operation: str = "",
    ) -> None:
        super().__init__(
            f"the {what} would take {size:,} bytes and at most {limit:,} are stored",
            backend=backend,
            operation=operation,
        )
        self.what: Literal["entry", "record"] = what
        self.size = size
        self.limit = limit

    def __reduce__(self) -> tuple[object, ...]:
        return (_too_large, (self.what, self.size, self.limit, self.backend, self.operation))


def _too_large(
    what: Literal["entry", "record"], size: int, limit: int, backend: str, operation: str
) -> TooLarge:
    return TooLarge(what, size=size, limit=limit, backend=backend, operation=operation)


class Corrupt(StorageError):
    """What is stored is damaged, or of a format newer than this version reads.

    It is left as it is: nothing overwrites a record that could not be read.
    """


class Denied(StorageError):
    """The datastore does not allow this to the user, role or process that asks."""


class SessionNotFound(StmError, LookupError):
    """There is no conversation under this key."""


class SessionExists(StmError, ValueError):
    """There is a conversation under this key already, and it was left as it is."""


class MemoryBudgetExceeded(StmError, RuntimeError):
    """A turn was refused because `overflow_policy="error"` and it does not fit the token budget."""


@contextmanager
def located(backend: str, operation: str) -> Generator[None]:
    """Add where it happened to a `StorageError` that does not say so yet."""
    try:
        yield
    except StorageError as error:
        error.backend = error.backend or backend
        error.operation = error.operation or operation
        raise
