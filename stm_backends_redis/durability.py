"""The durability of acknowledged writes, and the command that waits for it."""

from __future__ import annotations

from typing import Any, cast

from redis.exceptions import NoPermissionError

from stm_backends.errors import ConfigurationError, OutcomeUnknown
from stm_backends_redis import statements
from stm_backends_redis.servers import Command, Connected
from stm_backends_redis.settings import RedisSettings


class Safeguard:
    """WAIT or WAITAOF after a write, and the meaning of its answer.

    Since Redis 7.2, both wait for the last write of their own connection, and do not wait if it has written
    nothing. So a retry of a write that was already done writes once more, without effect.
    """

    def __init__(self, settings: RedisSettings) -> None:
        # Short enough to send an unknown script again, and wait again, within the deadline.
        replicas, patience = settings.wait_replicas, int(settings.deadline_s * 400)
        # The number of confirmations: of the server's own disk, if requested, and of replicas.
        self._asked = [1, replicas] if settings.wait_fsync else [replicas]
        self._name = "WAITAOF" if settings.wait_fsync else "WAIT"
        self._patience = patience
        self.is_asked = any(self._asked)
        self.behind: tuple[Command, ...] = ((self._name, *self._asked, patience),) if self.is_asked else ()
        """The command to send after a write in the same packet, if there is anything to wait for."""

    @property
    def sentence(self) -> str:
        """The events that an acknowledged write survives, for `Traits.durability`."""
        where: list[str] = []
        if len(self._asked) == 2:
            where.append("on the disk of the server")
        if self._asked[-1]:
            copies = "in the memory of" if len(self._asked) == 1 else "on the disks of"
            where.append(f"{copies} {self._asked[-1]} replica(s)")
        if where:
            return f"acknowledged once {' and '.join(where)}"
        return (
            "as the server is configured: with `appendfsync always` survives a crash of the server; a "
            "failover may lose the last writes"
        )

    async def require(self, connected: Connected) -> None:
        """Check, without waiting for a replica, that the server supports the command and permits it.

        Raises `ConfigurationError` if the server does not support it.
        """
        if not self.is_asked:
            return
        wait = (self._name, *self._asked[:-1], 0, self._patience)
        _, error = await connected.exchange(b"", statements.GREET, wait)
        if not isinstance(error, Exception):
            return
        if self._name == "WAIT" or isinstance(error, NoPermissionError):
            raise error
        raise ConfigurationError(
            "wait_fsync needs WAITAOF (Redis 7.2 or later) on a server with `appendonly yes`; "
            "leave it out, and set `appendfsync always` on the server instead"
        ) from error

    def confirmed(self, answer: Any, *behind: Any) -> Any:
        """Return the answer to a write that is as durable as requested; otherwise raises `OutcomeUnknown`.

        An answer below one means that nothing was written, so there is nothing to wait for.
        """
        if answer < 1:
            return answer
        for safe in behind:
            if isinstance(safe, Exception):
                raise OutcomeUnknown("done, but the server refused to wait until it is durable") from safe
            reached = cast("list[int]", safe if isinstance(safe, list) else [safe])
            if any(one < least for one, least in zip(reached, self._asked, strict=True)):
                raise OutcomeUnknown("done, but not confirmed in time by the requested number of servers")
        return answer
