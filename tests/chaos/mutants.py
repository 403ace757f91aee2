"""Faults in the library itself, each of which a run must find: `--mutant NAME`.

A mutant works in the pods alone. One that is rare counts the writes of all pods, so that it strikes as often
in every run.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

from stm_backends.drivers.contract import ANY, AnyType, Driver, Key, Record
from stm_backends.drivers.wrapper import Operation, WrapperDriver
from stm_backends.errors import Unavailable
from stm_backends.memory import policy
from stm_backends.records.body import Forgotten
from stm_backends.types import ShortTermMemoryConfig
from tests.chaos.turns import TENANT

T = TypeVar("T")


class Mutant(WrapperDriver):
    """A driver that is right; derived ones are not, and what they find in the library they change."""

    rate: int = 1
    """The mutant strikes once in so many writes of its kind, first after an eighth of them."""

    def __init__(self, inner: Driver, folder: Path) -> None:
        super().__init__(inner)
        self._file = _log(folder.parent / "strikes")
        self.change()

    def change(self) -> None:
        """Change the library in this process."""

    def strikes(self) -> bool:
        """Say whether the mutant strikes now."""
        os.write(self._file, b".")
        # The end of this process's own byte: the file's size may count bytes that others have written since.
        return os.lseek(self._file, 0, os.SEEK_CUR) % self.rate == self.rate // 8


def _log(file: Path) -> int:
    """Open a file that all pods write to, before a fault leaves a pod no descriptor for it."""
    return os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND)


def _lines(file: int) -> list[bytes]:
    return os.pread(file, os.fstat(file).st_size, 0).splitlines()


def _turn_id(key: Key, entry: bytes) -> bytes:
    """Return the id of a turn, or nothing for anything else and for a turn of a copy, which is erased."""
    found = re.search(rb'"turn_id":"([^"]+)"', entry)
    ours = found and key.scope.startswith(f"{TENANT}:") and found[1].startswith(key.name.encode() + b"/")
    return found[1] if found and ours else b""


class LosesOneWriteIn10000(Mutant):
    """Acknowledges a turn, and does not store it; another one if somebody erases its conversation.

    A pod may add the turn again. That is lost as well, else the turn would come back at a wrong place.

    Perhaps nobody has read the conversation since. Then its erasure hides that the turn is lost. Files of all
    pods say what was lost and what was erased: a pod may be killed before it has lost what is due.
    """

    rate = 10_000

    def __init__(self, inner: Driver, folder: Path) -> None:
        super().__init__(inner, folder)
        self._lost = _log(folder / "lost")
        self._erased = _log(folder / "erased")
        self._ids: set[bytes] = set()

    async def append(self, key: Key, entry: bytes, *, initial_version: str, ttl: float | None) -> int:
        turn_id = _turn_id(key, entry)
        if turn_id in _lines(self._lost):
            record = await self.inner.load(key)
            return len(record.tail if record else ()) + 1
        # The loss of a repeat changes nothing.
        if turn_id and turn_id not in self._ids:
            self._ids.add(turn_id)
            self.strikes()
            if self._due(key):
                # If this load fails, the turn is not acknowledged. Then the next one is lost instead.
                record = await self.inner.load(key)
                tail = record.tail if record else ()
                if self._due(key) and not any(turn_id in stored for stored in tail):
                    os.write(self._lost, turn_id + b"\n")
                    return len(tail) + 1
        return await self.inner.append(key, entry, initial_version=initial_version, ttl=ttl)

    async def delete(self, key: Key, *, expect: str | AnyType = ANY) -> bool:
        if key.scope.startswith(f"{TENANT}:") and key.scope.endswith(":memory"):
            # Before it happens: nobody may come to know whether it did.
            os.write(self._erased, key.name.encode() + b"\n")
        return await self.inner.delete(key, expect=expect)

    def _due(self, key: Key) -> bool:
        """Say whether a turn of this conversation is to be lost now.

        One whose erasure began already is left alone: how it ended may be unknown, which excuses a loss.
        """
        erased = _lines(self._erased)
        if key.name.encode() in erased:
            return False
        hidden = sum(turn_id.partition(b"/")[0] in erased for turn_id in _lines(self._lost))
        writes = os.fstat(self._file).st_size
        return len(_lines(self._lost)) - hidden < (writes + self.rate - self.rate // 8) // self.rate


class LosesOneWriteIn100(LosesOneWriteIn10000):
    """The same, for short runs."""

    rate = 100


class LeaseWithoutExpiry(Mutant):
    """A lease never ends by itself."""

    def change(self) -> None:
        def lease_left(lease: object, **clock: float) -> float:
            return 0.0 if lease is None else math.inf

        policy.lease_left = lease_left


class TwoLeases(Mutant):
    """Nobody minds a lease."""

    def change(self) -> None:
        policy.lease_left = lambda *lease, **clock: 0.0


class SummaryAppliedTwice(Mutant):
    """Summarizes turns that the summary covers already, once in 20 summaries."""

    rate = 20

    def change(self) -> None:
        right = policy.Fold.request
        last: dict[str, Sequence[Any]] = {}

        def request(fold: policy.Fold, config: ShortTermMemoryConfig) -> dict[str, Any]:
            asked = right(fold, config)
            turns: Sequence[Any] = asked["turns"]
            conversation = _id_of(turns[0]).partition("/")[0]
            before, last[conversation] = last.get(conversation, ()), turns
            # What was never stored, or was erased, is not covered.
            if (
                before
                and str(before[-1]["user"]).partition(" ")[0] in fold.previous_summary
                and self.strikes()
            ):
                return {**asked, "turns": [*before, *turns]}
            return asked

        policy.Fold.request = request


def _id_of(shown: Any) -> str:
    return str(shown["user"]).partition(" ")[0]


class IdsForgotten(Mutant):
    """The ids of turns that a summary covers are not remembered."""

    def change(self) -> None:
        Forgotten.__contains__ = lambda self, turn_id: False


class ErasureLeavesOne(Mutant):
    """Says that a record was deleted, and keeps it; every other time."""

    rate = 2

    async def delete(self, key: Key, *, expect: str | AnyType = ANY) -> bool:
        if self.strikes():
            return True
        return await self.inner.delete(key, expect=expect)


class UnavailableAndStored(Mutant):
    """Says that an entry was not stored, and stores it."""

    rate = 40

    async def call(self, operation: Operation, key: Key | str, send: Callable[[], Awaitable[T]]) -> T:
        result = await send()
        if operation == "append" and self.strikes():
            raise Unavailable("a mutant")
        return result


class DropsWhenHealthy(Mutant):
    """Drops turns instead of summarizing them, in one step of five, as if no summary were ever due."""

    rate = 5

    def change(self) -> None:
        right = policy.next_step

        def next_step(*given: Any, **more: Any) -> policy.Step:
            step = right(*given, **more)
            if isinstance(step, policy.Fold) and self.strikes():
                # Not as lost: a transcript would have them wait for a summary.
                return policy.Trim(len(step.turns), lost=False)
            return step

        policy.next_step = next_step


MUTANTS: Final[dict[str, type[Mutant]]] = {
    "loses-one-write-in-10000": LosesOneWriteIn10000,
    "loses-one-write-in-100": LosesOneWriteIn100,
    "lease-without-expiry": LeaseWithoutExpiry,
    "two-leases": TwoLeases,
    "drops-when-healthy": DropsWhenHealthy,
    "summary-applied-twice": SummaryAppliedTwice,
    "ids-forgotten": IdsForgotten,
    "erasure-leaves-one": ErasureLeavesOne,
    "unavailable-and-stored": UnavailableAndStored,
}
"""The mutants, by name."""


class KeepsAnswers(Mutant):
    """Keeps each record that it loads."""

    def __init__(self, inner: Driver, folder: Path) -> None:
        super().__init__(inner, folder)
        self._kept: list[object] = []

    async def load(self, key: Key) -> Record | None:
        record = await self.inner.load(key)
        # The datastore's own bytes may be shared.
        self._kept += [bytes(bytearray(entry)) for entry in record.tail] if record else []
        return record


class KeepsDescriptors(Mutant):
    """Does not give back, once in 20 appends, what it opened."""

    rate = 20

    async def append(self, key: Key, entry: bytes, *, initial_version: str, ttl: float | None) -> int:
        if self.strikes():
            os.dup(self._file)
        return await self.inner.append(key, entry, initial_version=initial_version, ttl=ttl)


LEAKS: Final[dict[str, type[Mutant]]] = {
    "keeps-answers": KeepsAnswers,
    "keeps-descriptors": KeepsDescriptors,
}
"""Mutants that only a soak finds."""
