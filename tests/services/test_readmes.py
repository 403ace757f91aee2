"""The README of each driver is true: its examples run, and its tables show every setting and its default."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib
import re
import sys
from asyncio import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stm_backends_dynamo import DynamoSettings
from stm_backends_mongo import MongoSettings
from stm_backends_postgres import PostgresSettings
from tests.services.test_alike import settings_of
from tests.support.places import EACH, Place, without_query

pytestmark = pytest.mark.parametrize("datastore", EACH)

URLS = {"dsn", "url", "client_options"}
"""Fields that hold a whole URL or what follows it, for which a table has no row."""

MIB = 1024 * 1024

STRICT = dict.fromkeys(EACH, ("-W", "error")) | {
    # The client libraries of AWS use what Python is about to remove.
    "dynamo": (),
    # PyMongo does not close the socket of a monitor that is connecting when the client is closed.
    "mongo": ("-W", "error", "-W", "ignore::ResourceWarning"),
}
"""Options of Python by which an example raises what its libraries warn of."""


def readme(datastore: str) -> str:
    package = importlib.import_module(f"stm_backends_{datastore}")
    return Path(package.__file__).with_name("README.md").read_text("utf-8")


def substitutes(datastore: str, place: Place) -> dict[str, str]:
    """Return what the examples say, and what replaces it on the server of the tests."""
    if datastore == "redis":
        client = f'Redis.from_url("{without_query(place.url)}")'
        return {"redis://localhost:6379/0": place.url, 'Redis(host="localhost")': client}
    if datastore == "postgres":
        postgres = PostgresSettings.from_url(place.url)
        server = "postgresql://app@localhost:5432/agents"
        return {
            f"{server}?schema=memory": place.url,
            server: postgres.dsn,
            'schema="memory"': f'schema="{postgres.schema}"',
        }
    if datastore == "mongo":
        database = MongoSettings.from_url(place.url).database
        return {"mongodb://localhost:27017/app": place.url, '"app"': f'"{database}"'}
    dynamo = DynamoSettings.from_url(place.url)
    return {
        "dynamodb://stm_backends?region=eu-west-1": place.url,
        '"stm_backends"': f'"{dynamo.table}"',
        "eu-west-1": str(dynamo.region),
    }


async def test_the_examples_run_as_printed_one_after_the_other(
    datastore: str,
    place_on: Callable[[str], Place],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place = place_on(datastore)
    if datastore == "dynamo" and (endpoint := DynamoSettings.from_url(place.url).endpoint_url):
        monkeypatch.setenv("AWS_ENDPOINT_URL_DYNAMODB", endpoint)
    blocks = re.findall(r"```python\n(.*?)```", readme(datastore), re.DOTALL)
    examples = [block for block in blocks if "asyncio.run" in block]
    assert len(examples) == 2
    for program in examples:
        placed = program
        for printed, there in substitutes(datastore, place).items():
            placed = placed.replace(printed, there)
        assert placed != program
        (tmp_path / "example.py").write_text(placed, "utf-8")
        process = await subprocess.create_subprocess_exec(
            *(sys.executable, *STRICT[datastore], "example.py"),
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        async with asyncio.timeout(60):
            shown, errors = await process.communicate()
        assert (process.returncode, errors) == (0, b"")
        for answer in re.findall(r'ConversationTurn\(".*?", "(.*?)"\)', program):
            assert answer.encode() in shown, "the example stores nothing"


def written(name: str, default: Any) -> str:
    """Return a default as the tables show it."""
    if name.endswith("_bytes"):
        return f"{default:,}" if default % MIB else f"{default // MIB} MiB"
    return str(default).lower().removesuffix(".0")


def test_the_tables_show_every_setting_and_its_default(datastore: str) -> None:
    text = readme(datastore)
    rows = dict(re.findall(r"^\| `(\w+)` \| (\S.*?) \|", text, re.MULTILINE))
    for field in dataclasses.fields(settings_of(datastore)):
        if field.name not in URLS:
            assert f"`{field.name}`" in text
            if field.name in rows and field.default is not None:
                assert written(field.name, field.default) in rows[field.name]
