"""`hotspan ab` with two real engines."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hotspan.ab.result import AbResult
from hotspan.demo.model import make_demo_model

from .test_cli import LIMITS

ENGINE = "--dtype float32 --block-size 32 --max-model-len 2048 --num-gpu-blocks-override 300 --enforce-eager"
ENVIRONMENT = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.parametrize("name, status", [("a cache", 0), ("another computation", 1)])
def test_a_cache_does_not_change_answers_and_another_computation_does(name: str, status: int, tmp_path: Path) -> None:
    """vLLM alone against vLLM with hotspan's tiers passes; against a model with another constant it is a drift."""
    model, output = make_demo_model(tmp_path / "tiny", "tiny").path, tmp_path / "ab.json"
    others = {
        "a cache": f"{model} --ram-gib 0.1 --disk {tmp_path / 'kv'} --disk-gib 0.1 {ENGINE}",
        "another computation": f"""{model} --no-cache --hf-overrides '{{"rms_norm_eps": 0.5}}' {ENGINE}""",
    }
    sides = ("--a-serve", f"{model} --no-cache {ENGINE}", "--b-serve", others[name])
    more = ("--items", "20", "--max-tokens", "8", "-q", "--logs", str(tmp_path), "--output", str(output))
    command = [sys.executable, "-m", "hotspan", "ab", *sides, *LIMITS, *more]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, env={**os.environ, **ENVIRONMENT})
    assert done.returncode == status, done.stdout + done.stderr
    result = AbResult.load(output)
    assert result.compared == 20 and result.agreements[0].kl is not None
    assert (result.agreements[2].different.count == 0) is (status == 0)
