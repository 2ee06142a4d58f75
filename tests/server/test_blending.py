"""Blending through a real server: what the answers and the metrics say, and a server that can't blend."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from hotspan.bench.prose import prose

from .conftest import Server, serving

pytestmark = [pytest.mark.engine, pytest.mark.slow]

COUNTED = ("reused", "recomputed", "fresh")
SEPARATOR = "\n\n----\n\n"
OPTIONS = ("--ram-gib", "0.3", "--blend", "first_k", "--blend-min-tokens", "256", "--blend-separator", SEPARATOR)


def asked(server: Server, prompt: str, **given: Any) -> httpx.Response:
    body = {"model": server.model, "prompt": prompt, "max_tokens": 4, "temperature": 0} | given
    return httpx.post(server.url + "/v1/completions", json=body, timeout=60).raise_for_status()


def answered(server: Server, prompt: str, **given: Any) -> dict[str, Any]:
    return dict(asked(server, prompt, **given).json())


def streamed(server: Server, path: str, **given: Any) -> dict[str, Any]:
    """The usage of the last chunk."""
    body = {"model": server.model, "max_tokens": 4, "stream": True, "stream_options": {"include_usage": True}} | given
    text = httpx.post(server.url + path, json=body, timeout=60).raise_for_status().text
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: {")]
    return dict(json.loads(lines[-1])["usage"])


def prompts(count: int) -> list[str]:
    """The same documents in other orders."""
    texts = [prose(seed, 500) for seed in range(3)]
    orders = ([0, 1, 2], [1, 2, 0], [2, 1, 0], [0, 2, 1], [2, 0, 1], [1, 0, 2])[:count]
    return [SEPARATOR.join(["Answer.", *(texts[at] for at in order), f"Why {order}?"]) for order in orders]


def metric(server: Server, name: str) -> float:
    """The sum over its labels."""
    lines = httpx.get(server.url + "/metrics", timeout=60).text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"hotspan_blend_{name}{{"))


def test_permuted_documents_through_http(tiny_model: Path, tmp_path: Path) -> None:
    """At least 80 % of a third and later order's tokens are reused, the answer says so, and a request may refuse. The
    engine has a worker process of its own."""
    own = ("--distributed-executor-backend", "mp", "--dtype", "bfloat16")
    with serving(tiny_model, tmp_path / "log", *OPTIONS, *own) as server:
        answers = [answered(server, prompt) for prompt in prompts(4)]
        assert all(answer.get("kv_transfer_params") is None for answer in answers[:2])
        said = answers[2]["kv_transfer_params"]["blend"]
        assert said["mode"] == "first_k" and said["reused"] >= 0.8 * answers[2]["usage"]["prompt_tokens"]
        assert answers[2]["usage"]["prompt_tokens_details"]["cached_tokens"] <= 128
        details = answers[2]["usage"]["prompt_tokens_details"]
        assert details["blend_reused_tokens"] == said["reused"]
        assert details["blend_recomputed_tokens"] == said["recomputed"]
        assert answers[3]["kv_transfer_params"]["blend"]["reused"] > 0
        bare = asked(server, "short")
        assert "blend_reused_tokens" not in bare.json()["usage"]["prompt_tokens_details"]
        assert "x-hotspan-blend" not in bare.headers
        own = asked(server, prompts(6)[5])
        said = own.json()["kv_transfer_params"]["blend"]
        assert own.headers["x-hotspan-blend"] == ", ".join(f"{what}={said[what]}" for what in COUNTED)
        lmi = {"inputs": prompts(6)[5], "parameters": {"max_new_tokens": 4, "details": True}}
        invoked = httpx.post(server.url + "/invocations", json=lmi, timeout=60).raise_for_status()
        assert invoked.json()["details"]["blend_reused_tokens"] > 1000
        assert "reused=" in invoked.headers["x-hotspan-blend"]
        for path, given in (
            ("/v1/completions", {"prompt": prompts(5)[4]}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": prompts(5)[4]}]}),
        ):
            details = streamed(server, path, **given)["prompt_tokens_details"]
            assert details["blend_reused_tokens"] > 1000 > details["blend_recomputed_tokens"] > 0
        refused = answered(server, prompts(5)[4], kv_transfer_params={"blend": False})
        assert refused.get("kv_transfer_params") is None
        wrong = {"model": server.model, "prompt": "a", "kv_transfer_params": {"blend": "much"}}
        assert httpx.post(server.url + "/v1/completions", json=wrong, timeout=60).status_code == 400
        answered(server, "once more")
        assert metric(server, "up") == 1 and metric(server, "requests_total") == 6
        assert metric(server, "windows_stored_total") > 0


def test_a_server_that_can_not_blend_serves(tiny_model: Path, tmp_path: Path) -> None:
    """KV events would publish approximate blocks: blending is off with that reason, in log and metric."""
    events = ("--kv-events-config", '{"enable_kv_cache_events": true, "endpoint": "inproc://events"}')
    with serving(tiny_model, tmp_path / "log", *OPTIONS, *events) as server:
        answers = [answered(server, prompt) for prompt in prompts(4)]
        assert all(answer.get("kv_transfer_params") is None for answer in answers)
        assert metric(server, "up") == 0 and metric(server, "requests_total") == 0
        assert "blending_off: KV events" in server.log.read_text()
