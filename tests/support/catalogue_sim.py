"""Processes that touch, name, erase and list conversations, are killed, and lose answers; in virtual time.

Each conversation is then in the list once, in the order of the cards, and nothing of an erased one is left.
While it happens, no listing misses a conversation that stayed as it was, and none comes twice.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from stm_backends.admin.describing import describe
from stm_backends.admin.purging import Purge
from stm_backends.admin.sessions import Sessions
from stm_backends.catalogue.card import SLOT_S, Activity, Card
from stm_backends.catalogue.conversations import Conversations
from stm_backends.catalogue.index import Catalogue
from stm_backends.drivers.contract import KEEP, Driver, Key
from stm_backends.drivers.in_memory import MemoryDriver, MemoryStore
from stm_backends.drivers.wrapper import Operation, WrapperDriver
from stm_backends.errors import OutcomeUnknown, StorageError, Unavailable
from stm_backends.records import keys, ledger, operations
from stm_backends.records.codec import Codec
from stm_backends.records.directory import Directory
from stm_backends.types import ConversationTurn, MemoryKey, StoredTurn

T = TypeVar("T")
PROCESSES = 3
OWNER = ("t", "u")


@dataclass(frozen=True)
class World:
    """The arguments of a simulation: the number of steps, and the faults."""

    seed: int
    steps: int = 500
    conversations: int = 5
    kills: bool = True
    late: bool = True
    erases: bool = True


class Conversation:
    """One conversation, as far as the model knows.

    `listed` says that it must be in the list: a touch was acknowledged that began after the last erasure.
    `changes` counts what was begun, ended or came late; `under_way` is what has not ended. `haunted` says
    that a process was killed in a touch, or a write came late, around an erasure: the next purge cleans up.
    """

    def __init__(self, name: str) -> None:
        self.key = MemoryKey(*OWNER, name)
        self.listed = self.haunted = self.named = False
        self.changes = self.under_way = self.erasing = self.erased = 0
        self.titles: list[str] = []


class FaultDriver(WrapperDriver):
    """The operations of one process, which is killed at one of them."""

    def __init__(self, inner: MemoryDriver, sim: Sim) -> None:
        super().__init__(inner)
        self._sim = sim
        self._left = sim.chance.randint(10, 400)
        self.dead = False

    async def call(self, operation: Operation, key: Key | str, send: Callable[[], Awaitable[T]]) -> T:
        sim, chance = self._sim, self._sim.chance
        if self.dead:
            raise Unavailable("the process is dead", backend="sim", operation=operation)
        if sim.calm:
            return await send()
        writes = operation not in ("load", "scan")
        await asyncio.sleep(chance.random() * (0.3 if chance.random() < 0.05 else 0.003))
        # Most of all at the writes of a touch.
        of_touch = (key if isinstance(key, str) else key.scope).endswith((":card", ":recent"))
        self._left -= 12 if writes and of_touch else 2 if writes else 1
        if sim.world.kills and self._left <= 0:
            self.dead = True
            sim.counts["killed"] += 1
            await self._perhaps(operation, key, send)
            raise OutcomeUnknown("killed") if writes else Unavailable("killed")
        if writes and chance.random() < 0.06:
            sim.counts["lost answers"] += 1
            await self._perhaps(operation, key, send)
            raise OutcomeUnknown("lost")
        if chance.random() < 0.01:
            raise Unavailable("away", backend="sim", operation=operation)
        return await send()

    async def _perhaps(
        self, operation: Operation, key: Key | str, send: Callable[[], Awaitable[Any]]
    ) -> None:
        """Do a write, do it later, or do it never."""
        fate, writes = self._sim.chance.random(), operation not in ("load", "scan")
        if writes and fate < 0.45:
            await send()
        elif writes and fate < 0.75 and self._sim.world.late:
            self._sim.later(key, send, deletes=operation == "delete")


@dataclass
class Process:
    driver: FaultDriver
    catalogue: Catalogue
    sessions: Sessions


class Sim:
    """One run; `problems` has what was found."""

    def __init__(self, world: World, kind: type[Catalogue] = Catalogue) -> None:
        self.world, self.kind, self.chance = world, kind, random.Random(world.seed)
        self.counts: Counter[str] = Counter()
        self.store = MemoryStore()
        self.calm = False
        self.problems: list[str] = []
        self.conversations = [Conversation(f"c:{number}") for number in range(world.conversations)]
        self._late: set[asyncio.Task[None]] = set()
        self._steps = 0
        self.processes: list[Process] = []

    # What there is

    def now(self) -> float:
        """The epoch seconds of all processes."""
        return asyncio.get_running_loop().time()

    async def driver(self) -> MemoryDriver:
        driver = MemoryDriver(self.store, deadline_s=0.3, clock=self.now)
        await driver.open()
        return driver

    async def process(self) -> Process:
        driver, codec = FaultDriver(await self.driver(), self), Codec()
        directory = Directory(driver, codec, clock=self.now, epoch=self.now)

        async def described(key: MemoryKey, kinds: Sequence[str]) -> Activity | None:
            return await describe(driver, codec, key, kinds)

        catalogue = self.kind(driver, codec, directory, describe=described, clock=self.now)
        return Process(driver, catalogue, Sessions(driver, codec, directory))

    async def any_process(self) -> Process:
        for index, one in enumerate(self.processes):
            if one.driver.dead:
                self.processes[index] = await self.process()
        return self.chance.choice(self.processes)

    def later(self, key: Key | str, send: Callable[[], Awaitable[Any]], *, deletes: bool) -> None:
        late = next((one for one in self.conversations if isinstance(key, Key) and _is_of(key, one)), None)

        async def do() -> None:
            await asyncio.sleep(self.chance.random() * 0.3)
            if late is not None:
                late.changes += 1
                late.haunted = True
                # Of a card that an erasure has deleted before, and a touch has written again.
                late.listed = late.listed and not deletes
            try:
                await send()
            except StorageError:
                self.counts["late and refused"] += 1

        task = asyncio.create_task(do())
        self._late.add(task)
        task.add_done_callback(self._late.discard)

    # What is done

    async def worker(self) -> None:
        """Do one thing after the other to conversations, at any process."""
        while self._steps < self.world.steps and not self.problems:
            self._steps += 1
            one, what = self.chance.choice(self.conversations), self.chance.random()
            await asyncio.sleep(self.chance.random() * 0.05)
            if self.chance.random() < 0.05:
                # Time passes: names of other hours.
                await asyncio.sleep(self.chance.random() * 2 * SLOT_S)
            if what < 0.04 and self.world.erases:
                await self.erase(one)
            elif what < 0.2:
                await self.listing(await self.any_process())
            else:
                await self.touch(one, names=what < 0.4)

    async def touch(self, one: Conversation, *, names: bool) -> None:
        """Add a turn, and note that; or give a title."""
        began, erased, process = one.erasing, one.erased, await self.any_process()
        # Now and then, a touch has waited for long.
        at = self.now() - self.chance.choice([0.0, 0.0, 0.0, 2.0 * SLOT_S]) * self.chance.random()
        if not names:
            await self.say(one, at)
        one.under_way += 1
        one.changes += 1
        title = f"title {self._steps}"
        try:
            if names:
                one.titles.append(title)
                done = await process.catalogue.update(one.key, {"title": title}) is not None
            else:
                seen = Activity({"memory": 1}, at, f"said {self._steps}", "first")
                ttl = self.chance.choice([None, KEEP])
                done = await process.catalogue.touch(one.key, seen, kind="memory", at=at, ttl=ttl) is not None
            self.counts["titles" if names else "touches"] += done
            if done and not began and erased == one.erased and not one.erasing:
                one.listed = True
                if names:
                    one.named = True
                    one.titles = [title] if one.under_way == 1 else one.titles
        except StorageError:
            self.counts["not acknowledged"] += 1
            one.haunted |= process.driver.dead or self.world.late
        finally:
            one.under_way -= 1
            one.changes += 1

    async def say(self, one: Conversation, at: float) -> None:
        """Add a turn to the record; this is not what is tested, so it succeeds."""
        driver, codec = await self.driver(), Codec()
        async with Directory(driver, codec, clock=self.now, epoch=self.now).listed(OWNER) as owner:
            stored = StoredTurn(f"{self._steps}", ConversationTurn("Hello", "Hi", ts=at))
            entry = codec.seal_turn(stored)
            appended = await ledger.append(driver, keys.memory_key(one.key), entry, ttl=None)
            owner.created = appended.created

    async def erase(self, one: Conversation) -> None:
        """Erase a conversation, by one process after the other until one says that it did."""
        one.erasing += 1
        one.changes += 1
        one.listed = one.named = False
        try:
            while True:
                process = await self.any_process()
                try:
                    await process.sessions.erase(one.key)
                    break
                except StorageError:
                    self.counts["erasures repeated"] += 1
            self.counts["erasures"] += 1
        finally:
            one.erasing -= 1
            one.erased += 1
            one.changes += 1

    async def listing(self, process: Process) -> None:
        """List all pages, and compare with what must be there."""
        before = {one.key: one.changes for one in self.conversations if not one.under_way and not one.erasing}
        there = {one.key for one in self.conversations if one.listed}
        gone = {one.key for one in self.conversations if not await self.exists(one) and not one.haunted}
        try:
            found = await self.walked(process.driver, process.catalogue, self.chance.choice([1, 2, 3, 50]))
        except StorageError:
            self.counts["listings that failed"] += 1
            return
        self.counts["listings"] += 1
        shown = Counter(card.key for card in found)
        for one in self.conversations:
            if before.get(one.key) != one.changes:
                continue
            if one.key in there and shown[one.key] != 1:
                self.problems.append(f"a listing showed {one.key.session_id} {shown[one.key]} times")
            if one.key in gone and shown[one.key]:
                self.problems.append(f"a listing showed {one.key.session_id}, which was erased")

    async def walked(self, driver: Driver, catalogue: Catalogue, limit: int) -> list[Card]:
        found, after = list[Card](), None
        conversations = Conversations(driver, catalogue)
        while True:
            page = await conversations.list(*OWNER, after=after, limit=limit)
            found += page.cards
            if len({card.key for card in page.cards}) < len(page.cards):
                self.problems.append("a page showed a conversation twice")
            if (after := page.after) is None:
                return found

    async def exists(self, one: Conversation) -> bool:
        return await (await self.driver()).load(keys.memory_key(one.key)) is not None

    # What is found in the end

    async def run(self) -> list[str]:
        """Simulate, and return the problems."""
        self.processes = [await self.process() for _ in range(PROCESSES)]
        await asyncio.gather(*(self.worker() for _ in range(PROCESSES + 1)))
        self.calm = True
        await asyncio.gather(*self._late)
        clean = await self.process()
        await self.settle(clean)
        await self.check(clean)
        return self.problems

    async def settle(self, clean: Process) -> None:
        """Let a process do what those that were killed would have done, and let others list."""
        await Conversations(clean.driver, clean.catalogue).rebuild(*OWNER)
        for one in self.conversations:
            if one.listed:
                await self.listing(clean)

    async def check(self, clean: Process) -> None:
        living = {one.key for one in self.conversations if await self.exists(one)}
        haunted = {one.key for one in self.conversations if one.haunted}
        await self.compare(clean, living, besides=haunted)
        later = self.now() + 3 * SLOT_S
        await Purge(clean.driver, Codec(), Directory(clean.driver, Codec()), clock=lambda: later).user(*OWNER)
        await self.compare(clean, living)
        cards = {name async for name in operations.names(clean.driver, keys.scope(*OWNER, "card"))}
        index = [name async for name in operations.names(clean.driver, keys.scope(*OWNER, "recent"))]
        if cards != {keys.card_key(key).name for key in living}:
            self.problems.append("there are other cards than conversations")
        if sorted(keys.slot_and_card(name)[1] for name in index) != sorted(cards):
            self.problems.append(f"the index has {len(index)} names of {len(cards)} cards")
        for one in self.conversations:
            content = await clean.catalogue.load(one.key)
            if content and one.named and content.get("title") not in one.titles:
                self.problems.append(f"a title was lost: {content.get('title')!r} and not {one.titles[-1]!r}")
        for one in self.conversations:
            await clean.sessions.erase(one.key)
        left = [scope for scope in self.store.scopes if self.store.scopes[scope].records]
        if left:
            self.problems.append(f"of erased conversations there is something left in {left}")

    async def compare(
        self, clean: Process, living: set[MemoryKey], besides: set[MemoryKey] | None = None
    ) -> None:
        """Compare the list with the conversations that there are; `besides` may be there, too."""
        for limit in (1, 2, 3, 50):
            found = await self.walked(clean.driver, clean.catalogue, limit)
            shown = [card.key for card in found]
            if len({*shown}) < len(shown):
                self.problems.append("the list shows a conversation twice")
            if missing := living - {*shown}:
                self.problems.append(f"the list misses {len(missing)} of {len(living)} conversations")
            if {*shown} - living - (besides or set()):
                self.problems.append("the list shows a conversation that was erased")
            if [card.updated for card in found] != sorted((card.updated for card in found), reverse=True):
                self.problems.append("the list is not in the order of the cards")


def _is_of(key: Key, one: Conversation) -> bool:
    """Say whether a key is that of a card or a name of a conversation."""
    return key.scope.endswith((":card", ":recent")) and key.name.endswith(keys.card_key(one.key).name)
