"""What people do to conversations while pods work on them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Final

from tests.chaos.nemesis.pods import Pods
from tests.chaos.stands import Fault

KINDS: Final = ("export", "import", "copy", "purge", "stats", "session-end")


def faults(pods: Pods) -> Mapping[str, Fault]:
    """Return what people do, by name. Each is over when it is done, however long it may take."""
    people = People(pods)
    others = {f"people-{kind}": partial(people.asked, "people", {"kind": kind}) for kind in KINDS}
    return {"people-erase": partial(people.asked, "erase", {}), **others}


class People:
    """People who do one thing at a time."""

    def __init__(self, pods: Pods) -> None:
        self._pods = pods
        self._turn = asyncio.Lock()
        self._half_imported: set[str] = set()

    @asynccontextmanager
    async def asked(
        self, do: str, what: Mapping[str, Any], chance: random.Random, seconds: float
    ) -> AsyncIterator[dict[str, Any]]:
        """Ask a pod to do something to a conversation."""
        async with self._turn:
            pod = chance.choice(self._pods.all)
            user = chance.randrange(pod.users)
            conversation = f"c{user}-{self._pods.generations[user]}"
            # An import of unknown outcome may still be done a moment later, and after an erasure.
            if do == "erase" and conversation in self._half_imported:
                do, what = "people", {"kind": "export"}
            answer = await pod.ask(do, conversation=conversation, **what) if pod.alive else {}
            if what.get("kind") == "import" and answer.get("outcome") != "ok":
                self._half_imported.add(conversation)
            yield {"pod": pod.settings.process, "outcome": answer.get("outcome")}
