"""Asking an ASGI application in the event loop of the test, without a server."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple
from urllib.parse import quote, urlencode


class Answer(NamedTuple):
    """What was answered. Names of headers are in small letters."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


async def ask(
    app: Any,
    path: str,
    query: dict[str, Any] | None = None,
    *,
    headers: Sequence[tuple[str, str]] = (),
    method: str = "GET",
) -> Answer:
    """Send one request; values of the query that are lists are sent as JSON."""
    words = {
        name: json.dumps(value) if isinstance(value, list | tuple) else value
        for name, value in (query or {}).items()
        if value is not None
    }
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": quote(path).encode("ascii"),
        "query_string": urlencode(words).encode("ascii"),
        "headers": [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers],
        "server": ("127.0.0.1", 1),
        "client": ("127.0.0.1", 2),
    }
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    await app(scope, receive, send)
    begin = sent[0]
    return Answer(
        begin["status"],
        {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in begin["headers"]},
        b"".join(message.get("body", b"") for message in sent[1:]),
    )
