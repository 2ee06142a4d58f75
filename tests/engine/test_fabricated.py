"""The small version of benchmarks/identity.py's long texts."""

from pathlib import Path

import pytest

from benchmarks.identity import fabricated


@pytest.mark.parametrize("sealed", [False, True], ids=["plain", "sealed"])
def test_a_long_text_comes_back_chunk_by_chunk(tmp_path: Path, sealed: bool) -> None:
    """40,000 tokens through a RAM that holds a part, disk and a restart: every chunk is compared, none wrong."""
    found = fabricated(tmp_path, 40_000, sealed=sealed)
    assert (found["chunks_compared"], found["chunks_wrong"]) == (40_000 // 256, 0)
