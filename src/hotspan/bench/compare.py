"""Two runs of the same requests, side by side."""

from dataclasses import dataclass
from typing import Final

from hotspan.bench.records import BenchResult

TIMES: Final = "\N{MULTIPLICATION SIGN}"


@dataclass(frozen=True, slots=True)
class NamedRun:
    """A run with its short name, the title it goes by, how its server was started, and what sets it apart."""

    name: str
    title: str
    result: BenchResult
    command: str = ""
    note: str = ""


@dataclass(frozen=True, slots=True)
class AnswerMatch:
    """How many of the requests that both runs answered have the same answer, byte for byte."""

    same: int
    compared: int

    @property
    def all_same(self) -> bool:
        return self.compared > 0 and self.same == self.compared

    def __str__(self) -> str:
        return f"{self.same} of {self.compared}" if self.compared else "-"


def match_answers(result: BenchResult, reference: BenchResult) -> AnswerMatch:
    """Compare the answers of the query rounds, request by request; failures are compared with nothing."""
    expected = {r.request_id: r.answer_sha256 for r in reference.query.records if r.successful}
    pairs = [
        (r.answer_sha256, expected[r.request_id])
        for r in result.query.records
        if r.successful and r.request_id in expected
    ]
    return AnswerMatch(same=sum(ours == theirs for ours, theirs in pairs), compared=len(pairs))


@dataclass(frozen=True, slots=True)
class SpeedUp:
    """How many times faster the query round was than the reference's; None where either has no such figure."""

    ttft: float | None
    total: float | None


def speed_up(result: BenchResult, reference: BenchResult) -> SpeedUp:
    """Mean TTFT and total latency of the query rounds, reference over result."""
    ours, theirs = result.query.summary, reference.query.summary
    ttft = theirs.ttft_s.mean / ours.ttft_s.mean if ours.ttft_s and theirs.ttft_s and ours.ttft_s.mean else None
    total = theirs.elapsed_s / ours.elapsed_s if ours.elapsed_s and theirs.elapsed_s else None
    return SpeedUp(ttft, total)
