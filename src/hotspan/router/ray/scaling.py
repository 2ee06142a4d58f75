"""How long a replica's queue is, and how many replicas there should be: as many as keep it at so many seconds."""

import math
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from hotspan.core.clock import Clock, SystemClock
from hotspan.core.errors import ConfigError
from hotspan.router.ray.reports import Assignment

QUEUE_SECONDS = "queue_seconds"

_CALM = 0.5
"""Below this share of the target there are too many."""


class Waiting:
    """How long what waits for its first byte will take, as the router sees it."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._work_s: OrderedDict[int, float] = OrderedDict()
        self._since = 0.0

    def begin(self, assignment: Assignment) -> None:
        """A request came."""
        if not self._work_s:
            self._since = self._clock.monotonic()
        self._work_s[assignment.number] = assignment.work_s

    def end(self, assignment: Assignment) -> None:
        """It has its first byte, or is over. Further calls do nothing."""
        if self._work_s.pop(assignment.number, None) is not None:
            self._since = self._clock.monotonic()

    @property
    def seconds(self) -> float:
        """Of all that waits, less what has passed since the last one began to answer; 0 if nothing waits."""
        if not self._work_s:
            return 0.0
        first = next(iter(self._work_s.values()))
        passed = min(self._clock.monotonic() - self._since, first)
        return sum(self._work_s.values()) - passed


class QueueSeconds:
    """A policy of Ray's autoscaler, which applies bounds and delays itself."""

    def __init__(self, target_s: float) -> None:
        if not 0 < target_s < math.inf:
            raise ConfigError(f"--target-queue-seconds is {target_s}; give a number above 0")
        self._target_s = target_s

    def __call__(self, context: Any) -> tuple[float, dict[str, Any]]:
        """The wanted number, and nothing to remember. `context`: Ray's AutoscalingContext."""
        found: Mapping[Any, float] = (context.aggregated_metrics or {}).get(QUEUE_SECONDS) or {}
        return self.wanted(context.target_num_replicas, list(found.values())), {}

    def wanted(self, count: int, queues_s: list[float]) -> int:
        """How many, if there are `count`, whose queues are as long. Those that say nothing have none."""
        if not queues_s:
            return count
        total_s = sum(queues_s)
        needed = math.ceil(total_s / self._target_s * (1 - 1e-10))  # what rounding adds asks for nobody
        if needed > count:
            return needed
        # Only so many fewer that those left would not be above the target at once.
        fewer = math.ceil(total_s / (_CALM * self._target_s)) if total_s else count - 1
        return min(max(fewer, 1), count)
