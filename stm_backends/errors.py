"""The exceptions of this library, and what a caller can conclude from each.

```
StmError
├── ConfigurationError      the program is wrong; a retry will not help
│   ├── UnknownBackend      no backend of that name or URL scheme is installed
│   ├── AmbiguousBackend    two installed packages claim the same name
│   ├── MissingExtra        the backend is known, its client library is not installed
│   ├── InvalidKey          a key that cannot name a conversation or a record
│   └── InvalidState        a value that JSON cannot represent exactly
├── StorageError            the datastore refused, failed or did not answer
│   ├── Unavailable         the operation was not done; it may be retried
│   ├── OutcomeUnknown      the operation may have been done
│   ├── TooLarge            nothing was written: an entry, or the whole record, exceeds a limit
│   ├── LimitReached        nothing was written: a limit of the backend, such as conversations of a user
│   ├── Corrupt             the stored data cannot be read by this version; nothing was overwritten
│   │   ├── SealMismatch    the stored data is sealed and the backend has no `sealing`, or the reverse
│   │   ├── KeyMismatch     the key of the stored data is missing, or has other bytes
│   │   └── KeyErased       the key of the stored data was erased, and with it the data
│   └── Denied              the datastore denies access to this user, role or process
├── SessionNotFound         there is no conversation to export or copy
├── SessionExists           an import found a conversation, with on_conflict="refuse"
├── MessageNotFound         an edit named a message that the conversation does not have
├── EditConflict            another edit came first; nothing was changed
└── MemoryBudgetExceeded    `overflow_policy="error"` rejected a turn
```

No message contains text of a conversation, a conversation's id, or a secret.
"""

from __future__ import annotations

from types import TracebackType
from typing import Literal


class StmError(Exception):
    """The base class of all exceptions of this library."""


class ConfigurationError(StmError, ValueError):
    """An argument, option or URL is invalid; a retry will not help."""


class UnknownBackend(ConfigurationError, LookupError):
    """No installed package provides a backend of this name or URL scheme."""


class AmbiguousBackend(ConfigurationError, LookupError):
    """More than one installed package provides a backend of this name."""


class MissingExtra(ConfigurationError, ImportError):
    """The backend is known, but its client library is not installed."""


class InvalidKey(ConfigurationError):
    """A key that cannot name a conversation or a record."""


class InvalidState(ConfigurationError):
    """A value that JSON cannot represent exactly; the message names its path."""


class StorageError(StmError):
    """The datastore refused, failed or did not answer.

    `backend` and `operation` name the driver and the operation; `__cause__` is the client library's
    exception.
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
    """The operation was not done: nothing changed, and it may be retried."""


class OutcomeUnknown(StorageError):
    """The operation may have been done: the answer was lost after the request had been sent."""


class TooLarge(StorageError):
    """The value exceeds a limit; nothing was written.

    `what` is `"entry"` if the value itself exceeds the limit, and `"record"` if it would fit into a smaller
    record. `size` and `limit` are bytes.
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


class LimitReached(StorageError):
    """The call would exceed one of the backend's `Limits`; nothing was written.

    `limit` is the name of the limit, `most` its value and `given` the value that the call would have led to.
    """

    def __init__(self, limit: str, *, given: int, most: int, backend: str = "", operation: str = "") -> None:
        super().__init__(
            f"{limit} is {most:,}, and this would be {given:,}", backend=backend, operation=operation
        )
        self.limit = limit
        self.given = given
        self.most = most

    def __reduce__(self) -> tuple[object, ...]:
        return (_limit_reached, (self.limit, self.given, self.most, self.backend, self.operation))


def _limit_reached(limit: str, given: int, most: int, backend: str, operation: str) -> LimitReached:
    return LimitReached(limit, given=given, most=most, backend=backend, operation=operation)


class Corrupt(StorageError):
    """The stored data is damaged, or of a newer format than this version reads.

    A record that could not be read is never overwritten.
    """


class SealMismatch(Corrupt):
    """The stored data is sealed and the backend has no `sealing`, or it is in clear text and the backend has.

    Nothing is written for a user whose data is stored the other way.
    """


class KeyMismatch(Corrupt):
    """The stored data was sealed with a key that this process lacks, or has other bytes for.

    With that key it is readable, so nothing is written over it.
    """


class KeyErased(Corrupt):
    """The stored data was sealed with a data key that was erased: no one can read it."""


class Denied(StorageError):
    """The datastore denies the operation to this user, role or process."""


class SessionNotFound(StmError, LookupError):
    """No conversation exists under this key."""


class SessionExists(StmError, ValueError):
    """A conversation already exists under this key; it was not changed."""


class MessageNotFound(StmError, LookupError):
    """The conversation has no message with this number, or no longer has it."""


class EditConflict(StmError, RuntimeError):
    """Another edit of the conversation came first; this one changed nothing. Read the conversation again."""


class MemoryBudgetExceeded(StmError, RuntimeError):
    """`overflow_policy="error"` rejected a turn that does not fit into the token budget."""


class located:  # noqa: N801 -- used as a function, and a class because it is entered in each operation
    """A context manager that adds the backend and the operation to a `StorageError` that lacks them."""

    __slots__ = ("_backend", "_operation")

    def __init__(self, backend: str, operation: str) -> None:
        self._backend = backend
        self._operation = operation

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, StorageError):
            error.backend = error.backend or self._backend
            error.operation = error.operation or self._operation
