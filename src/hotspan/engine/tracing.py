"""OpenTelemetry spans of requests, in one trace with vLLM's: `--otlp-traces-endpoint` turns on both.

    the client's or the router's span
      \\-> hotspan.request    the server: from where vLLM's route hands the prompt over to the last token
            |-> llm_request  vLLM's own
            |-> hotspan.cache    the scheduler: look-up, what was chosen and why, and the wait for it
            |     \\-> hotspan.load    the copy from RAM to the engine's blocks
            \\-> hotspan.prefill  what was computed of the prompt

Spans are made from times that were noted, when they are over. They have numbers, and no text, tenant or tag. Without an
endpoint nothing imports this module.
"""

from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from hotspan.cache.choice import Choice
from hotspan.cache.tiered import TieredCache
from hotspan.core.clock import Clock
from hotspan.engine.requests import RequestRecord
from hotspan.engine.watching import RequestWatcher

_PROPAGATOR = TraceContextTextMapPropagator()

Generate = Callable[[Mapping[str, str]], AsyncGenerator[Any, None]]
"""Begins a request under these W3C headers."""


class RequestTracing:
    """The server's. vLLM has set up the provider by now: exporter, protocol and resource are as its options say."""

    def __init__(self, tracer: Tracer | None = None) -> None:
        self._tracer = tracer or trace.get_tracer("hotspan.server")

    async def followed(self, generate: Generate, headers: Mapping[str, str] | None) -> AsyncGenerator[Any, None]:
        """The outputs of one request, within a span whose parent is in the headers, if there is one."""
        span = self._tracer.start_span(
            "hotspan.request", context=_PROPAGATOR.extract(dict(headers or {})), kind=SpanKind.SERVER
        )
        carried: dict[str, str] = {}
        _PROPAGATOR.inject(carried, trace.set_span_in_context(span))
        output = None
        try:
            async with aclosing(generate(carried)) as outputs:
                async for output in outputs:
                    yield output
        except Exception as error:
            span.set_status(Status(StatusCode.ERROR, type(error).__name__))
            raise
        finally:
            if output is not None:
                span.set_attribute("hotspan.prompt_tokens", len(output.prompt_token_ids or ()))
                span.set_attribute("hotspan.cached_tokens", output.num_cached_tokens or 0)
            span.end()


@dataclass(slots=True)
class _Times:
    """What is noted of one request. Times in seconds (monotonic). is_loading: its chunks are being copied."""

    parent: Context
    admitted_s: float
    choice: Choice | None = None
    found_chunks: int = 0
    begun_s: float | None = None
    cache_span: Span | None = None
    computes_from_s: float = 0.0
    is_loading: bool = False


class CacheTracing(RequestWatcher):
    """The scheduler's, of requests that came with a trace. The manager calls it."""

    def __init__(self, cache: TieredCache, clock: Clock, tracer: Tracer | None = None) -> None:
        self._cache = cache
        self._clock = clock
        self._tracer = tracer or trace.get_tracer("hotspan.cache")
        self._open: dict[str, tuple[RequestRecord, _Times]] = {}

    def admit(self, record: RequestRecord) -> None:
        """A request came."""
        if headers := getattr(record.request, "trace_headers", None):
            times = _Times(_PROPAGATOR.extract(dict(headers)), self._clock.monotonic())
            self._open[record.request.request_id] = record, times

    def choose(self, record: RequestRecord) -> None:
        """What a request is to load was decided."""
        _, times = self._open.get(record.request.request_id, (None, None))
        if times is None or record.plan is None:
            return
        chain = record.plan.chain
        times.choice = record.plan.choice
        times.found_chunks = next((n for n, each in enumerate(chain) if not self._cache.where(each.key)), len(chain))

    def begin(self, record: RequestRecord) -> None:
        """The engine has begun with a request: its look-up and its wait are over."""
        _, times = self._open.get(record.request.request_id, (None, None))
        if times is None:
            return
        times.begun_s = times.computes_from_s = self._clock.monotonic()
        times.is_loading = record.loaded_tokens > 0
        engine_tokens = record.kept_tokens - record.loaded_tokens
        promoted = Counter(f"hotspan.promoted_chunks.{tier.value}" for tier in record.promoted.values())
        times.cache_span = self._span(
            "hotspan.cache",
            times.parent,
            times.admitted_s,
            times.begun_s,
            {
                "hotspan.prompt_tokens": record.request.num_prompt_tokens,
                "hotspan.engine_tokens": engine_tokens,
                "hotspan.loaded_tokens": record.loaded_tokens,
                "hotspan.was_late": record.cut,
                **promoted,
                **_reasons(times),
            },
        )

    def load(self, record: RequestRecord, load_s: float, size: int) -> None:
        """A request's chunks were copied in the last `load_s` seconds."""
        _, times = self._open.get(record.request.request_id, (None, None))
        if times is None:
            return
        times.computes_from_s = now_s = self._clock.monotonic()
        times.is_loading = False
        parent = times.parent if times.cache_span is None else trace.set_span_in_context(times.cache_span)
        fields = {"hotspan.bytes": size, "hotspan.tokens": record.loaded_tokens}
        self._span("hotspan.load", parent, now_s - load_s, now_s, fields)
        if record.request.is_finished():
            self._prefilled([record])

    def step(self) -> None:
        """A step is about to be scheduled: requests that have a token, or ended, have computed their prompts."""
        requests = ((record, record.request) for record, _ in self._open.values())
        self._prefilled(record for record, each in requests if each.num_output_tokens or each.is_finished())

    def retire(self, record: RequestRecord) -> None:
        """A request ended. One that ends with the step that it loaded in is told of its load afterwards."""
        _, times = self._open.get(record.request.request_id, (None, None))
        if times is not None and not times.is_loading:
            self._prefilled([record])

    def _prefilled(self, records: Iterable[RequestRecord]) -> None:
        for record in list(records):
            _, times = self._open.pop(record.request.request_id)
            if times.begun_s is not None:
                computed = record.request.num_prompt_tokens - record.kept_tokens
                fields = {"hotspan.computed_tokens": computed}
                self._span("hotspan.prefill", times.parent, times.computes_from_s, self._clock.monotonic(), fields)

    def _span(self, name: str, parent: Context, begin_s: float, end_s: float, fields: dict[str, Any]) -> Span:
        offset_s = self._clock.unix() - self._clock.monotonic()
        begin_ns, end_ns = (int((offset_s + at_s) * 1e9) for at_s in (begin_s, end_s))
        span = self._tracer.start_span(name, context=parent, attributes=fields, start_time=begin_ns)
        span.end(end_ns)
        return span


def _reasons(times: _Times) -> dict[str, Any]:
    """What the cost model chose and what it had predicted; there is none over RAM alone."""
    choice = times.choice
    if choice is None:
        return {"hotspan.reason": "every hit is loaded"}
    if not times.found_chunks:
        reason = "nothing found"
    elif not choice.recompute_s:
        reason = "engine's speed unknown"
    elif choice.chunks >= times.found_chunks:
        reason = "loading is faster"
    else:
        reason = "computing is faster" if not choice.chunks else "loading a part and computing the rest is faster"
    return {
        "hotspan.reason": reason,
        "hotspan.found_chunks": times.found_chunks,
        "hotspan.chosen_chunks": choice.chunks,
        "hotspan.waits_for": choice.tier.value if choice.tier is not None else "nothing",
        "hotspan.predicted.load_s": choice.load_s,
        "hotspan.predicted.rest_s": choice.rest_s,
        "hotspan.predicted.recompute_s": choice.recompute_s,
    }
