"""A recorded run of a disk tier: random calls, and a model of what was stored on which terms."""

import random
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from hotspan.core.frame import HEADER_BYTES
from hotspan.core.terms import Scope, Terms, tag_labels
from hotspan.core.types import ChunkKey
from hotspan.testing.chunks import aligned, chain, content
from hotspan.testing.clock import SimulatedClock
from hotspan.tiers.disk import DiskOptions, DiskTier
from hotspan.tiers.files import Files
from proofs.simulated.inline import InlineQueues
from proofs.simulated.keys import FixedKeys
from proofs.simulated.power import Recording, RecordingFiles

SIZE, SLOTS = 2 * 4096, 8
SLAB_BYTES = SLOTS * (SIZE + HEADER_BYTES)
NAMESPACE = bytes(range(32))
CHUNKS = [chunk for name in "abcd" for chunk in chain(name, 3)]
TAGS = [tag_labels([name]) for name in ("x", "y", "z")]
READER = 1 << 41
"""Who opens what a run left: a writer of its own, as every process is."""

Stored = tuple[ChunkKey, int]
"""One store of a chunk: each has a version, and bytes, of its own."""


@dataclass(slots=True)
class RecordedRun:
    """Random calls of a disk tier in `path`, recorded.

    contents: which store wrote these bytes.
    known:    the terms of every store that was not invalidated since, also of what was discarded or evicted since: who
              says durable says it of their bytes too.
    A mark in the recording is the set of stores whose invalidation was acknowledged: they must not come back.
    """

    path: Path
    rng: random.Random
    is_sealed: bool
    contents: dict[bytes, Stored] = field(default_factory=dict)
    known: dict[Stored, Terms] = field(default_factory=dict)
    versions: Counter[ChunkKey] = field(default_factory=Counter)
    acknowledged: int = 0
    evictions: int = 0
    reopened: int = 0
    files: RecordingFiles = field(init=False)
    queues: InlineQueues = field(init=False)
    tier: DiskTier = field(init=False)

    def __post_init__(self) -> None:
        self.files = RecordingFiles(self.path)
        self._open(0)

    def run(self, steps: int) -> Recording:
        """Random steps; the recording of all that reached the files."""
        actions = (
            (0.40, self._store),
            (0.10, self._join),
            (0.05, self._discard),
            (0.07, self._invalidate),
            (0.02, self._reopen),
            (0.08, self._sync_slab),
            (0.02, lambda: self.tier.directory.table.sync()),
            (0.26, self._turn),
        )
        weights = [weight for weight, _ in actions]
        for _ in range(steps):
            self.rng.choices([action for _, action in actions], weights)[0]()
        self.queues.run()
        return self.files.recording

    def close(self) -> None:
        """Let go of the directory."""
        self.tier.close(5.0)

    def _open(self, writer: int) -> None:
        self.queues = InlineQueues(self.rng.randrange(1 << 32))
        self.tier = open_tier(self.path, self.queues, FixedKeys(writer) if self.is_sealed else None, self.files)

    def _store(self) -> None:
        chunk = self.rng.choice(CHUNKS)
        terms = Terms(labels=self.rng.choice(TAGS) if self.rng.random() < 0.7 else frozenset())
        version = self.versions[chunk.key] + 1
        data = content(chunk.key, SIZE, version)
        before = self._held()
        for _ in range(2):  # a full tier takes what is offered a second time
            if self.tier.submit_store(chunk, terms, aligned(SIZE, data)):
                self.versions[chunk.key] = version
                self.known[chunk.key, version] = terms
                self.contents[data] = (chunk.key, version)
                self.evictions += len(before - self._held())
                break

    def _join(self) -> None:
        key = self.rng.choice(CHUNKS).key
        if self.tier.lookup(key):
            terms = Terms(labels=self.rng.choice(TAGS))
            self.tier.join(key, terms)
            stored = (key, self.versions[key])
            self.known[stored] = self.known[stored].joined(terms)

    def _discard(self) -> None:
        self.tier.discard(self.rng.choice(CHUNKS).key)

    def _invalidate(self) -> None:
        scopes = [Scope(labels=self.rng.choice(TAGS)), Scope(keys=frozenset([self.rng.choice(CHUNKS).key])), Scope()]
        (scope,) = self.rng.choices(scopes, (5, 5, 1))
        dead: set[Stored] = set()

        def durable(done: bool) -> None:
            if not done:
                raise AssertionError("an invalidation failed on a disk that does not")
            self.acknowledged += 1
            self.files.mark(dead)

        before = self._held()
        self.tier.invalidate([scope], durable)
        taken = {stored for stored, terms in self.known.items() if scope.takes(stored[0], NAMESPACE, terms)}
        dead |= taken | {(key, self.versions[key]) for key in before - self._held()}
        for stored in dead:
            self.known.pop(stored, None)

    def _reopen(self) -> None:
        """End well and begin anew, which compacts the log."""
        self.tier.close(5.0)
        self.reopened += 1
        self._open(self.rng.randrange(1 << 40))

    def _sync_slab(self) -> None:
        self.files.sync(self.tier.directory.slab_fd)  # as the kernel does now and then

    def _turn(self) -> None:
        self.queues.run(self.rng.randrange(1, 4))
        self.tier.finished()

    def _held(self) -> set[ChunkKey]:
        table = self.tier.directory.table
        return {table.key(slot) for slot in table.slots()}


def open_tier(
    path: Path, queues: InlineQueues, keys: FixedKeys | None, files: RecordingFiles | None = None
) -> DiskTier:
    """The disk tier of such a run. Raises: DirectoryError."""
    options = DiskOptions(
        *(path, SLAB_BYTES, 2),
        allow_direct=False,
        keys=keys,
        files=files or Files(),
        queue=queues.queue,
        step_bytes=2 * (SIZE + HEADER_BYTES),
    )
    return DiskTier(options, NAMESPACE, SIZE, SimulatedClock())
