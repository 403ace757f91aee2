"""LangGraph's kit for authors of checkpointers, on each datastore, and with what is read cut short often."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import pytest
from langgraph.checkpoint.conformance import checkpointer_test, validate

from stm_backends import open_backend
from stm_backends.integrations.langgraph import StmSaver
from stm_backends.integrations.langgraph.threads import View
from tests.support.places import EACH, Place, quick_on

TESTS = 81
"""How many the release of the kit has that is pinned."""


@pytest.mark.parametrize("frame_after", [None, 1, 2])
@pytest.mark.parametrize("datastore", ["memory", *quick_on("redis", ["sqlite", *EACH])])
async def test_every_test_of_the_kit_passes(
    datastore: str,
    frame_after: int | None,
    place_on: Callable[[str], Place],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if frame_after is not None:
        monkeypatch.setattr(View, "is_frame_due", property(lambda view: view.count > frame_after))
    url = "memory://" if datastore == "memory" else place_on(datastore).url
    async with open_backend(url, create=True) as backend:

        @checkpointer_test(name="StmSaver")
        async def ours() -> AsyncIterator[StmSaver]:
            yield StmSaver(backend)

        report = await validate(ours)
    failures = {name: found.failures for name, found in report.results.items() if found.failures}
    assert not failures
    assert sum(found.tests_passed for found in report.results.values()) == TESTS
    assert all(found.detected for found in report.results.values())
