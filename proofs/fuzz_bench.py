"""What fuzzing tries its input on, and how it spoils what was whole."""

import random
from dataclasses import dataclass, field
from pathlib import Path

from hotspan.core.errors import DirectoryError
from hotspan.core.frame import HEADER_BYTES
from hotspan.core.terms import Scope, Terms
from hotspan.core.types import Chunk, ChunkKey
from hotspan.testing.chunks import aligned, content, key_of
from hotspan.tiers.disk import DiskOptions, DiskTier
from kit.simulated.inline import InlineQueues

NAMESPACE = bytes(range(32))
SIZE, SLOTS = 4096, 6


class Broken(Exception):
    """Input was taken for what it is not, or raised what it must not."""


@dataclass(slots=True)
class Bench:
    """What input is tried on: a directory that is put back for each case, a frame, a model."""

    path: Path
    chunks: list[Chunk] = field(default_factory=list)
    good: dict[str, bytes] = field(default_factory=dict)
    allowed: dict[ChunkKey, bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for number in range(SLOTS - 1):
            parent = self.chunks[-1].key if number % 3 else None
            self.chunks.append(Chunk(key_of(f"chunk-{number}"), parent, number % 3))
        self.allowed = {chunk.key: content(chunk.key, SIZE) for chunk in self.chunks}
        tier, queues = self.open()
        for chunk in self.chunks:
            tier.submit_store(chunk, Terms(labels=frozenset({chunk.index + 1})), aligned(SIZE, self.allowed[chunk.key]))
            queues.run()
            tier.finished()
        tier.invalidate([Scope(labels=frozenset({77}))], lambda done: None)
        queues.run()
        self.good = {name: (self.path / "disk" / name).read_bytes() for name in ("table", "log", "slab")}
        tier.close(5.0)

    def open(self) -> tuple[DiskTier, InlineQueues]:
        queues = InlineQueues()
        slab_bytes = SLOTS * (SIZE + HEADER_BYTES)
        options = DiskOptions(self.path / "disk", slab_bytes, allow_direct=False, queue=queues.queue)
        return DiskTier(options, NAMESPACE, SIZE), queues

    def look(self, changed: dict[str, bytes]) -> int:
        """Open the directory with these files changed, and load all that it has; how many chunks that is."""
        for name, data in (self.good | changed).items():
            (self.path / "disk" / name).write_bytes(data)
        try:
            tier, queues = self.open()
        except DirectoryError:
            return 0
        found = 0
        try:
            into = aligned(SIZE)
            for chunk in self.chunks:
                if tier.submit_load(chunk.key, into):
                    queues.run()
                    if all(transfer.fault is None for transfer in tier.finished()):
                        found += 1
                        if into != self.allowed[chunk.key]:
                            raise Broken("a chunk has wrong bytes")
            queues.run()
            tier.check()
        finally:
            tier.close(5.0)
        return found


def mutated(rng: random.Random, data: bytes) -> bytes:
    """The same bytes with a few of them changed, cut, doubled, moved, or all of them made up."""
    found = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        at = rng.randrange(len(found) + 1)
        length = rng.choice((1, 4, 8, 32, 256, 4096))
        match rng.randrange(7):
            case 0 if found:
                found[at % len(found)] ^= 1 << rng.randrange(8)
            case 1:
                found[at : at + length] = rng.randbytes(min(length, len(found) - at))
            case 2:
                del found[at:]
            case 3:
                del found[at : at + length]
            case 4:
                found[at:at] = found[at : at + length]
            case 5:
                source = rng.randrange(len(found) + 1)
                found[at : at + length] = found[source : source + length]
            case 6:
                found[at : at + length] = bytes(length)
    return rng.randbytes(rng.randrange(2 * len(data) + 1)) if rng.random() < 0.03 else bytes(found)
