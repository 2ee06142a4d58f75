"""R3 with an L2 in the place of the disk: of what a shared directory holds, anything changed: none is a hit."""

import itertools
import random
import shutil
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from hotspan.core.frame import HEADER_BYTES
from hotspan.core.terms import Terms
from hotspan.core.types import PAGE_BYTES, Chunk, Compress
from hotspan.l2.base import PREAMBLE_BYTES
from hotspan.l2.file import FileStore
from hotspan.l2.follower import LogFollower
from hotspan.l2.metadata import LIFE_BYTES
from hotspan.l2.remote import RemoteOptions, RemoteTier
from hotspan.testing.chunks import aligned, chain, content
from hotspan.testing.clock import SimulatedClock
from hotspan.tiers.record import RECORD_BYTES
from kit.places import in_memory
from kit.proof import Findings, Progress, rng_of
from kit.simulated.inline import InlineQueues
from kit.simulated.keys import FixedKeys
from proofs.disk import NAMESPACE

SIZE = 3 * PAGE_BYTES
"""Of which a compressed chunk takes two."""

_CUT_BYTES = 1024
_COMPRESS: tuple[Compress, ...] = ("never", "always")
_HEAD_BYTES = RECORD_BYTES + LIFE_BYTES


@dataclass(slots=True)
class Changes:
    """injected, detected: by kind of change."""

    injected: Counter[str] = field(default_factory=Counter)
    detected: Counter[str] = field(default_factory=Counter)


class _Bench:
    """A directory with one chunk, which a replica that knows nothing asks for and loads."""

    def __init__(self, root: Path, is_sealed: bool, compress: Compress) -> None:
        self._clock = SimulatedClock()
        self._compress = compress
        self._store = FileStore(root, clock=self._clock)
        self._keys = FixedKeys() if is_sealed else None
        self._follower = LogFollower(self._store.log, "proof", self._clock)
        self._into = aligned(SIZE)
        self.chunk = chain("text", 1)[0]
        self.objects = [self._stored(root, chunk) for chunk in (self.chunk, self.chunk, chain("other", 1)[0])]
        self.path = self._path_of(root, self.chunk)

    def answer(self, data: bytes, of: bytes) -> bytes | None:
        """What a replica gets if the object's file says this, beside the metadata of another; None for a miss."""
        shutil.rmtree(self.path.parent, ignore_errors=True)
        self.path.parent.mkdir(parents=True)
        self.path.write_bytes(data)
        (self.path.parent / of[RECORD_BYTES:_HEAD_BYTES].hex()).touch()
        tier, queues = self._opened(self._keys)
        tier.ask([self.chunk], 1)
        queues.run()
        tier.finished()
        is_there = tier.submit_load(self.chunk.key, self._into)
        queues.run()
        is_hit = is_there and [one.fault for one in tier.finished() if one.is_load] == [None]
        queues.run()  # what is wrong is deleted
        return bytes(self._into) if is_hit else None

    def close(self) -> None:
        self._store.close()

    def _opened(self, keys: FixedKeys | None) -> tuple[RemoteTier, InlineQueues]:
        queues = InlineQueues()
        self._follower.poll()
        self._follower.foreign()
        options = RemoteOptions(
            self._store, self._follower, threads=1, keys=keys, compress=self._compress, queue=queues.queue
        )
        return RemoteTier(options, NAMESPACE, SIZE, self._clock), queues

    def _stored(self, root: Path, chunk: Chunk) -> bytes:
        tier, queues = self._opened(self._keys)
        tier.submit_store(chunk, Terms(tenant=1), aligned(SIZE, content(chunk.key, SIZE)))
        queues.run()
        tier.finished()
        data = self._path_of(root, chunk).read_bytes()
        self._store.delete([chunk.key])
        return data

    @staticmethod
    def _path_of(root: Path, chunk: Chunk) -> Path:
        return next(root.glob("objects/*")) / chunk.key.hex() / "object"


def change(flips: int, seed: int, findings: Findings, progress: Progress) -> Changes:
    """Plain and sealed, compressed and not; what nobody changed is a hit before and after."""
    changes = Changes()
    for number, (compress, is_sealed) in enumerate(itertools.product(_COMPRESS, (False, True))):
        name = ("compressed " if compress == "always" else "") + ("sealed" if is_sealed else "plain")
        with in_memory() as root:
            bench = _Bench(root, is_sealed, compress)
            good, older, other = bench.objects
            wanted = content(bench.chunk.key, SIZE)
            for data in (good, older):
                if bench.answer(data, data) != wanted:
                    findings.add(0, f"{name}: an object that nobody changed is no hit")
            for kind, data in _changed(good, older, other, flips // 4, rng_of("l2-flip", seed, number)):
                answer = bench.answer(data, good)
                changes.injected[f"{name} {kind}"] += 1
                changes.detected[f"{name} {kind}"] += answer is None
                if answer is not None:
                    findings.add(0, f"{name} {kind}: a hit with {'right' if answer == wanted else 'wrong'} bytes")
                progress(min(changes.injected.total(), flips), flips)
            bench.close()
    return changes


def _changed(good: bytes, older: bytes, other: bytes, flips: int, rng: random.Random) -> list[tuple[str, bytes]]:
    """Kinds of change, and the object after each. The zeros behind record and life mean nothing and are left out."""
    record, header = range(_HEAD_BYTES * 8), range(PREAMBLE_BYTES * 8, (PREAMBLE_BYTES + HEADER_BYTES) * 8)
    payload = range(header.stop, len(good) * 8)
    changed = []
    for kind, bits in (("record bits", record), ("header bits", header), ("payload bits", payload)):
        for bit in rng.sample(bits, min(len(bits), flips // 3)):
            data = bytearray(good)
            data[bit // 8] ^= 1 << bit % 8
            changed.append((kind, bytes(data)))
    for at in range(0, len(good), _CUT_BYTES):
        changed.append(("cut objects", good[:at]))
        if any(good[max(at, PREAMBLE_BYTES) :]):
            changed.append(("zeroed objects", good[:at].ljust(len(good), b"\0")))
    changed.append(("longer objects", good + bytes(_CUT_BYTES)))
    changed.append(("swapped objects", other))
    changed.append(("swapped frames", good[:PREAMBLE_BYTES] + other[PREAMBLE_BYTES:]))
    changed.append(("swapped frames", good[:PREAMBLE_BYTES] + older[PREAMBLE_BYTES:]))
    changed.append(("swapped frames", older[:PREAMBLE_BYTES] + good[PREAMBLE_BYTES:]))
    return changed
