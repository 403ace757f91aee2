"""`show` as JSON, Markdown and a page: complete, and nothing stored is obeyed by what reads it."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import os
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import stm_backends
from stm_backends import ConversationTurn, MemoryKey, ShortTermMemoryConfig, TrajectoryDigest
from stm_backends.cli.app import app
from stm_backends.cli.render import plain
from stm_backends.cli.replay import ledger
from stm_backends.inspect import page as pages
from tests.support.recorded import recorded, texts_of

CANARY = (
    "</title></style></div></main><script>alert(1)</script><img src=x onerror=alert(2)>\"'><svg onload=x>`"
)
UNSEEN = "safe\u202egnp.exe\u200bhidden\U000e0041\u2066\ufeff\u00ad\x1b[2J\ud800\0"
SESSION = f"{CANARY[:60]}\u202e"
KEY = MemoryKey("acme", '"onload=alert(3) x="', SESSION)


def cli(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


@pytest.fixture
def hostile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The key of a conversation with markup and invisible characters wherever text is stored."""
    url = f"sqlite:///{tmp_path}/stm.db"
    monkeypatch.setenv("STM_BACKENDS_URL", url)
    monkeypatch.setenv("COLUMNS", "80")

    async def fill() -> None:
        async with stm_backends.open_backend(url) as backend:
            memory = backend.memory(KEY, ShortTermMemoryConfig("truncation"))
            digest = TrajectoryDigest([CANARY, UNSEEN], CANARY, UNSEEN, [CANARY])
            await memory.add_turn(
                ConversationTurn(CANARY, UNSEEN, digest, {CANARY: [UNSEEN, CANARY]}, ts=1_760_000_000.0)
            )
            await memory.add_turn(ConversationTurn("Hello", "```\n# Not a heading\n````"))
            document = await backend.sessions.export(KEY)
            document["body"]["summary"] = CANARY + UNSEEN
            document["turns"][1]["ts"] = 0.0
            await backend.sessions.import_(document, on_conflict="replace")

    asyncio.run(fill())
    return cli("ls", cli("ls", "acme").stdout.strip()).stdout.strip("\n")


class Seen(HTMLParser):
    """What a browser would make of a page: its tags with attributes, and its text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, list[tuple[str, str | None]]]] = []
        self.text = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, attrs))

    def handle_data(self, data: str) -> None:
        self.text += data


TAGS = {tag for tag, _ in Seen(pages.page().html).tags}
"""The tags of the page as it is shipped."""


def test_markup_in_a_conversation_is_data_on_the_page(hostile: str) -> None:
    result = cli("show", hostile, "--html")
    assert result.exit_code == 0, result.output
    page = recorded(result.stdout)
    assert page["key"] == [KEY.tenant_id, KEY.user_id, KEY.session_id]
    # Between its first and its last tag, the page as shipped has every other one.
    assert [tag for tag, _ in Seen(result.stdout).tags if tag not in TAGS] == []
    shipped = Seen(pages.page().html)
    assert len(Seen(result.stdout).tags) == len(shipped.tags) + 2  # the policy and the record
    (first, second) = page["units"]
    assert first["lines"][0] == ["user", CANARY]
    assert first["lines"][2] == ["assistant", UNSEEN]
    assert second["lines"][1] == ["assistant", "```\n# Not a heading\n````"]
    assert page["shown"]["summary"]["text"] == CANARY + UNSEEN
    assert CANARY not in result.stdout
    assert "</title></style>" not in result.stdout


def test_the_page_asks_for_nothing_and_its_policy_allows_its_own_script_alone(hostile: str) -> None:
    page = cli("show", hostile, "--html").stdout
    (policy,) = re.findall(r'<meta http-equiv="Content-Security-Policy" content="([^"]*)">', page)
    rules = dict(rule.strip().partition(" ")[::2] for rule in policy.split(";"))
    assert rules["default-src"] == "'none'"
    assert "connect-src" not in rules
    (script,) = re.findall("<script>(.*?)</script>", page, re.DOTALL)
    (style,) = re.findall("<style>(.*?)</style>", page, re.DOTALL)
    for rule, text in (("script-src", script), ("style-src", style)):
        known = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert rules[rule] == f"'sha256-{known}'"
    shipped = pages.page().html.replace(script, "")
    assert not re.search(r"<(?:img|iframe|a|base)\b| on\w+=| style=", shipped)
    assert "url(" not in page
    assert "@import" not in page
    assert 'name="viewport"' in page


@pytest.mark.parametrize("form", ["--md", None])
def test_invisible_characters_are_shown_as_escapes(hostile: str, form: str | None) -> None:
    shown = cli("show", hostile, *([form] if form else [])).stdout
    for char in UNSEEN:
        assert char.isprintable() or char not in shown
    text = re.sub("<[^>]*>|[│\n ]", "", shown)
    assert r"safe\u202egnp.exe\u200bhidden\U000e0041\u2066\ufeff\xad\x1b[2J\ud800\x00" in text


def test_a_recorded_page_has_no_character_of_what_is_stored_that_cannot_be_seen(hostile: str) -> None:
    page = cli("show", hostile, "--html").stdout
    for char in UNSEEN:
        assert char.isprintable() or char not in page


def test_joiners_stay_where_scripts_and_emoji_need_them() -> None:
    for text in ("\U0001f469\u200d\U0001f680", "\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645"):
        assert plain(text) == text
    assert plain("a\u200db\u200c") == r"a\u200db\u200c"
    assert plain("\U0001f469\u200d\u200c\u200d\U0001f680") == "\U0001f469\\u200d\\u200c\\u200d\U0001f680"


def outside_fences(markdown: str) -> list[str]:
    outside, fence = list[str](), ""
    for line in markdown.splitlines():
        if fence:
            fence = "" if line == fence else fence
        elif found := re.fullmatch("(`{3,})text", line):
            fence = found[1]
        else:
            outside.append(line)
    assert not fence
    assert not any("<" in line or "Not a heading" in line for line in outside)
    return outside


def test_markdown_keeps_stored_text_within_its_fences(hostile: str) -> None:
    outside = outside_fences(cli("show", hostile, "--md").stdout)
    assert [line for line in outside if line.startswith("#")] == [
        *("# Conversation", "## Summary", "## Recent", "### Turn 0, 2025-10-09 08:53:20 UTC"),
        "### Turn 1",
    ]


def test_markup_in_a_log_is_text_in_every_format(hostile: str) -> None:
    async def add() -> None:
        async with stm_backends.open_backend(os.environ["STM_BACKENDS_URL"]) as backend:
            items = [
                {"role": CANARY, "content": "```\n# Not a heading\n````"},
                {"role": "user", "content": CANARY + UNSEEN},
                {"type": "function_call", "name": CANARY, UNSEEN: 1},
            ]
            await backend.item_log(KEY, "openai-agents").add(items)

    asyncio.run(add())
    page = cli("show", hostile, "--log", "openai-agents", "--html").stdout
    assert [tag for tag, _ in Seen(page).tags if tag not in TAGS] == []
    assert [unit["lines"][0][0] for unit in recorded(page)["units"]] == [CANARY, "user", "function_call"]
    assert recorded(page)["units"][1]["lines"] == [["user", CANARY + UNSEEN]]
    assert CANARY not in page
    markdown = cli("show", hostile, "--log", "openai-agents", "--md").stdout
    found = [line.partition(",")[0] for line in outside_fences(markdown) if line.startswith("#")]
    assert found == ["# Log of openai-agents", "### Item 0", "### Item 1", "### Item 2"]
    for char in UNSEEN:
        assert char.isprintable() or char not in page + markdown


def test_json_has_the_conversation_and_its_figures(hostile: str) -> None:
    shown = json.loads(cli("show", hostile, "--json", "--full-zone-turns", "1").stdout)
    exported = json.loads(cli("export", hostile).stdout)
    assert (shown["tenant_id"], shown["user_id"], shown["session_id"]) == (
        *(KEY.tenant_id, KEY.user_id, KEY.session_id),
    )
    assert shown["key"] == hostile
    assert shown["pending"] + shown["recent"] == exported["turns"]
    assert (len(shown["pending"]), len(shown["recent"])) == (1, 1)
    assert shown["summary"] == exported["body"]["summary"]
    assert (shown["health"], shown["attempts"], shown["next_attempt_at"]) == ("healthy", 0, None)
    assert shown["tokens"] > 0


def test_a_page_in_a_file_is_private_and_replaced_in_one_step(hostile: str, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    result = cli("show", hostile, "--html", "--output", str(file))
    assert (result.exit_code, result.stdout) == (0, "")
    assert file.stat().st_mode & 0o777 == 0o600
    assert recorded(file.read_text())["units"] == recorded(cli("show", hostile, "--html").stdout)["units"]
    link = tmp_path / "link"
    link.symlink_to(file)
    assert cli("show", hostile, "--html", "-o", str(link)).exit_code == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--json", "--html"), "give one of --json and --html, not both"),
        (("--output", "x.html"), "--output needs a format"),
    ],
)
def test_formats_that_contradict_are_refused(hostile: str, arguments: tuple[str, ...], said: str) -> None:
    result = cli("show", hostile, *arguments)
    assert result.exit_code == 2
    assert said in result.stderr


def test_a_missing_conversation_leaves_no_file(hostile: str, tmp_path: Path) -> None:
    assert cli("show", "acme:u:none", "--html", "-o", str(tmp_path / "x.html")).exit_code == 1
    assert not (tmp_path / "x.html").exists()


def test_a_long_word_is_shown_in_full_at_80_columns(hostile: str) -> None:
    async def add() -> None:
        async with stm_backends.open_backend(os.environ["STM_BACKENDS_URL"]) as backend:
            memory = backend.memory(MemoryKey("acme", "u", "s"), ShortTermMemoryConfig("truncation"))
            await memory.add_turn(ConversationTurn("x" * 300, "Done."))

    asyncio.run(add())
    assert cli("show", "acme:u:s").stdout.count("x") == 300


@pytest.fixture
def replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The key of a conversation that `replay` stored: marks in its turns, a ledger in its summary."""
    monkeypatch.setenv("STM_BACKENDS_URL", f"sqlite:///{tmp_path}/stm.db")
    key = MemoryKey("acme", "u", "trip")

    async def fill() -> None:
        async with stm_backends.open_backend(os.environ["STM_BACKENDS_URL"]) as backend:
            memory = backend.memory(key, ShortTermMemoryConfig("truncation"))
            plain = ConversationTurn("Hello", "Hi", ts=1_760_000_000.0)
            tools = ConversationTurn(
                "Book", "Done", TrajectoryDigest(["book"], "ok", None, ["turn:1", "bill"])
            )
            for place, turn in enumerate((plain, tools), 12):
                await memory.add_turn(ledger.marked(turn, "trip", place))
            document = await backend.sessions.export(key)
            document["body"] |= {"summary": "[turns 0-11]\nA trip.", "folded": 10, "dropped": 2}
            await backend.sessions.import_(document, on_conflict="replace")

    asyncio.run(fill())
    return "acme:u:trip"


@pytest.mark.parametrize("form", ["--md", None])
def test_marks_of_a_replay_are_not_shown_and_its_ledger_is_explained(replayed: str, form: str | None) -> None:
    shown = cli("show", replayed, *([form] if form else [])).stdout
    assert "turn:trip" not in shown
    assert "[turns 0-11]" in shown
    assert "first line added by replay" in shown
    assert "turn:trip#12" in cli("show", replayed, "--json").stdout, "as it is stored"


def test_marks_of_a_replay_are_not_on_a_page(replayed: str) -> None:
    page = cli("show", replayed, "--html").stdout
    said = texts_of(page)
    assert "turn:trip" not in "".join(said)
    assert said == ["Hello", "Hi", "Book", "book\nok\nturn:1, bill", "Done"]


def test_markdown_numbers_turns_from_0_for_the_first_of_the_conversation(replayed: str) -> None:
    shown = cli("show", replayed, "--md", "--full-zone-turns", "1").stdout
    assert re.findall("^### Turn ([0-9]+)", shown, re.MULTILINE) == ["12", "13"]


def test_the_help_of_show_says_who_can_read_what_is_written_by_itself() -> None:
    shown = " ".join(re.sub(r"[^\x20-\x7e]", " ", cli("show", "--help").stdout).split())
    assert "With --output, only you can read the file that is written." in shown
    assert "as by" not in shown
