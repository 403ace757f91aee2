"""What stands in the place of ADK's own list of session services: ours.

`test_google_adk.py` runs ADK's tests with it, as a plugin for pytest (`-p our_google_adk`) and as the module
that they import their fixture from. Only those are run that take a service.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from typing import Any

import pytest
from google.adk.sessions import Session

from stm_backends import Backend, open_backend
from stm_backends.integrations.google_adk import StmSessionService

BACKENDS = ()
"""The services that are known to differ, of which one of their tests reads."""


class Noting(StmSessionService):
    """Notes the apps that it has sessions of."""

    def __init__(self, backend: Backend) -> None:
        super().__init__(backend)
        self.apps: set[str] = set()

    async def create_session(self, *, app_name: str, **given: Any) -> Session:
        self.apps.add(app_name)
        return await super().create_session(app_name=app_name, **given)


@pytest.fixture
async def session_service() -> AsyncIterator[StmSessionService]:
    """A service without sessions: all tests use the same names."""
    async with open_backend(os.environ.get("STM_TEST_KIT_URL", "memory://"), create=True) as backend:
        service = Noting(backend)
        yield service
        await service.flush()
        for app in service.apps:
            await backend.sessions.erase_tenant(app)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is about one of ADK's own services alone."""
    ours = [one for one in items if "session_service" in getattr(one, "fixturenames", ())]
    config.hook.pytest_deselected(items=[one for one in items if one not in ours])
    items[:] = ours
