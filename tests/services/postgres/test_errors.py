"""What a caller can conclude from what PostgreSQL and asyncpg raise."""

import ssl
from typing import Any

import pytest
from asyncpg import exceptions

from stm_backends.errors import Corrupt, Denied, OutcomeUnknown, Unavailable
from stm_backends_postgres.errors import copied, is_spent, meaning, unsent


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (exceptions.QueryCanceledError("x"), Unavailable),
        (exceptions.AdminShutdownError("x"), Unavailable),
        (exceptions.CannotConnectNowError("x"), Unavailable),
        (exceptions.CrashShutdownError("x"), OutcomeUnknown),
        (exceptions.TooManyConnectionsError("x"), Unavailable),
        (exceptions.DiskFullError("x"), Unavailable),
        (exceptions.DeadlockDetectedError("x"), Unavailable),
        (exceptions.SerializationError("x"), Unavailable),
        (exceptions.StatementCompletionUnknownError("x"), OutcomeUnknown),
        (exceptions.LockNotAvailableError("x"), Unavailable),
        (exceptions.InsufficientPrivilegeError("x"), Denied),
        (exceptions.InvalidPasswordError("x"), Denied),
        (exceptions.InvalidAuthorizationSpecificationError("x"), Denied),
        (exceptions.ReadOnlySQLTransactionError("x"), Unavailable),
        (exceptions.UndefinedTableError("x"), Unavailable),
        (exceptions.InvalidSchemaNameError("x"), Unavailable),
        (exceptions.InvalidCatalogNameError("x"), Unavailable),
        (exceptions.UndefinedColumnError("x"), Corrupt),
        (exceptions.ForeignKeyViolationError("x"), Corrupt),
        (exceptions.InvalidSQLStatementNameError("x"), Unavailable),
        (exceptions.DuplicatePreparedStatementError("x"), Unavailable),
        (exceptions.ConnectionDoesNotExistError("x"), OutcomeUnknown),
        (exceptions.ConnectionFailureError("x"), OutcomeUnknown),
        (exceptions.ProtocolViolationError("x"), OutcomeUnknown),
        (exceptions.ClientCannotConnectError("x"), Unavailable),
        (exceptions.InternalServerError("x"), OutcomeUnknown),
        (exceptions.DataCorruptedError("x"), Corrupt),
        (exceptions.PostgresIOError("x"), OutcomeUnknown),
        (exceptions.PostgresError("of no known kind"), OutcomeUnknown),
        (exceptions.InterfaceError("pool is closed"), Unavailable),
        (exceptions.InternalClientError("x"), OutcomeUnknown),
        (ConnectionResetError(), OutcomeUnknown),
        (TimeoutError(), OutcomeUnknown),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else value.__name__,
)
def test_an_exception_amounts_to(error, kind):
    found = meaning(error)
    assert found is not None
    assert found[0] is kind
    assert not isinstance(unsent(error, "append"), OutcomeUnknown), "nothing was sent"


def test_a_certificate_that_is_not_trusted_is_called_by_its_name():
    error = unsent(ssl.SSLCertVerificationError(1, "certificate verify failed"), "open")
    assert isinstance(error, Unavailable)
    assert "certificate" in str(error)


def test_a_connection_that_the_server_ended_was_not_written_to():
    # As asyncpg says it, between the server's last word and the end of the connection.
    error = exceptions.InternalClientError("cannot switch to state 11; another operation (2) is in progress")
    assert is_spent(error)
    kind, message = meaning(error)
    assert kind is Unavailable
    assert "has ended this connection; nothing was done" in message


def test_a_mistake_is_no_matter_of_the_datastore():
    assert meaning(ZeroDivisionError()) is None
    assert unsent(ZeroDivisionError(), "append") is None


def test_what_the_server_says_of_the_data_is_not_repeated():
    error = exceptions.UniqueViolationError("duplicate key value")
    error.detail = "Key (scope, name)=(acme:u1:memory, secret) already exists."
    found = meaning(error)
    assert found is not None
    assert "secret" not in found[1]


def raised(error, *, module=__name__, function="fail"):
    """Return an error that a function of some module has raised."""
    made: dict[str, Any] = {"__name__": module, "error": error}
    exec(f"def {function}():\n    raise error", made)  # noqa: S102 -- a module of another package
    with pytest.raises(type(error)) as caught:
        made[function]()
    assert caught.value is error
    return error


def test_a_copy_says_the_same_and_has_no_frames():
    error = raised(exceptions.UniqueViolationError("duplicate key value"))
    error.detail = "Key already exists."
    error.__cause__ = raised(ConnectionResetError("gone"))
    copy = copied(error)
    assert copy is not error
    assert (type(copy), str(copy), copy.detail) == (type(error), str(error), error.detail)
    assert copy.__traceback__ is None
    assert repr(copy.__cause__) == repr(error.__cause__)
    assert copy.__cause__ is not error.__cause__
    assert copy.__cause__.__traceback__ is None
    assert error.__traceback__ is not None, "the error itself is as it was"


def test_a_copy_hides_what_the_error_hides():
    error = Unavailable("unreachable")
    error.__context__, error.__suppress_context__ = OSError("host"), True
    assert copied(error).__cause__ is None


@pytest.mark.parametrize(("function", "kind"), [("connect", Unavailable), ("fetch", OutcomeUnknown)])
def test_an_unknown_error_of_the_client_is_judged_before_its_frames_are_lost(function, kind):
    error = copied(raised(LookupError("secret"), module="asyncpg.connection", function=function))
    assert type(error) is kind
    assert "a function that it calls, failed (LookupError)" in str(error)
    assert isinstance(error.__cause__, LookupError)
    assert error.__cause__.__traceback__ is None


def test_a_mistake_is_copied_with_a_note_of_where_it_is():
    error = copied(raised(ZeroDivisionError("x"), module="stm_backends_postgres.driver", function="send"))
    assert type(error) is ZeroDivisionError
    assert error.__traceback__ is None
    assert "in send" in "".join(error.__notes__)


def test_an_error_that_cannot_be_copied_keeps_its_meaning():
    class Odd(exceptions.InterfaceError):
        def __init__(self, *, code):
            super().__init__(f"code {code}")

    error = copied(Odd(code=7))
    assert type(error) is Unavailable
    assert error.__cause__ is None
