"""A machine with devices whose work is done in any order that CUDA allows; the order follows from a seed."""

from __future__ import annotations

import ctypes
import mmap
import os
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kit.cuda.clocks import Actor, Races
from kit.cuda.pinned import Driver
from kit.cuda.streams import Copy, Kernel, Numbers, Pieces, Stream

_NONE = 0
"""PROT_NONE."""

Bytes = npt.NDArray[np.uint8]
Flags = npt.NDArray[np.bool_]
Cell = tuple[str, int, int]
"""A block of a device, or a rank's part of a slot: a kind, and whose and which it is."""


class CudaError(RuntimeError):
    """What torch raises for an error of the driver."""


@dataclass(frozen=True, slots=True)
class HostRange:
    """Host memory that a device copies to and from: a rank's mapping of the slab."""

    start: int
    size: int
    slot_bytes: int
    rank_bytes: int

    def cells(self, addresses: Numbers) -> set[Cell]:
        """Which ranks' parts of which slots these are in."""
        slots, offsets = np.divmod(addresses - self.start, self.slot_bytes)
        parts = np.unique(np.stack([slots, offsets // self.rank_bytes]), axis=1)
        return {("slot", slot, part) for slot, part in parts.T.tolist()}


class Device:
    """A GPU, the host thread of the rank that uses it, and the driver's books.

    memory: the device's bytes as its own kernels see them. `address` is where the host believes them to be: no access
            to that is allowed, so that host code which reads or writes device memory ends its process.
    blocks: by the device's byte offset, where each layer's blocks begin and how far apart they are.
    error:  sticky: every call fails from then on.
    """

    def __init__(self, machine: Machine, index: int) -> None:
        self.machine, self.index = machine, index
        self.host = Actor(f"host of device {index}")
        self.driver = Driver(self)
        self.compute = Stream(self, "compute")
        self.ranges: list[HostRange] = []
        self.blocks: list[tuple[int, int, int]] = []
        self.error: str | None = None
        self.address = self.size = 0
        self._maps: list[Any] = []

    def allocate(self, size: int) -> mmap.mmap:
        """Memory of the device, zeroed: a mapping that the host can't read. Once."""
        if self._maps:
            raise ValueError("a device has one allocation")
        fd = os.memfd_create("device")
        try:
            os.ftruncate(fd, size)
            own, seen = mmap.mmap(fd, size), mmap.mmap(fd, size)
        finally:
            os.close(fd)
        self._maps = [own, seen]
        self.size = size
        self.memory: Bytes = np.frombuffer(own, np.uint8)
        self._real = self.memory.ctypes.data
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(seen))
        if ctypes.CDLL(None, use_errno=True).mprotect(ctypes.c_void_p(self.address), ctypes.c_size_t(size), _NONE):
            raise OSError(ctypes.get_errno(), "mprotect")
        return seen

    # -- what the host calls -------------------------------------------------------------------------------------------

    def call(self, name: str) -> None:
        """Any call of the runtime: the machine goes on meanwhile. Raises: CudaError once there was an error."""
        self.tick()
        self.machine.drift()
        if self.error is not None:
            raise CudaError(f"CUDA error: {self.error} ({name})")

    def launch(self, parts: list[Callable[[], None]], reads: Iterable[int], writes: Iterable[int], what: str) -> None:
        """Kernels on the compute stream that read and write blocks, one after the other."""
        self.call("cudaLaunchKernel")
        for part in parts:
            self.compute.submit(Kernel(part))
        actor, races = self.compute.actor, self.machine.races
        epoch = actor.act()
        written = set(writes)
        races.read((("block", self.index, n) for n in set(reads) - written), actor.clock, epoch, what)
        races.write((("block", self.index, n) for n in written), actor.clock, epoch, what)

    def copy(self, stream: Stream, pieces: Pieces, *, reads_ahead: bool, is_kernel: bool, what: str) -> None:
        """Copies on a stream, in any order. A kernel reads host memory itself, and needs it registered."""
        self.call("cudaMemcpyBatchAsync" if not is_kernel else "cudaLaunchKernel")
        called = dict(self.host.clock)
        own = [self.are_own(addresses, pieces.sizes) for addresses in (pieces.src, pieces.dst)]
        host = Pieces(
            np.concatenate([pieces.src[~own[0]], pieces.dst[~own[1]]]),
            np.empty(0, np.int64),
            np.concatenate([pieces.sizes[~own[0]], pieces.sizes[~own[1]]]),
        )
        pageable = not self.driver.are_registered(host.src, host.sizes)
        if not self._are_mapped(host.src, host.sizes) or (pageable and is_kernel):
            self.fail("an illegal memory access was encountered")
            return
        copy = Copy(self, pieces, reads_ahead=reads_ahead)
        stream.submit(copy)
        races, epoch = self.machine.races, stream.actor.act()
        seen = called if reads_ahead else stream.actor.clock
        races.read(self.cells(pieces.src), seen, epoch, f"{what} reads")
        races.write(self.cells(pieces.dst), stream.actor.clock, epoch, f"{what} writes")
        if reads_ahead:
            self.machine.ahead.append(copy)
            copy.read_ahead(int(len(pieces) * self.machine.chance.random() * self.machine.eager))
        if pageable and self.machine.chance.random() < 0.5:  # the driver may copy such memory before it returns
            target = stream.submitted
            self.machine.run_until(lambda: stream.completed >= target, self)

    def fail(self, error: str) -> None:
        """A sticky error: what streams have not done is never done."""
        self.error = error
        self.machine.errors += 1

    def tick(self) -> None:
        """One operation more: perhaps the one that fails."""
        self.machine.operations += 1
        if self.machine.operations == self.machine.fails_at:
            self.fail("an uncorrectable ECC error was encountered")

    # -- addresses -----------------------------------------------------------------------------------------------------

    def are_own(self, addresses: Numbers, sizes: Numbers | np.int64) -> Flags:
        """Which of these are memory of the device."""
        return (self.address <= addresses) & (addresses + sizes <= self.address + self.size)

    def real(self, addresses: Numbers, sizes: Numbers) -> Numbers:
        """Where the bytes are that the device finds at these addresses."""
        return np.where(self.are_own(addresses, sizes), addresses + (self._real - self.address), addresses)

    def cells(self, addresses: Numbers) -> set[Cell]:
        """The blocks, and the rank's parts of slots, that addresses are in, each once."""
        own = self.are_own(addresses, np.int64(1))
        found = set[Cell]()
        left = addresses[own] - self.address
        for start, stride, count in self.blocks:
            if not len(left):
                break
            here = (left >= start) & (left < start + stride * count)
            found.update(("block", self.index, n) for n in np.unique((left[here] - start) // stride).tolist())
            left = left[~here]
        if len(left):
            raise ValueError(f"device {self.index} has no block at {left[0]}")
        left = addresses[~own]
        for each in self.ranges:
            here = (left >= each.start) & (left < each.start + each.size)
            found |= each.cells(left[here])
            left = left[~here]
        if len(left):
            raise ValueError(f"{left[0]:#x} is nobody's")
        return found

    def _are_mapped(self, addresses: Numbers, sizes: Numbers) -> bool:
        """Whether all of these are within memory that the device copies to and from."""
        within = np.zeros(len(addresses), bool)
        for each in self.ranges:
            within |= (addresses >= each.start) & (addresses + sizes <= each.start + each.size)
        return bool(within.all())

    def in_flight(self, start: int, size: int) -> int:
        """How many pieces that are not copied yet touch a range of host memory."""
        return sum(
            operation.touching(start, size)
            for stream in self.machine.streams
            if stream.device is self
            for operation in stream.queue
            if isinstance(operation, Copy)
        )


class Machine:
    """Devices, and what is found wrong while they work.

    fails_at:   the operation at which a device fails for good; None for never.
    eager:      how many sources are read at the call, where that is allowed. pace: operations between two calls.
    wrong_uses: of the driver: memory that is let go while it is copied, say.
    """

    def __init__(self, seed: int, devices: int = 1, *, pace: float = 6.0, eager: float = 0.3) -> None:
        self.chance = random.Random(seed)
        self.races = Races()
        self.streams: list[Stream] = []
        self.busy: list[Stream] = []
        self.ahead: list[Copy] = []
        self.wrong_uses: list[str] = []
        self.copies = self.early = self.operations = self.errors = 0
        self.fails_at: int | None = None
        self.pace, self.eager = pace, eager
        self.has_triton = False
        self.pins = self.chunk_bytes = 1 << 62
        self.scheduler = Actor("scheduler")
        self.devices = [Device(self, n) for n in range(devices)]
        self._current = self.devices[0]

    @property
    def current(self) -> Device:
        """The device of the process that runs."""
        return self._current

    @contextmanager
    def on(self, device: Device) -> Iterator[Device]:
        """What runs inside is the process of that device's rank."""
        before, self._current = self._current, device
        try:
            yield device
        finally:
            self._current = before

    def turn(self, *, must: bool = False) -> bool:
        """Let one piece of one stream's work be done, or none if that stream lags; False if no stream can go on.

        must: the host waits, and something is done.
        """
        able = [stream for stream in self.busy if stream.can_go()]
        if not able:
            return False
        if self.ahead and self.chance.random() < 0.2:
            self.ahead = [copy for copy in self.ahead if copy.left and copy.device.error is None]
            if self.ahead:
                self.chance.choice(self.ahead).read_ahead()
        if must:
            self.chance.choices(able, [stream.weight for stream in able])[0].go()
        elif (stream := self.chance.choice(able)).weight >= 1 or self.chance.random() < stream.weight:
            stream.go()
        return True

    def drift(self) -> None:
        """Let some work be done, or none."""
        if self.pace:
            for _ in range(int(self.chance.expovariate(1 / self.pace))):
                if not self.turn():
                    return

    def run_until(self, is_so: Callable[[], bool], device: Device) -> None:
        """Let work be done until it is so. Raises: CudaError if the device fails, or nothing is left to do."""
        while not is_so():
            if device.error is not None:
                raise CudaError(f"CUDA error: {device.error}")
            if not self.turn(must=True):
                raise CudaError("streams wait for each other for ever")
