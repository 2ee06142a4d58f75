"""`hotspan bench compare` with two real servers, of which one has a cache. `make test-slow` runs it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import serving

pytestmark = [pytest.mark.engine, pytest.mark.slow]

WORKLOAD = (
    *("--workload", "long-doc-qa", "--ldqa-document-length", "1500", "--ldqa-num-documents", "12"),
    *("--ldqa-max-output-length", "4", "--repetitions", "2"),
)
"""Of more text than the GPU pool of the test's servers holds (8,192 tokens)."""


def test_a_cache_beside_none(tiny_model: Path, tmp_path: Path) -> None:
    """Both get the same requests in turns and answer all; only the one with a cache has hits in RAM."""
    output, report = tmp_path / "both.json", tmp_path / "report.html"
    with (
        serving(tiny_model, tmp_path / "a", "--no-cache") as alone,
        serving(tiny_model, tmp_path / "b", "--ram-gib", "0.5") as cached,
    ):
        command = [sys.executable, "-m", "hotspan", "bench", "compare", alone.url, cached.url, *WORKLOAD]
        condition = ("--fail-if", "successful_requests < 1x")
        done = subprocess.run(
            [*command, *condition, "--output", str(output), "--report", str(report)], capture_output=True, text=True
        )
    assert done.returncode == 0, done.stdout + done.stderr
    both = json.loads(output.read_text())
    assert both["a_is"] == alone.url and both["b_is"] == cached.url
    assert both["ratios"]["successful_requests"]["mean"] == 1
    cached_rates = {side: both[side]["cached_rate"]["mean"] for side in ("a", "b")}
    assert cached_rates["a"] < 0.5 < 0.9 < cached_rates["b"], both
    assert "hit_rate_ram" not in both["a"] and both["b"]["hit_rate_ram"]["mean"] > 0.5
    assert cached.url in report.read_text()
