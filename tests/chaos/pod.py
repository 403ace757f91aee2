"""A pod of a run: `python -m tests.chaos.pod SETTINGS.json`.

Reads commands as lines of JSON and answers them in the same way. Ends with its parent.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final


@dataclass(kw_only=True)
class Settings:
    """What a pod is given. `generations` has the number of the conversation of each user that is in use."""

    name: str
    life: int
    folder: str
    url: str
    seed: int
    pause: float
    deadline: float
    generations: list[int]
    clock: float = 0.0
    mutant: str = ""
    sealing: str = ""
    longest: int = 120
    """How many turns a conversation has when the next one begins."""
    lasts: float = 0.0
    """In how many seconds without a turn every third conversation expires; 0 in a run of faults: none does.

    Otherwise the pod works for long: its turns have results of tools, it keeps little of conversations that
    are over, and it collects its garbage before it counts what is left.
    """
    figures_every: float = 3.0
    options: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def process(self) -> str:
        """The name of this life of the pod in the history."""
        return f"{self.name}.{self.life}"


class Clock:
    """The wall clock of this process, which may be wrong; the monotonic clock is not touched."""

    def __init__(self) -> None:
        self.ahead = 0.0
        self._right: Final = time.time

    def time(self) -> float:
        """Return what this process believes the time to be."""
        return self._right() + self.ahead


def main() -> None:
    """Work until told to end."""
    settings = Settings(**json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    clock = Clock()
    clock.ahead = settings.clock
    # Before the library is imported, which takes the function at that time.
    time.time = clock.time
    from tests.chaos import working  # noqa: PLC0415 -- see above

    working.work(settings, clock)


if __name__ == "__main__":
    main()
