"""Memories shared by pods that are broken: each is the correct one with one promise taken away."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar
from unittest import mock

from stm_backends.drivers.contract import (
    ANY,
    KEEP,
    AbsentType,
    AnyType,
    Driver,
    KeepType,
    Key,
    Record,
    new_version,
)
from stm_backends.drivers.wrapper import layer_with
from stm_backends.errors import Corrupt, StorageError
from stm_backends.memory.local.memory import DefaultShortTermMemory
from stm_backends.memory.shared.archive import Archive
from stm_backends.memory.shared.record import SharedConversation
from stm_backends.memory.shared.snapshot import Snapshot
from stm_backends.records import confirming, ledger
from stm_backends.records.body import Body, Lease
from stm_backends.records.codec import Codec
from stm_backends.records.confirming import Loaded
from stm_backends.records.keys import memory_key
from stm_backends.records.pages import Leaving, Pages
from stm_backends.sealing.keys import Sealing
from stm_backends.testing.pods import memories_on
from stm_backends.testing.workbench.drivers import Datastore
from stm_backends.testing.workbench.faulty import FaultyDriver
from stm_backends.testing.workbench.memories import Act, Memories
from stm_backends.types import ConversationTurn, MemoryHealth, MemoryKey
from tests.mutants import sealing as seals
from tests.mutants.replaces import FoldClearsTheTail
from tests.support.leases import without_lease


class Pod:
    """A memory around the correct one, of one pod."""

    driver: Callable[..., Any] = FaultyDriver

    def __init__(
        self, inner: Any, key: MemoryKey, datastore: Datastore, config: Any, summarizer: Any
    ) -> None:
        self.inner = inner
        self.key = key
        self.datastore = datastore
        self.config = config
        self.summarizer = summarizer

    async def add_turn(self, turn: ConversationTurn, *, turn_id: str | None = None) -> None:
        await self.inner.add_turn(turn, turn_id=turn_id)

    async def get_llm_context(self) -> dict[str, Any]:
        return await self.inner.get_llm_context()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def pods_of(kind: type[Pod], datastore: Datastore, *, deadline_s: float) -> Memories:
    """Return the memories of a broken kind."""
    return _broken(kind, memories_on(datastore, deadline_s=deadline_s), datastore)


def _broken(kind: type[Pod], right: Memories, datastore: Datastore) -> Memories:

    async def open_one(key: MemoryKey, config: Any, summarizer: Any) -> Any:
        return kind(await right.open(key, config, summarizer), key, datastore, config, summarizer)

    async def close(memory: Any) -> None:
        await right.close(memory.inner)

    async def kill(memory: Any) -> None:
        assert right.kill is not None
        await right.kill(memory.inner)

    def again(memory: Any) -> Any:
        assert right.again is not None
        inner = right.again(memory.inner)
        return kind(inner, memory.key, datastore, memory.config, memory.summarizer)

    async def erase(memory: Any) -> None:
        assert right.erase is not None
        await right.erase(memory.inner)

    def sealed(sealing: Sealing) -> Memories:
        assert right.sealed is not None
        return _broken(kind, right.sealed(sealing), datastore)

    def around(memory: Any, operation: str, kind: str, act: Act) -> None:
        assert right.around is not None
        right.around(memory.inner, operation, kind, act)

    return replace(
        right, open=open_one, close=close, kill=kill, again=again, erase=erase, sealed=sealed, around=around
    )


class OwnCopyPerPod(Pod):
    """Answers from what this process has seen, and loads it once."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.mine = DefaultShortTermMemory(config=self.config, summarizer=self.summarizer)

    async def add_turn(self, turn: ConversationTurn, *, turn_id: str | None = None) -> None:
        await self.mine.add_turn(turn, turn_id=turn_id)
        await super().add_turn(turn, turn_id=turn_id)

    async def get_llm_context(self) -> dict[str, Any]:
        return await self.mine.get_llm_context()


class OrdersByClock(Pod):
    """Sorts turns by the clocks of the machines that they come from."""

    async def get_llm_context(self) -> dict[str, Any]:
        turns = sorted(await self.inner.turns(), key=lambda turn: turn.ts)
        return {"conversation_memory": {"recent_turns": [{"user": turn.user_message} for turn in turns]}}


class ForgetsTurnIds(Pod):
    """Gives a turn that is sent again a new identity."""

    async def add_turn(self, turn: ConversationTurn, *, turn_id: str | None = None) -> None:
        await super().add_turn(turn, turn_id=None)


class RetryDoublesATurn(Pod):
    """Sends every turn twice, to be sure."""

    async def add_turn(self, turn: ConversationTurn, *, turn_id: str | None = None) -> None:
        await super().add_turn(turn, turn_id=turn_id)
        await super().add_turn(turn, turn_id=turn_id)


class ReadsBeforeItAdds(Pod):
    """Fetches the whole conversation to add one turn to it."""

    async def add_turn(self, turn: ConversationTurn, *, turn_id: str | None = None) -> None:
        await self.inner.turns()
        await super().add_turn(turn, turn_id=turn_id)


class OutageIsAnEmptyMemory(Pod):
    """Shows the model a conversation that never was when the datastore is away."""

    async def get_llm_context(self) -> dict[str, Any]:
        try:
            return await super().get_llm_context()
        except StorageError:
            return {}


class OverwritesWhatItCannotRead(Pod):
    """Erases what a later version has written."""

    async def get_llm_context(self) -> dict[str, Any]:
        try:
            return await super().get_llm_context()
        except Corrupt:
            driver = await self.datastore.open()
            await driver.delete(memory_key(self.key))
            raise


class FlushGivesUpWhileDegraded(Pod):
    """Waits for nothing while the memory is degraded, even for an attempt that is under way."""

    async def flush(self, timeout: float | None = None) -> None:
        await self.inner.get_llm_context()
        if self.inner.health is not MemoryHealth.DEGRADED:
            await self.inner.flush(timeout)


class TrimsWithoutTheLease(Pod):
    """Drops turns past the backlog limit at once, even while another pod summarizes them."""

    async def add_turn(self, turn: ConversationTurn, *, turn_id: str | None = None) -> None:
        await super().add_turn(turn, turn_id=turn_id)
        driver = await self.datastore.open()
        record = await driver.load(memory_key(self.key))
        assert record is not None
        kept = self.config.budget.full_zone_turns + self.config.recovery_backlog_limit
        surplus = len(record.tail) - kept
        if record.body and surplus > 0 and Codec().open_body(record.body).health is MemoryHealth.DEGRADED:
            version = new_version()
            await driver.replace(
                memory_key(self.key),
                record.body,
                version=version,
                expect=record.version,
                drop=surplus,
                ttl=KEEP,
            )


class OwnBackgroundPerObject(Pod):
    """Starts a task for each memory object, and has it wait for ever."""

    waiting: ClassVar[set[asyncio.Task[bool]]] = set()

    async def get_llm_context(self) -> dict[str, Any]:
        self.waiting.add(asyncio.create_task(asyncio.Event().wait()))
        return await super().get_llm_context()


class _NoFailure(FaultyDriver):
    async def replace(
        self,
        key: Key,
        body: bytes,
        *,
        version: str,
        expect: str | AbsentType | AnyType,
        drop: int = 0,
        rewrite: Sequence[bytes] = (),
        ttl: float | None | KeepType,
    ) -> bool:
        if key.scope.endswith(":memory") and Codec().open_body(body).attempts:
            return False
        return await super().replace(
            key, body, version=version, expect=expect, drop=drop, rewrite=rewrite, ttl=ttl
        )


class FailureLosesItsRace(Pod):
    """Does not store a failure when the conversation has changed."""

    driver = _NoFailure


class _NoLease(FaultyDriver):
    async def load(self, key: Key) -> Record | None:
        record = await super().load(key)
        return record and (without_lease(record) if key.scope.endswith(":memory") else record)


class _EternalLease(FaultyDriver):
    async def replace(
        self,
        key: Key,
        body: bytes,
        *,
        version: str,
        expect: str | AbsentType | AnyType,
        drop: int = 0,
        rewrite: Sequence[bytes] = (),
        ttl: float | None | KeepType,
    ) -> bool:
        if key.scope.endswith(":memory") and (opened := Codec().open_body(body)).lease is not None:
            body = Codec().seal_body(replace(opened, lease=Lease(1e12, 1e12)))
        return await super().replace(
            key, body, version=version, expect=expect, drop=drop, rewrite=rewrite, ttl=ttl
        )


class EveryPodSummarizes(Pod):
    """Gives the lease to every pod."""

    driver = _NoLease


class LeaseForEver(Pod):
    """Takes a lease that outlives its holder."""

    driver = _EternalLease


class ClearsWhatIsPending(Pod):
    """Clears everything when a summary is stored, instead of the turns that it covers."""

    driver = FoldClearsTheTail


class _OtherSealing(Pod):
    """A pod whose sealed driver has broken marks, or looks for stale keys in another way."""

    marks: ClassVar[type[Any] | None] = None
    stale: ClassVar[type[Any] | None] = None

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        driver = layer_with(self.inner._shared.driver, "reseal")  # noqa: SLF001 -- the memory is what it breaks
        if driver is not None and self.marks is not None:
            driver.marks.__class__ = self.marks
        if driver is not None and self.stale is not None:
            driver._stale_keys.__class__ = self.stale  # noqa: SLF001 -- likewise


class SealsBesideOtherKeys(_OtherSealing):
    """Adds its own key to those of a tenant without comparing them."""

    marks = seals.OverwritesTheMark.marks_kind


class LeavesNoMark(_OtherSealing):
    """Does not tell processes without keys that a tenant is sealed."""

    marks = seals.MarksNoTenant.marks_kind


class MakesALostKeyAgain(_OtherSealing):
    """Makes a data key for a user whose key is not in the store of keys."""

    marks = seals.MakesAKeyForALostOne.marks_kind


class RemembersAnErasedKey(_OtherSealing):
    """Seals with the key that it remembers, though another process has erased it."""

    stale = seals.SealsWithAnErasedKey.stale


class DropsWhatItHasLoaded(Pod):
    """Takes what a load has shown for confirmed, though the driver declares that it may not be."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        driver = self.inner._shared.driver  # noqa: SLF001 -- likewise
        driver.traits = replace(driver.traits, shows_unconfirmed=False)


class ConfirmsTheVersionAlone(Pod):
    """Does not compare which turns stand under the version that it has stored."""

    async def get_llm_context(self) -> dict[str, Any]:
        async def of_none(driver: Driver, seen: Loaded, going: int, *rest: Any, **load: Any) -> bool:
            del going
            return await still_there(driver, seen, 0, *rest, **load)

        still_there = confirming.still_there
        with mock.patch.object(confirming, "still_there", of_none):
            shown = await self.inner.get_llm_context()
            await self.inner.flush()
        return shown


class _Transcribing(Pod):
    """A pod whose record, archive or pages are broken."""

    record: ClassVar[type[Any]] = SharedConversation
    archive: ClassVar[type[Any]] = Archive
    pages: ClassVar[type[Any]] = Pages

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        shared = self.inner._shared  # noqa: SLF001 -- likewise
        shared.__class__ = self.record
        shared.archive.__class__ = self.archive
        shared.archive.pages.__class__ = self.pages


class _ArchivesAfterwards(Archive):
    __slots__ = ()

    async def put(self, snapshot: Snapshot, leaving: Sequence[Leaving]) -> None:
        pass

    async def left(self, snapshot: Snapshot, leaving: Sequence[Leaving]) -> None:
        await super().put(snapshot, leaving)
        await super().left(snapshot, leaving)


class CommitsBeforeItArchives(_Transcribing):
    """Stores turns in their page after the record has dropped them."""

    archive = _ArchivesAfterwards


class _NoGap(SharedConversation):
    __slots__ = ()

    async def replace(self, snapshot: Snapshot, body: Body, **options: Any) -> bool:
        transcript = body.transcript
        body = replace(body, transcript=transcript and replace(transcript, gap=None))
        return await super().replace(snapshot, body, **options)


class MarksNoGap(_Transcribing):
    """Moves turns without a summary as if one covered them."""

    record = _NoGap


class _OneTooFew(SharedConversation):
    __slots__ = ()

    async def replace(self, snapshot: Snapshot, body: Body, **options: Any) -> bool:
        before, after = snapshot.body.transcript, body.transcript
        if before is not None and after is not None and after.base > before.base + 1:
            body = replace(body, transcript=replace(after, base=after.base - 1))
        return await super().replace(snapshot, body, **options)


class CountsOneTooFew(_Transcribing):
    """Counts a turn less than leave the record."""

    record = _OneTooFew


class MovesNothingMeanwhile(Pod):
    """Lets the record grow while a model is slow."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.inner._maintenance.next_move = lambda _: None  # noqa: SLF001 -- likewise


class _NoRevisions(Pages):
    def opened(self, record: Record) -> list[Mapping[str, Any]]:
        return [{**one, "rev": 0, "revs": None} for one in super().opened(record)]


class IgnoresRevisions(_Transcribing):
    """Takes the last copy of a turn, even if its revision is older."""

    pages = _NoRevisions


class _CompactsBlindly(Pages):
    async def compact(self, *where: Any) -> bool:
        async def blind(
            driver: Driver, key: Key, record: Record, change: ledger.Change, **options: Any
        ) -> bool:
            del record, options
            return await ledger.replace(driver, key, ledger.Change(change.body, ttl=None), expect=ANY)

        with mock.patch.object(ledger, "fold", blind):
            return await super().compact(*where)


class RewritesPagesBlindly(_Transcribing):
    """Rewrites a full page without the condition that it is as it was read."""

    pages = _CompactsBlindly
