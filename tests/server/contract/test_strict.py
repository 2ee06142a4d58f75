"""A second server, of variables alone: LMI's statuses, a short time limit, two places; and how it stops, at last."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from hotspan.tiers.slab import sweep_dead_slabs
from tests.ports import free_port

from .rig import GREEDY, Container, rows, the_error
from .rig import container as serving

pytestmark = pytest.mark.engine

LIMIT_S = 3
VARIABLES = {
    "OPTION_COMPAT": "lmi",
    "OPTION_ROLLING_BATCH": "vllm",
    "OPTION_DTYPE": "fp32",
    "OPTION_MAX_MODEL_LEN": "2048",
    "OPTION_BLOCK_SIZE": "128",
    "OPTION_NUM_GPU_BLOCKS_OVERRIDE": "64",
    "OPTION_ENABLE_STATEFUL_SESSIONS": "false",
    "CUDA_MEMORY_FRACTION": "0.2",
    "ENABLE_CUDA_GRAPHS": "false",
    "MAX_BATCH_PREFILL_TOKENS": "1024",
    "MAX_BATCH_SIZE": "8",
    "SERVING_JOB_QUEUE_SIZE": "2",
    "SAGEMAKER_MAX_REQUEST_SIZE": "100000",
    "SAGEMAKER_MAX_PAYLOAD_IN_MB": "2",  # SAGEMAKER_MAX_REQUEST_SIZE beats it
    "SAGEMAKER_MODEL_SERVER_TIMEOUT_SECONDS": str(LIMIT_S),
    "HOTSPAN_NO_CACHE": "true",
}
LONG: Any = {"inputs": "Say", "parameters": GREEDY | {"max_new_tokens": 2000, "ignore_eos_token": True}}
SHORT: Any = {"inputs": "Say", "parameters": GREEDY | {"max_new_tokens": 1}}


@pytest.fixture(scope="module")
def strict(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Container]:
    with serving(tmp_path_factory.mktemp("strict"), VARIABLES | {"HF_MODEL_ID": str(tiny_model)}) as running:
        yield running


def test_other_containers_variables(strict: Container) -> None:
    """CUDA_MEMORY_FRACTION, ENABLE_CUDA_GRAPHS, which is inverted, and MAX_BATCH_PREFILL_TOKENS reach the engine."""
    assert 'gpu_memory_utilization="0.2"' in strict.admin.get("/metrics").text
    log = strict.server.log.read_text()
    assert "enforce_eager=True" in log and "max_num_batched_tokens=1024" in log


def test_sequences_at_a_time(strict: Container) -> None:
    """Of more sequences than MAX_BATCH_SIZE so many run, and the others wait."""
    many = LONG | {"parameters": LONG["parameters"] | {"top_n_tokens": 20, "do_sample": True}}
    found: set[tuple[float, float]] = set()
    deadline = time.monotonic() + 120
    with ThreadPoolExecutor() as threads:
        while not any(running >= 8 and waiting for running, waiting in found):
            assert time.monotonic() < deadline, found
            asked = threads.submit(strict.invoke, many)  # which ends at its time limit
            while not asked.done():
                found.add((strict.gauge("vllm:num_requests_running"), strict.gauge("vllm:num_requests_waiting")))
    assert max(found)[0] == 8


def test_a_body_that_is_too_large(strict: Container) -> None:
    """A byte over SAGEMAKER_MAX_REQUEST_SIZE is a 413, of LMI's routes too; that many are not."""
    most = int(VARIABLES["SAGEMAKER_MAX_REQUEST_SIZE"])
    body = json.dumps({"prompt": "Say", "max_tokens": 1, "user": ""}).encode()
    for path in ("/invocations", "/v1/completions"):
        for size, status in ((most, 200), (most + 1, 413)):
            padded = body[:-2] + b"x" * (size - len(body)) + body[-2:]
            reply = strict.http.post(path, content=padded, headers={"content-type": "application/json"})
            assert reply.status_code == status, reply.text


def test_lmis_statuses(strict: Container) -> None:
    """424 on the routes that LMI has, whoever refused; elsewhere, and where LMI has it too, the true status."""
    wrong: list[Any] = [{"inputs": 1}, {"inputs": "Say", "model": "gpt"}, {"prompt": "Say", "max_tokens": -1}]
    for body in wrong:
        the_error(strict.invoke(body), 424)
    the_error(strict.invoke({"messages": []}, "/v1/chat/completions"), 424)
    the_error(strict.invoke({"inputs": "Say"}, "/predictions/gpt"), 424)
    the_error(strict.invoke({"prompt": "Say", "max_tokens": -1}, "/v1/completions"), 400)
    the_error(strict.http.post("/adapters", json={"name": "a", "src": "a"}), 401)
    assert "LoRA is off" in the_error(strict.admin.post("/adapters", json={"name": "a", "src": "a"}), 400)["message"]


def test_sessions_can_be_switched_off(strict: Container) -> None:
    """enable_stateful_sessions=false: a request for one is refused, and an id beside a prompt is ignored."""
    assert "no sessions" in the_error(strict.invoke({"requestType": "NEW_SESSION"}), 424)["message"]
    assert strict.invoke({"inputs": "Say"}, x_amzn_sagemaker_session_id="any").status_code == 200


def test_an_answer_that_takes_too_long(strict: Container) -> None:
    """After SAGEMAKER_MODEL_SERVER_TIMEOUT_SECONDS: a 504, or in a stream the same error as its last row."""
    assert "predict_timeout" in the_error(strict.invoke(LONG), 504)["message"]
    told = rows(strict.invoke(LONG | {"stream": True}))
    assert all("token" in row for row in told[:-1]) and told[-1]["error"]["code"] == 504
    assert strict.generate("Say")


def test_a_model_that_loads_for_too_long(tiny_model: Path, tmp_path: Path) -> None:
    """After SAGEMAKER_STARTUP_TIMEOUT the server gives up in one sentence that says what to do, and leaves nothing."""
    sweep_dead_slabs()
    given = {"HF_MODEL_ID": str(tiny_model), "SAGEMAKER_STARTUP_TIMEOUT": "0.5", "OPTION_RAM_GIB": "0.1"}
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("VLLM_", "HOTSPAN_"))}
    done = subprocess.run(
        [sys.executable, "-m", "hotspan", "serve", "--port", str(free_port())],
        env=kept | given,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 2
    assert "not loaded within 0.5 s" in done.stderr and "SAGEMAKER_STARTUP_TIMEOUT" in done.stderr.splitlines()[-1]
    assert sweep_dead_slabs() == 0, "a slab kept its name"
