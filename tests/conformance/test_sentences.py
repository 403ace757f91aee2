"""A check that fails says in a sentence what was expected."""

from __future__ import annotations

import ast
import asyncio
from pathlib import Path

import pytest

import stm_backends.testing
from stm_backends.errors import Corrupt, Unavailable
from stm_backends.testing.workbench.expectations import must_be, must_end, must_raise
from stm_backends.testing.workbench.memories import until

SUITE = Path(stm_backends.testing.__file__).parent
CHECKING = sorted(
    path
    for pattern in (
        "*_checks/*.py",
        "*_contract.py",
        "numbered.py",
        "pods.py",
        "state_machine.py",
        "stores.py",
    )
    for path in SUITE.glob(pattern)
)


@pytest.mark.parametrize("path", CHECKING, ids=lambda path: path.relative_to(SUITE).as_posix())
def test_no_assertion_of_the_suite_is_without_a_sentence(path):
    asserted = [node for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.Assert)]
    assert [node.lineno for node in asserted if node.msg is None] == []


def test_the_files_with_assertions_were_found():
    assert {"deleting.py", "health.py", "pods_contract.py", "store_contract.py"} <= {p.name for p in CHECKING}


def test_what_must_be_says_what_and_why():
    must_be(2, 2, "it is")
    with pytest.raises(AssertionError, match=r"^expected 3, because there are three"):
        must_be(2, 3, "there are three")


@pytest.mark.parametrize(("found", "expected"), [(1, True), (0, False), (0, None), ("", None)])
def test_what_only_counts_as_true_false_or_none_is_not_taken_for_it(found, expected):
    with pytest.raises(AssertionError, match="because it is so"):
        must_be(found, expected, "it is so")


def test_what_must_raise_says_which_error_and_lets_others_through():
    with must_raise(Corrupt, "it is damaged") as caught:
        raise Corrupt("damaged")
    assert str(caught.value) == "damaged"
    with (
        pytest.raises(AssertionError, match=r"^expected Corrupt or Unavailable, because it is damaged"),
        must_raise((Corrupt, Unavailable), "it is damaged"),
    ):
        pass
    with pytest.raises(Unavailable), must_raise(Corrupt, "it is damaged"):
        raise Unavailable("another matter")


async def test_what_must_end_says_when_and_leaves_a_timeout_within_it_alone():
    with pytest.raises(AssertionError, match=r"^expected an end within 0\.01 s, because it is quick"):
        async with must_end(0.01, "it is quick"):
            await asyncio.sleep(60)
    with pytest.raises(TimeoutError, match="another matter"):
        async with must_end(60, "it is quick"):
            raise TimeoutError("another matter")


async def test_what_is_waited_for_in_vain_is_said():
    with pytest.raises(AssertionError, match=r"^expected within 0\.01 s: it is done$"):
        await until(lambda: False, "it is done", within=0.01)
