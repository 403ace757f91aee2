"""`StmSaver`: LangGraph's checkpoints on any backend."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING, Any, TypeVar, cast

from langgraph.checkpoint.base import (
    WRITES_IDX_MAP,
    BaseCheckpointSaver,
    ChannelVersions,
    Checkpoint,
    CheckpointMetadata,
    CheckpointTuple,
    DeltaChannelHistory,
    get_checkpoint_id,
    get_checkpoint_metadata,
)
from langgraph.checkpoint.serde.base import SerializerProtocol

from stm_backends.backend import Backend
from stm_backends.catalogue.card import beginning_of
from stm_backends.drivers.checks import require_backend, require_items, require_seconds
from stm_backends.errors import ConfigurationError, InvalidKey
from stm_backends.integrations.blocking import Waits, refuse
from stm_backends.integrations.langgraph.items import EMPTY, Blob, NewPut, NewWrites, Put
from stm_backends.integrations.langgraph.runs import Runs
from stm_backends.integrations.langgraph.stored import Threads, thread_key
from stm_backends.integrations.langgraph.threads import View
from stm_backends.integrations.langgraph.turns import Turn, Turns
from stm_backends.records.identity import DEFAULT_TENANT
from stm_backends.types import MemoryKey

if TYPE_CHECKING:
    from langchain_core.runnables import RunnableConfig

_T = TypeVar("_T")


class StmSaver(BaseCheckpointSaver[str]):
    """A checkpointer whose threads are shared by every process that uses the same backend.

    ```
    graph = builder.compile(checkpointer=StmSaver(backend))
    await graph.ainvoke(question, {"configurable": {"thread_id": "chat_001"}})
    ```

    A thread is a log of the conversation that `key_of(thread_id)` names: a `MemoryKey` with its tenant, user
    and session, different for each thread. So erasing a user erases the user's threads. By default, all
    threads belong to the tenant `default` and the user `anonymous`, and are erased one by one. Calls that
    name no thread, such as `alist(None)`, search the threads of `tenants`, which has no default if you
    pass `key_of`.

    A checkpoint stores only its changes, in two round trips. If two runs continue the same checkpoint at
    once, one gets `EditConflict`, and nothing of its step is stored. A run that is asked to begin with an
    older checkpoint, by its id, makes a branch. The blocking methods need `run`, which runs a coroutine on
    the backend's loop, and must be called from another thread than that loop's. Without `run` they raise
    `ConfigurationError`. All methods raise `StorageError`; an outage is never an empty thread. The
    constructor reads and writes nothing.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        key_of: Callable[[str], MemoryKey] | None = None,
        tenants: Sequence[str] | None = None,
        serde: SerializerProtocol | None = None,
        run: Waits | None = None,
    ) -> None:
        super().__init__(serde=serde)
        require_backend(backend)
        if tenants is not None:
            require_items("tenants", tenants)
        if key_of is not None and not callable(key_of):  # pyright: ignore[reportUnnecessaryComparison] -- callers are not all typed
            raise ConfigurationError("key_of must be a function that returns the MemoryKey of a thread's id")
        mine = [DEFAULT_TENANT] if key_of is None and tenants is None else tenants
        self._threads = Threads(backend, key_of or thread_key, mine, self._versions_of)
        self._runs = Runs()
        self._turns = Turns(backend)
        self._run = run

    def turn(self, thread_id: str, *, wait_s: float | None = None) -> Turn:
        """Return a context that lets one process at a time run a thread, if all processes use it.

        Write `async with saver.turn("chat_001"): await graph.ainvoke(...)`, or `with` and `graph.invoke(...)`
        if the saver has `run`. Waits at most `wait_s` seconds, or indefinitely by default, and then raises
        `EditConflict` before anything was done. The claim is renewed while the context lasts; the claim of a
        process that dies ends after 15 seconds. The context is not reentrant.
        """
        if wait_s is not None:
            require_seconds("wait_s", wait_s, zero=True)
        return Turn(self._turns.turn(self._threads.key(str(thread_id)), wait_s), self._run)

    # Reading

    async def aget_tuple(self, config: RunnableConfig) -> CheckpointTuple | None:
        """Return a checkpoint of a thread, or the latest one; `None` if it does not exist.

        Reading the latest one takes one round trip, which reads no checkpoint if this saver knows it, and
        another if other processes have added to the thread. Reading an older one takes a few.
        """
        found = await self._found(config)
        self._note(config, found)
        return found

    async def _found(self, config: RunnableConfig) -> CheckpointTuple | None:
        thread, name = _place(config)
        asked = get_checkpoint_id(config)
        async with aclosing(self._threads.views(thread)) as views:
            async for view in views:
                if not asked and not view.knows_latest(name):
                    continue
                wanted = asked or view.latest(name)
                if not asked and not name:
                    self._runs.is_latest(thread, wanted)
                if wanted is None:
                    return None
                if wanted in view.space(name).puts:
                    return self._tuple(view, name, wanted, config if asked else None)
        return None

    async def alist(
        self,
        config: RunnableConfig | None,
        *,
        filter: dict[str, Any] | None = None,  # noqa: A002 -- LangGraph's name
        before: RunnableConfig | None = None,
        limit: int | None = None,
    ) -> AsyncIterator[CheckpointTuple]:
        """Yield checkpoints, latest first; without a thread, those of each thread in turn.

        With a `limit`, reads only the newest items of a thread; otherwise all items, one thread at a time.
        """
        left = limit
        thread = None if not config else config.get("configurable", {}).get("thread_id")
        threads = self._threads.ids() if thread is None else _just(str(thread))
        async for one in threads:
            if left is not None and left <= 0:
                return
            async for found in self._listed(one, config or {}, filter or {}, before, left):
                yield found
                left = None if left is None else left - 1

    async def _listed(
        self,
        thread: str,
        config: RunnableConfig,
        wanted: Mapping[str, Any],
        before: RunnableConfig | None,
        limit: int | None,
    ) -> AsyncIterator[CheckpointTuple]:
        given = config.get("configurable", {})
        only, asked = given.get("checkpoint_ns"), given.get("checkpoint_id")
        until = get_checkpoint_id(before) if before else None
        matching: list[tuple[str, str]] = []
        view: View | None = None
        async with aclosing(self._threads.views(thread)) as views:
            async for view in views:
                matching = [
                    (one, name)
                    for name, space in view.spaces.items()
                    if only in (None, name)
                    for one, put in space.puts.items()
                    if (not asked or one == asked)
                    and (not until or one < until)
                    and (not wanted or self._has(put, wanted))
                ]
                # A checkpoint newer than everything before a frame is certainly the newest.
                if limit is not None and sum(one >= view.top for one, _ in matching) >= limit:
                    break
        for one, name in sorted(matching, reverse=True)[:limit]:
            if view is not None:
                yield self._tuple(view, name, one, thread=thread)

    def _has(self, put: Put, wanted: Mapping[str, Any]) -> bool:
        metadata: Mapping[str, Any] = self.serde.loads_typed(put.metadata)
        return all(metadata.get(name) == value for name, value in wanted.items())

    async def aget_delta_channel_history(
        self, *, config: RunnableConfig, channels: Sequence[str]
    ) -> Mapping[str, DeltaChannelHistory]:
        """Return the channels' last values from a checkpoint's ancestors, and the writes since then."""
        if not channels:
            return {}
        thread, name = _place(config)
        asked, found = get_checkpoint_id(config), None
        async with aclosing(self._threads.views(thread)) as views:
            async for view in views:
                target = asked or (view.latest(name) if view.knows_latest(name) else None)
                if view.whole or (target is not None and target in view.space(name).puts):
                    found = view.history(name, target or "", frozenset(channels), self._versions_of)
                if found is not None:
                    break
        result: dict[str, DeltaChannelHistory] = {}
        for channel in channels:
            said = None if found is None else found[channel]
            writes = () if said is None else said.writes
            result[channel] = {
                "writes": [(task, channel, self.serde.loads_typed(value)) for task, value in writes]
            }
            if said is not None and said.seed is not None:
                result[channel]["seed"] = self.serde.loads_typed(said.seed)
        return result

    # Writing

    async def aput(
        self,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> RunnableConfig:
        """Store a checkpoint after the one that `config` names, and return how to read it.

        Raises `EditConflict` if another run has continued the thread meanwhile; then nothing is stored.
        """
        thread, name = _place(config)
        parent, checkpoint_id = get_checkpoint_id(config), checkpoint["id"]
        values = checkpoint["channel_values"]
        rest = {field: value for field, value in checkpoint.items() if field != "channel_values"}
        put = Put(
            parent or None,
            self.serde.dumps_typed(rest),
            self.serde.dumps_typed(get_checkpoint_metadata(config, metadata)),
            "" if name else _text_in(values[channel] for channel in new_versions if channel in values),
        )
        blobs = [
            (channel, version, self.serde.dumps_typed(values[channel]) if channel in values else EMPTY)
            for channel, version in new_versions.items()
        ]
        new = NewPut(name, checkpoint_id, put, checkpoint["channel_versions"], blobs)
        # LangGraph marks a branch that it begins. Namespaces below the root belong to one of its runs.
        if not name and metadata.get("source") != "fork" and self._runs.must_be_latest(thread, put.parent):

            def refused(view: View) -> bool:
                latest = view.latest("")
                return latest != checkpoint_id and (
                    latest != put.parent or (latest is not None and checkpoint_id < latest)
                )

            await self._threads.add(thread, new, refused=refused)
            self._runs.is_latest(thread, checkpoint_id)
        else:
            await self._threads.add(thread, new)
        return _config(thread, name, checkpoint_id)

    async def aput_writes(
        self,
        config: RunnableConfig,
        writes: Sequence[tuple[str, Any]],
        task_id: str,
        task_path: str = "",
    ) -> None:
        """Store the writes of a task after a checkpoint, before the next checkpoint."""
        thread, name = _place(config)
        checkpoint_id = get_checkpoint_id(config)
        if not checkpoint_id:
            raise ConfigurationError("writes belong to a checkpoint, but config has no checkpoint_id")
        each = [
            (WRITES_IDX_MAP.get(channel, nth), channel, self.serde.dumps_typed(value))
            for nth, (channel, value) in enumerate(writes)
        ]
        if each:
            await self._threads.add(thread, NewWrites(name, checkpoint_id, [(task_id, task_path, each)]))

    # Care

    async def adelete_thread(self, thread_id: str) -> None:
        """Erase a thread with all its namespaces."""
        await self._threads.erase(str(thread_id))

    async def acopy_thread(self, source_thread_id: str, target_thread_id: str) -> None:
        """Copy a thread with all its checkpoints to one that does not exist; raises `SessionExists`.

        An interrupted copy has only the oldest checkpoints: delete it and copy again.
        """
        await self._threads.copy(str(source_thread_id), str(target_thread_id))

    async def aprune(self, thread_ids: Sequence[str], *, strategy: str = "keep_latest") -> None:
        """Erase all checkpoints of some threads (`delete`), or all but the latest of each namespace.

        The latest one keeps its values, including those of a `DeltaChannel`.
        """
        if strategy not in ("keep_latest", "delete"):
            raise ConfigurationError("strategy must be 'keep_latest' or 'delete'")
        require_items("thread_ids", thread_ids)
        for thread in map(str, thread_ids):
            if strategy == "delete":
                await self._threads.erase(thread)
            else:
                await self._threads.keep(thread, _only_latest)

    async def adelete_for_runs(self, run_ids: Sequence[str]) -> None:
        """Erase the checkpoints of some runs from all threads of `tenants`. Reads all these threads.

        Changes that the runs made to a state stay in later checkpoints of other runs.
        """
        require_items("run_ids", run_ids)
        runs = {*map(str, run_ids)}

        def keeping(view: View) -> Callable[[str, str], bool]:
            def keep(name: str, checkpoint_id: str) -> bool:
                metadata: Mapping[str, Any] = self.serde.loads_typed(
                    view.space(name).puts[checkpoint_id].metadata
                )
                return str(metadata.get("run_id")) not in runs

            return keep

        if runs:
            async for thread in self._threads.ids():
                await self._threads.keep(thread, keeping)

    def get_next_version(self, current: str | None, channel: None) -> str:
        """Return a version that sorts after any that another LangGraph saver has written."""
        del channel
        number = int(str(current).partition(".")[0]) if current is not None else 0
        return f"{number + 1:010}.{random.getrandbits(40):010x}"

    # The same without an event loop

    def get_tuple(self, config: RunnableConfig) -> CheckpointTuple | None:
        """Return a checkpoint; see `aget_tuple`."""
        found = self._wait("get_tuple", self._found(config))
        self._note(config, found)
        return found

    def list(
        self,
        config: RunnableConfig | None,
        *,
        filter: dict[str, Any] | None = None,  # noqa: A002 -- LangGraph's name
        before: RunnableConfig | None = None,
        limit: int | None = None,
    ) -> Iterator[CheckpointTuple]:
        """Yield checkpoints; see `alist`."""
        found = aiter(self.alist(config, filter=filter, before=before, limit=limit))

        async def following() -> CheckpointTuple:
            return await anext(found)

        with suppress(StopAsyncIteration):
            while True:
                yield self._wait("list", following())

    def put(
        self,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> RunnableConfig:
        """Store a checkpoint; see `aput`."""
        return self._wait("put", self.aput(config, checkpoint, metadata, new_versions))

    def put_writes(
        self,
        config: RunnableConfig,
        writes: Sequence[tuple[str, Any]],
        task_id: str,
        task_path: str = "",
    ) -> None:
        """Store the writes of a task; see `aput_writes`."""
        self._wait("put_writes", self.aput_writes(config, writes, task_id, task_path))

    def delete_thread(self, thread_id: str) -> None:
        """Erase a thread; see `adelete_thread`."""
        self._wait("delete_thread", self.adelete_thread(thread_id))

    def delete_for_runs(self, run_ids: Sequence[str]) -> None:
        """Erase the checkpoints of some runs; see `adelete_for_runs`."""
        self._wait("delete_for_runs", self.adelete_for_runs(run_ids))

    def copy_thread(self, source_thread_id: str, target_thread_id: str) -> None:
        """Copy a thread; see `acopy_thread`."""
        self._wait("copy_thread", self.acopy_thread(source_thread_id, target_thread_id))

    def prune(self, thread_ids: Sequence[str], *, strategy: str = "keep_latest") -> None:
        """Erase older checkpoints; see `aprune`."""
        self._wait("prune", self.aprune(thread_ids, strategy=strategy))

    def get_delta_channel_history(
        self, *, config: RunnableConfig, channels: Sequence[str]
    ) -> Mapping[str, DeltaChannelHistory]:
        """Return the channels' history; see `aget_delta_channel_history`."""
        return self._wait(
            "get_delta_channel_history", self.aget_delta_channel_history(config=config, channels=channels)
        )

    def _wait(self, method: str, work: Coroutine[Any, Any, _T]) -> _T:
        if self._run is None:
            work.close()
            refuse(method, f"use a{method} (graph.ainvoke instead of graph.invoke)")
        return self._run(work)

    def _note(self, config: RunnableConfig, found: CheckpointTuple | None) -> None:
        thread, name = _place(config)
        if not name:
            latest = None if found is None else found.checkpoint["id"]
            self._runs.has_read(thread, get_checkpoint_id(config) or None, latest)

    def _versions_of(self, checkpoint: Blob) -> Mapping[str, str | int | float]:
        return self.serde.loads_typed(checkpoint)["channel_versions"]

    def _tuple(
        self,
        view: View,
        name: str,
        checkpoint_id: str,
        config: RunnableConfig | None = None,
        *,
        thread: str | None = None,
    ) -> CheckpointTuple:
        space, loads = view.space(name), self.serde.loads_typed
        put = space.puts[checkpoint_id]
        checkpoint: Checkpoint = loads(put.checkpoint)
        blobs = {
            channel: space.blobs.get((channel, version), EMPTY)
            for channel, version in checkpoint["channel_versions"].items()
        }
        checkpoint["channel_values"] = {
            channel: loads(blob) for channel, blob in blobs.items() if blob != EMPTY
        }
        thread = thread or view.thread
        return CheckpointTuple(
            config or _config(thread, name, checkpoint_id),
            checkpoint,
            loads(put.metadata),
            None if put.parent is None else _config(thread, name, put.parent),
            [(task, write.channel, loads(write.value)) for task, write in space.pending(checkpoint_id)],
        )


def _text_in(values: Iterable[object]) -> str:
    """Return the beginning of the last message of a list of LangChain's messages, if it is a text.

    The list is the value of a channel, or part of the input, which is a channel, too.
    """
    for value in values:
        parts = cast("Mapping[str, object]", value).values() if isinstance(value, Mapping) else [value]
        for part in parts:
            last: object = cast("list[object]", part)[-1] if isinstance(part, list) and part else None
            content = getattr(last, "content", None)
            if isinstance(content, str) and getattr(last, "type", "") in ("human", "ai"):
                return beginning_of(content)
    return ""


def _only_latest(view: View) -> Callable[[str, str], bool]:
    latest = {name: view.latest(name) for name in view.spaces}
    return lambda name, checkpoint_id: latest[name] == checkpoint_id


def _place(config: RunnableConfig) -> tuple[str, str]:
    """Return the thread and the namespace that a call names."""
    given = config.get("configurable", {})
    thread = given.get("thread_id")
    if thread is None or not str(thread).strip():
        raise InvalidKey('a thread needs an id: config={"configurable": {"thread_id": ...}}')
    return str(thread), given.get("checkpoint_ns") or ""


def _config(thread: str, name: str, checkpoint_id: str) -> RunnableConfig:
    return {
        "configurable": {"thread_id": thread, "checkpoint_ns": name, "checkpoint_id": checkpoint_id},
    }


async def _just(thread: str) -> AsyncIterator[str]:
    yield thread
