"""Prometheus' alert rules of the compose example and of docs/guides/monitoring.md, from the declared metrics."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from docsite.metrics import Declared, declared

ROOT = Path(__file__).resolve().parents[1]
FILE, PAGE = ROOT / "examples" / "compose" / "alerts.yml", ROOT / "docs" / "guides" / "monitoring.md"
_BLOCK = re.compile(r"(?<=```yaml\n)groups:\n.*?(?=```)", re.DOTALL)


class Alert(NamedTuple):
    """When to call somebody.

    bound:  of a gauge's value, or of how much a counter grew in `window`.
    labels: that select series.
    wait:   how long it has to be so.
    """

    name: str
    metric: str
    bound: str
    summary: str
    wait: str = ""
    window: str = ""
    labels: Mapping[str, str] = {}

    def expression(self, metrics: Mapping[str, Declared]) -> str:
        """PromQL. Raises: KeyError for a metric or label that is not declared."""
        found = metrics[self.metric]
        if unknown := self.labels.keys() - set(found.labels):
            raise KeyError(f"{self.metric} has no label {', '.join(unknown)}")
        chosen = ", ".join(f'{name}="{value}"' for name, value in self.labels.items())
        series = self.metric + (f"{{{chosen}}}" if chosen else "")
        if found.kind == "counter":
            return f"increase({series}[{self.window}]) {self.bound}"
        return f"{series} {self.bound}"


ALERTS = (
    Alert(
        "HotspanTierDown",
        "hotspan_cache_tier_up",
        "== 0",
        "A tier is given up: its texts are computed again. The log has tier_given_up.",
        wait="2m",
    ),
    Alert(
        "HotspanCorruptData",
        "hotspan_cache_faults_total",
        "> 0",
        "Stored data failed its check and was quarantined. Look at the drive.",
        window="1h",
        labels={"fault": "corrupt"},
    ),
    Alert(
        "HotspanInvalidationsNotRead",
        "hotspan_l2_log_age_seconds",
        "> 30",
        "The log of invalidations can't be read: the L2 is not used.",
        wait="1m",
    ),
    Alert(
        "HotspanKeysUnavailable",
        "hotspan_keys_waiting",
        "> 0",
        "Keys of tenants are unavailable: their requests are not cached.",
        wait="5m",
    ),
    Alert(
        "HotspanStoresLate",
        "hotspan_cache_stores_late_total",
        "> 0",
        "A tier is slower than what is computed: chunks are evicted from RAM before they are stored.",
        wait="30m",
        window="15m",
    ),
    Alert(
        "HotspanReplicaOut",
        "hotspan_router_replica_can_take",
        "== 0",
        "The router sends a replica no requests.",
        wait="2m",
    ),
)


def rules() -> str:
    """The rules, as YAML."""
    metrics = {_total(each): each for each in declared()}
    lines = ["groups:", "  - name: hotspan", "    rules:"]
    for alert in ALERTS:
        lines += [f"      - alert: {alert.name}", f"        expr: {alert.expression(metrics)}"]
        lines += [f"        for: {alert.wait}"] if alert.wait else []
        lines += [f"        annotations: {{summary: {json.dumps(alert.summary)}}}"]
    return "\n".join(lines) + "\n"


def file() -> str:
    """examples/compose/alerts.yml."""
    return f"# Written by `make reference` from the declared metrics, as in docs/guides/monitoring.md.\n{rules()}"


def page() -> str:
    """docs/guides/monitoring.md with the rules in its place for them."""
    return _BLOCK.sub(lambda found: rules(), PAGE.read_text(), count=1)


def _total(metric: Declared) -> str:
    """The name as Prometheus shows it."""
    return f"{metric.name.removesuffix('_total')}_total" if metric.kind == "counter" else metric.name
