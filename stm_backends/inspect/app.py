"""The page and its JSON as an ASGI application. It only reads; every request needs the token and the host.

```
GET /TOKEN/                      the page
GET /TOKEN/api/where             the datastore, and where the page begins
GET /TOKEN/api/tenants           ?like
GET /TOKEN/api/users             ?of=["tenant"]&like
GET /TOKEN/api/conversations     ?of=["tenant","user"]&after
GET /TOKEN/api/filtered          ?of=["tenant"(,"user")]&by&budget
GET /TOKEN/api/days              ?of=["tenant"(,"user")]&days
GET /TOKEN/api/conversation      ?of=["tenant","user","session"]&seen and the settings of the budget
GET /TOKEN/api/history           ?of=[...]&before|after|at&revision&log
GET /TOKEN/api/find              ?of=[...]&words&before
GET /TOKEN/api/covers            ?of=[...]
```

`of` is JSON, because ids are any text, also such that no URL can have.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any, Final, TypeAlias, cast

from stm_backends.backend import Backend
from stm_backends.errors import (
    ConfigurationError,
    Corrupt,
    Denied,
    MessageNotFound,
    SessionNotFound,
    StmError,
    Unavailable,
)
from stm_backends.extras import missing_extra
from stm_backends.inspect import days, happened, listing, reading
from stm_backends.inspect.page import page, served_policy
from stm_backends.memory.defaults import remembering
from stm_backends.types import MemoryBudget, MemoryKey, ShortTermMemoryConfig, as_config

try:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import HTMLResponse, Response
    from starlette.routing import Route
    from starlette.types import ASGIApp, Message, Receive, Scope, Send
except ModuleNotFoundError as error:
    raise missing_extra("inspect", error) from None

Answer: TypeAlias = Callable[[Request], Awaitable[dict[str, Any]]]

HEADERS: Final = (
    (b"cache-control", b"no-store"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
)

_STATUS: Final[tuple[tuple[type[StmError], int], ...]] = (
    (ConfigurationError, 400),
    (Denied, 403),
    (SessionNotFound, 404),
    (MessageNotFound, 404),
    (Corrupt, 422),
    (Unavailable, 503),
)

_LONGEST: Final = 64 * 1024
"""How many characters `of` has at most."""

_COUNTS: Final = ("full_zone_turns", "summary_max_tokens", "total_max_tokens")


def inspector(
    backend: Backend,
    *,
    token: str,
    hosts: frozenset[str],
    datastore: str = "",
    start: tuple[str, ...] = (),
    config: ShortTermMemoryConfig | None = None,
) -> ASGIApp:
    """Return the application for an open backend.

    `token` is the first part of every path, and `hosts` has what the header `Host` may be. `datastore` is
    shown, `start` has the ids where the page begins, and `config` is that of the memories.
    """
    api = _Api(backend, datastore, start, config)
    routes = [Route("/", _page, methods=["GET"])]
    routes += [
        Route(f"/api/{name}", _json(answer), methods=["GET"], name=name)
        for name, answer in api.each().items()
    ]
    return Guarded(Starlette(routes=routes, exception_handlers={StmError: _failed}), token, hosts)


class Guarded:
    """Answers nothing without the token, to another host, or for another site; adds the headers."""

    def __init__(self, app: ASGIApp, token: str, hosts: frozenset[str]) -> None:
        self._app = app
        self._token = token.encode("ascii")
        self._hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return

        async def sent(message: Message) -> None:
            if message["type"] == "http.response.start":
                policy = (b"content-security-policy", served_policy().encode("ascii"))
                message = {**message, "headers": [*message["headers"], *HEADERS, policy]}
            await send(message)

        refused = self._refused(scope)
        if refused is not None:
            await Response(refused[1], refused[0])(scope, receive, sent)
            return
        _, _, path = scope["path"][1:].partition("/")
        await self._app({**scope, "path": f"/{path}", "raw_path": b"", "root_path": ""}, receive, sent)

    def _refused(self, scope: Scope) -> tuple[int, str] | None:
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        hosts = [value for name, value in headers if name == b"host"]
        # A page of another name that resolves to this address has that name as its host.
        if len(hosts) != 1 or hosts[0].decode("latin-1").lower() not in self._hosts:
            return 421, "This address is not served here."
        sites = [value for name, value in headers if name == b"sec-fetch-site"]
        if any(site not in (b"same-origin", b"none") for site in sites):
            return 403, "Other sites may not ask."
        given, slash, _ = scope["path"][1:].partition("/")
        if not slash or not hmac.compare_digest(given.encode("utf-8", "surrogatepass"), self._token):
            return 404, "Not found."
        if scope["method"] not in ("GET", "HEAD"):
            return 405, "This page only reads."
        return None


async def _page(request: Request) -> Response:
    del request
    return HTMLResponse(page().html)


def _json(answer: Answer) -> Callable[[Request], Awaitable[Response]]:
    async def answered(request: Request) -> Response:
        return _as_response(await answer(request))

    return answered


def _as_response(content: Mapping[str, Any], status: int = 200) -> Response:
    # ASCII: ids and texts may have surrogates, which no encoding has.
    return Response(json.dumps(content), status, media_type="application/json")


async def _failed(request: Request, error: Exception) -> Response:
    """Return an error of this library; its message has no text of a conversation."""
    del request
    status = next((status for kind, status in _STATUS if isinstance(error, kind)), 500)
    return _as_response({"error": str(error), "kind": type(error).__name__}, status)


class _Api:
    """The answers, by the names of their routes."""

    def __init__(
        self,
        backend: Backend,
        datastore: str,
        start: tuple[str, ...],
        config: ShortTermMemoryConfig | None,
    ) -> None:
        self._backend = backend
        self._datastore = datastore
        self._start = start
        self._config = config

    def each(self) -> dict[str, Answer]:
        """Return all of them."""
        return {
            "where": self.where,
            "tenants": self.tenants,
            "users": self.users,
            "conversations": self.conversations,
            "filtered": self.filtered,
            "days": self.days,
            "conversation": self.conversation,
            "history": self.history,
            "find": self.find,
            "covers": self.covers,
        }

    async def where(self, request: Request) -> dict[str, Any]:
        """Return what the page says of the datastore."""
        del request
        return {"name": self._backend.name, "datastore": self._datastore, "start": [*self._start]}

    async def tenants(self, request: Request) -> dict[str, Any]:
        """Return the tenants."""
        return await listing.tenants(self._backend, like=_text(request, "like"))

    async def users(self, request: Request) -> dict[str, Any]:
        """Return the users of a tenant."""
        (tenant,) = _of(request, 1)
        return await listing.users(self._backend, tenant, like=_text(request, "like"))

    async def conversations(self, request: Request) -> dict[str, Any]:
        """Return a page of the conversations of a user."""
        tenant, user = _of(request, 2)
        return await listing.conversations(self._backend, tenant, user, after=_text(request, "after") or None)

    async def filtered(self, request: Request) -> dict[str, Any]:
        """Return the conversations that a filter is for."""
        tenant, user = _owner(request)
        by, budget = listing.as_filter(_text(request, "by")), _number(request, "budget")
        usual = (self._config or ShortTermMemoryConfig()).budget.total_max_tokens
        return await listing.filtered(
            self._backend, tenant, user, by, budget=usual if budget is None else budget
        )

    async def days(self, request: Request) -> dict[str, Any]:
        """Return the sums of a tenant or user by day."""
        tenant, user = _owner(request)
        return await days.days_of(self._backend, tenant, user, days=_number(request, "days") or 31)

    async def conversation(self, request: Request) -> dict[str, Any]:
        """Return the state of a conversation."""
        seen = request.query_params.get("seen")
        config = _settings(request, self._config)
        return await reading.state_of(self._backend, _key(request), config, seen=seen)

    async def history(self, request: Request) -> dict[str, Any]:
        """Return a page of the history of a conversation."""
        log = _text(request, "log")
        kind = reading.log_kind(log)
        if log and kind is None:
            raise ConfigurationError("log is the name of a framework")
        return await reading.history_of(
            self._backend,
            _key(request),
            before=_number(request, "before"),
            after=_number(request, "after"),
            at=_number(request, "at"),
            revision=_number(request, "revision"),
            log=kind,
        )

    async def find(self, request: Request) -> dict[str, Any]:
        """Return where a text is in a conversation."""
        words, before = _text(request, "words"), _number(request, "before")
        return await reading.found_in(self._backend, _key(request), words, before=before)

    async def covers(self, request: Request) -> dict[str, Any]:
        """Return the earlier summaries of a conversation."""
        shared = reading.shared_of(self._backend, _key(request))
        snapshot = await reading.snapshot_of(self._backend, shared)
        return (await happened.covers_of(shared, snapshot)).as_json()


def _text(request: Request, name: str) -> str:
    return request.query_params.get(name, "")


def _number(request: Request, name: str) -> int | None:
    text = _text(request, name)
    if not text:
        return None
    try:
        return int(text[:20])
    except ValueError:
        raise ConfigurationError(f"{name} must be an integer") from None


def _of(request: Request, *counts: int) -> list[str]:
    """Return the ids that `of` has: as many as one of `counts`."""
    text = _text(request, "of")
    try:
        found: object = json.loads(text) if len(text) <= _LONGEST else None
    except (ValueError, RecursionError):
        found = None
    ids = cast("list[object]", found) if isinstance(found, list) else []
    if len(ids) not in counts or not all(isinstance(one, str) and one.strip() for one in ids):
        raise ConfigurationError('of is a JSON list of ids, as in ["acme","u123","trip"]')
    return cast("list[str]", ids)


def _owner(request: Request) -> tuple[str, str | None]:
    tenant, *user = _of(request, 1, 2)
    return tenant, user[0] if user else None


def _key(request: Request) -> MemoryKey:
    return MemoryKey(*_of(request, 3))


def _settings(request: Request, given: ShortTermMemoryConfig | None) -> ShortTermMemoryConfig | None:
    """Return the configuration with the settings of a request. Raises `ConfigurationError`."""
    asked = {name: number for name in _COUNTS if (number := _number(request, name)) is not None}
    strategy, policy = _text(request, "strategy"), _text(request, "overflow_policy")
    if not (asked or strategy or policy):
        return given
    base = given or as_config(remembering(None, None)[0])
    known = {name: getattr(base.budget, name) for name in _COUNTS}
    budget = MemoryBudget(
        **(known | asked), overflow_policy=cast("Any", policy or base.budget.overflow_policy)
    )
    return replace(base, strategy=cast("Any", strategy or base.strategy), budget=budget)
