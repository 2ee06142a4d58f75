"""Two ranks over one slab."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hotspan.tiers.slab import sweep_dead_slabs

from .rig import CHUNK

pytestmark = pytest.mark.engine


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="two ranks need two cores")
def test_tensor_parallel_hits(tiny_model: Path, tmp_path: Path) -> None:
    """With TP=2, RAM and disk hits give the tokens of the engine's own prefix-cache hit."""
    sweep_dead_slabs()
    environment = {key: value for key, value in os.environ.items() if not key.startswith("VLLM_")}
    done = subprocess.run(
        [sys.executable, "-m", "tests.engine.tensor_parallel", str(tiny_model), str(tmp_path / "kv")],
        env=environment,
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=300,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("ANSWERS ")]
    assert lines, done.stdout[-3000:] + done.stderr[-3000:]
    answers = json.loads(lines[0].removeprefix("ANSWERS "))
    whole = 2900 // CHUNK * CHUNK
    assert answers["own"]["cached"] >= whole
    for tier in ("ram", "disk"):
        assert answers[tier] == {"cached": whole, "tokens": answers["own"]["tokens"]}
    assert sweep_dead_slabs() == 0, "a slab kept its name"
