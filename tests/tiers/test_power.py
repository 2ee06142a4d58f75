"""Power losses: whatever of the unsynced writes is lost, reordered or torn, no wrong byte and nothing resurrected."""

import os
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from hotspan.core.terms import Scope, Terms
from hotspan.core.types import Chunk, ChunkKey
from hotspan.testing.chunks import aligned, content
from hotspan.testing.clock import SimulatedClock
from hotspan.tiers.disk import DiskOptions, DiskTier
from kit.simulated.inline import InlineQueues
from kit.simulated.keys import FixedKeys
from kit.simulated.power import PowerLoss, RecordingFiles, power_loss, power_loss_images
from proofs.power_run import (
    CHUNKS,
    NAMESPACE,
    READER,
    SIZE,
    SLOTS,
    STEP_BYTES,
    TAGS,
    RecordedRun,
    Stored,
    loaded,
    open_tier,
)


class TightFiles(RecordingFiles):
    """On a file system that others fill and empty all the time: a slab of steps grows, and gives slots back."""

    def __init__(self, directory: Path, rng: random.Random) -> None:
        super().__init__(directory)
        self._rng = rng

    def space(self, fd: int) -> os.statvfs_result:
        free = self._rng.choice((0, 2, 9, 9)) * (SIZE + 4096) // 4096
        return os.statvfs_result((4096, 4096, 1 << 30, free, free, 0, 0, 0, 0, 255))


@dataclass
class Scenario(RecordedRun):
    """A recorded run in which nothing is stored behind a gap.

    stood_on: the store of its parent that each store stands on: what takes the one takes the other, whatever became of
              those in between meanwhile.
    """

    is_growing: bool = False
    stood_on: dict[Stored, Stored] = field(default_factory=dict)

    @classmethod
    def of(cls, path: Path, seed: int, *, is_sealed: bool = False, is_growing: bool = False) -> "Scenario":
        return cls(path, random.Random(seed), is_sealed, is_growing=is_growing)

    def recorder(self) -> RecordingFiles:
        return TightFiles(self.path, self.rng) if self.is_growing else RecordingFiles(self.path)

    def open(self, writer: int) -> None:
        self.queues = InlineQueues(self.rng.randrange(1 << 32))
        keys = FixedKeys(writer) if self.is_sealed else None
        step_bytes = STEP_BYTES if self.is_growing else None
        self.tier = open_tier(
            *(self.path, self.queues, keys, self.files, self.clock), step_bytes=step_bytes, reserve_bytes=SIZE
        )

    def store(self, chunk: Chunk | None = None) -> None:
        last = chunk or self.rng.choice(CHUNKS)
        at = CHUNKS.index(last)
        for each in CHUNKS[at - last.index : at + 1]:
            if each is last if chunk else each.key not in self.held():
                before = self.versions[each.key]
                super().store(each)
                if each.parent is not None and self.versions[each.key] > before:
                    self.stood_on[each.key, before + 1] = each.parent, self.versions[each.parent]

    def matched(self, scope: Scope, before: set[ChunkKey]) -> set[Stored]:
        dead = {stored for stored, terms in self.known.items() if scope.takes(stored[0], NAMESPACE, terms)}
        while descendants := {stored for stored in self.known if self.stood_on.get(stored) in dead} - dead:
            dead |= descendants
        assert not {(key, self.versions[key]) for key in self.held()} & dead, "it was deleted and is here"
        return dead

    def turn(self) -> None:
        self.queues.run(self.rng.randrange(1, 4))
        self.clock.advance(0.4 if self.is_growing else 0.0)
        self.tier.finished()


@dataclass
class Finding:
    """What a directory that lost power held."""

    whole: int = 0
    faulty: int = 0


def look(directory: Path, image: PowerLoss, scenario: Scenario) -> Finding:
    """Open an image and load all it has. Raises: AssertionError for a wrong byte, or a resurrected chunk."""
    image.restore(directory)
    dead: set[Stored] = set().union(*image.marks)
    queues, keys = InlineQueues(), FixedKeys(READER) if scenario.is_sealed else None
    tier = open_tier(directory, queues, keys, step_bytes=STEP_BYTES if scenario.is_growing else None)
    finding = Finding()
    try:
        for chunk in CHUNKS:
            if chunk.parent is not None and tier.lookup(chunk.key):
                assert tier.lookup(chunk.parent), (
                    f"cut {image.cut}: a chunk behind a gap, which no invalidation reaches"
                )
        for key, data in loaded(tier, queues):
            if data is None:
                finding.faulty += 1
                continue
            finding.whole += 1
            stored = scenario.contents.get(data)
            assert stored is not None and stored[0] == key, f"cut {image.cut}: wrong bytes"
            assert stored not in dead, f"cut {image.cut}: what was invalidated is back"
        tier.check()
    finally:
        tier.close(5.0)
    return finding


@pytest.fixture
def fast() -> Iterator[Path]:
    """A directory in memory: what it costs to restore an image is not the disk's time."""
    root = Path("/dev/shm")
    with TemporaryDirectory(prefix="hotspan-power-", dir=root if root.is_dir() else None) as path:
        yield Path(path)


@pytest.mark.parametrize("sealed", [False, True], ids=["plain", "sealed"])
@pytest.mark.parametrize("seed", range(8))
def test_power_losses(fast: Path, seed: int, sealed: bool) -> None:
    """R2, small: of power losses at random moments of a random run, none has a wrong byte or a chunk that came back."""
    scenario = Scenario.of(fast / "run", seed, is_sealed=sealed)
    recording = scenario.run(150)
    total = Finding()
    for image in power_loss_images(recording, seed, 60):
        finding = look(fast / "image", image, scenario)
        total.whole += finding.whole
        total.faulty += finding.faulty
    assert scenario.acknowledged > 3 and total.whole > 40, "the run was too tame to find anything"
    scenario.tier.close(5.0)


@pytest.mark.parametrize("seed", range(6))
def test_power_losses_of_a_slab_that_grows_and_shrinks(fast: Path, seed: int) -> None:
    """The same where slots get space and lose it: a chunk whose space went is a miss, whatever of that was written."""
    scenario = Scenario.of(fast / "run", seed, is_growing=True)
    recording = scenario.run(600)
    total = Finding()
    for image in power_loss_images(recording, seed, 120):
        finding = look(fast / "image", image, scenario)
        total.whole += finding.whole
        total.faulty += finding.faulty
    assert scenario.acknowledged > 3 and total.whole > 40, "the run was too tame to find anything"
    scenario.tier.close(5.0)


@pytest.mark.parametrize("seed", range(3))
def test_a_log_that_is_shortened_holds_to_what_it_said(fast: Path, seed: int) -> None:
    """Power lost at any moment around the log's new beginning brings nothing back, and everything is still opened."""
    scenario = Scenario.of(fast / "run", seed)
    roots = [chunk for chunk in CHUNKS if chunk.parent is None]
    for n in range(70):
        if n == 56:
            began = scenario.files.recording.moments
        scenario.store(roots[n % 2])
        scenario.store(roots[2])
        scenario.queues.run()
        scenario.tier.finished()
        scenario.invalidate(Scope(keys=frozenset([roots[n % 2].key])))
        scenario.queues.run()
        scenario.tier.finished()
    assert scenario.acknowledged == 70 and scenario.tier.directory.log.scopes == 6
    recording, rng, total = scenario.files.recording, random.Random(seed), Finding()
    for cut in range(began, recording.moments):
        finding = look(fast / "image", power_loss(recording, cut, rng), scenario)
        total.whole += finding.whole
    assert recording.moments - began > 60 and total.whole > 20
    scenario.tier.close(5.0)


def test_a_joined_label_outlives_a_power_loss_a_second_later(fast: Path) -> None:
    """Of a hit under a tag the disk knows within two seconds of polling, whatever is lost then; before it may not."""
    path, clock, queues = fast / "run", SimulatedClock(), InlineQueues()
    files = RecordingFiles(path)
    size = SLOTS * (SIZE + 4096)
    options = DiskOptions(path, size, allow_direct=False, files=files, queue=queues.queue)
    tier = DiskTier(options, NAMESPACE, SIZE, clock)
    chunk, tag = CHUNKS[0], TAGS[0]
    assert tier.submit_store(chunk, Terms(), aligned(SIZE, content(chunk.key, SIZE)))
    queues.run()
    tier.finished()
    tier.directory.table.sync()
    for waited, label in ((0.3, TAGS[1]), (0.9, tag)):  # at any moment between two flushes
        clock.advance(waited)
        tier.finished()
        queues.run()
        tier.join(chunk.key, Terms(labels=label, expires_s=int(clock.unix()) + 900))
        queues.run()
    expires_s = tier.terms(chunk.key).expires_s
    hit = files.recording.moments - 1
    for _ in range(20):
        clock.advance(0.1)
        tier.finished()
        queues.run()
    after = files.recording.moments - 1
    known: dict[int, Counter[bool]] = {hit: Counter(), after: Counter()}
    for cut, seen in known.items():
        for seed in range(20):
            power_loss(files.recording, cut, random.Random(seed)).restore(fast / "image")
            fresh = DiskTier(
                DiskOptions(fast / "image", size, allow_direct=False, queue=InlineQueues().queue),
                *(NAMESPACE, SIZE, clock),
            )
            terms = fresh.terms(chunk.key) if fresh.lookup(chunk.key) else Terms()
            seen[terms.labels == TAGS[0] | TAGS[1] and terms.expires_s == expires_s] += 1
            fresh.close(5.0)
    assert known[after] == {True: 20} and known[hit][False], "a label that was joined is lost, or none ever is"
    tier.close(5.0)


def test_nothing_unsynced_survives_or_all_does(fast: Path) -> None:
    """A run that was synced at its end is in the last image whole, and the image before all of it is empty."""
    scenario = Scenario.of(fast / "run", 4)
    recording = scenario.run(60)
    scenario.tier.close(5.0)
    assert power_loss(recording, 0, random.Random(0)).files == {}
    image = power_loss(recording, recording.moments - 1, random.Random(0))
    disk = {path.name: path.read_bytes() for path in (fast / "run").iterdir()}
    assert image.files["log"] == disk["log"] and image.marks
    assert image.files["table"] == disk["table"]


def test_images_follow_from_the_seed(fast: Path) -> None:
    """The same recording and seed give the same images; an image is cut where it says, and torn at sectors."""
    scenario = Scenario.of(fast / "run", 5)
    recording = scenario.run(60)
    one, other = (list(power_loss_images(recording, 7, 20)) for _ in range(2))
    assert one == other
    assert one != list(power_loss_images(recording, 8, 20))
    scenario.tier.close(5.0)
