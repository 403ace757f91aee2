"""Nobody but who has the URL, at this address and on the page itself, is answered; nothing stored can act."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator

import pytest

from stm_backends import Backend, ConversationTurn, MemoryKey, ShortTermMemoryConfig
from stm_backends.drivers.in_memory import MemoryDriver, MemoryStore
from stm_backends.inspect import page as pages
from tests.support import asgi
from tests.support.asgi import Answer
from tests.support.inspected import HOST, TOKEN, Asked
from tests.support.recorded import recorded

CANARY = "</script><!--<script>alert(1)</script><img src=x onerror=alert(2)>\u2028"
KEY = MemoryKey("acme", CANARY, CANARY)
OPEN = f"/{TOKEN}/api/tenants"


@pytest.fixture
async def asked() -> AsyncIterator[Asked]:
    store = MemoryStore()
    async with Backend(MemoryDriver(store), close_timeout_s=0.2) as backend:
        memory = backend.memory(KEY, ShortTermMemoryConfig("truncation"))
        await memory.add_turn(ConversationTurn(CANARY, CANARY))
    page = Asked(MemoryDriver(store))
    async with page.backend:
        yield page


def bare(answer: Answer) -> bool:
    """Say whether an answer has nothing of what is stored."""
    return b"acme" not in answer.body


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/api/tenants",
        "//api/tenants",
        f"/{TOKEN}",
        f"/{TOKEN}x/api/tenants",
        f"/{TOKEN[:-1]}/api/tenants",
        f"/{TOKEN.upper()}/api/tenants",
        f"/x/{TOKEN}/api/tenants",
        f"/../{TOKEN}/api/tenants",
    ],
)
async def test_without_the_token_nothing_is_there(asked: Asked, path: str) -> None:
    answer = await asgi.ask(asked.app, path, headers=[("Host", HOST)])
    assert (answer.status, bare(answer)) == (404, True)


@pytest.mark.parametrize(
    "hosts",
    [
        [],
        ["evil.example"],
        ["evil.example:1"],
        ["127.0.0.1"],
        ["127.0.0.1:2"],
        ["127.0.0.1:1.evil.example"],
        ["0.0.0.0:1"],
        [HOST, "evil.example"],
        [HOST, HOST],
    ],
)
async def test_another_host_is_refused_with_the_token_too(asked: Asked, hosts: list[str]) -> None:
    answer = await asgi.ask(asked.app, OPEN, headers=[("Host", host) for host in hosts])
    assert (answer.status, bare(answer)) == (421, True)


@pytest.mark.parametrize(
    ("site", "status"), [("cross-site", 403), ("same-site", 403), ("same-origin", 200), ("none", 200)]
)
async def test_a_page_of_another_site_is_refused(asked: Asked, site: str, status: int) -> None:
    answer = await asgi.ask(asked.app, OPEN, headers=[("Host", HOST), ("Sec-Fetch-Site", site)])
    assert answer.status == status
    assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
async def test_only_reads_are_answered(asked: Asked, method: str) -> None:
    answer = await asgi.ask(asked.app, OPEN, headers=[("Host", HOST)], method=method)
    assert (answer.status, bare(answer)) == (405, True)


@pytest.mark.parametrize("path", [f"/{TOKEN}/", OPEN, f"/{TOKEN}/api/history", "/nothing"])
async def test_every_answer_has_the_headers(asked: Asked, path: str) -> None:
    headers = (await asgi.ask(asked.app, path, headers=[("Host", HOST)])).headers
    assert headers["cache-control"] == "no-store"
    assert headers["referrer-policy"] == "no-referrer"
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["cross-origin-resource-policy"] == "same-origin"
    rules = dict(rule.strip().partition(" ")[::2] for rule in headers["content-security-policy"].split(";"))
    assert rules["default-src"] == rules["base-uri"] == rules["form-action"] == "'none'"
    assert rules["frame-ancestors"] == "'none'"
    assert rules["connect-src"] == "'self'"
    for name in ("script-src", "style-src"):
        assert re.fullmatch(r"'sha256-[A-Za-z0-9+/]{43}='", rules[name])


async def test_the_page_has_nothing_of_what_is_stored_and_loads_nothing(asked: Asked) -> None:
    answer = await asgi.ask(asked.app, f"/{TOKEN}/", headers=[("Host", HOST)])
    assert (answer.status, answer.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert bare(answer)
    assert TOKEN.encode() not in answer.body
    assert not re.search(rb"(?:src|href)=(?!\"?data:)|https?://(?!www\.w3\.org)|@import|url\(", answer.body)


async def test_json_is_not_taken_for_markup(asked: Asked) -> None:
    answer = await asked.answer("history", of=["acme", CANARY, CANARY])
    assert (answer.status, answer.headers["content-type"]) == (200, "application/json")
    assert answer.body.isascii()
    assert answer.json()["units"][0]["lines"] == [["user", CANARY], ["assistant", CANARY]]


async def test_what_is_recorded_ends_no_tag(asked: Asked) -> None:
    page = "".join([part async for part in pages.record(asked.backend, KEY, named=CANARY)])
    shipped = pages.page().html
    assert page.count("<script") == shipped.count("<script") + 1
    assert page.count("</script") == shipped.count("</script") + 1
    assert page.count("<!--") == shipped.count("<!--") - 2
    found = recorded(page)
    assert (found["key"], found["named"]) == (["acme", CANARY, CANARY], CANARY)
    assert found["units"][0]["lines"][0] == ["user", CANARY]


def test_the_script_makes_elements_and_never_markup() -> None:
    (script,) = re.findall("<script>(.*?)</script>", pages.page().html, re.DOTALL)
    for sink in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "Function("):
        assert sink not in script
    assert not re.search(r"setTimeout\(\s*[\"'`]", script)
