"""The driver's README: its examples run, and its table lists the settings there are."""

from __future__ import annotations

import asyncio
import dataclasses
import re
import sys
from asyncio import subprocess
from pathlib import Path

import pytest

import stm_backends_mongo
from stm_backends_mongo import MongoSettings
from tests.services.mongo.test_faults import opened

README = (Path(stm_backends_mongo.__file__).parent / "README.md").read_text("utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.mark.parametrize("program", EXAMPLES)
async def test_an_example_runs_as_printed(place, program, tmp_path):
    async with opened(place.url, create=True):
        pass
    printed = "mongodb://localhost:27017/app"
    assert printed in program
    (tmp_path / "example.py").write_text(
        program.replace(printed, place.url).replace('database="app"', f'database="{place.database}"'), "utf-8"
    )
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


def test_the_table_lists_every_setting():
    listed = re.findall(r"^\| `(\w+)` \|", README, re.MULTILINE)
    assert set(listed) == {field.name for field in dataclasses.fields(MongoSettings)} - {
        "url",
        "client_options",
    }
