"""The CSV and JSON files that users of `lmcache bench engine` know, column for column and key for key."""

import csv
import json
from pathlib import Path
from typing import Any, Final

from hotspan.bench.records import BenchResult, Quantiles, RoundResult

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


def write_csv(path: Path, query: RoundResult) -> None:
    """One line a request of the query round, in order of dispatch; all times in seconds."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(CSV_COLUMNS)
        writer.writerows([getattr(record, column) for column in CSV_COLUMNS] for record in query.records)


def write_summary(path: Path, result: BenchResult) -> None:
    """`{"config": ..., "results": ...}` of the query round."""
    path.parent.mkdir(parents=True, exist_ok=True)
    summary = {"config": dict(result.config), "results": results_of(result.query)}
    path.write_text(json.dumps(summary, indent=2) + "\n")


def results_of(query: RoundResult) -> dict[str, Any]:
    """The `results` object; a figure that no request gives (all failed) is 0."""
    s = query.summary
    none = Quantiles(0.0, 0.0, 0.0, 0.0)
    ttft, speed, latency = s.ttft_s or none, s.decode_speed or none, s.request_latency_s or none
    results: dict[str, Any] = {
        "total_requests": s.requests,
        "successful_requests": s.requests - s.failed,
        "failed_requests": s.failed,
        "elapsed_time": s.elapsed_s,
        "mean_ttft_ms": ttft.mean * 1e3,
        "mean_decode_speed": speed.mean,
        "mean_request_latency_ms": latency.mean * 1e3,
        "input_throughput": s.input_throughput,
        "output_throughput": s.output_throughput,
        "total_input_tokens": s.prompt_tokens,
        "total_output_tokens": s.output_tokens,
    }
    for name, values, factor in (
        ("ttft_ms", ttft, 1e3),
        ("decode_speed", speed, 1.0),
        ("request_latency_ms", latency, 1e3),
    ):
        results |= {f"{p}_{name}": getattr(values, p) * factor for p in ("p50", "p90", "p99")}
    return results
