"""Drivers that count bytes wrongly, or not everywhere."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from dataclasses import replace
from typing import Any

from stm_backends.drivers.contract import NO_LIMIT, Key
from stm_backends.drivers.in_memory import MemoryDriver
from stm_backends.errors import Unavailable


class BodiesOfAnySize(MemoryDriver):
    """Checks the size of an entry, and not that of a body."""

    async def replace(self, key: Key, body: bytes, **how: Any) -> bool:
        with without_limits(self, max_entry=NO_LIMIT):
            return await super().replace(key, body, **how)


class BodiesInFullRecords(MemoryDriver):
    """Checks the size of a record when an entry is added, and not when its body is replaced."""

    async def replace(self, key: Key, body: bytes, **how: Any) -> bool:
        with without_limits(self, max_record=NO_LIMIT):
            return await super().replace(key, body, **how)


class SmallEntriesAreFree(MemoryDriver):
    """Counts large entries alone."""

    async def append(self, key: Key, entry: bytes, *, initial_version: str, ttl: float | None) -> int:
        length = await super().append(key, entry, initial_version=initial_version, ttl=ttl)
        with self._scope(key.scope, "append") as (scope, _):
            if len(entry) < 1_000:
                scope.records[key.name].size -= len(entry)
        return length


class FullOneByteEarly(MemoryDriver):
    """Compares with "less than" where "at most" is meant."""

    async def append(self, key: Key, entry: bytes, *, initial_version: str, ttl: float | None) -> int:
        with without_limits(self, max_record=self.traits.max_record - 1):
            return await super().append(key, entry, initial_version=initial_version, ttl=ttl)


class OldBodiesTakeRoom(MemoryDriver):
    """Counts the body that a replace removes."""

    async def replace(self, key: Key, body: bytes, **how: Any) -> bool:
        before = await self.load(key)
        old = before.body if before and before.body else b""
        with without_limits(self, max_record=self.traits.max_record - len(old)):
            return await super().replace(key, body, **how)


@contextlib.contextmanager
def without_limits(driver: MemoryDriver, **limits: int) -> Generator[None]:
    """Let a driver have other limits for as long as the context lasts."""
    traits = driver.traits
    driver.traits = replace(traits, **limits)
    try:
        yield
    finally:
        driver.traits = traits


class RewritesWithinARequest(MemoryDriver):
    """Sends what it rewrites in one request, which is smaller than a record may be."""

    async def replace(self, key: Key, body: bytes, **how: Any) -> bool:
        if sum(map(len, how.get("rewrite", ()))) > self.traits.max_record // 2:
            raise Unavailable("the request is too large", backend=self.name, operation="replace")
        return await super().replace(key, body, **how)
