"""Spans of requests on vLLM's real scheduler, without a model, and of the server around them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from vllm.v1.request import Request

from hotspan.core.clock import SystemClock
from hotspan.engine.tracing import CacheTracing, RequestTracing

from .harness.core import BLOCK, CHUNK, Core, core

LENGTH = 900
WHOLE = LENGTH // CHUNK * CHUNK
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HEADERS = {"traceparent": f"00-{TRACE}-{PARENT}-01"}


class Spans:
    """What a tracer made."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracer = provider.get_tracer("test")

    def take(self) -> dict[str, Any]:
        """The spans since the last call, by name."""
        found = {span.name: span for span in self._exporter.get_finished_spans()}
        self._exporter.clear()
        return found


@pytest.fixture
def spans() -> Spans:
    return Spans()


@pytest.fixture(scope="module")
def running(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Core]:
    with core(tiny_model, disk=tmp_path_factory.mktemp("tracing") / "kv", cache={"patience_s": None}) as engine:
        assert not any(isinstance(each, CacheTracing) for each in engine.manager.watchers), "nobody asked for spans"
        yield engine


@pytest.fixture
def engine(running: Core, spans: Spans) -> Iterator[Core]:
    """A core whose requests come with a trace."""

    def traced(*words: Any, **options: Any) -> Request:
        return Request(*words, **options, trace_headers=HEADERS)

    tracing = CacheTracing(running.manager.cache, SystemClock(), spans.tracer)
    with mock.patch.object(running.manager, "watchers", [tracing]), mock.patch(f"{Core.__module__}.Request", traced):
        yield running
        assert not tracing._open


def test_a_request_of_a_text_that_is_on_disk(engine: Core, spans: Spans) -> None:
    """Look-up with what was found and chosen, the load within it, the computing of the rest: all of one trace."""
    prompt = engine.stored(engine.text(1, LENGTH))
    computed = spans.take()
    assert computed["hotspan.cache"].attributes["hotspan.reason"] == "nothing found"
    assert computed["hotspan.prefill"].attributes["hotspan.computed_tokens"] == LENGTH
    engine.forget_gpu()
    engine.evict_ram()
    engine.ask(prompt)
    found = spans.take()
    cache, load, prefill = (found[f"hotspan.{name}"] for name in ("cache", "load", "prefill"))
    assert {f"{span.context.trace_id:032x}" for span in found.values()} == {TRACE}
    assert {f"{span.parent.span_id:016x}" for span in (cache, prefill)} == {PARENT}
    assert load.parent.span_id == cache.context.span_id
    chunks = WHOLE // CHUNK
    assert cache.attributes["hotspan.loaded_tokens"] == WHOLE and cache.attributes["hotspan.engine_tokens"] == 0
    assert cache.attributes["hotspan.promoted_chunks.disk"] == cache.attributes["hotspan.found_chunks"] == chunks
    assert cache.attributes["hotspan.chosen_chunks"] == chunks and cache.attributes["hotspan.waits_for"] == "disk"
    assert cache.attributes["hotspan.reason"] in ("loading is faster", "engine's speed unknown")
    assert load.attributes["hotspan.tokens"] == WHOLE and load.attributes["hotspan.bytes"] > 0
    assert prefill.attributes["hotspan.computed_tokens"] == LENGTH - WHOLE
    assert cache.start_time <= cache.end_time <= load.end_time <= prefill.end_time


def test_what_the_engine_has_itself_is_told_apart(engine: Core, spans: Spans) -> None:
    """Nothing is loaded of it."""
    prompt = engine.stored(engine.text(2, LENGTH))
    spans.take()
    engine.ask(prompt)
    found = spans.take()
    assert set(found) == {"hotspan.cache", "hotspan.prefill"}
    assert found["hotspan.cache"].attributes["hotspan.engine_tokens"] == LENGTH // BLOCK * BLOCK


def test_an_aborted_request_leaves_nothing(engine: Core, spans: Spans) -> None:
    """Neither one that waited nor one that ran."""
    engine.start("waiting", engine.text(3, LENGTH))
    engine.core.abort_requests(["waiting"])
    engine.start("running", engine.text(4, 2000), 5)
    engine.step()
    engine.core.abort_requests(["running"])
    engine.step()
    found = spans.take()
    assert found.keys() <= {"hotspan.cache", "hotspan.prefill"}
    assert found["hotspan.cache"].attributes["hotspan.prompt_tokens"] == 2000


def test_without_a_trace_nothing_is_noted(running: Core, spans: Spans) -> None:
    """A request that came without one."""
    tracing = CacheTracing(running.manager.cache, SystemClock(), spans.tracer)
    with mock.patch.object(running.manager, "watchers", [tracing]):
        running.ask(running.text(5, LENGTH))
    assert not spans.take()


def test_the_server_is_the_parent_of_what_the_engine_does(spans: Spans) -> None:
    """It continues the client's trace, or begins one. A failure is noted without its text."""
    tracing, told = RequestTracing(spans.tracer), []

    async def generate(headers: Mapping[str, str]) -> AsyncGenerator[Any, None]:
        told.append(headers["traceparent"])
        yield SimpleNamespace(prompt_token_ids=[1, 2, 3], num_cached_tokens=2)
        if len(told) == 2:
            raise ValueError("the prompt is in here")

    async def drain(headers: Mapping[str, str] | None) -> None:
        async for _ in tracing.followed(generate, headers):
            pass

    asyncio.run(drain(HEADERS))
    (span,) = spans.take().values()
    assert told[0] == f"00-{TRACE}-{span.context.span_id:016x}-01" and f"{span.parent.span_id:016x}" == PARENT
    assert dict(span.attributes) == {"hotspan.prompt_tokens": 3, "hotspan.cached_tokens": 2}
    with pytest.raises(ValueError):
        asyncio.run(drain(None))
    (span,) = spans.take().values()
    assert span.parent is None and span.status.status_code is StatusCode.ERROR
    assert span.status.description == "ValueError" and not span.events
    tracing.followed(generate, None)
    assert not spans.take() and len(told) == 2
