"""Typed ways to open a backend: an editor completes the options, and a type checker refuses a wrong one.

`open_backend` takes the options of any driver, including those of other packages, so a type checker cannot
judge them. Each driver has a function that calls `open_backend` with typed options: `open_memory` and
`open_sqlite` here, `open_redis`, `open_postgres`, `open_mongo` and `open_dynamo` in their packages. A driver
of your own derives its options from `BackendOptions` in the same way.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Literal, TypedDict, Unpack

from stm_backends.backend import Backend, open_backend
from stm_backends.records.codec import Transform
from stm_backends.records.limits import Limits
from stm_backends.sealing.keys import Sealing
from stm_backends.telemetry.observer import Observer
from stm_backends.types import MemoryIsolation, Summaries


class BackendOptions(TypedDict, total=False):
    """The options of `open_backend` that every backend takes."""

    create: bool
    transforms: Sequence[Transform]
    sealing: Sealing | None
    isolation: MemoryIsolation | None
    limits: Limits | None
    max_summaries: int
    summaries: Summaries
    close_timeout_s: float
    observer: Observer


class MemoryOptions(BackendOptions, total=False):
    """The options of `open_memory`."""

    name: str | None
    clock: Callable[[], float]
    deadline_s: float
    max_entry_bytes: int
    max_record_bytes: int


class SqliteOptions(BackendOptions, total=False):
    """The options of `open_sqlite`."""

    clock: Callable[[], float]
    deadline_s: float
    max_entry_bytes: int
    path: str | os.PathLike[str]
    synchronous: Literal["normal", "full"]
    max_record_bytes: int
    must_exist: bool
    private: bool


def open_memory(url: str | None = None, **options: Unpack[MemoryOptions]) -> Backend:
    """Return a backend in the memory of this process, as `open_backend("memory", url=url, ...)` does."""
    return open_backend("memory", url=url, **options)


def open_sqlite(url: str | None = None, **options: Unpack[SqliteOptions]) -> Backend:
    """Return a backend in a file, as `open_backend("sqlite", url=url, ...)` does.

    The file is named by the URL or by `path`.
    """
    return open_backend("sqlite", url=url, **options)
