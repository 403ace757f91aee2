"""Keys in a file that changes during a run: `--sealing tests.chaos.sealing:SEALING`."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from stm_backends.sealing.keys import DataKey, Owner, Sealing, StaticKeys

NAME: Final = "tests.chaos.sealing:SEALING"
VARIABLE: Final = "STM_CHAOS_KEYS"


class KeysOfFile:
    """The keys that a file has now, so that all processes get another one at once."""

    def __init__(self) -> None:
        self._read_at = -1
        self._keys: StaticKeys | None = None

    def _now(self) -> StaticKeys:
        file = Path(os.environ[VARIABLE])
        changed = file.stat().st_mtime_ns
        if self._keys is None or changed != self._read_at:
            self._keys, self._read_at = StaticKeys.from_file(file), changed
        return self._keys

    async def primary(self, owner: Owner) -> DataKey:
        """Return the primary key."""
        return await self._now().primary(owner)

    async def key(self, owner: Owner, key_id: str) -> DataKey:
        """Return the key of that id."""
        return await self._now().key(owner, key_id)

    async def rewrap(self, owner: Owner) -> int:
        """Do nothing: these keys are not stored."""
        return await self._now().rewrap(owner)

    async def erase(self, owner: Owner) -> int:
        """Delete nothing: no key belongs to one owner."""
        return await self._now().erase(owner)


SEALING: Final = Sealing(KeysOfFile())


def write(file: Path, ids: Sequence[str]) -> None:
    """Write a file with the keys of these ids, of which the last is primary."""
    # No secrets: whoever repeats a run has the same keys.
    keys = {one: base64.b64encode(one.encode().ljust(32, b".")).decode() for one in ids}
    new = file.with_suffix(".new")
    new.write_text(json.dumps({"primary": ids[-1], "keys": keys}), encoding="utf-8")
    new.chmod(0o600)
    new.replace(file)
