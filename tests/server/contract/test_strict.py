"""A second server, of variables alone and without a cache: LMI's statuses, and no sessions."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .rig import Container, the_error
from .rig import container as serving

pytestmark = pytest.mark.engine

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
    "HOTSPAN_NO_CACHE": "true",
}


@pytest.fixture(scope="module")
def strict(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Container]:
    with serving(tmp_path_factory.mktemp("strict"), VARIABLES | {"HF_MODEL_ID": str(tiny_model)}) as running:
        yield running


def test_other_containers_variables(strict: Container) -> None:
    """CUDA_MEMORY_FRACTION, ENABLE_CUDA_GRAPHS, which is inverted, and MAX_BATCH_PREFILL_TOKENS reach the engine."""
    assert 'gpu_memory_utilization="0.2"' in strict.admin.get("/metrics").text
    log = strict.server.log.read_text()
    assert "enforce_eager=True" in log and "max_num_batched_tokens=1024" in log


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
