"""One trace from a client through the real router and server, sent to a collector. `make test-slow` runs it."""

import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from hotspan.bench.prose import prose

from .conftest import serving
from .test_replicas import routing

pytestmark = [pytest.mark.engine, pytest.mark.slow]

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HEADERS = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "client=1"}
SENT_S = 30.0


class Collector(ThreadingHTTPServer):
    """Takes OTLP over HTTP. spans: what came, by name, of the client's trace."""

    def __init__(self) -> None:
        self.spans: dict[str, Any] = {}
        super().__init__(("127.0.0.1", 0), Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def wait_for(self, *names: str) -> None:
        """Until spans of these names came."""
        until = time.monotonic() + SENT_S
        while not self.spans.keys() >= set(names):
            assert time.monotonic() < until, (names, self.spans.keys())
            time.sleep(0.1)


class Handler(BaseHTTPRequestHandler):
    """One export."""

    server: Collector

    def do_POST(self) -> None:
        assert self.path == "/v1/traces"
        request = ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["content-length"])))
        for span in (span for each in request.resource_spans for scope in each.scope_spans for span in scope.spans):
            if span.trace_id.hex() == TRACE:
                self.server.spans[span.name] = span
        self.send_response(200)
        self.end_headers()

    def log_message(self, *words: object) -> None:
        pass


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_one_trace_from_router_to_load(tiny_model: Path, tmp_path: Path, collector: Collector) -> None:
    """Client -> router -> server -> vLLM, look-up, load and prefill: one trace, each span below its own parent."""
    variables = {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf", "OTEL_BSP_SCHEDULE_DELAY": "200"}
    options = ("--ram-gib", "0.2", "--otlp-traces-endpoint", f"{collector.url}/v1/traces")
    with (
        serving(tiny_model, tmp_path / "server.log", *options, variables=variables) as server,
        routing(tiny_model, [server.url], tmp_path / "router.log", "--otlp-endpoint", collector.url) as router,
    ):
        texts = [prose(seed, 1500) for seed in range(6)]  # more than the engine's own pool has room for
        body = {"model": server.model, "max_tokens": 2, "temperature": 0}
        for text in texts:
            httpx.post(f"{router.url}/v1/completions", json=body | {"prompt": text}, timeout=60).raise_for_status()
        asked = body | {"prompt": texts[0]}
        answer = httpx.post(f"{router.url}/v1/completions", json=asked, headers=HEADERS, timeout=60)
        answer.raise_for_status()
        engine = ("hotspan.request", "llm_request", "hotspan.cache", "hotspan.load", "hotspan.prefill")
        collector.wait_for("/v1/completions", *engine)
    spans = collector.spans
    routed, request = spans["/v1/completions"], spans["hotspan.request"]
    assert routed.parent_span_id.hex() == PARENT and routed.trace_state == "client=1"
    assert request.parent_span_id == routed.span_id
    for name in ("llm_request", "hotspan.cache", "hotspan.prefill"):
        assert spans[name].parent_span_id == request.span_id
    assert spans["hotspan.load"].parent_span_id == spans["hotspan.cache"].span_id
    cache = {each.key: each.value for each in spans["hotspan.cache"].attributes}
    assert cache["hotspan.loaded_tokens"].int_value >= 1024
    assert cache["hotspan.reason"].string_value == "every hit is loaded"
    computed = {each.key: each.value for each in spans["hotspan.prefill"].attributes}["hotspan.computed_tokens"]
    prompt = cache["hotspan.prompt_tokens"].int_value
    held = cache["hotspan.loaded_tokens"].int_value + cache["hotspan.engine_tokens"].int_value
    assert computed.int_value == prompt - held
