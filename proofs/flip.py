"""R3: bytes that changed. Every bit of a header, bits of payloads, cut, swapped and old frames: none is a hit."""

import os
import random
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hotspan.core.frame import HEADER_BYTES, FrameIdentity, verify_header
from hotspan.core.terms import Terms
from hotspan.core.types import MIB, PAGE_BYTES
from hotspan.testing.chunks import aligned, chain, content, key_of
from hotspan.tiers.disk import DiskOptions, DiskTier
from hotspan.tiers.files import Files
from hotspan.tiers.io import FrameFile, staging_bytes
from kit.places import in_memory
from kit.proof import Findings, Progress, Proof, rng_of
from kit.simulated.inline import InlineQueues
from kit.simulated.keys import FixedKeys

CLAIM = "a frame of which anything changed is a miss"
_NAMESPACE = bytes(range(32))
_SIZE = 2 * PAGE_BYTES
_LARGE = 2 * MIB + PAGE_BYTES
_TIER_SAMPLES = 60


@dataclass(frozen=True, slots=True)
class Options:
    """flips: of payload bits, half of them in sealed frames."""

    flips: int = 20_000
    seed: int = 0
    only: int | None = None


class _MemoryFiles(Files):
    """One file, in memory."""

    def __init__(self) -> None:
        self.data = bytearray()

    def preadv(self, fd: int, buffers: Sequence[memoryview], at: int) -> int:
        moved = 0
        for buffer in buffers:
            part = self.data[at + moved : at + moved + len(buffer)]
            buffer[: len(part)] = part
            moved += len(part)
        return moved

    def pwritev(self, fd: int, buffers: Sequence[memoryview], at: int) -> int:
        data = b"".join(buffers)
        self.data.extend(bytes(max(0, at + len(data) - len(self.data))))
        self.data[at : at + len(data)] = data
        return len(data)


class _Bench:
    """A file with one frame, which is read as the disk tier reads it."""

    def __init__(self, size: int, is_sealed: bool) -> None:
        self.size, self.is_sealed = size, is_sealed
        self.files = _MemoryFiles()
        self.frames = FrameFile(self.files, -1, HEADER_BYTES + size)
        self.keys = FixedKeys()
        self.scratch = aligned(HEADER_BYTES + staging_bytes(size))
        self.into = aligned(size)
        self.identity = FrameIdentity(key_of("chunk"), _NAMESPACE, stamp=3)
        self.payload = aligned(size, content(self.identity.key, size))

    def write(self, identity: FrameIdentity | None = None, tenant: int = 1, sealed: bool | None = None) -> None:
        identity = identity or self.identity
        self.files.data.clear()
        if self.is_sealed if sealed is None else sealed:
            sealing = self.keys.sealing(tenant)
            if sealing is None:
                raise ValueError("the test's keys are locked")
            self.frames.write_sealed([0], self.scratch, self.payload, identity, sealing)
        else:
            self.frames.write([0], self.scratch[:HEADER_BYTES], self.payload, identity)

    def is_hit(self) -> bool:
        try:
            if self.is_sealed:
                opening = self.keys.opening
                return self.frames.read_sealed([0], self.scratch, self.into, self.identity, 0.0, opening) is None
            return self.frames.read([0], self.scratch[:HEADER_BYTES], self.into, self.identity, 0.0) is None
        except OSError:
            return False  # short

    def flip(self, bit: int) -> None:
        self.files.data[bit // 8] ^= 1 << bit % 8


@dataclass(slots=True)
class _Tally:
    """injected, detected: by kind of change."""

    injected: Counter[str] = field(default_factory=Counter)
    detected: Counter[str] = field(default_factory=Counter)
    findings: Findings = field(default_factory=Findings)

    def note(self, kind: str, is_hit: bool, what: str) -> None:
        self.injected[kind] += 1
        self.detected[kind] += not is_hit
        if is_hit:
            self.findings.add(0, f"{kind}: {what} is a hit")


def run(options: Options, progress: Progress) -> Proof:
    """Plain and sealed; each frame is a hit before it is changed."""
    tally = _Tally()
    rng = rng_of("flip", options.seed, 0)
    for number, is_sealed in enumerate((False, True)):
        name = "sealed" if is_sealed else "plain"
        bench = _Bench(_SIZE, is_sealed)
        _flip_header(bench, name, tally)
        half = options.flips // 2
        few = max(1, half // 1000)
        _flip_payload(bench, name, half - few, rng, tally)
        progress(number * half + half // 2, options.flips)
        large = _Bench(_LARGE, is_sealed)
        _flip_payload(large, name, few, rng, tally)
        progress((number + 1) * half, options.flips)
        _cut(bench, name, tally)
        _cut(large, name, tally)
        _swap(bench, name, tally)
        with in_memory() as path:
            _through_tier(path, is_sealed, name, rng, tally)
    injected, detected = sum(tally.injected.values()), sum(tally.detected.values())
    figures: dict[str, Any] = {
        kind.replace(" ", "_"): f"{tally.detected[kind]} of {count}" for kind, count in tally.injected.items()
    }
    figures |= {"injected": injected, "detected": detected, "detected_share": detected / max(1, injected)}
    return Proof("flip", CLAIM, figures, injected > 0 and detected == injected, tuple(tally.findings.kept))


def _expect_hit(bench: _Bench, tally: _Tally) -> None:
    if not bench.is_hit() or bench.into != bench.payload:
        tally.findings.add(0, "a frame that nobody changed is no hit")
        tally.injected["unchanged"] += 1


def _flip_header(bench: _Bench, name: str, tally: _Tally) -> None:
    bench.write()
    _expect_hit(bench, tally)
    for bit in range(HEADER_BYTES * 8):
        bench.flip(bit)
        header = memoryview(bench.files.data)[:HEADER_BYTES]
        is_hit = verify_header(header, bench.size, bench.identity, 0.0, sealed=bench.is_sealed) is None
        header.release()
        tally.note(f"{name} header bits", is_hit, f"bit {bit}")
        bench.flip(bit)
    _expect_hit(bench, tally)


def _flip_payload(bench: _Bench, name: str, flips: int, rng: random.Random, tally: _Tally) -> None:
    bench.write()
    _expect_hit(bench, tally)
    for _ in range(flips):
        bit = rng.randrange(HEADER_BYTES * 8, (HEADER_BYTES + bench.size) * 8)
        bench.flip(bit)
        tally.note(f"{name} payload bits", bench.is_hit(), f"bit {bit}")
        bench.flip(bit)
    _expect_hit(bench, tally)


def _cut(bench: _Bench, name: str, tally: _Tally) -> None:
    for size in range(0, HEADER_BYTES + bench.size, PAGE_BYTES):
        bench.write()
        del bench.files.data[size:]
        tally.note(f"{name} cut frames", bench.is_hit(), f"cut at {size}")
        bench.files.data.extend(bytes(HEADER_BYTES + bench.size - size))
        tally.note(f"{name} cut and zeroed frames", bench.is_hit(), f"zeroed from {size}")


def _swap(bench: _Bench, name: str, tally: _Tally) -> None:
    """Whole frames in the wrong place: another chunk's, namespace's, generation's, and of the other kind."""
    own = bench.identity
    others = {
        "another chunk's": FrameIdentity(key_of("another"), _NAMESPACE, own.stamp),
        "another namespace's": FrameIdentity(own.key, bytes(32), own.stamp),
        "an older": FrameIdentity(own.key, _NAMESPACE, own.stamp - 1),
        "a newer": FrameIdentity(own.key, _NAMESPACE, own.stamp + 1),
    }
    for what, identity in others.items():
        bench.write(identity)
        tally.note(f"{name} swapped frames", bench.is_hit(), f"{what} frame")
    bench.write(sealed=not bench.is_sealed)
    tally.note(f"{name} swapped frames", bench.is_hit(), "a frame of the other kind")
    if bench.is_sealed:
        bench.write()
        whole = bytes(bench.files.data)
        bench.write()  # the same bytes under the next nonce
        bench.files.data[HEADER_BYTES:] = whole[HEADER_BYTES:]
        tally.note(f"{name} swapped frames", bench.is_hit(), "an older payload under a newer header")
        bench.write(tenant=2)
        other = bytes(bench.files.data)
        bench.write()
        bench.files.data[HEADER_BYTES:] = other[HEADER_BYTES:]
        tally.note(f"{name} swapped frames", bench.is_hit(), "another tenant's payload")


def _through_tier(path: Path, is_sealed: bool, name: str, rng: random.Random, tally: _Tally) -> None:
    """The same on the files of a real disk tier, between one process and the next."""
    chunks = [chain(f"text-{n}", 1)[0] for n in range(6)]
    slot = _SIZE + HEADER_BYTES

    def opened(directory: Path, writer: int) -> tuple[DiskTier, InlineQueues]:
        queues = InlineQueues()
        keys = FixedKeys(writer) if is_sealed else None
        options = DiskOptions(directory, len(chunks) * slot, allow_direct=False, keys=keys, queue=queues.queue)
        return DiskTier(options, _NAMESPACE, _SIZE), queues

    def filled(directory: Path, writer: int, version: int) -> None:
        tier, queues = opened(directory, writer)
        for chunk in chunks:
            tier.submit_store(chunk, Terms(), aligned(_SIZE, content(chunk.key, _SIZE, version)))
            queues.run()
            tier.finished()
        tier.close(5.0)

    def hits(directory: Path) -> list[bytes | None]:
        tier, queues = opened(directory, 99)
        found: list[bytes | None] = []
        into = aligned(_SIZE)
        for chunk in chunks:
            is_there = tier.submit_load(chunk.key, into)
            queues.run()
            transfers = tier.finished()
            found.append(bytes(into) if is_there and transfers[0].fault is None else None)
        tier.close(5.0)
        return found

    good = path / "good"
    filled(good, 1, 0)
    wanted = [content(chunk.key, _SIZE) for chunk in chunks]
    if hits(good) != wanted:
        tally.findings.add(0, "a directory that nobody changed has misses")
        tally.injected["unchanged"] += 1
    for sample in range(_TIER_SAMPLES):
        bad = path / "bad"
        shutil.rmtree(bad, ignore_errors=True)
        shutil.copytree(good, bad)
        fd = os.open(bad / "slab", os.O_RDWR)
        at, victim = rng.randrange(len(chunks) * slot), sample % 3
        if victim == 0:
            byte = os.pread(fd, 1, at)[0] ^ 1 << rng.randrange(8)
            os.pwrite(fd, bytes([byte]), at)
            changed = {at // slot}
        elif victim == 1:
            at -= at % PAGE_BYTES
            os.ftruncate(fd, at)
            changed = set(range(at // slot, len(chunks)))
        else:
            one, other = rng.sample(range(len(chunks)), 2)
            frames = [os.pread(fd, slot, number * slot) for number in (one, other)]
            os.pwrite(fd, frames[1], one * slot)
            os.pwrite(fd, frames[0], other * slot)
            changed = {one, other}
        os.close(fd)
        found = hits(bad)
        for number in range(len(chunks)):
            if number in changed:
                tally.note(f"{name} chunks of a disk tier", found[number] is not None, f"sample {sample}")
            elif found[number] != wanted[number]:
                tally.findings.add(0, f"sample {sample}: a chunk that nobody changed is no hit")
                tally.injected["unchanged"] += 1
