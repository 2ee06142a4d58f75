"""A span for each request, with what its decision cost by term, if OpenTelemetry is there and an endpoint is given."""

from collections.abc import Callable, Mapping
from typing import Any

from hotspan.core.errors import ConfigError
from hotspan.http.exchange import RawHeaders
from hotspan.router.policy import Decision

_NAME = "hotspan.router"


class Span:
    """One request's; without a span of OpenTelemetry's it does nothing.

    carried: W3C headers that replicas are told; None hands on what the client sent.
    """

    __slots__ = ("_span", "carried")

    def __init__(self, span: Any = None, carried: Mapping[str, str] | None = None) -> None:
        self._span = span
        self.carried = carried

    def decided(self, decision: Decision, attempt: int) -> None:
        """A replica was chosen."""
        if self._span is None:
            return
        costs = {f"hotspan.cost.{term}_s": seconds for term, seconds in decision.costs.items()}
        self._span.set_attributes(
            {
                "hotspan.replica": decision.name,
                "hotspan.strategy": decision.strategy.value,
                "hotspan.cached_tokens": decision.cached_tokens,
                "hotspan.session_bound": decision.session_bound,
                "hotspan.attempt": attempt,
                **costs,
            }
        )

    def end(self, outcome: str, status: int) -> None:
        """The request is over."""
        if self._span is not None:
            self._span.set_attributes({"hotspan.outcome": outcome, "http.response.status_code": status})
            self._span.end()


Tracer = Callable[[str, RawHeaders], Span]
"""Path and headers -> a span that has begun."""

_NO_SPAN = Span()


def no_tracer(path: str, headers: RawHeaders) -> Span:
    """Spans that do nothing."""
    return _NO_SPAN


def endpoint_of(option: str | None, variables: Mapping[str, str]) -> str | None:
    """Where spans go: as --otlp-endpoint says, else as OpenTelemetry's own variables; None if nowhere."""
    if option:
        return f"{option.rstrip('/')}/v1/traces"
    if variables.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    if traces := variables.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"):
        return traces
    base = variables.get("OTEL_EXPORTER_OTLP_ENDPOINT")
    return f"{base.rstrip('/')}/v1/traces" if base else None


def open_tracer(
    endpoint: str, variables: Mapping[str, str] | None = None, exporter: Any = None
) -> tuple[Tracer, Callable[[], None]]:
    """A tracer whose spans go to an OTLP/HTTP endpoint, and what ends it: the last spans are sent.

    variables: OpenTelemetry's; a service name in them is kept.
    exporter:  takes the spans instead of the endpoint.
    Raises:    ConfigError if OpenTelemetry is not installed.
    """
    try:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace import SpanKind, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        if exporter is None:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

            exporter = OTLPSpanExporter(endpoint=endpoint)
    except ImportError as error:
        raise ConfigError("--otlp-endpoint needs OpenTelemetry: pip install 'hotspan[otel]'") from error
    variables = variables or {}
    is_named = bool(variables.get("OTEL_SERVICE_NAME")) or "service.name=" in variables.get(
        "OTEL_RESOURCE_ATTRIBUTES", ""
    )
    provider = TracerProvider(resource=Resource.create({} if is_named else {"service.name": _NAME}))
    provider.add_span_processor(BatchSpanProcessor(exporter))
    made, propagator = provider.get_tracer(_NAME), TraceContextTextMapPropagator()

    def begin(path: str, headers: RawHeaders) -> Span:
        span = made.start_span(path, context=propagator.extract(_context(headers)), kind=SpanKind.SERVER)
        carried: dict[str, str] = {}
        propagator.inject(carried, set_span_in_context(span))
        return Span(span, carried)

    return begin, provider.shutdown


def _context(headers: RawHeaders) -> dict[str, str]:
    """The client's trace: its parent and all of its state. Two parents are none, as W3C's text has it."""
    parents = [value.decode("latin-1") for name, value in headers if name == b"traceparent"]
    states = [value.decode("latin-1") for name, value in headers if name == b"tracestate"]
    return {"traceparent": parents[0], "tracestate": ",".join(states)} if len(parents) == 1 else {}
