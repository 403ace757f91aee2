"""A backend under the page, and conversations that have forgotten something."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from stm_backends import Backend, ConversationTurn, MemoryKey
from stm_backends.drivers.contract import KEEP, Driver, new_version
from stm_backends.inspect.app import inspector
from stm_backends.inspect.read_only import ReadOnlyDriver
from stm_backends.records.keys import memory_key
from stm_backends.testing.workbench.summarizers import LedgerSummarizer
from stm_backends.types import ShortTermMemoryConfig
from tests.support import asgi
from tests.support.asgi import Answer

TOKEN = "a-token"  # noqa: S105 -- of tests
HOST = "127.0.0.1:1"


class Asked:
    """The API of the page on a backend that writes nothing."""

    def __init__(self, driver: Driver, config: ShortTermMemoryConfig | None = None, **options: Any) -> None:
        self.backend = Backend(ReadOnlyDriver(driver), close_timeout_s=0.2, **options)
        self.app = inspector(
            self.backend, token=TOKEN, hosts=frozenset({HOST}), datastore="memory://", config=config
        )

    async def answer(self, name: str, **query: Any) -> Answer:
        """Return the answer to a request that is allowed."""
        return await asgi.ask(self.app, f"/{TOKEN}/api/{name}", query, headers=[("Host", HOST)])

    async def __call__(self, name: str, **query: Any) -> Any:
        """Return the JSON of an answer without an error."""
        answer = await self.answer(name, **query)
        assert answer.status == 200, answer.body
        return answer.json()


async def say(
    backend: Backend,
    key: MemoryKey,
    count: int,
    config: ShortTermMemoryConfig | None = None,
    *,
    at: float = 1.7e9,
    summarizer: Any = None,
) -> None:
    """Add turns with the numbers from 0 on, and wait until they are summarized."""
    if summarizer is None and config is not None and config.strategy == "rolling_summary":
        summarizer = LedgerSummarizer()
    memory = backend.memory(key, config, summarizer=summarizer)
    for number in range(count):
        await memory.add_turn(ConversationTurn(f"Wish {number}", "Noted.", ts=at + number))
    await memory.flush()


async def alter(backend: Backend, key: MemoryKey, **changes: Any) -> None:
    """Change fields of the body of a conversation, as a process would that they happened to."""
    where = memory_key(key)
    record = await backend.driver.load(where)
    assert record is not None
    body = replace(backend.codec.open_body(record.body), **changes)
    data = backend.codec.seal_body(body)
    assert await backend.driver.replace(where, data, version=new_version(), expect=record.version, ttl=KEEP)
