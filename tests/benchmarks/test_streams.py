"""The bench's requests beside those that LMCache's own bench sent (benchmarks/results/streams.json)."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.peers.streams import CASES, digest, ours

RESULTS = Path(__file__).parents[2] / "benchmarks/results/streams.json"
ROWS: list[dict[str, Any]] = json.loads(RESULTS.read_text())["streams"]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['workload']}-{row['requests']}")
def test_the_stream_is_that_of_lmcache(row: dict[str, Any]) -> None:
    """The same seed and flags give the ids, messages and lengths that LMCache's code gave, in the same order."""
    stream = ours(row["workload"], row["flags"], row["kv_cache_volume"], row["seed"])
    assert (len(stream), digest(stream)) == (row["requests"], row["reference"])


def test_the_results_are_of_these_cases() -> None:
    """No case was added or changed without asking LMCache."""
    assert [(row["workload"], row["flags"], row["kv_cache_volume"], row["seed"]) for row in ROWS] == list(CASES)
