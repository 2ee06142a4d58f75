"""`hotspan serve`: OpenAI and SageMaker routes over a cache that outlives the server."""

import json
import signal
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import openai
import psutil
import pytest

from hotspan.bench.prose import prose
from hotspan.tiers.slab import sweep_dead_slabs
from tests.adversary.rebinding import Request, check_refusal

from .conftest import Server, serving

pytestmark = pytest.mark.engine

LONG = prose(1, 1500)
WORKER = ("--distributed-executor-backend", "mp")
COMPILED = {"TORCHDYNAMO_DISABLE": "0"}
"""As `hotspan serve` starts by itself: the engine core has a worker, and what samples is compiled."""


DECLINED = ('choice="refused"', 'choice="late"')
"""Requests for which the cost model did not load all that it found on disk."""


def disk(directory: Path) -> tuple[str, ...]:
    return "--ram-gib", "0.1", "--disk", str(directory / "kv"), "--disk-gib", "0.5"


def counted(server: Server, name: str, *labels: str) -> float:
    """The sum of a metric's values, with one of these labels if there are some."""
    lines = [line for line in get(server.url + "/metrics")[1].splitlines() if line.startswith(name + "{")]
    return sum(float(line.split()[-1]) for line in lines if not labels or any(label in line for label in labels))


def settle(server: Server, client: openai.OpenAI) -> None:
    """Wait until nothing is on its way to disk; the engine counts at its steps."""
    deadline = time.monotonic() + 60
    while True:
        client.completions.create(model=server.model, prompt="Hello", max_tokens=2)
        if not counted(server, "hotspan_cache_store_queue_chunks"):
            return
        assert time.monotonic() < deadline, "the disk tier does not write"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("serve")
    with serving(tiny_model, directory / "log", *disk(directory), *WORKER, variables=COMPILED) as running:
        yield running


@pytest.fixture
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)


def get(url: str) -> tuple[int, str]:
    with urllib.request.urlopen(url, timeout=60) as answer:
        return answer.status, answer.read().decode()


def test_it_is_a_whole_program(server: Server) -> None:
    """This server does its own imports, as those of users do; most others in a run of tests are forked after them."""
    assert psutil.Process(server.process.pid).cmdline()[:4] == [sys.executable, "-m", "hotspan", "serve"]


def test_openai_routes(client: openai.OpenAI, server: Server) -> None:
    """A stock OpenAI client lists the model, completes, chats, and streams with usage at the end."""
    assert [model.id for model in client.models.list()] == [server.model]
    text = client.completions.create(model=server.model, prompt="A long time ago", max_tokens=5)
    assert text.usage and text.usage.completion_tokens == 5
    messages = [{"role": "user", "content": "hello"}]
    chat = client.chat.completions.create(model=server.model, messages=messages, max_tokens=5, temperature=0)
    assert chat.choices[0].finish_reason == "length"
    stream = client.chat.completions.create(
        model=server.model,
        messages=messages,
        max_tokens=5,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    parts = list(stream)  # vLLM joins tokens that come while a busy server has yet to send the last ones
    texts = [part.choices[0].delta.content or "" for part in parts if part.choices]
    assert len(texts) > 1 and "".join(texts) == chat.choices[0].message.content
    assert parts[-1].usage and parts[-1].usage.completion_tokens == 5


def test_a_page_that_leads_its_name_here_asks_nothing(server: Server) -> None:
    """Where nobody needs a key, a foreign `Host` is 421 on every route; this machine's names are served as ever."""
    body = json.dumps({"model": server.model, "prompt": "hello", "max_tokens": 1}).encode()
    reset = Request("POST", "/hotspan/cache/invalidate", b"{}")
    check_refusal(server.port, Request("POST", "/v1/completions", body), reset, Request("GET", "/hotspan/cache"))


def test_sagemaker_routes(server: Server) -> None:
    """/ping says that the engine lives, /invocations takes a chat."""
    assert get(server.url + "/ping")[0] == 200
    body = {"model": server.model, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}
    request = urllib.request.Request(
        server.url + "/invocations", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert json.load(answer)["usage"]["completion_tokens"] == 3


def test_the_cached_tokens_of_several_prompts_are_those_of_all(server: Server, client: openai.OpenAI) -> None:
    """In one answer and at the end of a stream: the sum of what each alone has, whichever of them was cached."""
    known, other = ["First. " + LONG, "Second. " + LONG[: len(LONG) // 2]], "Third, which nobody asked. " + LONG

    def details(prompt: str | list[str], stream: bool) -> tuple[int, int]:
        body = {"model": server.model, "prompt": prompt, "max_tokens": 1, "temperature": 0, "stream": stream}
        body |= {"stream_options": {"include_usage": True}} if stream else {}
        request = urllib.request.Request(
            server.url + "/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            if not stream:
                usage = json.load(answer)["usage"]
            else:
                lines = [line[6:] for line in answer.read().decode().splitlines() if line.startswith("data: {")]
                usage = next(found for line in reversed(lines) if (found := json.loads(line).get("usage")))
            cached = (usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0
            assert answer.status == 200
        return usage["prompt_tokens"], cached

    for prompt in known:
        details(prompt, False)
    alone = [details(prompt, False) for prompt in known]
    assert all(cached > 500 for _, cached in alone), alone
    both = (sum(tokens for tokens, _ in alone), sum(cached for _, cached in alone))
    assert [details(known, stream) for stream in (False, True)] == [both, both]
    tokens, cached = details([*known, other], False)
    assert tokens > both[0] and both[1] <= cached < both[1] + 32, (cached, both)


def test_usage_and_metrics_tell_what_was_cached(client: openai.OpenAI, server: Server) -> None:
    """The second time, `cached_tokens` covers the prompt; /metrics counts hits, bytes and latencies by tier."""

    def ask() -> int:
        answer = client.completions.create(model=server.model, prompt=LONG, max_tokens=1)
        assert answer.usage and answer.usage.prompt_tokens_details
        return answer.usage.prompt_tokens_details.cached_tokens or 0

    assert ask() == 0
    assert ask() > 1500
    names = {
        "hotspan_cache_lookup_tokens_total",
        'hotspan_cache_hit_tokens_total{engine="0"',
        "hotspan_cache_store_seconds_count",
        "hotspan_cache_load_seconds_count",
        "hotspan_cache_load_bytes_total",
        "hotspan_cache_store_bytes_total",
        "hotspan_cache_used_bytes",
        "hotspan_cache_token_bytes",
        "hotspan_cache_store_queue_chunks",
        "hotspan_cost_prefill_tokens_per_second",
        "hotspan_cost_requests_total",
        'tier="ram"',
        'tier="disk"',
    }
    deadline = time.monotonic() + 60
    while missing := {name for name in names if name not in get(server.url + "/metrics")[1]}:
        assert time.monotonic() < deadline, missing
        client.completions.create(model=server.model, prompt="Hello", max_tokens=1)  # an engine counts at its steps


def test_ready_line_comes_after_a_warm_load_path(server: Server) -> None:
    """When the ready line is out, a load from the tiers has run already."""
    assert "GiB of RAM" in server.wait_until_ready()
    hits = [
        line for line in get(server.url + "/metrics")[1].splitlines() if line.startswith("hotspan_cache_hit_tokens_t")
    ]
    assert sum(float(line.split()[-1]) for line in hits) >= 512


def test_stop_drains_and_restart_is_warm(tiny_model: Path, server: Server, client: openai.OpenAI) -> None:
    """SIGTERM lets a stream end; a new server finds the text on disk; killed, it leaves nothing. The last test here.

    Nothing: its engine ends, too, and neither shared memory nor a temporary directory is left.
    """
    sweep_dead_slabs()
    first = client.completions.create(model=server.model, prompt=LONG, max_tokens=8, temperature=0)
    settle(server, client)
    server.stop_in_a_stream(lambda: server.process.send_signal(signal.SIGTERM))
    assert sweep_dead_slabs() == 0
    with (
        TemporaryDirectory(dir="/tmp") as temporary,  # sockets lie there: tmp_path would be too long for their names
        serving(
            tiny_model, server.log.parent / "log2", *disk(server.log.parent), *WORKER, variables={"TMPDIR": temporary}
        ) as server,
    ):
        client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
        settle(server, client)  # the steps before are counted
        declined = counted(server, "hotspan_cost_requests_total", *DECLINED)
        again = client.completions.create(model=server.model, prompt=LONG, max_tokens=8, temperature=0)
        assert again.choices[0].text == first.choices[0].text
        assert again.usage and again.usage.prompt_tokens_details
        if (again.usage.prompt_tokens_details.cached_tokens or 0) <= 1500:
            # The machine was too slow at that moment: the cost model then computes what it found on disk.
            settle(server, client)
            assert counted(server, "hotspan_cost_requests_total", *DECLINED) > declined, "it was not found"
        engine = psutil.Process(server.process.pid).children(recursive=True)
        left = {Path(each.path) for one in engine for each in one.memory_maps() if each.path.startswith("/dev/shm/")}
        # torch keeps its compiled kernels on purpose, for processes to come
        left.update(path for path in Path(temporary).iterdir() if not path.name.startswith("torchinductor_"))
        assert len(engine) > 1 and len(left) > 1
        server.process.kill()
        assert psutil.wait_procs(engine, 60)[1] == []
        deadline = time.monotonic() + 60
        while still := [path for path in left if path.exists()]:
            assert time.monotonic() < deadline, still
            time.sleep(0.05)
