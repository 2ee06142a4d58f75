"""HotspanConnector in a vLLM that hotspan did not start."""

import json
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

import hotspan
from hotspan.engine.connector import HotspanConnector
from hotspan.engine.plugin import register
from kit.ports import free_port

from ..own_vllm import VLLM, a_strangers

PROMPT = "The archive of the town keeps every letter. " * 35
HANG_S = 180


def test_vllm_finds_the_connector_by_its_name() -> None:
    """After the plugin, once or twice, kv_connector alone names the connector; no module path is needed."""
    register()
    register()
    config = KVTransferConfig(kv_connector="HotspanConnector", kv_role="kv_both")
    assert KVConnectorFactory.get_connector_class(config) is HotspanConnector


@pytest.mark.engine
@pytest.mark.slow
def test_llm_reuses_a_text_after_its_own_cache_is_reset(tmp_path: Path) -> None:
    """LLM(model, **engine_options()) loads a text that the engine's own cache has dropped, with the same answer."""
    from vllm import LLM, SamplingParams

    from hotspan.demo.model import make_demo_model

    directory = tmp_path / "model"
    make_demo_model(directory, "tiny")
    engine = LLM(
        str(directory),
        enforce_eager=True,
        max_model_len=1024,
        kv_cache_memory_bytes=1 << 26,
        **hotspan.engine_options(ram="256MiB"),
    )
    greedy = SamplingParams(temperature=0.0, max_tokens=8)
    (first,) = engine.generate([PROMPT], greedy)
    engine.reset_prefix_cache()
    (second,) = engine.generate([PROMPT], greedy)
    assert second.num_cached_tokens
    assert second.outputs[0].token_ids == first.outputs[0].token_ids


@contextmanager
def vllm_serving(model: Path, config: dict[str, Any], log: Path, *more: str, **variables: str) -> Iterator[str]:
    """The URL of a `vllm serve` that hotspan did not start; it is stopped at the end. more: of its options."""
    port = free_port()
    words = [str(model), "--port", str(port), "--enforce-eager", "--max-model-len", "1024"]
    words += ["--kv-cache-memory-bytes", str(1 << 26), "--enable-prompt-tokens-details"]
    words += ["--shutdown-timeout", "30", "--kv-transfer-config", json.dumps(config), *more]
    command = [sys.executable, "-c", VLLM, "serve", *words]
    with log.open("ab") as out:
        process = subprocess.Popen(command, env=a_strangers() | variables, stdout=out, stderr=out)
    try:
        url, until = f"http://127.0.0.1:{port}", time.monotonic() + HANG_S
        while True:
            assert process.poll() is None, log.read_text()[-4000:]
            assert time.monotonic() < until, log.read_text()[-4000:]
            try:
                urllib.request.urlopen(f"{url}/health", timeout=5).close()
                break
            except OSError:
                time.sleep(0.2)
        yield url
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def asked(url: str, model: Path) -> tuple[str, int]:
    """The answer to the prompt, and how many of its tokens were cached."""
    body = {"model": str(model), "prompt": PROMPT, "max_tokens": 8, "temperature": 0}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        answer = json.load(response)
    return answer["choices"][0]["text"], (answer["usage"]["prompt_tokens_details"] or {}).get("cached_tokens") or 0


@pytest.mark.engine
@pytest.mark.slow
def test_vllm_serve_finds_a_text_after_a_restart(tmp_path: Path) -> None:
    """`vllm serve` with the connector's name alone and tiers from HOTSPAN_* or the extra config: warm after a restart.

    Also of what was answered the moment before SIGTERM."""
    from hotspan.demo.model import make_demo_model

    model, disk, log = tmp_path / "model", tmp_path / "disk", tmp_path / "log"
    make_demo_model(model, "tiny")
    plain = {"kv_connector": "HotspanConnector", "kv_role": "kv_both"}
    tiers = {"HOTSPAN_RAM_GIB": "0.25", "HOTSPAN_DISK": str(disk), "HOTSPAN_DISK_GIB": "1"}
    with vllm_serving(model, plain, log, **tiers, HOTSPAN_JOB_QUEUE_SIZE="7") as url:
        first, cached = asked(url, model)
        assert not cached
    extra = {"hotspan.ram_gib": 0.25, "hotspan.disk": str(disk), "hotspan.disk_gib": 1}
    with vllm_serving(model, plain | {"kv_connector_extra_config": extra}, log) as url:
        again, cached = asked(url, model)
        with urllib.request.urlopen(f"{url}/metrics", timeout=60) as response:
            metrics = response.read().decode()
    assert (again, cached >= 256) == (first, True)
    assert "hotspan_cache_hit_tokens_total{" in metrics
    assert "HOTSPAN_JOB_QUEUE_SIZE" in log.read_text()
