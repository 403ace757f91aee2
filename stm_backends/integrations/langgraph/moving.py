"""Copying threads from another checkpointer, using only methods that every checkpointer has."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, cast

from langgraph.checkpoint.base import WRITES_IDX_MAP, BaseCheckpointSaver, CheckpointTuple

from stm_backends.errors import ConfigurationError
from stm_backends.integrations.langgraph.runs import copying
from stm_backends.integrations.langgraph.saver import StmSaver

if TYPE_CHECKING:
    from langchain_core.runnables import RunnableConfig


async def copy_threads(
    source: BaseCheckpointSaver[Any], target: StmSaver, thread_ids: Iterable[str] | None = None
) -> int:
    """Copy threads from another checkpointer of LangGraph, and return how many checkpoints were copied.

    Without ids, copies all threads, which `source` lists by `alist(None)` or `list(None)`. Copies each
    checkpoint with its parent, metadata and pending writes, oldest first, holding one at a time. Everything
    that `target` already has of these threads stays, so an interrupted copy can be repeated. Stop the graphs
    that use the threads meanwhile: a checkpoint added later is copied by the next call. `source` is not
    changed, and may have only blocking methods. Raises `ConfigurationError` if it cannot list all threads,
    and any error that `source` raises.
    """
    if thread_ids is None:
        try:
            threads = dict.fromkeys(_thread_of(one) for one in await _listed(source, None))
        except ValueError as error:
            raise ConfigurationError("the source cannot list threads: name the threads to copy") from error
    else:
        threads = dict.fromkeys(thread_ids)
    count = 0
    for thread in threads:
        named: RunnableConfig = {"configurable": {"thread_id": thread}}
        # The number of writes of each task, for each checkpoint.
        there = {
            _name_of(one.config): Counter(task for task, _, _ in one.pending_writes or ())
            async for one in target.alist(named)
        }
        stored: set[tuple[str, str, object]] = set()
        for config in reversed(await _listed(source, named)):
            found = await _read(source, config)
            if found is not None:
                count += await _copied(found, thread, target, stored, there.get(_name_of(config)))
    return count


async def _copied(
    found: CheckpointTuple,
    thread: str,
    target: StmSaver,
    stored: set[tuple[str, str, object]],
    written: Mapping[str, int] | None,
) -> int:
    """Store one checkpoint unless it exists, and return whether it was stored.

    `stored` has the channels of earlier checkpoints, and `written` the number of stored writes of each task.
    """
    checkpoint = found.checkpoint.copy()
    name, checkpoint_id = _name_of(found.config)
    # Versions are compared, and ours are strings.
    versions = {channel: _text(version) for channel, version in checkpoint["channel_versions"].items()}
    checkpoint["channel_versions"] = {**versions}
    checkpoint["versions_seen"] = {
        node: {channel: _text(version) for channel, version in seen.items()}
        for node, seen in checkpoint["versions_seen"].items()
    }
    new = {channel: one for channel, one in versions.items() if (name, channel, one) not in stored}
    stored |= {(name, channel, one) for channel, one in new.items()}
    place: dict[str, Any] = {"thread_id": thread, "checkpoint_ns": name}
    if found.parent_config is not None:
        place["checkpoint_id"] = found.parent_config.get("configurable", {}).get("checkpoint_id")
    tasks: dict[str, list[tuple[str, Any]]] = {}
    for task, channel, value in found.pending_writes or ():
        tasks.setdefault(task, []).append((channel, value))
    at: RunnableConfig = {"configurable": {**place, "checkpoint_id": checkpoint_id}}
    for nth, (task, writes) in enumerate(tasks.items()):
        # Also for an existing checkpoint: writes may have come while it was the latest. Interruptions come
        # last, because all other writes are counted by place. Paths are not listed; these keep the order.
        if written is None or len(writes) > written.get(task, 0):
            signs_last = sorted(writes, key=lambda one: one[0] in WRITES_IDX_MAP)
            await target.aput_writes(at, signs_last, task, f"{nth:06}")
    if written is not None:
        return 0
    # Stored last, so that a repeated copy finds the checkpoint only once its writes are stored.
    with copying():
        await target.aput({"configurable": place}, checkpoint, found.metadata, {**new})
    return 1


async def _listed(saver: BaseCheckpointSaver[Any], config: RunnableConfig | None) -> list[RunnableConfig]:
    """Return the configuration to read each checkpoint with, latest first."""
    try:
        return [one.config async for one in saver.alist(config)]
    except NotImplementedError:
        return await asyncio.to_thread(lambda: [one.config for one in saver.list(config)])


async def _read(saver: BaseCheckpointSaver[Any], config: RunnableConfig) -> CheckpointTuple | None:
    try:
        return await saver.aget_tuple(config)
    except NotImplementedError:
        return await asyncio.to_thread(saver.get_tuple, config)


def _thread_of(config: RunnableConfig) -> str:
    return str(_given(config)["thread_id"])


def _name_of(config: RunnableConfig) -> tuple[str, str]:
    """Return the namespace and the id of a checkpoint."""
    given = _given(config)
    return str(given.get("checkpoint_ns") or ""), str(given["checkpoint_id"])


def _given(config: RunnableConfig) -> Mapping[str, Any]:
    return cast("Mapping[str, Any]", config.get("configurable", {}))


def _text(version: str | float) -> str:
    """Return a version as a string; the numbers of other checkpointers sort like these strings."""
    return version if isinstance(version, str) else f"{int(version):010}.{0:010x}"
