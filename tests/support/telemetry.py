"""A `Telemetry` and all that it exports. Needs OpenTelemetry's SDK."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from stm_backends.telemetry.observer import Subject
from stm_backends.telemetry.opentelemetry import Telemetry
from stm_backends.types import MemoryHealth


class Ear:
    """A `Telemetry` and all that it exports."""

    def __init__(self) -> None:
        self._exporter, self._reader = InMemorySpanExporter(), InMemoryMetricReader()
        self.tracers, self.meters = TracerProvider(), MeterProvider([self._reader])
        self.tracers.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.telemetry = Telemetry(tracer_provider=self.tracers, meter_provider=self.meters)

    @property
    def spans(self) -> list[ReadableSpan]:
        return list(self._exporter.get_finished_spans())

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.spans if span.name == name]

    def points(self) -> dict[str, list[tuple[dict[str, Any], Any]]]:
        """Return each metric's points: their attributes, and their value or count."""
        return {
            metric.name: [
                (dict(point.attributes or {}), getattr(point, "value", getattr(point, "count", None)))
                for point in metric.data.data_points
            ]
            for metric in self.metrics()
        }

    def metrics(self) -> list[Any]:
        data = self._reader.get_metrics_data()
        resources = data.resource_metrics if data else []
        return [
            metric for resource in resources for scope in resource.scope_metrics for metric in scope.metrics
        ]

    def exported(self) -> str:
        """Return all of it, as text."""
        return "".join(span.to_json() for span in self.spans) + json.dumps(
            [json.loads(metric.to_json()) for metric in self.metrics()]
        )


def use_every_instrument(telemetry: Telemetry) -> None:
    """Record something with each instrument and each attribute."""
    with suppress(LookupError), telemetry.operation("load", "sqlite"):
        raise LookupError
    for event in ("appended", "folded", "moved", "caught_up", "dropped"):
        telemetry.turns(event, 1)
    telemetry.pages("written", 1)
    telemetry.pages("read", 1)
    telemetry.touches("written", 1)
    telemetry.touches("lost", 1)
    for event in ("noted", "lost", "done", "later"):
        telemetry.work(event, 1)
    telemetry.work_waits(1, 0.5)
    for event in ("promoted", "pruned", "merged", "truncated", "uncounted"):
        telemetry.memories(event, "long_term", 1)
    telemetry.race_lost()
    telemetry.clear_text_met()
    telemetry.summarizer_failed(LookupError())
    telemetry.function_failed("token_estimator", LookupError())
    telemetry.health_changed(MemoryHealth.HEALTHY, MemoryHealth.RETRY)
    telemetry.context_shown(lambda: 1)
    telemetry.key_unresolved("session")
    subject = Subject("acme", "ada", "trip")
    telemetry.erased(subject, 1)
    telemetry.purged(subject, 1)
    telemetry.exported(subject)
    telemetry.imported(subject)
    telemetry.copied(subject, 1)
    telemetry.denied(subject, "load")
    telemetry.limit_reached(subject, "turn_chars")
