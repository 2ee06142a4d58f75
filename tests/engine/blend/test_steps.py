"""The worker's half of blending over a forward that only counts: slices, failures, and the bytes of a slot."""

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from hotspan.core.types import ChunkKey
from hotspan.engine.blend import probe
from hotspan.engine.blend.orders import BlendJob, Checked, CheckJob, Orders, Piece, Report, Selection, Speed, StoreJob
from hotspan.engine.blend.rotation import Pairing, Rotation
from hotspan.engine.blend.runs import Run, joined, token_count
from hotspan.engine.blend.selectors import Selector
from hotspan.engine.blend.steps import BlendSteps

LAYERS, WINDOW = 2, 8
SHAPE = (2, 1, 4)
AS_IT_IS = Rotation(Pairing.NONE, 0, torch.zeros(0))


class Memory:
    """KV of one request's places, by layer; computing writes its own number."""

    dtype, token_shape, layers = torch.float32, SHAPE, range(LAYERS)

    def __init__(self) -> None:
        self.kv = torch.arange(LAYERS * 64 * 8, dtype=torch.float32).view(LAYERS, 64, *SHAPE)
        self.computed: list[Run] = []
        self.fault: Exception | float | None = None
        self.others_fail = False

    def total(self, values: torch.Tensor) -> torch.Tensor:
        return values

    def is_any(self, is_so: bool) -> bool:
        return is_so or self.others_fail

    def blocks_of(self, request_id: str) -> list[int]:
        return {"running": [0]}[request_id]

    def compute(self, tokens: Any, blocks: Any, runs: Sequence[Run]) -> torch.Tensor:
        if isinstance(self.fault, Exception):
            raise self.fault
        self.computed += runs
        return torch.full((1, 1), 0.0 if self.fault is None else self.fault)

    def read(self, blocks: Any, run: Run, layer: int) -> torch.Tensor:
        return self.kv[layer, run.start : run.stop].clone()

    def write(self, blocks: Any, run: Run, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.kv[layer, run.start : run.stop] = torch.stack((keys, values), 1)


@pytest.fixture
def memory() -> Memory:
    return Memory()


@pytest.fixture
def steps(memory: Memory) -> BlendSteps:
    slots = [bytearray(4096) for _ in range(2)]
    forward: Any = memory
    made = BlendSteps(forward, [AS_IT_IS] * LAYERS, lambda slot: memoryview(slots[slot]), WINDOW, Speed(1.0, 0.1))
    assert made.take_report().speed == Speed(1.0, 0.1) and not made.take_report()
    return made


class Probed(Memory):
    """Its second layer's keys are others at `deviates` once they are computed; the question's queries are like the key
    of token 25.
    """

    block_tokens = 64

    def __init__(self) -> None:
        super().__init__()
        impl = SimpleNamespace(scale=1.0, logits_soft_cap=0)
        self.layers: Any = [SimpleNamespace(impl=impl)] * LAYERS
        self.deviates: list[int] = []

    def compute_to(self, layer: int, tokens: Any, blocks: Any, runs: Sequence[Run]) -> torch.Tensor:
        assert layer == 1
        for place in self.deviates:
            if any(run.start <= place < run.stop for run in runs):
                self.kv[layer, place, 0] += 5.0
        return torch.cat([self.read(blocks, run, layer)[:, 0] for run in runs])

    def keys(self, blocks: Any, stop: int, layer: int) -> torch.Tensor:
        return self.kv[layer, :stop, 0].clone()

    def queries_of(self, tokens: Any, blocks: Any, runs: Sequence[Run]) -> dict[int, torch.Tensor]:
        count = sum(run.tokens for run in runs)
        return dict.fromkeys(range(LAYERS), self.kv[1, 25, 0, 0].repeat(count, 1, 1))


@pytest.mark.parametrize("budget", [64, 3])
@pytest.mark.parametrize(("selector", "chosen"), [("deviation", [Run(10, 12)]), ("query", [Run(9, 10), Run(25, 26)])])
def test_a_selector_finds_what_to_compute_again(
    monkeypatch: pytest.MonkeyPatch, budget: int, selector: str, chosen: list[Run]
) -> None:
    """Whatever the slices: those that deviate most, or those that the question attends to; then these and all that is
    fresh is computed, and the report says how many were chosen."""
    monkeypatch.setattr(probe, "WIDTH", 1)
    memory: Any = Probed()
    memory.kv[:, :, 0] = 0.0
    memory.deviates = [] if selector == "query" else [10, 11]
    slot = bytearray(8192)
    window = torch.frombuffer(slot, dtype=torch.float32, count=LAYERS * 16 * 8).view(LAYERS, 16, *SHAPE)
    window[:, 7, 0] = 1.0  # so that tokens 9 and 25 have keys that the question matches
    made = BlendSteps(memory, [AS_IT_IS] * LAYERS, lambda _: memoryview(slot), 16, Speed(1.0, 0.1))
    pieces = [Piece(Run(2, 18), 0, 0, 0), Piece(Run(18, 34), 0, 0, 0)]
    share = sum(run.tokens for run in chosen) / 32
    asked = replace(job(1, Run(0, 2), Run(34, 40), pieces=pieces), selection=Selection(Selector(selector), share))
    made.run(Orders(budget, [asked]))
    for _ in range(60):
        made.run(Orders(budget))
    report = made.take_report()
    assert report.ended == [1] and not report.failed
    assert report.selected == {1: sum(run.tokens for run in chosen)}
    found = memory.computed
    assert joined(found) == joined([Run(0, 2), Run(34, 40), *chosen])
    assert token_count(found) == 8 + token_count(chosen)


def test_the_question_is_behind_what_is_reused() -> None:
    """At most 64 tokens of it; where nearly nothing is behind, the last 64 tokens."""
    assert probe.question(0, 900, 930) == Run(900, 930)
    assert probe.question(0, 500, 930) == Run(866, 930)
    assert probe.question(0, 929, 930) == Run(866, 930)
    assert probe.question(10, 40, 42) == Run(10, 42)


def job(number: int, *computed: Run, pieces: Sequence[Piece] = ()) -> BlendJob:
    return BlendJob(number, f"r{number}", np.zeros(64, np.uint32), [0], list(pieces), list(computed))


def test_workers_fail_together(memory: Memory, steps: BlendSteps) -> None:
    """What another worker could not load, or got numbers of that are not finite, is a failure here, too."""
    memory.others_fail = True
    for number, piece in enumerate(([Piece(Run(40, 46), 1, 2, 35)], [])):
        steps.run(Orders(9, [job(number, Run(0, 3), pieces=piece)]))
    assert steps.take_failed() == {"r0", "r1"} and not memory.computed[:-1]


def test_reports_of_two_workers_are_one() -> None:
    """A window is stored if both have their part; what the slower one took counts."""
    both, mine, others = (ChunkKey(bytes([n]) * 32) for n in range(3))
    one = Report(Speed(1.0, 0.1), None, [4], [], {4: 16}, [both, mine], [others], {7: None}, 2.0)
    other = Report(Speed(2.0, 0.1), None, [4], [], {4: 16}, [both, others], [mine], {7: None}, 1.0)
    for found in (one.joined(other), other.joined(one)):
        assert found.stored == [both] and set(found.unstored) == {mine, others}
        assert found.speed == Speed(2.0, 0.1) and found.seconds == 2.0
        assert (found.ended, found.selected, found.checked) == ([4], {4: 16}, {7: None})
    assert Report(off="why").joined(Report()).off == Report().joined(Report(off="why")).off == "why"


def test_a_window_is_loaded_as_it_was_stored(memory: Memory, steps: BlendSteps) -> None:
    """All layers, and a part of it, too."""
    key = ChunkKey(bytes(32))
    steps.run(Orders(9, stores=[StoreJob(key, "running", 3, 1), StoreJob(key, "gone", 3, 0)]))
    report = steps.take_report()
    assert report.stored == report.unstored == [key]
    stored = memory.kv[:, 3 : 3 + WINDOW].clone()
    steps.run(Orders(9, [job(0, pieces=[Piece(Run(40, 46), 1, 2, 35)])]))
    assert torch.equal(memory.kv[:, 40:46], stored[:, 2:]) and steps.take_finished() == {"r0"}


def test_a_slot_has_keys_of_position_0_and_no_others_bytes(memory: Memory) -> None:
    """So its bytes are those of its tokens, wherever they stood; behind them are zeros."""
    slots, forward = [bytearray(b"x" * 4096)], cast(Any, memory)
    rotations = [Rotation(Pairing.HALVES, 4, torch.tensor([0.5, 0.01], dtype=torch.float64))] * LAYERS
    steps = BlendSteps(forward, rotations, lambda slot: memoryview(slots[slot]), WINDOW, Speed(1.0, 0.1))
    size, found = LAYERS * WINDOW * 8 * 4, []
    for start in (0, 40):
        memory.kv[:, start : start + WINDOW, 0] = rotations[0].moved(torch.ones(LAYERS, WINDOW, 1, 4), start)
        memory.kv[:, start : start + WINDOW, 1] = 2.0
        steps.run(Orders(9, stores=[StoreJob(ChunkKey(bytes(32)), "running", start, 0)]))
        found.append(torch.frombuffer(slots[0], dtype=torch.float32, count=size // 4).clone())
        assert not any(slots[0][size:])
    assert torch.allclose(*found, atol=1e-5)


def test_a_check_compares_the_first_token(memory: Memory, steps: BlendSteps) -> None:
    """Of the blend when it is complete, and of a full prefill in slices; a cancelled or failed one says nothing."""
    said = iter([0, 0, 0, 1, 0, 0])

    def first_token(hidden: torch.Tensor) -> torch.Tensor:
        return torch.tensor([4.0, 0.0] if next(said) == 0 else [0.0, 4.0]).log_softmax(-1)

    memory.first_token = first_token  # type: ignore[attr-defined]
    results = []
    for number, fault in ((0, None), (1, None), (2, "cancelled"), (3, RuntimeError("as it may be"))):
        steps.run(Orders(99, [replace(job(number, Run(0, 63)), is_checked=True)]))
        steps.take_report()
        check = CheckJob(number, np.zeros(64, np.uint32), [1])
        steps.run(Orders(99, checks=[check], check_budget=40))
        assert not steps.take_report().checked
        memory.fault = fault if isinstance(fault, Exception) else None
        steps.run(Orders(99, cancelled=[number] if fault == "cancelled" else [], check_budget=40))
        memory.fault = None
        results.append(steps.take_report().checked[number])
    assert results[0] == Checked(True, 0.0) and results[2:] == [None, None]
    assert results[1] is not None and not results[1].agrees and 3 < results[1].kl < 5
    assert not steps._said and not steps._checks


def test_steps_keep_to_the_budget(memory: Memory, steps: BlendSteps) -> None:
    """In ascending order, oldest job first; a job is over when all of it is computed."""
    steps.run(Orders(5, [job(0, Run(0, 3), Run(10, 17)), job(1, Run(20, 22))]))
    assert memory.computed == [Run(0, 3), Run(10, 12)] and not steps.take_finished()
    steps.run(Orders(6))
    assert memory.computed[2:] == [Run(12, 17), Run(20, 21)] and steps.take_finished() == {"r0"}
    steps.run(Orders(6))
    assert memory.computed[4:] == [Run(21, 22)] and steps.take_finished() == {"r1"} and not steps.take_failed()
    assert steps.take_report().ended == [0, 1]


@pytest.mark.parametrize("fault", [RuntimeError("as it may be"), float("nan"), float("inf")])
def test_a_failure_is_of_one_request(memory: Memory, steps: BlendSteps, fault: Any) -> None:
    """An exception, or numbers that are not finite; the others go on."""
    memory.fault = fault
    steps.run(Orders(3, [job(0, Run(0, 9)), job(1, Run(20, 22))]))
    memory.fault = None
    assert steps.take_failed() == steps.take_finished() == {"r0"}
    steps.run(Orders(3))
    assert steps.take_finished() == {"r1"} and not steps.take_failed()
    report = steps.take_report()
    assert (report.ended, report.failed) == ([0, 1], [0])


def test_a_cancelled_job_ends_once(memory: Memory, steps: BlendSteps) -> None:
    """Whether it was begun or is over."""
    steps.run(Orders(2, [job(0, Run(0, 9))]))
    steps.run(Orders(2, cancelled=[0]))
    assert steps.take_finished() == {"r0"} and memory.computed == [Run(0, 2)]
    steps.run(Orders(2, cancelled=[0]))
    assert not steps.take_finished() and steps.take_report().ended == [0]
