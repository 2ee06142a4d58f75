"""Host memory that a driver has registered, and how that fails."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

_OK, _OUT_OF_MEMORY, _ILLEGAL, _ALREADY, _NOT_REGISTERED = 0, 2, 700, 712, 713


class Device(Protocol):
    """A device as its driver sees it (machine.py)."""

    machine: Any
    error: str | None

    def in_flight(self, start: int, size: int) -> int:
        """How many pieces that are not copied yet touch a range of host memory."""
        ...


class Code(int):
    """A driver's answer: a number as ctypes has it, or an enum's member as torch has it."""

    @property
    def value(self) -> int:
        return int(self)


class Driver:
    """cudaHostRegister and its like, as ctypes and torch see them: each returns a code.

    It refuses what is beyond the machine's `pins` bytes, as where memory can't be locked.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self.registered: dict[int, int] = {}
        self.last_error = _OK

    def are_registered(self, addresses: Any, sizes: Any) -> bool:
        """Whether each of these is within one registration."""
        within = np.zeros(len(addresses), bool)
        for start, size in self.registered.items():
            within |= (addresses >= start) & (addresses + sizes <= start + size)
        return bool(within.all())

    def cudaHostRegister(self, address: int, size: int, flags: int = 0) -> int:
        if self._device.error is not None:
            return self._answer(_ILLEGAL)
        if any(start < address + size and address < start + n for start, n in self.registered.items()):
            return self._answer(_ALREADY)
        if sum(self.registered.values()) + size > self._device.machine.pins:
            return self._answer(_OUT_OF_MEMORY)
        self.registered[address] = size
        return self._answer(_OK)

    def cudaHostUnregister(self, address: int) -> int:
        if address not in self.registered:
            return self._answer(_NOT_REGISTERED)
        if self._device.error is None and (flying := self._device.in_flight(address, self.registered[address])):
            self._device.machine.wrong_uses.append(f"memory is unregistered before {flying} copies of it are done")
        del self.registered[address]
        return self._answer(_ILLEGAL if self._device.error is not None else _OK)

    def cudaGetLastError(self) -> int:
        code, self.last_error = self.last_error, _OK
        return code

    def _answer(self, code: int) -> Code:
        self.last_error = code or self.last_error
        return Code(code)
