"""Streams, events, copies and kernels, executed one piece at a time when the machine's turn comes to them."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kit.cuda.clocks import Actor, Clock

Numbers = npt.NDArray[np.int64]

_A_TURN = (1, 1, 4, 32)
"""Pieces that a turn of a batch may copy: each batch draws one of these."""


class Device(Protocol):
    """A device as its streams see it (machine.py)."""

    machine: Any
    host: Actor
    index: int
    error: str | None

    def call(self, name: str) -> None:
        """The host calls the runtime."""
        ...

    def tick(self) -> None:
        """One operation more."""
        ...

    def real(self, addresses: Numbers, sizes: Numbers) -> Numbers:
        """Where the bytes are that the device finds at these addresses."""
        ...


@dataclass(frozen=True, slots=True)
class Pieces:
    """Ranges of bytes to copy: addresses and sizes, int64[pieces] each."""

    src: Numbers
    dst: Numbers
    sizes: Numbers

    @classmethod
    def of(cls, *pieces: tuple[int, int, int]) -> Pieces:
        """From source, destination and size of each."""
        return cls(*np.array(pieces, np.int64).reshape(-1, 3).T)

    def __len__(self) -> int:
        return len(self.sizes)


class Operation:
    """Something in a stream's queue, done in one go unless a subclass says otherwise."""

    def can_go(self) -> bool:
        """Whether it may be done now, when its stream has come to it."""
        return True

    def go(self) -> bool:
        """Do some of it; whether that was the rest."""
        raise NotImplementedError


class Copy(Operation):
    """A batch of copies, in any order: a turn makes some of them, as many as a turn of this batch makes.

    reads_ahead: sources may be read from the call on (CU_MEMCPY_SRC_ACCESS_ORDER_ANY).
    """

    def __init__(self, device: Device, pieces: Pieces, *, reads_ahead: bool) -> None:
        self.device, self.reads_ahead = device, reads_ahead
        chance = device.machine.chance
        order = np.random.default_rng(chance.getrandbits(64)).permutation(len(pieces))
        self._left = [
            *zip(
                device.real(pieces.src[order], pieces.sizes[order]).tolist(),
                device.real(pieces.dst[order], pieces.sizes[order]).tolist(),
                pieces.sizes[order].tolist(),
                strict=True,
            )
        ]
        self._ahead: dict[int, bytes] = {}
        self._a_turn: int = chance.choice(_A_TURN)

    @property
    def left(self) -> int:
        """How many pieces are not copied yet."""
        return len(self._left)

    def touching(self, start: int, size: int) -> int:
        """How many pieces that are not copied yet touch a range of host memory."""
        return sum(any(start <= at < start + size for at in piece[:2]) for piece in self._left)

    def read_ahead(self, count: int = 1) -> None:
        """Read the sources of some pieces before their time."""
        chance = self.device.machine.chance
        for _ in range(count if self._left else 0):
            place = chance.randrange(len(self._left))
            if place not in self._ahead:
                src, _, size = self._left[place]
                self._ahead[place] = ctypes.string_at(src, size)
                self.device.machine.early += 1

    def go(self) -> bool:
        left, ahead, memmove = self._left, self._ahead, ctypes.memmove
        for _ in range(min(self._a_turn, len(left))):
            src, dst, size = left.pop()
            memmove(dst, ahead.pop(len(left), src), size)
            self.device.machine.copies += 1
        return not left


class Kernel(Operation):
    """A function that reads and writes the device's memory when the stream comes to it."""

    def __init__(self, run: Callable[[], None]) -> None:
        self._run = run

    def go(self) -> bool:
        self._run()
        return True


class Record(Operation):
    """An event is recorded."""

    def __init__(self, event: Event, nth: int) -> None:
        self._event, self._nth = event, nth

    def go(self) -> bool:
        self._event.done = max(self._event.done, self._nth)
        return True


class AwaitEvent(Operation):
    """A stream waits for an event as it was recorded last when the wait was submitted."""

    def __init__(self, event: Event) -> None:
        self._event, self._nth = event, event.asked

    def can_go(self) -> bool:
        return self._event.done >= self._nth

    def go(self) -> bool:
        return True


class AwaitStream(Operation):
    """A stream waits for what another one had been given when the wait was submitted."""

    def __init__(self, other: Stream) -> None:
        self._other, self._submitted = other, other.submitted

    def can_go(self) -> bool:
        return self._other.completed >= self._submitted

    def go(self) -> bool:
        return True


class Stream:
    """A queue of operations, one after the other, beside those of all other streams.

    actor:     what happens before what it is given next.
    weight:    how likely it is to come next, beside others: one may lag far behind.
    """

    def __init__(self, device: Device, name: str = "copies") -> None:
        self.device, self.name = device, name
        self.actor = Actor(f"{name} of device {device.index}")
        self.queue: deque[Operation] = deque()
        self.submitted = self.completed = 0
        self.weight = 1.0
        device.machine.streams.append(self)

    def submit(self, operation: Operation) -> None:
        """The host hands over an operation; all that the host has seen happens before it."""
        if not self.queue:
            self.weight = self.device.machine.chance.choice((1.0, 1.0, 0.2, 0.02))
            self.device.machine.busy.append(self)
        self.actor.learn(self.device.host.clock)
        self.queue.append(operation)
        self.submitted += 1

    def wait_stream(self, other: Stream) -> None:
        self.device.call("cudaStreamWaitEvent")
        self.submit(AwaitStream(other))
        self.actor.learn(other.actor.clock)

    def wait_event(self, event: Event) -> None:
        self.device.call("cudaStreamWaitEvent")
        self.submit(AwaitEvent(event))
        self.actor.learn(event.clock)

    def synchronize(self) -> None:
        """The host waits for all that the stream was given."""
        self.device.call("cudaStreamSynchronize")
        target = self.submitted
        self.device.machine.run_until(lambda: self.completed >= target, self.device)
        self.device.host.learn(self.actor.clock)

    def can_go(self) -> bool:
        return bool(self.queue) and self.device.error is None and self.queue[0].can_go()

    def go(self) -> None:
        """Do a piece of the next operation."""
        self.device.tick()
        if self.device.error is None and self.queue[0].go():
            self.queue.popleft()
            self.completed += 1
            if not self.queue:
                self.device.machine.busy.remove(self)


class Event:
    """torch.Event. asked, done: how often it was recorded, and how many of these a stream has come to."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.asked = self.done = 0
        self.clock: Clock = {}

    def record(self, stream: Stream) -> None:
        self._device.call("cudaEventRecord")
        self.asked += 1
        stream.submit(Record(self, self.asked))
        self.clock = dict(stream.actor.clock)

    def query(self) -> bool:
        self._device.call("cudaEventQuery")
        if self.done < self.asked:
            return False
        self._device.host.learn(self.clock)
        return True

    def synchronize(self) -> None:
        self._device.call("cudaEventSynchronize")
        self._device.machine.run_until(lambda: self.done >= self.asked, self._device)
        self._device.host.learn(self.clock)

    def elapsed_time(self, other: Event) -> float:
        self._device.call("cudaEventElapsedTime")
        return 1.0
