"""The pass-through driver, the base for drivers around another driver."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Literal, TypeAlias, TypeVar

from stm_backends.drivers.checks import require_last
from stm_backends.drivers.contract import (
    ANY,
    AbsentType,
    AnyType,
    Driver,
    KeepType,
    Key,
    Page,
    Record,
    Traits,
)

T = TypeVar("T")
Operation: TypeAlias = Literal["load", "append", "replace", "delete", "scan"]


def layer_with(driver: Driver, *methods: str) -> Any:
    """Return the driver, or the first one within it, that has these methods; `None` if none has them all."""
    layer: Any = driver
    while layer is not None and not all(hasattr(layer, method) for method in methods):
        layer = getattr(layer, "inner", None)
    return layer


def with_last(driver: Driver) -> Driver:
    """Return the driver, or one around it that loads whole tails if its `load` has no parameter `last`.

    Only drivers that were written before this parameter lack it. Each driver around another checks once, when
    it is created.
    """
    try:
        parameters = inspect.signature(driver.load).parameters.values()
    except ValueError:
        # A compiled driver may not tell the parameters of its methods.
        return _LoadsAll(driver)
    takes = any(each.name == "last" or each.kind is each.VAR_KEYWORD for each in parameters)
    return driver if takes else _LoadsAll(driver)


class WrapperDriver:
    """Passes everything on to `inner`, unchanged; derive from it and override what you change.

    Override `load`, `append` and `replace` to change what is stored, as encryption does. Override `call` to
    act around every operation, as tracing does. Closing it closes `inner`.
    """

    def __init__(self, inner: Driver) -> None:
        self.inner = with_last(inner)

    @property
    def name(self) -> str:
        """The name of the driver within."""
        return self.inner.name

    @property
    def traits(self) -> Traits:
        """The facts about the driver within."""
        return self.inner.traits

    async def open(self) -> None:
        """Open the driver within."""
        await self.inner.open()

    async def close(self) -> None:
        """Close the driver within."""
        await self.inner.close()

    async def call(self, operation: Operation, key: Key | str, send: Callable[[], Awaitable[T]]) -> T:
        """Return the result of `send`: one operation of the driver within on a key or, to scan, a scope."""
        del operation, key
        return await send()

    async def load(self, key: Key, *, last: int | None = None) -> Record | None:
        """Return the record as it is now, or `None` if and only if it does not exist."""
        return await self.call("load", key, lambda: self.inner.load(key, last=last))

    async def append(self, key: Key, entry: bytes, *, initial_version: str, ttl: float | None) -> int:
        """Add one entry at the end; returns the new length of the tail."""
        return await self.call(
            "append", key, lambda: self.inner.append(key, entry, initial_version=initial_version, ttl=ttl)
        )

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
        """Store a body and its version if the record is what the caller expects."""
        return await self.call(
            "replace",
            key,
            lambda: self.inner.replace(
                key, body, version=version, expect=expect, drop=drop, rewrite=rewrite, ttl=ttl
            ),
        )

    async def delete(self, key: Key, *, expect: str | AnyType = ANY) -> bool:
        """Remove the record if it exists and carries `expect`; returns whether it did."""
        return await self.call("delete", key, lambda: self.inner.delete(key, expect=expect))

    async def scan(self, scope: str, *, after: str = "", limit: int) -> Page:
        """List names of one scope that are greater than `after`, in the order of their UTF-8 bytes."""
        return await self.call("scan", scope, lambda: self.inner.scan(scope, after=after, limit=limit))


class _LoadsAll(WrapperDriver):
    """A driver whose `load` returns all entries; those that were not asked for are left out here."""

    def __init__(self, inner: Driver) -> None:
        self.inner = inner

    async def load(self, key: Key, *, last: int | None = None) -> Record | None:
        require_last(last)
        record = await self.inner.load(key)
        return record and record.newest(last)
