"""The driver's README: its examples run, and store what they say."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from asyncio import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

import stm_backends_dynamo
from tests.support.dynamodb import fresh_table, with_table

README = (Path(stm_backends_dynamo.__file__).parent / "README.md").read_text("utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.fixture
def own_place(place):
    """A table that no other test knows, as the example sets its time to live up."""
    with with_table(replace(place, table=fresh_table())) as own:
        yield own


@pytest.mark.parametrize("program", EXAMPLES)
async def test_an_example_runs_as_printed(own_place, program, tmp_path):
    program, named = re.subn(r"\bstm_backends(?=[?\"])", own_place.table, program)
    assert named
    (tmp_path / "example.py").write_text(program.replace("eu-west-1", own_place.region), "utf-8")
    elsewhere = {"AWS_ENDPOINT_URL_DYNAMODB": own_place.endpoint_url} if own_place.endpoint_url else {}
    process = await subprocess.create_subprocess_exec(
        *(sys.executable, "example.py"),
        cwd=tmp_path,
        env={**os.environ, **own_place.environment, **elsewhere},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    async with asyncio.timeout(60):
        printed, errors = await process.communicate()
    assert (process.returncode, errors) == (0, b"")
    assert b"Hi, how can I help?" in printed, "the example stores nothing"
