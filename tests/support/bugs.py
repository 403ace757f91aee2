"""Bugs that authors make, each as a change of the text of a driver, and what finds it."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

STRANGERS = Path(__file__).parents[1] / "strangers"


class Bug(NamedTuple):
    """A mistake, the check that names it, what it changes, and whether the quick form of it finds it."""

    name: str
    check: str
    changes: Mapping[str, str]
    quick: bool = True


def install(backend: str, folder: Path, bug: Bug | None = None) -> Path:
    """Return a folder from which a copy of a driver can be imported, and is found, as if it was installed.

    The driver is the package `tests/strangers/BACKEND_backend`. Raises `AssertionError` if a text that the
    bug changes is not there once.
    """
    package = f"stm_backends_{backend}"
    place = folder / "installed"
    copy = place / package
    shutil.copytree(STRANGERS / f"{backend}_backend", copy, ignore=shutil.ignore_patterns("__pycache__"))
    texts = {
        path: path.read_text("utf-8").replace(f"tests.strangers.{backend}_backend", package)
        for path in sorted(copy.glob("*.py"))
    }
    for before, after in (bug.changes if bug else {}).items():
        found = [path for path, text in texts.items() if before in text]
        assert [texts[path].count(before) for path in found] == [1], (before, found)
        texts[found[0]] = texts[found[0]].replace(before, after)
    for path, text in texts.items():
        path.write_text(text, "utf-8")
    metadata = place / f"{package}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[stm_backends]\n{backend} = {package}.plugin\n")
    return place
