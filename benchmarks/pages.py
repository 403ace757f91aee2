"""What the pages that programs write have in common."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table whose first column is left-aligned."""
    lines = [columns, ["---", *("---:" for _ in columns[1:])], *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def machine() -> str:
    """Describe the machine: processor, system and Python."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    processor = names[0] if names else platform.machine()
    system = f"{platform.system()}, Python {platform.python_version()}"
    return f"{processor}, {os.cpu_count()} processors, {system}"


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Return a median and, if there are several values, the lowest and the highest."""
    median = f"{statistics.median(values):,.{digits}f}"
    if len(values) < 2:
        return median
    return f"{median} ({min(values):,.{digits}f} to {max(values):,.{digits}f})"
