"""Edges of the simulator that no other test of this package stands on (`make mutants` found them)."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hotspan.cli.main import app
from hotspan.core.recorded import RecordedServer
from hotspan.core.types import GIB
from hotspan.simulate.caches import Pool
from hotspan.simulate.recorded import _sizes
from hotspan.simulate.report import _cards
from hotspan.simulate.shapes import sources


def test_the_pool_forgets_what_was_used_longest_ago() -> None:
    """What a request uses again stays, and what nobody asked for meanwhile goes."""
    pool = Pool(3 * 512, 512, 16)
    for key in (1, 2, 3):
        pool.use([key])
    pool.use([1])
    pool.use([4])
    assert [pool.prefix([key], 0, 1) for key in (1, 2, 3, 4)] == [1, 0, 1, 1]
    assert len(pool) == 3


def test_what_a_recording_does_not_tell_is_no_option() -> None:
    """A size of 0 is none."""
    silent = RecordedServer(tier_bytes={"ram": 2.0 * GIB})
    found = _sizes(silent)
    assert found["ram_gib"] == (2.0,)
    assert not {"gpu_tokens", "step_tokens", "max_running", "kv_bytes"} & found.keys()


@pytest.mark.parametrize("name", ["conversation", "synthetic", "toolagent", "documents"])
def test_made_traces_are_the_same_for_ever(name: str) -> None:
    """The first requests of each, by a digest: figures of docs rest on them."""
    trace = sources([name], 300)[name](1)
    said = [(round(each.at_s, 6), each.tokens, each.answer_tokens, len(each.keys)) for each in trace.requests]
    assert hashlib.sha256(repr(said).encode()).hexdigest()[:16] == DIGESTS[name]


DIGESTS = {
    "conversation": "e74a92a468415fb1",
    "synthetic": "d3adaf1deb6ee8f1",
    "toolagent": "7a266ea2dcbf236d",
    "documents": "6ce7d9c04d53b9db",
}


def test_a_report_of_one_size_and_one_strategy(tmp_path: Path) -> None:
    """It is written, with the strategy in it."""
    words = ["simulate", "--requests", "30", "--trace", "synthetic", "--strategy", "auto", "--replicas", "2"]
    done = CliRunner().invoke(app, [*words, "--report", str(tmp_path / "r.html")])
    assert done.exit_code == 0, done.output
    assert "auto" in (tmp_path / "r.html").read_text()


@dataclass(frozen=True)
class Line:
    """A line of a comparison whose figures are all the same."""

    policy: str
    seconds: float

    def ttft_s(self, figure: str) -> float:
        return self.seconds


def test_a_card_has_what_auto_gains_over_the_next_best() -> None:
    """By how much it is faster; nothing where it, or all others, are not compared."""
    lines: list[Any] = [Line("roundrobin", 9.0), Line("auto", 2.0), Line("session", 3.0), Line("auto-no-events", 1.0)]
    assert [card.figure for card in _cards("made", lines)] == ["1.50x", "1.50x"]
    assert all("2.00 s, against 3.00 s of session" in card.detail for card in _cards("made", lines))
    assert _cards("made", lines[:1]) == _cards("made", lines[1:2]) == []
