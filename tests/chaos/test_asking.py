"""An earlier export is merged with the present one, and is gone once its conversation is erased."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from stm_backends import open_backend
from tests.chaos import asking, turns
from tests.chaos.nemesis.people import People

CONVERSATION = "c0-0"


async def nothing(request: Any, /) -> Any:
    return {"summary": ""}


async def test_an_earlier_export_is_merged_with_the_present_one(tmp_path: Path) -> None:
    async with open_backend(f"sqlite:///{tmp_path}/a.db", create=True) as backend:
        memory = backend.memory(turns.key_of(CONVERSATION), turns.config(), summarizer=nothing)
        for number in range(3):
            turn = turns.identity_of(CONVERSATION, "p1.1", number)
            await memory.add_turn(turns.turn_of(turn), turn_id=turn)
            await asking.CALLS["export"](backend, tmp_path, CONVERSATION)
        before = await backend.sessions.export(turns.key_of(CONVERSATION))
        merged = await asking.CALLS["import"](backend, tmp_path, CONVERSATION)
        assert merged == {"found": True, "older": True}
        assert await backend.sessions.export(turns.key_of(CONVERSATION)) == before
        keys = [key.session_id async for key in backend.sessions.list(turns.TENANT, "c0")]
        assert keys == [CONVERSATION]


def test_a_turn_that_a_merge_loses_or_invents_is_found() -> None:
    def document(covered: str, *ids: str) -> dict[str, Any]:
        named = [{"turn_id": f"c0-0/{one}"} for one in ids]
        return {"body": {"summary": covered}, "turns": named}

    earlier, present = document("", "a", "b"), document("", "b", "c")
    assert asking.differences(earlier, present, document("", "a", "b", "c"), CONVERSATION) == {}
    found = asking.differences(earlier, present, document("", "a", "b", "d"), CONVERSATION)
    assert found == {"missing": ["c0-0/c"], "foreign": ["c0-0/d"]}


async def test_an_export_of_a_conversation_that_is_erased_is_dropped(tmp_path: Path) -> None:
    class Pod:
        alive = True

        settings = SimpleNamespace(folder=str(tmp_path), process="p1.1")

        async def ask(self, do: str, **what: Any) -> dict[str, Any]:
            assert not file.exists()
            return {"outcome": "unknown"}

    class Pods:
        all = (Pod(),)
        generations = (0,)

    file = asking.kept(tmp_path, CONVERSATION)
    file.parent.mkdir()
    file.write_text("{}", encoding="utf-8")
    people: Any = People(Pods())  # type: ignore[arg-type]
    async with people.asked("erase", {}, random.Random(1), 0.0) as figures:
        assert figures["outcome"] == "unknown"
    # The erasure may still be done, and what is exported before it is not to come back.
    async with people.asked("people", {"kind": "export"}, random.Random(1), 0.0) as figures:
        assert figures == {"acted": False}
