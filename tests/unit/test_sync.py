"""The library without an event loop: a thread owns it, any thread calls, and nothing ever hangs."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from stm_backends import (
    ConfigurationError,
    Conversation,
    ConversationTurn,
    DistributedShortTermMemory,
    ExtractiveSummarizer,
    InvalidKey,
    MemoryBudget,
    MemoryHealth,
    MemoryKey,
    OutcomeUnknown,
    ShortTermMemoryConfig,
    Unavailable,
    sync,
)
from stm_backends import backend as asynchronous
from stm_backends import tiers as asynchronous_tiers
from stm_backends.admin.sessions import Sessions as AsynchronousSessions
from stm_backends.catalogue import conversations as asynchronous_catalogue
from stm_backends.drivers.in_memory import MemoryDriver
from stm_backends.records import state_store
from stm_backends.sync import tiers
from stm_backends.sync.conversations import Conversations
from stm_backends.sync.sessions import Sessions
from stm_backends.sync.state_store import TenantStates

KEY = MemoryKey("acme", "u", "s")
LAST_TURNS = ShortTermMemoryConfig(strategy="truncation", budget=MemoryBudget(full_zone_turns=1_000))
ROLLING = ShortTermMemoryConfig(strategy="rolling_summary", budget=MemoryBudget(full_zone_turns=1))
PATIENCE_S = 20.0


def turn(text: str) -> ConversationTurn:
    return ConversationTurn(text, "fine")


def known(memory: sync.Memory) -> list[str]:
    return [one.user_message for one in memory.turns()]


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/stm.db"


@pytest.fixture
def backend(url: str) -> Iterator[sync.Backend]:
    with sync.open_backend(url) as backend:
        yield backend


@pytest.fixture
def loop() -> Iterator[sync.LoopThread]:
    with sync.LoopThread() as loop:
        yield loop


def in_thread(function: Callable[[], object]) -> object:
    """Return what a function returns or raises in a thread of its own; fail if it hangs."""
    answers: list[object] = []

    def call() -> None:
        try:
            answers.append(function())
        except BaseException as error:  # noqa: BLE001 -- it is the answer
            answers.append(error)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    assert not thread.is_alive(), "the call hangs"
    return answers[0]


def until(condition: Callable[[], object]) -> None:
    """Wait until a condition holds; fail if it never does."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "the condition never came true"
        time.sleep(0.01)


def run_program(body: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a program of its own, which must end by itself."""
    prelude = """\
        import os, sys, threading, time
        from stm_backends import *
        from stm_backends import sync
        KEY = MemoryKey("acme", "u", "s")
        ROLLING = ShortTermMemoryConfig(strategy="rolling_summary", budget=MemoryBudget(full_zone_turns=1))
    """
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(prelude) + textwrap.dedent(body), *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


# The facade and what is behind it


INNER = {
    *("touch", "promotable", "promote", "was_promoted", "end_session", "with_vectors", "discard", "absorb"),
    *("rewrite", "summary_key", "heads", "opened", "reading_once"),
}


@pytest.mark.parametrize(
    ("facade", "behind", "left_out"),
    [
        # What a router checks and lets go of for itself, and what other parts of this library read.
        (sync.Memory, DistributedShortTermMemory, {"checked", "abandon", "shared"}),
        (sync.Conversation, Conversation, {"abandon", "shared"}),
        # A generator that waits is another one.
        (sync.StateStore, state_store.StateStore, {"states_of"}),
        (TenantStates, state_store.TenantStates, {"names"}),
        (Conversations, asynchronous_catalogue.Conversations, {"all"}),
        # A router and an item log are for frameworks: a router has a loop around it, and the module of a
        # framework has a facade of its own. The others are for what is built on a backend.
        (
            sync.Backend,
            asynchronous.Backend,
            {
                *("router", "item_log", "short_term_conversation", "codec", "directory", "guard", "observer"),
                *("sessions", "stats", "worker"),  # attributes: the facade lists, and commands count
            },
        ),
        (tiers.MemoryManager, asynchronous_tiers.MemoryManager, set[str]()),
        (tiers.FleetingMemory, asynchronous_tiers.FleetingMemory, set[str]()),
        # What the hooks and the collector use.
        (tiers.ShortTermMemory, asynchronous_tiers.ShortTermMemory, INNER),
        (tiers.LongTermMemory, asynchronous_tiers.LongTermMemory, INNER),
        (tiers.MemoryGarbageCollector, asynchronous_tiers.MemoryGarbageCollector, set[str]()),
    ],
)
def test_the_facade_has_every_method_with_the_same_signature(
    facade: type, behind: type, left_out: set[str]
) -> None:
    ours_alone = (one for one in behind.__mro__ if one.__module__.startswith("stm_backends."))
    names = {name for one in ours_alone for name in vars(one) if not name.startswith("_")} - left_out
    assert names
    for name in sorted(names):
        ours, theirs = inspect.getattr_static(facade, name), inspect.getattr_static(behind, name)
        assert isinstance(ours, property) == isinstance(theirs, property), name
        if isinstance(ours, property):
            ours, theirs = ours.fget, theirs.fget
        assert not inspect.iscoroutinefunction(ours), name
        if name in ("each_turn", "each_message"):
            # One is iterated with `for`, the other with `async for`.
            assert inspect.signature(ours).parameters == inspect.signature(theirs).parameters
        elif (facade, name) not in ((sync.Backend, "memory"), (sync.Backend, "conversation")):
            assert inspect.signature(ours) == inspect.signature(theirs), name
    for name in (sync.open_backend, sync.Backend.memory, sync.Backend.conversation):
        theirs = getattr(asynchronous if name is sync.open_backend else asynchronous.Backend, name.__name__)
        # It accepts a plain summarizer and returns a facade; the names, kinds and defaults are the same.
        ours = [one.replace(annotation=object) for one in inspect.signature(name).parameters.values()]
        others = [one.replace(annotation=object) for one in inspect.signature(theirs).parameters.values()]
        assert ours == others


def test_what_one_facade_stores_another_reads(url: str) -> None:
    with sync.open_backend(url) as backend:
        memory = backend.memory(KEY, LAST_TURNS)
        memory.add_turn(turn("hello"), turn_id="1")
        memory.add_turn(turn("hello"), turn_id="1")
        backend.state_store.save_memory_state("k", {"a": 1})
        # The second is known to stand there, and is not stored again.
        assert memory.stats.appended == 1
        assert memory.health is MemoryHealth.HEALTHY
        assert memory.estimate_tokens() > 1
        assert backend.ping() > 0
        assert (backend.name, backend.traits.reach) == ("sqlite", "host")
    with sync.open_backend(url) as backend:
        context = backend.memory(KEY, LAST_TURNS).get_llm_context()
        assert context["conversation_memory"]["recent_turns"] == [{"user": "hello", "assistant": "fine"}]
        assert backend.state_store.load_memory_state("k") == {"a": 1}


def test_the_state_store_saves_conditionally_and_returns_a_paused_run_once(backend: sync.Backend) -> None:
    store = backend.state_store
    assert store.load_versioned("k") == (None, None)
    assert store.save_if("k", {"a": 1}, expect=None)
    assert not store.save_if("k", {"a": 2}, expect=None)
    state, version = store.load_versioned("k")
    assert state == {"a": 1}
    assert store.save_if("k", {"a": 2}, expect=version, ttl=60)
    assert store.delete_memory_state("k")
    store.save_planner_state("token", {"step": 1})
    assert [store.load_planner_state("token") for _ in range(2)] == [{"step": 1}, None]


def test_what_is_only_asynchronous_is_run_on_the_loop(backend: sync.Backend) -> None:
    backend.memory(KEY, LAST_TURNS).add_turn(turn("hello"))
    assert backend.run(backend.asynchronous.sessions.erase(KEY))
    assert known(backend.memory(KEY, LAST_TURNS)) == []


def test_a_key_that_is_none_and_a_missing_summarizer_are_refused_at_once(backend: sync.Backend) -> None:
    with pytest.raises(InvalidKey):
        backend.memory("acme:u:s")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="needs a summarizer"):
        backend.memory(KEY, ROLLING)
    with pytest.raises(ConfigurationError, match="give an instance"):
        backend.memory(KEY, ROLLING, summarizer=ExtractiveSummarizer)  # type: ignore[arg-type]


# Threads


def test_turns_of_many_threads_are_all_stored_each_thread_in_its_order(backend: sync.Backend) -> None:
    memory = backend.memory(KEY, LAST_TURNS)

    def talk(speaker: int) -> None:
        own = backend.memory(KEY, LAST_TURNS) if speaker % 2 else memory
        for number in range(10):
            own.add_turn(turn(f"{speaker}:{number}"))
            own.estimate_tokens()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(talk, range(8)))
    said = known(memory)
    for speaker in range(8):
        assert [text for text in said if text.startswith(f"{speaker}:")] == [
            f"{speaker}:{number}" for number in range(10)
        ]
    assert len(said) == 80


def test_a_coroutine_runs_in_the_context_of_its_caller(loop: sync.LoopThread) -> None:
    variable = contextvars.ContextVar("variable", default="nobody's")
    variable.set("the caller's")

    async def look() -> str:
        return variable.get()

    assert loop.run(look()) == "the caller's"


def test_what_a_coroutine_raises_is_raised_where_it_is_waited_for(loop: sync.LoopThread) -> None:
    async def fail() -> None:
        raise LookupError("as it is")

    with pytest.raises(LookupError, match="as it is"):
        loop.run(fail())


async def test_a_call_from_a_running_loop_is_answered(url: str) -> None:
    with sync.open_backend(url) as backend:
        memory = backend.memory(KEY, LAST_TURNS)
        memory.add_turn(turn("from a notebook"))
        assert known(memory) == ["from a notebook"]


def test_a_call_on_the_loops_own_thread_is_refused_and_hangs_nothing(backend: sync.Backend) -> None:
    met: list[BaseException] = []
    called = threading.Event()

    async def on_turn_added(_: ConversationTurn) -> None:
        for call in (lambda: memory.add_turn(turn("again")), backend.close, backend.open):
            try:
                call()
            except ConfigurationError as error:
                met.append(error)
        called.set()

    config = ShortTermMemoryConfig(strategy="truncation", on_turn_added=on_turn_added)
    memory = backend.memory(KEY, config)
    in_thread(lambda: memory.add_turn(turn("hello")))
    assert called.wait(PATIENCE_S)
    assert len(met) == 3
    assert known(memory) == ["hello"]


def test_a_callback_that_closes_while_another_thread_does_hangs_neither(url: str) -> None:
    met: list[BaseException] = []

    async def on_turn_added(_: ConversationTurn) -> None:
        begun.set()
        closing.wait(PATIENCE_S)
        # Time for the other to take whatever it takes, and to wait for this loop.
        threading.Event().wait(0.1)
        try:
            backend.close()
        except ConfigurationError as error:
            met.append(error)

    def close() -> None:
        closing.set()
        backend.close()

    begun, closing = threading.Event(), threading.Event()
    backend = sync.open_backend(url)
    backend.open()
    config = ShortTermMemoryConfig(strategy="truncation", on_turn_added=on_turn_added)
    memory = backend.memory(KEY, config)
    threading.Thread(target=lambda: memory.add_turn(turn("hello")), daemon=True).start()
    assert begun.wait(PATIENCE_S)
    assert in_thread(close) is None
    assert len(met) == 1


def test_backends_share_a_loop_that_stays_open_when_they_are_closed(loop: sync.LoopThread) -> None:
    async def thread() -> int:
        return threading.get_ident()

    backends = [sync.Backend(asynchronous.Backend(MemoryDriver()), loop=loop) for _ in range(2)]
    threads: set[int] = set()
    for backend in backends:
        with backend:
            threads.add(backend.run(thread()))
    assert threads == {loop.run(thread())}


# Summarizers


class Gate:
    """A plain summarizer that waits until it may go on."""

    def __init__(self) -> None:
        self.called, self.go = threading.Event(), threading.Event()

    def __call__(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        self.called.set()
        assert self.go.wait(PATIENCE_S)
        return {"summary": f"{request['previous_summary']}{len(request['turns'])}"}


def test_a_blocking_summarizer_delays_no_call_and_closing_waits_for_it(url: str) -> None:
    gate = Gate()
    with sync.open_backend(url, close_timeout_s=PATIENCE_S) as backend:
        memory = backend.memory(KEY, ROLLING, summarizer=gate)
        memory.add_turn(turn("one"))
        memory.add_turn(turn("two"))
        assert gate.called.wait(PATIENCE_S)
        assert memory.busy
        assert known(memory) == ["one", "two"]
        threading.Timer(0.2, gate.go.set).start()
    with sync.open_backend(url) as backend:
        context = backend.memory(KEY, ROLLING, summarizer=gate).get_llm_context()["conversation_memory"]
        assert "1" in context["summary"]
        assert [one["user"] for one in context["recent_turns"]] == ["two"]


def test_a_plain_summarizer_may_use_the_facade_and_an_async_one_works_too(backend: sync.Backend) -> None:
    def summarize(request: Mapping[str, Any]) -> Mapping[str, Any]:
        backend.state_store.save_memory_state("seen", {"turns": len(request["turns"])})
        return {"summary": "plain"}

    for session, summarizer in (("a", summarize), ("b", ExtractiveSummarizer())):
        memory = backend.memory(MemoryKey("acme", "u", session), ROLLING, summarizer=summarizer)
        memory.add_turn(turn("one"))
        memory.add_turn(turn("two"))
        memory.flush()
        assert memory.stats.summaries == 1
        memory.close()
    assert backend.state_store.load_memory_state("seen") == {"turns": 1}


@pytest.mark.parametrize("error", [StopIteration, SystemExit, KeyboardInterrupt, ValueError])
def test_a_plain_summarizer_that_raises_is_one_failed_attempt(
    backend: sync.Backend, error: type[BaseException]
) -> None:
    def summarize(_: Mapping[str, Any]) -> Mapping[str, Any]:
        raise error

    memory = backend.memory(KEY, ROLLING, summarizer=summarize)
    memory.add_turn(turn("one"))
    memory.add_turn(turn("two"))
    until(lambda: memory.health is not MemoryHealth.HEALTHY)
    assert memory.health is MemoryHealth.RETRY
    assert memory.stats.summarizer_failures == 1
    assert known(memory) == ["one", "two"]


# Interrupted, closed, forked, ended


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Whoever started the tests in the background may have had interrupts ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt_the_wait_of_the_main_thread(ready: threading.Event) -> None:
    """Once `ready` is set and the main thread waits for an answer, interrupt it.

    Not before: coverage never releases a lock that it holds when its thread is interrupted.
    """
    main = threading.main_thread().ident or 0

    def interrupt() -> None:
        ready.wait()
        while sys._current_frames()[main].f_code is not threading.Condition.wait.__code__:  # noqa: SLF001 -- no public name
            time.sleep(0.01)
        signal.pthread_kill(main, signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_cancels_the_call_and_is_raised_once_that_has_ended(loop: sync.LoopThread) -> None:
    begun, ended = threading.Event(), threading.Event()

    async def wait_long() -> None:
        begun.set()
        try:
            await asyncio.sleep(PATIENCE_S)
        finally:
            await asyncio.sleep(0.1)
            ended.set()

    interrupt_the_wait_of_the_main_thread(begun)
    with pytest.raises(KeyboardInterrupt):
        loop.run(wait_long())
    assert ended.is_set()
    assert in_thread(lambda: loop.run(asyncio.sleep(0, "still open"))) == "still open"


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_while_closing_ends_the_wait_and_releases_the_lease(url: str) -> None:
    gate = Gate()
    backend = sync.open_backend(url, close_timeout_s=PATIENCE_S)
    backend.open()
    memory = backend.memory(KEY, ROLLING, summarizer=gate)
    memory.add_turn(turn("one"))
    memory.add_turn(turn("two"))
    assert gate.called.wait(PATIENCE_S)
    closing = threading.Event()
    interrupt_the_wait_of_the_main_thread(closing)
    began = time.monotonic()
    closing.set()
    with pytest.raises(KeyboardInterrupt):
        backend.close()
    assert time.monotonic() - began < PATIENCE_S / 2
    gate.go.set()
    with sync.open_backend(url) as backend:
        again = backend.memory(KEY, ROLLING, summarizer=ExtractiveSummarizer())
        # A lease that was not given back would hold this up for a minute.
        again.flush(PATIENCE_S / 2)
        assert again.stats.summaries == 1


def test_before_opening_and_after_closing_a_call_is_refused(url: str) -> None:
    backend = sync.open_backend(url)
    with pytest.raises(ConfigurationError, match="never opened; use"):
        backend.memory(KEY, LAST_TURNS)
    with backend:
        backend.open()
        memory = backend.memory(KEY, LAST_TURNS)
    for call in (lambda: memory.add_turn(turn("late")), memory.estimate_tokens, memory.flush, backend.ping):
        assert isinstance(in_thread(call), Unavailable)
    assert memory.health is MemoryHealth.HEALTHY
    backend.close()
    with backend:
        memory.add_turn(turn("opened again"))
        assert known(memory) == ["opened again"]


def test_an_opening_that_fails_leaves_no_thread(tmp_path: Path) -> None:
    before = threading.active_count()
    backend = sync.open_backend(f"sqlite:///{tmp_path}/missing.db", must_exist=True)
    with pytest.raises(Unavailable):
        backend.open()
    backend.close()
    assert threading.active_count() == before


def test_a_call_that_is_under_way_when_another_thread_closes_is_answered(loop: sync.LoopThread) -> None:
    begun = threading.Event()

    async def wait_long() -> None:
        begun.set()
        await asyncio.sleep(PATIENCE_S)

    threading.Thread(target=lambda: (begun.wait(), loop.close()), daemon=True).start()
    assert isinstance(in_thread(lambda: loop.run(wait_long())), OutcomeUnknown)
    assert isinstance(in_thread(lambda: loop.run(asyncio.sleep(0))), Unavailable)


def test_many_threads_calling_while_one_closes_are_all_answered() -> None:
    for _ in range(20):
        loop = sync.LoopThread()
        with ThreadPoolExecutor(8) as pool:
            calls = [pool.submit(loop.run, asyncio.sleep(0.001, number)) for number in range(40)]
            loop.close()
            for number, call in enumerate(calls):
                error = call.exception(PATIENCE_S)
                assert isinstance(error, (Unavailable, OutcomeUnknown)) or call.result() == number


def test_a_call_that_does_not_end_is_abandoned_and_its_caller_released(
    caplog: pytest.LogCaptureFixture,
) -> None:
    loop = sync.LoopThread()
    begun, go = threading.Event(), threading.Event()

    async def ignore_everything() -> None:
        begun.set()
        go.wait(PATIENCE_S)

    threading.Thread(target=lambda: (begun.wait(), loop.close(timeout=0.1)), daemon=True).start()
    try:
        assert isinstance(in_thread(lambda: loop.run(ignore_everything())), OutcomeUnknown)
        assert "abandoned" in caplog.text
    finally:
        go.set()


def test_an_exit_within_a_coroutine_ends_the_loop_and_all_waiting_calls(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def leave() -> None:
        raise SystemExit

    with sync.LoopThread() as loop:
        assert isinstance(in_thread(lambda: loop.run(leave())), (SystemExit, OutcomeUnknown))
        until(lambda: "ended with SystemExit" in caplog.text)
        assert isinstance(in_thread(lambda: loop.run(asyncio.sleep(0))), Unavailable)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forking is for POSIX")
def test_a_forked_process_is_told_so_and_its_parent_goes_on(url: str) -> None:
    done = run_program(
        """
        backend = sync.open_backend(sys.argv[1])
        # Another file: SQLite's locks on one that is being written to do not survive a fork.
        fresh = sync.open_backend(sys.argv[1] + ".child")
        backend.open()
        memory = backend.memory(KEY, ShortTermMemoryConfig(strategy="truncation"))
        memory.add_turn(ConversationTurn("before", "."))
        sys.settrace(None)  # A tool that measures code has locks, which another thread may hold now.
        child = os.fork()
        if not child:
            for call in (lambda: memory.add_turn(ConversationTurn("child", ".")), backend.open):
                try:
                    call()
                except ConfigurationError:
                    print("refused", flush=True)
            backend.close()
            with fresh:
                fresh.state_store.save_memory_state("child", {})
            sys.exit()
        assert os.waitpid(child, 0)[1] == 0
        memory.add_turn(ConversationTurn("after", "."))
        with fresh:
            print(len(memory.turns()), fresh.state_store.load_memory_state("child"))
        backend.close()
        """,
        url,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n") == ["refused", "refused", "2 {}", ""]
    assert "Traceback" not in done.stderr


def test_a_program_that_ends_without_closing_has_its_backend_closed(url: str) -> None:
    done = run_program(
        """
        def summarize(request):
            begun.set()
            time.sleep(0.5)
            return {"summary": "written while the program ended"}

        begun = threading.Event()
        backend = sync.open_backend(sys.argv[1])
        backend.open()
        memory = backend.memory(KEY, ROLLING, summarizer=summarize)
        memory.add_turn(ConversationTurn("one", "."))
        memory.add_turn(ConversationTurn("two", "."))
        begun.wait()
        """,
        url,
    )
    assert (done.returncode, done.stderr) == (0, "")
    with sync.open_backend(url) as backend:
        memory = backend.memory(KEY, ROLLING, summarizer=ExtractiveSummarizer())
        assert "while the program ended" in memory.get_llm_context()["conversation_memory"]["summary"]


def test_a_summarizer_that_never_returns_does_not_take_ever_more_threads(
    backend: sync.Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stm_backends.sync.summarizers.GIVEN_UP_AT_MOST", 2)
    go, calls = threading.Event(), [0]

    def hang(_: Mapping[str, Any]) -> Mapping[str, Any]:
        calls[0] += 1
        go.wait(PATIENCE_S)
        return {"summary": "late"}

    impatient = ShortTermMemoryConfig(
        strategy="rolling_summary",
        budget=MemoryBudget(full_zone_turns=1),
        summarizer_timeout_s=0.02,
        retry_backoff_base_s=0.01,
        degraded_retry_interval_s=0.01,
    )
    memory = backend.memory(KEY, impatient, summarizer=hang)
    for text in ("one", "two"):
        memory.add_turn(turn(text))
    until(lambda: memory.stats.summarizer_failures >= 6)
    assert calls == [2]
    # Once they have returned, the memory recovers by itself.
    go.set()
    until(lambda: memory.stats.summaries)
    assert memory.stats.summaries == 1


def test_a_summarizer_that_never_returns_keeps_no_program_from_ending(url: str) -> None:
    done = run_program(
        """
        begun = threading.Event()
        with sync.open_backend(sys.argv[1], close_timeout_s=0.1) as backend:
            def summarize(request):
                begun.set()
                threading.Event().wait()

            memory = backend.memory(KEY, ROLLING, summarizer=summarize)
            memory.add_turn(ConversationTurn("one", "."))
            memory.add_turn(ConversationTurn("two", "."))
            begun.wait()
        loop = sync.LoopThread()
        """,
        url,
    )
    assert (done.returncode, done.stderr) == (0, "")


# The three tiers


def test_a_manager_has_blocking_tiers_and_hooks(url: str) -> None:
    calls: list[int] = []

    def model(messages: list[dict[str, str]]) -> str:
        # A blocking model that uses the loop would deadlock on the loop's own thread.
        calls.append(threading.get_ident())
        assert backend.ping() > 0
        return "the gist" if "one short summary" in messages[0]["content"] else ""

    long = asynchronous_tiers.MemoryTier.LONG_TERM
    with sync.open_backend(url) as backend:
        memory = sync.MemoryManager(backend, ("acme", "u123"), model, session_id="s")
        memory.remember("scratch", 1, tier=asynchronous_tiers.MemoryTier.FLEETING)
        for number in range(12):
            memory.remember(f"k{number}", f"fact {number}", importance=0.9 if not number else 0.1)
        assert [one.key for one in memory.short_term.get_recent(1)] == ["k11"]
        assert len(memory.recall("fact", tiers=[asynchronous_tiers.MemoryTier.SHORT_TERM])) == 12
        memory.gc.on_session_end()
        assert memory.fleeting.size == 0
        assert {one.key for one in memory.long_term.listed()} == {"k0", "__summary__:s"}
        assert [one.key for one in memory.get_context_window(max_tokens=5)] != []
        memory.gc.on_idle()
        memory.run_gc()
        memory.forget("k0")
        assert {one.key for one in memory.long_term.recall("")} == {"__summary__:s"}
    assert calls
    assert threading.get_ident() not in calls
    with sync.open_backend(url) as backend:
        again = sync.MemoryManager(backend, ("acme", "u123"))
        assert [one.content for one in again.recall("summary", tiers=[long])] == ["the gist"]


def test_the_loops_thread_reads_what_only_it_changes(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[int] = []
    checked = asynchronous_tiers.MemoryEntry.__post_init__

    def noted(entry: Any) -> None:
        threads.append(threading.get_ident())
        checked(entry)

    with sync.open_backend(url) as backend:
        memory = sync.MemoryManager(backend, ("acme", "u123"))
        memory.fleeting.remember("k", "v")
        monkeypatch.setattr(asynchronous_tiers.MemoryEntry, "__post_init__", noted)
        assert [one.content for one in memory.fleeting.entries] == ["v"]
        assert (memory.fleeting.size, memory.short_term.size, memory.long_term.size) == (1, 0, 0)
        assert memory.long_term.held == 0
    assert threads
    assert threading.get_ident() not in threads


@pytest.mark.parametrize("given", ["sqlite:///memory.db", None])
def test_a_manager_without_a_backend_of_the_facade_says_which_it_takes(given: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"backend must come from stm_backends\.sync\.open_backend"):
        sync.MemoryManager(given, ("acme", "u123"))


def test_a_manager_before_its_backend_is_open_says_so(url: str) -> None:
    memory = sync.MemoryManager(sync.open_backend(url), ("acme", "u123"))
    with pytest.raises(ConfigurationError, match="never opened; use"):
        memory.remember("k", "v")


def test_conversations_are_listed_and_set(backend: sync.Backend) -> None:
    key = MemoryKey("acme", "u1", "chat")
    backend.memory(key, ShortTermMemoryConfig("truncation")).add_turn(ConversationTurn("Hello", "Hi"))
    assert backend.conversations.update(key, title="Trip").title == "Trip"
    until(lambda: backend.conversations.list("acme", "u1").cards)
    assert [card.title for card in backend.conversations.all("acme", "u1")] == ["Trip"]
    assert backend.conversations.get(key).preview == "Hi"
    assert backend.conversations.rebuild("acme", "u1") == 0


async def anything() -> AsyncIterator[int]:
    yield 1


@pytest.mark.parametrize("work", [anything(), "erase", None, anything])
def test_what_is_no_coroutine_is_refused_where_it_is_given(
    backend: sync.Backend, url: str, work: Any
) -> None:
    for run in (backend.run, sync.open_backend(url).run):
        answer = in_thread(partial(run, work))
        assert isinstance(answer, ConfigurationError)
        assert str(answer) == f"run takes a coroutine, not {type(work).__name__}"


def test_a_loop_that_makes_no_task_of_a_call_raises_why(loop: sync.LoopThread) -> None:
    async def refuse() -> None:
        def make(*given: Any, **named: Any) -> Any:
            asyncio.get_running_loop().set_task_factory(None)
            raise RuntimeError("no task today")

        asyncio.get_running_loop().set_task_factory(make)

    async def answer() -> int:
        return 1

    loop.run(refuse())
    refused = in_thread(lambda: loop.run(answer()))
    assert isinstance(refused, RuntimeError)
    assert str(refused) == "no task today"
    assert loop.run(answer()) == 1


def test_what_is_stored_is_listed(backend: sync.Backend) -> None:
    backend.memory(KEY).add_turn(turn("hello"))
    backend.run(backend.asynchronous.item_log(KEY, "langchain").add([{}]))
    assert [*backend.sessions.tenants()] == ["acme"]
    assert [*backend.sessions.users("acme")] == ["u"]
    assert [*backend.sessions.list("acme", "u")] == [KEY]
    assert [*backend.sessions.logs("acme", "u")] == [("langchain", KEY)]
    assert [*backend.sessions.logs("acme", "u", "langchain")] == [("langchain", KEY)]
    assert [*backend.sessions.logs("acme", "u", "pydantic-ai")] == []


@pytest.mark.parametrize("name", ["tenants", "users", "list", "logs"])
def test_the_listings_have_the_same_parameters(name: str) -> None:
    ours, theirs = getattr(Sessions, name), getattr(AsynchronousSessions, name)
    assert inspect.signature(ours).parameters == inspect.signature(theirs).parameters
