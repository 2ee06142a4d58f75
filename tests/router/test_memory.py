"""What a router's process does not keep."""

import ctypes
import subprocess
import sys
from pathlib import Path

import pytest
from prometheus_client import values

from hotspan.router.metrics import Metrics
from hotspan.router.types import Strategy

REMAKE = """
import sys
from pathlib import Path
from hotspan.router.run import settle_memory

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

if sys.argv[1] == "settled":
    settle_memory()
first = b"x" * (30 << 20)
del first
table, behind = b"x" * (20 << 20), b"x" * (2 << 20)
before = resident()
del table
print(before - resident())
"""


@pytest.mark.skipif(
    sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "mallopt"), reason="it is glibc that would keep it"
)
def test_a_table_made_anew_leaves_no_hole() -> None:
    """What it took goes back to the system, also after a larger one was freed, and whatever lies behind it."""

    def returned(how: str) -> int:
        done = subprocess.run([sys.executable, "-c", REMAKE, how], capture_output=True, text=True, check=True)
        return int(done.stdout)

    assert returned("settled") >= 19 << 20
    assert returned("as it is") < 1 << 20  # else there is nothing to settle


def test_metrics_are_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory for the metrics of an engine's processes, which all of a user's programs are told of, stays empty."""
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    monkeypatch.setattr(values, "ValueClass", values.MultiProcessValue())  # what the library takes then
    metrics = Metrics(Strategy.AUTO)
    metrics.requests["work", "ok"] += 1
    assert b'hotspan_router_requests_total{outcome="ok",route="work"} 1.0' in metrics.page()
    assert not list(tmp_path.iterdir())
