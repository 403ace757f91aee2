"""The proxy for authors of backends, in front of a real server that answers line by line."""

from __future__ import annotations

import asyncio
import ssl
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from stm_backends.drivers.in_memory import MemoryDriver
from stm_backends.testing import Bench, Datastore
from stm_backends.testing.faults import Direction, Proxy

PATIENCE_S = 0.2
"""How long a fact is waited for that must not come about."""


class Lines:
    """A server that keeps each line and answers with its number."""

    def __init__(self) -> None:
        self.kept: list[str] = []
        self.ended = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while line := await reader.readline():
                self.kept.append(line.decode().strip())
                writer.write(b"%d\n" % len(self.kept))
                await writer.drain()
        except OSError:
            pass
        finally:
            self.ended += 1
            writer.close()


class Client:
    """One connection, and a request at a time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def send(self, line: str) -> None:
        self.writer.write(f"{line}\n".encode())
        await self.writer.drain()

    async def ask(self, line: str) -> str:
        """Return the answer; a connection that ended in order gives an empty one."""
        await self.send(line)
        return (await self.reader.readline()).decode().strip()


async def until(fact: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while True:
            if fact():
                return
            await asyncio.sleep(0.005)


async def stays_silent(answer: Awaitable[object]) -> bool:
    try:
        await asyncio.wait_for(answer, PATIENCE_S)
    except TimeoutError:
        return True
    return False


@pytest.fixture
async def lines() -> AsyncIterator[tuple[Lines, str]]:
    lines = Lines()
    server = await asyncio.start_server(lines.serve, "127.0.0.1", 0)
    async with server:
        yield lines, f"127.0.0.1:{server.sockets[0].getsockname()[1]}"


@pytest.fixture
async def server(lines: tuple[Lines, str]) -> Lines:
    return lines[0]


@pytest.fixture
async def proxy(lines: tuple[Lines, str]) -> AsyncIterator[Proxy]:
    async with Proxy(lines[1]) as proxy:
        yield proxy


@pytest.fixture
async def connect(proxy: Proxy) -> AsyncIterator[Callable[[], Awaitable[Client]]]:
    clients: list[Client] = []

    async def connect() -> Client:
        clients.append(Client(*await asyncio.open_connection("127.0.0.1", proxy.port)))
        return clients[-1]

    yield connect
    for client in clients:
        client.writer.transport.abort()


Connect = Callable[[], Awaitable[Client]]


async def test_without_a_fault_everything_passes_and_is_counted(proxy: Proxy, connect: Connect) -> None:
    first, second = await connect(), await connect()
    assert [await first.ask("a"), await second.ask("b"), await first.ask("c")] == ["1", "2", "3"]
    assert proxy.address == f"127.0.0.1:{proxy.port}"
    assert (proxy.connections, proxy.accepted) == (2, 2)
    first.writer.close()
    await until(lambda: proxy.connections == 1)
    assert proxy.accepted == 2


async def test_a_cut_resets_connections_and_refuses_new_ones(
    server: Lines, proxy: Proxy, connect: Connect
) -> None:
    client = await connect()
    await client.ask("a")
    async with proxy.cut():
        with pytest.raises(ConnectionResetError):
            await client.reader.readline()
        for _ in range(3):
            with pytest.raises(ConnectionRefusedError):
                await connect()
        async with proxy.cut():
            pass
        with pytest.raises(ConnectionRefusedError):
            await connect()
        assert proxy.connections == 0
    assert await (await connect()).ask("b") == "2"
    assert server.kept == ["a", "b"]


@pytest.mark.parametrize(
    ("direction", "kept"), [(None, ["a"]), ("requests", ["a"]), ("answers", ["a", "b"])], ids=str
)
async def test_a_stall_holds_back_its_direction_until_its_end(
    server: Lines, proxy: Proxy, connect: Connect, direction: Direction | None, kept: list[str]
) -> None:
    client = await connect()
    await client.ask("a")
    async with proxy.stalled(direction):
        answer = asyncio.ensure_future(client.ask("b"))
        assert await stays_silent(asyncio.shield(answer))
        assert server.kept == kept
        await connect()
    assert await answer == "2"


async def test_a_request_sent_into_a_stall_arrives_after_its_client_gave_up(
    server: Lines, proxy: Proxy, connect: Connect
) -> None:
    client, resetting = await connect(), await connect()
    async with proxy.stalled():
        await client.send("late")
        await resetting.send("later")
        await asyncio.sleep(PATIENCE_S)
        client.writer.close()
        resetting.writer.transport.abort()
        assert server.kept == []
    await until(lambda: sorted(server.kept) == ["late", "later"])
    await until(lambda: proxy.connections == 0)


async def test_a_slow_direction_delays_what_passes(proxy: Proxy, connect: Connect) -> None:
    client = await connect()
    async with proxy.slow(0.1), proxy.slow(0.1, "answers"):
        begun = time.monotonic()
        await client.ask("a")
        assert time.monotonic() - begun >= 0.3
    assert await client.ask("b") == "2"


async def test_a_half_open_connection_looks_open_and_says_nothing(
    server: Lines, proxy: Proxy, connect: Connect
) -> None:
    client = await connect()
    await client.ask("a")
    async with proxy.half_open():
        await until(lambda: server.ended == 1)
        assert await stays_silent(client.ask("lost"))
        assert await (await connect()).ask("b") == "2"
    with pytest.raises(ConnectionResetError):
        await client.reader.readline()
    assert server.kept == ["a", "b"]


async def test_a_lost_answer_is_lost_after_the_work_is_done(
    server: Lines, proxy: Proxy, connect: Connect
) -> None:
    client, other = await connect(), await connect()
    lost = proxy.lose_answer(b"dear")
    assert await client.ask("a") == "1"
    assert not lost.happened
    with pytest.raises(ConnectionResetError):
        await other.ask("dear b")
    assert lost.happened
    assert server.kept == ["a", "dear b"]
    assert await client.ask("dear c") == "3"


async def test_the_answers_to_skip_pass_before_one_is_lost(proxy: Proxy, connect: Connect) -> None:
    client = await connect()
    lost = proxy.lose_answer(b"begin", skip=2)
    assert [await client.ask("begin"), await client.ask("insert")] == ["1", "2"]
    with pytest.raises(ConnectionResetError):
        await client.ask("commit")
    assert lost.happened


async def test_a_cancelled_loss_loses_nothing(proxy: Proxy, connect: Connect) -> None:
    lost = proxy.lose_answer()
    lost.cancel()
    assert await (await connect()).ask("a") == "1"
    assert not lost.happened


async def test_an_answer_is_held_back_while_others_act(server: Lines, proxy: Proxy, connect: Connect) -> None:
    client, other = await connect(), await connect()
    held = proxy.hold_answer(b"dear")
    assert await other.ask("a") == "1"
    paused = asyncio.ensure_future(client.ask("dear b"))
    await until(lambda: held.happened)
    assert server.kept == ["a", "dear b"]
    assert await stays_silent(asyncio.shield(paused))
    assert [await other.ask("c"), await other.ask("dear d")] == ["3", "4"]
    assert held.followed == 1
    held.release()
    held.release()
    assert await paused == "2"
    assert await client.ask("dear e") == "5"


async def test_the_answers_to_skip_pass_before_one_is_held(proxy: Proxy, connect: Connect) -> None:
    client, other = await connect(), await connect()
    held = proxy.hold_answer(b"dear", skip=2)
    assert [await client.ask("dear a"), await other.ask("dear b")] == ["1", "2"]
    paused = asyncio.ensure_future(client.ask("commit"))
    await until(lambda: held.happened)
    held.release()
    assert await paused == "3"


async def test_what_is_released_before_it_comes_is_not_held(proxy: Proxy, connect: Connect) -> None:
    held = proxy.hold_answer()
    held.release()
    assert await (await connect()).ask("a") == "1"
    assert not held.happened


async def test_the_end_of_a_proxy_ends_what_it_holds(lines: tuple[Lines, str]) -> None:
    async with Proxy(lines[1]) as proxy:
        held = proxy.hold_answer()
        client = Client(*await asyncio.open_connection("127.0.0.1", proxy.port))
        paused = asyncio.ensure_future(client.ask("a"))
        await until(lambda: held.happened)
    with pytest.raises(ConnectionResetError):
        await paused


async def test_a_client_that_begins_tls_is_noticed(proxy: Proxy, connect: Connect) -> None:
    await (await connect()).ask("\x16\x03 is how text may begin, too")
    assert not proxy.encrypted
    with pytest.raises((OSError, TimeoutError)):
        async with asyncio.timeout(1):
            await asyncio.open_connection("127.0.0.1", proxy.port, ssl=ssl.create_default_context())
    assert proxy.encrypted


async def test_a_proxy_can_lead_to_another_server(proxy: Proxy, connect: Connect) -> None:
    successor = Lines()
    async with await asyncio.start_server(successor.serve, "127.0.0.1", 0) as listening:
        present = await connect()
        await present.ask("a")
        proxy.lead_to(f"127.0.0.1:{listening.sockets[0].getsockname()[1]}")
        client = await connect()
        await client.ask("b")
        assert successor.kept == ["b"]
        assert await present.ask("c") == "2"
        client.writer.transport.abort()
        await until(lambda: successor.ended == 1)


async def test_a_fault_ends_when_whoever_caused_it_is_cancelled(proxy: Proxy, connect: Connect) -> None:
    begun = asyncio.Event()

    async def cause() -> None:
        async with proxy.cut():
            begun.set()
            await asyncio.Event().wait()

    causing = asyncio.ensure_future(cause())
    await begun.wait()
    causing.cancel()
    await asyncio.gather(causing, return_exceptions=True)
    assert await (await connect()).ask("a") == "1"


async def test_a_server_that_is_away_resets_clients() -> None:
    async with Proxy("127.0.0.1:1") as proxy:

        async def read() -> bytes:
            reader, _ = await asyncio.open_connection("127.0.0.1", proxy.port)
            return await reader.read()

        with pytest.raises(ConnectionResetError):
            await read()
        await until(lambda: proxy.connections == 0)


def test_an_address_without_a_port_is_refused() -> None:
    with pytest.raises(ValueError, match="host:port, not 'localhost'"):
        Proxy("localhost")


class NeverCloses(MemoryDriver):
    """Waits for ever when it is to close, and says that it does."""

    closing = asyncio.Event()

    async def close(self) -> None:
        self.closing.set()
        await asyncio.Event().wait()


async def test_a_check_that_is_cancelled_while_it_tidies_up_ends_its_proxy() -> None:
    async def open_one(address: str = "") -> MemoryDriver:
        del address
        driver = NeverCloses()
        await driver.open()
        return driver

    async def work() -> None:
        async with Bench(Datastore(open=open_one, address="127.0.0.1:1", through=open_one)) as bench:
            await bench.driver()
            bench.proxy()

    before = threading.active_count()
    working = asyncio.create_task(work())
    await NeverCloses.closing.wait()
    assert threading.active_count() == before + 1
    working.cancel()
    with pytest.raises(asyncio.CancelledError):
        await working
    assert threading.active_count() == before
