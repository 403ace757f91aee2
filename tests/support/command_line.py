"""Run the command line in a process, and read the figures of a replay."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def cli(
    *arguments: object, timeout: float = 100, cwd: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run `stm-backends` to its end."""
    return subprocess.run(
        [sys.executable, "-m", "stm_backends.cli", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        cwd=cwd,
        env={**os.environ, "COLUMNS": "120", **environment},
    )


def without_coverage() -> dict[str, str]:
    """The environment of a process that is not measured.

    An interrupt that comes while coverage holds the lock of its own data leaves it taken, and the process
    hangs: the exception is raised between the lock and its release.
    """
    return {name: value for name, value in os.environ.items() if not name.startswith("COV")}


def replay(
    file: Path, tmp_path: Path, *options: object, timeout: float = 290, **environment: str
) -> tuple[int, dict[str, Any]]:
    """Run a replay; returns its exit status and its figures."""
    numbers = tmp_path / "numbers.json"
    done = cli("replay", file, "--json", numbers, *options, timeout=timeout, **environment)
    assert numbers.exists(), done.stderr
    assert numbers.stat().st_size, done.stderr
    return done.returncode, json.loads(numbers.read_text())


def generated(tmp_path: Path, *, conversations: int, turns: int) -> Path:
    """Write conversations to a file that can be replayed."""
    path = tmp_path / "generated.jsonl"
    with path.open("w") as out:
        for session in range(conversations):
            said = [
                {
                    "user": f"I want number {place} of conversation {session}, please.",
                    "assistant": f"Booked {place}.",
                    "tools": [{"name": "book", "arguments": {"n": place}, "results": ["ok"]}] * (place % 2),
                }
                for place in range(turns)
            ]
            out.write(json.dumps({"session": f"session-{session}", "turns": said}) + "\n")
    return path
