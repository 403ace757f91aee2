"""Real servers for tests: each a process of ours, on a free port of the loopback, with its own directory."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path

START_S = 60.0
"""How long a server may take to answer, on a machine that is busy with other tests."""


_PORTS = range(11_000, 21_000)
"""Below those that a system gives to connections, one of which may take a port before its server does.

The second port of a Redis Cluster's node is 10,000 higher. It is below them too, and no server's first port.
"""


def free_port() -> int:
    """Return a port that is not in use, at random, because other processes look for one at the same time."""
    while True:
        port = random.SystemRandom().choice(_PORTS)
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port


class Server:
    """A server process that can be killed and started again on the same data.

    `is_ready` is asked until it says so or raises no more; what it raises last is what a failed start shows,
    beside the end of the server's own output. `user` is whom it runs as, for servers that refuse root.
    """

    def __init__(
        self,
        command: Sequence[str | Path],
        directory: Path,
        is_ready: Callable[[], object],
        *,
        environment: Mapping[str, str] | None = None,
        user: str | None = None,
    ) -> None:
        self._command = [str(part) for part in command]
        self._directory = directory
        self._is_ready = is_ready
        self._environment = {**os.environ, **(environment or {})}
        self._log = directory / f"{Path(self._command[0]).name}.log"
        self._user = user
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the process and wait until the server answers."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                cwd=self._directory,
                stdout=log,
                stderr=log,
                env=self._environment,
                user=self._user,
                group=self._user,
                extra_groups=[] if self._user else None,
            )
        if problem := self._wait():
            tail = self._log.read_text("utf-8", "replace")[-2000:]
            self.stop()
            raise RuntimeError(f"{self._command[0]} did not start: {problem}\n{tail}")

    def recover(self) -> None:
        """Wait until a server that was in trouble answers again, and start it if it gave up."""
        if self._process is None or self._wait():
            self.kill()
            self.start()

    def _wait(self) -> str | None:
        """Return nothing once the server answers, or why it does not: it has ended, or takes too long."""
        assert self._process is not None
        until, problem = time.monotonic() + START_S, "it has ended"
        while self._process.poll() is None and time.monotonic() < until:
            try:
                if self._is_ready() is not False:
                    return None
                problem = "it is not ready"
            except Exception as error:  # noqa: BLE001 -- whatever a client raises while nobody listens yet
                problem = repr(error)
            time.sleep(0.05)
        return problem

    def kill(self) -> None:
        """End the process as a power cut would: SIGKILL, with nothing flushed."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """Shut the process down in order; a second call is a no-op."""
        self._end(signal.SIGTERM)

    def pause(self) -> None:
        """Let the process hang: it holds its connections and answers nothing."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        await_stopped(self._process.pid)

    def go_on(self) -> None:
        """Resume a paused process."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def _end(self, how: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(how)
        process.send_signal(signal.SIGCONT)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class Proxy:
    """A TCP proxy on the loopback that can be cut off, and can fall silent in the middle of an answer.

    It runs in a thread with a loop of its own, because every check of a suite has another loop. With `tls` it
    speaks TLS to clients, for servers that were built without.
    """

    def __init__(self, host: str, port: int, *, tls: ssl.SSLContext | None = None) -> None:
        self._upstream = host, port
        self._tls = tls
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._writers: set[asyncio.StreamWriter] = set()
        self._is_cut = False
        self._delay_s = 0.0
        self._flowing = {"to server": asyncio.Event(), "to client": asyncio.Event()}
        self.port = 0

    def start(self) -> None:
        """Listen; `port` says where."""
        self._thread.start()
        self._call(self._start())

    def stop(self) -> None:
        """Close everything and end the thread."""
        self._call(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def cut(self) -> None:
        """Reset every connection, and each new one at once."""
        self._call(self._set(cut=True))

    def silence(self, *directions: str) -> None:
        """Hold back the data of the named directions (`to server`, `to client`); none means both."""
        self._call(self._set(cut=False, silent=directions or tuple(self._flowing)))

    def slow_down(self, delay_s: float) -> None:
        """Delay all data."""
        self._call(self._set(cut=False, delay_s=delay_s))

    def lead_to(self, port: int) -> None:
        """Lead new connections to another port of the host; existing connections stay."""
        self._upstream = self._upstream[0], port

    def restore(self) -> None:
        """Let all data pass again, including what was held back."""
        self._call(self._set(cut=False))

    @contextlib.asynccontextmanager
    async def outage(self) -> AsyncIterator[None]:
        """Cut the datastore off for as long as the context lasts."""
        self.cut()
        try:
            yield
        finally:
            self.restore()

    def _call(self, work: object) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(30)  # type: ignore[arg-type]

    async def _start(self) -> None:
        for event in self._flowing.values():
            event.set()
        self._server = await self._listen()
        self.port = self._server.sockets[0].getsockname()[1]

    async def _listen(self) -> asyncio.Server:
        return await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self._tls)

    async def _stop(self) -> None:
        self._server.close()
        self._abort_all()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _set(self, *, cut: bool, silent: Sequence[str] = (), delay_s: float = 0.0) -> None:
        self._is_cut, self._delay_s = cut, delay_s
        if cut:
            self._abort_all()
        for direction, event in self._flowing.items():
            if direction in silent:
                event.clear()
            else:
                event.set()

    def _abort_all(self) -> None:
        for writer in self._writers:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._is_cut:
            writer.transport.abort()
            return
        try:
            up_reader, up_writer = await asyncio.open_connection(*self._upstream)
        except OSError:
            writer.transport.abort()
            return
        pair = {writer, up_writer}
        self._writers |= pair
        try:
            passing = [
                asyncio.ensure_future(self._pass(reader, up_writer, "to server")),
                asyncio.ensure_future(self._pass(up_reader, writer, "to client")),
            ]
            await asyncio.wait(passing, return_when=asyncio.FIRST_COMPLETED)
            for task in passing:
                task.cancel()
            await asyncio.gather(*passing, return_exceptions=True)
        except asyncio.CancelledError:
            # By `stop`; asyncio's streams would log it as an error.
            for task in passing:
                task.cancel()
        finally:
            self._writers -= pair
            for one in pair:
                one.transport.abort()

    async def _pass(self, source: asyncio.StreamReader, target: asyncio.StreamWriter, direction: str) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(65536):
                await asyncio.sleep(self._delay_s)
                await self._flowing[direction].wait()
                target.write(data)
                await target.drain()


def await_stopped(process: int) -> None:
    """Wait until each thread of a process has stopped: a signal is only sent when `kill` returns."""
    until = time.monotonic() + 5
    while time.monotonic() < until:
        with contextlib.suppress(OSError):
            threads = Path(f"/proc/{process}/task").glob("*/stat")
            if all(stat.read_text().rpartition(")")[2].split()[0] == "T" for stat in threads):
                return
        time.sleep(0.005)
