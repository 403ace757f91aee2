"""Where the planners of these tests keep their memory. A datastore more is a row more."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

DATASTORES: dict[str, Callable[[Path], str]] = {"sqlite": lambda folder: f"sqlite:///{folder}/stm.db"}


@pytest.fixture(params=DATASTORES)
def datastore(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of a datastore that several pods open, each for itself."""
    return DATASTORES[request.param](tmp_path)
