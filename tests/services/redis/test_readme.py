"""What the README of the Redis driver says is true."""

from __future__ import annotations

import asyncio
import dataclasses
import re
import sys
from asyncio import subprocess

import pytest

from stm_backends_redis import RedisSettings
from tests.services.redis.conftest import README

EXAMPLES = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.mark.parametrize("program", EXAMPLES)
async def test_an_example_runs_as_printed(start, program, tmp_path):
    port = start().port
    program = program.replace("localhost:6379", f"localhost:{port}")
    program = program.replace('host="localhost"', f'host="localhost", port={port}')
    (tmp_path / "example.py").write_text(program, "utf-8")
    process = await subprocess.create_subprocess_exec(
        *(sys.executable, "-W", "error", "example.py"),
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    async with asyncio.timeout(60):
        printed, errors = await process.communicate()
    assert (process.returncode, errors) == (0, b"")
    assert b"Hi, how can I help?" in printed, "the example stores nothing"


def test_the_settings_are_those_that_there_are():
    table = README[README.index("| setting |") : README.index("What is guaranteed")]
    named = set(re.findall(r"`(\w+)`", table)) - {"client"}
    assert named >= {field.name for field in dataclasses.fields(RedisSettings)}
    rows = dict(re.findall(r"^\| `(\w+)` \| (\S.*?) \|", table, re.MULTILINE))
    for name, shown in rows.items():
        default = getattr(RedisSettings(), name)
        if name.endswith("_bytes"):
            assert shown == f"{default // 2**20} MiB"
        else:
            assert shown.strip("`") == str(default).lower().removesuffix(".0")
