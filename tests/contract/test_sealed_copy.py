"""A copy of sealed data, made without its keys."""

from __future__ import annotations

from pathlib import Path

import pytest

from stm_backends import ConversationTurn, MemoryKey, Sealing, ShortTermMemoryConfig, StaticKeys, open_backend
from stm_backends.admin.copying import Copy, Owner

pytest.importorskip("cryptography")

KEY = MemoryKey("acme", "ada", "trip")
SEALING = Sealing(StaticKeys({"k1": bytes(range(32))}, primary="k1"))
LONG = "Zanzibar " * 600_000


async def copied(folder: Path, text: str) -> str:
    """Return the URL of a copy of a sealed conversation with one turn."""
    source, target = f"sqlite:///{folder}/source.db", f"sqlite:///{folder}/target.db"
    async with open_backend(source, sealing=SEALING) as backend:
        await backend.memory(KEY, ShortTermMemoryConfig(strategy="truncation")).add_turn(
            ConversationTurn(text, "Noted.")
        )
    async with open_backend(source) as origin, open_backend(target) as destination:
        copy = Copy(origin.driver, destination.driver, [Owner("acme")])
        await copy.copy()
        await copy.verify()
    assert copy.ok, copy.tally
    return target


@pytest.mark.parametrize("text", ["short", LONG], ids=["short", "large"])
async def test_sealed_copy_has_every_turn(tmp_path: Path, text: str) -> None:
    async with open_backend(await copied(tmp_path, text), sealing=SEALING) as backend:
        (turn,) = (await backend.sessions.export(KEY))["turns"]
    assert turn["user_message"] == text


async def test_sealed_copy_can_be_resealed(tmp_path: Path) -> None:
    async with open_backend(await copied(tmp_path, "short"), sealing=SEALING) as backend:
        report = await backend.sessions.reseal("acme")
    assert report.ok, report
