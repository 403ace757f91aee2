"""OpenTelemetry: a span and a duration for each operation of the datastore, and the counts of the memories.

```python
from stm_backends.telemetry.opentelemetry import Telemetry

async with open_backend("sqlite:///memory.db", observer=Telemetry()) as backend: ...
```

It needs only the API package (extra `otel`), which does nothing until your program sets up an SDK.
`docs/how-to/telemetry.md` lists names and attributes; those of datastore operations follow the semantic
conventions. Spans and metrics contain no text of a conversation, no id, no key and no message of an error,
only the name of its class.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Final, TypeVar

from stm_backends.drivers.contract import Driver, Key
from stm_backends.drivers.wrapper import Operation, WrapperDriver
from stm_backends.extras import missing_extra
from stm_backends.handed_in import kind_of
from stm_backends.telemetry.observer import (
    KeyPart,
    MemoryEvent,
    Observer,
    Subject,
    TouchEvent,
    TurnEvent,
    WorkEvent,
)
from stm_backends.types import MemoryHealth

try:
    from opentelemetry import metrics, trace
    from opentelemetry.context import Context
    from opentelemetry.metrics import MeterProvider
    from opentelemetry.trace import Link, Span, SpanKind, StatusCode, TracerProvider
except ModuleNotFoundError as error:
    raise missing_extra("otel", error) from error

if TYPE_CHECKING:
    from stm_backends.records.pages import PageEvent

T = TypeVar("T")

SCHEMA_URL: Final = "https://opentelemetry.io/schemas/1.44.0"

SYSTEMS: Final = {"postgres": "postgresql", "mongo": "mongodb", "dynamo": "aws.dynamodb"}
"""The names of datastores in the semantic conventions, if they differ from the driver's."""

SECONDS: Final = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0)
"""The buckets that the semantic conventions recommend for `db.client.operation.duration`."""


class Telemetry(Observer):
    """Reports the work of backends and memories to OpenTelemetry; one instance may serve them all.

    Uses the program's global providers unless others are given.
    """

    def __init__(
        self, *, tracer_provider: TracerProvider | None = None, meter_provider: MeterProvider | None = None
    ) -> None:
        self._tracer = trace.get_tracer("stm_backends", version("stm-backends"), tracer_provider, SCHEMA_URL)
        meter = metrics.get_meter("stm_backends", version("stm-backends"), meter_provider, SCHEMA_URL)
        self._duration = meter.create_histogram(
            "db.client.operation.duration",
            "s",
            "Duration of database client operations.",
            explicit_bucket_boundaries_advisory=SECONDS,
        )
        self._turns = {
            "appended": meter.create_counter("stm.turns.appended", "{turn}", "Turns that were stored."),
            "folded": meter.create_counter("stm.turns.folded", "{turn}", "Turns that a summary covers now."),
            "moved": meter.create_counter(
                "stm.turns.moved", "{turn}", "Turns moved to pages before a summary covers them."
            ),
            "caught_up": meter.create_counter(
                "stm.turns.caught_up", "{turn}", "Turns that no longer wait in pages for a summary."
            ),
            "dropped": meter.create_counter(
                "stm.turns.dropped", "{turn}", "Turns dropped without a summary, beyond the recovery backlog."
            ),
        }
        self._pages = {
            "written": meter.create_counter(
                "stm.pages.written", "{page}", "Pages of transcripts that were written or added to."
            ),
            "read": meter.create_counter(
                "stm.pages.read", "{page}", "Pages of transcripts that were read for their turns."
            ),
        }
        self._touches = {
            "written": meter.create_counter(
                "stm.catalogue.written", "{touch}", "Activities of conversations written to the catalogue."
            ),
            "lost": meter.create_counter(
                "stm.catalogue.lost", "{touch}", "Activities that the catalogue does not show, after errors."
            ),
        }
        self._work = {
            "noted": meter.create_counter(
                "stm.work.noted", "{note}", "Notes for a worker that a conversation has work."
            ),
            "lost": meter.create_counter(
                "stm.work.lost", "{note}", "Notes for a worker that could not be stored."
            ),
            "done": meter.create_counter(
                "stm.work.done", "{job}", "Jobs of a worker after which nothing was left to do."
            ),
            "later": meter.create_counter(
                "stm.work.later", "{job}", "Jobs of a worker that wait for a retry, or have more to do."
            ),
        }
        self._work_waiting = meter.create_gauge(
            "stm.work.waiting", "{job}", "Jobs in the queue of work, as a worker last read it."
        )
        self._work_lag = meter.create_gauge(
            "stm.work.lag", "s", "For how long the oldest job in the queue of work has been due."
        )
        self._lost_races = meter.create_counter(
            "stm.summary.lost_races",
            "{race}",
            "Summaries and trims that were discarded because another process wrote first.",
        )
        self._summarizer_errors = meter.create_counter(
            "stm.summarizer.errors", "{error}", "Summarizer calls that failed."
        )
        self._function_errors = meter.create_counter(
            "stm.functions.errors",
            "{error}",
            "Calls of other functions that were handed in which failed, such as a token estimator.",
        )
        self._transitions = meter.create_counter(
            "stm.health.transitions", "{transition}", "Changes of a conversation's health."
        )
        self._unresolved = meter.create_counter(
            "stm.key_resolution.failures",
            "{failure}",
            "Calls without a memory, because an id was missing or unusable.",
        )
        self._clear_text = meter.create_counter(
            "stm.sealing.clear_text", "{value}", "Values that were read without being sealed."
        )
        self._memories = {
            "promoted": meter.create_counter(
                "stm.memories.promoted", "{entry}", "Entries of a session that long-term memory received."
            ),
            "pruned": meter.create_counter(
                "stm.memories.pruned",
                "{entry}",
                "Entries that were removed as irrelevant or stale, or for room.",
            ),
            "merged": meter.create_counter(
                "stm.memories.merged", "{entry}", "Entries that were merged into one that they duplicate."
            ),
            "truncated": meter.create_counter(
                "stm.memories.truncated", "{summary}", "Summaries that are cut text because the model failed."
            ),
            "uncounted": meter.create_counter(
                "stm.memories.uncounted", "{entry}", "Entries that were read without counting the access."
            ),
        }
        self._erased = meter.create_counter("stm.records.erased", "{record}", "Records that were erased.")
        self._purged = meter.create_counter(
            "stm.records.purged",
            "{record}",
            "Conversations and logs that a purge emptied because of their age.",
        )
        self._copied = meter.create_counter(
            "stm.records.copied", "{record}", "Records that were copied to another datastore."
        )
        self._exported = meter.create_counter(
            "stm.conversations.exported", "{conversation}", "Conversations that were exported."
        )
        self._imported = meter.create_counter(
            "stm.conversations.imported", "{conversation}", "Exported conversations that were imported."
        )
        self._denied = meter.create_counter(
            "stm.operations.denied", "{operation}", "Operations that were refused for lack of permission."
        )
        self._limits = meter.create_counter(
            "stm.limits.reached", "{refusal}", "Turns and conversations that were refused, by the limit."
        )
        self._tokens = meter.create_gauge(
            "stm.context.tokens", "{token}", "Estimated tokens of the context that was shown last."
        )

    def driver(self, driver: Driver) -> Driver:
        return ObservedDriver(driver, self)

    @contextmanager
    def operation(self, name: str, system: str) -> Generator[None]:
        """Trace and time one operation of a datastore."""
        attributes = {"db.system.name": system, "db.operation.name": name}
        began = time.perf_counter()
        try:
            with self._span(name, kind=SpanKind.CLIENT, attributes=attributes):
                yield
        except BaseException as error:
            attributes["error.type"] = _kind(error)
            raise
        finally:
            self._duration.record(time.perf_counter() - began, attributes)

    def call(self, name: str) -> AbstractContextManager[object]:
        return self._span(f"stm.{name}")

    def background(self) -> AbstractContextManager[object]:
        # The call that started it has ended, and its trace with it, so this is a new trace with a link.
        starter = trace.get_current_span().get_span_context()
        return self._span(
            "stm.background", context=Context(), links=[Link(starter)] if starter.is_valid else None
        )

    def turns(self, event: TurnEvent, count: int) -> None:
        self._turns[event].add(count)

    def pages(self, event: PageEvent, count: int) -> None:
        self._pages[event].add(count)

    def touches(self, event: TouchEvent, count: int) -> None:
        self._touches[event].add(count)

    def work(self, event: WorkEvent, count: int) -> None:
        self._work[event].add(count)

    def work_waits(self, count: int, lag: float) -> None:
        self._work_waiting.set(count)
        self._work_lag.set(lag)

    def race_lost(self) -> None:
        self._lost_races.add(1)

    def clear_text_met(self) -> None:
        self._clear_text.add(1)

    def summarizer_failed(self, error: Exception) -> None:
        self._summarizer_errors.add(1, {"error.type": kind_of(error)})

    def function_failed(self, function: str, error: BaseException) -> None:
        self._function_errors.add(1, {"stm.function": function, "error.type": kind_of(error)})

    def health_changed(self, old: MemoryHealth, new: MemoryHealth) -> None:
        self._transitions.add(1, {"stm.health.from": old.value, "stm.health.to": new.value})

    def context_shown(self, tokens: Callable[[], int]) -> None:
        self._tokens.set(tokens())

    def key_unresolved(self, part: KeyPart) -> None:
        self._unresolved.add(1, {"stm.key.part": part})

    def memories(self, event: MemoryEvent, tier: str, count: int) -> None:
        self._memories[event].add(count, {"stm.tier": tier})

    def erased(self, subject: Subject, records: int) -> None:
        self._erased.add(records)

    def purged(self, subject: Subject, records: int) -> None:
        self._purged.add(records)

    def exported(self, subject: Subject) -> None:
        self._exported.add(1)

    def imported(self, subject: Subject) -> None:
        self._imported.add(1)

    def copied(self, subject: Subject, records: int) -> None:
        self._copied.add(records)

    def denied(self, subject: Subject, operation: str) -> None:
        self._denied.add(1, {"db.operation.name": operation})

    def limit_reached(self, subject: Subject, limit: str) -> None:
        self._limits.add(1, {"stm.limit": limit})

    @contextmanager
    def _span(self, name: str, **options: Any) -> Generator[Span]:
        # The SDK would record the message and the stack trace of an exception.
        with self._tracer.start_as_current_span(
            name, record_exception=False, set_status_on_exception=False, **options
        ) as span:
            try:
                yield span
            except BaseException as error:
                span.set_attribute("error.type", _kind(error))
                if isinstance(error, Exception):
                    # A cancellation is not a failure.
                    span.set_status(StatusCode.ERROR)
                raise


class ObservedDriver(WrapperDriver):
    """A driver that traces and times each operation of the driver within."""

    def __init__(self, inner: Driver, telemetry: Telemetry) -> None:
        super().__init__(inner)
        self._telemetry = telemetry
        self._system = SYSTEMS.get(inner.name, inner.name)

    async def call(self, operation: Operation, key: Key | str, send: Callable[[], Awaitable[T]]) -> T:
        with self._telemetry.operation(operation, self._system):
            return await send()


def _kind(error: BaseException) -> str:
    return type(error).__qualname__
