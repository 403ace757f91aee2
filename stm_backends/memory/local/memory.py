"""The memory of one process: an asyncio task summarizes, and any store can save the state.

No change of the conversation awaits anything, so every method sees a consistent state. Values that were read
before an `await` are read again after it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

from stm_backends import logs
from stm_backends.errors import ConfigurationError, InvalidKey, Unavailable
from stm_backends.guarded import guarded_clock
from stm_backends.handed_in import PASSED, WrongType
from stm_backends.memory import log, policy
from stm_backends.memory.estimating import checked_config
from stm_backends.memory.local.conversation import Conversation, Sides
from stm_backends.memory.local.state import (
    FORGET_BY_COUNT,
    State,
    dump_state,
    dump_steps,
    load_state,
    load_steps,
    own_turn,
    revised,
)
from stm_backends.memory.local.stores import StateSlot, warn_unwritable
from stm_backends.memory.policy import Fold, Recover, Step, Trim, Wait
from stm_backends.memory.schedule import TICK_S, Plan, PlannedWork, Schedule, now
from stm_backends.memory.tasks import Background, LoopLock
from stm_backends.memory.view import artifact_in
from stm_backends.protocols import ConfigLike, Summarizer
from stm_backends.races import Lost, contend
from stm_backends.records.body import Body
from stm_backends.records.steps import run_in_slices
from stm_backends.telemetry.guarded import guarded
from stm_backends.telemetry.observer import SILENT, Observer, observed
from stm_backends.types import (
    ConversationTurn,
    MemoryHealth,
    MemoryKey,
    StoredTurn,
    as_composite,
    as_turn,
    as_turn_id,
)

logger = logging.getLogger("stm_backends")


AT_ONCE: Final = 64
"""Maximum number of conversations without a backend summarized at once on an event loop; others wait."""

_schedules: dict[asyncio.AbstractEventLoop, Schedule] = {}


class _Worker(PlannedWork):
    """The background of a conversation on one event loop; a turn that waits needs no task.

    `step` takes the step that is due, as part of this work. `waiting_for` is the time of the attempt that it
    waits for. `recovering` is true once it has announced an attempt to leave `DEGRADED`. `failed` is true if
    it ended with an error that is not a failure of the summarizer.
    """

    def __init__(
        self,
        tenant: str,
        background: Background,
        step: Callable[[_Worker, Plan], Awaitable[Plan | None]],
        changed: Callable[[], None],
    ) -> None:
        self.loop = asyncio.get_running_loop()
        super().__init__(tenant, _schedule(self.loop))
        self.background = background
        self._step = step
        self._notify = changed
        self.waiting_for: float | None = None
        self.recovering = False
        self.failed = False

    @property
    def running(self) -> bool:
        """True if it takes a step on the current event loop; a task of another loop may never finish."""
        return self.loop is _loop() and self._running

    @property
    def active(self) -> bool:
        """True if it takes a step on the current event loop, or will take one."""
        return self.loop is _loop() and (self._running or self._plan is not None)

    def propose(self, plan: Plan, waiting_for: float | None) -> None:
        """Carry out a plan, unless an earlier one exists."""
        if self._plan is None or plan.at < self._plan.at:
            self.waiting_for = waiting_for
        self._propose(plan)

    def take_place(self) -> bool:
        """Take a place among the summarizer calls for the current task, unless others wait for it."""
        return self._schedule.calls.take(self.tenant)

    async def _carry_out(self, plan: Plan) -> Plan | None:
        return await self._step(self, plan)


def _schedule(loop: asyncio.AbstractEventLoop) -> Schedule:
    """Return the schedule that the conversations on an event loop share."""
    for ended in [one for one in tuple(_schedules) if one.is_closed()]:
        _schedules.pop(ended, None)
    return _schedules.setdefault(loop, Schedule(AT_ONCE))


class DefaultShortTermMemory:
    """Conversation memory in one process, which any store with `SupportsMemoryState` can keep.

    One object is one conversation at a time: `hydrate` and `persist` bind it to a key, and `hydrate` with
    another key discards the old conversation first. `time_source` returns seconds since the epoch and decides
    when a retry recorded in a saved state is due. `observer` receives events. Not thread-safe.

    A finished summary of persisted turns is saved automatically where they were last persisted, if they are
    still stored there; `write_back_summaries=False` leaves that to the next `persist`.
    """

    def __init__(
        self,
        *,
        config: ConfigLike | None,
        summarizer: Summarizer | None = None,
        time_source: Callable[[], float] | None = None,
        observer: Observer = SILENT,
        write_back_summaries: bool = True,
    ) -> None:
        self.observer = guarded(observer)
        self._config = checked_config(config, self.observer.function_failed)
        if self._config.transcript:
            raise ConfigurationError(
                "transcript=True needs a shared memory, such as backend.memory(key, config): a memory in "
                "this process has no pages to keep turns in"
            )
        self._summarizer = policy.summarizer_for(self._config, summarizer)
        self._clock = guarded_clock(time_source or time.time, self.observer.function_failed)
        self._background = Background(failed=self.observer.function_failed)
        self._hopeless = False
        self._worker: _Worker | None = None
        self._changes: set[asyncio.Future[None]] = set()
        self._flushing = 0
        self._closed = False
        self._write_back_summaries = write_back_summaries
        self._saved_in: tuple[Conversation, StateSlot] | None = None
        self._writes: set[asyncio.Task[None]] = set()
        self._key: str | None = None
        self._binding = object()
        self._saving = LoopLock()
        self._conversation = Conversation(self._config, State(), now=self._clock())

    @property
    def health(self) -> MemoryHealth:
        """The health of summarization; `RECOVERING` while an attempt to leave `DEGRADED` is running."""
        return self._conversation.health

    @property
    def _log_name(self) -> str:
        """The hash that names this conversation in log messages."""
        return "without a key" if self._key is None else logs.conversation(self._key)

    @observed
    async def add_turn(self, turn: ConversationTurn, *, turn_id: str | None = None) -> None:
        """Store a completed turn; the cost does not depend on the length of the conversation. Never waits.

        Adding the same `turn_id` again has no effect while the first is held and until 256 more turns have
        left. Raises `InvalidState` for a turn that is not JSON, and `MemoryBudgetExceeded` if
        `overflow_policy="error"` rejects it; then nothing is stored and no callback is called.
        """
        if self._config.strategy == "none":
            log.keeps_nothing()
            return
        identity = as_turn_id(turn_id)
        if turn_id is not None and self._conversation.remembers(identity):
            return
        stored = own_turn(StoredTurn(identity, as_turn(turn)))
        self._conversation.require_room(stored)
        self._conversation.add(stored, now=self._clock())
        self.observer.turns("appended", 1)
        self._background.call_back(self._config.on_turn_added, turn)
        self._wake()

    @observed
    async def get_llm_context(self) -> dict[str, Any]:
        """Return the context for the model: `{}` or `{"conversation_memory": {...}}`. Never waits."""
        self._wake()
        view = self._conversation.view()
        if view.trimmed and self._config.budget.overflow_policy == "error":
            log.trimmed_for_reading(self._log_name)
        self.observer.context_shown(lambda: view.tokens)
        return view.patch()

    def estimate_tokens(self) -> int:
        """Estimate the tokens that `get_llm_context` would show."""
        return self._conversation.view().tokens

    @observed
    async def turns(self) -> list[ConversationTurn]:
        """Return every turn that is retained in full, oldest first."""
        return [own_turn(stored).turn for stored in self._conversation.state.turns]

    def get_artifact(self, ref: str) -> Any | None:
        """Return the artifact `ref` of the newest retained turn that shows it, or `None`.

        Of hidden artifacts, turns have only the references.
        """
        return artifact_in(self._conversation.state.turns, ref)

    @observed
    async def flush(self, timeout: float | None = None) -> None:
        """Wait until nothing is pending, or summarizing has failed, or `timeout` seconds have passed.

        Also folds fewer turns than `fold_batch_turns`, and waits for the automatic save of the summary. A
        degraded memory makes the attempt that is due, or waits for the one under way; it does not wait for
        later attempts, or for a retry after an answer of the wrong type. The default timeout allows for one
        summarizer call and all its retries. Cancelling stops only the waiting. Returns at once if the
        background has failed with an error, which is logged.
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + (policy.patience(self._config) if timeout is None else timeout)
        self._flushing += 1
        try:
            await self._settled(until)
            # A merge with what others saved may leave turns pending again.
            while writes := {write for write in self._writes if write.get_loop() is loop}:
                await asyncio.wait(writes, timeout=max(until - loop.time(), 0))
                if loop.time() >= until:
                    return
                await self._settled(until)
        finally:
            self._flushing -= 1

    async def _settled(self, until: float) -> None:
        """Wait until nothing is pending, or summarizing has failed, or until the loop's time is `until`."""
        loop, first = asyncio.get_running_loop(), self._conversation.body.next_attempt_at
        while self._conversation.pending:
            self._wake()
            remaining = until - loop.time()
            worker = self._worker
            if worker is None or not worker.active or remaining <= 0:
                return
            attempt = self._conversation.body.next_attempt_at
            waits = worker.waiting_for is not None or attempt != first
            if waits and (self._hopeless or self.health is MemoryHealth.DEGRADED):
                return
            change: asyncio.Future[None] = loop.create_future()
            self._changes.add(change)
            try:
                await asyncio.wait({change}, timeout=remaining)
            finally:
                self._changes.discard(change)
            if worker.failed:
                return

    async def close(self, *, timeout: float = 5.0) -> None:
        """Stop the background; callbacks may finish within `timeout` seconds.

        Pending turns stay pending. The memory can still be read and persisted.
        """
        self._closed = True
        shown = self.health
        if self._stop_worker():
            self._conversation.recovering = False
            self._announce(shown)
        await self._background.close(timeout=timeout)

    @property
    def busy(self) -> bool:
        """True while work of this object is running or scheduled."""
        return bool(self._background) or (self._worker is not None and self._worker.active)

    # The state, and the stores that keep it

    def to_dict(self) -> dict[str, Any]:
        """Return the complete state as a new JSON object in PenguiFlow's shape; `persist` adds a revision."""
        return dump_state(self._conversation.state, self._config)

    def from_dict(self, state: Mapping[str, Any]) -> None:
        """Replace the whole conversation by a state of this library or PenguiFlow.

        Raises `ValueError`, and changes nothing, for an invalid state or one of an unknown version. The
        result of a running summarizer call is discarded.
        """
        self._start_over(load_state(state, self._config))
        self._wake()

    @observed
    async def persist(self, store: Any, key: str | MemoryKey) -> None:
        """Save the conversation, merged with the stored state.

        The turns of two processes that save under one key are all kept, see `merge`. Raises `InvalidKey` for
        a key other than the one that this conversation was hydrated from or first persisted under. Nothing is
        saved unless the stored state could be loaded and read. If a `StateStore` no longer has a state that
        was saved in it, the conversation was erased or has expired: the saved part is discarded, and only
        the turns that were never saved are saved. For a store without PenguiFlow's methods, it logs a warning
        and saves nothing. Other tasks run during the save, regardless of its size.
        """
        key = as_composite(key)
        slot = StateSlot(store, key)
        if not slot.writable:
            warn_unwritable(store)
            return
        if self._key not in (None, key):
            raise InvalidKey("this memory holds the conversation of another key; hydrate this one first")
        self._key = key
        await self._save(slot)
        self._wake()

    async def _save(self, slot: StateSlot, *, summary_only_of: Conversation | None = None) -> None:
        """Save the conversation in a slot.

        With `summary_only_of`, save only the new summary of that conversation, over an existing state: an
        erased conversation is not created again, and no turn is saved that was never persisted.
        """
        binding, conversation = self._binding, self._conversation

        async def attempt() -> tuple[State, Sides] | bool | Lost:
            nonlocal conversation
            stored, version = await self._read(slot)
            # If another key was bound during the load, the original conversation is saved.
            if self._binding is binding:
                conversation = self._conversation
            erased = self._discard_if_erased(conversation, stored, slot)
            sides = conversation.sides() if summary_only_of is None else conversation.summarized_sides()
            gone = erased or stored is None or conversation is not summary_only_of
            if sides is None or (summary_only_of is not None and gone):
                return False
            merged = conversation.merged(stored, sides, now=self._clock())
            content = revised(await run_in_slices(dump_steps(merged, self._config)))
            saved = await slot.save(content, version)
            return (merged, sides) if saved else Lost(version)

        async with self._saving.here():
            saved = await contend(attempt)
            if saved is None:
                raise Unavailable("every attempt lost the race to another process", operation="persist")
            if isinstance(saved, bool):
                return
            merged, sides = saved
            if self._conversation is conversation:
                shown = self.health
                conversation.take_saved(merged, sides, slot.authoritative, now=self._clock())
                self._saved_in = (conversation, slot)
                self._after_merge(shown)

    def _schedule_summary_save(self, conversation: Conversation) -> None:
        """Save a finished summary in the background, where its conversation was last persisted."""
        if self._write_back_summaries and self._saved_in is not None and self._saved_in[0] is conversation:
            write = self._background.start(self._save_summary(*self._saved_in), name="stm-write-back")
            self._writes.add(write)
            write.add_done_callback(self._writes.discard)

    async def _save_summary(self, conversation: Conversation, slot: StateSlot) -> None:
        try:
            # Another key may have been bound before this task began; its turns are not in this slot.
            if self._conversation is conversation and conversation.summarized_sides() is not None:
                with self.observer.background():
                    await self._save(slot, summary_only_of=conversation)
        except (asyncio.CancelledError, *PASSED):
            raise
        except BaseException as error:
            # Its message may quote the conversation.
            logger.warning(
                "could not save a summary (%s); the next persist saves it (conversation %s)",
                type(error).__name__,
                self._log_name,
                exc_info=logs.shown(error),
            )

    @observed
    async def hydrate(self, store: Any, key: str | MemoryKey) -> None:
        """Continue the conversation that is stored under a key, and keep turns that are not saved yet.

        A different key first discards everything of the old conversation, so that an error, a timeout or an
        unknown key shows nothing of it. The same key discards what was erased, see `persist`. Other tasks run
        during the load, regardless of its size.
        """
        key = as_composite(key)
        if self._key not in (None, key):
            self._binding = object()
            unsaved = self._conversation.unsaved
            if unsaved:
                logger.warning(
                    "hydrate with another key discards %d turns that were not persisted (conversation %s)",
                    unsaved,
                    self._log_name,
                )
            self._start_over(State())
        self._key = key
        slot, binding = StateSlot(store, key), self._binding
        if not slot.readable:
            return
        async with self._saving.here():
            stored, _ = await self._read(slot)
            if self._binding is binding:
                shown = self.health
                self._discard_if_erased(self._conversation, stored, slot)
                if stored is not None:
                    self._conversation.take_stored(stored, slot.authoritative, now=self._clock())
                self._after_merge(shown)
        self._wake()

    async def _read(self, slot: StateSlot) -> tuple[State | None, str | None]:
        """Return the state in a slot, if there is one, and its version."""
        content, version = await slot.load()
        if content is None:
            return None, version
        steps = load_steps(content, self._config, self._conversation.state)
        # The steps free it as they proceed.
        del content
        return await run_in_slices(steps), version

    def _discard_if_erased(self, conversation: Conversation, stored: State | None, slot: StateSlot) -> bool:
        """Discard the saved part of a conversation if it was erased; returns whether it was.

        A store without conditional saves may return `None` during an outage, so nothing is discarded for it.
        """
        erased = conversation.discard_if_erased(stored, slot.authoritative, now=self._clock())
        if erased:
            logger.info(
                "a saved conversation was erased or has expired, and is discarded (conversation %s)",
                self._log_name,
            )
        return erased

    def _after_merge(self, shown: MemoryHealth) -> None:
        """After a merge: call back if it ended a recovery that was announced."""
        if self._worker is not None and self._worker.recovering:
            self._announce(shown)
        self._changed()

    def _start_over(self, state: State) -> None:
        shown, recovering = self.health, self._stop_worker()
        self._conversation = Conversation(self._config, state, now=self._clock())
        if recovering:
            self._announce(shown)
        self._changed()

    # The background

    def _wake(self) -> None:
        """Trim if due, and plan the background's next step if it has work."""
        worker = self._worker
        # A worker that takes a step looks for work after it, and its turns must not be trimmed.
        if worker is not None and worker.running:
            return
        step = self._next_step()
        if step is None or self._closed or (loop := _loop()) is None:
            return
        if worker is None or worker.loop is not loop:
            # A conversation without a key is served like a separate tenant.
            tenant = (self._key or str(id(self))).partition(":")[0]
            self._worker = worker = _Worker(tenant, self._background, self._work, self._changed)
        worker.failed = False
        worker.propose(*self._plan_for(step))

    def _plan_for(self, step: Step) -> tuple[Plan, float | None]:
        """Return the plan for a step, and the time of the attempt that it waits for."""
        if isinstance(step, Wait):
            attempt = self._conversation.body.next_attempt_at
            return Plan(now() + max(step.seconds, TICK_S), look=False), attempt
        return Plan(now(), look=False, summarizes=isinstance(step, Fold)), None

    def _next_step(self, *, now: float | None = None) -> Step:
        """Trim if due, and return the next step."""
        conversation, batch = self._conversation, 1 if self._flushing else None
        while True:
            clock = self._clock()
            step = conversation.next_step(now=clock if now is None else now, batch=batch)
            if not isinstance(step, Trim):
                return step
            conversation.trim(step, now=clock)
            self._changed()
            if step.lost:
                self.observer.turns("dropped", step.count)
                log.dropped(self._log_name, step.count)

    async def _work(self, worker: _Worker, plan: Plan) -> Plan | None:
        """Take the step that is due; returns the plan for the next one."""
        try:
            return await self._do_what_is_due(worker, plan)
        except Exception as error:  # noqa: BLE001 -- a mistake of the library must be logged
            worker.failed = True
            log.background_stopped(self._log_name, error)
            return None

    async def _do_what_is_due(self, worker: _Worker, plan: Plan) -> Plan | None:
        due = self._conversation.body.next_attempt_at
        # After the whole wait, the clock, which may have stopped, is not needed.
        step = self._next_step(now=due if worker.waiting_for == due else None)
        worker.waiting_for = None
        if isinstance(step, Fold) and (plan.summarizes or worker.take_place()):
            with self.observer.background():
                await self._fold(step, worker)
            step = self._next_step() if self._worker is worker else None
        if isinstance(step, Recover):
            shown = self.health
            self._conversation.recover()
            log.recovered(self._log_name)
            self._announce(shown)
            step = self._next_step()
        if step is None:
            return None
        following, worker.waiting_for = self._plan_for(step)
        return following

    async def _fold(self, fold: Fold, worker: _Worker) -> None:
        conversation, config = self._conversation, self._config
        shown = conversation.health
        worker.recovering = conversation.recovering = conversation.body.health is MemoryHealth.DEGRADED
        self._announce(shown)
        try:
            with self.observer.call("summarize"):
                answer = await self._background.call_within(
                    config.summarizer_timeout_s, self._summarizer, fold.request(config)
                )
                summary = policy.summary_of(answer)
            body = policy.after_fold(
                config,
                conversation.body,
                fold,
                summary,
                now=self._clock(),
                keep_for=FORGET_BY_COUNT,
            )
        except asyncio.CancelledError:
            conversation.recovering = False
            raise
        except Exception as error:  # noqa: BLE001 -- any error of a user's summarizer is one failed attempt
            if self._worker is worker:
                self._note_failure(conversation, error)
        else:
            if self._worker is worker:
                self._take_summary(conversation, fold, body)
        finally:
            worker.recovering = False

    def _take_summary(self, conversation: Conversation, fold: Fold, body: Body) -> None:
        self._hopeless = False
        shown, before = conversation.health, conversation.body
        if fold.still_applies(conversation.body, conversation.pending):
            conversation.fold(fold, body)
            self.observer.turns("folded", len(fold.turns))
            self._background.call_back(self._config.on_summary_updated, before.summary, body.summary)
            if before.health is not MemoryHealth.HEALTHY:
                log.recovered(self._log_name)
            self._schedule_summary_save(conversation)
        else:
            # The store had another summary or other turns, which are handled next.
            conversation.recovering = False
            self.observer.race_lost()
        self._announce(shown)

    def _note_failure(self, conversation: Conversation, error: Exception) -> None:
        self.observer.summarizer_failed(error)
        self._hopeless = isinstance(error, WrongType)
        shown, before = conversation.health, conversation.body
        after = policy.after_failure(self._config, before, now=self._clock())
        conversation.body, conversation.recovering = after, False
        if after.health is MemoryHealth.RETRY:
            log.retrying(self._log_name, after.attempts, error)
        elif before.health is not MemoryHealth.DEGRADED:
            log.degraded(self._log_name, error)
        self._announce(shown)

    def _announce(self, shown: MemoryHealth) -> None:
        """Call back if the health differs from what was shown before."""
        if self.health is not shown:
            self.observer.health_changed(shown, self.health)
            if _loop() is not None:
                self._background.call_back(self._config.on_health_changed, shown, self.health)
        self._changed()

    def _changed(self) -> None:
        """Wake the callers that wait for a change."""
        for change in self._changes:
            if not change.done() and not change.get_loop().is_closed():
                change.set_result(None)

    def _stop_worker(self) -> bool:
        """Stop the background; returns whether it was making an attempt to leave `DEGRADED`."""
        worker, self._worker = self._worker, None
        if worker is None:
            return False
        worker.abandon()
        return worker.recovering


def _loop() -> asyncio.AbstractEventLoop | None:
    """Return the running event loop; `from_dict` may be called without one."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
