"""The process that is killed: opens a directory, looks at all that is in it, and works until the end comes."""

import itertools
import json
import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from hotspan.core.clock import SystemClock
from hotspan.core.errors import HotspanError
from hotspan.core.frame import HEADER_BYTES
from hotspan.core.terms import Scope, Terms
from hotspan.core.types import PAGE_BYTES, ChunkKey
from hotspan.testing.chunks import aligned
from hotspan.tiers.disk import DiskOptions, DiskTier
from hotspan.tiers.files import Files
from hotspan.tiers.packer import Packer
from hotspan.tiers.table import DiskTable, read_geometry
from kit.simulated.faults import BadPlaces
from kit.simulated.keys import FixedKeys
from proofs.kill_book import Book, Message, Stored

NAMESPACE = bytes(range(32))
_BUFFERS = 16
_LABELS = (1, 2, 3, 4, 5, 6)
_BEFORE_REST = 200
"""How often one that rests acts before that."""


@dataclass(slots=True)
class Worker:
    """One life of the process, with what it knows from those before.

    writer: which process it is, for its keys. rests: it only does so much, and what it stored grows old until the kill.
    """

    path: Path
    book: Book
    slots: int
    threads: int
    writer: int
    rng: random.Random
    pipe: int
    rests: bool = False
    free: list[memoryview] = field(default_factory=list)
    flying: dict[ChunkKey, tuple[Stored, memoryview]] = field(default_factory=dict)
    operations: int = 0
    numbers: dict[ChunkKey, int] = field(init=False)
    tier: DiskTier = field(init=False)

    def live(self) -> None:
        """Until it is killed."""
        self.numbers = {chunk.key: number for number, chunk in enumerate(self.book.chunks)}
        slot_bytes = self.book.payload_bytes + HEADER_BYTES
        each = slot_bytes // PAGE_BYTES if self.book.is_packed else 1
        if cut := _cut(self.path, self.slots * each, self.numbers):
            self._tell(["cut", cut])
        options = DiskOptions(
            self.path,
            self.slots * slot_bytes,
            threads=self.threads,
            store_depth=self.rng.choice((4, 8, 32)),
            keys=FixedKeys(self.writer) if self.book.is_sealed else None,
            step_bytes=self.rng.choice((None, None, 2 * slot_bytes, 8 * slot_bytes)),
            packer=Packer("always" if self.book.is_packed else "never", self.threads, SystemClock()),
            slot_bytes=PAGE_BYTES if self.book.is_packed else None,
            files=BadPlaces(list(self.book.bad)) if self.book.bad else Files(),
        )
        started = time.perf_counter()
        try:
            self.tier = DiskTier(options, NAMESPACE, self.book.payload_bytes)
        except HotspanError as error:
            self._tell(["failed", str(error)])
            return
        self._tell(["open", time.perf_counter() - started])
        self.free = [aligned(self.book.payload_bytes) for _ in range(_BUFFERS)]
        self._look()
        self._write(["set aside", self.tier.usage().bad_slots])
        actions: list[tuple[float, Callable[[], None]]] = [
            (0.70, self._store),
            (0.10, self._join),
            (0.14, self._discard),
            (0.06, self._forget),
        ]
        weights = [weight for weight, _ in actions]
        for _ in itertools.repeat(None, _BEFORE_REST) if self.rests else itertools.repeat(None):
            self.rng.choices([action for _, action in actions], weights)[0]()
            self._finish()
            if len(self.free) < _BUFFERS // 2 or not self.tier.can_store():
                self.tier.wait(0.002)
        while True:
            self._finish()
            self.tier.wait(0.002)

    def _look(self) -> None:
        """Load all chunks there are, and say which they are."""
        waiting = [n for n, chunk in enumerate(self.book.chunks) if self.tier.lookup(chunk.key)]
        buffers: dict[ChunkKey, memoryview] = {}
        seen: list[tuple[int, int, list[int]]] = []
        wrong: list[int] = []
        back: list[Stored] = []
        faults = 0
        while waiting or buffers:
            while waiting and self.free:
                key = self.book.chunks[waiting.pop()].key
                buffers[key] = self.free.pop()
                self.tier.submit_load(key, buffers[key])
            self.tier.wait(0.1)
            for transfer in self.tier.finished():
                number, buffer = self.numbers[transfer.key], buffers.pop(transfer.key)
                self.free.append(buffer)
                if transfer.fault is not None:
                    faults += 1
                    continue
                version = self._version(number, buffer)
                if version is None:
                    wrong.append(number)
                elif (number, version) in self.book.dead:
                    back.append((number, version))
                elif self.tier.lookup(transfer.key):
                    seen.append((number, version, sorted(self.tier.terms(transfer.key).labels)))
        seen = [one for one in seen if self.tier.lookup(self.book.chunks[one[0]].key)]  # not on what was quarantined
        self.book.reopened(seen)
        self._write(["seen", seen, wrong, back, faults])

    def _version(self, number: int, found: memoryview) -> int | None:
        for version in self.book.versions_of(number):
            if found == self.book.content((number, version)):
                return version
        return None

    def _store(self) -> None:
        missing = [n for n in range(len(self.book.chunks)) if n not in self.book.here] or range(len(self.book.chunks))
        number = self.rng.choice(missing)
        chunk = self.book.chunks[number]
        is_there = self.tier.lookup(chunk.key) or chunk.key in self.flying
        if is_there or not self.free or not self.tier.can_store():
            return
        stored = (number, self.book.versions[number] + 1)
        labels = frozenset(self.rng.sample(_LABELS, self.rng.randrange(3)))
        self._tell(["store", *stored, sorted(labels)])
        buffer = self.free.pop()
        buffer[:] = self.book.content(stored)
        for _ in range(2):  # a full tier takes what is offered a second time
            if self.tier.submit_store(chunk, Terms(labels=labels), buffer):
                self.flying[chunk.key] = (stored, buffer)
                return
        self.free.append(buffer)

    def _finish(self) -> None:
        for transfer in self.tier.finished():
            stored, buffer = self.flying.pop(transfer.key)
            self.free.append(buffer)
            if transfer.fault is None and self.book.here.get(stored[0]) == stored[1]:
                self._tell(["stored", *stored, time.monotonic()])

    def _join(self) -> None:
        number, label = self._any(), self.rng.choice(_LABELS)
        if number is not None and self._is_here(number):
            self._tell(["join", number, label])
            self.tier.join(self.book.chunks[number].key, Terms(labels=frozenset({label})))

    def _discard(self) -> None:
        number = self._any()
        if number is not None and self._is_here(number) and self.book.chunks[number].key not in self.flying:
            self._tell(["discard", sorted(self._standing_on({number}))])
            self.tier.discard(self.book.chunks[number].key)

    def _forget(self) -> None:
        """Invalidate a label, a chunk by name, or (seldom) everything."""
        if self.flying and self.rng.random() < 0.5:
            return
        number = self.rng.randrange(len(self.book.chunks))
        label = self.rng.choice(_LABELS)
        scopes = (Scope(keys=frozenset([self.book.chunks[number].key])), Scope(labels=frozenset({label})), Scope())
        (scope,) = self.rng.choices(scopes, (20, 6, 1))
        self.operations += 1
        operation = self.operations
        self._tell(["forget", operation, self._taken(scope)])

        def durable(done: bool) -> None:
            if done:
                self._write(["forgotten", operation])

        self.tier.invalidate([scope], durable)

    def _taken(self, scope: Scope) -> list[Stored]:
        """Every store that an invalidation takes: by its own terms, or because it stands on one that it takes."""
        taken = {
            stored
            for stored, labels in self.book.labels.items()
            if scope.takes(self.book.chunks[stored[0]].key, NAMESPACE, Terms(labels=labels))
        }
        gone = {number for number, version in taken if self.book.here.get(number) == version and self._is_here(number)}
        gone |= {number for number, chunk in enumerate(self.book.chunks) if scope.keys and chunk.key in scope.keys}
        taken |= {(number, self.book.here[number]) for number in self._standing_on(gone) if self._is_here(number)}
        return sorted(taken)

    def _standing_on(self, numbers: set[int]) -> set[int]:
        """These, and what is here and stands on them."""
        found = set(numbers)
        for number, chunk in enumerate(self.book.chunks):  # parents come before their children
            if chunk.parent is not None and self.numbers[chunk.parent] in found and self._is_here(number):
                found.add(number)
        return found

    def _any(self) -> int | None:
        return self.rng.choice(list(self.book.here)) if self.book.here else None

    def _is_here(self, number: int) -> bool:
        key = self.book.chunks[number].key
        return number in self.book.here and (self.tier.lookup(key) or key in self.flying)

    def _tell(self, message: Message) -> None:
        self.book.note(message)
        self._write(message)

    def _write(self, message: Message) -> None:
        os.write(self.pipe, json.dumps(message).encode() + b"\n")


def _cut(path: Path, slots: int, numbers: dict[ChunkKey, int]) -> list[int]:
    """The chunks in slots that the directory will not have any more when it is opened with so many."""
    if not (path / "table").exists():
        return []
    files = Files()
    fd = files.open(path / "table", os.O_RDWR)
    try:
        geometry = read_geometry(files, fd)
        if geometry is None or geometry.slots <= slots:
            return []
        table = DiskTable(files, fd, geometry)
        table.read()
        return [numbers[table.key(slot)] for slot in table.slots() if slot >= slots]
    finally:
        files.close(fd)
