"""The page of the chat product in a real browser: two windows, two workers, and a worker that is killed."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from stm_backends import sync
from tests.support import apt, chromium
from tests.support.servers import Server, free_port

playwright = pytest.importorskip("playwright.sync_api")
expect = playwright.expect
if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page, Route

pytestmark = pytest.mark.full
CHAT = Path(__file__).parents[2] / "examples" / "chat"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    try:
        with chromium.running() as browser:
            yield browser
    except apt.NotAtHand as error:
        pytest.skip(str(error))


@pytest.fixture
def datastore(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/chat.db"


@pytest.fixture
def service(datastore: str, tmp_path: Path) -> Iterator[str]:
    """The address of two workers on one datastore; a worker that is killed is started again."""
    port = free_port()
    command = [sys.executable, "-m", "uvicorn", "--app-dir", CHAT, "server:app", "--port", str(port)]
    # A worker that gets no time to answer uvicorn is not taken for one that hangs.
    options = ["--workers", "2", "--timeout-graceful-shutdown", "1", "--timeout-worker-healthcheck", "60"]

    def is_ready() -> bool:
        with closing(http.client.HTTPConnection("127.0.0.1", port)) as connection:
            connection.request("GET", "/readyz")
            return connection.getresponse().status == 200

    workers = Server([*command, *options], tmp_path, is_ready, environment={"STM_BACKENDS_URL": datastore})
    workers.start()
    yield f"http://127.0.0.1:{port}"
    workers.stop()


@pytest.fixture
def window(browser: Browser, service: str) -> Iterator[Callable[..., Page]]:
    """Opens a window at a conversation; all windows are of one person."""
    context = browser.new_context()
    errors: list[str] = []

    def opened(chat: str = "trip") -> Page:
        page = context.new_page()
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("dialog", lambda dialog: dialog.accept("Lisbon"))
        page.goto(f"{service}/#{chat}")
        expect(page.locator("#send")).to_be_enabled()
        return page

    yield opened
    context.close()
    assert errors == []


def send(page: Page, text: str) -> None:
    page.locator("#text").fill(text)
    page.locator("#send").click()


def said(page: Page) -> Locator:
    return page.locator("#said p")


def press(page: Page, name: str, place: int = 0) -> None:
    page.get_by_role("button", name=name, exact=True).nth(place).click()


def worker_of(page: Page) -> int:
    """Return the process that answers in a window."""
    status = page.locator("#status")
    expect(status).to_have_text(re.compile(r"answered by worker \d+"))
    return int(re.findall(r"\d+", status.inner_text())[0])


ANSWER = "You said “{}”. Messages that I was shown: {}."


def test_two_windows_in_one_conversation_show_the_same(window: Callable[..., Page]) -> None:
    one, other = window(), window()
    send(one, "<b>A table</b>")
    both = ["<b>A table</b>", ANSWER.format("<b>A table</b>", 1)]
    for page in (one, other):
        expect(said(page)).to_have_text(both)
    send(other, "At noon")
    both += ["At noon", ANSWER.format("At noon", 3)]
    for page in (one, other):
        expect(said(page)).to_have_text(both)
        expect(page.locator("#title")).to_have_text("<b>A table</b>")
    # A window that was sent an answer before knows that another one is being written.
    send(one, "count")
    expect(said(other).last).to_contain_text("1 2 3")
    expect(other.locator("#send")).to_be_disabled()


def test_an_answer_grows_in_both_windows_until_it_is_stopped(window: Callable[..., Page]) -> None:
    one, other = window(), window()
    send(one, "count")
    expect(said(one).last).to_contain_text("1 2 3")
    expect(said(other).last).to_contain_text("1 2 3")
    expect(other.locator("#send")).to_be_disabled()
    one.locator("#stop").click()
    for page in (one, other):
        expect(page.locator(".mark")).to_have_text("cut off")
        expect(page.locator("#send")).to_be_enabled()
    send(other, "Thanks")
    for page in (one, other):
        expect(said(page)).to_have_count(4)
        expect(said(page).last).to_have_text(ANSWER.format("Thanks", 3))
    # Only now: what a worker stores as it is stopped may come after what a window reads then.
    expect(said(other)).to_have_text(said(one).all_inner_texts())


def test_a_worker_that_is_killed_in_the_middle_of_an_answer_leaves_what_it_had_said(
    window: Callable[..., Page],
) -> None:
    one, other = window(), window()
    send(one, "count")
    # The other window reads what is stored: a checkpoint is.
    expect(said(other).last).to_contain_text("1 2 3")
    os.kill(worker_of(one), signal.SIGKILL)
    for page in (one, other):
        expect(page.locator(".mark")).to_have_text("cut off")
        expect(said(page).first).to_have_text("count")
        expect(said(page).last).to_contain_text("1 2 3")
    # Another worker answers the same question.
    press(other, "Answer again")
    expect(other.locator(".mark")).to_have_count(0)  # what was said before is not there any more
    expect(said(other).last).to_contain_text("1 2 3")
    other.locator("#stop").click()
    for page in (one, other):
        expect(said(page)).to_have_count(2)
        expect(page.locator(".mark")).to_have_text("cut off")
        expect(page.get_by_role("button", name="Version")).to_have_count(1)


def test_a_question_whose_worker_is_killed_before_it_answers_is_there_and_open(
    window: Callable[..., Page],
) -> None:
    one, other = window(), window()
    send(one, "think")
    os.kill(worker_of(one), signal.SIGKILL)
    for page in (one, other):
        expect(said(page)).to_have_text(["think"])
        expect(page.locator(".mark")).to_have_text("no answer yet")
    send(other, "Never mind")
    for page in (one, other):
        expect(said(page)).to_have_text(["think", "Never mind", ANSWER.format("Never mind", 2)])
        expect(page.locator(".mark")).to_have_count(0)


def asked(page: Page, *questions: str) -> list[str]:
    """Ask questions, wait for their answers, and return all that is shown then."""
    both: list[str] = []
    for question in questions:
        send(page, question)
        both += [question, ANSWER.format(question, len(both) + 1)]
        expect(said(page)).to_have_text(both)
        expect(page.locator("#send")).to_be_visible()
    return both


def test_an_answer_that_is_written_anew_grows_in_both_windows(window: Callable[..., Page]) -> None:
    one, other = window(), window()
    send(one, "count")
    expect(said(one).last).to_contain_text("1 2 3")
    one.locator("#stop").click()
    expect(one.locator(".mark")).to_have_text("cut off")
    send(one, "Thanks")
    expect(said(other).last).to_have_text(ANSWER.format("Thanks", 3))
    press(one, "Regenerate")
    for page in (one, other):
        expect(said(page)).to_have_count(2)
        expect(said(page).last).to_contain_text("1 2 3")
    expect(other.locator("#send")).to_be_disabled()
    expect(other.get_by_role("button", name="Regenerate")).to_have_count(0)
    one.locator("#stop").click()
    # What was said before is there for each of them.
    press(other, "Version 1")
    expect(said(other)).to_have_count(4)
    expect(said(other).last).to_have_text(ANSWER.format("Thanks", 3))
    expect(other.locator("#text")).to_be_hidden()
    press(other, "Back")
    expect(said(other)).to_have_count(2)
    expect(other.locator("#text")).to_be_visible()


def test_an_edited_question_is_sent_in_place_of_the_earlier_one(window: Callable[..., Page]) -> None:
    one, other = window(), window()
    before = asked(one, "A table", "At noon", "Thanks")
    press(one, "Edit", 1)
    expect(one.locator("#text")).to_have_value("At noon")
    press(one, "Cancel")
    expect(one.locator("#text")).to_have_value("")
    press(one, "Edit", 1)
    one.locator("#text").fill("At one")
    one.locator("#send").click()
    for page in (one, other):
        expect(said(page)).to_have_text([*before[:2], "At one", ANSWER.format("At one", 3)])
        expect(page.locator("#notice")).to_be_hidden()
    # Edits at two places, and twice at one: each version is offered where it was said.
    press(one, "Edit", 1)
    one.locator("#text").fill("At two")
    one.locator("#send").click()
    expect(said(other)).to_have_text([*before[:2], "At two", ANSWER.format("At two", 3)])
    for name, there in (("Version 2", 4), ("Version 1", 6)):
        press(other, name)
        expect(said(other)).to_have_count(there)
        press(other, "Back")
        expect(said(other)).to_have_count(4)
    press(one, "Edit", 0)
    one.locator("#text").fill("A bed")
    one.locator("#send").click()
    expect(said(other)).to_have_text(["A bed", ANSWER.format("A bed", 1)])
    expect(other.get_by_role("button", name="Version")).to_have_count(1)


def test_who_edits_after_somebody_else_is_told_and_changes_nothing(window: Callable[..., Page]) -> None:
    one, other = window(), window()
    before = asked(one, "A table", "At noon")
    expect(said(other)).to_have_text(before)
    # From now on, this window is shown what there is now; two answers, so that none is on its way any more.
    address = "**/api/chats/trip"
    old = other.request.get(other.url.replace("/#", "/api/chats/")).text()
    other.route(address, lambda route: route.fulfill(body=old, content_type="application/json"))
    for _ in range(2):
        with other.expect_response(address):
            pass
    press(one, "Regenerate")
    expect(said(one)).to_have_text(before[:2])
    expect(one.locator("#send")).to_be_visible()
    press(other, "Edit", 1)
    other.locator("#text").fill("At one")
    other.locator("#send").click()
    expect(other.locator("#status")).to_contain_text("Nothing was changed here.")
    press(other, "Regenerate", 1)
    expect(other.locator("#status")).to_contain_text("Nothing was changed here.")
    other.unroute(address)
    expect(said(other)).to_have_text(before[:2])
    expect(other.locator("#notice")).to_be_hidden()
    expect(other.locator("#text")).to_have_value("At one")
    expect(said(one)).to_have_text(before[:2])


def test_a_conversation_is_forked_and_both_go_on(window: Callable[..., Page]) -> None:
    one, other = window(), window()
    before = asked(one, "A table", "At noon")
    press(one, "Fork", 1)
    expect(said(one)).to_have_text(before[:2])
    expect(one.locator("#chats button")).to_have_text(["A table", "A table"])
    send(one, "At one")
    send(other, "Thanks")
    expect(said(one)).to_have_text([*before[:2], "At one", ANSWER.format("At one", 3)])
    expect(said(other)).to_have_text([*before, "Thanks", ANSWER.format("Thanks", 5)])


def test_a_question_whose_answer_got_lost_on_its_way_is_sent_again_and_stored_once(
    window: Callable[..., Page],
) -> None:
    page = window()

    def lose(route: Route) -> None:
        route.fetch()  # it is stored
        route.abort()

    page.route("**/questions", lose, times=1)
    send(page, "A table")
    expect(page.locator("#status")).to_contain_text("The service cannot be reached.")
    expect(page.locator("#text")).to_have_value("A table")
    page.get_by_role("button", name="Send").click()
    expect(said(page)).to_have_text(["A table", ANSWER.format("A table", 1)])
    expect(page.locator("#text")).to_have_value("")


def test_what_failed_is_told_until_it_works_again(window: Callable[..., Page]) -> None:
    page = window()
    page.route("**/api/chats/trip", lambda route: route.fulfill(status=503))
    expect(page.locator("#status")).to_contain_text("cannot be reached right now")
    page.unroute("**/api/chats/trip")
    expect(page.locator("#status")).to_be_empty()


def test_an_id_with_a_space_and_messages_of_tools_are_shown(
    datastore: str, window: Callable[..., Page]
) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "find", "arguments": "{}"}}
    with sync.open_backend(datastore) as backend:
        chat = backend.conversation("acme", "ann", "my: trip é")
        chat.add(
            {"role": "user", "content": "A table"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": "Sino"},
            {"role": "assistant", "content": "At Sino?"},
        )
    page = window()
    page.locator("#chats button", has_text="A table").click()
    expect(said(page)).to_have_text(["A table", "calls find", "Sino", "At Sino?"])
    page.reload()
    expect(said(page)).to_have_count(4)


@pytest.fixture
def long_conversation(datastore: str) -> None:
    with sync.open_backend(datastore) as backend:
        chat = backend.conversation("acme", "ann", "long")
        for number in range(100):
            question = {"role": "user", "content": f"wish {number}"}
            chat.add(question, {"role": "assistant", "content": f"Noted {number}."})


def test_history_comes_in_pages_and_conversations_have_titles(
    long_conversation: None, window: Callable[..., Page]
) -> None:
    page = window("long")
    expect(said(page)).to_have_count(50)
    for count in (100, 150, 200):
        page.locator("#older").click()
        expect(said(page)).to_have_count(count)
    expect(page.locator("#older")).to_have_count(0)
    assert said(page).all_inner_texts()[::2] == [f"wish {number}" for number in range(100)]
    page.locator("#rename").click()
    expect(page.locator("#title")).to_have_text("Lisbon")
    page.locator("#new").click()
    send(page, "Something else")
    expect(page.locator("#chats button")).to_have_text(["Something else", "Lisbon"])
    page.locator("#chats button", has_text="Lisbon").click()
    expect(said(page)).to_have_count(50)


def test_a_message_that_is_searched_for_is_shown_where_it_was_said(
    long_conversation: None, window: Callable[..., Page]
) -> None:
    page = window()
    page.locator("#words").fill("nowhere")
    expect(page.locator("#chats")).to_have_text("Nothing was found.")
    page.locator("#words").fill("wish 30")
    expect(page.locator("#chats button")).to_have_text(["wish 0", "wish 30"])
    page.locator(".match").click()
    expect(page.locator(".found p")).to_have_text("wish 30")
    expect(page.locator(".found")).to_be_in_viewport()
    expect(said(page)).to_have_count(50)
    expect(page.locator("#older")).to_have_count(1)
    # The second page is followed by the newest messages, which the window asks for every second.
    for count in (100, 165):
        page.locator("#newer").click()
        expect(said(page)).to_have_count(count)
    expect(page.locator("#newer")).to_have_count(0)
    expect(said(page).last).to_have_text("Noted 99.")
    # A question that is asked at an older place is shown, and its answer.
    page.locator(".match").click()
    expect(page.locator(".found")).to_be_in_viewport()
    send(page, "And now?")
    expect(said(page).last).to_contain_text("You said “And now?”.")
    page.locator("#words").fill("")
    expect(page.locator("#chats button")).to_have_text(["wish 0"])


def test_my_data_is_deleted_with_a_receipt_and_nobody_elses(
    long_conversation: None, window: Callable[..., Page]
) -> None:
    page = window("long")
    expect(said(page)).to_have_count(50)
    page.locator("#account").select_option("bob")
    expect(page.locator("#chats button")).to_have_count(0)
    # Another worker may be answering: an answer whose question is erased is not stored.
    send(page, "count")
    expect(page.locator("#chats button")).to_have_text(["count"])
    expect(said(page).last).to_contain_text("1 2 3")
    page.locator("#delete-me").click()
    expect(page.locator("#erased")).to_contain_text("Conversations erased: 1")
    expect(page.locator("#erased")).to_contain_text("Nothing was found in a second reading")
    receipt = json.loads(page.locator("#receipt pre").inner_text())
    assert receipt["of"] == {"tenant_id": "acme", "user_id": "bob", "session_id": None}
    page.get_by_role("button", name="Close").click()
    expect(page.locator("#chats button")).to_have_count(0)
    page.locator("#account").select_option("ann")
    expect(page.locator("#chats button")).to_have_text(["wish 0"])
