"""The page of `inspect` in a real browser: narrow and wide, light and dark, by keys, hostile text."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from stm_backends import (
    Backend,
    ConversationTurn,
    MemoryHealth,
    MemoryKey,
    ShortTermMemoryConfig,
    open_backend,
)
from stm_backends.testing.memory_contract import config
from stm_backends.testing.workbench.summarizers import LedgerSummarizer
from tests.support import apt, chromium
from tests.support.catalogue import touched
from tests.support.inspected import alter, say

playwright = pytest.importorskip("playwright.sync_api")
pytest.importorskip("uvicorn")
expect = playwright.expect
if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page, Request, Route

pytestmark = pytest.mark.full

KEY = MemoryKey("acme", "ann", "trip")
WIDE, NARROW = (1280, 800), (390, 844)
HOSTILE = "</script><img src=x onerror=\"document.title='owned'\"><b>bold</b>\u202egnp.exe\u200b"
NEWEST = ShortTermMemoryConfig("truncation")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    try:
        with chromium.running() as browser:
            yield browser
    except apt.NotAtHand as error:
        pytest.skip(str(error))


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/inspected.db"


def store(url: str, *fill: Callable[[Backend], Any]) -> None:
    """Store something, each `fill` with an open backend."""

    async def work() -> None:
        async with open_backend(url) as backend:
            for one in fill:
                await one(backend)

    asyncio.run(work())


async def trip(backend: Backend) -> None:
    """A conversation of which most turns are in its summary."""
    await say(backend, KEY, 130)
    await touched(backend, KEY)


@pytest.fixture
def served(url: str, tmp_path: Path) -> Iterator[Callable[..., str]]:
    """Serves the page; returns its address."""
    running: list[subprocess.Popen[str]] = []

    def serve(*options: str) -> str:
        command = [sys.executable, "-m", "stm_backends", "inspect", "--url", url, *options]
        process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
        running.append(process)
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.search(r"http://127\.0\.0\.1:\d+/[\w-]+/", line)
        assert found, line
        return found[0]

    yield serve
    for process in running:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


@pytest.fixture
def window(browser: Browser, served: Callable[..., str]) -> Iterator[Callable[..., Page]]:
    """Opens the page; no script fails, nothing is blocked by the policy, and nothing else is asked."""
    problems: list[str] = []
    contexts: list[Any] = []

    def opened(
        *options: str, size: tuple[int, int] = WIDE, scheme: Any = "light", address: str | None = None
    ) -> Page:
        address = address or served(*options)
        context = browser.new_context(viewport={"width": size[0], "height": size[1]}, color_scheme=scheme)
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: problems.append(str(error)))

        def asked(request: Request) -> None:
            if not request.url.startswith((address, "data:")):
                problems.append(f"asked {request.url}")

        page.on("request", asked)
        page.on(
            "console",
            lambda said: problems.append(said.text) if "Content Security Policy" in said.text else None,
        )
        page.goto(address)
        return page

    yield opened
    for context in contexts:
        context.close()
    assert problems == []


def rows(page: Page) -> Locator:
    return page.locator("#list [data-ids]")


def turns(page: Page) -> Locator:
    return page.locator("#said article")


def shown(page: Page) -> Locator:
    return page.locator("#shown .body")


def happened(page: Page) -> Locator:
    return page.locator("#happened .body")


def fits(page: Page) -> None:
    """Nothing is wider than the window."""
    wide = page.evaluate("[document.documentElement.scrollWidth, window.innerWidth]")
    assert wide[0] <= wide[1]


def into(page: Page, name: str) -> None:
    """Show a pane, as a person does: all are on a wide window."""
    tab = page.locator(f"#tabs [data-to={name}]")
    if tab.is_visible():
        tab.click()
    expect(page.locator(f"#{name}")).to_be_visible()


@pytest.mark.parametrize("size", [WIDE, NARROW], ids=["wide", "narrow"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_view_fits_its_window(
    url: str, window: Callable[..., Page], tmp_path: Path, size: tuple[int, int], scheme: str
) -> None:
    store(url, trip)
    page = window(size=size, scheme=scheme)
    for name in ("acme", "ann"):
        rows(page).filter(has_text=name).click()
        fits(page)
    into(page, "list")
    page.locator("#chart").click()
    expect(page.locator("svg.chart").first).to_be_visible()
    fits(page)
    into(page, "list")
    rows(page).first.click()
    expect(turns(page)).to_have_count(50)
    expect(turns(page).last).to_contain_text("Wish 129")
    for name in ("said", "shown", "happened"):
        into(page, name)
        fits(page)
        page.screenshot(path=tmp_path / f"{name}.png")
    ink = page.evaluate("getComputedStyle(document.body).color")
    assert ink == ("rgb(28, 35, 48)" if scheme == "light" else "rgb(230, 233, 239)")


def test_the_page_is_used_by_keys_alone(url: str, window: Callable[..., Page]) -> None:
    async def second(backend: Backend) -> None:
        key = MemoryKey("acme", "ann", "later")
        await say(backend, key, 2, NEWEST, at=1.8e9)
        await touched(backend, key)

    store(url, trip, second)
    page = window()
    expect(rows(page)).to_have_text(["acme"])
    for _ in ("the tenant", "the user"):
        page.keyboard.press("j")
        page.keyboard.press("Enter")
        expect(page.locator("#list .path button")).to_have_count(2 if _ == "the tenant" else 3)
        expect(rows(page).first).to_be_visible()
    expect(rows(page)).to_have_count(2)
    page.keyboard.press("j")
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    expect(turns(page).last).to_contain_text("Wish 129")
    page.keyboard.press("/")
    page.keyboard.type("wish 7")
    expect(page.locator("#said li")).to_have_count(11)
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    expect(page.locator("#said article.found")).to_be_visible()
    page.keyboard.press("2")
    expect(shown(page)).to_be_focused()
    page.keyboard.press("3")
    expect(happened(page)).to_be_focused()
    page.keyboard.press("?")
    expect(page.locator("#help")).to_be_visible()
    page.keyboard.press("Escape")
    page.keyboard.press("u")
    expect(page.locator("#title")).to_have_text("Conversations")


def test_history_goes_back_page_by_page_and_new_turns_appear(url: str, window: Callable[..., Page]) -> None:
    store(url, trip)
    page = window("acme:ann:trip")
    for count in (50, 100, 130):
        expect(turns(page)).to_have_count(count)
        if count < 130:
            page.locator("#earlier").click()
    expect(page.locator("#earlier")).to_have_count(0)
    assert turns(page).first.get_attribute("data-number") == "0"

    async def more(backend: Backend) -> None:
        await backend.memory(KEY).add_turn(ConversationTurn("And tonight?", "At eight.", ts=1.75e9))

    store(url, more)
    expect(turns(page).last).to_contain_text("And tonight?")
    expect(shown(page)).to_contain_text("And tonight?")


def test_hostile_text_and_ids_are_text(url: str, window: Callable[..., Page]) -> None:
    key = MemoryKey(f"a{HOSTILE}", f"b{HOSTILE}", f"c{HOSTILE}")

    async def fill(backend: Backend) -> None:
        memory = backend.memory(key, config(zone=1), summarizer=Hostile())
        for _ in range(3):
            await memory.add_turn(ConversationTurn(HOSTILE, HOSTILE, artifacts_shown={HOSTILE: HOSTILE}))
        await memory.flush()
        await touched(backend, key)

    store(url, fill)
    page = window()
    for _ in range(3):
        expect(rows(page)).to_have_count(1)
        rows(page).first.click()
    expect(turns(page).last.locator(".card")).to_have_count(3)
    expect(turns(page).last).to_contain_text("<b>bold</b>\\u202egnp.exe\\u200b")
    expect(shown(page)).to_contain_text("<b>bold</b>")
    expect(happened(page)).to_contain_text("<b>bold</b>")
    assert page.locator("img, b, main script").count() == 0
    assert page.title() != "owned"
    # The page is where it was, also when it is loaded anew.
    page.reload()
    expect(turns(page).last).to_contain_text("<b>bold</b>")


class Hostile:
    async def __call__(self, request: Any, /) -> Any:
        return {"summary": HOSTILE}


def test_an_outage_is_said_and_the_page_comes_back(url: str, window: Callable[..., Page]) -> None:
    store(url, trip)
    page = window("acme:ann:trip")
    expect(turns(page)).to_have_count(50)
    status = page.locator("#status")

    def down(route: Route) -> None:
        route.fulfill(status=503, json={"error": "no answer", "kind": "Unavailable"})

    for broken, said in ((down, "The datastore cannot be reached"), (Abort(), "does not answer")):
        page.route("**/api/*", broken)
        expect(status).to_contain_text(said)
        expect(turns(page)).to_have_count(50)  # they stay
        page.unroute("**/api/*")
        expect(status).to_be_empty()


class Abort:
    def __call__(self, route: Route) -> None:
        route.abort()


def test_a_filter_lists_degraded_conversations(url: str, window: Callable[..., Page]) -> None:
    async def fill(backend: Backend) -> None:
        for session in ("good", "bad"):
            await say(backend, MemoryKey("acme", "ann", session), 2, NEWEST)
        await alter(backend, MemoryKey("acme", "ann", "bad"), health=MemoryHealth.DEGRADED, attempts=4)

    store(url, fill)
    page = window("acme")
    page.locator("#by").select_option("degraded")
    expect(rows(page)).to_have_count(1)
    expect(rows(page)).to_contain_text("bad")
    expect(rows(page)).to_contain_text("degraded")
    page.locator("#by").select_option("largest")
    expect(rows(page)).to_have_count(2)


def test_it_says_that_turns_were_dropped_while_degraded(url: str, window: Callable[..., Page]) -> None:
    async def fill(backend: Backend) -> None:
        memory = backend.memory(KEY, config(zone=2, fold_batch_turns=100), summarizer=LedgerSummarizer())
        for number in range(12):
            await memory.add_turn(ConversationTurn(f"Wish {number}", "Noted.", ts=1.7e9 + number))
        await alter(backend, KEY, health=MemoryHealth.DEGRADED, attempts=4, dropped=7)

    store(url, fill)
    page = window("acme:ann:trip")
    expect(happened(page).locator(".degraded")).to_have_text("degraded")
    expect(happened(page).locator(".dropped")).to_have_text("7")
    expect(shown(page)).to_contain_text("7 were dropped without a summary, because the memory was degraded")
    expect(shown(page)).to_contain_text("the summarizer has failed 4 times in a row")


def test_it_says_what_the_budget_cuts(url: str, window: Callable[..., Page]) -> None:
    async def fill(backend: Backend) -> None:
        await say(backend, KEY, 8, NEWEST)

    store(url, fill)
    page = window("acme:ann:trip")
    expect(turns(page)).to_have_count(8)
    page.locator("#settings summary").click()
    page.locator("input[name=full_zone_turns]").fill("8")
    page.locator("input[name=summary_max_tokens]").fill("0")
    page.locator("input[name=total_max_tokens]").fill("60")
    page.get_by_role("button", name="Apply").click()
    expect(shown(page)).to_contain_text("They do not fit within the budget: total_max_tokens=60.")
    # The reason leads to the turns that it is about.
    shown(page).locator(".why button").first.click()
    expect(page.locator("#said article.found")).to_be_visible()


def test_it_shows_a_bad_summary_beside_what_it_covers(url: str, window: Callable[..., Page]) -> None:
    async def bad(request: Any) -> dict[str, str]:
        return {"summary": "They talked."}

    async def fill(backend: Backend) -> None:
        memory = backend.memory(KEY, config(zone=2, transcript=True), summarizer=bad)
        for number in range(70):
            await memory.add_turn(ConversationTurn(f"Wish {number}", "Noted.", ts=1.7e9 + number))
        await memory.flush()

    store(url, fill)
    page = window("acme:ann:trip")
    expect(happened(page)).to_contain_text("covers all before number 68")
    expect(happened(page).locator("details[open] .text")).to_have_text("They talked.")
    happened(page).get_by_role("button", name="What was said there").first.click()
    expect(page.locator("#said article.found")).to_contain_text("Wish 67")


def test_a_recorded_page_opens_from_the_disk_and_asks_for_nothing(
    url: str, window: Callable[..., Page], tmp_path: Path
) -> None:
    async def fill(backend: Backend) -> None:
        await trip(backend)
        await backend.memory(KEY).add_turn(ConversationTurn(HOSTILE, HOSTILE, ts=1.75e9))

    store(url, fill)
    file = tmp_path / "trip.html"
    command = [sys.executable, "-m", "stm_backends", "inspect", "acme:ann:trip", "--url", url]
    subprocess.run([*command, "--record", file], check=True, timeout=100)
    for size in (WIDE, NARROW):
        page = window(address=file.as_uri(), size=size)
        expect(turns(page)).to_have_count(131)
        expect(turns(page).last).to_contain_text("<b>bold</b>")
        expect(page.locator("#list")).to_be_hidden()
        page.locator("#words").fill("wish 12")
        expect(page.locator("#said li")).to_have_count(11)
        into(page, "shown")
        expect(shown(page)).to_contain_text("The summary covers them.")
        into(page, "happened")
        expect(happened(page)).to_contain_text("healthy")
        fits(page)
        assert page.locator("img, b").count() == 0
        assert page.title() != "owned"


def test_a_list_of_a_thousand_conversations_is_read_page_by_page(
    url: str, window: Callable[..., Page]
) -> None:
    async def fill(backend: Backend) -> None:
        for number in range(1_000):
            await say(backend, MemoryKey("acme", "ann", f"chat {number:04}"), 1, NEWEST)
        await touched(backend, MemoryKey("acme", "ann", "chat 0999"))

    store(url, fill)
    page = window("acme:ann")
    expect(rows(page)).to_have_count(50)
    page.locator("#more").click()
    expect(rows(page)).to_have_count(100)
    page.locator("#like").fill("nothing like it")
    expect(rows(page)).to_have_count(0)
