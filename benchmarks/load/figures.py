"""The figures of runs: one of each system at each point and round, medians, and the table."""

import re
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from hotspan.bench.counters import CacheCounters
from hotspan.bench.records import RequestRecord
from kit.measure import quantile

Figures = dict[str, Any]

_COUNTER: Final = re.compile(r"^(hotspan_\w+_total(?:\{[^}]*\})?) (\S+)$", re.MULTILINE)
_LABELS: Final = re.compile(r'\b(?:engine|model_name|worker)="[^"]*",?')
_STEPS: Final = re.compile(r"^vllm:iteration_tokens_total_count(?:\{[^}]*\})? (\S+)$", re.MULTILINE)
CHOICES: Final = 'hotspan_cost_requests_total{choice="%s"}'


def quantiles(values: Iterable[float], *percents: int) -> dict[str, float | None]:
    """Percentiles by name, interpolated linearly; None where there are no values."""
    sample = [*values]
    return {f"p{percent}": round(quantile(sample, percent / 100), 4) if sample else None for percent in percents}


def counters(page: str) -> Counter[str]:
    """hotspan's own counters on a page of metrics, summed over engines."""
    found: Counter[str] = Counter()
    for name, value in _COUNTER.findall(page):
        found[_LABELS.sub("", name).replace(",}", "}").replace("{}", "")] += float(value)
    return found


def moved(before: str, after: str) -> dict[str, float]:
    """By how much each of hotspan's counters moved, if it did."""
    old, new = counters(before), counters(after)
    return {name: round(value - old[name], 4) for name, value in sorted(new.items()) if value != old[name]}


def hits_by_tier(before: str, after: str) -> dict[str, float]:
    """Prompt tokens that each tier answered, as far as the server tells them apart."""
    now = CacheCounters.parse(after)
    return (
        {} if now is None else {tier: n for tier, n in now.since(CacheCounters.parse(before)).hit_tokens.items() if n}
    )


def steps_between(before: str, after: str) -> int:
    """Steps of the engine: two systems that take as many for the same requests differ by what a step takes alone."""
    old, new = (sum(map(float, _STEPS.findall(page))) for page in (before, after))
    return round(new - old)


def figures_of(
    records: Sequence[RequestRecord], wall_s: float, cpu_s: float, before: str, after: str, reference: Mapping[str, str]
) -> Figures:
    """What one run measured. reference: answers of the engine alone by the request's id; empty without them.

    before, after: the server's pages of metrics. TTFT is from when a request was due, where a schedule named a time.
    """
    good = [record for record in records if record.successful]
    asked = sum(record.num_input_tokens for record in good)
    answered = sum(record.num_output_tokens for record in good)
    hit = sum(record.cached_tokens or 0 for record in good)
    compared = [record for record in good if record.request_id in reference]
    metrics = moved(before, after)
    return {
        "requests": len(records),
        "failed": len(records) - len(good),
        "wall_s": round(wall_s, 3),
        "cpu_s": round(cpu_s, 3),
        "steps": steps_between(before, after),
        "requests_per_s": round(len(good) / wall_s, 4),
        "tokens_per_s": round((asked + answered) / wall_s, 1),
        "ttft_s": quantiles((r.ttft if r.ttft_from_due is None else r.ttft_from_due for r in good), 50, 95, 99),
        "inter_token_s": quantiles((gap for record in good for gap in record.inter_token_s), 50, 99),
        "prompt_tokens": asked,
        "hit": round(hit / max(asked, 1), 4),
        "hit_tokens": hits_by_tier(before, after),
        "loaded": metrics.get(CHOICES % "loaded", 0),
        "refused": metrics.get(CHOICES % "refused", 0),
        "late": metrics.get(CHOICES % "late", 0),
        "compared": len(compared),
        "differing": sum(record.answer != reference[record.request_id] for record in compared),
        "metrics": metrics,
        "errors": sorted({record.error for record in records if record.error})[:5],
    }


def median(runs: Sequence[Any]) -> Any:
    """Figure by figure the median of the rounds that have it; of what is no number, that of the first round."""
    known = [run for run in runs if run is not None]
    if not known:
        return None
    if isinstance(known[0], dict):
        keys = dict.fromkeys(key for run in known for key in run)
        return {key: median([run.get(key) for run in known]) for key in keys}
    return statistics.median(known) if isinstance(known[0], (int, float)) else known[0]


HEADS: Final = (
    *("system", "tokens hit", "wall, s", "CPU-seconds", "requests/s", "tokens/s"),
    *("TTFT p50 / p95 / p99, s", "between tokens p50 / p99, ms", "hits by tier", "loaded, refused, late"),
    *("failed", "answers that differ"),
)


def table(points: Mapping[str, Mapping[str, Figures]], titles: Mapping[str, str]) -> str:
    """Markdown: for each point a row per system, the medians of the rounds."""
    lines: list[str] = []
    for point, rows in points.items():
        lines += [f"\n{point}", "", f"| {' | '.join(HEADS)} |", "|---|" + "---:|" * (len(HEADS) - 1)]
        lines += [f"| {titles[name]} | {' | '.join(_cells(row))} |" for name, row in rows.items()]
    return "\n".join(lines)


def _cells(row: Figures) -> list[str]:
    if "error" in row:
        return [row["error"].replace("|", "/"), *[""] * (len(HEADS) - 2)]
    ttft, gaps = row["ttft_s"], row["inter_token_s"]
    asked = max(row["prompt_tokens"], 1)
    return [
        f"{row['hit']:.0%}",
        *(f"{row['wall_s']:.1f}", f"{row['cpu_s']:.1f}"),
        *(f"{row['requests_per_s']:.2f}", f"{row['tokens_per_s']:,.0f}"),
        " / ".join(_shown(ttft[key], 1) for key in ("p50", "p95", "p99")),
        " / ".join(_shown(gaps[key], 1000) for key in ("p50", "p99")),
        ", ".join(f"{tier} {tokens / asked:.0%}" for tier, tokens in row["hit_tokens"].items()),
        ", ".join(f"{row[key]:.0f}" for key in ("loaded", "refused", "late")) if row["metrics"] else "",
        str(row["failed"]),
        f"{row['differing']:.0f} of {row['compared']:.0f}" if row["compared"] else "",
    ]


def _shown(value: float | None, scale: float) -> str:
    return "" if value is None else f"{value * scale:.2f}" if scale == 1 else f"{value * scale:.0f}"
