"""A sealed replay whose pods are killed: nothing is lost, and no word of it is in the raw bytes.

`STM_TEST_DIALOGUES` names a file of conversations to replay instead of the examples, and
`STM_TEST_KILL_EVERY` how many seconds there are between two kills. Run pytest with `-rP` to see the figures.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import re
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from stm_backends.cli.replay.conversations import read_conversations
from stm_backends.sealing.naming import KEYS_VARIABLE
from tests.support.command_line import cli
from tests.support.places import quick_on, with_query

DIALOGUES = Path(
    os.environ.get("STM_TEST_DIALOGUES") or Path(__file__).parents[2] / "examples" / "conversations.jsonl"
)
KILL_EVERY = float(os.environ.get("STM_TEST_KILL_EVERY") or 0.5)
"""Seconds. A pod takes one to start, and several on a busy machine."""

GREP = ("grep", "--text", "--only-matching", "--no-filename", "--recursive", "--fixed-strings")
"""Of words at one position, it shows the longest."""

pytestmark = [
    pytest.mark.skipif(shutil.which("grep") is None, reason="needs grep"),
    pytest.mark.parametrize("datastore", quick_on("sqlite", ["sqlite", "redis", "postgres"])),
]


@dataclass(frozen=True)
class Datastore:
    """Where a replay writes. `dump` writes everything it holds to files, and returns what to search.

    `programs` are searched for words of the server's own messages.
    """

    url: str
    dump: Callable[[], list[Path]]
    programs: tuple[Path, ...] = ()


@pytest.fixture
def place(datastore: str, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Datastore]:
    """A datastore of the test's own whose files can be read."""
    folder = tmp_path / "data"
    with {"sqlite": _sqlite, "redis": _redis, "postgres": _postgres}[datastore](
        folder, request.getfixturevalue
    ) as place:
        yield place


@contextmanager
def _sqlite(folder: Path, fixture: Callable[[str], Any]) -> Generator[Datastore]:
    folder.mkdir()
    url = f"sqlite:///{folder}/stm.db?deadline_s=1"
    assert cli("ping", "--create", "--url", url).returncode == 0
    # While a connection is open, the write-ahead log stays.
    with closing(sqlite3.connect(folder / "stm.db")) as connection:
        connection.execute("SELECT count(*) FROM sqlite_master").fetchone()

        def dump() -> list[Path]:
            assert (folder / "stm.db-wal").stat().st_size
            return [folder]

        yield Datastore(url, dump)


@contextmanager
def _redis(folder: Path, fixture: Callable[[str], Any]) -> Generator[Datastore]:
    import redis  # noqa: PLC0415 -- as in `tests/support/places.py`

    from tests.support.redis_server import RedisServer  # noqa: PLC0415

    folder.mkdir()
    options = ("--appendonly", "yes", "--appendfsync", "always", "--save", "", "--rdbcompression", "no")
    server = RedisServer(fixture("redis_binary"), folder, *options)
    server.start()

    def dump() -> list[Path]:
        copies = folder / "copies"
        copies.mkdir(exist_ok=True)
        with closing(redis.Redis(port=server.port)) as client:
            for file in folder.glob("appendonly*"):
                shutil.copy(file, copies)  # before it is rewritten
            with (copies / "keys").open("wb") as out:
                for key in client.scan_iter(count=1000):
                    out.write(key + b"\n" + (client.dump(key) or b"") + b"\n")
            client.bgrewriteaof()
            while client.info("persistence")["aof_rewrite_in_progress"]:
                time.sleep(0.05)
            client.save()
        return [folder]

    with ExitStack() as stack:
        stack.callback(server.stop)
        yield Datastore(with_query(server.url, deadline_s=4), dump)


@contextmanager
def _postgres(folder: Path, fixture: Callable[[str], Any]) -> Generator[Datastore]:
    import asyncpg  # noqa: PLC0415

    from tests.support.postgresql import Postgres  # noqa: PLC0415

    binaries = fixture("postgres_binaries")
    server = Postgres(binaries, fixture("postgres_folder") / folder.parent.name)
    server.start()
    folder.mkdir()

    async def copied() -> None:
        connection = await asyncpg.connect(server.url)
        try:
            tables = await connection.fetch(
                "SELECT schemaname, tablename FROM pg_tables"
                " WHERE schemaname NOT IN ('pg_catalog', 'information_schema')"
            )
            for schema, table in tables:
                await connection.copy_from_table(
                    table, schema_name=schema, output=folder / f"{schema}.{table}", format="binary"
                )
            await connection.execute("CHECKPOINT")
        finally:
            await connection.close()

    def dump() -> list[Path]:
        asyncio.run(copied())
        return [folder, server.directory]

    with ExitStack() as stack:
        stack.callback(server.stop)
        yield Datastore(with_query(server.url, deadline_s=4), dump, (binaries / "postgres",))


# Words


def words_of(dialogues: Path) -> set[str]:
    """Return the words of six letters or more, and the phrases, that ids do not contain or begin.

    The byte after an id may be any letter.
    """
    conversations = read_conversations(dialogues)
    ids = " ".join(conversation.session for conversation in conversations)
    begun = tuple(re.findall(r"[a-z]{4,}", ids))
    found: set[str] = set()
    for turn in (turn for conversation in conversations for turn in conversation.turns):
        for text in (turn.user_message, turn.assistant_response):
            found.update(re.findall(r"[A-Za-z]{6,}", text))
            found.update(re.findall(r"[A-Za-z][A-Za-z' ]{14,30}[A-Za-z]", text))
    return {word for word in found if word not in ids and not word.startswith(begun)}


def found_in(places: list[Path], words: set[str], folder: Path) -> set[str]:
    """Return which of the words `grep` finds in the bytes of files and folders."""
    patterns = folder / "words"
    patterns.write_text("".join(f"{word}\n" for word in sorted(words)))
    done = subprocess.run(
        [*GREP, "--file", patterns, *places],
        env={**os.environ, "LC_ALL": "C"},
        capture_output=True,
        check=False,
    )
    assert done.returncode in (0, 1), done.stderr
    return {line.decode("ascii") for line in done.stdout.splitlines()}


def lines_with(words: set[str], places: list[Path]) -> bytes:
    """Return the places of these words, and what is around them."""
    if not words:
        return b""
    pattern = ".{0,40}(" + "|".join(map(re.escape, sorted(words))) + ").{0,40}"
    command = ["grep", "--text", "--only-matching", "--recursive", "--extended-regexp", pattern, *places]
    done = subprocess.run(command, env={**os.environ, "LC_ALL": "C"}, capture_output=True, check=False)
    return done.stdout[:10_000]


def replayed(dialogues: Path, place: Datastore, folder: Path, **environment: str) -> dict[str, Any]:
    """Replay with kills; returns the figures."""
    numbers = folder / "numbers.json"
    done = cli(
        *("replay", dialogues, "--url", place.url, "--create", "--json", numbers),
        *("--kill-every", KILL_EVERY, "--full-zone-turns", 3),
        timeout=3600,
        **environment,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(numbers.read_text())
    shown = ("turns", "killed", "sent_again", "found", "bad_reads", "summarized", "in_full", "seconds_in_all")
    show({name: figures[name] for name in shown})
    return figures


@pytest.mark.full
def test_a_sealed_replay_with_kills_loses_nothing_and_shows_no_word(place: Datastore, tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    secret = base64.b64encode(os.urandom(32)).decode()
    keys.write_text(json.dumps({"primary": "k1", "keys": {"k1": secret}}))
    nothing = tmp_path / "nothing.jsonl"
    nothing.write_text('{"session": "0", "turns": [{"user": "0", "assistant": "0"}]}\n')
    sealed = {KEYS_VARIABLE: str(keys)}
    assert cli("replay", nothing, "--url", place.url, "--create", **sealed).returncode == 0
    # For example "record", in the layout of tables, or in the catalogs and the log of PostgreSQL.
    words = words_of(DIALOGUES)
    while own := found_in([*place.dump(), *place.programs], words, tmp_path):
        words -= own

    figures = replayed(enough(tmp_path), place, tmp_path, **sealed)

    assert figures["found"] == {"lost": 0, "doubled": 0, "out_of_order": 0, "foreign": 0}
    assert figures["bad_reads"] == 0
    assert figures["killed"] > 0
    assert figures["summarized"] > 0
    places = place.dump()
    show(f"{len(words):,} words and phrases, {size_of(places):,} bytes")
    assert lines_with(found_in(places, words, tmp_path), places) == b""


def test_the_same_search_finds_the_words_of_an_unsealed_replay(place: Datastore, tmp_path: Path) -> None:
    some = tmp_path / "some.jsonl"
    some.write_text("".join(DIALOGUES.read_text("utf-8").splitlines(keepends=True)[:5]))
    words = words_of(some)
    # No summary replaces them.
    done = cli("replay", some, "--url", place.url, "--create", "--full-zone-turns", 99)
    assert done.returncode == 0, done.stdout + done.stderr
    found = found_in(place.dump(), words, tmp_path)
    show(f"{len(found):,} of {len(words):,} words and phrases")
    assert len(found) > len(words) / 2


def enough(folder: Path) -> Path:
    """Return a file of dialogues that take longer than some kills: the examples several times."""
    if "STM_TEST_DIALOGUES" in os.environ:
        return DIALOGUES
    lines = [json.loads(line) for line in DIALOGUES.read_text("utf-8").splitlines()]
    path = folder / "dialogues.jsonl"
    many = [{**line, "session": f"{number}-{line['session']}"} for number in range(8) for line in lines]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in many))
    return path


def show(figures: object) -> None:
    """Add figures to the output of the test."""
    sys.stdout.write(f"{figures}\n")


def size_of(places: list[Path]) -> int:
    """Return how many bytes were searched."""
    return sum(file.stat().st_size for place in places for file in place.rglob("*") if file.is_file())
