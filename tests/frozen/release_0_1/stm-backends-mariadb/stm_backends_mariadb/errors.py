"""What a caller can conclude from each error of MariaDB and of asyncmy."""

from asyncmy.errors import MySQLError

from stm_backends import Corrupt, Denied, OutcomeUnknown, Unavailable
from stm_backends.drivers.edge import Meaning

MISSING = 1146
DEADLOCK = 1213

LOST: Meaning = (OutcomeUnknown, "the connection was lost before the answer came")
ALTERED: Meaning = (Corrupt, "the tables were altered by something else")

MEANINGS: dict[int, Meaning] = {
    1021: (Unavailable, "the server's disk is full"),
    1040: (Unavailable, "the server accepts no more connections; use a smaller pool_size"),
    1044: (Denied, "the user may not use this database"),
    1045: (Denied, "the server refused the user name or the password"),
    1049: (Unavailable, "the database does not exist"),
    1053: (Unavailable, "the server is shutting down"),
    1054: ALTERED,
    1114: (Unavailable, "the table is full"),
    1142: (Denied, "the user lacks a privilege on the tables"),
    MISSING: (Unavailable, "the tables do not exist; open once with create=True"),
    1205: (Unavailable, "another transaction held the record for too long"),
    DEADLOCK: (Unavailable, "lost a deadlock too many times"),
    1290: (Unavailable, "the server is read-only"),
    1927: LOST,
    2003: (Unavailable, "the server cannot be reached"),
    2006: LOST,
    2013: LOST,
}

RETRIED = frozenset({DEADLOCK, 1927, 2006, 2013})
"""Errors after which the same transaction may succeed, if it was not committed."""


def code_of(error: BaseException) -> int:
    """Return the number of an error of the server or of asyncmy; 0 if it has none."""
    code = error.args[0] if isinstance(error, MySQLError) and error.args else 0
    return code if isinstance(code, int) else 0


def meaning(error: Exception) -> Meaning | None:
    """Return the error to raise, and its message; `None` for a bug in the driver."""
    if isinstance(error, TimeoutError):
        return OutcomeUnknown, "no answer in time"
    if isinstance(error, MySQLError):
        code = code_of(error)
        return MEANINGS.get(code, (OutcomeUnknown, f"unexpected error {code} of the server"))
    return LOST if isinstance(error, OSError) else None
