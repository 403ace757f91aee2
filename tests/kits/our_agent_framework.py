"""A plugin for pytest that puts our storage of checkpoints in the place of those of the Agent Framework.

`test_agent_framework.py` runs the framework's tests with it (`-p our_agent_framework`). What stands for a
storage of files keeps what is stored under the name of the folder.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import AsyncIterator
from typing import Any

import agent_framework
import pytest

from stm_backends import Backend, open_backend
from stm_backends.integrations.agent_framework import StmCheckpointStorage

_backend: Backend
_users = itertools.count()

OF_THEIR_TESTS = [
    f"tests.workflow.test_checkpoint:{name}"
    for name in ("_TestToolApprovalRequest", "_TestExecutorState", "_TestApprovalRequest", "_TestCustomData")
]
"""The types in the checkpoints of their tests: what is in memory admits any."""


@pytest.fixture(autouse=True)
async def _open() -> AsyncIterator[None]:
    """Open a backend on the loop of each test."""
    global _backend
    async with open_backend(os.environ.get("STM_TEST_KIT_URL", "memory://"), create=True) as _backend:
        yield


class InMemoryCheckpointStorage(StmCheckpointStorage):
    """One of ours that is empty at first."""

    def __init__(self) -> None:
        super().__init__(
            _backend, f"memory{id(self)}", str(next(_users)), allowed_checkpoint_types=OF_THEIR_TESTS
        )


class FileCheckpointStorage(StmCheckpointStorage):
    """One of ours for each folder."""

    def __init__(self, storage_path: Any, *, allowed_checkpoint_types: list[str] | None = None) -> None:
        super().__init__(
            _backend, "files", str(storage_path), allowed_checkpoint_types=allowed_checkpoint_types
        )


agent_framework.InMemoryCheckpointStorage = InMemoryCheckpointStorage  # type: ignore[misc]
agent_framework.FileCheckpointStorage = FileCheckpointStorage  # type: ignore[misc]
