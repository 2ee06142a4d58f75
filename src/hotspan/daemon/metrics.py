"""What the daemon says of itself: figures for /v1/stats, and the same as Prometheus metrics."""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from hotspan.daemon.disk import DiskCounts
from hotspan.daemon.pool import PoolCounts

_PREFIX = "hotspan_daemon_"
_COUNTERS = {
    "stored": "Objects stored.",
    "stored_bytes": "Bytes stored.",
    "aborted": "Objects whose writer stopped before they were whole.",
    "evicted": "Objects that gave way to others.",
    "evicted_bytes": "Bytes of objects that gave way.",
    "deleted": "Objects deleted by clients.",
    "leased": "Leases granted.",
    "leases_expired": "Leases that nobody released in time.",
    "hits": "Objects looked up and there.",
    "misses": "Objects looked up and not there.",
    "refused_exists": "Puts of what was there, or being written.",
    "refused_too_large": "Puts larger than the cache.",
    "refused_no_room": "Puts for which nothing could give way.",
    "refused_lease": "Leases that were to last longer than --max-lease-s.",
    "segment_names_restored": "Names of the shared memory that a client removed and that were put back.",
    "disk_stored": "Objects written to disk.",
    "disk_stored_bytes": "Bytes written to disk.",
    "disk_loaded": "Objects read from disk into memory.",
    "disk_loaded_bytes": "Bytes read from disk.",
    "disk_evicted": "Copies on disk that gave way to others.",
    "disk_late": "Objects that gave way in memory before they were on disk.",
    "disk_faults": "Reads and writes of the disk that failed.",
    "disk_corrupt": "Copies on disk that were not what had been written.",
    "disk_trips": "Times that the disk was left alone because it hung or failed.",
}


@dataclass(frozen=True, slots=True)
class DaemonGauges:
    """What is so now.

    objects, used_bytes: whole, in memory. pinned_bytes: leased or being written, so that they can't give way.
    disk_unsaved:        objects that wait to be written to disk, which a kill would lose.
    disk_is_up:          0 if there is none, or it is left alone.
    segment_named:       0 if clients don't find the shared memory by its name, and miss everything.
    is_exposed:          1 if other machines can reach the HTTP port, which knows no authentication.
    """

    objects: int
    used_bytes: int
    pinned_bytes: int
    free_bytes: int
    capacity_bytes: int
    leases: int
    disk_objects: int
    disk_used_bytes: int
    disk_capacity_bytes: int
    disk_unsaved: int
    disk_is_up: int
    door_clients: int
    http_connections: int
    log_entries: int
    replicas: int
    segment_named: int
    is_exposed: int
    uptime_s: float


@dataclass(frozen=True, slots=True)
class DaemonFigures:
    """Both kinds of figures, read when they are asked for."""

    pool: PoolCounts
    disk: DiskCounts
    gauges: Callable[[], DaemonGauges]
    names_restored: Callable[[], int]

    def counts(self) -> dict[str, int]:
        """What only grows, by name."""
        of_disk = {f"disk_{name}": value for name, value in asdict(self.disk).items()}
        return {**asdict(self.pool), "segment_names_restored": self.names_restored(), **of_disk}

    def stats(self) -> dict[str, Any]:
        """All of them by name."""
        return {**asdict(self.gauges()), **self.counts()}


class Exposition(Collector):
    """The figures in Prometheus' text format; `page` is the answer to a scrape."""

    def __init__(self, figures: DaemonFigures) -> None:
        self._figures = figures
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def collect(self) -> Iterator[Metric]:
        for name, value in self._figures.counts().items():
            yield CounterMetricFamily(_PREFIX + name, _COUNTERS[name], value=value)
        for name, value in asdict(self._figures.gauges()).items():
            yield GaugeMetricFamily(_PREFIX + name, f"{name.replace('_', ' ').capitalize()}.", value=value)

    def page(self) -> bytes:
        """All metrics."""
        return generate_latest(self._registry)
