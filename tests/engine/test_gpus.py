"""The utilization of GPUs, of a library that stands in for NVML."""

from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

pytest.importorskip("vllm")

from hotspan.engine import gpus


class NVMLError(Exception):
    """What NVML's functions raise."""


class FakeNvml:
    """Two GPUs, of which one is gone."""

    NVMLError = NVMLError

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:
        if handle == 3:
            raise NVMLError("the GPU is lost")
        return SimpleNamespace(gpu=75)


def test_each_gpu_that_answers_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a share, by its number, while the engine runs."""
    registry = CollectorRegistry()
    monkeypatch.setattr(gpus, "_collector", lambda count: gpus.GpuUtilization(FakeNvml(), {2: 2, 3: 3}))
    with gpus.gpus_shown(2, registry):
        lines = [line for line in generate_latest(registry).decode().splitlines() if not line.startswith("#")]
        assert lines == ['hotspan_gpu_utilization_ratio{gpu="2"} 0.75']
    assert generate_latest(registry) == b""


def test_without_a_gpu_nothing_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither on CPUs, nor where the driver fails: the server serves all the same."""
    registry = CollectorRegistry()
    with gpus.gpus_shown(1, registry):
        assert generate_latest(registry) == b""

    def broken(count: int) -> None:
        raise RuntimeError("no driver")

    monkeypatch.setattr(gpus, "_collector", broken)
    with gpus.gpus_shown(1, registry):
        assert generate_latest(registry) == b""
