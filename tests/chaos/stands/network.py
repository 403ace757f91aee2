"""What happens to the network between pods and servers, as faults that every stand has."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

from stm_backends.testing.faults import Proxy
from tests.chaos.stands import Fault

_Done = Callable[[Proxy, dict[str, Any], random.Random], AbstractAsyncContextManager[Any]]


def network_faults(proxies: Sequence[Proxy]) -> Mapping[str, Fault]:
    """Return the faults of a network with a proxy before each server.

    Each befalls one of the servers, or all of them at once.
    """
    return {
        "network-cut": _on_some(proxies, lambda proxy, *_: proxy.cut()),
        "network-stalled": _on_some(proxies, lambda proxy, *_: proxy.stalled()),
        "network-requests-stalled": _on_some(proxies, lambda proxy, *_: proxy.stalled("requests")),
        "network-answers-stalled": _on_some(proxies, lambda proxy, *_: proxy.stalled("answers")),
        "network-slow": _on_some(proxies, _slow),
        "network-half-open": _on_some(proxies, lambda proxy, *_: proxy.half_open()),
        "network-answers-lost": _on_some(proxies, _losing),
    }


def _on_some(proxies: Sequence[Proxy], done: _Done) -> Fault:
    @contextlib.asynccontextmanager
    async def fault(chance: random.Random, seconds: float) -> AsyncIterator[dict[str, Any]]:
        hit = list(proxies) if chance.random() < 0.5 else [chance.choice(proxies)]
        figures: dict[str, Any] = {"servers": [proxies.index(proxy) for proxy in hit]}
        async with contextlib.AsyncExitStack() as stack:
            for proxy in hit:
                await stack.enter_async_context(done(proxy, figures, chance))
            yield figures

    return fault


def _slow(proxy: Proxy, figures: dict[str, Any], chance: random.Random) -> AbstractAsyncContextManager[None]:
    figures["delay_s"] = round(chance.uniform(0.05, 0.5), 3)
    return proxy.slow(figures["delay_s"], chance.choice((None, "requests", "answers")))


@contextlib.asynccontextmanager
async def _losing(proxy: Proxy, figures: dict[str, Any], chance: random.Random) -> AsyncIterator[None]:
    """Lose one answer after another, with some that pass in between."""
    figures.setdefault("lost", 0)

    async def go_on() -> None:
        nonlocal loss
        while True:
            await asyncio.sleep(chance.uniform(0.02, 0.3))
            if loss.is_over:
                figures["lost"] += loss.happened
                loss = proxy.lose_answer(skip=chance.randrange(3))

    loss = proxy.lose_answer()
    going_on = asyncio.ensure_future(go_on())
    try:
        yield
    finally:
        going_on.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await going_on
        loss.cancel()
        figures["lost"] += loss.happened
