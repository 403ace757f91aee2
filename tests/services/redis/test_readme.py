"""What the README of the Redis driver says is true."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re

import pytest

from stm_backends_redis import RedisSettings
from tests.services.redis.conftest import README

EXAMPLES = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.mark.parametrize("example", EXAMPLES)
async def test_an_example_runs(example, start, capsys):
    port = start().port
    program = example.replace("localhost:6379", f"localhost:{port}").replace(
        'host="localhost"', f'host="localhost", port={port}'
    )
    names: dict[str, object] = {}
    code = compile(program, "README.md", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    if inspect.iscoroutine(running := eval(code, names)):  # noqa: S307 -- our own page
        await running
    if "client" in names:
        await names["store"].save_memory_state("key", {"a": 1})
        assert await names["memory"].turns() == []
        await names["client"].aclose()
    else:
        assert "Hi, how can I help?" in capsys.readouterr().out


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
