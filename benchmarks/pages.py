"""What the pages that programs write have in common."""

from __future__ import annotations

import argparse
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


def reason(error: Exception) -> str:
    """Say in one line why something was not measured."""
    text = str(error) if isinstance(error, LookupError) else f"{type(error).__name__}: {error}"
    return text.splitlines()[0][:200] if text else type(error).__name__


def add_write(parser: argparse.ArgumentParser, page: Path) -> None:
    """Add the option that writes a page."""
    parser.add_argument(
        "--write", type=Path, nargs="?", const=page, metavar="PAGE", help=f"by default {page}"
    )
