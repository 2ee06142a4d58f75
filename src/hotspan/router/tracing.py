"""A span for each request, with what its decision cost by term, if OpenTelemetry is there and an endpoint is given."""

from collections.abc import Callable
from typing import Any

from hotspan.core.errors import ConfigError
from hotspan.router.policy import Decision

_NAME = "hotspan.router"


class Span:
    """One request's; without a span of OpenTelemetry's it does nothing.

    traceparent: what replicas are told; None hands on what the client sent.
    """

    __slots__ = ("_span", "traceparent")

    def __init__(self, span: Any = None) -> None:
        self._span = span
        self.traceparent: str | None = None
        if span is not None:
            context = span.get_span_context()
            flags = int(context.trace_flags)
            self.traceparent = f"00-{context.trace_id:032x}-{context.span_id:016x}-{flags:02x}"

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


Tracer = Callable[[str, dict[str, str]], Span]
"""Path and headers -> a span that has begun."""

_NO_SPAN = Span()


def no_tracer(path: str, headers: dict[str, str]) -> Span:
    """Spans that do nothing."""
    return _NO_SPAN


def open_tracer(endpoint: str, exporter: Any = None) -> tuple[Tracer, Callable[[], None]]:
    """A tracer whose spans go to an OTLP/HTTP endpoint, and what ends it: the last spans are sent.

    exporter: takes the spans instead of the endpoint.
    Raises:   ConfigError if OpenTelemetry is not installed.
    """
    try:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        if exporter is None:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

            exporter = OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces")
    except ImportError as error:
        raise ConfigError(
            "--otlp-endpoint needs OpenTelemetry: pip install opentelemetry-sdk opentelemetry-exporter-otlp-proto-http"
        ) from error
    provider = TracerProvider(resource=Resource.create({"service.name": _NAME}))
    provider.add_span_processor(BatchSpanProcessor(exporter))
    made, propagator = provider.get_tracer(_NAME), TraceContextTextMapPropagator()

    def begin(path: str, headers: dict[str, str]) -> Span:
        parent = propagator.extract(headers) if "traceparent" in headers else None
        return Span(made.start_span(path, context=parent))

    return begin, provider.shutdown
