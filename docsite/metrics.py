"""The metrics that the code declares: of the server, a directory of models, the router and the daemon."""

from collections.abc import Iterable
from typing import Any, NamedTuple

from prometheus_client.core import Metric


class Declared(NamedTuple):
    """A metric. kind: counter, gauge or histogram."""

    name: str
    kind: str
    labels: tuple[str, ...]
    meaning: str

    @property
    def unit(self) -> str:
        """Grafana's."""
        words = self.name.removesuffix("_total").split("_")
        if self.name.endswith("_bytes_per_second"):
            return "Bps"
        if words[-1] == "bytes":
            return "Bps" if self.kind == "counter" else "bytes"
        if words[-1] == "seconds" and self.kind != "counter":
            return "s"
        return "percentunit" if words[-1] in ("ratio", "error") else "short"

    @property
    def query(self) -> str:
        """Counters by second, histograms at their 99th percentile, gauges as they are; by label, over all engines."""
        if self.kind == "histogram":
            by = ", ".join(("le", *self.labels))
            return f"histogram_quantile(0.99, sum by ({by}) (rate({self.name}_bucket[5m])))"
        if self.kind == "counter":
            total = f"rate({self.name.removesuffix('_total')}_total[5m])"
            return f"sum by ({', '.join(self.labels)}) ({total})" if self.labels else f"sum({total})"
        return self.name

    @property
    def title(self) -> str:
        """The name without hotspan's, and what is shown of it."""
        shown = {"histogram": ", p99", "counter": " per second"}.get(self.kind, "")
        return self.name.removeprefix("hotspan_").removesuffix("_total").replace("_", " ") + shown


def declared() -> list[Declared]:
    """The metrics of server, router and daemon. Imports vLLM."""
    from hotspan.engine import gpus
    from hotspan.engine.metrics import DEFINITIONS

    server = [
        Declared(
            name,
            type(each).__name__.removeprefix("Offloading").removesuffix("Metadata").lower(),
            tuple(each.labelnames),
            each.documentation,
        )
        for name, each in DEFINITIONS.items()
    ]
    gpu = Declared(gpus.NAME, "gauge", ("gpu",), gpus.MEANING)
    routers = [Declared(each.name, each.type, tuple(each._labelnames), each.documentation) for each in router()]
    daemons = [Declared(each.name, each.type, (), each.documentation) for each in daemon()]
    return [*server, gpu, *sorted(routers), *sorted(daemons)]


def store() -> Iterable[Metric]:
    """Of a directory of models."""
    from prometheus_client.parser import text_string_to_metric_families

    from hotspan.server.models.merging import LABEL, merged_metrics

    for family in text_string_to_metric_families(merged_metrics({}, ()).decode()):
        family._labelnames = (LABEL,)
        yield family


def router() -> Iterable[Metric]:
    """Of `hotspan route`."""
    from hotspan.router.gateway import Gateway
    from hotspan.router.settings import RouterSettings, parse_replica

    upstream: Any = None  # nothing is asked
    gateway = Gateway(RouterSettings(replicas=(parse_replica("http://127.0.0.1:1"),)), upstream)
    return gateway._metrics.registry.collect()


def daemon() -> Iterable[Metric]:
    """Of `hotspan daemon`."""
    from hotspan.daemon.disk import DiskCounts
    from hotspan.daemon.metrics import GAUGES, DaemonFigures
    from hotspan.daemon.stored import PoolCounts

    return DaemonFigures(PoolCounts(), DiskCounts(), lambda: dict.fromkeys(GAUGES, 0), lambda: 0).collect()
