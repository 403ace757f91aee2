"""Lists of ids in real shells: one line is one argument, and means the id that it was made of."""

from __future__ import annotations

import asyncio
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import stm_backends
from stm_backends import ConversationTurn, MemoryKey, ShortTermMemoryConfig
from stm_backends.cli.app import app
from stm_backends.cli.transfer import escaped, owner, unescaped, user_composite

SHELLS = [shell for shell in ("sh", "bash") if shutil.which(shell)]

HOSTILE = (
    "x\nvictim",
    "x\racme:victim",
    "x\tvictim",
    "x\u2028victim",
    "x\u2029victim",
    "x\u0085victim",
    "x\u202evictim\u2066",
    "x\u00a0y",
    "victim ",
    " victim",
    "vic\\tim",
    "victim\\",
    "-y",
    "--url=sqlite:///other.db",
    "*",
    "v?ctim",
    "[a-z]*",
    "'victim'",
    'vic"tim"',
    "$(touch hit)",
    "`touch hit`",
    "; touch hit",
    "a#b&c|d<e>f",
    "~",
    "{victim,u}",
    "victim%0A",
    "%20",
)

LOOPS = {
    "read with -r": 'stm ls acme | while read -r u; do stm erase "$u" -y < /dev/null; done',
    "read": 'stm ls acme | while read u; do stm erase "$u" -y < /dev/null; done',
    "no quotes": "for u in $(stm ls acme); do stm erase $u -y; done",
    "xargs": "stm ls acme | xargs -n 1 -I {} stm erase {} -y",
    "eval": 'for u in $(stm ls acme); do eval "stm erase $u -y"; done',
}

NOTES = """#!/bin/sh
# `ls` prints what the command printed; `erase` notes its arguments, each ended by NUL.
case "$1" in
    ls) cat "$LISTED" ;;
    *) printf '%s\\0' "$@" >> "$NOTED" ;;
esac
"""

REAL = f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m stm_backends.cli "$@"\n'


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/stm.db"


def fill(url: str, *users: str) -> None:
    async def work() -> None:
        async with stm_backends.open_backend(url) as backend:
            for tenant, user in (*(("acme", user) for user in users), ("victim", "u"), ("acme", "victim")):
                memory = backend.memory(MemoryKey(tenant, user, "s"), ShortTermMemoryConfig("truncation"))
                await memory.add_turn(ConversationTurn("Hello", "Hi"))

    asyncio.run(work())


def ls(url: str, whose: str) -> list[str]:
    done = CliRunner().invoke(app, ["ls", "--url", url, "--", whose])
    assert done.exit_code == (0 if done.stdout else 1), done.output
    return done.stdout.splitlines()


def in_shell(shell: str, text: str, folder: Path, program: str, **environment: str) -> None:
    """Run a text in a folder of its own, where `stm` is a program."""
    (folder / "bin").mkdir()
    stm = folder / "bin" / "stm"
    stm.write_text(program)
    stm.chmod(0o700)
    path = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    subprocess.run(
        [shell, "-c", text],
        cwd=folder,
        env={**os.environ, "PATH": path, **environment},
        check=True,
        timeout=200,
    )
    assert not (folder / "hit").exists(), "an id was run as a command"


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize("loop", LOOPS)
def test_a_line_of_a_list_is_one_argument_and_one_id(tmp_path: Path, url: str, shell: str, loop: str):
    fill(url, *HOSTILE)
    listed, noted = tmp_path / "listed", tmp_path / "noted"
    listed.write_text("".join(f"{line}\n" for line in ls(url, "acme")))
    folder = tmp_path / "here"
    folder.mkdir()
    in_shell(shell, LOOPS[loop], folder, NOTES, LISTED=str(listed), NOTED=str(noted))
    arguments = noted.read_text().split("\0")[:-1]
    calls = [arguments[index : index + 3] for index in range(0, len(arguments), 3)]
    assert all((call[0], call[2]) == ("erase", "-y") for call in calls)
    assert sorted(owner(call[1]) for call in calls) == sorted(("acme", user) for user in (*HOSTILE, "victim"))


def test_the_loop_of_an_operator_erases_only_what_it_listed(tmp_path: Path, url: str):
    """With the real command, user by user; `victim` is another tenant, and here no user of `acme`."""
    fill(url, "x\nvictim", "x\u2028victim", "vic\\tim\\", "-y")
    loop = 'stm ls acme | grep -v "^acme:victim$" | while read u; do stm erase "$u" -y < /dev/null; done'
    in_shell("sh", loop, tmp_path, REAL, STM_BACKENDS_URL=url)
    assert ls(url, "acme") == ["acme:victim"]
    assert ls(url, "victim") == ["victim:u"]


@pytest.mark.parametrize("tenant", ["-y", "--url=other", "--", "-"])
def test_a_tenant_like_an_option_is_listed_as_an_argument(url: str, tenant: str):
    async def work() -> None:
        async with stm_backends.open_backend(url) as backend:
            memory = backend.memory(MemoryKey(tenant, "u", "s"), ShortTermMemoryConfig("truncation"))
            await memory.add_turn(ConversationTurn("Hello", "Hi"))

    asyncio.run(work())
    (line,) = ls(url, tenant)
    assert line.startswith("%2D")
    done = CliRunner().invoke(app, ["erase", line, "-y", "--url", url])
    assert done.stdout.startswith("1 record erased: 1 conversation")
    assert ls(url, tenant) == []


@pytest.mark.parametrize("what", ["", " ", "\n", ":", "acme:", ":u", "acme: "])
def test_an_empty_line_erases_nothing(url: str, what: str):
    fill(url)
    done = CliRunner().invoke(app, ["erase", "-y", "--url", url, "--", what])
    assert done.exit_code == 2, done.output
    assert ls(url, "victim") == ["victim:u"]


@pytest.mark.parametrize(
    "user", [*HOSTILE, "e-mail@example.com", "a b", "\ud800", "é", "日本語", "\U000e0041"]
)
def test_an_escaped_id_is_read_as_the_id_that_it_was(user: str):
    line = user_composite("acme", user)
    assert owner(line) == ("acme", user)
    assert line.isprintable()
    assert " " not in line
    assert escaped(unescaped(line)) == line


def test_ids_that_no_shell_interprets_are_shown_as_they_are():
    for user in ("e-mail@example.com", "é", "日本語", "a+b=c,d/e.f_g", "-x"):
        assert user_composite("acme", user) == f"acme:{user}"
