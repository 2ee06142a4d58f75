"""How busy the engine's GPUs are, on the server's page of metrics. Nothing where there are no NVIDIA GPUs."""

import contextlib
import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

logger = logging.getLogger(__name__)

NAME = "hotspan_gpu_utilization_ratio"
MEANING = "Share of the last sample period (up to 1 s) in which a GPU computed, by its number in the machine."


class GpuUtilization(Collector):
    """Reads NVML each time the metrics are asked for.

    nvml: the module pynvml. handles: of the GPUs, by their numbers.
    """

    def __init__(self, nvml: Any, handles: Mapping[int, Any]) -> None:
        self._nvml = nvml
        self._handles = handles

    def collect(self) -> Iterable[GaugeMetricFamily]:
        """One sample a GPU; none of one that does not answer."""
        family = GaugeMetricFamily(NAME, MEANING, labels=("gpu",))
        for number, handle in self._handles.items():
            with contextlib.suppress(self._nvml.NVMLError):
                family.add_metric([str(number)], self._nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100)
        yield family


@contextlib.contextmanager
def gpus_shown(count: int, registry: CollectorRegistry = REGISTRY) -> Iterator[None]:
    """The utilization of the engine's first `count` GPUs is among the metrics until the block ends."""
    with contextlib.ExitStack() as shown:
        try:
            if (collector := _collector(count)) is not None:
                registry.register(collector)
                shown.callback(registry.unregister, collector)
        except Exception as error:  # whatever driver and library say: the server serves without these figures
            logger.warning("gpus_not_shown: %s", error)
        yield


def _collector(count: int) -> GpuUtilization | None:
    from vllm.platforms import current_platform
    from vllm.utils.import_utils import import_pynvml

    if not current_platform.is_cuda():
        return None
    nvml = import_pynvml()
    nvml.nvmlInit()
    numbers = [current_platform.device_id_to_physical_device_id(place) for place in range(count)]
    return GpuUtilization(nvml, {number: nvml.nvmlDeviceGetHandleByIndex(number) for number in numbers})
