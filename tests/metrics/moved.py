"""Which series of the engine's metrics have moved, in what engines reported."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from hotspan.core.types import Tier
from hotspan.engine.metrics import DEFINITIONS, CacheMetrics
from hotspan.engine.series import Labels, series_of

Series = tuple[str, Labels]

DECLARED: set[Series] = {(name, labels) for name in DEFINITIONS for labels in series_of(name)}


class Moved:
    """What was reported while it watched.

    A counter has moved when it grew, a histogram with a sample, a gauge when it was other than 0; one that tells
    whether something is up, when it was also 0.
    """

    def __init__(self) -> None:
        self.seen: dict[Series, set[float]] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Note what each engine reports meanwhile."""
        report = CacheMetrics.report

        def watched(metrics: CacheMetrics, token_bytes: float) -> Any:
            told = report(metrics, token_bytes)
            for name, by in (told.data["data"] if told is not None else {}).items():
                for labels, value in by.items():
                    values = value if isinstance(value, list) else [value]
                    self.seen.setdefault((name, labels), set()).update(values)
            return told

        with patch.object(CacheMetrics, "report", watched):
            yield

    def has_moved(self, series: Series) -> bool:
        """Whether one has."""
        name, values = series[0], self.seen.get(series, set())
        if name.endswith("_up") and series[1] != (Tier.RAM.value,):  # which is never given up
            return values == {0.0, 1.0}
        return any(values) or (bool(values) and name.endswith("_seconds") and not name.startswith("hotspan_cost_"))

    @property
    def unmoved(self) -> list[Series]:
        """Declared series that have not."""
        return sorted(series for series in DECLARED if not self.has_moved(series))

    @property
    def undeclared(self) -> list[Series]:
        """Reported series that nobody declared."""
        return sorted(self.seen.keys() - DECLARED)
