"""A recorded run of a disk tier: random calls, and a model of what was stored on which terms."""

import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from hotspan.core.frame import HEADER_BYTES
from hotspan.core.terms import Scope, Terms, tag_labels
from hotspan.core.types import PAGE_BYTES, Chunk, ChunkKey
from hotspan.testing.chunks import aligned, chain, content
from hotspan.testing.clock import SimulatedClock
from hotspan.tiers.disk import DiskOptions, DiskTier
from hotspan.tiers.files import Files
from hotspan.tiers.packer import Packer
from kit.simulated.faults import BadPlace, BadPlaces, bad_slots
from kit.simulated.inline import InlineQueues
from kit.simulated.keys import FixedKeys
from kit.simulated.power import Recording, RecordingFiles

SIZE, SLOTS = 3 * 4096, 8
SLAB_BYTES = SLOTS * (SIZE + HEADER_BYTES)
NAMESPACE = bytes(range(32))
CHUNKS = [chunk for name in "abcd" for chunk in chain(name, 3)]
TAGS = [tag_labels([name]) for name in ("x", "y", "z")]
_BAD_PART = 0.125

READER = 1 << 41
"""Who opens what a run left: a writer of its own, as every process is."""

Stored = tuple[ChunkKey, int]
"""One store of a chunk: each has a version, and bytes, of its own."""


class RecordingBadPlaces(BadPlaces, RecordingFiles):
    """Records the calls of a disk with bad places, what a torn write leaves included."""

    def __init__(self, directory: Path, places: list[BadPlace], wait: Callable[[float], None]) -> None:
        RecordingFiles.__init__(self, directory)
        BadPlaces.__init__(self, places, wait=wait)


@dataclass(slots=True)
class RecordedRun:
    """Random calls of a disk tier in `path`, recorded.

    has_bad:  whether slots are bad: `places`, for good.
    contents: which store wrote these bytes.
    known:    the terms of every store that was not invalidated since, also of what was discarded or evicted since: who
              says durable says it of their bytes too.
    A mark in the recording is the set of stores whose invalidation was acknowledged: they must not come back.
    """

    path: Path
    rng: random.Random
    is_sealed: bool
    is_packed: bool = False
    has_bad: bool = False
    places: list[BadPlace] = field(default_factory=list)
    contents: dict[bytes, Stored] = field(default_factory=dict)
    known: dict[Stored, Terms] = field(default_factory=dict)
    versions: Counter[ChunkKey] = field(default_factory=Counter)
    acknowledged: int = 0
    evictions: int = 0
    reopened: int = 0
    clock: SimulatedClock = field(default_factory=SimulatedClock)
    files: RecordingBadPlaces = field(init=False)
    queues: InlineQueues = field(init=False)
    tier: DiskTier = field(init=False)

    def __post_init__(self) -> None:
        if self.has_bad:
            slot_bytes = PAGE_BYTES if self.is_packed else SIZE + HEADER_BYTES
            self.places = bad_slots(self.rng, SLAB_BYTES // slot_bytes, slot_bytes, _BAD_PART)
        self.files = self.recorder()
        self.open(0)

    def recorder(self) -> RecordingBadPlaces:
        """What records the calls."""
        return RecordingBadPlaces(self.path, self.places, self.clock.advance)

    def run(self, steps: int) -> Recording:
        """Random steps; the recording of all that reached the files."""
        actions = (
            (0.40, self.store),
            (0.10, self.join),
            (0.05, self.discard),
            (0.07, self.invalidate),
            (0.02, self.reopen),
            (0.08, self.sync_slab),
            (0.02, lambda: self.tier.directory.table.sync()),
            (0.26, self.turn),
        )
        weights = [weight for weight, _ in actions]
        for _ in range(steps):
            self.rng.choices([action for _, action in actions], weights)[0]()
        self.queues.run()
        return self.files.recording

    def close(self) -> None:
        """Let go of the directory."""
        self.tier.close(5.0)

    def open(self, writer: int) -> None:
        self.queues = InlineQueues(self.rng.randrange(1 << 32))
        keys = FixedKeys(writer) if self.is_sealed else None
        self.tier = open_tier(self.path, self.queues, keys, self.files, self.clock, is_packed=self.is_packed)

    def store(self, chunk: Chunk | None = None) -> None:
        chunk = chunk or self.rng.choice(CHUNKS)
        terms = Terms(labels=self.rng.choice(TAGS) if self.rng.random() < 0.7 else frozenset())
        version = self.versions[chunk.key] + 1
        data = content(chunk.key, SIZE, version)
        before = self.held()
        for _ in range(2):  # a full tier takes what is offered a second time
            if self.tier.submit_store(chunk, terms, aligned(SIZE, data)):
                self.versions[chunk.key] = version
                self.known[chunk.key, version] = terms
                self.contents[data] = (chunk.key, version)
                self.evictions += len(before - self.held())
                break

    def join(self) -> None:
        key = self.rng.choice(CHUNKS).key
        if self.tier.lookup(key):
            terms = Terms(labels=self.rng.choice(TAGS))
            self.tier.join(key, terms)
            stored = (key, self.versions[key])
            self.known[stored] = self.known[stored].joined(terms)

    def discard(self) -> None:
        self.tier.discard(self.rng.choice(CHUNKS).key)

    def invalidate(self, scope: Scope | None = None) -> None:
        scopes = [Scope(labels=self.rng.choice(TAGS)), Scope(keys=frozenset([self.rng.choice(CHUNKS).key])), Scope()]
        scope = scope or self.rng.choices(scopes, (5, 5, 1))[0]
        dead: set[Stored] = set()

        def durable(done: bool) -> None:
            if not done:
                raise AssertionError("an invalidation failed on a disk that does not")
            self.acknowledged += 1
            self.files.mark(dead)

        before = self.held()
        self.tier.invalidate([scope], durable)
        dead |= self.matched(scope, before)
        for stored in dead:
            self.known.pop(stored, None)

    def matched(self, scope: Scope, before: set[ChunkKey]) -> set[Stored]:
        """What an invalidation that is done has deleted. before: the chunks that were there."""
        matched = {stored for stored, terms in self.known.items() if scope.takes(stored[0], NAMESPACE, terms)}
        return matched | {(key, self.versions[key]) for key in before - self.held()}

    def reopen(self) -> None:
        """End well and begin anew, which compacts the log."""
        self.tier.close(5.0)
        self.reopened += 1
        self.open(self.rng.randrange(1 << 40))

    def sync_slab(self) -> None:
        self.files.sync(self.tier.directory.slab_fd)  # as the kernel does now and then

    def turn(self) -> None:
        self.queues.run(self.rng.randrange(1, 4))
        self.tier.finished()

    def held(self) -> set[ChunkKey]:
        table = self.tier.directory.table
        return {table.key(slot) for slot in table.slots()}


STEP_BYTES = 2 * (SIZE + HEADER_BYTES)


def open_tier(
    path: Path,
    queues: InlineQueues,
    keys: FixedKeys | None,
    files: Files | None = None,
    clock: SimulatedClock | None = None,
    *,
    step_bytes: int | None = STEP_BYTES,
    reserve_bytes: int = 0,
    is_packed: bool = False,
) -> DiskTier:
    """The disk tier of such a run. Raises: DirectoryError."""
    clock = clock or SimulatedClock()
    options = DiskOptions(
        *(path, SLAB_BYTES, 2),
        allow_direct=False,
        keys=keys,
        files=files or Files(),
        queue=queues.queue,
        step_bytes=step_bytes,
        reserve_bytes=reserve_bytes,
        packer=Packer("always" if is_packed else "never", 2, clock),
        slot_bytes=PAGE_BYTES if is_packed else None,
    )
    return DiskTier(options, NAMESPACE, SIZE, clock)


def loaded(tier: DiskTier, queues: InlineQueues) -> Iterator[tuple[ChunkKey, bytes | None]]:
    """Each chunk that a tier finds, with its bytes; None if reading it was a fault."""
    into = aligned(SIZE)
    for chunk in CHUNKS:
        if tier.submit_load(chunk.key, into):
            queues.run()
            (transfer,) = tier.finished()
            yield chunk.key, None if transfer.fault is not None else bytes(into)
