"""Ends a run that its event loop cannot end: a driver blocks the loop, or one of its threads never ends."""

from __future__ import annotations

import faulthandler
import os
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Final

from stm_backends.testing.workbench.processes import kill_workers

STUCK_S: Final = 60.0
"""Seconds after a limit until the event loop counts as stuck. Tidying up takes some of them."""

_STEPS: Final = 60

_STATUS: Final = 1


class Watchdog:
    """Ends the process, with the reason, if the watched work does not end. Watches one thing at a time."""

    def __init__(self) -> None:
        self._stderr = 2
        self._over = threading.Event()
        self._left = _STEPS

    def keep_stderr(self) -> Callable[[], None]:
        """Keep the current standard error, because pytest captures it; returns a function to release it."""
        before, kept = self._stderr, os.dup(2)
        self._stderr = kept

        def forget() -> None:
            self._stderr = before
            os.close(kept)

        return forget

    @contextmanager
    def watching(self, what: str, limit: float) -> Generator[None]:
        """End the process if the body runs long past the limit in seconds that it should keep by itself."""
        self._over = over = threading.Event()
        self.go_on()
        threading.Thread(
            target=self._watch, args=(over, what, limit), name="stm-watchdog", daemon=True
        ).start()
        try:
            yield
        finally:
            over.set()

    def go_on(self) -> None:
        """Restart the limit for the next step of the watched work; a thread for each would cost more."""
        self._left = _STEPS

    def call_off(self) -> None:
        """Lift the limit of the watched work, for example in a debugger."""
        self._over.set()

    def _watch(self, over: threading.Event, what: str, limit: float) -> None:
        late = STUCK_S
        # Waits in steps, because a process stopped for long (Ctrl-Z) may find its limit over first.
        while self._left > 0:
            if over.wait((limit + late) / _STEPS):
                return
            self._left -= 1
        message = (
            f"\nstm-backends: {what} has not ended within {limit:g} s, and nothing could end it in the "
            f"{late:g} s since: the driver blocks the event loop, or a thread of the driver does not end. "
            "What is stuck would keep this process alive, so the run ends here. Its threads:\n"
        )
        os.write(self._stderr, message.encode())
        faulthandler.dump_traceback(self._stderr)
        kill_workers()
        # An exception would not do: Python waits for stuck threads at exit.
        os._exit(_STATUS)


WATCHDOG: Final = Watchdog()
