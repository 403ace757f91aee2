"""Streams of the Redis driver that are broken; the tests in test_stream.py name which test rejects each."""

from __future__ import annotations

from stm_backends_redis.stream import Line


class AnswersTheNextCaller(Line):
    """Forgets the commands that were cancelled after they were written, although their answers still come."""

    def data_received(self, data: bytes) -> None:
        waiting = [request for request in self.sent if not request[1].done()]
        self.sent.clear()
        self.sent.extend(waiting)
        super().data_received(data)


class WritesTwice(Line):
    """Writes again, on the next connection, what was written when the connection was lost."""

    def connection_lost(self, exc: Exception | None) -> None:
        self._stream._queue[:0] = self.sent  # noqa: SLF001 -- no driver does this
        self.sent.clear()
        super().connection_lost(exc)
