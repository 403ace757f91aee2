"""The driver around a backend's driver that reports refused operations to an observer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from typing import TypeVar

from stm_backends.drivers.contract import Driver, Key
from stm_backends.drivers.wrapper import Operation, WrapperDriver
from stm_backends.errors import Denied
from stm_backends.records.keys import owner_of
from stm_backends.records.seals import Seals
from stm_backends.telemetry.guarded import GuardedObserver
from stm_backends.telemetry.observer import Observer, Subject

T = TypeVar("T")


def reporting_denials(driver: Driver, observer: Observer) -> Driver:
    """Return the driver, or one around it that reports each `Denied` if the observer counts them."""
    inner = observer.inner if isinstance(observer, GuardedObserver) else observer
    listens = type(inner).denied is not Observer.denied
    return _ReportingDriver(driver, observer) if listens else driver


class _ReportingDriver(WrapperDriver):
    def __init__(self, inner: Driver, observer: Observer) -> None:
        super().__init__(inner)
        self._observer = observer

    async def open(self) -> None:
        """Open the driver within."""
        try:
            await self.inner.open()
        except Denied:
            self._observer.denied(Subject(), "open")
            raise

    async def call(self, operation: Operation, key: Key | str, send: Callable[[], Awaitable[T]]) -> T:
        try:
            return await send()
        except Denied:
            scope = key.scope if isinstance(key, Key) else key
            self._observer.denied(Subject(*owner_of(scope)), operation)
            raise


class ReportingSeals:
    """Reports denials by the store of keys while a backend checks whether it may write."""

    def __init__(self, inner: Seals, observer: Observer) -> None:
        self._inner = inner
        self._observer = observer

    async def meet(self, tenant: str) -> None:
        """Call `Seals.meet`."""
        with self._reported(Subject(tenant)):
            await self._inner.meet(tenant)

    async def require(self, tenant: str) -> None:
        """Call `Seals.require`."""
        with self._reported(Subject(tenant)):
            await self._inner.require(tenant)

    async def key_of(self, tenant: str, user: str, known: str | None) -> str | None:
        """Call `Seals.key_of`."""
        with self._reported(Subject(tenant, user)):
            return await self._inner.key_of(tenant, user, known)

    @contextmanager
    def _reported(self, subject: Subject) -> Generator[None]:
        try:
            yield
        except Denied as error:
            self._observer.denied(subject, error.operation)
            raise
