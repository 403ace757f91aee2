"""One connection to a server of NATS: requests, their answers, and what becomes of them when it is lost."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Mapping
from typing import Any

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg

from stm_backends import Denied, Unavailable
from tests.strangers.nats_backend.settings import NatsSettings

FAREWELL_S = 1.0
"""How long a connection may take to say farewell before it is cut."""


class LinkLost(Exception):
    """The connection was lost while a request waited for its answer: it was perhaps done."""


class Link:
    """A connection whose requests fail at once when it is lost; it never connects again by itself.

    The client's own `request` waits in vain after a loss, and its reconnecting sends again what waits in its
    buffer, long after the caller was told that it failed. So the answers are waited for here, nothing is
    buffered while the client is not connected, and another `Link` takes the place of a lost one.
    """

    def __init__(self, client: Client | None = None) -> None:
        self.client = client or Client()
        self._owned = client is None
        self._waiting: dict[str, tuple[str, asyncio.Future[Msg]]] = {}
        self._inbox, self._number = "", 0
        self._subscription: Any = None
        self._cause: Exception | None = None
        self._idle: Callable[[], None] | None = None
        self.is_lost = False

    async def open(self, settings: NatsSettings, *, timeout_s: float) -> None:
        """Connect, unless the client was handed in; raises `Unavailable` or `Denied`."""
        try:
            if self._owned:
                await self._connect(settings, timeout_s)
            elif not self.client.is_connected:
                raise Unavailable("the client that was handed in is not connected")
            self._inbox = self.client.new_inbox() + "."
            self._subscription = await self.client.subscribe(
                self._inbox + "*", cb=self._answered, pending_msgs_limit=0, pending_bytes_limit=0
            )
        except nats.errors.Error as error:
            raise self._meaning(error) from (self._cause or error)
        except (OSError, TimeoutError) as error:
            raise Unavailable("no connection to NATS") from error

    async def _connect(self, settings: NatsSettings, timeout_s: float) -> None:
        async with asyncio.timeout(timeout_s):
            await self.client.connect(
                servers=settings.servers,
                name="stm-backends",
                user=settings.user,
                password=settings.password,
                token=settings.token,
                tls=settings.tls,
                allow_reconnect=False,
                max_reconnect_attempts=1,  # the client tries forever with 0
                reconnect_time_wait=0,
                connect_timeout=math.ceil(timeout_s),
                pending_size=0,  # so that nothing is buffered while there is no connection
                error_cb=self._failed,
                closed_cb=self._closed,
            )

    def _meaning(self, error: Exception) -> Exception:
        text = f"{error} {self._cause}".lower()
        if isinstance(error, nats.errors.AuthorizationError) or "authorization" in text:
            return Denied("the server refused the login")
        return Unavailable("no connection to NATS")

    async def request(self, subject: str, payload: bytes, headers: Mapping[str, str] | None = None) -> Msg:
        """Send a request and return its answer.

        Raises `Unavailable` if it was not sent, and `LinkLost` if the connection was lost after that.
        """
        future = await self.send(subject, payload, headers)
        try:
            return await future
        finally:
            future.cancel()

    async def send(
        self, subject: str, payload: bytes, headers: Mapping[str, str] | None = None
    ) -> asyncio.Future[Msg]:
        """Send a request and return its answer to come; whoever does not await it cancels it."""
        if self.is_lost or not self.client.is_connected:
            raise Unavailable("the connection was lost; nothing was sent")
        self._number += 1
        inbox = f"{self._inbox}{self._number}"
        future: asyncio.Future[Msg] = asyncio.get_running_loop().create_future()
        self._waiting[inbox] = subject.lower(), future
        future.add_done_callback(lambda _: self._done(inbox))
        try:
            await self.client.publish(
                subject, payload, reply=inbox, headers=dict(headers) if headers else None
            )
        except nats.errors.Error as error:
            future.cancel()
            raise Unavailable("the client did not send it") from error
        except BaseException:
            future.cancel()
            raise
        return future

    def _done(self, inbox: str) -> None:
        self._waiting.pop(inbox, None)
        if self._idle and not self._waiting:
            idle, self._idle = self._idle, None
            idle()

    async def _answered(self, message: Msg) -> None:
        _, future = self._waiting.get(message.subject, ("", None))
        if future is not None and not future.done():
            if (message.headers or {}).get("Status") == "503":
                future.set_exception(Unavailable("JetStream is not enabled, or the stream does not exist"))
            else:
                future.set_result(message)

    async def _failed(self, error: Exception) -> None:
        """Remember an error of the client; one about permissions names the subject of a request."""
        self._cause = error
        if "permissions violation" in str(error).lower():
            for subject, future in list(self._waiting.values()):
                if f'"{subject}"' in str(error).lower() and not future.done():
                    future.set_exception(Denied("the server does not permit it to this user"))

    async def _closed(self) -> None:
        self.lose()

    def lose(self) -> None:
        """Fail all that waits; nothing is sent any more."""
        self.is_lost = True
        for _, future in list(self._waiting.values()):
            if not future.done():
                future.set_exception(LinkLost("the connection was lost"))

    def when_idle(self, then: Callable[[], None]) -> None:
        """Call `then` once nothing waits for an answer."""
        if self._waiting:
            self._idle = then
        else:
            then()

    async def close(self) -> None:
        """Close the connection, unless it was handed in."""
        self.lose()
        if not self._owned:
            if self._subscription is not None and not self.client.is_closed:
                with contextlib.suppress(nats.errors.Error, OSError):
                    await self._subscription.unsubscribe()
            return
        try:
            # A network that is silent takes no bytes, and the client waits for it without an end.
            async with asyncio.timeout(FAREWELL_S):
                await self.client.close()
        except (nats.errors.Error, OSError, TimeoutError):
            pass
        finally:
            self._cut()

    def _cut(self) -> None:
        """End the connection whatever waits in its buffers; the client offers no such call."""
        writer = getattr(getattr(self.client, "_transport", None), "_io_writer", None)
        if writer is not None:
            writer.transport.abort()
