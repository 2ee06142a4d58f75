"""What else touches the slab, told to the machine: transfers of the tiers, and the worker's blanking of gaps."""

from __future__ import annotations

import ctypes
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any
from unittest.mock import patch

import numpy as np

from hotspan.cache.entry import Entry, State
from hotspan.cache.lower import StoreQueue
from hotspan.cache.waits import Waits
from hotspan.engine.cuda import CudaWorker
from hotspan.engine.gaps import Gaps
from hotspan.tiers.lower import LowerTier
from hotspan.tiers.slab import SharedSlab
from kit.cuda.clocks import Actor
from kit.cuda.machine import Device, Machine
from kit.cuda.streams import Pieces, Stream

Part = tuple[int, int]
"""A slot and a rank."""


class Watch:
    """The accesses to slots by hosts, and what the stores of each slot cover.

    slab: the scheduler's mapping; set once the engine is there.
    """

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.slab: SharedSlab | None = None
        self._flying: defaultdict[tuple[int, bool], list[Actor]] = defaultdict(list)  # two tiers may read one slot
        self._idle: list[Actor] = []
        self._covered: dict[Part, list[tuple[int, int]]] = {}

    # -- tiers ---------------------------------------------------------------------------------------------------------

    def begin(self, slot: int, *, is_load: bool) -> None:
        """A tier's thread may read (a store's) or write (a load's) a slot from now on."""
        scheduler, races = self.machine.scheduler, self.machine.races
        actor = self._idle.pop() if self._idle else Actor("a tier")
        actor.learn(scheduler.clock)
        cells = [("slot", slot, rank) for rank in range(len(self.machine.devices))]
        access, what = (races.write, "a promotion") if is_load else (races.read, "a write to a tier")
        access(cells, actor.clock, actor.act(), what)
        self._flying[slot, is_load].append(actor)
        if is_load:
            for rank in range(len(self.machine.devices)):
                self._covered.pop((slot, rank), None)

    def end(self, slot: int, *, is_load: bool) -> None:
        """The scheduler was told that it does so no more."""
        actors = self._flying[slot, is_load]
        if actors:  # which of two tiers it was does not matter: a slot is free when both are done
            actor = actors.pop()
            self.machine.scheduler.learn(actor.clock)
            self._idle.append(actor)

    # -- stores --------------------------------------------------------------------------------------------------------

    def blanks(self, places: list[Any]) -> None:
        """The host of the current device's rank writes the gaps of these blocks' slots."""
        device = self.machine.current
        if device.error is not None:  # nothing of it is ever told as stored
            return
        cells = {("slot", place.slot, device.index) for place in places}
        self.machine.races.write(cells, device.host.clock, device.host.act(), "blanking")

    def stores(self, slots: list[int]) -> None:
        """A job of the current device's rank stores into these slots."""
        for slot in slots:
            self._covered[slot, self.machine.current.index] = []

    def covers(self, device: Device, pieces: Pieces) -> None:
        """A store covers these bytes."""
        own = device.are_own(pieces.src, pieces.sizes)
        if not own.any():
            return
        host = device.ranges[0]
        slots, starts = np.divmod(pieces.dst[own] - host.start, host.slot_bytes)
        ends, ranks = starts + pieces.sizes[own], starts // host.rank_bytes
        for slot, rank in set(zip(slots.tolist(), ranks.tolist(), strict=True)):
            here = (slots == slot) & (ranks == rank)
            self._covered[slot, rank] += _joined(starts[here], ends[here])

    def leftovers(self, entries: list[Entry]) -> int:
        """How many bytes of chunks, that lie as they were stored, are neither stored nor zero."""
        found = 0
        assert self.slab is not None
        for entry in entries:
            for rank, device in enumerate(self.machine.devices):
                covered = self._covered.get((entry.slot, rank))
                if covered is None or entry.state is not State.READY:
                    continue
                size = device.ranges[0].rank_bytes
                row = np.frombuffer(self.slab.slot(entry.slot), np.uint8).copy()
                for start, stop in covered:
                    row[start:stop] = 0
                found += int(np.count_nonzero(row[rank * size : (rank + 1) * size]))
        return found


@contextmanager
def watched(machine: Machine) -> Iterator[Watch]:
    """Inside, the machine is told of all that touches a slot."""
    watch = Watch(machine)
    with ExitStack() as patches:
        for owner, name, made in _wrappers(watch):
            patches.enter_context(patch.object(owner, name, wraps(getattr(owner, name))(made(getattr(owner, name)))))
        yield watch


def _wrappers(watch: Watch) -> Iterator[tuple[Any, str, Callable[[Any], Any]]]:
    def promote(inner: Any) -> Any:
        def wrapper(self: Waits, *arguments: Any, **named: Any) -> Any:
            entry = inner(self, *arguments, **named)
            if entry is not None:
                watch.begin(entry.slot, is_load=True)
            return entry

        return wrapper

    def ending(is_load: bool) -> Callable[[Any], Any]:
        def ended(inner: Any) -> Any:
            def wrapper(self: Any, *arguments: Any) -> Any:
                entry = inner(self, *arguments)
                watch.end(entry.slot, is_load=is_load)
                return entry

            return wrapper

        return ended

    def submit_store(inner: Any) -> Any:
        def wrapper(self: LowerTier, chunk: Any, terms: Any, payload: memoryview) -> bool:
            is_taken = bool(inner(self, chunk, terms, payload))
            if is_taken and watch.slab is not None:
                offset = address_of(payload) - address_of(watch.slab.view)
                watch.begin(offset // watch.slab.slot_bytes, is_load=False)
            return is_taken

        return wrapper

    def blank(inner: Any) -> Any:
        def wrapper(self: Gaps, places: Any) -> None:
            places = list(places)
            watch.blanks(places)
            inner(self, places)

        return wrapper

    def store(inner: Any) -> Any:
        def wrapper(self: CudaWorker, job_id: int, src: Any, dst: Any, **rest: Any) -> bool:
            watch.stores(dst.block_ids.tolist())
            return bool(inner(self, job_id, src, dst, **rest))

        return wrapper

    def copy(inner: Any) -> Any:
        def wrapper(self: Device, stream: Stream, pieces: Pieces, **how: Any) -> None:
            watch.covers(self, pieces)
            inner(self, stream, pieces, **how)

        return wrapper

    yield Waits, "promote", promote
    yield Waits, "end_promotion", ending(is_load=True)
    yield StoreQueue, "ended", ending(is_load=False)
    yield LowerTier, "submit_store", submit_store
    yield Gaps, "blank", blank
    yield CudaWorker, "submit_store", store
    yield Device, "copy", copy


def _joined(starts: Any, ends: Any) -> list[tuple[int, int]]:
    """Ranges of bytes, of which those that touch are one."""
    order = np.argsort(starts)
    starts, ends = starts[order], np.maximum.accumulate(ends[order])
    begins = np.concatenate([[True], starts[1:] > ends[:-1]])
    stops = np.concatenate([begins[1:], [True]])
    return list(zip(starts[begins].tolist(), ends[stops].tolist(), strict=True))


def address_of(view: memoryview) -> int:
    """Where a view's bytes are."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view))
