"""Grafana's dashboard of the compose example, from the declared metrics: `make reference`.

An overview first, then a collapsed row for each subsystem, with a panel for each metric that the code declares.
"""

import json
from collections.abc import Iterable
from itertools import count, groupby
from pathlib import Path
from typing import Any

from docsite.metrics import Declared, declared

BOARD = Path(__file__).resolve().parents[1] / "examples" / "compose" / "grafana" / "hotspan.json"

Json = dict[str, Any]

HIT, LOOKED = "rate(hotspan_cache_hit_tokens_total[5m])", "sum(rate(hotspan_cache_lookup_tokens_total[5m]))"

OVERVIEW = (
    ("Hit rate of the tiers", "percentunit", f"sum({HIT}) / {LOOKED}"),
    ("Hit rate by tier", "percentunit", f"sum by (tier) ({HIT}) / ignoring(tier) group_left {LOOKED}"),
    ("Tokens per second that were not computed", "short", f"sum({HIT})"),
    (
        "Time to first token, p99",
        "s",
        "histogram_quantile(0.99, sum by (le) (rate(vllm:time_to_first_token_seconds_bucket[5m])))",
    ),
    (
        "Time to load from each tier, p99",
        "s",
        "histogram_quantile(0.99, sum by (le, tier) (rate(hotspan_cache_load_seconds_bucket[5m])))",
    ),
    ("How full a tier is", "percentunit", "hotspan_cache_used_bytes / hotspan_cache_capacity_bytes"),
    (
        "Tokens that a tier has room for",
        "short",
        "hotspan_cache_capacity_bytes / ignoring(tier) group_left hotspan_cache_token_bytes",
    ),
    ("Writes to each tier", "Bps", "sum by (tier) (rate(hotspan_cache_store_bytes_total[5m]))"),
    ("Error of the cost model", "percentunit", "hotspan_cost_error"),
    (
        "Time to first byte at the router, p99",
        "s",
        "histogram_quantile(0.99, sum by (le) (rate(hotspan_router_first_byte_seconds_bucket[5m])))",
    ),
    ("Tiers that are up", "short", "hotspan_cache_tier_up"),
    (
        "Cached tokens that were computed, by reason",
        "short",
        "sum by (reason, engine_state) (rate(hotspan_cost_refused_tokens_total[5m]))",
    ),
    (
        "Prompt tokens that were computed, by reason",
        "short",
        "sum by (reason) (rate(hotspan_cache_computed_tokens_total[5m]))",
    ),
    ("Requests at each replica", "short", "hotspan_router_in_flight_requests"),
    ("GPU utilization", "percentunit", "hotspan_gpu_utilization_ratio"),
    (
        "GPU-seconds per request",
        "s",
        "sum(avg_over_time(hotspan_gpu_utilization_ratio[5m])) / sum(rate(vllm:request_success_total[5m]))",
    ),
)
"""Title, unit, PromQL. The first ten are in docs/guides/monitoring.md."""


def board() -> str:
    """examples/compose/grafana/hotspan.json."""
    ids = count(1)
    panels = [_panel(next(ids), n, 0, title, unit, query) for n, (title, unit, query) in enumerate(OVERVIEW)]
    y = 8 * ((len(OVERVIEW) + 1) // 2)
    for subsystem, metrics in groupby(sorted(declared(), key=_subsystem), _subsystem):
        row = {"id": next(ids), "type": "row", "title": f"All metrics: {subsystem}", "collapsed": True}
        inside = [
            _panel(next(ids), n, y + 1, each.title, each.unit, each.query, each.labels, each.meaning)
            for n, each in enumerate(metrics)
        ]
        panels.append({**row, "gridPos": {"x": 0, "y": y, "w": 24, "h": 1}, "panels": inside})
        y += 1
    head = {"uid": "hotspan", "title": "hotspan", "schemaVersion": 39, "version": 1, "refresh": "15s"}
    return json.dumps(
        {**head, "time": {"from": "now-1h", "to": "now"}, "tags": ["hotspan"], "panels": panels}, indent=1
    )


def _subsystem(metric: Declared) -> str:
    return metric.name.split("_")[1]


def _panel(
    number: int, place: int, y: int, title: str, unit: str, query: str, labels: Iterable[str] = (), meaning: str = ""
) -> Json:
    target = {"refId": "A", "expr": query}
    if legend := " ".join(f"{{{{{label}}}}}" for label in labels):
        target["legendFormat"] = legend
    return {
        "id": number,
        "title": title,
        "description": meaning,
        "type": "timeseries",
        "datasource": {"type": "prometheus", "uid": "prometheus"},
        "gridPos": {"x": 12 * (place % 2), "y": y + 8 * (place // 2), "w": 12, "h": 8},
        "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
        "targets": [target],
    }


def rules() -> str:
    """The dashboard's queries as recording rules, so that promtool parses them."""
    queries = [query for _, _, query in OVERVIEW] + [each.query for each in declared()]
    named = [{"record": f"hotspan:query_{n}", "expr": query} for n, query in enumerate(queries)]
    return json.dumps({"groups": [{"name": "hotspan", "rules": named}]})


if __name__ == "__main__":
    print(rules())
