"""What a request waits for, and how long, when the cost model decides: in simulated time, over a disk and an L2."""

import uuid
from collections.abc import Iterator

import pytest

from hotspan.cache.choice import BOUND_S, RESERVE, Text
from hotspan.cache.cost import CostModel
from hotspan.cache.entry import Reader
from hotspan.cache.tiered import TieredCache
from hotspan.core.terms import Terms
from hotspan.core.types import Chunk, Lookup, Tier
from hotspan.l2.follower import LogFollower
from hotspan.l2.remote import RemoteOptions, RemoteTier
from hotspan.testing.chunks import chain, content
from hotspan.testing.clock import SimulatedClock
from hotspan.tiers.base import Fault
from hotspan.tiers.slab import SharedSlab
from kit.simulated.inline import InlineQueues
from kit.simulated.lower import steady
from kit.simulated.memory_store import MemoryServer
from tests.cache.manual import ManualTier

from .cost_rig import CHUNK, CPU, attended

SIZE = 4096
TEXT = chain("text", 8)
PROMPT = Text(8 * CHUNK + 10, CHUNK)


class Deciding:
    """A cache over a manual disk and a store that must be asked, with a cost model that knows its engine."""

    def __init__(
        self, server: MemoryServer | None = None, *, is_known: bool = True, disk_s: float | None = None
    ) -> None:
        self.clock = SimulatedClock() if server is None else server.clock
        self.server = server or MemoryServer(clock=self.clock)
        self.text = TEXT
        self.slab = SharedSlab(f"test-{uuid.uuid4().hex}", 16, SIZE)
        self.slab.unlink()
        self.disk = ManualTier(16, SIZE, clock=self.clock)
        self.queues = InlineQueues()
        self.follower = LogFollower(self.server.log(), "a", self.clock)
        self.follower.poll()
        self.follower.foreign()
        options = RemoteOptions(self.server.store(), self.follower, queue=self.queues.queue)
        self.l2 = RemoteTier(options, bytes(32), SIZE, self.clock)
        self.cost = CostModel(512, {Tier.DISK: 1, Tier.L2: 4}, self.clock)
        lower = [steady(tier, self.clock) for tier in (self.disk, self.l2)]
        self.cache = TieredCache(self.slab, *lower, cost=self.cost, clock=self.clock)
        for start in range(0, 20 * 512, 512) if is_known else ():
            self.cost.observe_step(512, attended(start, 512), CPU.step(start, 512))
        for _ in range(20 if disk_s is not None else 0):
            self.cost.begin_load(Tier.DISK, SIZE)
            self.cost.end_load(Tier.DISK, SIZE, disk_s)

    def put(self, chunks: list[Chunk]) -> None:
        """The disk has these."""
        for chunk in chunks:
            self.disk.put(chunk, Terms(), content(chunk.key, SIZE))

    def look(self, reader: Reader, text: Text = PROMPT) -> list[Lookup] | None:
        """One pass, as the engine makes it; None while there is nothing to look up."""
        if not self.cache.choose([self.text], reader, text):
            return None
        answers: list[Lookup] = []
        for chunk in self.text[text.gpu_tokens // CHUNK :]:
            answers.append(self.cache.lookup(chunk, reader))
            if answers[-1] is Lookup.MISS:
                break
        self.cache.check()
        return answers

    def finish(self) -> None:
        """All I/O ends well, and the log is followed."""
        self.follower.poll()
        for _ in range(16):
            self.disk.finish_all()
            self.queues.run()
            self.cache.step()

    def land(self, count: int = 1) -> None:
        """The first transfers that the disk was given end well."""
        for flight in [flight for flight in self.disk.flights if flight.is_load][:count]:
            self.disk.finish(flight)
        self.cache.step()


@pytest.fixture
def rig() -> Iterator[Deciding]:
    one = Deciding(disk_s=0.001)
    yield one
    one.cache.check()
    one.slab.close()


def test_a_fast_tier_is_loaded_whole(rig: Deciding) -> None:
    """All of a text is promoted, and hit, when the disk is much faster than the engine; the model learns of it."""
    rig.put(TEXT)
    reader = Reader()
    assert rig.look(reader) == [Lookup.RETRY] * 8
    rig.clock.advance(0.008)
    rig.land(8)
    assert rig.look(reader) == [Lookup.HIT] * 8
    rig.clock.advance(5.0)  # until the engine has room for it: not the disk's fault
    rig.cache.begin_load([chunk.key for chunk in TEXT], reader)
    rig.cache.end_load([chunk.key for chunk in TEXT])
    report = rig.cost.report()
    assert (report.asked, report.loaded, report.late) == (1, 1, 0)
    assert report.loads[Tier.DISK].count == 1 and report.loads[Tier.DISK].actual_s == pytest.approx(0.008)
    assert reader.plan is None


def test_a_slow_tier_is_computed_instead_at_once() -> None:
    """No request waits for a disk that was slower than the engine; a chunk is loaded to see whether it still is."""
    rig = Deciding(disk_s=2.0)
    rig.disk.transfer_s = 2.0
    rig.put(TEXT)
    reader = Reader()
    assert rig.look(reader) == [Lookup.MISS] and not rig.cache.is_waiting(reader)
    assert [flight.key for flight in rig.disk.flights] == [TEXT[0].key], "the probe"
    rig.cache.release(reader)
    rig.land()
    assert rig.cost.report().probed == 1
    again = Reader()
    assert rig.look(again) == [Lookup.HIT, Lookup.MISS], "what the probe brought is taken"
    rig.cache.release(again)
    rig.slab.close()


def test_a_load_that_stalls_is_given_up_and_what_landed_is_kept(rig: Deciding) -> None:
    """Two chunks land and then nothing: the request computes the rest, no later than these two saved, and a little."""
    rig.put(TEXT)
    reader = Reader()
    began_s = rig.clock.monotonic()
    rig.look(reader)
    rig.land(2)
    while rig.cache.is_waiting(reader):
        rig.clock.advance(0.001)
    waited_s = rig.clock.monotonic() - began_s
    saved_s = CPU.prefill(0, PROMPT.total_tokens) - CPU.prefill(2 * CHUNK, PROMPT.total_tokens)
    assert waited_s < saved_s * 1.3 + 2 * BOUND_S
    assert rig.look(reader) == [Lookup.HIT, Lookup.HIT, Lookup.MISS] and rig.cache._lower.tiers[0]._lates == 1
    rig.cache.release(reader)
    assert rig.cost.report().late == 1


def test_each_chunk_that_lands_buys_time(rig: Deciding) -> None:
    """A load that goes on is not given up at a moment at which one that stalled would be."""
    rig.put(TEXT)
    stalled, steady = Reader(), Reader()
    rig.look(stalled)
    while rig.cache.is_waiting(stalled):
        rig.clock.advance(0.001)
    rig.cache.release(stalled)
    rig.look(steady)
    began_s = rig.clock.monotonic()
    while rig.cache.is_waiting(steady) and rig.clock.monotonic() - began_s < 2.0:
        rig.clock.advance(0.06)
        rig.land()
    assert rig.look(steady) == [Lookup.HIT] * 8


def test_an_answer_that_does_not_come_costs_little() -> None:
    """A store that says nothing costs one request much, then each half of the bound; what the disk has is loaded."""
    rig = Deciding(disk_s=0.001)
    rig.put(TEXT[:4])
    rig.queues.hang()
    recompute_s = CPU.prefill(0, PROMPT.total_tokens)
    waited_s = []
    for _ in range(5):
        reader = Reader()
        rig.cache.ask(TEXT, reader)
        began_s = rig.clock.monotonic()
        while rig.look(reader) is None:
            rig.clock.advance(0.001)
        waited_s.append(rig.clock.monotonic() - began_s)
        rig.land(4)
        assert rig.look(reader) == [Lookup.HIT] * 4 + [Lookup.MISS]
        rig.cache.release(reader)
    assert waited_s[0] < 0.6 * recompute_s
    assert all(each < RESERVE * (BOUND_S + 0.06 * recompute_s) / 2 + 0.002 for each in waited_s[1:])
    rig.queues.hang(False)
    rig.queues.run()
    rig.slab.close()


def test_a_store_that_is_slow_to_answer_is_used_while_that_pays() -> None:
    """An answer that takes 200 ms is waited for, request after request, when what it brings saves seconds."""
    writer = Deciding()
    rig = Deciding(writer.server)
    for number in range(20):
        rig.text = chain(f"text-{number}", 8)
        for placement in writer.cache.begin_store(rig.text):
            writer.slab.slot(placement.slot)[:] = content(placement.chunk.key, SIZE)
        writer.cache.end_store(rig.text)
        writer.finish()
        rig.finish()
        reader = Reader()
        rig.queues.hang()
        rig.cache.ask(rig.text, reader)
        for _ in range(200):
            assert rig.look(reader) is None
            rig.clock.advance(0.001)
        rig.queues.hang(False)
        rig.queues.run()
        rig.cache.step()
        assert rig.look(reader) == [Lookup.RETRY] * 8
        rig.queues.run()
        rig.cache.step()
        assert rig.look(reader) == [Lookup.HIT] * 8
        rig.cache.release(reader)
    writer.slab.close()
    rig.slab.close()


def test_a_store_whose_answers_come_too_late_is_not_waited_for() -> None:
    """Where answers take longer than requests may wait, none waits; they are timed all the same."""
    rig = Deciding(disk_s=0.001)
    late_s = 2 * RESERVE * (BOUND_S + 0.06 * CPU.prefill(0, PROMPT.total_tokens))

    def ask(number: int, answer_s: float) -> bool:
        """One request about a new text, which is answered after so long; whether it waited at all."""
        rig.text = chain(f"{answer_s}-{number}", 8)
        reader, began_s, is_waiting = Reader(), rig.clock.monotonic(), False
        rig.follower.poll()
        rig.queues.hang()
        rig.cache.ask(rig.text, reader)
        while rig.look(reader) is None:
            is_waiting = True
            rig.clock.advance(0.001)
            if rig.clock.monotonic() - began_s >= answer_s:
                rig.queues.hang(False)
                rig.queues.run()
                rig.cache.step()
        rig.cache.release(reader)
        rig.clock.advance(max(began_s + answer_s - rig.clock.monotonic(), 0.0))
        rig.queues.hang(False)
        rig.queues.run()
        rig.cache.step()
        return is_waiting

    while ask(rig.cost.report().asked, late_s):  # trust is used up, and a few wait in vain
        assert rig.cost.report().asked < 20
    waited = [ask(number, late_s) for number in range(400)]
    assert sum(waited) <= 400 / 200 + 1, "those that trust allows"
    ask_again = [ask(number, 0.001) for number in range(20)]
    assert all(ask_again[10:]), "once answers come in time, all wait again"
    rig.slab.close()


def test_the_wait_for_answers_counts() -> None:
    """What a request waited for the answer it does not wait again for a chunk: both together stay within the bound."""
    rig = Deciding(is_known=False)
    rig.put(TEXT[:4])
    rig.queues.hang()
    reader = Reader()
    rig.cache.ask(TEXT, reader)
    began_s = rig.clock.monotonic()
    rig.look(reader)
    rig.clock.advance(0.030)
    rig.queues.hang(False)
    rig.queues.run()
    rig.cache.step()
    assert rig.look(reader) == [Lookup.RETRY] * 4 + [Lookup.MISS]
    while rig.cache.is_waiting(reader):
        rig.clock.advance(0.001)
    assert rig.clock.monotonic() - began_s == pytest.approx(RESERVE * BOUND_S, abs=0.0021)
    rig.cache.release(reader)
    rig.slab.close()


def test_what_the_engine_has_is_not_loaded(rig: Deciding) -> None:
    """With most of a text in the engine, the rest is chosen from there on; a few tokens are rather computed."""
    rig.put(TEXT)
    most = Reader()
    assert rig.look(most, Text(8 * CHUNK + 10, CHUNK, gpu_tokens=6 * CHUNK)) == [Lookup.RETRY] * 2
    assert [flight.key for flight in rig.disk.flights] == [TEXT[6].key, TEXT[7].key]
    rig.land(2)
    rig.cache.release(most)
    slow = Deciding(disk_s=0.2)
    slow.put(TEXT)
    assert slow.look(Reader(), Text(8 * CHUNK + 10, CHUNK, gpu_tokens=7 * CHUNK + 250)) == [Lookup.MISS]
    slow.slab.close()


def test_a_fault_ends_the_wait(rig: Deciding) -> None:
    """A chunk that can't be read cuts the prefix; the model is not told that its tier was late."""
    rig.put(TEXT)
    reader = Reader()
    rig.look(reader)
    flights = [flight for flight in rig.disk.flights if flight.is_load]
    rig.disk.finish(flights[0])
    rig.disk.finish(flights[1], Fault.IO)
    rig.cache.step()
    assert rig.look(reader) == [Lookup.HIT, Lookup.MISS]
    rig.cache.release(reader)
    assert rig.cost.report().late == 0


def test_an_aborted_request_teaches_nothing(rig: Deciding) -> None:
    """A client that goes away while its text is on its way says nothing of the tier."""
    rig.put(TEXT)
    reader = Reader()
    rig.look(reader)
    rig.clock.advance(0.001)
    rig.cache.release(reader)
    assert rig.cost.report().loads[Tier.DISK].count == 0 and reader.plan is None
    rig.land(8)


def test_a_request_that_could_not_begin_gets_another_chance(rig: Deciding) -> None:
    """Cut since RAM had no room, and asked again since the engine had none either: now that RAM has, all is loaded."""
    other = Reader()
    crowd = chain("crowd", 14)
    for placement in rig.cache.begin_store(crowd):
        rig.slab.slot(placement.slot)[:] = content(placement.chunk.key, SIZE)
    rig.cache.end_store(crowd)
    assert all(rig.cache.lookup(chunk, other) is Lookup.HIT for chunk in crowd), "pinned: RAM has 2 slots left"
    rig.put(TEXT)
    reader = Reader()
    assert rig.look(reader) == [Lookup.RETRY] * 2 + [Lookup.MISS] and reader.cut
    rig.finish()
    rig.cache.release(other)
    assert rig.look(reader) == [Lookup.HIT] * 2 + [Lookup.MISS], "the same pass goes on as it began"
    rig.cache.reconsider(reader)
    assert rig.look(reader) == [Lookup.HIT] * 2 + [Lookup.RETRY] * 6
    rig.finish()
    assert rig.look(reader) == [Lookup.HIT] * 8
    rig.cache.release(reader)
    report = rig.cost.report()
    assert report.late == 0 and report.tiers[Tier.DISK].factor < 2, "that RAM was full is no fault of the disk"


def test_what_was_given_whole_is_not_decided_again(rig: Deciding) -> None:
    """A request that was told of all its chunks, and asked again, keeps its plan and its pins."""
    rig.put(TEXT)
    reader = Reader()
    rig.look(reader)
    rig.land(8)
    assert rig.look(reader) == [Lookup.HIT] * 8
    plan = reader.plan
    rig.cache.reconsider(reader)
    assert reader.plan is plan and rig.cost.report().asked == 1
    assert rig.look(reader) == [Lookup.HIT] * 8
    rig.cache.release(reader)
