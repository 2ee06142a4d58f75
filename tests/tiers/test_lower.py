"""A lower tier that fails or stalls is given up before it is in the way, and comes back by itself."""

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from hotspan.core.errors import DirectoryError
from hotspan.core.terms import Scope, Terms, tag_labels
from hotspan.testing.chunks import aligned, chain, content
from hotspan.testing.clock import SimulatedClock
from hotspan.testing.conformance import NAMESPACE, TENANT, TERMS, DurableSpy, load, settle, store
from hotspan.tiers import lower as lower_module
from hotspan.tiers.base import Durable, Fault, Transfer
from hotspan.tiers.disk import DiskOptions, DiskTier
from hotspan.tiers.files import Files
from hotspan.tiers.lower import LOG_STALL_S, MAX_FAULTS, STALL_S, LowerTier
from kit.simulated.faults import FaultyFiles, SlowFiles, VanishedFiles
from kit.simulated.inline import InlineQueues

SIZE, SLOTS = 2 * 4096, 8
CHUNKS = chain("a", 6)
TAG = tag_labels(["x"])

PATIENCE_S = 60.0
"""What an opening, or I/O, may take of the machine's time, before the test's clock goes on without it."""


class Bench:
    """A lower tier on a disk whose files a test can break, on a clock that it turns."""

    def __init__(self, path: Path, files: Files, threads: int = 2) -> None:
        self.clock = SimulatedClock()
        self.files: Any = files
        self.openings: list[bool] = []
        self.opened: list[DiskTier] = []

        def open_tier(is_back: bool) -> DiskTier:
            self.openings.append(is_back)
            options = DiskOptions(path, SLOTS * (SIZE + 4096), threads, is_new=not is_back, files=files)
            self.opened.append(DiskTier(options, NAMESPACE, SIZE, self.clock))
            return self.opened[-1]

        self.lower = LowerTier(open_tier, self.clock)

    def fill(self) -> None:
        for chunk in CHUNKS:
            assert store(self.lower, chunk, SIZE) is not None

    def until(self, holds: Callable[[], bool], most_s: float = 30.0) -> list[Transfer]:
        """Poll as a scheduler does, 50 ms of its time apart, until `holds`. Raises: AssertionError after `most_s`."""
        ended: list[Transfer] = []
        deadline = self.clock.monotonic() + most_s
        while True:
            ended += self.lower.finished()
            if holds():
                return ended
            assert self.clock.monotonic() < deadline, f"not within {most_s} s"
            self.clock.advance(0.05)
            if (opening := self.lower._opening) is not None:
                opening.join(PATIENCE_S)
            for tier in self.opened:
                assert tier._queue.drain(PATIENCE_S) and tier._log_queue.drain(PATIENCE_S)

    def trip(self) -> None:
        """Let it be given up by loads that fail."""
        for chunk in CHUNKS[:MAX_FAULTS]:
            load(self.lower, chunk.key, SIZE)
        assert not self.lower.is_up


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where the tier lives."""
    return tmp_path / "disk"


@pytest.fixture
def bench(path: Path) -> Iterator[Bench]:
    """A lower tier with CHUNKS on a drive that can be pulled."""
    files = VanishedFiles()
    bench = Bench(path, files)
    bench.fill()
    yield bench
    files.come_back()
    bench.lower.close(PATIENCE_S)
    assert not files.open_fds


def test_faults_in_a_row_trip_it(bench: Bench) -> None:
    """After three I/O faults in a row it is given up; then nothing is found, taken or counted."""
    bench.files.go_away()
    for number, chunk in enumerate(CHUNKS[:MAX_FAULTS]):
        assert bench.lower.is_up and bench.lower.trips == 0, number
        result = load(bench.lower, chunk.key, SIZE)
        assert result is not None and result[0].fault is Fault.IO
    lower = bench.lower
    assert not lower.is_up and lower.trips == 1 and lower.working is None
    assert not any(lower.lookup(chunk.key) for chunk in CHUNKS)
    assert not lower.submit_load(CHUNKS[0].key, aligned(SIZE))
    assert not lower.submit_store(chain("b", 1)[0], TERMS, aligned(SIZE))
    assert (lower.usage().chunks, lower.usage().capacity_bytes) == (0, 0)


def test_faults_apart_do_not_trip_it(path: Path) -> None:
    """A transfer that succeeds in between begins the count anew."""
    files = FaultyFiles()
    bench = Bench(path, files)
    bench.fill()
    for n in range(3 * MAX_FAULTS):
        if n % MAX_FAULTS:
            files.arm(1, kinds=["preadv"])
        load(bench.lower, CHUNKS[0].key, SIZE)
        files.disarm()
    assert bench.lower.is_up and bench.lower.trips == 0
    bench.lower.close(PATIENCE_S)


def test_corruption_is_no_fault_of_the_tier(path: Path) -> None:
    """Frames that are not what they should be are quarantined one by one, and the tier stays."""
    bench = Bench(path, Files())
    roots = [chain(f"root {n}", 1)[0] for n in range(2 * MAX_FAULTS)]
    for chunk in roots:
        assert store(bench.lower, chunk, SIZE) is not None
    with (path / "slab").open("r+b") as slab:
        slab.write(bytes(SLOTS * (SIZE + 4096)))
    for chunk in roots:
        result = load(bench.lower, chunk.key, SIZE)
        assert result is not None and result[0].fault is Fault.CORRUPT
    assert bench.lower.is_up
    bench.lower.close(PATIENCE_S)


def test_it_comes_back_within_30_seconds(bench: Bench) -> None:
    """Once the drive is back, so is the tier within 30 s of its clock, with what it held; it is opened as one there."""
    bench.files.go_away()
    bench.trip()
    for _ in range(5):
        bench.clock.advance(1.0)
        bench.lower.finished()
        time.sleep(0.01)
    assert not bench.lower.is_up
    bench.files.come_back()
    bench.until(lambda: bench.lower.is_up)
    assert bench.openings[0] is False and all(bench.openings[1:])
    for chunk in CHUNKS:
        result = load(bench.lower, chunk.key, SIZE)
        assert result is not None and result[0].fault is None and result[1] == content(chunk.key, SIZE)
    bench.opened[-1].check()


def test_a_mount_that_went_away_is_waited_for(bench: Bench, path: Path) -> None:
    """While the directory is gone or empty it is not made anew; when it is there again, its chunks are."""
    bench.files.go_away()
    bench.trip()
    path.rename(path.with_name("elsewhere"))
    path.mkdir()
    bench.files.come_back()
    for _ in range(100):
        bench.clock.advance(0.2)
        bench.lower.finished()
        time.sleep(0.001)
    assert not bench.lower.is_up and not list(path.iterdir())
    path.rmdir()
    path.with_name("elsewhere").rename(path)
    bench.until(lambda: bench.lower.is_up)
    assert bench.lower.lookup(CHUNKS[0].key)


@pytest.mark.parametrize("kind", ["preadv", "pwritev"])
def test_a_stall_trips_it(path: Path, kind: str) -> None:
    """With nothing ending for a second it is given up: what waits is dropped, what hangs is reported when it ends."""
    files = SlowFiles(kinds=[kind])
    bench = Bench(path, files, threads=1)
    if kind == "preadv":
        bench.fill()
    files.hang()
    buffers = {chunk.key: aligned(SIZE, content(chunk.key, SIZE)) for chunk in CHUNKS[:3]}
    for chunk in CHUNKS[:3]:
        if kind == "preadv":
            assert bench.lower.submit_load(chunk.key, buffers[chunk.key])
        else:
            assert bench.lower.submit_store(chunk, TERMS, buffers[chunk.key])
    files.wait_hanging()
    bench.clock.advance(STALL_S)
    assert bench.lower.finished() == [] and bench.lower.is_up
    bench.clock.advance(0.01)
    ended = bench.lower.finished()
    assert not bench.lower.is_up
    ended += bench.lower.finished()
    assert {transfer.key for transfer in ended} == {chunk.key for chunk in CHUNKS[1:3]}
    assert {transfer.fault for transfer in ended} == {Fault.DROPPED}
    # While the first one hangs its buffer is not given back, and the directory not opened a second time.
    bench.clock.advance(60.0)
    assert bench.lower.finished() == [] and bench.openings == [False]
    files.release()
    ended = bench.until(lambda: bench.lower.is_up)
    assert [transfer.key for transfer in ended] == [CHUNKS[0].key]
    bench.opened[-1].check()
    for chunk in CHUNKS[:3]:
        if (result := load(bench.lower, chunk.key, SIZE)) is not None:
            assert result[0].fault is not None or result[1] == content(chunk.key, SIZE)
    bench.lower.close(PATIENCE_S)
    assert not files.open_fds


def test_a_hung_read_never_lands_in_a_buffer_that_was_given_back(path: Path) -> None:
    """Whatever is reported is over: a buffer reused after its report is not written by what hung before."""
    files = SlowFiles(kinds=["preadv"])
    bench = Bench(path, files, threads=2)
    bench.fill()
    files.hang()
    buffers = {chunk.key: aligned(SIZE) for chunk in CHUNKS}
    for chunk in CHUNKS:
        assert bench.lower.submit_load(chunk.key, buffers[chunk.key])
    files.wait_hanging(2)
    bench.clock.advance(STALL_S + 0.1)
    given_back = bench.lower.finished() + bench.lower.finished()
    assert len(given_back) == 4 and not bench.lower.is_up
    for transfer in given_back:
        buffers[transfer.key][:] = b"\xee" * SIZE
    files.release()
    rest = bench.until(lambda: bench.lower.is_up)
    assert len(rest) == 2
    for transfer in given_back:
        assert buffers[transfer.key] == b"\xee" * SIZE
    bench.lower.close(PATIENCE_S)


def test_late_loads_trip_it(bench: Bench) -> None:
    """Three requests in a row that gave up waiting give it up; a load that was in time begins the count anew."""
    for _ in range(MAX_FAULTS - 1):
        bench.lower.late(bench.clock.monotonic())
    load(bench.lower, CHUNKS[0].key, SIZE)
    bench.lower.late(bench.clock.monotonic())
    bench.lower.finished()
    assert bench.lower.is_up
    for _ in range(MAX_FAULTS - 1):
        bench.lower.late(bench.clock.monotonic())
    bench.lower.finished()
    assert not bench.lower.is_up
    bench.until(lambda: bench.lower.is_up)


def test_a_tier_that_moves_is_not_late(bench: Bench) -> None:
    """Requests that gave up waiting for a tier that ended transfers meanwhile do not give it up."""
    since_s = bench.clock.monotonic() - 1.0
    load(bench.lower, CHUNKS[0].key, SIZE)
    for _ in range(2 * MAX_FAULTS):
        bench.lower.late(since_s)
    bench.lower.finished()
    assert bench.lower.is_up


def test_slots_of_dropped_jobs_come_back(path: Path) -> None:
    """After a trip in the middle of stores and frees, no slot of the tier that comes back is lost."""
    files = SlowFiles(kinds=["pwritev"])
    bench = Bench(path, files, threads=1)
    bench.fill()
    files.hang()
    bench.lower.storage.discard(CHUNKS[5].key)
    fresh = chain("b", 2)
    assert all(bench.lower.submit_store(chunk, TERMS, aligned(SIZE)) for chunk in fresh)
    files.wait_hanging()
    bench.clock.advance(STALL_S + 0.1)
    bench.lower.finished()
    assert not bench.lower.is_up
    files.release()
    bench.until(lambda: bench.lower.is_up)
    bench.opened[-1].check()
    kept = sum(bench.lower.lookup(chunk.key) for chunk in CHUNKS + fresh)
    assert bench.lower.usage().chunks == kept
    for chunk in chain("c", SLOTS - kept):
        assert store(bench.lower, chunk, SIZE) is not None
    assert bench.lower.usage().chunks == SLOTS
    bench.lower.close(PATIENCE_S)


def test_invalidations_while_it_is_away_are_done_when_it_is_back(bench: Bench, path: Path) -> None:
    """What is invalidated while the tier is given up is told as not durable, and gone before the first look-up."""
    bench.files.go_away()
    bench.trip()
    spy = DurableSpy()
    assert bench.lower.invalidate([Scope(keys=frozenset([CHUNKS[2].key]))], spy) == 0
    assert spy.told == [False]
    bench.files.come_back()
    bench.until(lambda: bench.lower.is_up)
    assert [bench.lower.lookup(chunk.key) for chunk in CHUNKS] == [True, True, False, False, False, False]
    bench.until(lambda: not bench.lower._unlogged)
    bench.lower.close(PATIENCE_S)
    tier = DiskTier(DiskOptions(path, SLOTS * (SIZE + 4096)), NAMESPACE, SIZE)
    assert [tier.lookup(chunk.key) for chunk in CHUNKS] == [True, True, False, False, False, False]
    tier.close(PATIENCE_S)


def test_of_a_tier_that_is_not_trusted_only_what_comes_is_found(bench: Bench) -> None:
    """It takes chunks, tags and invalidations meanwhile; once it is trusted, what it had is found, too."""
    bench.lower.distrust()
    assert not any(bench.lower.lookup(chunk.key) for chunk in CHUNKS)
    other = chain("b", 1)[0]
    assert store(bench.lower, other, SIZE) is not None and bench.lower.lookup(other.key)
    bench.lower.join(CHUNKS[3].key, Terms(tenant=TENANT, labels=TAG))
    spy = DurableSpy()
    bench.lower.invalidate([Scope(labels=TAG)], spy)
    bench.until(lambda: spy.told == [True])
    assert not any(bench.lower.lookup(chunk.key) for chunk in CHUNKS)
    bench.lower.trust()
    assert [bench.lower.lookup(chunk.key) for chunk in [*CHUNKS, other]] == [True] * 3 + [False] * 3 + [True]


def test_a_tier_that_is_only_slow_is_kept(path: Path) -> None:
    """Of four chunks of 32 MiB none ends for a second at 100 MB/s: that is no stall."""
    files = SlowFiles(kinds=["preadv"])
    bench = Bench(path, files)
    bench.fill()
    files.hang()
    assert bench.lower.submit_load(CHUNKS[0].key, aligned(SIZE))
    bench.lower._note_submitted(True, 32 << 20)
    bench.clock.advance(4 * (32 << 20) / 100e6)
    bench.lower.finished()
    assert bench.lower.is_up
    bench.clock.advance(10.0)
    bench.lower.finished()
    assert not bench.lower.is_up
    files.release()
    bench.lower.close(PATIENCE_S)


def told_in(monkeypatch: pytest.MonkeyPatch) -> list[list[Scope]]:
    """What the tier is told to invalidate from now on, call by call."""
    told: list[list[Scope]] = []
    real = DiskTier.invalidate

    def invalidate(tier: DiskTier, scopes: Sequence[Scope], durable: Durable) -> int:
        told.append(list(scopes))
        return real(tier, scopes, durable)

    monkeypatch.setattr(DiskTier, "invalidate", invalidate)
    return told


def test_what_many_invalidations_of_a_tenant_take_is_that_tenants(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of too many while it is away all of their tenant goes, and nothing of any other; it is told some at a time."""
    mine = chain("mine", 2)
    for chunk in mine:
        assert store(bench.lower, chunk, SIZE, terms=Terms(tenant=1)) is not None
    bench.files.go_away()
    bench.trip()
    for number in range(1000):
        bench.lower.invalidate([Scope(tenant=1, labels=frozenset([number + 1]))], lambda done: None)
        bench.lower.invalidate([Scope(tenant=2 + number % 20)], lambda done: None)
    told = told_in(monkeypatch)
    bench.files.come_back()
    bench.until(lambda: bench.lower.is_up)
    assert sorted(scope.tenant or 0 for scopes in told for scope in scopes) == list(range(1, 22))
    assert max(map(len, told)) <= lower_module._SCOPES_AT_ONCE
    assert all(bench.lower.lookup(chunk.key) for chunk in CHUNKS)
    assert not any(bench.lower.lookup(chunk.key) for chunk in mine)


def test_many_invalidations_that_name_no_tenant_take_everything(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of too many while it is away nobody's chunks are found when it is back, and it is told once."""
    bench.files.go_away()
    bench.trip()
    for number in range(1000):
        bench.lower.invalidate([Scope(labels=frozenset([number + 1]))], lambda done: None)
        bench.lower.invalidate([Scope(tenant=number)], lambda done: None)
    assert len(bench.lower._missed) <= 1001
    told = told_in(monkeypatch)
    bench.files.come_back()
    bench.until(lambda: bench.lower.is_up)
    assert told == [[Scope()]] and not bench.lower._unlogged
    assert not any(bench.lower.lookup(chunk.key) for chunk in CHUNKS)
    assert bench.lower.trips == 1


def test_what_a_few_invalidations_do_not_take_stays(bench: Bench) -> None:
    """As many as can be done one by one are: the rest is found again when the tier is back."""
    bench.files.go_away()
    bench.trip()
    for number in range(lower_module._MAX_MISSED[bench.lower.tier]):
        bench.lower.invalidate([Scope(labels=frozenset([number + 1]))], lambda done: None)
    bench.files.come_back()
    bench.until(lambda: bench.lower.is_up)
    assert all(bench.lower.lookup(chunk.key) for chunk in CHUNKS)


def test_a_log_that_hangs_gives_it_up(path: Path) -> None:
    """A slow log is no reason to give the tier up, one that hangs is; receipts tell what became of their entries."""
    files = SlowFiles(kinds=["sync"])
    bench = Bench(path, files)
    bench.fill()
    files.hang()
    spies = [DurableSpy(), DurableSpy()]
    assert bench.lower.invalidate([Scope()], spies[0]) == len(CHUNKS)
    files.wait_hanging()
    assert bench.lower.invalidate([Scope()], spies[1]) == 0
    bench.clock.advance(LOG_STALL_S)
    bench.lower.finished()
    assert bench.lower.is_up
    bench.clock.advance(0.1)
    bench.lower.finished()
    assert not bench.lower.is_up and [spy.told for spy in spies] == [[], []]
    files.release()
    bench.until(lambda: bench.lower.is_up)
    assert [spy.told for spy in spies] == [[True], [True]]
    assert not any(bench.lower.lookup(chunk.key) for chunk in CHUNKS)
    bench.lower.close(PATIENCE_S)


def test_receipts_outlast_a_disk_that_stalls(path: Path) -> None:
    """A disk that stalls for seconds is given up; what was invalidated before is logged, and told as durable, after."""
    files = SlowFiles(kinds=["preadv", "sync"])
    bench = Bench(path, files)
    bench.fill()
    files.hang()
    assert bench.lower.submit_load(CHUNKS[0].key, aligned(SIZE))
    spies = [DurableSpy(), DurableSpy()]
    bench.lower.invalidate([Scope(keys=frozenset([CHUNKS[4].key]))], spies[0])
    files.wait_hanging(2)
    bench.lower.invalidate([Scope(keys=frozenset([CHUNKS[2].key]))], spies[1])
    bench.clock.advance(STALL_S + 0.1)
    bench.lower.finished()
    assert not bench.lower.is_up and [spy.told for spy in spies] == [[], []]
    files.release()
    bench.until(lambda: bench.lower.is_up)
    assert [spy.told for spy in spies] == [[True], [True]]
    assert [bench.lower.lookup(chunk.key) for chunk in CHUNKS] == [True, True, False, False, False, False]
    bench.lower.close(PATIENCE_S)


def test_a_log_that_fails_gives_it_up(path: Path) -> None:
    """After a failure the log takes nothing more: the tier is opened anew, and then invalidations are durable again."""
    files = FaultyFiles()
    bench = Bench(path, files)
    bench.fill()
    files.arm(2, kinds=["sync"])  # the table's comes first, and a table that fails moves
    failed = DurableSpy()
    bench.lower.invalidate([Scope(keys=frozenset([CHUNKS[3].key]))], failed)
    assert failed.wait(bench.lower) is False
    bench.until(lambda: bench.lower.trips == 1)
    bench.until(lambda: bench.lower.is_up)
    assert [bench.lower.lookup(chunk.key) for chunk in CHUNKS] == [True] * 3 + [False] * 3
    spy = DurableSpy()
    bench.lower.invalidate([Scope(keys=frozenset([CHUNKS[1].key]))], spy)
    assert spy.wait(bench.lower) is True and bench.lower.trips == 1
    bench.lower.close(PATIENCE_S)


def test_joins_while_it_is_away_count(bench: Bench) -> None:
    """A tag that a chunk was used under while the tier was given up takes it when the tier is back."""
    bench.files.go_away()
    bench.trip()
    for name in ("x", "y"):
        bench.lower.join(CHUNKS[4].key, Terms(labels=tag_labels([name])))
    bench.files.come_back()
    bench.until(lambda: bench.lower.is_up)
    assert bench.lower.storage.terms(CHUNKS[4].key).labels == tag_labels(["x", "y"])
    assert bench.lower.invalidate([Scope(labels=TAG)], DurableSpy()) == 2


def test_a_tag_that_was_joined_and_invalidated_while_it_is_away_takes_its_chunk(bench: Bench) -> None:
    """In whatever order the tier is told."""
    bench.files.go_away()
    bench.trip()
    bench.lower.join(CHUNKS[4].key, Terms(labels=TAG))
    bench.lower.invalidate([Scope(labels=TAG)], DurableSpy())
    bench.files.come_back()
    bench.until(lambda: bench.lower.is_up)
    assert [bench.lower.lookup(chunk.key) for chunk in CHUNKS] == [True] * 4 + [False] * 2


def test_too_many_joins_while_it_is_away_forget_their_tenant(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too many to be remembered: nothing is found of who has most of them, and others' joins count."""
    (other,) = chain("other", 1)
    assert store(bench.lower, other, SIZE, terms=Terms(tenant=1)) is not None
    monkeypatch.setattr(lower_module, "_MAX_JOINS", 3)
    bench.files.go_away()
    bench.trip()
    bench.lower.join(other.key, Terms(tenant=1, labels=TAG))
    for chunk in CHUNKS[:4]:
        bench.lower.join(chunk.key, Terms(TENANT, labels=TAG))
    bench.files.come_back()
    bench.until(lambda: bench.lower.is_up)
    assert not any(bench.lower.lookup(chunk.key) for chunk in CHUNKS)
    assert bench.lower.lookup(other.key) and bench.lower.storage.terms(other.key).labels == TAG


def test_a_burst_of_invalidations_is_no_stall(path: Path) -> None:
    """A log that finishes one thing after the other is kept, however long its queue: each of 200 is durable."""
    clock = SimulatedClock()
    queues = InlineQueues()
    options = DiskOptions(path, SLOTS * (SIZE + 4096), queue=queues.queue)
    lower = LowerTier(lambda again: DiskTier(options, NAMESPACE, SIZE, clock), clock)
    (log,) = (queue for queue in queues.all if queue.name == "disk-log")
    spies = [DurableSpy() for _ in range(200)]
    for number, spy in enumerate(spies):
        lower.invalidate([Scope(tenant=1, labels=frozenset([number + 1]))], spy)
        if number % 10 == 9:  # its log is slow, and takes most of the time that is a stall
            clock.advance(0.8 * LOG_STALL_S)
            log.turn()
            lower.finished()
    queues.run()
    lower.finished()
    assert lower.is_up and lower.trips == 0 and all(spy.told == [True] for spy in spies)
    lower.close(PATIENCE_S)


def test_flapping_backs_off(bench: Bench) -> None:
    """Given up again soon after it came back, it pauses twice as long, at most ten seconds; in peace one again."""
    pauses = []
    for _ in range(6):
        bench.files.go_away()
        bench.trip()
        bench.files.come_back()
        before = bench.clock.monotonic()
        bench.until(lambda: bench.lower.is_up)
        pauses.append(bench.clock.monotonic() - before)
    assert [round(pause) for pause in pauses] == [1, 2, 4, 8, 10, 10]
    bench.clock.advance(31.0)
    bench.files.go_away()
    bench.trip()
    bench.files.come_back()
    before = bench.clock.monotonic()
    bench.until(lambda: bench.lower.is_up)
    assert round(bench.clock.monotonic() - before) == 1


def test_an_error_at_the_start_is_the_callers() -> None:
    """What the first opening raises, the constructor does."""

    def refuse(is_back: bool) -> DiskTier:
        raise DirectoryError("no")

    with pytest.raises(DirectoryError, match="no"):
        LowerTier(refuse, SimulatedClock())


def test_closing_while_it_is_away(bench: Bench) -> None:
    """`close` of a tier that is given up, or about to come back, lets go of everything."""
    bench.files.go_away()
    bench.trip()
    bench.clock.advance(2.0)
    bench.lower.finished()
    bench.lower.close(PATIENCE_S)
    bench.lower.close(PATIENCE_S)
    assert settle(bench.lower, 0) == []
