# pip install ".[otel]" opentelemetry-sdk && python examples/telemetry.py
"""Print spans and metrics of a conversation. Your program would send them to a collector."""

import asyncio

from stm_backends import ConversationTurn, MemoryKey, ShortTermMemoryConfig, open_backend
from stm_backends.agents import resolve_memory_key

try:
    from opentelemetry import metrics, trace
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import ConsoleMetricExporter, PeriodicExportingMetricReader
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SimpleSpanProcessor
except ModuleNotFoundError:
    raise SystemExit('this example needs OpenTelemetry: pip install ".[otel]" opentelemetry-sdk') from None

from stm_backends.telemetry.opentelemetry import Telemetry

KEY = MemoryKey("acme", "u123", "chat_001")
CONFIG = ShortTermMemoryConfig(strategy="truncation", transcript=True)


def as_line(span) -> str:
    """Return the parts of a span that are the same in each run."""
    return f"span {span.name} {dict(span.attributes)}\n"


def as_lines(data) -> str:
    """Return each metric with its sum; for a histogram its count, for a gauge its value."""
    lines = ""
    for metric in data.resource_metrics[0].scope_metrics[0].metrics:
        points = [getattr(point, "count", getattr(point, "value", 0)) for point in metric.data.data_points]
        lines += f"metric {metric.name} {sum(points)} {metric.unit}\n"
    return lines


def set_up() -> None:
    """Set up the SDK, as a program does once."""
    tracers = TracerProvider()
    tracers.add_span_processor(SimpleSpanProcessor(ConsoleSpanExporter(formatter=as_line)))
    trace.set_tracer_provider(tracers)
    metrics.set_meter_provider(
        MeterProvider([PeriodicExportingMetricReader(ConsoleMetricExporter(formatter=as_lines))])
    )


async def main() -> None:
    telemetry = Telemetry()
    async with open_backend("memory://", observer=telemetry) as backend:
        memory = backend.memory(KEY, CONFIG)
        await memory.add_turn(ConversationTurn("a table for two", "Done."))
        await memory.get_llm_context()

        # A call without a session has no memory, and is counted.
        print(resolve_memory_key({"user_id": "u123"}, CONFIG.isolation, observer=telemetry))


set_up()
asyncio.run(main())
trace.get_tracer_provider().shutdown()
metrics.get_meter_provider().shutdown()

# span load {'db.system.name': 'memory', 'db.operation.name': 'load'}
# span load {'db.system.name': 'memory', 'db.operation.name': 'load'}
# span replace {'db.system.name': 'memory', 'db.operation.name': 'replace'}
# span append {'db.system.name': 'memory', 'db.operation.name': 'append'}
# span stm.add_turn {}
# span load {'db.system.name': 'memory', 'db.operation.name': 'load'}
# span stm.get_llm_context {}
# None
# span load {'db.system.name': 'memory', 'db.operation.name': 'load'}
# span load {'db.system.name': 'memory', 'db.operation.name': 'load'}
# span load {'db.system.name': 'memory', 'db.operation.name': 'load'}
# span replace {'db.system.name': 'memory', 'db.operation.name': 'replace'}
# span replace {'db.system.name': 'memory', 'db.operation.name': 'replace'}
# span load {'db.system.name': 'memory', 'db.operation.name': 'load'}
# span load {'db.system.name': 'memory', 'db.operation.name': 'load'}
# span stm.background {}
# metric db.client.operation.duration 12 s
# metric stm.turns.appended 1 {turn}
# metric stm.context.tokens 18 {token}
# metric stm.key_resolution.failures 1 {failure}
# metric stm.catalogue.written 1 {touch}
