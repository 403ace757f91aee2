"""A plugin for pytest that puts our storage and our repository in the place of those of Strands' own tests.

`test_strands.py` runs Strands' tests with it (`-p our_strands`). What stands for a storage of files keeps
what is stored under the name of the folder.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from typing import Any

import pytest
import strands.storage
from tests.fixtures import mock_session_repository  # of Strands

from stm_backends import sync
from stm_backends.integrations.strands import StmSessionRepository, StmStorage

BACKEND = sync.open_backend(os.environ.get("STM_TEST_KIT_URL", "memory://"), create=True)
BACKEND.__enter__()
_users = itertools.count()


class InMemoryStorage(StmStorage):
    """One of ours that is empty at first."""

    def __init__(self) -> None:
        super().__init__(BACKEND.asynchronous, "memory", str(next(_users)), run=BACKEND.run)


class LocalFileStorage(StmStorage):
    """One of ours for each folder."""

    def __init__(self, base_dir: Any) -> None:
        super().__init__(BACKEND.asynchronous, "files", str(base_dir), run=BACKEND.run)


class MockedSessionRepository(StmSessionRepository):
    """One of ours that is empty at first."""

    def __init__(self) -> None:
        super().__init__(BACKEND.asynchronous, "sessions", str(next(_users)), run=BACKEND.run)


strands.storage.InMemoryStorage = InMemoryStorage  # type: ignore[misc]
strands.storage.LocalFileStorage = LocalFileStorage  # type: ignore[misc]
mock_session_repository.MockedSessionRepository = MockedSessionRepository


@pytest.fixture(scope="session", autouse=True)
def _closed_at_the_end() -> Iterator[None]:
    yield
    BACKEND.close()
