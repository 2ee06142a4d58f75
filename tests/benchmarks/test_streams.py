"""The bench's requests beside those that LMCache's own bench sent (benchmarks/results/streams.json)."""

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.peers.material import TOKENIZERS, material
from benchmarks.peers.streams import CASES, Case, digest, ours

RESULTS = Path(__file__).parents[2] / "benchmarks/results/streams.json"
ROWS: list[dict[str, Any]] = json.loads(RESULTS.read_text())["streams"]


def case_of(row: dict[str, Any]) -> Case:
    return Case(row["workload"], row["flags"], row["kv_cache_volume"], row["seed"], row["tokenizer"])


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['workload']}-{row['requests']}-{row['tokenizer']}")
def test_the_stream_is_that_of_lmcache(row: dict[str, Any]) -> None:
    """The same seed, flags and tokenizer give the ids, messages and lengths that LMCache's code gave, in its order."""
    with material() if row["tokenizer"] else contextlib.nullcontext():
        played = ours(case_of(row))
    assert (len(played.stream), digest(played.stream)) == (row["requests"], row["reference"])
    if "reference_quality" in row:
        assert digest(played.quality) == row["reference_quality"]


def test_the_results_are_of_these_cases() -> None:
    """No case was added or changed without asking LMCache; each tokenizer is used, and rag-qa-quality is scored."""
    assert [case_of(row) for row in ROWS] == list(CASES)
    assert {row["tokenizer"] for row in ROWS} == {"", *TOKENIZERS}
    assert all("reference_quality" in row for row in ROWS if row["workload"] == "rag-qa-quality")
