"""The listings of stored data, for programs without an event loop."""

from __future__ import annotations

from collections.abc import Iterator

from stm_backends.admin import sessions
from stm_backends.records.keys import LogKind
from stm_backends.sync.memory import Run, each
from stm_backends.types import MemoryKey


class Sessions:
    """The listings of the asynchronous `Sessions`, for use in `for` statements; `backend.sessions` is one.

    Its other methods run through `backend.run(backend.asynchronous.sessions...)`.
    """

    def __init__(self, behind: sessions.Sessions, run: Run) -> None:
        self._behind = behind
        self._run = run

    def tenants(self) -> Iterator[str]:
        """Yield the tenants that have stored data, if the driver can find them."""
        return each(self._behind.tenants(), self._run)

    def users(self, tenant: str) -> Iterator[str]:
        """Yield the users of a tenant who have stored data."""
        return each(self._behind.users(tenant), self._run)

    def list(self, tenant: str, user: str) -> Iterator[MemoryKey]:
        """Yield the conversations of a user; one that exists throughout the listing comes exactly once."""
        return each(self._behind.list(tenant, user), self._run)

    def logs(
        self,
        tenant: str,
        user: str,
        kind: LogKind | None = None,
        *,
        prefix: str = "",
        beside: bool = True,
    ) -> Iterator[tuple[LogKind, MemoryKey]]:
        """Yield the item logs of a user: the framework and the conversation of each."""
        return each(self._behind.logs(tenant, user, kind, prefix=prefix, beside=beside), self._run)
