"""Spans with what a decision cost, and the trace handed on."""

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from hotspan.router.policy import Decision
from hotspan.router.tracing import endpoint_of, no_tracer, open_tracer
from hotspan.router.types import Strategy
from hotspan.testing.clock import SimulatedClock

from .rig import replicas, routed, say, say_ok

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_a_span_has_the_costs_and_continues_the_trace() -> None:
    """The span is the client's trace's child, replicas are told the span, and costs are attributes in seconds."""
    exporter = InMemorySpanExporter()
    tracer, end = open_tracer("http://unused", exporter=exporter)
    span = tracer("/v1/completions", [(b"traceparent", PARENT.encode())])
    span.decided(Decision("http://r", 0, {"prefill": 0.5, "queue": 0.25}, 128, 0.0, True, Strategy.AUTO), 1)
    span.end("ok", 200)
    end()
    (made,) = exporter.get_finished_spans()
    assert made.context.trace_id == int(PARENT.split("-")[1], 16) and made.parent.span_id == int(
        PARENT.split("-")[2], 16
    )
    assert span.carried == {"traceparent": f"00-{made.context.trace_id:032x}-{made.context.span_id:016x}-01"}
    assert made.attributes["hotspan.cost.prefill_s"] == 0.5 and made.attributes["hotspan.cached_tokens"] == 128
    assert made.attributes["hotspan.outcome"] == "ok" and made.attributes["hotspan.replica"] == "http://r"


async def test_the_gateway_traces_and_counts_what_its_decisions_cost() -> None:
    """A request's span is what its replica is told of, with the costs of its last decision; the metric has each's."""
    exporter = InMemorySpanExporter()
    tracer, end = open_tracer("http://unused", exporter=exporter)
    body = {"prompt": "a long text " * 1000}
    async with replicas(say_ok, say(503)) as fakes, routed(fakes, tracer=tracer, clock=SimulatedClock()) as at:
        asked = 0
        while not fakes[1].works:  # the first that comes to the ill replica is tried again at the other one
            asked += 1
            assert asked < 100
            assert (
                await at.status(body | {"prompt": f"{asked} {body['prompt']}"}, headers={"traceparent": PARENT}) == 200
            )
        prefill_s = await at.metric("decision_cost_seconds_sum", term="prefill")
        count = await at.metric("decision_cost_seconds_count", term="prefill")
        told = fakes[0].asked[-1][2]["traceparent"]
        assert await at.metric("decision_cost_seconds_count", term="load") == 0
    end()
    spans = exporter.get_finished_spans()
    assert len(spans) == asked and count == asked + 1
    last = spans[-1]
    assert told == f"00-{last.context.trace_id:032x}-{last.context.span_id:016x}-01"
    assert f"{last.context.trace_id:032x}" == PARENT.split("-")[1]
    assert last.attributes["hotspan.replica"] == fakes[0].url and last.attributes["hotspan.attempt"] == 2
    assert last.attributes["hotspan.outcome"] == "ok" and last.attributes["http.response.status_code"] == 200
    costs_s = [span.attributes["hotspan.cost.prefill_s"] for span in spans]
    assert min(costs_s) > 0.05
    assert sum(costs_s) < prefill_s <= sum(costs_s) + 2 * max(costs_s)


def test_without_an_endpoint_nothing_is_traced() -> None:
    """Nobody traces: what the client sent is handed on as it is."""
    assert no_tracer("/", [(b"traceparent", PARENT.encode())]).carried is None
    assert endpoint_of(None, {}) is None


async def test_a_clients_trace_is_handed_on_as_it_is_where_nobody_traces() -> None:
    """Parent and state."""
    async with replicas(say_ok) as fakes, routed(fakes) as at:
        assert await at.status({"prompt": "x"}, headers={"traceparent": PARENT, "tracestate": "a=1"}) == 200
        told = fakes[0].asked[-1][2]
    assert (told["traceparent"], told["tracestate"]) == (PARENT, "a=1")


async def test_the_state_of_a_trace_goes_with_its_parent() -> None:
    """The state of the client's trace is handed on with the router's span; without a parent there is none."""
    tracer, end = open_tracer("http://unused", exporter=InMemorySpanExporter())
    async with replicas(say_ok) as fakes, routed(fakes, tracer=tracer) as at:
        for headers in ({"traceparent": PARENT, "tracestate": "a=1,b=2"}, {"tracestate": "a=1"}):
            assert await at.status({"prompt": "x"}, headers=headers) == 200
        first, second = (asked[2] for asked in fakes[0].asked[-2:])
    end()
    assert first["tracestate"] == "a=1,b=2" and first["traceparent"].split("-")[1] == PARENT.split("-")[1]
    assert "tracestate" not in second and second["traceparent"].split("-")[1] != PARENT.split("-")[1]


def test_two_parents_are_none() -> None:
    """A request with two of them begins a trace of its own; several states are one list."""
    exporter = InMemorySpanExporter()
    tracer, end = open_tracer("http://unused", exporter=exporter)
    parent, states = (b"traceparent", PARENT.encode()), [(b"tracestate", b"a=1"), (b"tracestate", b"b=2")]
    tracer("/two", [parent, parent]).end("ok", 200)
    span = tracer("/states", [parent, *states])
    span.end("ok", 200)
    end()
    two, _ = exporter.get_finished_spans()
    assert two.parent is None and span.carried is not None and span.carried["tracestate"] == "a=1,b=2"


def test_opentelemetrys_own_variables_count() -> None:
    """They name the endpoint where the option does not, and the service; they can turn it off."""
    base = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318/"}
    assert endpoint_of("http://o:4318", base) == "http://o:4318/v1/traces"
    assert endpoint_of(None, base) == "http://c:4318/v1/traces"
    assert endpoint_of(None, base | {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://t/x"}) == "http://t/x"
    assert endpoint_of(None, base | {"OTEL_SDK_DISABLED": "true"}) is None
    for variables, name in (
        ({}, "hotspan.router"),
        ({"OTEL_SERVICE_NAME": "front"}, "front"),
        ({"OTEL_RESOURCE_ATTRIBUTES": "a=b,service.name=front"}, "front"),
    ):
        exporter = InMemorySpanExporter()
        with pytest.MonkeyPatch.context() as patched:
            for variable, value in variables.items():
                patched.setenv(variable, value)
            tracer, end = open_tracer("http://unused", variables, exporter)
        tracer("/", []).end("ok", 200)
        end()
        assert exporter.get_finished_spans()[0].resource.attributes["service.name"] == name
