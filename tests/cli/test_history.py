"""`history`, `ls --recent` and `compact`: what people see of whole conversations and of their files."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import sqlite3
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from stm_backends import Backend, ConversationTurn, MemoryKey, ShortTermMemoryConfig, open_backend
from stm_backends.admin.sessions import Sessions
from stm_backends.cli.app import app
from stm_backends.drivers.contract import Key
from stm_backends.inspect import page as pages
from stm_backends.records import keys, operations
from stm_backends.testing.memory_contract import until
from tests.support.recorded import recorded, section_of

KEY = MemoryKey("acme", "u1", "trip")


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("STM_BACKENDS_URL", raising=False)


def cli(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


async def say(
    backend: Backend, key: MemoryKey, count: int, config: ShortTermMemoryConfig | None = None
) -> None:
    memory = backend.memory(key, config)
    for number in range(count):
        await memory.add_turn(ConversationTurn(f"Wish {number}", "Noted.", ts=1.7e9 + number))
    await memory.flush()


@pytest.fixture
def url(tmp_path: Path) -> str:
    """A file with a conversation of 70 turns, most of which have left the record."""
    url = f"sqlite:///{tmp_path}/memory.db"

    async def fill() -> None:
        async with open_backend(url) as backend:
            await say(backend, KEY, 70)

    asyncio.run(fill())
    return url


def test_history_shows_the_newest_turns_and_how_to_go_on(url: str) -> None:
    done = cli("history", "acme:u1:trip", "--url", url, "-n", "3")
    assert re.findall(r"Wish (\d+)", done.stdout) == ["67", "68", "69"]
    assert done.stderr == f"Earlier turns: stm-backends history acme:u1:trip --url {url} -n 3 --before 67\n"
    assert re.findall(r"Wish (\d+)", cli(*done.stderr.split()[3:]).stdout) == ["64", "65", "66"]


def test_history_gives_every_turn_once_page_by_page(url: str) -> None:
    seen, before = list[int](), list[str]()
    while True:
        done = cli("history", "acme:u1:trip", "--url", url, "-n", "30", "--json", *before)
        assert done.exit_code == 0, done.stderr
        page = [json.loads(line) for line in done.stdout.splitlines()]
        assert [one["user_message"] for one in page] == [f"Wish {one['number']}" for one in page]
        seen = [one["number"] for one in page] + seen
        if not done.stderr:
            break
        before = done.stderr.split()[-2:]
    assert seen == list(range(70))
    assert (page[0]["retained"], page[0]["summarized"]) == (False, True)


@pytest.mark.parametrize(("what", "count"), [("turns", 70), ("items", 200)])
def test_history_reads_from_the_oldest_on_and_says_how_to_go_on(
    url: str, kept: str, what: str, count: int
) -> None:
    where, seen, after = (url if what == "turns" else kept), list[int](), "-1"
    while True:
        done = cli("history", "acme:u1:trip", "--url", where, "-n", "30", "--json", "--after", after)
        seen += [json.loads(line)["number"] for line in done.stdout.splitlines()]
        if not done.stderr:
            break
        again = "" if what == "turns" else " --log openai-agents"
        more = f"stm-backends history acme:u1:trip --url {where} -n 30{again} --after {seen[-1]}"
        assert done.stderr == f"Later {what}: {more}\n"
        after = done.stderr.split()[-1]
    assert seen == list(range(count))


def test_history_shows_what_is_around_a_number(url: str, kept: str) -> None:
    done = cli("history", "acme:u1:trip", "--url", url, "-n", "4", "--at", "30")
    assert re.findall(r"Wish (\d+)", done.stdout) == ["28", "29", "30", "31"]
    again = f"stm-backends history acme:u1:trip --url {url} -n 4"
    assert done.stderr == f"Earlier turns: {again} --before 28\nLater turns: {again} --after 31\n"
    done = cli("history", "acme:u1:trip", "--url", kept, "-n", "2", "--at", "30", "--json")
    assert [json.loads(line)["number"] for line in done.stdout.splitlines()] == [29, 30]


def test_history_says_that_nothing_is_beyond_the_newest_turn(url: str) -> None:
    done = cli("history", "acme:u1:trip", "--url", url, "--after", "69")
    assert (done.exit_code, done.stdout, done.stderr) == (0, "", "There are no turns after number 69.\n")
    done = cli("history", "acme:u1:trip", "--url", url, "--at", "100")
    again = f"stm-backends history acme:u1:trip --url {url} -n 20 --before 70"
    assert done.stderr == f"There are no turns at number 100.\nEarlier turns: {again}\n"


def test_history_takes_one_place_alone(url: str) -> None:
    done = cli("history", "acme:u1:trip", "--url", url, "--after", "3", "--before", "5")
    assert (done.exit_code, "give one of before, after and at" in done.stderr) == (2, True)


def test_history_of_a_conversation_that_is_not_there_fails(url: str) -> None:
    done = cli("history", "acme:u1:trap", "--url", url)
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr.startswith("Error: there is no conversation under this key")


def test_history_says_that_there_are_no_turns_before_the_first(url: str) -> None:
    done = cli("history", "acme:u1:trip", "--url", url, "--before", "0")
    assert (done.exit_code, done.stdout) == (0, "")
    assert done.stderr == "There are no turns before number 0.\n"


def test_history_says_that_the_oldest_turns_were_removed(url: str) -> None:
    async def shorten() -> None:
        async with open_backend(url) as backend:
            await backend.sessions.purge("acme", "u1", transcripts_older_than=1.0)

    asyncio.run(shorten())
    done = cli("history", "acme:u1:trip", "--url", url, "-n", "70", "--json")
    first = json.loads(done.stdout.splitlines()[0])["number"]
    assert first > 0
    assert done.stderr == f"The turns before number {first} are no longer stored.\n"


def sections_of(page: str) -> dict[str, list[int]]:
    """The numbers of the turns on a page, by the heading above them; as the texts say, too."""
    state, found = recorded(page), dict[str, list[int]]()
    for unit in state["units"]:
        assert unit["lines"][0] == ["user", f"Wish {unit['number']}"]
        found.setdefault(section_of(state, unit), []).append(unit["number"])
    return found


def test_a_page_shows_every_turn_and_what_covers_it(url: str) -> None:
    page = cli("show", "acme:u1:trip", "--html", "--url", url).stdout
    assert sections_of(page) == {"Covered by the summary": [*range(65)], "Recent": [*range(65, 70)]}
    assert [unit["number"] for unit in recorded(page)["units"] if unit["summarized"]] == [*range(65)]
    assert recorded(page)["notes"] == []


def test_a_page_says_how_much_of_a_long_conversation_it_shows(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "MOST", 20)
    page = cli("show", "acme:u1:trip", "--html", "--url", url).stdout
    assert sections_of(page) == {"Covered by the summary": [*range(50, 65)], "Recent": [*range(65, 70)]}
    (note,) = recorded(page)["notes"]
    assert note.endswith("newest 20 turns. Numbers 0 to 49: stm-backends history acme:u1:trip --before 50")


def test_a_page_says_which_turns_are_no_longer_stored(url: str) -> None:
    async def more() -> None:
        async with open_backend(url) as backend:
            memory = backend.memory(KEY)
            for number in range(70, 140):
                await memory.add_turn(ConversationTurn(f"Wish {number}", "Noted.", ts=1.7e9 + number))
            await memory.flush()
            await backend.sessions.purge("acme", "u1", transcripts_older_than=1.0)
            page = [name async for name in operations.names(backend.driver, "acme:u1:page")][-1]
            assert keys.page_number(page) == 2
            for number in range(140, 150):
                await memory.add_turn(ConversationTurn(f"Wish {number}", "Noted.", ts=1.7e9 + number))
            await memory.flush()
            # As its time to live would.
            await backend.driver.delete(Key("acme:u1:page", page))

    asyncio.run(more())
    page = cli("show", "acme:u1:trip", "--html", "--url", url).stdout
    assert sections_of(page) == {"Recent": [*range(145, 150)]}
    assert recorded(page)["notes"] == ["The turns before number 135 are no longer stored."]


def test_a_page_tells_what_waits_for_a_summary_from_what_has_one(tmp_path: Path) -> None:
    url, up = f"sqlite:///{tmp_path}/memory.db", True

    async def summarize(request: dict[str, object]) -> dict[str, object]:
        if not up:
            raise RuntimeError("down")
        return {"summary": f"{request['previous_summary']}."}

    async def fill() -> None:
        nonlocal up
        config = ShortTermMemoryConfig(
            "rolling_summary", recovery_backlog_limit=2, retry_attempts=0, transcript=True
        )
        async with open_backend(url) as backend:
            memory = backend.memory(KEY, config, summarizer=summarize)
            for number in range(30):
                await memory.add_turn(ConversationTurn(f"Wish {number}", "Noted.", ts=1.7e9 + number))
                if number == 9:
                    await memory.flush()
                    up = False

            async def moved() -> bool:
                return len(await memory.turns()) == 7

            await until(moved)

    asyncio.run(fill())
    page = cli("show", "acme:u1:trip", "--html", "--url", url).stdout
    assert (recorded(page)["happened"]["archived"], recorded(page)["happened"]["waiting"]) == (23, 18)
    shown = json.loads(cli("show", "acme:u1:trip", "--json", "--url", url).stdout)
    assert (shown["archived"], shown["waiting"]) == (23, 18)
    assert sections_of(page) == {
        "Covered by the summary": [*range(5)],
        "Earlier (covered by no summary)": [*range(5, 23)],
        "Pending (not summarized yet)": [23, 24],
        "Recent": [*range(25, 30)],
    }


def test_a_page_of_a_session_of_short_term_memory_has_its_turns(url: str) -> None:
    async def fill() -> None:
        async with open_backend(url) as backend:
            hidden = backend.short_term_conversation(KEY, ShortTermMemoryConfig("truncation"))
            await hidden.add_turn(ConversationTurn("Wish 0", "Noted.", ts=1.7e9))

    asyncio.run(fill())
    page = cli("show", "acme:u1:trip#short-term", "--html", "--url", url)
    assert sections_of(page.stdout) == {"Recent": [0]}, page.stderr


@pytest.fixture
def kept(tmp_path: Path) -> str:
    """A file with a log of 200 items, most of which have left its record."""
    url = f"sqlite:///{tmp_path}/logs.db"

    async def fill() -> None:
        async with open_backend(url) as backend:
            log = backend.item_log(KEY, "openai-agents")
            for number in range(199):
                await log.add([{"role": "user", "content": f"Wish {number}"}])
            await log.add([{"type": "function_call", "name": "book", "arguments": "{}"}])

    asyncio.run(fill())
    return url


def test_history_and_show_give_the_items_of_a_framework(kept: str) -> None:
    done = cli("history", "acme:u1:trip", "--url", kept, "-n", "3")
    assert re.findall(r"(\d+) +user +Wish (\d+)", done.stdout) == [("197", "197"), ("198", "198")]
    assert '"book"' in done.stdout
    again = f"stm-backends history acme:u1:trip --url {kept} -n 3 --log openai-agents --before 197"
    assert done.stderr == f"Earlier items: {again}\n"
    lines = cli(*done.stderr.split()[3:], "-n", "100", "--json", "--url", kept)
    found = [json.loads(line) for line in lines.stdout.splitlines()]
    assert [one["item"]["content"] for one in found] == [f"Wish {number}" for number in range(97, 197)]
    assert (found[0]["number"], found[0]["retained"], found[-1]["retained"]) == (97, False, True)
    done = cli("show", "acme:u1:trip", "--url", kept)
    assert "200, the newest 20 below" in done.stdout
    assert "Wish 180" in done.stdout
    document = json.loads(cli("show", "acme:u1:trip", "--url", kept, "--json").stdout)
    assert (document["log"], document["newest"], len(document["items"])) == ("openai-agents", 199, 20)


def test_a_page_of_a_log_has_all_of_its_items_by_the_numbers_of_history(kept: str) -> None:
    done = cli("show", "acme:u1:trip", "--url", kept, "--html")
    assert done.exit_code == 0, done.stderr
    state = recorded(done.stdout)
    said = [(unit["number"], unit["lines"]) for unit in state["units"]]
    assert said[:-1] == [(number, [["user", f"Wish {number}"]]) for number in range(199)]
    assert (said[-1][0], said[-1][1][0][0]) == (199, "function_call")
    assert (state["exists"], state["logs"], state["notes"]) == (False, ["openai-agents"], [])


def test_a_page_of_a_log_says_what_it_leaves_out(kept: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def lose(first: int) -> None:
        async with open_backend(kept) as backend:
            scope, prefix = keys.pages_of(keys.log_key(KEY, "openai-agents"))
            names = [name async for name in operations.names_of(backend.driver, scope, prefix)]
            # As its time to live would.
            await backend.driver.delete(Key(scope, names[first // 64]))

    asyncio.run(lose(64))
    state = recorded(cli("show", "acme:u1:trip", "--url", kept, "--html").stdout)
    assert [unit["number"] for unit in state["units"]] == [*range(64), *range(128, 200)]
    monkeypatch.setattr(pages, "MOST", 30)
    state = recorded(cli("show", "acme:u1:trip", "--url", kept, "--html").stdout)
    again = "stm-backends history acme:u1:trip --log openai-agents --before 170"
    assert state["notes"] == [f"This page shows the newest 30 items. Numbers 0 to 169: {again}"]
    assert [unit["number"] for unit in state["units"]] == [*range(170, 200)]


def test_markdown_of_a_log_has_its_newest_items_by_their_numbers(kept: str) -> None:
    done = cli("show", "acme:u1:trip", "--url", kept, "--md")
    assert done.exit_code == 0, done.stderr
    assert done.stdout.startswith(
        "# Log of openai-agents\n\n```text\nacme:u1:trip\n```\n\n- **items**: 200, the newest 20 below\n"
    )
    said = re.findall(
        r"^### Item (\d+), .*? UTC\n\nUser:\n\n```text\nWish (\d+)\n```$", done.stdout, re.MULTILINE
    )
    assert said == [(str(number), str(number)) for number in range(180, 199)]
    assert re.search(r"^### Item 199, .*? UTC\n\nItem:\n\n```text\n{", done.stdout, re.MULTILINE)


def turns_in(markdown: str) -> list[tuple[str, str]]:
    """The numbers of turns in Markdown, and those in their texts."""
    return re.findall(r"^### Turn (\d+), .*?Wish (\d+)$", markdown, re.MULTILINE | re.DOTALL)


def test_markdown_numbers_turns_as_history_does(url: str) -> None:
    said = turns_in(cli("show", "acme:u1:trip", "--md", "--url", url).stdout)
    assert said == [(str(number), str(number)) for number in range(65, 70)]


def test_markdown_numbers_turns_rightly_while_others_leave(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    export, more = Sessions.export, [*range(70, 90)]

    async def after_others_left(sessions: Sessions, key: MemoryKey, *, transcript: bool) -> dict[str, object]:
        if more:
            async with open_backend(url) as backend:
                memory = backend.memory(KEY)
                while more:
                    number = more.pop(0)
                    await memory.add_turn(ConversationTurn(f"Wish {number}", "Noted.", ts=1.7e9 + number))
                await memory.flush()
        return await export(sessions, key, transcript=transcript)

    monkeypatch.setattr(Sessions, "export", after_others_left)
    said = turns_in(cli("show", "acme:u1:trip", "--md", "--url", url).stdout)
    assert said == [(str(number), str(number)) for number in range(85, 90)]


def test_the_turns_come_first_and_of_several_logs_one_is_named(kept: str) -> None:
    async def more(kind: str) -> None:
        async with open_backend(kept) as backend:
            if kind == "langchain":
                await backend.item_log(KEY, "langchain").add([{"type": "human", "data": {"content": "Hi"}}])
            else:
                await say(backend, KEY, 1)

    asyncio.run(more("langchain"))
    for command in ("history", "show"):
        done = cli(command, "acme:u1:trip", "--url", kept)
        assert (done.exit_code, "--log openai-agents, --log langchain" in done.stderr) == (2, True)
        assert "Hi" in cli(command, "acme:u1:trip", "--url", kept, "--log", "langchain").stdout
        done = cli(command, "acme:u1:trip", "--url", kept, "--log", "crewai")
        assert (done.exit_code, "--log is one of" in done.stderr) == (2, True)
    asyncio.run(more("memory"))
    assert "Noted." in cli("history", "acme:u1:trip", "--url", kept).stdout
    assert "Noted." in cli("show", "acme:u1:trip", "--url", kept).stdout
    done = cli("history", "acme:u1:else", "--url", kept, "--log", "langchain")
    assert done.stderr.startswith("Error: there is no log of langchain under this key")


def test_the_latest_conversations_come_first_with_their_titles(url: str) -> None:
    async def more() -> None:
        async with open_backend(url) as backend:
            later = ShortTermMemoryConfig("truncation")
            await backend.memory(MemoryKey("acme", "u1", "later"), later).add_turn(
                ConversationTurn("Hi", "Hello")
            )

    asyncio.run(more())
    done = cli("ls", "acme:u1", "--recent", "2", "--url", url)
    assert [line.split("  ")[-2:] for line in done.stdout.splitlines()] == [
        ["CONVERSATION", "TITLE"],
        ["acme:u1:later", "Hi"],
        ["acme:u1:trip", "Wish 0"],
    ]

    async def name() -> None:
        async with open_backend(url) as backend:
            await backend.conversations.update(MemoryKey("acme", "u1", "later"), title="One\nTwo")

    asyncio.run(name())
    assert cli("ls", "acme:u1", "--recent", "1", "--url", url).stdout.endswith("  One\\nTwo\n")
    (one,) = cli("ls", "acme", "--recent", "1", "--json", "--url", url).stdout.splitlines()
    assert (json.loads(one)["session"], json.loads(one)["turns"]) == ("later", 1)


def test_the_latest_are_read_from_the_catalogue_alone(url: str) -> None:
    done = cli("ls", "--recent", "5", "--url", url)
    assert [line.split("  ")[-2:] for line in done.stdout.splitlines()] == [
        ["CONVERSATION", "TITLE"],
        ["acme:u1:trip", "Wish 0"],
    ]
    for more in ("--long", "--degraded"):
        assert "give --recent alone" in cli("ls", "acme", "--recent", "5", more, "--url", url).stderr

    async def forget() -> None:
        async with open_backend(url) as backend:
            await backend.driver.delete(keys.card_key(MemoryKey("acme", "u1", "trip")))

    asyncio.run(forget())
    done = cli("ls", "acme:u1", "--recent", "5", "--url", url)
    assert done.stdout == ""
    assert done.stderr.startswith("The catalogue has no conversation (`conversations.rebuild` adds")


def test_compacting_a_file_keeps_what_is_in_it(url: str) -> None:
    before = cli("history", "acme:u1:trip", "--url", url, "--json").stdout
    done = cli("compact", "--url", url)
    assert re.fullmatch(r"sqlite: [\d,]+ bytes before, [\d,]+ bytes after\n", done.stdout)
    assert cli("history", "acme:u1:trip", "--url", url, "--json").stdout == before
    with contextlib.closing(sqlite3.connect(url.removeprefix("sqlite:///"))) as file:
        assert file.execute("PRAGMA freelist_count").fetchone() == (0,)


def test_a_datastore_that_needs_no_compacting_is_left_alone() -> None:
    done = cli("compact", "--url", "memory://")
    assert (done.exit_code, done.stdout) == (0, "The backend 'memory' needs no compacting.\n")


def test_a_log_is_exported_and_imported_whole_a_page_a_line(kept: str, tmp_path: Path) -> None:
    file, url = tmp_path / "log.jsonl", f"sqlite:///{tmp_path}/other.db"

    def items_in(url: str) -> list[str]:
        return cli("history", "acme:u1:trip", "--url", url, "-n", "1000", "--json").stdout.splitlines()

    def as_kept(line: str) -> dict[str, object]:
        return {**json.loads(line), "retained": None}

    done = cli("export", "acme:u1:trip", "--url", kept, "-o", str(file))
    assert (done.exit_code, done.stderr) == (0, f"1 conversation written to {file}\n")
    *lines, last = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(line["first"], len(line["items"])) for line in lines] == [(0, 64), (64, 64), (128, 64), (192, 8)]
    assert (last["format"], last["log"], last["end"], last["missing"]) == ("stm-log", "openai-agents", 200, 0)
    assert cli("export", "--user", "acme:u1", "--url", kept).stdout == file.read_text()

    done = cli("import", str(file), "--url", url)
    assert (done.exit_code, done.stderr) == (0, "1 conversation imported\n")
    assert [*map(as_kept, items_in(url))] == [*map(as_kept, items_in(kept))]
    assert re.search(
        "200 *acme:u1:trip|acme:u1:trip", cli("ls", "acme:u1", "--recent", "2", "--url", url).stdout
    )
    again = cli("import", str(file), "--url", url)
    assert (again.exit_code, "exists already" in again.stderr) == (2, True)

    async def more() -> None:
        async with open_backend(url) as backend:
            await backend.item_log(KEY, "openai-agents").add([{"role": "user", "content": "later"}])

    asyncio.run(more())
    assert "none of them changed" in cli("import", str(file), "--merge", "--url", url).stderr
    assert len(items_in(url)) == 201
    assert cli("import", str(file), "--replace", "--url", url).exit_code == 0
    assert len(items_in(url)) == 200


def test_a_document_that_a_program_exported_is_imported_with_its_transcript(url: str, tmp_path: Path) -> None:
    file, other = tmp_path / "chat.jsonl", f"sqlite:///{tmp_path}/other.db"

    async def export() -> None:
        async with open_backend(url) as backend:
            file.write_text(json.dumps(await backend.sessions.export(KEY)))

    asyncio.run(export())
    done = cli("import", str(file), "--url", other)
    assert (done.exit_code, done.stderr) == (0, "1 conversation imported\n")
    told = cli("history", "acme:u1:trip", "--url", other, "-n", "100", "--json").stdout
    assert [json.loads(line)["user_message"] for line in told.splitlines()] == [
        f"Wish {number}" for number in range(70)
    ]


@pytest.mark.parametrize("without", [0, 1, 3])
def test_a_log_whose_items_are_not_all_there_is_not_imported(kept: str, tmp_path: Path, without: int) -> None:
    file, url = tmp_path / "log.jsonl", f"sqlite:///{tmp_path}/other.db"
    cli("export", "acme:u1:trip", "--url", kept, "-o", str(file))
    lines = file.read_text().splitlines()
    del lines[without]
    file.write_text("\n".join(lines))
    done = cli("import", str(file), "--url", url)
    assert (done.exit_code, "not all come directly before it" in done.stderr) == (2, True), done.stderr
    assert cli("history", "acme:u1:trip", "--url", url).exit_code == 1
