"""How safe a write is once it is acknowledged, and the command that waits until it is."""

from __future__ import annotations

from typing import Any, cast

from redis.client import NEVER_DECODE
from redis.exceptions import NoPermissionError, ResponseError

from stm_backends.errors import ConfigurationError, OutcomeUnknown
from stm_backends_redis.settings import RedisSettings

Argument = bytes | str | int


class Safeguard:
    """Sends a write and, behind it in the same packet, WAIT or WAITAOF.

    Both wait for everything that the server has written so far, so a write that is sent again and finds
    itself done is waited for as well.
    """

    def __init__(self, settings: RedisSettings) -> None:
        # The server gives up in time for a script that it did not know to be sent, and waited for, again.
        replicas, patience = settings.wait_replicas, int(settings.deadline_s * 400)
        # How many must have it: the server's own disk, where that is asked for, and replicas.
        self._asked = [1, replicas] if settings.wait_fsync else [replicas]
        self._name = "WAITAOF" if settings.wait_fsync else "WAIT"
        self._patience = patience
        self._is_asked = any(self._asked)

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

    async def require(self, client: Any) -> None:
        """See, without waiting for a replica, that the server can wait, and that this user may ask it to.

        Raises `ConfigurationError` if it cannot.
        """
        if not self._is_asked:
            return
        try:
            await client.execute_command(self._name, *self._asked[:-1], 0, self._patience)
        except ResponseError as error:
            if self._name == "WAIT" or isinstance(error, NoPermissionError):
                raise
            raise ConfigurationError(
                "wait_fsync needs WAITAOF, which came with Redis 7.2, on a server with `appendonly yes`; "
                "leave it out, and set `appendfsync always` on the server instead"
            ) from error

    async def execute(self, client: Any, *command: Argument) -> Any:
        """Return the answer to a write once it is as safe as asked; raises `OutcomeUnknown` if it is not.

        An answer below zero says that nothing was written, so there is nothing to be safe.
        """
        if not self._is_asked:
            return await client.execute_command(*command, **{NEVER_DECODE: True})
        pipeline: Any
        async with client.pipeline(transaction=False) as pipeline:
            pipeline.execute_command(*command, **{NEVER_DECODE: True})
            pipeline.execute_command(self._name, *self._asked, self._patience)
            answer, safe = await pipeline.execute(raise_on_error=False)
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, int) and answer < 0:
            return answer
        if isinstance(safe, Exception):
            raise OutcomeUnknown("done, but the server refused to wait until it is safe") from safe
        reached = cast("list[int]", safe if isinstance(safe, list) else [safe])
        if any(one < least for one, least in zip(reached, self._asked, strict=True)):
            raise OutcomeUnknown("done, but not confirmed in time by as many servers as asked for")
        return answer
