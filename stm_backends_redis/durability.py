"""How safe a write is once it is acknowledged, and the command that waits until it is."""

from __future__ import annotations

from typing import Any, cast

from redis.exceptions import NoPermissionError

from stm_backends.errors import ConfigurationError, OutcomeUnknown
from stm_backends_redis.servers import Command, Connected
from stm_backends_redis.settings import RedisSettings


class Safeguard:
    """WAIT or WAITAOF behind a write, and what follows from the answer.

    From Redis 7.2 on, both wait for the last write of their own connection, and for nothing if it has written
    nothing. So a write that is sent again and finds itself done is done once more, without effect.
    """

    def __init__(self, settings: RedisSettings) -> None:
        # The server gives up in time for a script that it did not know to be sent, and waited for, again.
        replicas, patience = settings.wait_replicas, int(settings.deadline_s * 400)
        # How many must have it: the server's own disk, where that is asked for, and replicas.
        self._asked = [1, replicas] if settings.wait_fsync else [replicas]
        self._name = "WAITAOF" if settings.wait_fsync else "WAIT"
        self._patience = patience
        self.is_asked = any(self._asked)

    @property
    def sentence(self) -> str:
        """What survives once acknowledged, as `Traits.durability` says it."""
        where: list[str] = []
        if len(self._asked) == 2:
            where.append("on the disk of the server")
        if self._asked[-1]:
            copies = "in the memory of" if len(self._asked) == 1 else "on the disks of"
            where.append(f"{copies} {self._asked[-1]} replica(s)")
        if where:
            return f"acknowledged once {' and '.join(where)}"
        return (
            "as the server is set up: with `appendfsync always` survives the server's death; a failover may "
            "take the last writes"
        )

    @property
    def behind(self) -> tuple[Command, ...]:
        """What is sent behind a write, in the same packet; nothing if nothing is asked."""
        return ((self._name, *self._asked, self._patience),) if self.is_asked else ()

    async def require(self, connected: Connected, key: bytes) -> None:
        """See, without waiting for a replica, that the server can wait, and that this user may ask it to.

        Raises `ConfigurationError` if it cannot.
        """
        if not self.is_asked:
            return
        (error,) = await connected.exchange(key, (self._name, *self._asked[:-1], 0, self._patience))
        if not isinstance(error, Exception):
            return
        if self._name == "WAIT" or isinstance(error, NoPermissionError):
            raise error
        raise ConfigurationError(
            "wait_fsync needs WAITAOF, which came with Redis 7.2, on a server with `appendonly yes`; "
            "leave it out, and set `appendfsync always` on the server instead"
        ) from error

    def confirmed(self, answer: Any, *behind: Any) -> Any:
        """Return the answer to a write that is as safe as asked; raises `OutcomeUnknown` if it is not.

        An answer below one says that nothing was written, so there is nothing to be safe.
        """
        if answer < 1:
            return answer
        for safe in behind:
            if isinstance(safe, Exception):
                raise OutcomeUnknown("done, but the server refused to wait until it is safe") from safe
            reached = cast("list[int]", safe if isinstance(safe, list) else [safe])
            if any(one < least for one, least in zip(reached, self._asked, strict=True)):
                raise OutcomeUnknown("done, but not confirmed in time by as many servers as asked for")
        return answer
