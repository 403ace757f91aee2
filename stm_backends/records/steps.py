"""Work on large values in small steps, so that other tasks run in between.

A function that works in steps is a generator that yields where it may be interrupted, and returns its
result. With `run_in_slices`, the values that it reads may change at any `yield`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Generator
from typing import Final, TypeAlias, TypeVar

T = TypeVar("T")

Steps: TypeAlias = Generator[None, None, T]
"""Work that returns a `T` and yields between steps."""

STEP: Final = 64
"""Number of elements of a list in one step; a shorter list is processed without interruption."""

SLICE_S: Final = 0.004
"""Seconds that work may run before other tasks do."""


def run_now(steps: Steps[T]) -> T:
    """Run all steps without interruption and return the result."""
    while True:
        try:
            next(steps)
        except StopIteration as stop:
            return stop.value


async def run_in_slices(steps: Steps[T]) -> T:
    """Run all steps and return the result; other tasks run after every `SLICE_S` seconds."""
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
