"""Seals the records of tenants and users again with the primary key, so that an older key can be removed.

Each record takes one load and, unless all its values have the primary key, one conditional write (see
`SealedDriver.reseal`). An interruption leaves every record readable; the next run skips what is done. The
datastore may be in use. If some process still seals with an older key, run it again after that process ended.

The records of a user are those of all kinds: conversations, the pages of their transcripts, logs, saved
states, paused runs, the parts of large values, and the user's entry in the tenant's directory. A tenant also
has states as a whole.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal, TypeAlias

from stm_backends.admin.copying import Owner
from stm_backends.drivers.contract import Key
from stm_backends.drivers.erasing import finish_erasure
from stm_backends.errors import Corrupt, KeyMismatch, StorageError, TooLarge
from stm_backends.records import keys, operations
from stm_backends.records.large.parts import run_concurrently

if TYPE_CHECKING:
    from stm_backends.sealing.driver import SealedDriver

Problem: TypeAlias = Literal["left", "failed"]
"""The reason why a record still needs an older key.

- `"left"`: it changed each time, or has more entries than one write reaches. Run it again later, when older
  turns have been summarized or dropped.
- `"failed"`: it cannot be opened, or would be too large; the error says which.
"""

OnProblem: TypeAlias = Callable[[Key, Problem, StorageError | None], None]


@dataclass(slots=True)
class ResealReport:
    """The progress so far.

    `records` were sealed again, with `values` values in them; `current` needed nothing. `data_keys` were
    wrapped again. `lost_races` counts writes that were repeated because another process changed the record.
    `left` and `failed` count the records with a problem. With `accept_clear=True`, `remains` describes the
    replaced clear text that the datastore still keeps, like the receipt of an erasure, and `cleaned` is
    `False` if the driver failed to remove all of it that it can remove.
    """

    records: int = 0
    values: int = 0
    current: int = 0
    data_keys: int = 0
    lost_races: int = 0
    left: int = 0
    failed: int = 0
    remains: str = ""
    cleaned: bool | None = None

    @property
    def ok(self) -> bool:
        """True if no record needs an older key, except those that others have written since."""
        return not (self.left or self.failed)


class Reseal:
    """One pass over the records of some owners. `report` is kept up to date.

    `fold_log` moves the oldest entries into the body, if the record is an item log; returns whether it did.
    `relist` writes the entry of a user in the tenant's directory again, if it is in clear text, as a copy
    that was made without keys leaves it.
    `on_problem` is called once for each record that still needs an older key.
    """

    def __init__(
        self,
        driver: SealedDriver,
        owners: Iterable[Owner],
        *,
        fold_log: Callable[[Key], Awaitable[bool]],
        relist: Callable[[str, str], Awaitable[None]],
        on_problem: OnProblem = lambda key, problem, error: None,
    ) -> None:
        self._driver = driver
        given = dict.fromkeys(owners)
        self._owners = [one for one in given if one.user is None or Owner(one.tenant) not in given]
        self._fold_log = fold_log
        self._relist = relist
        self._on_problem = on_problem
        self.report = ResealReport()

    async def count(self) -> int:
        """Return the number of records."""
        count = 0
        for owner in self._owners:
            async for user in self._users(owner):
                async for page in self._pages(owner.tenant, user):
                    count += len(page)
        return count

    async def run(self, on_record: Callable[[int], None] = lambda done: None) -> ResealReport:
        """Seal every record that needs it again; `on_record` is called with the number of processed records.

        A record that cannot be opened, or would be too large, is skipped. Any other `StorageError` ends the
        pass; a new one does not repeat what was done.
        """
        done = 0

        async def work(key: Key) -> None:
            nonlocal done
            await self._reseal(key)
            done += 1
            on_record(done)

        for owner in self._owners:
            self.report.data_keys += await self._driver.rewrap(owner.tenant, "")
            async for user in self._users(owner):
                if user:
                    self.report.data_keys += await self._driver.rewrap(owner.tenant, user)
                async for page in self._pages(owner.tenant, user):
                    await run_concurrently([partial(work, key) for key in page])
            if self.report.ok:
                # With the primary key in the mark, a process needs no older one.
                await self._driver.marks.meet(owner.tenant)
        if self._driver.accepts_clear:
            self.report.remains, self.report.cleaned = await finish_erasure(self._driver)
        return self.report

    async def _reseal(self, key: Key) -> None:
        report, values = self.report, self.report.values
        try:
            while True:
                resealed = await self._driver.reseal(key)
                report.values += resealed.values
                report.lost_races += resealed.lost_races
                # An item log may have more entries than one write reaches.
                if not (resealed.left and await self._fold_log(key)):
                    break
        except (Corrupt, TooLarge) as error:
            if not isinstance(error, KeyMismatch) and await self._is_clear_entry(key):
                await self._relist(keys.owner_of(key.scope)[0], keys.unname(key.name))
                report.records += 1
                report.values += 1
                return
            report.failed += 1
            self._on_problem(key, "failed", error)
            return
        if resealed.left:
            report.left += 1
            self._on_problem(key, "left", None)
        elif report.values > values:
            report.records += 1
        elif resealed.exists:
            report.current += 1

    async def _is_clear_entry(self, key: Key) -> bool:
        """Say whether this is the entry of a user in the tenant's directory, in clear text."""
        tenant, user = keys.owner_of(key.scope)
        if not tenant or user:
            return False
        record = await self._driver.inner.load(key)
        return record is not None and not (record.body or b"").startswith(operations.SEALED)

    async def _users(self, owner: Owner) -> AsyncIterator[str]:
        if owner.user is not None:
            yield owner.user
            return
        async for name in operations.names(self._driver, keys.directory_scope(owner.tenant)):
            yield keys.unname(name)
        # Records of the tenant as a whole.
        yield ""

    async def _pages(self, tenant: str, user: str) -> AsyncIterator[list[Key]]:
        """Yield the keys of all records of a user, of a tenant as a whole, or of those without either.

        They come a page of names at a time.
        """
        if user:
            yield [keys.directory_key(tenant, user)]
            scopes = [keys.scope(tenant, user, kind) for kind in keys.KINDS]
        else:
            shared = keys.shared_scope(tenant)
            unowned = [] if tenant else [keys.PAUSED_RUNS, keys.WORK]
            scopes = [shared, keys.parts_of(Key(shared, "")).scope, *unowned]
        for scope in scopes:
            position: str | None = ""
            while position is not None:
                page = await self._driver.scan(scope, after=position, limit=operations.PAGE)
                yield [Key(scope, name) for name in page.names]
                position = page.after
                if user and scope == keys.scope(tenant, user, "planner"):
                    yield [key for name in page.names for key in await self._run(name)]

    async def _run(self, name: str) -> list[Key]:
        """Return the keys of a paused run that a note of its user names, and of its parts."""
        run = Key(keys.PAUSED_RUNS, name)
        scope, prefix = keys.parts_of(run)
        return [run, *[Key(scope, part) async for part in operations.names_of(self._driver, scope, prefix)]]
