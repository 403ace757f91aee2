"""What `import` takes from a file that somebody else may have written."""

from __future__ import annotations

import asyncio
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from stm_backends import MemoryKey, open_backend
from stm_backends.cli.app import app
from stm_backends.cli.exports import ExportFile, FileLimits, Line
from stm_backends.drivers.contract import ANY, Key
from stm_backends.records import operations
from stm_backends.records.keys import log_key, memory_key, pages_of, vertex_key
from stm_backends.tiers import MemoryManager, MemoryTier
from tests.support.transcripts import converse, numbered, told

MIB = 1024 * 1024


def cli(*arguments: object, answer: str = "") -> Result:
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, [*map(str, arguments)], input=answer)


def lines(result: Result) -> list[str]:
    assert result.exit_code == 0, result.output
    return result.stdout.splitlines()


def listed_by(result: Result) -> list[str]:
    """The lines of `ls`, whose exit status says whether anything is stored for its argument."""
    assert result.exit_code == (0 if result.stdout else 1), result.output
    return result.stdout.splitlines()


def exported(tenant: Any, user: Any = "u", session: Any = "s", *, turns: int = 1, text: str = "Hello") -> str:
    key = {"tenant_id": tenant, "user_id": user, "session_id": session}
    said = [
        {"turn_id": str(number), "user_message": text, "assistant_response": "Hi"} for number in range(turns)
    ]
    document = {"format": "stm-session", "version": 1, "key": key, "body": {}, "turns": said}
    return json.dumps(document) + "\n"


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/stm.db"


def written(tmp_path: Path, *texts: str) -> Path:
    file = tmp_path / "made.jsonl"
    file.write_text("".join(texts))
    return file


@pytest.mark.parametrize(
    ("only", "stored"),
    [
        ("acme", {"acme": ["acme:u", "acme:v"], "victim": [], "acme2": []}),
        ("acme:u", {"acme": ["acme:u"], "victim": []}),
        ("a%3Ab", {"a%3Ab": ["a%3Ab:u"], "acme": [], "a": []}),
    ],
)
def test_only_the_wanted_tenant_or_user_is_imported(
    url: str, tmp_path: Path, only: str, stored: dict[str, list[str]]
):
    owners = [("acme", "u"), ("victim", "u"), ("acme", "v"), ("acme2", "u"), ("ACME", "u"), ("a:b", "u")]
    file = written(tmp_path, *(exported(*owner) for owner in owners))
    done = cli("import", file, "--only", only, "--url", url)
    assert done.exit_code == 0, done.output
    assert "lines of others skipped" in done.stderr
    for tenant, users in stored.items():
        assert listed_by(cli("ls", tenant, "--url", url)) == users


def test_a_key_that_is_not_text_is_never_imported_as_anothers(url: str, tmp_path: Path):
    file = written(tmp_path, exported(["acme"]), exported({"acme": 1}), exported(None))
    done = cli("import", file, "--only", "acme", "--url", url)
    assert "3 lines of others skipped" in done.stderr
    assert listed_by(cli("ls", "acme", "--url", url)) == []


def test_an_import_for_nobody_in_the_file_says_so_and_fails(url: str, tmp_path: Path):
    file = written(tmp_path, exported("victim"))
    done = cli("import", file, "--only", "acme", "--url", url)
    assert done.exit_code == 1
    assert "nothing of acme" in done.stderr
    assert cli("import", file, "--only", "a:b:c", "--url", url).exit_code == 2


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--max-line-mib", 1), r"made.jsonl:2: longer than 1,048,576 characters; see --max-line-mib"),
        (("--max-total-mib", 1), r"made.jsonl:2: the file is longer than 1,048,576 characters"),
        (("--max-turns", 2), "made.jsonl:3: more than 2 turns; see --max-turns"),
    ],
)
@pytest.mark.parametrize("by", ["file", "standard input"])
def test_a_file_beyond_a_limit_is_refused_by_line_and_changes_nothing(
    url: str, tmp_path: Path, options: tuple[str, int], said: str, by: str
):
    texts = exported("a"), exported("b", text="x" * MIB), exported("c", turns=3)
    file = written(tmp_path, *texts)
    if by == "file":
        done = cli("import", file, *options, "--url", url)
    else:
        done = cli("import", "-", *options, "--url", url, answer="".join(texts))
        said = said.replace("made.jsonl", "standard input")
    assert done.exit_code == 2
    assert said in done.stderr
    assert not (tmp_path / "stm.db").exists()


def test_an_export_within_the_limits_comes_through_a_pipe(url: str, tmp_path: Path):
    texts = exported("a", text="é\u2028\r\n\x00"), exported("b", turns=3)
    done = cli("import", "-", "--url", url, answer="".join(texts))
    assert done.exit_code == 0, done.output
    again = lines(cli("export", "a:u:s", "b:u:s", "--url", url))
    assert json.loads(again[0])["turns"][0]["user_message"] == "é\u2028\r\n\x00"
    assert len(json.loads(again[1])["turns"]) == 3


class Counted(io.StringIO):
    """Text that counts how often it is read."""

    reads = 0

    def read(self, size: int | None = -1, /) -> str:
        self.reads += 1
        return super().read(size)

    def readline(self, size: int = -1, /) -> str:  # type: ignore[override]
        self.reads += 1
        return super().readline(size)


@pytest.mark.parametrize("before", ["\n" * 4 * MIB, " \n" * 2 * MIB, " " * 4 * MIB])
def test_blank_lines_and_long_lines_are_read_in_few_portions(before: str) -> None:
    text = Counted(f'{before}{{"a": 1}}\n\n{{"a": 2}}')
    file = ExportFile("made", text, limits=FileLimits(), only=None)
    assert text.reads < 30
    first = before.count("\n") + 1
    assert [*file] == [Line(f"made:{first}", {"a": 1}), Line(f"made:{first + 2}", {"a": 2})]


@pytest.mark.skipif(sys.platform != "linux", reason="limits the memory of a process")
@pytest.mark.parametrize("bomb", ["one line", "many lines"])
def test_an_endless_file_ends_with_an_error_and_little_memory(url: str, tmp_path: Path, bomb: str):
    """What `zcat bomb.gz | stm-backends import -` reads: gigabytes from a few kilobytes."""
    endless = "yes x | tr -d '\\n'" if bomb == "one line" else f"yes '{exported('acme').strip()}'"
    source = subprocess.Popen(["/bin/sh", "-c", endless], stdout=subprocess.PIPE)
    program = (
        "import resource, runpy, sys;"
        "resource.setrlimit(resource.RLIMIT_AS, (600 << 20, 600 << 20));"
        "sys.argv = ['stm-backends', *sys.argv[1:]];"
        "runpy.run_module('stm_backends.cli', run_name='__main__')"
    )
    arguments = ["import", "-", "--url", url, "--max-total-mib", "100", "--max-line-mib", "50"]
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        stdin=source.stdout,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "COLUMNS": "200"},
    )
    assert source.stdout is not None
    source.stdout.close()  # which ends it
    source.wait()
    assert done.returncode == 2, done.stderr
    place = "standard input:1: longer" if bomb == "one line" else "the file is longer"
    assert place in done.stderr
    assert not (tmp_path / "stm.db").exists()


def vertex(tenant: str, user: str = "u", vertex_id: str = "memory:k", **fields: Any) -> str:
    document: dict[str, Any] = {
        "format": "stm-vertex",
        "version": 1,
        "key": {"tenant_id": tenant, "user_id": user, "vertex_id": vertex_id},
        "label": "note",
        "properties": {"key": "k", "content": "Zanzibar"},
        "created_at": "2030-01-01T00:00:00+00:00",
        "edges": [],
    }
    return json.dumps({**document, **fields}) + "\n"


def test_graph_of_another_tenant_is_skipped_like_a_conversation(url: str, tmp_path: Path) -> None:
    file = written(tmp_path, vertex("victim"), vertex("acme"))
    done = cli("import", file, "--url", url, "--only", "acme")
    assert done.exit_code == 0, done.output
    assert "1 graph vertex imported" in done.stderr
    assert listed_by(cli("ls", "acme", "--url", url)) == ["acme:u"]
    assert listed_by(cli("ls", "victim", "--url", url)) == []


INVALID: list[dict[str, Any]] = [
    {"version": 2},
    {"label": None},
    {"properties": []},
    {"label": "memory"},
    {"created_at": "yesterday"},
    {"edges": {}},
    {"edges": [{"target_id": 1, "label": "x", "properties": {}}]},
    {"edges": [{"target_id": "a", "label": "x", "properties": 1}]},
    {"key": {"tenant_id": "acme", "user_id": "u"}},
    {"key": {"tenant_id": "acme", "vertex_id": "v"}},
    {"key": {"tenant_id": "acme", "user_id": " ", "vertex_id": "v"}},
    {"key": []},
]


@pytest.mark.parametrize("fields", INVALID)
def test_an_invalid_vertex_is_named_and_nothing_is_imported(
    url: str, tmp_path: Path, fields: dict[str, Any]
) -> None:
    file = written(tmp_path, exported("acme"), vertex("acme", **fields))
    done = cli("import", file, "--url", url)
    assert done.exit_code == 2, done.output
    assert "made.jsonl:2" in done.stderr
    assert listed_by(cli("ls", "acme", "--url", url)) == []


def test_a_vertex_that_exists_or_occurs_twice_is_refused(url: str, tmp_path: Path) -> None:
    twice = cli("import", written(tmp_path, vertex("acme"), vertex("acme")), "--url", url)
    assert twice.exit_code == 2
    assert "occurs twice" in twice.stderr
    file = written(tmp_path, vertex("acme"))
    assert cli("import", file, "--url", url).exit_code == 0
    again = cli("import", file, "--url", url)
    assert again.exit_code == 2
    assert "exists already; nothing was imported" in again.stderr
    merged = cli("import", file, "--url", url, "--merge")
    assert merged.exit_code == 0
    assert "1 graph vertex merged, none of them changed" in merged.stderr


async def remembered(url: str, key: str, content: str) -> None:
    async with open_backend(url) as backend:
        memory = MemoryManager(backend=backend, owner=("acme", "u1"))
        await memory.remember(key, content, tier=MemoryTier.LONG_TERM)


async def recalled(url: str, query: str) -> list[tuple[str, Any]]:
    async with open_backend(url) as backend:
        memory = MemoryManager(backend=backend, owner=("acme", "u1"))
        return [(one.key, one.content) for one in await memory.recall(query)]


def test_a_listing_tells_what_a_user_without_conversations_has(url: str, tmp_path: Path) -> None:
    asyncio.run(remembered(url, "finding", "Quantum uses qubits"))
    listed = cli("ls", "acme:u1", "--url", url)
    assert (listed.exit_code, listed.stdout) == (0, "")
    told = "Not listed: 1 graph vertex (long-term memory). `copy` and `erase` include them.\n"
    assert listed.stderr == told

    async def save() -> None:
        async with open_backend(url) as backend:
            await backend.state_store.save_memory_state("acme:u2:chat", {"a": 1})

    asyncio.run(save())
    told = "Not listed: 1 saved state. `copy` and `erase` include them.\n"
    assert cli("ls", "-l", "acme:u2", "--url", url).stderr == told
    written = cli("export", "--user", "acme:u2", "--url", url, "-o", str(tmp_path / "none.jsonl"))
    assert written.stderr.startswith("Not written: 1 saved state.")


def test_an_export_of_a_user_carries_the_long_term_memory(url: str, tmp_path: Path) -> None:
    asyncio.run(remembered(url, "finding", "Quantum uses qubits"))
    asyncio.run(remembered(url, "other", "\ud800 lone"))
    file, target = tmp_path / "out.jsonl", f"sqlite:///{tmp_path}/target.db"
    done = cli("export", "--user", "acme:u1", "-o", file, "--url", url)
    assert done.exit_code == 0, done.output
    assert "0 conversations and 2 graph vertices written" in done.stderr
    assert cli("import", file, "--url", target).exit_code == 0
    assert asyncio.run(recalled(target, "qubits")) == [("finding", "Quantum uses qubits")]
    assert asyncio.run(recalled(target, "lone")) == [("other", "\ud800 lone")]
    asyncio.run(remembered(target, "finding", "newer"))
    merged = cli("import", file, "--url", target, "--merge")
    assert "2 graph vertices merged, none of them changed" in merged.stderr
    assert asyncio.run(recalled(target, "finding")) == [("finding", "newer")]
    assert cli("import", file, "--url", target, "--replace").exit_code == 0
    assert asyncio.run(recalled(target, "finding")) == [("finding", "Quantum uses qubits")]
    assert "records of graphs" in cli("stats", "acme:u1", "--url", target).stdout
    erased = cli("erase", "acme:u1", "--yes", "--url", target)
    assert erased.exit_code == 0, erased.output
    assert "graph records" in erased.stdout
    assert asyncio.run(recalled(target, "finding")) == []
    nothing = cli("export", "--user", "acme:u1", "--url", target)
    assert nothing.exit_code == 1


def test_copying_a_user_carries_the_long_term_memory(url: str, tmp_path: Path) -> None:
    asyncio.run(remembered(url, "finding", "Quantum uses qubits"))
    target = f"sqlite:///{tmp_path}/target.db"
    assert cli("copy", url, target, "--user", "acme:u1", "--ttl", "1s").exit_code == 0
    assert asyncio.run(recalled(target, "qubits")) == [("finding", "Quantum uses qubits")]
    asyncio.run(remembered(target, "finding", "Qubits are used"))
    differs = cli("copy", url, target, "--user", "acme:u1")
    assert differs.exit_code == 1
    assert "a record of acme:u1 (graph)" in differs.stderr


async def damage(url: str, vertex_id: str) -> None:
    async with open_backend(url) as backend:
        where = vertex_key("acme", "u1", vertex_id)
        await backend.driver.replace(where, b"stm/9 vertex", version="v", expect=ANY, ttl=None)


def test_a_damaged_vertex_is_named_and_everything_else_is_exported(url: str, tmp_path: Path) -> None:
    asyncio.run(remembered(url, "finding", "Quantum uses qubits"))
    asyncio.run(remembered(url, "damaged", "gone"))
    asyncio.run(damage(url, "memory:damaged"))
    file = tmp_path / "out.jsonl"
    done = cli("export", "--user", "acme:u1", "-o", file, "--url", url)
    assert done.exit_code == 1
    assert "a vertex of the graph of acme:u1: " in done.stderr
    assert "1 graph vertex could not be exported" in done.stderr
    [line] = file.read_text().splitlines()
    assert json.loads(line)["properties"]["key"] == "finding"


def test_a_damaged_page_costs_an_export_no_more_than_its_turns(url: str, tmp_path: Path) -> None:
    long, other, noted = (MemoryKey("acme", "u", name) for name in ("long", "other", "noted"))

    async def fill() -> None:
        async with open_backend(url) as backend:
            await converse(backend, long, range(200))
            await converse(backend, other, range(200))
            log = backend.item_log(noted, "langchain")
            for number in range(200):
                await log.add([{"type": "human", "data": {"content": f"Wish {number}"}}])
            for record, number in ((memory_key(long), 1), (log_key(noted, "langchain"), 0)):
                scope, prefix = pages_of(record)
                names = [name async for name in operations.names_of(backend.driver, scope, prefix)]
                where = Key(scope, names[number])
                await backend.driver.replace(where, b"stm/9 page", version="v", expect=ANY, ttl=None)

    asyncio.run(fill())
    file, there = tmp_path / "out.jsonl", f"sqlite:///{tmp_path}/there.db"
    done = cli("export", "--user", "acme:u", "-o", file, "--url", url)
    assert done.exit_code == 1
    assert "Error: acme:u:long, turns 64 to 127: " in done.stderr
    assert "Error: acme:u:noted, items 0 to 63 of its log of langchain: " in done.stderr
    assert f"3 conversations written to {file}" in done.stderr
    assert "Error: 2 conversations could not be exported whole" in done.stderr

    done = cli("import", file, "--url", there)
    assert done.exit_code == 0
    assert done.stderr == (
        "3 conversations imported\n"
        "acme:u:long: the file has no turns 64 to 127\n"
        "acme:u:noted: the file has no items 0 to 63 of its log of langchain\n"
    )

    async def found(key: MemoryKey) -> list[tuple[int, str]]:
        async with open_backend(there) as backend:
            return await told(backend, key)

    assert asyncio.run(found(other)) == numbered(range(200))
    assert asyncio.run(found(long)) == numbered(range(64)) + numbered(range(128, 200))
    shown = cli("history", "acme:u:long", "-n", 40, "--before", 120, "--url", there)
    assert shown.stderr == (
        f"Earlier turns: stm-backends history acme:u:long --url {there} -n 40 --before 80\n"
        "No longer stored: 80 to 119\n"
    )
    assert cli("export", "--user", "acme:u", "--url", there).exit_code == 0, "what is missing is no error"

    assert cli("history", "acme:u:long", "-n", 40, "--before", 120, "--url", url).exit_code == 1
    assert cli("import", file, "--replace", "--url", url).exit_code == 0
    shown = cli("history", "acme:u:long", "-n", 40, "--before", 120, "--url", url)
    assert (shown.exit_code, "No longer stored: 80 to 119" in shown.stderr) == (0, True)


def test_the_same_error_of_many_vertices_is_printed_once_with_their_number(url: str, tmp_path: Path) -> None:
    for number in range(3):
        asyncio.run(remembered(url, f"k{number}", "gone"))
        asyncio.run(damage(url, f"memory:k{number}"))
    done = cli("export", "--user", "acme:u1", "-o", tmp_path / "out.jsonl", "--url", url)
    assert done.exit_code == 1
    assert done.stderr.count("a vertex of the graph of acme:u1: ") == 1
    assert "3 graph vertices could not be exported" in done.stderr


def test_a_transcript_is_exported_and_imported_in_lines(tmp_path: Path) -> None:
    first, second, file = (tmp_path / name for name in ("one.db", "two.db", "chat.jsonl"))
    key = MemoryKey("acme", "u", "long")

    async def fill() -> None:
        async with open_backend(f"sqlite:///{first}") as backend:
            await converse(backend, key, range(150))

    async def found() -> list[tuple[int, str]]:
        async with open_backend(f"sqlite:///{second}") as backend:
            return await told(backend, key)

    asyncio.run(fill())
    assert cli("export", "acme:u:long", "--url", f"sqlite:///{first}", "-o", file).exit_code == 0
    written = file.read_text().splitlines()
    assert [json.loads(line)["format"] for line in written] == ["stm-transcript"] * 3 + ["stm-session"]
    done = cli("import", file, "--url", f"sqlite:///{second}")
    assert done.exit_code == 0
    assert "1 conversation imported" in done.output
    assert asyncio.run(found()) == numbered(range(150))
    assert cli("import", file, "--url", f"sqlite:///{second}").exit_code != 0
    assert "none of them changed" in cli("import", file, "--url", f"sqlite:///{second}", "--merge").output
    file.write_text("\n".join([*written[1:], ""]))
    refused = cli("import", file, "--url", f"sqlite:///{tmp_path}/three.db")
    assert refused.exit_code != 0
    assert "pages of the transcript" in refused.output


# States that a memory has saved


def saved(*texts: str, key: str = "", **fields: object) -> str:
    """Return a line with a state as PenguiFlow's memory saves it."""
    said = [{"user_message": text, "assistant_response": "Hi"} for text in texts]
    state = {"version": 1, "health": "healthy", "summary": "", "turns": said, "pending": [], "backlog": []}
    return json.dumps({**state, **({"key": key} if key else {}), **fields}) + "\n"


def said_in(url: str, key: str) -> list[str]:
    (line,) = lines(cli("export", key, "--url", url))
    return [turn["user_message"] for turn in json.loads(line)["turns"]]


def test_saved_states_are_imported_under_the_keys_that_they_name(url: str, tmp_path: Path):
    whole = {"tenant_id": "a:b", "user_id": "v", "session_id": "s"}
    file = written(
        tmp_path,
        saved("one", "two", key="acme:u:s", summary="S", pending=[{"user_message": "zero"}]),
        exported("acme", "w"),
        saved("other", key="a%3Ab:v:t"),
        json.dumps({**json.loads(saved("third")), "key": whole}) + "\n",
    )
    done = cli("import", file, "--url", url)
    assert done.exit_code == 0, done.output
    assert "4 conversations imported" in done.stderr
    assert said_in(url, "acme:u:s") == ["zero", "one", "two"]
    assert said_in(url, "a%3Ab:v:t") == ["other"]
    assert said_in(url, "a%3Ab:v:s") == ["third"]
    again = cli("import", file, "--url", url)
    assert again.exit_code == 2
    assert "made.jsonl:1: acme:u:s exists already; nothing was imported" in again.stderr
    merged = cli("import", file, "--merge", "--url", url)
    assert "4 conversations merged, none of them changed" in merged.stderr


@pytest.mark.parametrize("by", ["file", "standard input"])
def test_a_state_that_names_no_key_takes_that_of_the_option(url: str, tmp_path: Path, by: str):
    file = written(tmp_path, saved("one"))
    arguments = ("import", file if by == "file" else "-", "--key", "acme:u:s", "--url", url)
    done = cli(*arguments, answer=saved("one"))
    assert done.exit_code == 0, done.output
    assert said_in(url, "acme:u:s") == ["one"]


def test_only_states_of_the_wanted_owner_are_imported(url: str, tmp_path: Path):
    file = written(tmp_path, saved("one", key="acme:u:s"), saved("two", key="victim:u:s"))
    assert "1 line of others skipped" in cli("import", file, "--only", "acme", "--url", url).stderr
    assert listed_by(cli("ls", "victim", "--url", url)) == []


@pytest.mark.parametrize(
    ("texts", "options", "message"),
    [
        ([saved("one")], (), "made.jsonl:1: a saved state does not name its conversation; add it to"),
        ([saved("one"), saved("two")], ("--key", "acme:u:s"), "made.jsonl:2: a saved state does not name"),
        ([exported("acme")], ("--key", "acme:u:s"), "--key is for a saved state that does not name its"),
        ([saved("one", key="acme:u:s")], ("--key", "acme:u:t"), "--key is for a saved state that does not"),
        ([saved("one", key="acme:u")], (), "made.jsonl:1: a conversation's key has three parts"),
        ([saved("one", key="acme:mail:u:s")], (), "made.jsonl:1: a conversation's key has three parts"),
        ([saved("one", key="acme:u:s", version=2)], (), "made.jsonl:1: a memory state of a version that"),
        ([saved("one", key="acme:u:s", turns=[7])], (), "made.jsonl:1: not a memory state"),
        ([saved("one", key="acme:u:s")] * 2, (), "made.jsonl:2: this conversation occurs twice in the file"),
        ([saved("1", key="acme:u:s", pending=[{}] * 9)], ("--max-turns", 9), "made.jsonl:1: more than 9"),
        ([saved("one")], ("--key", "acme:u"), "is not a conversation; write tenant:user:session"),
    ],
)
@pytest.mark.parametrize("merge", [False, True])
def test_states_of_unclear_conversations_are_refused_and_nothing_stored(
    url: str, tmp_path: Path, texts: list[str], options: tuple[object, ...], message: str, merge: bool
):
    merge = merge and "twice" not in message  # a merge takes what occurs twice
    done = cli("import", written(tmp_path, *texts), *options, *(["--merge"] * merge), "--url", url)
    assert done.exit_code == 2, done.output
    assert message in done.stderr
    assert not (tmp_path / "stm.db").exists() or listed_by(cli("ls", "acme", "--url", url)) == []
