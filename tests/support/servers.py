"""Real servers for tests: each a process of ours, on a free port of the loopback, with its own directory."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
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
            tail = self._tail()
            self.stop()
            raise RuntimeError(f"{self._command[0]} did not start: {problem}\n{tail}")

    def last_words(self) -> str | None:
        """Return the end of the server's output if it has ended by itself."""
        assert self._process is not None
        if self._process.poll() is None:
            return None
        return f"{self._command[0]} ended with {self._process.returncode}:\n{self._tail()}"

    def _tail(self) -> str:
        return self._log.read_text("utf-8", "replace")[-2000:]

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


def await_stopped(process: int) -> None:
    """Wait until each thread of a process has stopped or ended: a signal is only sent when `kill` returns."""
    until = time.monotonic() + 5
    while time.monotonic() < until:
        with contextlib.suppress(OSError):
            threads = Path(f"/proc/{process}/task").glob("*/stat")
            if all(stat.read_text().rpartition(")")[2].split()[0] in "TZ" for stat in threads):
                return
        time.sleep(0.005)
