"""Windows in the tiers below RAM, in simulated time: found after a restart and by other replicas, by nobody else."""

from collections.abc import Iterator
from typing import Any

import pytest

from hotspan.cache.cost import CostModel
from hotspan.core.namespace import ChunkKeyer
from hotspan.core.terms import Scope, Terms, tag_labels
from hotspan.core.types import ChunkKey, Tier
from hotspan.engine.requests import RequestRecord
from hotspan.testing.clock import SimulatedClock
from hotspan.tiers.base import Fault
from kit.simulated.memory_store import MemoryServer
from tests.cache.test_levels import Levels

from .scheduler import KEYER, Scheduler, learnt

TERMS = Terms(labels=tag_labels(["doc"]))


@pytest.fixture
def server() -> MemoryServer:
    return MemoryServer(clock=SimulatedClock())


class Replica(Levels):
    """A replica that blends."""

    def __init__(
        self, server: MemoryServer, name: str = "a", *, keyer: ChunkKeyer = KEYER, cost: CostModel | None = None
    ) -> None:
        super().__init__(server, name, ram=32, disk=32, cost=cost)
        self.scheduler = Scheduler(self.cache, clock=self.clock, keyer=keyer)

    def learn(self) -> None:
        """Both documents' windows are on every tier."""
        learnt(self.scheduler)
        self.land()
        assert len(self.disk.held) == 4

    def restarted(self, server: MemoryServer, name: str = "a", **given: Any) -> "Replica":
        """The same disk under a new process."""
        other = Replica(server, name, **given)
        other.disk.held, other.disk.kept_on = self.disk.held, self.disk.kept_on
        return other

    def claimed(self, request: Any, record: RequestRecord | None = None) -> int | None:
        """What is claimed in the end, when all that it waits for is there."""
        for _ in range(4):
            claimed = self.scheduler.match(request, record)
            if claimed is not None:
                break
            self.land()
        self.scheduler.blending.end(request.request_id)
        return claimed


@pytest.fixture
def replicas(server: MemoryServer) -> Iterator[list[Replica]]:
    """One that has learnt, with its disk and the L2; and what a test adds."""
    made = [Replica(server)]
    made[0].learn()
    yield made
    for one in made:
        one.land()
        one.cache.check()
        assert not any(entry.pins for entry in one.cache.ram.entries.values())
        one.slab.close()


@pytest.mark.parametrize("place", ["disk", "l2"])
def test_windows_are_found_after_a_restart_and_by_another_replica(
    replicas: list[Replica], server: MemoryServer, place: str
) -> None:
    """By a process that has seen none of the text: its first prompt of it is blended, and none of it is computed."""
    replicas.append(replicas[0].restarted(server) if place == "disk" else Replica(server, "b"))
    one = replicas[1]
    request = one.scheduler.request(1, 0)
    assert one.scheduler.match(request) is None
    assert one.claimed(request) == len(request.prompt_token_ids) - 1
    assert one.cache.stats.load_bytes[Tier.DISK if place == "disk" else Tier.L2] == 4 * 4096


@pytest.mark.parametrize(
    ("keyer", "fields"),
    [
        (ChunkKeyer(bytes(32), tenant=bytes(31) + b"b"), {}),
        (ChunkKeyer(bytes(32), adapter=bytes(31) + b"b"), {}),
        (ChunkKeyer(bytes(31) + b"b"), {}),
        (KEYER, {"cache_salt": "s"}),
    ],
    ids=["tenant", "adapter", "model", "salt"],
)
def test_others_find_nothing_in_any_tier(
    replicas: list[Replica], server: MemoryServer, keyer: ChunkKeyer, fields: dict[str, Any]
) -> None:
    """Another tenant, adapter, model or salt: not even after a restart."""
    replicas.append(replicas[0].restarted(server, keyer=keyer))
    assert replicas[1].claimed(replicas[1].scheduler.request(1, 0, **fields)) == 0
    assert not replicas[1].cache.stats.load_bytes


@pytest.mark.parametrize("how", ["tag", "tenant", "text"])
def test_what_is_invalidated_is_gone_everywhere(replicas: list[Replica], server: MemoryServer, how: str) -> None:
    """RAM, disk and L2; and another replica that has it in RAM forgets it when it reads the log."""
    one = replicas[0]
    request = one.scheduler.request(1, 0)
    record = RequestRecord(request=request, keyer=KEYER, groups=(), terms=TERMS)
    assert one.scheduler.run(request, record) is not None  # its tag is joined
    one.land()
    replicas.append(Replica(server, "b"))
    assert replicas[1].claimed(replicas[1].scheduler.request(0, 1))
    scope = {
        "tag": Scope(0, labels=TERMS.labels),
        "tenant": Scope(0),
        "text": Scope(0, keys=frozenset([ChunkKey(bytes(32))])),
    }[how]
    removed = one.cache.invalidate([scope], lambda done: None)
    assert removed[Tier.RAM] == removed[Tier.DISK] == 4 and not one.disk.held
    one.land()
    replicas[1].follower.poll()
    replicas[1].cache.invalidate(replicas[1].follower.foreign(), lambda done: None, is_foreign=True)
    replicas += [one.restarted(server), Replica(server, "c")]
    for each in replicas[1:]:
        each.follower.poll()
        assert each.claimed(each.scheduler.request(0, 1)) == 0


def test_a_time_to_live_is_kept_below(replicas: list[Replica], server: MemoryServer) -> None:
    """Of the request that used them last, as for chunks."""
    one = replicas[0]
    request = one.scheduler.request(1, 0)
    expires_s = int(one.clock.unix()) + 60
    record = RequestRecord(request=request, keyer=KEYER, groups=(), terms=Terms(expires_s=expires_s))
    assert one.scheduler.run(request, record) is not None
    one.land()
    one.clock.advance(61)
    replicas += [one.restarted(server), Replica(server, "b")]
    for each in replicas:
        assert each.claimed(each.scheduler.request(0, 1)) == 0


def test_a_damaged_window_is_computed(replicas: list[Replica], server: MemoryServer) -> None:
    """A load that ends with a fault is a miss; what is left is too little."""
    replicas.append(replicas[0].restarted(server))
    one = replicas[1]
    request = one.scheduler.request(1, 0)
    while (claimed := one.scheduler.match(request)) is None:
        assert one.disk.flights
        for flight in list(one.disk.flights):
            one.disk.finish(flight, Fault.CORRUPT)
        one.cache.step()
    assert claimed == 0 and one.cache.stats.blends
    one.scheduler.blending.end(request.request_id)


def test_a_tier_that_hangs_costs_a_bounded_wait(replicas: list[Replica], server: MemoryServer) -> None:
    """Then the prompt is computed."""
    replicas.append(replicas[0].restarted(server))
    one = replicas[1]
    request = one.scheduler.request(1, 0)
    waited_s = 0.0
    while (claimed := one.scheduler.match(request)) is None:
        one.clock.advance(0.001)
        waited_s += 0.001
    full_s = len(request.prompt_token_ids) * 1e-3
    assert claimed == 0 and 0.01 < waited_s <= 0.05 * full_s + 0.05
    one.scheduler.blending.end(request.request_id)


def test_what_computing_beats_is_not_loaded(replicas: list[Replica], server: MemoryServer) -> None:
    """A disk that was measured to be slow: nothing is waited for; as of chunks, one load looks whether it still is."""
    cost = CostModel(1024, {Tier.DISK: 1, Tier.L2: 1}, server.clock)
    replicas.append(replicas[0].restarted(server, cost=cost))
    one = replicas[1]
    for _ in range(8):
        cost.observe_step(100, 5000, 0.01)
        cost.begin_load(Tier.DISK, 4096)
        one.clock.advance(1.0)
        cost.end_load(Tier.DISK, 4096, 1.0)
    request = one.scheduler.request(1, 0)
    assert one.scheduler.match(request) == 0 and one.cache.stats.blends == {"little_saved": 1}
    assert len(one.disk.flights) == 1 and cost.report().probed == 1
    one.scheduler.blending.end(request.request_id)


def test_a_replica_that_only_allows_blending_asks_for_who_asks(server: MemoryServer) -> None:
    """Its other requests wait for nothing."""
    one = Replica(server)
    one.scheduler = Scheduler(one.cache, "allowed", one.clock)
    request = one.scheduler.request(0, 1)
    assert one.scheduler.match(request) == 0 and not one.l2.asking
    one.scheduler.blending.end(request.request_id)
    one.slab.close()
