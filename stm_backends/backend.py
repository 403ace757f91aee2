"""The entry point of the library: `open_backend` and the objects of one datastore."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from functools import cached_property, partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, get_args

from stm_backends.admin.describing import catalogue_on
from stm_backends.admin.searching import Searching
from stm_backends.catalogue.conversations import Conversations
from stm_backends.drivers import plugins
from stm_backends.drivers.checks import require_count, require_event_loop, require_seconds
from stm_backends.drivers.contract import Driver, Key, Traits
from stm_backends.drivers.home import Home
from stm_backends.errors import ConfigurationError
from stm_backends.history.log import ItemLog
from stm_backends.memory import policy
from stm_backends.memory.defaults import SUMMARY_TOKENS, remembering
from stm_backends.memory.estimating import checked_config
from stm_backends.memory.schedule import MAX_SUMMARIES
from stm_backends.memory.shared.backgrounds import Backgrounds
from stm_backends.memory.shared.conversation import Conversation
from stm_backends.memory.shared.memory import DistributedShortTermMemory
from stm_backends.memory.shared.router import MemoryRouter
from stm_backends.memory.summarizers import ExtractiveSummarizer
from stm_backends.memory.tasks import LAST_S
from stm_backends.memory.touches import Touches
from stm_backends.messages import Shape
from stm_backends.protocols import ConfigLike, Summarizer
from stm_backends.records.codec import Codec, Transform
from stm_backends.records.directory import Directory
from stm_backends.records.keys import (
    LogKind,
    directory_scope,
    is_beside,
    log_key,
    name,
    require_dialogue,
    require_key,
    short_term_of,
)
from stm_backends.records.large.driver import LargeEntries
from stm_backends.records.limited import LimitedDriver
from stm_backends.records.limits import Guard, Limits, Whose
from stm_backends.records.seals import Clear
from stm_backends.records.state_store import StateStore, TenantStates
from stm_backends.sealing.keys import Owner, Sealing, StaticKeys
from stm_backends.telemetry.denials import ReportingSeals, reporting_denials
from stm_backends.telemetry.guarded import guarded
from stm_backends.telemetry.observer import SILENT, Observer, Subject
from stm_backends.types import MemoryIsolation, MemoryKey, ShortTermMemoryConfig, Summaries, as_config
from stm_backends.work.notes import Note, config_of
from stm_backends.work.queue import WorkQueue
from stm_backends.work.worker import Worker

if TYPE_CHECKING:
    from stm_backends.admin.sessions import Sessions
    from stm_backends.admin.stats import Stats
    from stm_backends.sealing.driver import SealedDriver

logger = logging.getLogger("stm_backends")

PING_KEY: Final = Key("::ping", "ping")
"""A key under which nothing is stored: no tenant is empty, so no user owns its scope."""


def open_backend(  # noqa: PLR0913 -- one for each setting
    name_or_url: str,
    *,
    url: str | None = None,
    create: bool = False,
    transforms: Sequence[Transform] = (),
    sealing: Sealing | None = None,
    isolation: MemoryIsolation | None = None,
    limits: Limits | None = None,
    max_summaries: int = MAX_SUMMARIES,
    summaries: Summaries = "process",
    close_timeout_s: float = 10.0,
    observer: Observer = SILENT,
    **options: Any,
) -> Backend:
    """Return a backend by its entry-point name or its URL; use it with `async with`.

    `create=True` creates what the datastore needs, such as tables. `transforms` are applied to stored data
    in order, for example compression. `sealing` encrypts everything that is stored. `limits` bounds turns,
    conversations, users and saved states. `isolation` gives the paths of tenant and user in paused runs, if
    they are not `tenant_id` and `user_id`. `max_summaries` limits the summarizer calls in flight; a quarter
    of them is reserved for tenants without a call in flight. `summaries="worker"` leaves summaries to
    `stm-backends work`. `close_timeout_s` limits the wait for running summaries on closing. `observer`
    receives events, for example `telemetry.Telemetry()`. `options` are passed to the driver. Raises
    `ConfigurationError` for an invalid name, URL or option.
    """
    driver = plugins.open_driver(name_or_url, url=url, create=create, **options)
    return Backend(
        driver,
        transforms=transforms,
        sealing=sealing,
        isolation=isolation,
        limits=limits,
        max_summaries=max_summaries,
        summaries=summaries,
        close_timeout_s=close_timeout_s,
        observer=observer,
    )


class Backend(AbstractAsyncContextManager["Backend"]):
    """One driver and the objects that use it: memories, conversations, saved states, sessions, statistics.

    `open_backend` creates a backend by name. Pass a driver to this class to use your own client. Closing a
    backend closes its driver.
    """

    def __init__(  # noqa: PLR0913 -- one for each setting
        self,
        driver: Driver,
        *,
        transforms: Sequence[Transform] = (),
        sealing: Sealing | None = None,
        isolation: MemoryIsolation | None = None,
        limits: Limits | None = None,
        max_summaries: int = MAX_SUMMARIES,
        summaries: Summaries = "process",
        close_timeout_s: float = 10.0,
        observer: Observer = SILENT,
    ) -> None:
        require_count("max_summaries", max_summaries)
        if summaries not in get_args(Summaries):
            raise ConfigurationError("summaries must be one of: process, worker")
        require_seconds("close_timeout_s", close_timeout_s, zero=True)
        if not isinstance(observer, Observer):  # pyright: ignore[reportUnnecessaryIsInstance] -- a user gives it
            raise ConfigurationError(f"observer is an Observer, not {type(observer).__name__}")
        observer = guarded(observer)
        observed = observer.driver(driver)
        sealing = _checked(sealing)
        sealed = _sealed(observed, sealing, observer)
        self._sealing = sealing
        self._sealed = sealed
        self._large = inner = LargeEntries(reporting_denials(sealed or observed, observer))
        guard = Guard(limits, backend=driver.name, reached=partial(_limit_reached, observer))
        self.driver = driver = inner if limits is None else LimitedDriver(inner, guard)
        self._guard = guard
        self._observer = observer
        self._codec = Codec(transforms, observer.function_failed)
        self._directory = Directory(
            driver,
            self._codec,
            seals=Clear(driver) if sealed is None else ReportingSeals(sealed.marks, observer),
        )
        inner.before_parts = self._directory.note_parts
        if sealed is not None:
            sealed.before_replace = self._directory.meet
        self._catalogue = catalogue_on(driver, self._codec, self._directory)
        self._touches = Touches(self._catalogue, observer=observer)
        self._work = WorkQueue(driver, self._codec)
        self._searching = Searching(driver, self._codec, self._directory, self._catalogue)
        self.conversations = Conversations(driver, self._catalogue, reads=self._searching)
        self.state_store = StateStore(driver, self._codec, self._directory, guard, isolation=isolation)
        self._backgrounds = Backgrounds(
            driver,
            self._codec,
            max_summaries=max_summaries,
            work=self._work,
            summaries=summaries,
            observer=observer,
            touches=self._touches,
            transcript_turns=guard.limits.transcript_turns,
            # Turns dropped by the limit would stay in the index until a search, so searches do the indexing.
            filled=self._searching.filled if guard.limits.transcript_turns is None else None,
        )
        self._close_timeout_s = close_timeout_s
        self._home = Home(self._start_over)
        self._start_over()

    @cached_property
    def sessions(self) -> Sessions:
        """The conversations of every tenant and user: listing, exporting, importing, copying, erasing."""
        from stm_backends.admin.sessions import Sessions  # noqa: PLC0415 -- slow, and few processes need it

        return Sessions(
            self.driver,
            self._codec,
            self._directory,
            guard=self._guard,
            erase_keys=None if self._sealing is None else partial(_erase_keys, self._sealing),
            sealed=self._sealed,
            observer=self._observer,
        )

    @cached_property
    def stats(self) -> Stats:
        """Statistics of stored conversations."""
        from stm_backends.admin.stats import Stats  # noqa: PLC0415 -- as above

        return Stats(self.driver, self._codec)

    @property
    def name(self) -> str:
        """The backend's name, as errors and reports show it."""
        return self.driver.name

    @property
    def traits(self) -> Traits:
        """Facts about the datastore: its reach, its limits, its clock."""
        return self.driver.traits

    @property
    def codec(self) -> Codec:
        """The codec of stored values, for code built on this backend."""
        return self._codec

    @property
    def directory(self) -> Directory:
        """The directory of the tenants' users, for code built on this backend."""
        return self._directory

    @property
    def guard(self) -> Guard:
        """The limits of this backend, for code built on it."""
        return self._guard

    @property
    def observer(self) -> Observer:
        """The guarded observer, for code built on this backend."""
        return self._observer

    @property
    def record_traits(self) -> Traits:
        """The limits of one record, less the overhead of sealing; `traits` has those of values in parts."""
        return self._large.inner.traits

    def memory(
        self, key: MemoryKey, config: ConfigLike | None = None, *, summarizer: Summarizer | None = None
    ) -> DistributedShortTermMemory:
        """Return the memory of one conversation, shared with every process that uses the same key.

        Reads and writes nothing. By default, the memory keeps a transcript and a rolling summary; the summary
        and the turns shown take at most 3,000 tokens. Without a `summarizer`, the built-in one writes the
        summary. All memory objects of a conversation share one background. It uses the configuration and the
        summarizer of the newest object that was given a configuration, and ends when the backend is closed.
        Raises `InvalidKey` for an invalid key or one that ends with `#short-term`, and `ConfigurationError`
        for an invalid configuration or summarizer.
        """
        require_dialogue(key)
        return self._conversation(key, config, summarizer)

    def short_term_conversation(
        self, key: MemoryKey, config: ConfigLike | None = None, *, summarizer: Summarizer | None = None
    ) -> DistributedShortTermMemory:
        """Return the conversation with the shared short-term memory of a session, for `tiers`.

        `key` is that of the agent's conversation.
        """
        require_key(key)
        return self._conversation(short_term_of(key), config, summarizer)

    def conversation(
        self,
        tenant: str,
        user: str,
        id: str,  # noqa: A002 -- what it is called
        config: ConfigLike | None = None,
        *,
        summarizer: Summarizer | None = None,
        shape: Shape | str | None = None,
        max_tokens: int | None = None,
    ) -> Conversation:
        """Return a conversation of messages, shared with every process that uses the same three ids.

        Reads and writes nothing. The newest messages are kept in full, as many as fit into `max_tokens` with
        the summary (16,000 tokens by default) and at most 50 turns; a larger `max_tokens` raises that limit.
        A summary covers the older messages. Without a `summarizer`, the built-in one writes it. The history
        has all messages. The record is loaded with each question, so choose what your model is to read.
        `config` sets all of this in detail. `shape` names the message format, if it is not recognized.

        The conversation is that of `memory(MemoryKey(tenant, user, id))`, and shares its background. Raises
        the same errors, and `ConfigurationError` for an unknown shape, or for both `config` and `max_tokens`.
        """
        key = MemoryKey(tenant, user, id)
        require_key(key)
        require_dialogue(key)
        return Conversation(
            self.driver,
            key,
            config,
            summarizer=summarizer,
            shape=shape,
            max_tokens=max_tokens,
            **self._shared(),
        )

    def _conversation(
        self, key: MemoryKey, config: ConfigLike | None, summarizer: Summarizer | None
    ) -> DistributedShortTermMemory:
        return DistributedShortTermMemory(self.driver, key, config, summarizer=summarizer, **self._shared())

    def _shared(self) -> dict[str, Any]:
        """Return the objects that the conversations of this backend share."""
        return {
            "codec": self._codec,
            "directory": self._directory,
            "backgrounds": self._backgrounds,
            "guard": self._guard,
            "observer": self._observer,
        }

    def router(
        self,
        config: ConfigLike | None = None,
        *,
        summarizer: Summarizer | None = None,
        adopt_from: object | None = None,
    ) -> MemoryRouter:
        """Return one memory object for all conversations, for agent frameworks that hold a single one.

        `adopt_from` is a store of states saved by PenguiFlow's memory; it has `load_memory_state(key)`. A
        conversation that this backend lacks is taken over from there when it is first continued, as by
        `Sessions.adopt`. Raises `ConfigurationError` for an invalid configuration, summarizer or store.
        """
        settings, writer = remembering(config, summarizer)
        used = as_config(settings)
        elsewhere = self._backgrounds.leaves_to_workers(used)
        policy.summarizer_for(used, writer, needed=not elsewhere)
        given, adopt = None if config is None else used, None
        if adopt_from is not None:
            adoption = self.sessions.adopting(adopt_from, ttl=used.record_ttl_s)
            adopt = adoption.is_there if used.strategy != "none" else None
        return MemoryRouter(partial(self.memory, config=given, summarizer=summarizer), used, adopt=adopt)

    def worker(
        self,
        config: object | None = None,
        *,
        summarizer: Summarizer | None = None,
        concurrency: int = MAX_SUMMARIES,
        tenants: Collection[str] = (),
        drain_s: float = 25.0,
        on_look: Callable[[], None] | None = None,
    ) -> Worker:
        """Return a worker that summarizes what other processes leave to workers; `await worker.run()` works.

        Any number of workers, in any number of processes, share the work. Without a configuration, each
        conversation is summarized by the settings of the process that uses it, except for functions such as a
        token estimator. Without a summarizer, the built-in one writes. `concurrency` limits the conversations
        at a time, and `max_summaries` of this backend the summarizer calls. With `tenants`, the conversations
        of others are left to other workers. After `worker.stop()`, running jobs may go on for `drain_s`
        seconds. `on_look` is called after each look at the whole queue. Raises `ConfigurationError`.
        """
        require_count("concurrency", concurrency)
        require_seconds("drain_s", drain_s, zero=True)
        given = None
        if config is not None:
            given = replace(checked_config(config, self._observer.function_failed), summaries="process")
        # Nothing else says early that it cannot be called.
        policy.summarizer_for(given or ShortTermMemoryConfig(), summarizer, needed=False)

        async def work(note: Note) -> float | None:
            used = given or config_of(note.settings)
            most = used.budget.summary_max_tokens or SUMMARY_TOKENS
            writer = ExtractiveSummarizer(max_tokens=most) if summarizer is None else summarizer
            return await self._backgrounds.work_through(note, used, writer)

        return Worker(
            self._work,
            work,
            observer=self._observer,
            concurrency=concurrency,
            tenants=tenants,
            drain_s=drain_s,
            on_look=on_look,
        )

    def item_log(self, key: MemoryKey, kind: LogKind, *, ttl_s: float | None = None) -> ItemLog:
        """Return the log of an agent framework's items for one conversation; every process shares it.

        Reads and writes nothing. A log expires `ttl_s` seconds after the last addition; `None` means never.
        Raises `InvalidKey` for an invalid key, and `ConfigurationError` for an unknown `kind`.
        """
        if ttl_s is not None:
            require_seconds("ttl_s", ttl_s)
        return ItemLog(
            self.driver,
            key,
            kind,
            codec=self._codec,
            directory=self._directory,
            guard=self._guard,
            ttl_s=ttl_s,
            # A log that belongs to another one is listed with that one.
            touches=None if is_beside(log_key(key, kind)) else self._touches,
        )

    def tenant_state(self, tenant: str) -> TenantStates:
        """Return the states that belong to a tenant as a whole, rather than to one of its users.

        Reads and writes nothing. Raises `InvalidKey` for a blank tenant.
        """
        return TenantStates(self.driver, self._codec, self._directory, tenant, self._guard)

    async def ping(self, tenant: str | None = None) -> float:
        """Load a record that does not exist, and return how many seconds that took.

        The record belongs to no tenant. A role that may use only one tenant must pass that `tenant`.
        """
        # No user has an empty id, so nothing is stored there.
        key = PING_KEY if tenant is None else Key(directory_scope(tenant), name(""))
        start = time.perf_counter()
        await self.driver.load(key)
        return time.perf_counter() - start

    async def open(self) -> None:
        """Connect to the datastore. Opening twice is harmless; if opening fails, nothing is left open.

        An open backend belongs to this process and the running event loop. Elsewhere, and in a forked
        process, opening and every operation raise `ConfigurationError`, and nothing is sent. Once the event
        loop has ended, the backend can be opened in another one, closed before or not.
        """
        require_event_loop(
            "stm-backends needs an event loop of asyncio, and none runs here; with trio or AnyIO, run the "
            "program on asyncio: anyio.run(main, backend='asyncio')"
        )
        await self._home.open(self._begin, self._close_driver)

    async def _begin(self) -> None:
        await self.driver.open()
        self._backgrounds.open()

    async def _close_driver(self) -> None:
        try:
            await self.driver.close()
        except Exception as error:  # noqa: BLE001 -- the error of opening is raised
            logger.warning("could not close the driver after opening failed: %s", type(error).__name__)

    async def close(self) -> None:
        """Stop the background of every conversation, release the leases, and close the driver.

        Takes no longer than `close_timeout_s` and a few operations. A cancellation ends the waiting for
        summaries; the rest is still done. Closing twice is harmless; a concurrent call waits for the first.

        In a forked process, which has inherited the backend, this does nothing. Raises `ConfigurationError`
        while another event loop uses the backend.
        """
        await self._home.close(self._end)

    async def _end(self) -> None:
        loop = asyncio.get_running_loop()
        until = loop.time() + self._close_timeout_s
        try:
            await self._backgrounds.close(timeout=self._close_timeout_s)
            await self._searching.close(timeout=max(until - loop.time(), 0.0))
            # Last: the background folds until then, which the catalogue shows.
            await self._touches.close(timeout=max(until - loop.time(), LAST_S))
        finally:
            await self.driver.close()

    def _start_over(self) -> None:
        """Create the objects that belong to one event loop."""
        self._backgrounds.start_over()
        self._touches.start_over()
        self._searching.start_over()

    async def __aenter__(self) -> Backend:
        await self.open()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()


def _limit_reached(observer: Observer, whose: Whose, limit: str) -> None:
    observer.limit_reached(Subject(*whose), limit)


async def _erase_keys(sealing: Sealing, tenant: str, user: str) -> int:
    return await sealing.keys.erase(Owner(tenant, user))


def _checked(sealing: Sealing | None) -> Sealing | None:
    """Return the sealing with a source of keys that raises only errors of this library."""
    if sealing is None:
        return None
    if not isinstance(sealing, Sealing):  # pyright: ignore[reportUnnecessaryIsInstance] -- a user gives it
        raise ConfigurationError(f"sealing is a Sealing, not {type(sealing).__name__}")
    from stm_backends.sealing.data_keys import EnvelopeKeys  # noqa: PLC0415 -- only sealing needs it
    from stm_backends.sealing.guarded import guarded_source  # noqa: PLC0415 -- as above

    ours = type(sealing.keys) in (StaticKeys, EnvelopeKeys)  # not classes that users derive from them
    return sealing if ours else replace(sealing, keys=guarded_source(sealing.keys))


def _sealed(driver: Driver, sealing: Sealing | None, observer: Observer) -> SealedDriver | None:
    """Wrap the driver in a sealing one, if `sealing` is given. Raises `MissingExtra` without `encryption`."""
    if sealing is None:
        return None
    from stm_backends.sealing.driver import SealedDriver  # noqa: PLC0415 -- needs the extra

    return SealedDriver(driver, sealing, clear_met=observer.clear_text_met)
