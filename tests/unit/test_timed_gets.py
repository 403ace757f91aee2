"""No module takes from a `SimpleQueue` with a time limit, which CPython before 3.13 may not keep."""

from __future__ import annotations

import ast
from pathlib import Path

import stm_backends

ROOT = Path(stm_backends.__file__).parent.parent


def timed_gets(source: str) -> list[int]:
    """Return the lines on which something is taken with a time limit, in a module with such a queue."""
    if "SimpleQueue" not in source:
        return []
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "get"
        and (len(node.args) > 1 or any(word.arg in ("timeout", None) for word in node.keywords))
    ]


def test_no_simple_queue_is_asked_with_a_time_limit() -> None:
    modules = [path for package in ROOT.glob("stm_backends*") for path in package.rglob("*.py")]
    assert modules
    assert {path.name: found for path in modules if (found := timed_gets(path.read_text("utf-8")))} == {}


def test_a_time_limit_is_found_in_each_way_to_write_it() -> None:
    source = "jobs = SimpleQueue()\njobs.get(True, 1.0)\njobs.get(timeout=t)\njobs.get()\njobs.get(False)"
    assert timed_gets(source) == [2, 3]
