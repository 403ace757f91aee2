"""A real HTTP server that speaks OpenAI's protocol, as badly as a test tells it to."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any


@dataclass
class Reply:
    """One answer. `hang` keeps the connection open, without an answer, until the server is closed."""

    body: Any = None
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict[str, str])
    hang: bool = False


def completion(text: Any, *, finish_reason: str = "stop") -> Reply:
    message = {"role": "assistant", "content": text}
    choice = {"index": 0, "message": message, "finish_reason": finish_reason}
    return Reply({"id": "c", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]})


def refusal(status: int, **headers: str) -> Reply:
    return Reply({"error": {"message": "no", "type": "t", "code": "c", "param": None}}, status, headers)


class Endpoint:
    """Answers each request with the next reply, and with the last one from then on.

    `requests` are the bodies that were received. A reply may be a function of the body.
    """

    def __init__(self, *replies: Reply | Callable[[Any], Reply]) -> None:
        self._replies = list(replies)
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self.requests: list[Any] = []
        self.paths: list[str] = []
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                reply = endpoint.answer(self.path, body)
                if reply.hang:
                    endpoint.wait_for_the_end()
                    self.close_connection = True
                    return
                data = reply.body if isinstance(reply.body, bytes) else json.dumps(reply.body).encode()
                self.send_response(reply.status)
                for name, value in {"Content-Type": "application/json", **reply.headers}.items():
                    self.send_header(name.replace("_", "-"), value)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}/v1"

    def answer(self, path: str, body: Any) -> Reply:
        with self._lock:
            self.paths.append(path)
            self.requests.append(body)
            reply = self._replies.pop(0) if len(self._replies) > 1 else self._replies[0]
        return reply if isinstance(reply, Reply) else reply(body)

    def wait_for_the_end(self) -> None:
        self._closing.wait(60)

    def __enter__(self) -> Endpoint:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._closing.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
