"""Loads that nobody waits for are paced: little at a time, with rests in between; at full speed once somebody does."""

import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from hotspan.core.types import MIB
from hotspan.testing.chunks import chain, content
from hotspan.testing.clock import SimulatedClock
from hotspan.testing.conformance import NAMESPACE, load, store
from hotspan.tiers.disk import DiskOptions, DiskTier
from hotspan.tiers.files import Files
from hotspan.tiers.io import IO_BYTES
from hotspan.tiers.pace import SHARE, Pace

SIZE = 2 * IO_BYTES + MIB // 2
(CHUNK,) = chain("a", 1)


class Reads(Files):
    """Notes the bytes of each read of the slab."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def preadv(self, fd: int, buffers: Sequence[memoryview], at: int) -> int:
        self.sizes.append(sum(map(len, buffers)))
        return super().preadv(fd, buffers, at)


class CountedPace(Pace):
    """Rests in simulated time, three seconds each."""

    def __init__(self, clock: SimulatedClock) -> None:
        super().__init__()
        self._clock = clock
        self.rests: list[float] = []

    def rest(self, worked_s: float) -> None:
        if self.is_slow:
            self.rests.append(worked_s)
            self._clock.advance(3.0)
            self._thread.rested_s = self.rested_s + 3.0


@pytest.mark.parametrize("is_slow", [False, True])
def test_a_paced_load_reads_a_segment_at_a_time(tmp_path: Path, is_slow: bool) -> None:
    """The bytes are the same either way; what it took is known without the rests."""
    clock, files = SimulatedClock(), Reads()
    pace = CountedPace(clock)
    options = DiskOptions(tmp_path / "disk", 4 * SIZE, threads=1, files=files, pace=pace)
    tier = DiskTier(options, NAMESPACE, SIZE, clock)
    try:
        stored = store(tier, CHUNK, SIZE)
        assert stored is not None and stored.fault is None
        files.sizes.clear()
        pace.is_slow = is_slow
        loaded = load(tier, CHUNK.key, SIZE)
        assert loaded is not None and loaded[0].fault is None and loaded[1] == content(CHUNK.key, SIZE)
        assert loaded[0].seconds == 0.0
    finally:
        tier.close(5.0)
    parts = -(-SIZE // MIB) if is_slow else 3
    assert len(files.sizes) == parts and max(files.sizes[1:]) == (MIB if is_slow else IO_BYTES)
    assert len(pace.rests) == (parts if is_slow else 0) and all(worked_s >= 0 for worked_s in pace.rests)


def test_a_thread_that_rests_goes_on_once_somebody_waits() -> None:
    """However long it was to rest; at full speed it does not rest at all."""
    pace, resting = Pace(), threading.Event()
    pace.rest(1e9)
    assert pace.rested_s == 0.0 and not pace.is_slow
    pace.is_slow = True

    def work() -> None:
        resting.set()
        pace.rest(1e9 * SHARE)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    assert resting.wait(60)
    pace.is_slow = False
    thread.join(60)
    assert not thread.is_alive()
