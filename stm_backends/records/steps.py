"""Work on large values in small steps, so that other tasks have their turn in between.

A function that works in steps is a generator that yields where it may be interrupted, and returns its
result. What it looks at may change at every `yield` that `unhurried` makes something of.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Generator
from typing import Final, TypeAlias, TypeVar

T = TypeVar("T")

Steps: TypeAlias = Generator[None, None, T]
"""Work that returns a `T` and yields now and then."""

STEP: Final = 64
"""How many elements of a list are one step: a list of fewer is worked on without interruption."""

SLICE_S: Final = 0.004
"""How long a piece of work may go on before other tasks have their turn, in seconds."""


def at_once(steps: Steps[T]) -> T:
    """Do all of it now."""
    while True:
        try:
            next(steps)
        except StopIteration as stop:
            return stop.value


async def unhurried(steps: Steps[T]) -> T:
    """Do it, and let other tasks go on after every few milliseconds, and at the end if it took that long."""
    until, interrupted = time.perf_counter() + SLICE_S, False
    while True:
        try:
            next(steps)
        except StopIteration as stop:
            if interrupted:
                await asyncio.sleep(0)
            return stop.value
        if time.perf_counter() >= until:
            interrupted = True
            await asyncio.sleep(0)
            until = time.perf_counter() + SLICE_S
