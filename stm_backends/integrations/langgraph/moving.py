"""Threads of another checkpointer, copied through what every checkpointer offers."""

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
    checkpoint with its parent, metadata and pending writes, the oldest first, and holds one at a time. What
    `target` has of these threads stays, so a copy that was interrupted can be repeated. Stop the graphs that
    use the threads meanwhile: a checkpoint that comes later is copied by the next call. Changes nothing in
    `source`, which may be one with blocking methods only. Raises `ConfigurationError` if it cannot list all
    threads, and what it raises.
    """
    if thread_ids is None:
        try:
            threads = dict.fromkeys(_thread_of(one) for one in await _listed(source, None))
        except ValueError as error:
            raise ConfigurationError("the source cannot list its threads: name those to be copied") from error
    else:
        threads = dict.fromkeys(thread_ids)
    count = 0
    for thread in threads:
        named: RunnableConfig = {"configurable": {"thread_id": thread}}
        # How many writes of each task each checkpoint has.
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
    """Store one checkpoint unless it is there; returns whether it was not.

    `stored` has the channels of those before it, and `written` how many writes of each task are there.
    """
    checkpoint = found.checkpoint.copy()
    name, checkpoint_id = _name_of(found.config)
    # Versions are compared, and ours are texts.
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
        # Also of one that is there: they may have come when it was the latest. The signs of an interruption
        # are last, because the places of all others are counted. Paths are not listed; these keep the order.
        if written is None or len(writes) > written.get(task, 0):
            signs_last = sorted(writes, key=lambda one: one[0] in WRITES_IDX_MAP)
            await target.aput_writes(at, signs_last, task, f"{nth:06}")
    if written is not None:
        return 0
    # Last, so that a repeated copy finds it only with its writes.
    with copying():
        await target.aput({"configurable": place}, checkpoint, found.metadata, {**new})
    return 1


async def _listed(saver: BaseCheckpointSaver[Any], config: RunnableConfig | None) -> list[RunnableConfig]:
    """Return how to read each checkpoint, the latest first."""
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
    """Return a version as a text; the numbers of other checkpointers count upwards as the texts do."""
    return version if isinstance(version, str) else f"{int(version):010}.{0:010x}"
