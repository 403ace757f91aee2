"""A log of items shared by operating system processes: nothing is lost, doubled or given to two."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable

import pytest

from stm_backends import MemoryKey, open_backend
from stm_backends.drivers import Record
from stm_backends.records import keys
from tests.support.places import EACH, Place, quick_on

PODS, ITEMS = 4, 60

POD = """
import asyncio, sys
from stm_backends import MemoryKey, open_backend

async def main(url, pod, items):
    async with open_backend(url) as backend:
        log = backend.item_log(MemoryKey("acme", "u1", "chat"), "openai-agents")
        for number in range(int(items)):
            await log.add([{"text": f"{pod}-{number}"}])
            if number % 3:
                print((await log.pop())["text"])

asyncio.run(main(*sys.argv[1:]))
"""


async def stored(url: str) -> tuple[list[str], Record | None]:
    """Return the texts of the items, and the record that holds them."""
    key = MemoryKey("acme", "u1", "chat")
    async with open_backend(url, create=True) as backend:
        found = await backend.item_log(key, "openai-agents").items()
        return [item["text"] for item in found], await backend.driver.load(keys.log_key(key, "openai-agents"))


@pytest.mark.parametrize("datastore", quick_on("redis", ["sqlite", *EACH]))
def test_processes_that_add_remove_and_fold_at_once_share_out_every_item(
    datastore: str, place_on: Callable[[str], Place]
) -> None:
    url = place_on(datastore).url
    assert asyncio.run(stored(url)) == ([], None)
    pods = [
        subprocess.Popen(
            [sys.executable, "-W", "error", "-c", POD, url, str(pod), str(ITEMS)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for pod in range(PODS)
    ]
    removed = [text for pod in pods for text in pod.communicate(timeout=120)[0].splitlines()]
    assert [pod.returncode for pod in pods] == [0] * PODS
    left, record = asyncio.run(stored(url))
    added = [f"{pod}-{number}" for pod in range(PODS) for number in range(ITEMS)]
    assert sorted(removed + left) == sorted(added)
    # Some of it was folded on the way.
    assert record is not None
    assert record.body is not None
    assert len(record.tail) < PODS * ITEMS
