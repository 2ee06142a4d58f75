"""Encoder outputs below RAM, loaded or encoded as the cost model says, in simulated time."""

from collections.abc import Iterator

import pytest

from hotspan.cache.choice import BOUND_S, BOUND_SHARE
from hotspan.cache.cost import CostModel
from hotspan.cache.engine_queue import EngineQueue
from hotspan.cache.rates import Fit
from hotspan.core.types import Tier
from hotspan.engine.contract import ENGINE, TRIED_WITH
from hotspan.engine.encoder.outputs import Report
from tests.cache.rig import SIZE, Rig

from .test_encoder_outputs import PATIENCE_S, ROWS, Engine, on_disk

pytestmark = pytest.mark.skipif(ENGINE != TRIED_WITH, reason="of vLLM's it takes what other releases lack")

STEP_TOKENS, TOKEN_S = 1024, 1e-4


class Decided(Engine):
    """An engine whose cost model knows its speed, with one image or two on disk.

    encode_s: of one image. disk_s: of one load.
    """

    def __init__(self, rig: Rig, encode_s: float, disk_s: float) -> None:
        assert rig.cache.cost is not None
        self.cost: CostModel = rig.cache.cost
        self.queue = EngineQueue(self.cost, STEP_TOKENS, rig.clock)
        super().__init__(rig, self.queue)
        self.ask("a", "b")
        on_disk(self)
        self.cost._encoding = Fit((64.0, 1.0), doubts=4)  # that was in real time
        for _ in range(8):
            self.cost.observe_step(100, 5000, 100 * TOKEN_S)
            self.cost.observe_encoding(ROWS, encode_s)
            self.cost.begin_load(Tier.DISK, SIZE)
            rig.clock.advance(disk_s)
            self.cost.end_load(Tier.DISK, SIZE, disk_s)

    def served(self, *media: str, land_s: float | None, limit_s: float = 60.0) -> tuple[list[str], float]:
        """What a request has encoded, and how long it waited. land_s: when its loads land, None for never."""
        record = self.request(*media)
        self.queue.arrive(record.request.request_id)
        began_s = self.rig.clock.monotonic()
        while (done := self.step(record)) is None:
            waited_s = self.rig.clock.monotonic() - began_s
            assert waited_s < limit_s
            if land_s is not None and waited_s >= land_s:
                self.rig.land_some()
            else:
                self.rig.clock.advance(0.001)
                self.rig.cache.step()
        waited_s = self.rig.clock.monotonic() - began_s
        self.outputs.forget(record.request.request_id)
        self.queue.forget(record.request.request_id)
        self.cost.check()
        return done, waited_s

    def refused(self) -> dict[str, int]:
        """Rows that were encoded though they lay below, by reason."""
        return {reason: count.tokens for (reason, _), count in self.cost.report().refusals.items()}


@pytest.fixture
def rig() -> Iterator[Rig]:
    with Rig(ram=4, disk=8, step_tokens=STEP_TOKENS) as made:
        yield made
        made.land()
        made.land()
        assert not made.cache.ram.is_pinned and not made.cache.ram.forgotten


def test_what_is_loaded_sooner_is_loaded(rig: Rig) -> None:
    """All media of a request are one decision, and the model learns how it went."""
    engine = Decided(rig, encode_s=0.2, disk_s=0.01)
    assert engine.served("a", "b", land_s=0.02) == ([], pytest.approx(0.02, abs=0.002))
    report = engine.cost.report()
    assert (report.asked, report.loaded, report.refused, report.loads[Tier.DISK].count) == (1, 1, 0, 1)


def test_what_is_encoded_sooner_is_encoded(rig: Rig) -> None:
    """Nothing is waited for, and the rows are counted; one load shows whether the tier is still slow."""
    engine = Decided(rig, encode_s=0.01, disk_s=0.2)
    assert engine.served("a", "b", land_s=None) == (["a", "b"], 0.0)
    assert engine.refused() == {"slower": 2 * ROWS} and len(rig.loads) == 1


def test_a_busy_engine_loads_what_an_idle_one_encodes(rig: Rig) -> None:
    """Encoding holds up all who wait for the engine, and loading does not."""
    engine = Decided(rig, encode_s=0.05, disk_s=0.08)
    assert engine.served("a", land_s=0.08)[0] == ["a"]
    rig.land()
    on_disk(engine)
    for n in range(8):
        engine.queue.admit(f"other {n}", 2000, 0)
    assert engine.served("a", land_s=0.08) == ([], pytest.approx(0.08, abs=0.002))


def test_a_tier_that_hangs_costs_no_more_than_the_bound(rig: Rig) -> None:
    """1.05 x what encoding and computing take, and 50 ms; the refusal is counted as late."""
    engine = Decided(rig, encode_s=0.5, disk_s=0.01)
    done, waited_s = engine.served("a", "b", land_s=None)
    assert done == ["a", "b"] and 0.04 <= waited_s <= BOUND_SHARE * (1.0 + 2 * ROWS * TOKEN_S) + BOUND_S
    assert engine.refused() == {"late": 2 * ROWS} and engine.cost.report().late == 1


def test_chunks_and_outputs_share_one_bound(rig: Rig) -> None:
    """What a request has lost by waiting for its chunks it can't lose again by waiting for outputs."""
    engine = Decided(rig, encode_s=0.5, disk_s=0.02)
    engine.cost._trust = 0.0
    record = engine.request("a")
    record.lost_s, record.plain_s = 0.06, 0.1  # about all that it may
    assert engine.step(record) == ["a"]
    assert engine.refused() == {"bound": ROWS}
    engine.outputs.forget(record.request.request_id)


def test_before_the_encoder_is_known_a_request_waits_little(rig: Rig) -> None:
    """As before anything is known of the engine: 40 ms without progress."""
    engine = Decided(rig, encode_s=0.0, disk_s=0.01)
    assert engine.cost.encode_s(ROWS) == 0.0
    done, waited_s = engine.served("a", land_s=None)
    assert done == ["a"] and 0.035 <= waited_s <= 0.045
    rig.land()
    on_disk(engine)
    assert engine.served("a", land_s=0.02)[0] == []


def test_a_step_that_encodes_does_not_teach_the_speed_of_prompts(rig: Rig) -> None:
    """The encoder's time is taken off; while that is unknown nothing is learnt."""
    engine = Decided(rig, encode_s=0.5, disk_s=0.01)
    rates = engine.cost.prefill_rates
    for name in ("c", "d", "e", "f"):
        engine.forget()
        record = engine.request(name)
        engine.queue.begin(100, 5000, 100)
        orders, todo = engine.plan(record)
        rig.clock.advance(0.5 + 100 * TOKEN_S)
        engine.queue.end()
        engine.outputs.note(Report(orders.orders.number, {}, 0.5 if todo else None))
        engine.outputs.forget(record.request.request_id)
        rig.land()
    assert engine.cost.prefill_rates == pytest.approx(rates, rel=0.02)


def test_a_mistake_in_the_decision_leaves_the_request_to_the_engine(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for what is on its way while nothing lands for 50 ms, and then encodes."""
    engine = Decided(rig, encode_s=0.5, disk_s=0.01)

    def broken(*given: object, **options: object) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(CostModel, "weigh", broken)
    done, waited_s = engine.served("a", land_s=None)
    assert done == ["a"] and waited_s <= PATIENCE_S + 0.002
    assert engine.served("b", land_s=0.01)[0] == []
