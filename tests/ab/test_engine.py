"""`hotspan ab` with two real engines."""

import subprocess
import sys
from pathlib import Path

import pytest

from hotspan.ab.result import AbResult
from hotspan.demo.model import make_demo_model

from .test_cli import LIMITS

ENGINE = "--dtype float32 --block-size 16 --max-model-len 2048 --num-gpu-blocks-override 300 --enforce-eager"


@pytest.mark.slow
@pytest.mark.engine
def test_a_cache_does_not_change_answers_and_another_model_does(tmp_path: Path) -> None:
    """vLLM alone against vLLM with hotspan's tiers passes; against another computation it is a drift."""
    model = make_demo_model(tmp_path / "tiny", "tiny").path
    plain, cached, changed = (
        f"{model} --no-cache {ENGINE}",
        f"{model} --ram-gib 0.1 --disk {tmp_path / 'kv'} --disk-gib 0.1 {ENGINE}",
        f"""{model} --no-cache --hf-overrides '{{"rms_norm_eps": 0.5}}' {ENGINE}""",
    )
    for b, status in ((cached, 0), (changed, 1)):
        output = tmp_path / "ab.json"
        sides = ("--a-serve", plain, "--b-serve", b, "--logs", str(tmp_path), "--json", str(output))
        command = [sys.executable, "-m", "hotspan", "ab", *sides, *LIMITS, "--items", "20", "--max-tokens", "8", "-q"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=500)
        assert done.returncode == status, done.stdout + done.stderr
        result = AbResult.load(output)
        assert result.compared == 20 and result.agreements[0].kl is not None
        assert result.agreements[2].different.count == (0 if status == 0 else 20)
