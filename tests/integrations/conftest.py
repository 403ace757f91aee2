"""Where these tests keep what frameworks give us. A datastore more is a row more."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from stm_backends import Backend, open_backend

DATASTORES: dict[str, Callable[[Path], str]] = {
    "memory": lambda _: "memory://",
    "sqlite": lambda folder: f"sqlite:///{folder}/stm.db",
}


@pytest.fixture(params=DATASTORES)
async def backend(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Backend]:
    """An open backend on a datastore of its own, of either kind that comes with the library."""
    async with open_backend(DATASTORES[request.param](tmp_path)) as backend:
        yield backend


@pytest.fixture
async def pods(tmp_path: Path) -> AsyncIterator[tuple[Backend, Backend]]:
    """Two backends on one file, as two processes have them."""
    url = f"sqlite:///{tmp_path}/shared.db"
    async with open_backend(url) as one, open_backend(url) as other:
        yield one, other
