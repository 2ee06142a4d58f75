"""Kills over two hosts add up in one result file, and none that went wrong is lost from it."""

from collections import Counter
from pathlib import Path

from kit.proof import write_proof

from .kills import Record

RUN = {"commit": "abc", "start": "hotspan", "seed": 0}
SOUND = Counter(answers=3, hits=1, kills_of_node_1=1, ended_by_themselves=1)


def added(path: Path, run: dict[str, object], counts: Counter[str], failure: str = "", of: int = 3) -> Record:
    """What is in the file after one more kill."""
    record = Record.read(path)
    record.add(run, counts, failure)
    write_proof(path, record.proof(of), {})
    return Record.read(path)


def test_kills_add_up(tmp_path: Path) -> None:
    """A run goes on with what former ones left; it passes once there are as many as were asked for."""
    path, other = tmp_path / "kills.json", RUN | {"commit": "def"}
    assert not added(path, RUN, SOUND).proof(3).passed
    added(path, RUN, SOUND)
    record = added(path, other, SOUND)
    assert record.proof(3).passed and not record.proof(4).passed
    assert record.kills == 3 and record.counts["answers"] == 9
    assert record.runs == [RUN | {"kills": 2}, other | {"kills": 1}]


def test_what_went_wrong_stays(tmp_path: Path) -> None:
    """A wrong answer, or a node that did not end by itself, is in the file for good."""
    path = tmp_path / "kills.json"
    added(path, RUN, SOUND, "text 1: another answer", of=1)
    record = added(path, RUN, SOUND, of=2)
    assert not record.proof(2).passed and [failure.case for failure in record.failures] == [0]
    unended = added(tmp_path / "other.json", RUN, SOUND - Counter(ended_by_themselves=1), of=1)
    assert not unended.proof(1).passed and not unended.failures
