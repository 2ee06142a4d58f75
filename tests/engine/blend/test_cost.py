"""Windows below RAM: whether a prompt waits for them, as the cost model says, in simulated time."""

from collections.abc import Iterator
from typing import Any

import pytest

from hotspan.cache.choice import BOUND_S, BOUND_SHARE, Text
from hotspan.cache.cost import CostModel
from hotspan.core.types import Tier
from hotspan.engine.requests import RequestRecord
from hotspan.testing.clock import SimulatedClock
from kit.simulated.memory_store import MemoryServer

from .scheduler import KEYER, WINDOW
from .test_store import Replica

TOKEN_S = 1e-3


class Decided:
    """A replica whose cost model knows its speed, and whose windows lie on disk. disk_s: of one load."""

    def __init__(self, disk_s: float) -> None:
        server = MemoryServer(clock=SimulatedClock())
        self.first = Replica(server)
        self.first.learn()
        self.cost = CostModel(1024, {Tier.DISK: 4, Tier.L2: 4}, server.clock)
        self.one = self.first.restarted(server, cost=self.cost)
        for _ in range(8):
            self.cost.observe_step(100, 5000, 100 * TOKEN_S)
            self.cost.begin_load(Tier.DISK, 4096)
            self.one.clock.advance(disk_s)
            self.cost.end_load(Tier.DISK, 4096, disk_s)

    def served(
        self, *, land_s: float | None, record: RequestRecord | None = None, **busy: Any
    ) -> tuple[int, float, RequestRecord]:
        """What a request for both documents claims, and how long it waited. land_s: of its loads, None for never."""
        scheduler, clock = self.one.scheduler, self.one.clock
        request = scheduler.request(1, 0)
        record = record or RequestRecord(request=request, keyer=KEYER, groups=())
        text = Text(len(request.prompt_token_ids), WINDOW, **busy)
        began_s = clock.monotonic()
        while (claimed := scheduler.blending.match(request, record, 0, 0, text)) is None:
            waited_s = clock.monotonic() - began_s
            assert waited_s < 60
            if land_s is not None and waited_s >= land_s:
                self.one.land()
            else:
                clock.advance(0.001)
                self.one.cache.step()
        waited_s = clock.monotonic() - began_s
        scheduler.blending.end(request.request_id)
        self.cost.check()
        return claimed, waited_s, record

    def refused(self) -> dict[str, int]:
        return {reason: count.tokens for (reason, _), count in self.cost.report().refusals.items()}


@pytest.fixture
def made() -> Iterator[list[Decided]]:
    found: list[Decided] = []
    yield found
    for each in found:
        for replica in (each.first, each.one):
            replica.land()
            replica.cache.check()
            assert not any(entry.pins for entry in replica.cache.ram.entries.values())
            replica.slab.close()


def decided(made: list[Decided], disk_s: float) -> Decided:
    made.append(Decided(disk_s))
    return made[-1]


FULL_S = (20 + 2 * 2 + 4 * WINDOW) * TOKEN_S
"""To compute the prompt."""


def test_what_is_loaded_sooner_is_loaded(made: list[Decided]) -> None:
    """All windows are one decision, and the model learns how it went."""
    one = decided(made, 0.01)
    claimed, waited_s, record = one.served(land_s=0.01)
    assert claimed and waited_s == pytest.approx(0.01, abs=0.002)
    report = one.cost.report()
    assert (report.asked, report.loaded, report.refused, report.loads[Tier.DISK].count) == (1, 1, 0, 1)
    assert record.held_s == 0.0 or record.held_s == pytest.approx(waited_s, abs=0.002)


def test_what_is_computed_sooner_is_computed(made: list[Decided]) -> None:
    """Nothing is waited for; the tokens of the windows are counted."""
    one = decided(made, 0.5)
    claimed, waited_s, _ = one.served(land_s=None)
    assert (claimed, waited_s) == (0, 0.0)
    assert one.refused() == {"slower": 4 * WINDOW} and one.one.cache.stats.blends == {"little_saved": 1}


def test_a_busy_engine_loads_what_an_idle_one_computes(made: list[Decided]) -> None:
    """Computing holds up all who wait for the engine, and loading does not."""
    idle, busy = decided(made, 0.4), decided(made, 0.4)
    assert idle.served(land_s=None)[0] == 0
    claimed, waited_s, _ = busy.served(land_s=0.4, others=8, busy_s=2.0, step_s=0.1)
    assert claimed and waited_s == pytest.approx(0.4, abs=0.002)


def test_a_tier_that_hangs_costs_no_more_than_the_bound(made: list[Decided]) -> None:
    """1.05 x what computing takes, and 50 ms; the refusal is counted as late."""
    one = decided(made, 0.01)
    claimed, waited_s, _ = one.served(land_s=None)
    assert claimed == 0 and 0.04 <= waited_s <= BOUND_SHARE * FULL_S + BOUND_S
    assert one.refused() == {"late": 4 * WINDOW}


def test_chunks_and_windows_share_one_bound(made: list[Decided]) -> None:
    """What a request has lost by waiting for its chunks it can't lose again by waiting for windows."""
    one = decided(made, 0.02)
    one.cost._trust = 0.0
    request = one.one.scheduler.request(1, 0)
    record = RequestRecord(request=request, keyer=KEYER, groups=())
    record.lost_s, record.plain_s = BOUND_SHARE * FULL_S + BOUND_S, FULL_S
    assert one.served(land_s=0.02, record=record)[:2] == (0, 0.0)
    assert one.refused() == {"bound": 4 * WINDOW}
