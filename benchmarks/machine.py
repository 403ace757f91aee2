"""The processor time of this process, of its servers and workers, and of everything else on the machine."""

from __future__ import annotations

import os
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

BUSY = 0.1
"""A machine is busy when other programs take more than this share of one processor."""

_PROC = Path("/proc")
_COUNTED = (0, 1, 2, 7)
"""The columns of `/proc/stat` that count: user, nice, system, stolen. Interrupts belong to no process."""


@dataclass
class Usage:
    """The processor time of one block, in seconds; `wall` is how long it took.

    `client` is this process, `family` the processes that it started, `others` everything else. The last two
    are 0 where the system does not tell.
    """

    wall: float = 0.0
    client: float = 0.0
    family: float = 0.0
    others: float = 0.0

    @property
    def busy(self) -> bool:
        """Whether other programs took a share of the processors that shows in the figures."""
        return self.others > BUSY * self.wall


class Meter:
    """Reads processor times. With `watches=False` other programs are ignored.

    A server that this process did not start cannot be told from them.
    """

    def __init__(self, *, watches: bool = True) -> None:
        self._watches = watches and (_PROC / "stat").exists()

    @contextmanager
    def reading(self) -> Generator[Usage]:
        """Fill the usage that is given when the block ends."""
        usage = Usage()
        everything, ours = self._read()
        wall, client = time.perf_counter(), time.process_time()
        yield usage
        usage.client = time.process_time() - client
        usage.wall = time.perf_counter() - wall
        everything_after, ours_after = self._read()
        usage.family = max(0.0, ours_after - ours - usage.client)
        usage.others = max(0.0, everything_after - everything - (ours_after - ours))

    def _read(self) -> tuple[float, float]:
        """Return the processor time of the machine, and that of this process and its descendants."""
        if not self._watches:
            return 0.0, 0.0
        ticks = os.sysconf("SC_CLK_TCK")
        columns = (_PROC / "stat").read_text("ascii").split("\n", 1)[0].split()[1:]
        return sum(int(columns[index]) for index in _COUNTED) / ticks, _of_family(os.getpid()) / ticks


def _of_family(root: int) -> int:
    """Return the ticks of a process and its descendants, with those that have ended and were waited for."""
    spent: dict[int, int] = {}
    children: dict[int, list[int]] = {}
    for path in _PROC.iterdir():
        if path.name.isdecimal():
            try:
                fields = (path / "stat").read_text("utf-8", "replace").rpartition(")")[2].split()
            except OSError:
                continue
            process = int(path.name)
            children.setdefault(int(fields[1]), []).append(process)
            spent[process] = sum(map(int, fields[11:15]))
    family, total = [root], 0
    while family:
        process = family.pop()
        total += spent.get(process, 0)
        family += children.get(process, ())
    return total
