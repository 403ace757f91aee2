"""Processes with other keys, and an erasure while two go on, on real servers."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from stm_backends import (
    ConversationTurn,
    EnvelopeKeys,
    KeyMismatch,
    MemoryKey,
    Sealing,
    SealMismatch,
    ShortTermMemoryConfig,
    StaticKeys,
    open_backend,
)
from stm_backends.sealing.naming import KEYS_VARIABLE
from stm_backends.sealing.wrapping import LocalWrapping
from tests.support.places import Place, quick_on

CONFIG = ShortTermMemoryConfig("truncation")
ADA, NEWCOMER = MemoryKey("acme", "ada", "trip"), MemoryKey("acme", "new", "trip")
SECRET, OTHER = bytes(range(32)), bytes(range(32, 64))
TURN = ConversationTurn("To Zanzibar!", "Booked.")

pytestmark = pytest.mark.parametrize(
    "datastore", quick_on("redis", ["redis", "sqlite", "postgres", "mongo", "dynamo"])
)


async def replay(url: str, folder: Path, user: str, secret: bytes | None) -> tuple[int, str]:
    """Add a turn in a process of its own; returns its exit status, and what it said on standard error."""
    lines, keys = folder / "chat.jsonl", folder / "keys.json"
    turn = {"user": "To Zanzibar!", "assistant": "Booked."}
    lines.write_text(json.dumps({"session": "taxes", "turns": [turn]}) + "\n")
    environment = {name: value for name, value in os.environ.items() if name != KEYS_VARIABLE}
    if secret is not None:
        keys.write_text(json.dumps({"primary": "k1", "keys": {"k1": base64.b64encode(secret).decode()}}))
        keys.chmod(0o600)
        environment[KEYS_VARIABLE] = str(keys)
    arguments = ("replay", str(lines), "--url", url, "--tenant", "acme", "--user", user, "--pods", "1")
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "stm_backends.cli",
        *arguments,
        env=environment,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    _, said = await process.communicate()
    return process.returncode or 0, " ".join(said.decode().split())


async def test_processes_with_other_keys_change_nothing(
    datastore: str, place_on: Callable[[str], Place], tmp_path: Path
) -> None:
    url = place_on(datastore).url
    right = Sealing(StaticKeys({"k1": SECRET}, primary="k1"))
    async with open_backend(url, create=True, sealing=right) as backend:
        await backend.memory(ADA, CONFIG).add_turn(TURN)
        for user in ("ada", "new"):
            for secret, said in ((OTHER, "other bytes of the key|another key of this id"), (None, "sealed")):
                status, message = await replay(url, tmp_path, user, secret)
                assert status != 0
                assert any(part in message for part in said.split("|")), message
        assert len(await backend.memory(ADA, CONFIG).turns()) == 1
        assert [user async for user in backend.sessions.users("acme")] == ["ada"]
    for wrong, error in (
        (Sealing(StaticKeys({"k1": OTHER}, primary="k1")), KeyMismatch),
        (None, SealMismatch),
    ):
        async with open_backend(url, sealing=wrong) as backend:
            for key in (ADA, NEWCOMER):
                with pytest.raises(error):
                    await backend.memory(key, CONFIG).add_turn(TURN)


async def test_two_processes_go_on_after_an_erasure(
    datastore: str, place_on: Callable[[str], Place], tmp_path: Path
) -> None:
    url = place_on(datastore).url

    def sealing() -> Sealing:
        return Sealing(EnvelopeKeys(store.driver, LocalWrapping({"w1": SECRET}, primary="w1")))

    async with (
        open_backend(f"sqlite:///{tmp_path}/keys.db") as store,
        open_backend(url, create=True, sealing=sealing()) as one,
        open_backend(url, sealing=sealing()) as two,
    ):
        for backend in (one, two):
            await backend.memory(ADA, CONFIG).add_turn(TURN)
        await one.sessions.erase_user("acme", "ada")
        for backend in (two, one):
            await backend.memory(ADA, CONFIG).add_turn(TURN)
        async with open_backend(url, sealing=sealing()) as fresh:
            for backend in (one, two, fresh):
                assert len(await backend.memory(ADA, CONFIG).turns()) == 2
