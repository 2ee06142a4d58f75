"""A slab that grows as it fills, and gives space back when its file system runs low."""

import errno
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from hotspan.core.errors import DirectoryError
from hotspan.core.terms import Terms
from hotspan.core.types import GIB, MIB, Chunk, ChunkKey
from hotspan.testing.chunks import aligned, chain, content
from hotspan.testing.clock import SimulatedClock
from hotspan.tiers.base import Fault
from hotspan.tiers.check import check_offline
from hotspan.tiers.directory import check_directory, open_directory
from hotspan.tiers.disk import DiskOptions, DiskTier
from hotspan.tiers.files import Files
from hotspan.tiers.lower import LowerTier
from hotspan.tiers.room import SlabSpace, step_bytes
from kit.simulated.faults import FaultyFiles, SmallDisk, slots_bytes
from kit.simulated.inline import InlineQueues

SIZE = 2 * 4096
SLOT = SIZE + 4096
SLOTS = 8
STEP = 2
NAMESPACE = bytes(range(32))
ROOTS = [chain(f"root {n}", 1)[0] for n in range(4 * SLOTS)]


@dataclass
class Rig:
    """A tier that grows by two slots, whose jobs run when the test says so."""

    tier: DiskTier
    queues: InlineQueues
    clock: SimulatedClock
    path: Path

    def turn(self, seconds: float = 0.0) -> None:
        """Let time pass and every job end."""
        self.clock.advance(seconds)
        for _ in range(8):
            self.tier.finished()
            if not self.queues.run():
                break
        self.tier.finished()

    def store(self, chunk: Chunk) -> bool:
        """Offer a chunk until the tier has it or refused it."""
        self.turn()
        taken = self.tier.submit_store(chunk, Terms(), aligned(SIZE, content(chunk.key, SIZE)))
        self.turn()
        return taken and self.tier.lookup(chunk.key)

    def here(self, chunks: list[Chunk]) -> list[bool]:
        """Which of them load, byte for byte."""
        return [self.loads(chunk.key) for chunk in chunks]

    def loads(self, key: ChunkKey) -> bool:
        into = aligned(SIZE)
        if not self.tier.submit_load(key, into):
            return False
        self.queues.run()
        (transfer,) = self.tier.finished()
        assert transfer.fault is not None or into == content(key, SIZE)
        return transfer.fault is None

    @property
    def blocks(self) -> int:
        """Bytes that the slab's slots take of the disk."""
        return slots_bytes(os.stat(self.path / "slab"), SLOT)


@contextmanager
def rig(path: Path, files: Files | None = None, slots: int = SLOTS, **options: Any) -> Iterator[Rig]:
    queues, clock = InlineQueues(), SimulatedClock()
    told = {"step_bytes": STEP * SLOT, "allow_direct": False} | options
    tier = DiskTier(
        DiskOptions(path, slots * SLOT, files=files or Files(), queue=queues.queue, **told), NAMESPACE, SIZE, clock
    )
    try:
        running = Rig(tier, queues, clock, path)
        yield running
        running.turn()
        tier.check()
    finally:
        tier.close(5.0)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "disk"


def test_a_step_is_a_sixteenth_within_bounds() -> None:
    """Small slabs grow by 64 MiB, large ones by a GiB, those in between by a sixteenth."""
    assert [step_bytes(size) for size in (MIB, 8 * GIB, 1000 * GIB)] == [64 * MIB, 512 * MIB, GIB]


def test_it_takes_space_as_it_fills(path: Path) -> None:
    """Little is taken at the start; space is there before it is needed; in the end the whole slab is in use."""
    with rig(path) as running:
        assert running.blocks <= 2 * STEP * SLOT and running.tier.usage().capacity_chunks == SLOTS
        for count, chunk in enumerate(ROOTS[:SLOTS], 1):
            assert running.store(chunk), "no chunk is refused while there is space"
            assert running.blocks <= min(SLOTS, count + 2 * STEP) * SLOT
        assert running.blocks >= SLOTS * SLOT and running.tier.usage().chunks == SLOTS
        assert all(running.here(ROOTS[:SLOTS]))


def test_a_store_waits_for_space_that_is_on_its_way(path: Path) -> None:
    """While the slab grows the tier says that it can't store, which costs the chunk nothing, and then takes it."""
    with rig(path) as running:
        tier, queues = running.tier, running.queues
        for chunk in ROOTS[:STEP]:  # nothing of what this begins has ended
            assert tier.submit_store(chunk, Terms(), aligned(SIZE, content(chunk.key, SIZE)))
        assert not tier.can_store() and not tier._refused
        queues.run()
        tier.finished()
        assert tier.can_store() and running.store(ROOTS[STEP])


@pytest.mark.parametrize("slots", [3, SLOTS, 16])
def test_a_restart_finds_it_and_returns_what_was_not_used(path: Path, slots: int) -> None:
    """What fits is found, also with another ceiling; of space without a chunk no more than a step is kept."""
    with rig(path) as running:
        for chunk in ROOTS[:5]:
            assert running.store(chunk)
    open_directory(path, SLOT, SLOTS * SLOT).close()  # all of it, as an older server had it
    with rig(path, slots=slots) as running:
        found = running.here(ROOTS[:5])
        assert found.count(True) == min(slots, 5)
        assert running.blocks <= min(slots, 5 + 2 * STEP) * SLOT
    report = check_offline(path, None)
    assert report["whole"] == min(slots, 5) and not report["corrupt"]
    assert slots_bytes(os.stat(path / "slab"), SLOT) <= min(slots, 5 + 2 * STEP) * SLOT, "to look takes no space"


def test_a_slab_that_lost_its_end_costs_what_was_there(path: Path) -> None:
    """Records of slots behind the end of the file (somebody cut it) are misses, and their slots are used again."""
    with rig(path) as running:
        for chunk in ROOTS[:SLOTS]:
            assert running.store(chunk)
    os.truncate(path / "slab", 3 * SLOT)
    with rig(path) as running:
        assert running.here(ROOTS[:SLOTS]).count(True) == 3
        for chunk in ROOTS[:SLOTS]:
            assert running.tier.lookup(chunk.key) or running.store(chunk)
        assert all(running.here(ROOTS[:SLOTS]))


# -- a file system that fills up -----------------------------------------------------------------------------------


def test_space_goes_back_when_others_need_it(path: Path) -> None:
    """While less than the reserve is free, what would go first goes, and no more; then it grows again."""
    files = SmallDisk(20 * SLOT, SLOT)
    with rig(path, files, reserve_bytes=SLOT) as running:
        for chunk in ROOTS[:SLOTS]:
            assert running.store(chunk)
        running.tier.touch([chunk.key for chunk in ROOTS[:2]])
        files.others_bytes = 20 * SLOT - running.blocks  # nothing is free
        for _ in range(6):
            running.turn(1.1)
        assert running.here(ROOTS[:SLOTS]) == [True, True, False, *[True] * 5]
        assert running.blocks == (SLOTS - 1) * SLOT and running.tier.usage().capacity_chunks == SLOTS - 1
        files.others_bytes = 20 * SLOT - 5 * SLOT
        for _ in range(6):
            running.turn(1.1)
        assert running.here(ROOTS[:SLOTS]) == [True, True, *[False] * 4, True, True]
        assert running.blocks == 4 * SLOT
        newcomer = ROOTS[SLOTS]
        assert not running.store(newcomer) and running.store(newcomer), "a second offer takes a slot that has space"
        files.others_bytes = 0
        running.turn(1.1)
        running.turn(1.1)
        assert running.tier.usage().capacity_chunks == SLOTS
        assert all(running.store(chunk) for chunk in ROOTS[10:14]) and running.blocks <= SLOTS * SLOT


def test_stores_do_not_take_what_is_to_be_given_back(path: Path) -> None:
    """While chunks are stored all the time, the reserve is free again after as many looks as without them."""
    files = SmallDisk(20 * SLOT, SLOT)
    with rig(path, files, reserve_bytes=SLOT) as running:
        for chunk in ROOTS[:SLOTS]:
            assert running.store(chunk)
        files.others_bytes = 20 * SLOT - 5 * SLOT
        for chunk in ROOTS[SLOTS : SLOTS + 8]:
            running.turn(1.1)
            for _ in range(2):  # what is offered a second time takes another's slot
                running.store(chunk)
        assert running.blocks <= 4 * SLOT and running.tier.usage().capacity_chunks == 4
        assert sum(running.here(ROOTS[: SLOTS + 8])) == 4


def test_no_space_to_grow_is_a_ceiling_and_no_fault(path: Path) -> None:
    """Where the file system is full, the tier goes on with what it has: it stays up, hits are hits."""
    files, queues, clock = SmallDisk(5 * SLOT, SLOT), InlineQueues(), SimulatedClock()
    options = DiskOptions(
        *(path, 5 * SLOT), allow_direct=False, files=files, queue=queues.queue, step_bytes=STEP * SLOT
    )
    lower = LowerTier(lambda again: DiskTier(options, NAMESPACE, SIZE, clock), clock)
    files.others_bytes = 2 * SLOT
    for chunk in ROOTS[:12] * 2:
        lower.finished()
        queues.run()
        lower.finished()
        lower.submit_store(chunk, Terms(), aligned(SIZE, content(chunk.key, SIZE)))
        queues.run()
        clock.advance(0.5)
    lower.finished()
    assert lower.is_up and lower.trips == 0
    assert lower.usage().chunks == lower.usage().capacity_chunks == 3
    lower.close(5.0)


def test_a_write_without_space_is_no_fault_either(path: Path) -> None:
    """Some file systems need space to write where there is some already: ENOSPC is a store that did not happen."""
    files = FaultyFiles()
    with rig(path, files) as running:
        assert running.store(ROOTS[0])
        files.arm(1, errno.ENOSPC, kinds=["pwritev"])
        assert running.tier.submit_store(ROOTS[1], Terms(), aligned(SIZE))
        running.queues.run()
        assert [transfer.fault for transfer in running.tier.finished()] == [Fault.FULL]
        assert not running.tier.lookup(ROOTS[1].key) and running.loads(ROOTS[0].key)
        running.turn(1.1)
        assert running.store(ROOTS[1])


@pytest.mark.parametrize("kind", ["allocate", "punch", "space", "truncate", "stat"])
@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC, errno.EOPNOTSUPP])
def test_a_call_that_fails_costs_space_and_no_chunk(path: Path, kind: str, error: int) -> None:
    """Whichever call for space fails, what is stored stays or is a miss, the books agree, and later it goes on."""
    files = SmallDisk(20 * SLOT, SLOT)
    with rig(path, files, reserve_bytes=SLOT) as running:
        assert running.store(ROOTS[0])
        files.arm(1, error, kinds=[kind], lasting=True)
        for chunk in ROOTS[1:6]:
            running.store(chunk)
        files.others_bytes = 20 * SLOT - 3 * SLOT
        for _ in range(4):
            running.turn(1.1)
        running.tier.check()
        files.disarm()
        files.others_bytes = 0
        for _ in range(3):
            running.turn(1.1)
        for chunk in ROOTS[:6]:
            assert running.tier.lookup(chunk.key) or running.store(chunk) or running.store(chunk)
        assert all(running.here(ROOTS[:6]))


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("kind", ["allocate", "punch"])
def test_what_fails_again_and_again_is_tried_less_and_less(
    path: Path, caplog: pytest.LogCaptureFixture, kind: str, error: int
) -> None:
    """Of 200 looks a few try it, one line on the log tells it, and one that it works again; meanwhile hits are hits."""
    files = SmallDisk(20 * SLOT, SLOT)
    with rig(path, files, reserve_bytes=SLOT) as running:
        for chunk in ROOTS[:4]:
            assert running.store(chunk)
        if kind == "punch":
            files.others_bytes = 20 * SLOT - 3 * SLOT
        caplog.clear()
        files.arm(1, error, kinds=[kind], lasting=True)
        for chunk in ROOTS[4:8]:
            running.store(chunk)
        for _ in range(200):
            running.turn(1.1)
        assert 2 <= files.hits <= 12
        event = {"allocate": "disk_not_grown", "punch": "disk_space_not_released"}[kind]
        assert [caplog.text.count(each) for each in (event, "disk_space_low", "disk_space_back")] == [1, 1, 0]
        assert running.loads(ROOTS[0].key) or kind == "punch"  # which costs chunks
        files.disarm()
        files.others_bytes = 0
        for _ in range(65):
            running.turn(1.1)
        assert [caplog.text.count(each) for each in (event, "disk_space_low", "disk_space_back")] == [1, 1, 1]
        assert running.tier.usage().capacity_chunks == SLOTS
        assert all(running.store(chunk) or running.store(chunk) for chunk in ROOTS[10:14])


def test_a_file_system_that_tells_nothing_is_named_once(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is asked each second, and one line on the log tells it."""
    files = SmallDisk(20 * SLOT, SLOT)
    with rig(path, files, reserve_bytes=SLOT) as running:
        files.arm(1, errno.EIO, kinds=["space"], lasting=True)
        for _ in range(20):
            running.turn(1.1)
        assert files.hits >= 20 and caplog.text.count("disk_space_unknown") == 1
        files.disarm()


def test_a_new_slab_must_fit_and_an_old_one_is_opened(path: Path, tmp_path: Path) -> None:
    """A ceiling that has no place today is an error for a new directory; one in use is opened."""
    disk = os.statvfs(tmp_path)
    size = 2 * disk.f_bavail * disk.f_frsize  # tests beside this one write and remove files
    for attempt in (
        lambda: check_directory(path, size),
        lambda: open_directory(path, SLOT, size, step_bytes=SLOT, reserve_bytes=GIB),
    ):
        with pytest.raises(DirectoryError, match=r"--disk-gib"):
            attempt()
    with rig(path) as running:
        assert running.store(ROOTS[0])
    check_directory(path, size)
    with rig(path, SmallDisk(0, SLOT), reserve_bytes=SLOT) as running:
        assert running.loads(ROOTS[0].key)


@pytest.mark.parametrize("seed", range(4))
def test_no_sequence_loses_a_slot(path: Path, seed: int) -> None:
    """Stores, loads, discards and a file system that fills and empties at random: the books agree after each step."""
    rng, files = random.Random(seed), SmallDisk(12 * SLOT, SLOT)
    with rig(path, files, reserve_bytes=2 * SLOT) as running:
        for _ in range(150):
            chunk = rng.choice(ROOTS[:14])
            draw = rng.random()
            if draw < 0.5:
                running.tier.submit_store(chunk, Terms(), aligned(SIZE, content(chunk.key, SIZE)))
            elif draw < 0.6:
                running.tier.discard(chunk.key)
            elif draw < 0.75:
                files.others_bytes = rng.randrange(12) * SLOT
            elif draw < 0.9:
                running.turn()
                running.loads(chunk.key)
            else:
                running.turn(1.1)
                running.tier.check()
            running.queues.run(rng.randrange(3))
            running.tier.finished()
        files.others_bytes = 0
        running.turn(1.1)
        running.turn(1.1)
        assert running.tier.usage().capacity_chunks == SLOTS


def test_released_space_reads_as_zeros(tmp_path: Path) -> None:
    """Slots that are released one by one or in a row take no space, and their neighbours keep their bytes."""
    files, fd = Files(), os.open(tmp_path / "slab", os.O_RDWR | os.O_CREAT)
    space = SlabSpace(files, fd, 4096, 0)
    space.allocate([5, 1, 2, 0])
    for slot in (0, 1, 2, 5):
        files.pwrite(fd, bytes([slot + 1]) * 4096, slot * 4096)
    space.release([1, 2, 5])
    assert [files.pread(fd, 4096, slot * 4096)[0] for slot in range(6)] == [1, 0, 0, 0, 0, 0]
    assert os.fstat(fd).st_blocks * 512 == 4096
    os.close(fd)
