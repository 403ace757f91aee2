"""What the package's README says is true: its examples run, and its table names every setting."""

import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

import stm_backends_postgres
from stm_backends_postgres import PostgresSettings
from tests.services.postgres.support import drop, fresh_schema, run

README = Path(stm_backends_postgres.__file__).with_name("README.md").read_text("utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.fixture
def placed(url):
    """Returns an example, in a schema of the tests on their database."""
    schema = fresh_schema()

    def place(program):
        placed, changes = re.subn(r"postgresql://app@localhost:5432/agents", url, program)
        assert changes == 1
        return re.sub(r"schema=(\"?)memory\b", rf"schema=\1{schema}", placed)

    yield place
    run(drop(url, schema))


def test_the_examples_run_as_printed_one_on_the_tables_of_the_other(placed, tmp_path):
    assert len(EXAMPLES) == 2
    for program in EXAMPLES:
        path = tmp_path / "example.py"
        path.write_text(placed(program), "utf-8")
        done = subprocess.run(
            [sys.executable, "-W", "error", path], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr


def test_the_table_names_every_setting_and_its_default():
    table = README.partition("## Settings")[2].partition("\n## ")[0]
    for field in fields(PostgresSettings):
        if field.name != "dsn":
            assert f"`{field.name}`" in table
    for name in ("pool_size", "schema", "deadline_s"):
        default = str(getattr(PostgresSettings(), name)).removesuffix(".0")
        assert re.search(rf"\| `{name}` \| `?{default}`? \|", table), name
