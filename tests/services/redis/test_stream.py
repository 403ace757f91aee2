"""The connection that concurrent commands share, on a scripted server and on real ones."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from typing import Any

import hiredis
import pytest
from redis import exceptions as client_errors
from redis.asyncio import BlockingConnectionPool, ConnectionPool, Redis
from redis.asyncio.connection import Connection
from redis.credentials import CredentialProvider

from stm_backends.drivers.contract import Key
from stm_backends.errors import StorageError
from stm_backends.testing import open_at
from stm_backends_redis import RedisDriver
from stm_backends_redis import stream as stream_module
from stm_backends_redis.errors import NotConnected
from stm_backends_redis.servers import Server
from stm_backends_redis.stream import LARGE, MAX_OUTSTANDING, Stream
from tests.mutants.redis import AnswersTheNextCaller, WritesTwice
from tests.services.redis.test_faults import KEY
from tests.support.places import quick_on
from tests.support.redis_server import KINDS, NO_PERSISTENCE, RedisServer


class Session(asyncio.Protocol):
    """A connection to the scripted server. It answers the greeting of the client library by itself."""

    def __init__(self, server: ScriptedServer) -> None:
        self.server = server
        self.commands: list[tuple[bytes, ...]] = []
        self.packets: list[list[tuple[bytes, ...]]] = []
        self.is_lost = False
        self._reader = hiredis.Reader()

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self._reader.feed(data)
        packet: list[tuple[bytes, ...]] = []
        while (command := self._reader.gets()) is not False:
            if command[0] == b"PING":
                self.transport.write(b"+PONG\r\n")
            elif command[0] == b"CLIENT":
                self.transport.write(b"+OK\r\n")
            elif command[0] == b"HELLO":
                self.transport.write(b"%1\r\n$5\r\nproto\r\n:3\r\n")
            else:
                packet.append(tuple(command))
        if packet:
            self.packets.append(packet)
            self.commands += packet
        self.server.changed.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_lost = True
        self.server.changed.set()

    def answer(self, *texts: bytes) -> None:
        self.transport.write(b"".join(b"$%d\r\n%s\r\n" % (len(text), text) for text in texts))


class ScriptedServer:
    """Collects commands, and answers when a test says so."""

    def __init__(self) -> None:
        self.sessions: list[Session] = []
        self.changed = asyncio.Event()
        self.port = 0

    def connect(self) -> Session:
        self.sessions.append(Session(self))
        return self.sessions[-1]

    async def until(self, is_so) -> None:
        async with asyncio.timeout(30):
            while not is_so():
                self.changed.clear()
                await self.changed.wait()

    async def has_received(self, count: int, *, session: int = 0) -> Session:
        """Return a session once it has received so many commands."""
        await self.until(
            lambda: len(self.sessions) > session and len(self.sessions[session].commands) >= count
        )
        return self.sessions[session]


@pytest.fixture
async def server() -> AsyncIterator[ScriptedServer]:
    scripted = ScriptedServer()
    listening = await asyncio.get_running_loop().create_server(scripted.connect, "127.0.0.1", 0)
    scripted.port = listening.sockets[0].getsockname()[1]
    yield scripted
    listening.close()


@pytest.fixture
async def pool(server) -> AsyncIterator[ConnectionPool]:
    pool = ConnectionPool(host="127.0.0.1", port=server.port, protocol=2, socket_timeout=None)
    yield pool
    await pool.aclose()


@pytest.fixture
async def stream(pool) -> AsyncIterator[Stream]:
    stream = Stream(pool, silence_s=30)
    yield stream
    async with asyncio.timeout(30):
        await stream.close()


def send(stream: Stream, *command: bytes, asking: bool = False) -> asyncio.Future[Any]:
    answer = stream.send(command, asking=asking)
    assert answer is not None
    return answer


async def warm(stream: Stream, server: ScriptedServer) -> None:
    """Connect, and have two commands answered, so that the next ones are written together."""
    answers = [send(stream, b"WARM"), send(stream, b"WARM")]
    (await server.has_received(2)).answer(b"", b"")
    await asyncio.gather(*answers)
    server.sessions[0].commands.clear()
    server.sessions[0].packets.clear()


async def test_commands_of_one_turn_share_packets_and_are_answered_in_order(server, stream):
    await warm(stream, server)
    answers = [send(stream, b"GET", b"%d" % number) for number in range(stream_module.PACKET)]
    session = await server.has_received(len(answers))
    assert len(session.packets) == 1
    answers += [send(stream, b"GET", b"%d" % number) for number in range(len(answers), 100)]
    await server.has_received(100)
    assert [command[1] for command in session.commands] == [b"%d" % number for number in range(100)]
    session.answer(*(command[1] for command in session.commands))
    assert await asyncio.gather(*answers) == [b"%d" % number for number in range(100)]
    assert len(server.sessions) == 1


async def test_a_command_cancelled_before_the_write_is_never_sent(server, stream):
    for _ in range(2):  # while the stream connects, and once it is connected
        first, second, third = (
            send(stream, name, asking=name == b"FIRST") for name in (b"FIRST", b"SECOND", b"THIRD")
        )
        first.cancel()
        session = await server.has_received(2)
        session.answer(b"second", b"third")
        assert await asyncio.gather(second, third) == [b"second", b"third"]
        assert session.commands == [(b"SECOND",), (b"THIRD",)]
        session.commands.clear()


async def test_a_command_cancelled_after_the_write_keeps_its_place(server, stream):
    await warm(stream, server)
    first, second, third = (send(stream, name) for name in (b"FIRST", b"SECOND", b"THIRD"))
    session = await server.has_received(3)
    second.cancel()
    session.answer(b"first", b"second", b"third")
    assert await first == b"first"
    assert await third == b"third"


async def test_what_was_written_when_the_connection_broke_is_not_sent_again(server, stream):
    await warm(stream, server)
    written = [send(stream, b"WRITTEN", b"%d" % number) for number in range(3)]
    session = await server.has_received(3)
    session.answer(b"done")
    assert await written[0] == b"done"
    session.transport.abort()
    failed = asyncio.gather(*written[1:], return_exceptions=True)
    received = asyncio.create_task(server.has_received(1, session=1))
    await asyncio.wait([failed, received], return_when=asyncio.FIRST_COMPLETED)
    assert not received.done(), "nothing else was to be sent"
    assert all(isinstance(error, client_errors.ConnectionError) for error in await failed)
    following = send(stream, b"FOLLOWING")
    session = await received
    session.answer(b"following")
    assert await following == b"following"
    assert session.commands == [(b"FOLLOWING",)]


async def test_what_waits_when_the_connection_breaks_goes_out_on_the_next(monkeypatch, server, stream):
    await warm(stream, server)
    written = send(stream, b"WRITTEN"), send(stream, b"WRITTEN")
    session = await server.has_received(2)
    waiting: list[asyncio.Future[Any]] = []

    def ends(line: stream_module.Line) -> None:
        """Ask for commands that are to be written when the connection is about to close."""
        waiting.extend(send(stream, b"WAITING", b"%d" % number) for number in range(2))
        send(stream, b"CANCELLED").cancel()

    monkeypatch.setattr(stream_module.Line, "eof_received", ends)
    session.transport.close()
    following = await server.has_received(2, session=1)
    following.answer(b"0", b"1")
    assert await asyncio.gather(*waiting) == [b"0", b"1"]
    assert following.commands == [(b"WAITING", b"0"), (b"WAITING", b"1")]
    assert len(session.commands) == 2
    for answer in written:
        assert isinstance(answer.exception(), client_errors.ConnectionError)


async def test_a_connection_without_answers_is_given_up(monkeypatch, server, pool):
    stream = Stream(pool, silence_s=0.05)
    silent = send(stream, b"SILENT")
    with pytest.raises(client_errors.ConnectionError, match="did not answer"):
        await silent
    await server.until(lambda: server.sessions[0].is_lost)
    monkeypatch.setattr(stream, "_silence_s", 30)
    again = send(stream, b"AGAIN")
    (await server.has_received(1, session=1)).answer(b"again")
    assert await again == b"again"
    await stream.close()


async def test_a_command_that_was_cancelled_still_has_to_be_answered(server, pool):
    stream = Stream(pool, silence_s=0.05)
    silent = send(stream, b"SILENT")
    await server.has_received(1)
    silent.cancel()
    await server.until(lambda: server.sessions[0].is_lost)
    await stream.close()


async def test_parts_of_answers_are_no_answers(server, pool):
    stream = Stream(pool, silence_s=0.2)
    answer = send(stream, b"SLOW")
    session = await server.has_received(1)

    async def trickle() -> None:
        session.transport.write(b"$1000000\r\n")
        while not session.is_lost:
            session.transport.write(b"x")
            await asyncio.sleep(0.01)

    async with asyncio.timeout(30):
        await trickle()
    with pytest.raises(client_errors.ConnectionError, match="did not answer"):
        await answer
    await stream.close()


async def test_closing_waits_for_answers_and_leaves_nothing(server, pool):
    tasks = asyncio.all_tasks()
    stream = Stream(pool, silence_s=30)
    answers = [send(stream, b"ONE"), send(stream, b"TWO")]
    closing = asyncio.create_task(stream.close())
    session = await server.has_received(2)
    assert not closing.done()
    answers[1].cancel()
    session.answer(b"one")
    await closing
    assert await answers[0] == b"one"
    await server.until(lambda: session.is_lost)
    assert asyncio.all_tasks() == tasks
    assert pool.can_get_connection()
    connection = await pool.get_connection()
    assert len(server.sessions) == 2, "the connection came back, disconnected"
    await pool.release(connection)


async def test_closing_with_a_cancelled_command_leaves_nothing(server, pool):
    stream = Stream(pool, silence_s=30)
    await warm(stream, server)
    send(stream, b"CANCELLED").cancel()
    await stream.close()
    await server.until(lambda: server.sessions[0].is_lost)
    connection = await pool.get_connection()
    assert len(server.sessions) == 2, "the connection came back, disconnected, and there is no other"
    await pool.release(connection)


async def test_a_close_that_is_cancelled_leaves_no_connection(start):
    server = start()

    def connections():
        return server.ask("INFO", "clients")["connected_clients"]

    before = connections()
    driver = await open_at(server.url)
    server.pause()
    loading = asyncio.create_task(driver.load(KEY))
    closing = asyncio.create_task(driver.close())
    await asyncio.sleep(0.1)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    server.go_on()
    await asyncio.gather(loading, return_exceptions=True)
    async with asyncio.timeout(30):
        while connections() != before:  # noqa: ASYNC110 -- the server tells nobody
            await asyncio.sleep(0.05)


async def test_closing_the_client_ends_the_stream_too(server):
    client = Redis(host="127.0.0.1", port=server.port, protocol=2)
    stream = Stream(client.connection_pool, silence_s=30)
    await warm(stream, server)
    async with asyncio.timeout(3):  # it would wait this long for a connection that does not say it is closed
        await client.aclose()
    await server.until(lambda: server.sessions[0].is_lost)
    await stream.close()


async def test_asking_goes_directly_before_its_command(server, stream):
    await warm(stream, server)
    answers = [send(stream, b"GET", b"%d" % number, asking=number == 1) for number in range(3)]
    session = await server.has_received(4)
    assert [command[0] for command in session.commands] == [b"GET", b"ASKING", b"GET", b"GET"]
    session.answer(b"0", b"OK", b"1", b"2")
    assert await asyncio.gather(*answers) == [b"0", b"1", b"2"]


async def test_large_commands_share_no_connection(server, stream):
    assert stream.send((b"SET", b"key", b"x" * LARGE)) is None
    small = send(stream, b"GET", b"key")
    (await server.has_received(1)).answer(b"small")
    assert await small == b"small"


async def test_no_more_than_so_many_bytes_wait_for_answers(server, stream):
    value = b"x" * (LARGE // 2)
    answers = []
    while (answer := stream.send((b"SET", b"key", value))) is not None:
        answers.append(answer)
    assert MAX_OUTSTANDING - LARGE < len(answers) * len(value) < MAX_OUTSTANDING
    session = await server.has_received(len(answers))
    assert stream.send((b"SET", b"key", value)) is None
    session.answer(*(b"OK" for _ in answers))
    await asyncio.gather(*answers)
    answers = [send(stream, b"SET", b"key", value)]
    (await server.has_received(len(session.commands))).answer(b"OK")
    await asyncio.gather(*answers)


async def test_errors_of_the_server_are_answers_of_one_caller(server, stream):
    await warm(stream, server)
    answers = [send(stream, b"ONE"), send(stream, b"TWO"), send(stream, b"THREE")]
    session = await server.has_received(3)
    session.transport.write(b"-NOSCRIPT No matching script.\r\n-MOVED 1 127.0.0.1:7000\r\n*1\r\n$1\r\nx\r\n")
    first, second, third = await asyncio.gather(*answers)
    assert type(first) is client_errors.NoScriptError
    assert (type(second), second.port) == (client_errors.MovedError, 7000)
    assert third == [b"x"]


async def test_a_refused_login_ends_the_connection_after_its_answers(server, stream):
    await warm(stream, server)
    answers = [send(stream, b"ONE"), send(stream, b"TWO")]
    session = await server.has_received(2)
    session.transport.write(b"-NOAUTH Authentication required.\r\n")
    with pytest.raises(client_errors.AuthenticationError):
        await answers[0]
    following = send(stream, b"FOLLOWING")
    (await server.has_received(1, session=1)).answer(b"following")
    assert await following == b"following"
    assert not session.is_lost
    session.answer(b"two")
    assert await answers[1] == b"two"
    await server.until(lambda: session.is_lost)


async def test_a_late_answer_of_a_replica_leaves_the_next_connection_alone(server):
    client = Redis(port=server.port, protocol=2, socket_timeout=None)
    connected = Server(client, silence_s=30)

    def ask(word: bytes) -> asyncio.Future[Any]:
        return asyncio.ensure_future(connected.exchange(b"key", (word,)))

    one, two = ask(b"ONE"), ask(b"TWO")
    replica = await server.has_received(2)
    replica.transport.write(b"-READONLY You can't write against a read only replica.\r\n")
    assert type((await one)[0]) is client_errors.ReadOnlyError
    three = ask(b"THREE")
    (await server.has_received(1, session=1)).answer(b"three")
    assert await three == [b"three"]
    replica.transport.write(b"-READONLY You can't write against a read only replica.\r\n")
    assert type((await two)[0]) is client_errors.ReadOnlyError
    four = ask(b"FOUR")
    (await server.has_received(2, session=1)).answer(b"four")
    assert await four == [b"four"]
    five = ask(b"FIVE")
    (await server.has_received(3, session=1)).transport.write(b"-READONLY again\r\n")
    assert type((await five)[0]) is client_errors.ReadOnlyError
    six = ask(b"SIX")
    (await server.has_received(1, session=2)).answer(b"six")
    assert await six == [b"six"], "an answer to a later write does replace the connection"
    await connected.close()
    await client.aclose()


async def test_what_is_not_from_redis_fails_everything_that_waits(server, stream):
    await warm(stream, server)
    answers = [send(stream, b"ONE"), send(stream, b"TWO")]
    (await server.has_received(2)).transport.write(b"HTTP/1.1 400 Bad Request\r\n")
    for answer in answers:
        with pytest.raises(client_errors.InvalidResponse):
            await answer


async def test_an_answer_to_no_command_ends_the_connection(server, stream):
    await warm(stream, server)
    session = server.sessions[0]
    session.answer(b"surplus")
    await server.until(lambda: session.is_lost)
    following = send(stream, b"FOLLOWING")
    (await server.has_received(1, session=1)).answer(b"following")
    assert await following == b"following"


async def test_notifications_are_no_answers(server):
    pool = ConnectionPool(host="127.0.0.1", port=server.port, protocol=3)
    stream = Stream(pool, silence_s=30)
    answers = [send(stream, b"ONE"), send(stream, b"TWO")]
    session = await server.has_received(2)
    session.transport.write(b">2\r\n$10\r\ninvalidate\r\n*1\r\n$1\r\nx\r\n")
    session.answer(b"one")
    session.transport.write(b">2\r\n$6\r\nMOVING\r\n:1\r\n")
    assert await answers[0] == b"one"
    following = send(stream, b"FOLLOWING")
    (await server.has_received(1, session=1)).answer(b"following")
    session.answer(b"two")
    assert await asyncio.gather(answers[1], following) == [b"two", b"following"]
    await stream.close()
    await pool.aclose()


async def test_a_connection_idle_beyond_the_health_check_is_not_used(monkeypatch, server):
    pool = ConnectionPool(host="127.0.0.1", port=server.port, protocol=2, health_check_interval=3600)
    stream = Stream(pool, silence_s=30)
    await warm(stream, server)
    loop = asyncio.get_running_loop()
    now = loop.time
    with monkeypatch.context() as later:
        later.setattr(loop, "time", lambda: now() + 3601)
        following = send(stream, b"FOLLOWING")
    (await server.has_received(1, session=1)).answer(b"following")
    assert await following == b"following"
    await stream.close()
    await pool.aclose()


async def test_without_a_connection_nothing_was_sent(unused_port):
    stream = Stream(ConnectionPool(host="127.0.0.1", port=unused_port), silence_s=30)
    for answer in [send(stream, b"ONE"), send(stream, b"TWO")]:
        with pytest.raises(NotConnected):
            await answer
    await stream.close()


async def test_a_connection_that_cannot_be_opened_in_time_is_given_up(monkeypatch, server, pool):
    stream = Stream(pool, silence_s=0.05)
    with monkeypatch.context() as patch:
        patch.setattr(pool, "get_connection", asyncio.Event().wait)
        async with asyncio.timeout(5):
            with pytest.raises(NotConnected):
                await send(stream, b"ONE")
    monkeypatch.setattr(stream, "_silence_s", 30)
    again = send(stream, b"AGAIN")
    (await server.has_received(1)).answer(b"again")
    assert await again == b"again"
    await stream.close()


@pytest.mark.parametrize(
    ("mutant", "test"),
    [
        (AnswersTheNextCaller, test_a_command_cancelled_after_the_write_keeps_its_place),
        (WritesTwice, test_what_was_written_when_the_connection_broke_is_not_sent_again),
    ],
)
async def test_each_broken_stream_is_rejected(monkeypatch, server, pool, mutant, test):
    monkeypatch.setattr(stream_module, "Line", mutant)
    with pytest.raises(AssertionError):
        await test(server, Stream(pool, silence_s=30))


# On real servers


@pytest.fixture(scope="module", params=quick_on("", KINDS))
def real(request, obtained, tmp_path_factory):
    """A server of each kind."""
    program = obtained(request.param)
    folder = tmp_path_factory.mktemp("streams")
    server = RedisServer(program.path, folder, *NO_PERSISTENCE, environment=program.environment)
    server.start()
    yield server
    server.stop()


async def test_each_answer_is_its_callers_despite_kills_and_cancellations(real):
    choices = random.Random(12)
    driver = await open_at(real.url)
    real.ask("FLUSHALL")
    acknowledged: dict[int, set[bytes]] = {}
    unknown: dict[int, set[bytes]] = {}
    finished = asyncio.Event()

    async def converse(writer: int) -> None:
        key = Key(f"writer{writer}", "conversation")
        done, lost = acknowledged.setdefault(writer, set()), unknown.setdefault(writer, set())
        for number in range(120):
            entry = b"%d:%d" % (writer, number)
            if choices.random() < 0.5:
                call = asyncio.ensure_future(driver.load(key))
            else:
                call = asyncio.ensure_future(driver.append(key, entry, initial_version="v", ttl=None))
                lost.add(entry)
            if choices.random() < 0.2:
                for _ in range(choices.randrange(4)):
                    await asyncio.sleep(0)
                call.cancel()
            try:
                answer = await call
            except (StorageError, asyncio.CancelledError):
                continue
            if isinstance(answer, int):
                lost.discard(entry)
                done.add(entry)
                assert len(done) <= answer <= len(done) + len(lost)
            elif answer is not None:
                assert all(one.startswith(b"%d:" % writer) for one in answer.tail), "another's record"
                assert len(set(answer.tail)) == len(answer.tail), "written twice"
                assert done <= set(answer.tail) <= done | lost

    async def kill() -> None:
        while not finished.is_set():
            await asyncio.to_thread(real.ask, "CLIENT", "KILL", "TYPE", "normal")
            await asyncio.sleep(choices.uniform(0.01, 0.05))

    killing = asyncio.create_task(kill())
    try:
        async with asyncio.TaskGroup() as tasks:
            for writer in range(24):
                tasks.create_task(converse(writer))
    finally:
        finished.set()
        await asyncio.wait([killing])
    for writer, done in acknowledged.items():
        record = await driver.load(Key(f"writer{writer}", "conversation"))
        tail = list(record.tail) if record else []
        assert len(set(tail)) == len(tail), "written twice"
        assert done <= set(tail) <= done | unknown[writer]
    await driver.close()


class Custom(Connection):
    """Another program's connection."""


@pytest.mark.parametrize(
    "make",
    [
        lambda port: Redis(port=port, max_connections=1),
        lambda port: Redis(port=port, single_connection_client=True),
        lambda port: Redis.from_pool(BlockingConnectionPool(port=port, max_connections=1, timeout=5)),
        lambda port: Redis.from_pool(ConnectionPool(Custom, port=port, max_connections=1)),
    ],
    ids=["one connection", "a single connection", "a pool that waits", "a class of its own"],
)
async def test_no_connection_is_kept_from_a_client_that_cannot_spare_one(real, make):
    async with make(real.port) as client:
        driver = RedisDriver(client=client)
        for number in range(3):
            await driver.append(Key(KEY.scope, f"spared{number}"), b"a", initial_version="v", ttl=60)
            assert await client.ping()
        await driver.close()


class Hanging:
    """A pool without credentials, whose idle connections do not end when they are closed."""

    attempts = 0

    async def get_connection(self):
        self.attempts += 1
        raise LookupError("no credentials")

    async def disconnect(self, inuse_connections=True):
        assert not inuse_connections
        await asyncio.Event().wait()


async def test_commands_without_credentials_do_not_wait_for_idle_connections():
    pool = Hanging()
    stream = Stream(pool, silence_s=0.1)
    for attempt in (1, 2):
        with pytest.raises(LookupError):
            await asyncio.wait_for(stream.send(("GET", "k")), 20)
        assert pool.attempts == attempt
    await stream.close()


class Rotating(CredentialProvider):
    """A password that changes."""

    password = "first"  # noqa: S105 -- of a server on the loopback

    def get_credentials(self) -> tuple[str]:
        return (self.password,)


async def test_a_new_password_is_used_by_the_next_connection(real):
    provider = Rotating()
    real.ask("CONFIG", "SET", "requirepass", provider.password)

    async def ask(*command: str) -> None:
        async with Redis(port=real.port, password=provider.password) as administrator:
            with contextlib.suppress(client_errors.ConnectionError):
                await administrator.execute_command(*command)

    async with Redis(port=real.port, credential_provider=provider, client_name="ours") as client:
        driver = RedisDriver(client=client)
        await driver.append(KEY, b"a", initial_version="v", ttl=60)
        await ask("CONFIG", "SET", "requirepass", "second")
        provider.password = "second"  # noqa: S105
        await ask("CLIENT", "KILL", "TYPE", "normal")
        assert (await driver.load(KEY)).tail == (b"a",)
        names = [one["name"] for one in await client.client_list()]
        assert names.count("ours") == 2, "the stream's and the client's"
        await driver.delete(KEY)
        await driver.close()
        await ask("CONFIG", "SET", "requirepass", "")
