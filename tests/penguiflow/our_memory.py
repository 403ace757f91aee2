"""A plugin for pytest that puts our classes in the place of PenguiFlow's short-term memory.

`nox -s full` runs PenguiFlow's own tests with it (`-p our_memory`): they ask of ours what they ask of theirs.
"""

from __future__ import annotations

import sys
from typing import Any

# The package imports whatever uses the memory, which keeps names of its own for the same classes.
import penguiflow.planner.memory as theirs
import pytest

import stm_backends as ours

REPLACED = [*theirs.__all__, "MemoryBudgetExceeded"]


def substitute() -> None:
    """Make every name of a class of PenguiFlow's memory stand for the class of ours."""
    modules = [module for name, module in sys.modules.items() if name.partition(".")[0] == "penguiflow"]
    for name in REPLACED:
        replaced: Any = getattr(theirs, name)
        for module in modules:
            if vars(module).get(name) is replaced:
                setattr(module, name, getattr(ours, name))


def pytest_report_header() -> str:
    """Say what is tested, so that a log shows it."""
    return f"penguiflow.planner.memory: {theirs.DefaultShortTermMemory.__module__}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Refuse to pass for a run in which their memory was tested, and not ours."""
    for item in items:
        memory = vars(getattr(item, "module", sys)).get("DefaultShortTermMemory")
        assert memory in (None, ours.DefaultShortTermMemory), f"{item.nodeid} has PenguiFlow's own memory"


substitute()
