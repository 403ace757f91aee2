"""What people do to conversations while pods work on them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

from tests.chaos import asking
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
        self._half_erased: set[str] = set()

    @asynccontextmanager
    async def asked(
        self, do: str, what: Mapping[str, Any], chance: random.Random, seconds: float
    ) -> AsyncIterator[dict[str, Any]]:
        """Ask a pod to do something to a conversation."""
        async with self._turn:
            pods = [pod for pod in self._pods.all if pod.alive]
            keeps = what.get("kind") in {"export", "import"}
            current = [f"c{user}-{number}" for user, number in enumerate(self._pods.generations)]
            # An import of unknown outcome may still be done a moment later, and after an erasure.
            left = self._half_imported if do == "erase" else self._half_erased if keeps else ()
            able = [one for one in current if one not in left]
            if not (pods and able):
                yield {"acted": False}
                return
            pod, conversation = chance.choice(pods), chance.choice(able)
            if do == "erase":
                # An import of it would bring turns back.
                asking.kept(Path(pod.settings.folder), conversation).unlink(missing_ok=True)
            answer = await pod.ask(do, conversation=conversation, **what)
            outcome = answer.get("outcome", "unknown")
            if do == "erase" and outcome != "ok":
                # It may still be done a moment later, and after an export.
                self._half_erased.add(conversation)
            if what.get("kind") == "import" and outcome != "ok":
                self._half_imported.add(conversation)
            figures = {"outcome": "unknown", "found": False, **answer, "pod": pod.settings.process}
            yield {**figures, "acted": figures["found"] or outcome != "ok"}
