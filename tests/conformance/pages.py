"""The packages that pages for authors of backends print, put together from their blocks."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def printed_files(page: str, package: str) -> dict[str, str]:
    """Return the files of a package: each block below a paragraph that begins with the file's name."""
    text = (ROOT / "docs" / "how-to" / page).read_text("utf-8")
    named = re.compile(rf"^`{package}/([\w./]+)` (?:[^\n]+\n)+\n```\w+\n(.*?)```", re.MULTILINE | re.DOTALL)
    files: dict[str, list[str]] = {}
    for path, block in named.findall(text):
        files.setdefault(path, []).append(block)
    return {path: "\n".join(blocks) for path, blocks in files.items()}


def write_files(files: dict[str, str], folder: Path) -> None:
    """Write the files of a package into a folder."""
    for path, text in files.items():
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_text(text, "utf-8")
