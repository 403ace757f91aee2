"""The kit of the Claude Agent SDK for session stores, on the drivers that need no server."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
from claude_agent_sdk.testing import run_session_store_conformance

from stm_backends import Backend, MemoryKey, open_backend
from stm_backends.integrations.claude_agent_sdk import StmSessionStore
from tests.support.sealed import SEALING

PLACES: dict[str, Callable[[Path], str]] = {
    "memory": lambda _: "memory://",
    "sqlite": lambda folder: f"sqlite:///{folder}/stm.db",
}


def for_each_contract(backend: Backend) -> Callable[[], StmSessionStore]:
    """Return what makes an empty store for each contract of the kit, of a user of its own."""
    users = itertools.count()

    def make() -> StmSessionStore:
        user = str(next(users))
        return StmSessionStore(
            backend, lambda project, session: MemoryKey("kit", user, f"{project}/{session}")
        )

    return make


@pytest.mark.parametrize("sealed", [False, True], ids=["clear", "sealed"])
@pytest.mark.parametrize("place", PLACES)
async def test_the_kit_of_the_sdk_passes(place: str, sealed: bool, tmp_path: Path) -> None:
    sealing = SEALING if sealed else None
    async with open_backend(PLACES[place](tmp_path), sealing=sealing) as backend:
        await run_session_store_conformance(for_each_contract(backend))
