"""Spans with what a decision cost, and the trace handed on."""

import pytest

from hotspan.router.policy import Decision
from hotspan.router.tracing import no_tracer, open_tracer
from hotspan.router.types import Strategy

export = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_a_span_has_the_costs_and_continues_the_trace() -> None:
    """The span is the client's trace's child, replicas are told the span, and costs are attributes in seconds."""
    exporter = export.InMemorySpanExporter()
    tracer, end = open_tracer("http://unused", exporter)
    span = tracer("/v1/completions", {"traceparent": PARENT})
    span.decided(Decision("http://r", 0, {"prefill": 0.5, "queue": 0.25}, 128, 0.0, True, Strategy.AUTO), 1)
    span.end("ok", 200)
    end()
    (made,) = exporter.get_finished_spans()
    assert made.context.trace_id == int(PARENT.split("-")[1], 16) and made.parent.span_id == int(
        PARENT.split("-")[2], 16
    )
    assert span.traceparent == f"00-{made.context.trace_id:032x}-{made.context.span_id:016x}-01"
    assert made.attributes["hotspan.cost.prefill_s"] == 0.5 and made.attributes["hotspan.cached_tokens"] == 128
    assert made.attributes["hotspan.outcome"] == "ok" and made.attributes["hotspan.replica"] == "http://r"


def test_without_an_endpoint_nothing_is_traced() -> None:
    """Nobody traces: what the client sent is handed on as it is."""
    span = no_tracer("/", {"traceparent": PARENT})
    assert span.traceparent is None
