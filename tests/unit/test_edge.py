"""Every call of a driver to its client ends within the deadline, and in an error of ours or none."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import socket
import ssl
from collections.abc import Callable
from typing import Any

import pytest

from stm_backends.drivers.contract import Traits
from stm_backends.drivers.edge import ConcurrencyLimit, Edge, Meaning
from stm_backends.errors import (
    ConfigurationError,
    Corrupt,
    Denied,
    OutcomeUnknown,
    StorageError,
    TooLarge,
    Unavailable,
)


def meaning(error: Exception) -> Meaning | None:
    return {
        ConnectionResetError: (OutcomeUnknown, "the connection was lost"),
        PermissionError: (Denied, "not allowed"),
        TimeoutError: (Unavailable, "no connection was free"),
    }.get(type(error))


def edge_with(
    *,
    deadline_s: float,
    meaning: Callable[[Exception], Meaning | None] = meaning,
    before_sending: Callable[[BaseException], bool] = lambda _: False,
) -> Edge:
    traits = Traits(
        reach="network",
        clock="server",
        durability="nothing",
        max_entry=10,
        max_record=20,
        max_drop=5,
        deadline=deadline_s,
    )
    return Edge(backend="mine", traits=traits, meaning=meaning, before_sending=before_sending)


@pytest.fixture
def edge() -> Edge:
    return edge_with(deadline_s=0.05)


async def answer() -> int:
    return 7


async def fail(error: Exception) -> None:
    raise error


async def test_an_answer_passes_as_it_is(edge: Edge) -> None:
    assert await edge.run("load", answer) == 7


@pytest.mark.parametrize("operation", ["load", "scan"])
async def test_a_read_that_failed_for_a_passing_reason_is_repeated(operation: str) -> None:
    patient = edge_with(deadline_s=5.0)
    failures: list[Exception] = [ConnectionResetError(), TimeoutError(), Unavailable("no connection")]

    async def recover() -> int:
        if failures:
            raise failures.pop()
        return 7

    assert await patient.run(operation, recover) == 7


@pytest.mark.parametrize(
    ("operation", "error"),
    [("append", ConnectionResetError()), ("load", PermissionError()), ("open", TimeoutError())],
)
async def test_a_write_and_what_will_not_pass_are_tried_once(operation: str, error: Exception) -> None:
    patient, calls = edge_with(deadline_s=5.0), 0

    async def failing() -> None:
        nonlocal calls
        calls += 1
        raise error

    with pytest.raises(StorageError):
        await patient.run(operation, failing)
    assert calls == 1


async def test_an_error_of_the_client_becomes_what_the_table_says(edge: Edge) -> None:
    cause = PermissionError("user 'root'")
    with pytest.raises(Denied) as caught:
        await edge.run("append", lambda: fail(cause))
    assert str(caught.value) == "mine.append: not allowed"
    assert caught.value.__cause__ is cause


@pytest.mark.parametrize(
    ("operation", "kind"),
    [
        *((write, OutcomeUnknown) for write in ("append", "replace", "delete")),
        *((read, Unavailable) for read in ("open", "load", "scan")),
    ],
)
async def test_a_lost_answer_leaves_a_write_unknown_and_a_read_undone(edge: Edge, operation, kind) -> None:
    with pytest.raises(kind):
        await edge.run(operation, lambda: fail(ConnectionResetError()))
    with pytest.raises(kind, match="no answer within the deadline"):
        await edge.run(operation, asyncio.Event().wait)


@pytest.mark.parametrize(
    ("cause", "words"),
    [
        (socket.gaierror(-2, "Name or service not known"), "the host name is unknown"),
        (
            ConnectionRefusedError(111, "Connect call failed ('10.0.0.1', 1)"),
            "connection refused: nothing listens there",
        ),
        (
            OSError("Multiple exceptions: [Errno 111] Connect call failed"),
            "connection refused: nothing listens there",
        ),
        (
            ssl.SSLError("WRONG_VERSION_NUMBER"),
            "TLS failed: the server does not use TLS at this port",
        ),
        (
            ConnectionError('PostgreSQL server at "10.0.0.1:5" rejected SSL upgrade'),
            "TLS failed: the server does not use TLS at this port",
        ),
        (
            ssl.SSLCertVerificationError("self-signed certificate"),
            "TLS failed: the server's certificate is not trusted here",
        ),
        (
            ssl.SSLCertVerificationError(
                "verify failed: Hostname mismatch, certificate is not valid for 'db.example'. (_ssl.c:1006)"
            ),
            "TLS failed: the server's certificate is for another host name than the one in the settings",
        ),
        (
            ssl.SSLCertVerificationError("verify failed: certificate has expired (_ssl.c:1006)"),
            "TLS failed: the server's certificate has expired",
        ),
        (ssl.SSLError("TLSV1_ALERT_PROTOCOL_VERSION"), "TLS failed"),
    ],
)
async def test_what_the_system_said_of_a_connection_is_told_however_deep_it_lies(
    edge: Edge, cause: OSError, words: str
) -> None:
    async def connect() -> None:
        try:
            raise cause
        except OSError:
            raise TimeoutError("could not connect") from None

    with pytest.raises(Unavailable, match=rf"^mine\.append: no connection was free \({words}\)$"):
        await edge.run("append", connect)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            TimeoutError(),
            "no answer: the server is frozen or overloaded, a firewall blocks .*, or only one side uses TLS",
        ),
        (
            ConnectionResetError(),
            "the server closed the connection: it may expect TLS, or not be this kind of server",
        ),
    ],
)
async def test_what_says_little_by_itself_is_told_only_of_an_attempt_to_open(
    error: OSError, words: str
) -> None:
    edge = edge_with(deadline_s=5.0, meaning=lambda _: (Unavailable, "no connection"))
    with pytest.raises(Unavailable, match=rf"^mine\.open: no connection \({words}\)$"):
        await edge.run("open", lambda: fail(error))
    with pytest.raises(Unavailable, match=r"^mine\.append: no connection$"):
        await edge.run("append", lambda: fail(error))


async def test_a_host_that_cannot_be_reached_is_not_said_to_refuse(edge: Edge) -> None:
    error = TimeoutError()
    error.__cause__ = OSError("Multiple exceptions: [Errno 113] Connect call failed")
    with pytest.raises(Unavailable, match=r"no connection was free$"):
        await edge.run("append", lambda: fail(error))


async def test_of_what_was_perhaps_done_no_cause_is_told(edge: Edge) -> None:
    error = ConnectionResetError()
    error.__cause__ = ConnectionRefusedError()
    with pytest.raises(OutcomeUnknown, match=r"the connection was lost$"):
        await edge.run("append", lambda: fail(error))


async def test_the_clients_own_timeout_is_not_taken_for_the_deadline(edge: Edge) -> None:
    with pytest.raises(Unavailable, match="no connection was free"):
        await edge.run("append", lambda: fail(TimeoutError()))


async def test_an_error_of_ours_and_a_mistake_pass_as_they_are(edge: Edge) -> None:
    ours = TooLarge("entry", size=2, limit=1, backend="mine", operation="append")
    with pytest.raises(TooLarge) as caught:
        await edge.run("append", lambda: fail(ours))
    assert caught.value is ours
    with pytest.raises(ZeroDivisionError):
        await edge.run("append", lambda: fail(ZeroDivisionError()))


class PanicException(BaseException):
    """As an extension in Rust raises it."""


@pytest.mark.parametrize("error", [LookupError, PanicException])
@pytest.mark.parametrize(("before_sending", "kind"), [(True, Unavailable), (False, OutcomeUnknown)])
async def test_what_a_function_within_the_client_raises_is_typed_and_not_quoted(
    error: type[BaseException], before_sending: bool, kind: type[StorageError]
) -> None:
    edge, call = edge_with(deadline_s=5.0, before_sending=lambda _: before_sending), _calling("mine.x", "f")
    with pytest.raises(kind, match=f"a function that it calls, failed .{error.__name__}") as caught:
        await edge.run("append", lambda: call(_raising(error("pin 4711"))))
    assert "4711" not in str(caught.value)


@pytest.mark.parametrize(
    ("driver", "module", "function"),
    [
        ("redis", "redis.asyncio.connection", "connect"),
        ("mongo", "pymongo.asynchronous.pool", "connect"),
        ("mongo", "pymongo.synchronous.auth", "authenticate"),
        ("postgres", "asyncpg.connection", "connect"),
        ("postgres", "asyncpg.pool", "_acquire"),
        ("dynamo", "aiobotocore.signers", "sign"),
        ("dynamo", "botocore.signers", "sign"),
    ],
)
async def test_a_driver_knows_what_its_client_calls_before_it_sends(
    driver: str, module: str, function: str
) -> None:
    before_sending = importlib.import_module(f"stm_backends_{driver}.errors").before_sending
    # A release of the client may rename it.
    assert f"def {function}(" in inspect.getsource(importlib.import_module(module))
    for name, within, expected in (
        (module, function, True),
        (module, "execute", False),
        ("another.pool", function, False),
    ):
        with pytest.raises(LookupError) as caught:
            await _calling(name, within)(_raising(LookupError()))
        assert before_sending(caught.value) is expected


def _calling(module: str, name: str) -> Any:
    """Return a function of another module that calls one."""
    made: dict[str, Any] = {"__name__": module}
    exec(f"async def {name}(function):\n    function()", made)  # noqa: S102 -- a module of another package
    return made[name]


def _raising(error: BaseException) -> Any:
    """Return a function of another package that raises this."""
    module: dict[str, Any] = {"__name__": "program", "error": error}
    exec("def credentials():\n    raise error", module)  # noqa: S102 -- a module of another package
    return module["credentials"]


async def test_an_error_of_configuration_is_not_taken_for_a_value_that_cannot_be_read() -> None:
    edge = edge_with(deadline_s=1, meaning=lambda error: (Corrupt, "no record") if error else None)
    with pytest.raises(ConfigurationError, match="of another kind"):
        await edge.run("open", lambda: fail(ConfigurationError("of another kind")))


async def test_an_error_of_ours_without_a_place_gets_it(edge: Edge) -> None:
    with pytest.raises(Unavailable, match=r"^mine\.append: too many operations$"):
        await edge.run("append", lambda: fail(Unavailable("too many operations")))


async def test_a_call_may_have_its_own_deadline() -> None:
    with pytest.raises(Unavailable, match="no answer within the deadline"):
        await edge_with(deadline_s=60.0).run("open", asyncio.Event().wait, deadline_s=0.01)


async def test_cancellation_between_two_attempts_ends_a_read() -> None:
    failed = asyncio.Event()

    async def failing() -> None:
        failed.set()
        raise ConnectionResetError

    task = asyncio.ensure_future(edge_with(deadline_s=60.0).run("load", failing))
    await failed.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_cancellation_passes_as_it_is(edge: Edge) -> None:
    task = asyncio.ensure_future(edge.run("append", asyncio.Event().wait))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_more_operations_than_places_wait_for_one_another():
    places = ConcurrencyLimit(2, patience_s=5)
    under_way = most = 0

    async def work() -> None:
        nonlocal under_way, most
        async with places:
            under_way += 1
            most = max(most, under_way)
            await asyncio.sleep(0)
            under_way -= 1

    await asyncio.gather(*(work() for _ in range(10)))
    assert most == 2


async def test_who_waits_for_a_place_in_vain_is_told_that_nothing_was_done():
    places = ConcurrencyLimit(1, patience_s=0.02)
    async with places:
        with pytest.raises(Unavailable, match="too many operations in progress; see pool_size"):
            async with places:
                pass
    async with places:
        pass


async def test_draining_waits_for_what_is_under_way():
    places = ConcurrencyLimit(2, patience_s=0.01)
    async with places:
        draining = asyncio.ensure_future(places.drain())
        await asyncio.sleep(0.02)
        assert not draining.done()
    await draining
    with pytest.raises(Unavailable, match="the backend is not open"):
        async with places:
            pass


async def test_whoever_waits_for_a_place_while_others_drain_is_refused_without_waiting():
    places = ConcurrencyLimit(2, patience_s=1e6)

    async def late() -> None:
        async with places:
            pass

    async with places:
        draining = asyncio.ensure_future(places.drain())
        await asyncio.sleep(0)
        waiting = asyncio.ensure_future(late())
        await asyncio.sleep(0)
    await draining
    with pytest.raises(Unavailable, match="the backend is not open"):
        await waiting


async def test_what_comes_after_a_draining_has_begun_does_not_begin():
    places, began = ConcurrencyLimit(2, patience_s=1e6), list[str]()
    ends = {name: asyncio.Event() for name in ("one", "two")}

    async def use(name: str) -> None:
        async with places:
            began.append(name)
            if name in ends:
                await ends[name].wait()

    under_way = [asyncio.ensure_future(use(name)) for name in ends]
    await asyncio.sleep(0)
    draining = asyncio.ensure_future(places.drain())
    await asyncio.sleep(0)
    late = asyncio.ensure_future(use("late"))
    for end in ends.values():
        end.set()
        await asyncio.sleep(0)
    with pytest.raises(Unavailable, match="the backend is not open"):
        await late
    await asyncio.gather(draining, *under_way)
    assert began == ["one", "two"]


async def test_a_draining_that_is_given_up_lets_none_begin():
    places = ConcurrencyLimit(2, patience_s=1e6)
    async with places:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await places.drain()
        with pytest.raises(Unavailable, match="the backend is not open"):
            async with places:
                pass
