"""What the daemon says of itself: figures for /v1/stats, and the same as Prometheus metrics."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from hotspan.daemon.disk import DiskCounts
from hotspan.daemon.stored import PoolCounts

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


GAUGES = {
    "objects": "Objects in memory, whole.",
    "used_bytes": "Bytes of memory that objects take.",
    "pinned_bytes": "Bytes that are leased or being written, so that they can't give way.",
    "free_bytes": "Bytes of memory that nothing takes.",
    "capacity_bytes": "Bytes of memory for objects.",
    "leases": "Leases that last.",
    "disk_objects": "Copies on disk.",
    "disk_used_bytes": "Bytes of disk that copies take.",
    "disk_capacity_bytes": "Bytes of disk for copies.",
    "disk_bad_slots": "Slots that are set aside because they fail while the disk works elsewhere.",
    "disk_unsaved": "Objects that wait to be written to disk, which a kill would lose.",
    "disk_is_up": "0 if there is no disk, or it is left alone.",
    "unix_clients": "Clients of the Unix socket.",
    "http_connections": "Connections of HTTP.",
    "log_entries": "Entries of the log of invalidations.",
    "replicas": "Replicas that follow the log.",
    "is_exposed": "1 if other machines can reach the HTTP port, which knows no authentication.",
    "segment_named": "0 if clients don't find the shared memory by its name, and miss everything.",
    "uptime_s": "Seconds since the start.",
}


class DaemonFigures(Collector):
    """Both kinds of figures, read when they are asked for.

    gauges: the present values, by the names of GAUGES. names_restored: how often a name of the segment was put back.
    """

    def __init__(
        self,
        pool: PoolCounts,
        disk: DiskCounts,
        gauges: Callable[[], Mapping[str, float]],
        names_restored: Callable[[], int],
    ) -> None:
        self._pool = pool
        self._disk = disk
        self._gauges = gauges
        self._names_restored = names_restored
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def stats(self) -> dict[str, Any]:
        """All of them by name."""
        return {**self._gauges(), **self._counts()}

    def page(self) -> bytes:
        """All of them in Prometheus' text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        for name, count in self._counts().items():
            yield CounterMetricFamily(_PREFIX + name, _COUNTERS[name], value=count)
        for name, value in self._gauges().items():
            yield GaugeMetricFamily(_PREFIX + name, GAUGES[name], value=value)

    def _counts(self) -> dict[str, int]:
        """What only grows, by name."""
        of_disk = {f"disk_{name}": value for name, value in asdict(self._disk).items()}
        return {**asdict(self._pool), "segment_names_restored": self._names_restored(), **of_disk}
