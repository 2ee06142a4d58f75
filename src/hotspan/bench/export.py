"""The CSV and JSON files that users of `lmcache bench engine` know: their columns and keys first, then our own."""

import csv
import json
from pathlib import Path
from typing import Any, Final

from hotspan.bench.records import BenchResult, Quantiles, RequestRecord, RoundResult
from hotspan.bench.summary import quantiles
from hotspan.core.errors import ConfigError

CSV_NAME: Final = "bench_results.csv"
SUMMARY_NAME: Final = "bench_summary.json"
RESULT_NAME: Final = "hotspan_bench.json"

CSV_COLUMNS: Final = (
    "request_id",
    "successful",
    "ttft",
    "request_latency",
    "num_input_tokens",
    "num_output_tokens",
    "decode_speed",
    "submit_time",
    "first_token_time",
    "finish_time",
    "error",
)

EXTRA_COLUMNS: Final = ("cached_tokens", "due_time", "tpot", "itl_p50", "itl_p90", "itl_p99")
"""What follows them; empty where the server doesn't say, the schedule names no time, or an answer was too short."""

_PERCENTILES: Final = ("p50", "p90", "p99")


def write_csv(path: Path, query: RoundResult) -> None:
    """One line a request of the query round, in order of dispatch; all times in seconds.

    An ITL is the time between two pieces of one answer, which may be several tokens; TPOT counts every token.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(CSV_COLUMNS + EXTRA_COLUMNS)
        writer.writerows(_line(record) for record in query.records)


def _line(record: RequestRecord) -> list[Any]:
    itl = quantiles(record.inter_token_s)
    known = [getattr(record, column) for column in (*CSV_COLUMNS, "cached_tokens", "due_time", "tpot")]
    return known + [getattr(itl, p) if itl else None for p in _PERCENTILES]


def summary_of(result: BenchResult, **more: Any) -> dict[str, Any]:
    """`{"config": ..., "results": ...}` of the query round, and what is given besides."""
    return {"config": dict(result.config), "results": results_of(result.query), **more}


def write_summary(path: Path, summary: dict[str, Any]) -> None:
    """What `summary_of` gave, as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(summary, indent=2) + "\n")


def result_path(directory: Path, repetition: int) -> Path:
    """Where the full result of one repetition, counted from 0, is written."""
    return directory / (RESULT_NAME if not repetition else RESULT_NAME.replace(".json", f".{repetition + 1}.json"))


def results_at(path: Path) -> tuple[BenchResult, ...]:
    """The result in a file, or all repetitions in a directory. Raises: ConfigError if there is none."""
    if not path.is_dir():
        return (BenchResult.load(path),)
    paths = [result_path(path, number) for number in range(len(list(path.iterdir())))]
    found = tuple(BenchResult.load(each) for each in paths if each.is_file())
    if not found:
        raise ConfigError(f"{path} has no {RESULT_NAME}: write it with hotspan bench engine --output DIR")
    return found


def results_of(query: RoundResult) -> dict[str, Any]:
    """The `results` object: of the known keys, a figure that no request gives (all failed) is 0; of ours, null."""
    s = query.summary
    none = Quantiles(0.0, 0.0, 0.0, 0.0)
    ttft, speed, latency = s.ttft_s or none, s.decode_speed or none, s.request_latency_s or none
    known = (("ttft_ms", ttft, 1e3), ("decode_speed", speed, 1.0), ("request_latency_ms", latency, 1e3))
    ours = {"itl_ms": s.inter_token_s, "tpot_ms": s.tpot_s, "late_ms": s.late_s, "ttft_from_due_ms": s.ttft_from_due_s}
    return {
        "total_requests": s.requests,
        "successful_requests": s.requests - s.failed,
        "failed_requests": s.failed,
        "elapsed_time": s.elapsed_s,
        **{f"mean_{name}": values.mean * factor for name, values, factor in known},
        "input_throughput": s.input_throughput,
        "output_throughput": s.output_throughput,
        "total_input_tokens": s.prompt_tokens,
        "total_output_tokens": s.output_tokens,
        **{f"{p}_{name}": getattr(values, p) * factor for name, values, factor in known for p in _PERCENTILES},
        "loop": query.loop.value,
        "unsent_requests": s.unsent,
        "success_rate": s.success_rate,
        **{
            f"{p}_{name}": getattr(values, p) * 1e3 if values else None
            for name, values in ours.items()
            for p in ("mean", *_PERCENTILES)
        },
        "total_cached_tokens": s.cached_tokens,
        "cached_rate": s.cached_rate,
        "hit_rates": s.hit_rates,
        "requests_within_slo": s.within_slo,
        "goodput": s.goodput,
        "quality": s.quality,
        "f1": s.f1,
        "parse_rate": s.parse_rate,
        "parsed_f1": s.parsed_f1,
    }
