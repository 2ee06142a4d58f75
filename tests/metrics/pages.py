"""Which series have moved on pages of metrics that are read again and again."""

from collections.abc import Iterable

from prometheus_client.core import Metric

Value = tuple[str, str, str]
"""A metric, one of its labels, and a value of that; both empty for a metric without labels."""

OPEN = {"replica", "model", "gpu"}
"""Labels whose values are names that users give, or numbers of devices: any value will do."""


class Pages:
    """declared: every value of every label, from a page on which nothing has moved yet."""

    def __init__(self, declared: Iterable[Metric]) -> None:
        self.declared = {value for metric in declared for value in _values(metric, False)}
        self.moved: set[Value] = set()

    def note(self, metrics: Iterable[Metric]) -> None:
        """Series that are other than 0."""
        self.moved |= {value for metric in metrics for value in _values(metric, True)}

    @property
    def unmoved(self) -> list[Value]:
        """Declared values that were 0 on every page."""
        return sorted(self.declared - self.moved)

    @property
    def undeclared(self) -> list[Value]:
        """Values on a page that were not declared."""
        return sorted(self.moved - self.declared)


def _values(metric: Metric, has_moved: bool) -> Iterable[Value]:
    for sample in metric.samples:
        if has_moved and not sample.value:
            continue
        labels = {name: "" if name in OPEN else value for name, value in sample.labels.items() if name != "le"}
        for name, value in labels.items() or [("", "")]:
            yield metric.name, name, value
    if not metric.samples and not has_moved:
        for name in metric._labelnames if hasattr(metric, "_labelnames") else [""]:
            yield metric.name, name, ""
