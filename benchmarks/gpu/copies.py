"""Host memory that a GPU copies to and from, and copies in batches, by torch and the CUDA runtime alone."""

import ctypes
import mmap
import os
import tempfile
from collections.abc import Sequence
from typing import Any, Final, Self

import torch

SLOT_BYTES: Final = 16 << 20

_IN_STREAM_ORDER, _IN_ANY_ORDER = 1, 3
"""cudaMemcpySrcAccessOrder."""


class NoBatches(Exception):
    """The CUDA runtime has no copies in batches; the message says which one is there."""


class Slab:
    """A file in /dev/shm, mapped as hotspan maps its RAM tier: `rows` is uint8[slots, 16 MiB], at least two of them."""

    def __init__(self, size: int, directory: str = "/dev/shm") -> None:
        slots = max(2, size // SLOT_BYTES)
        self.size = slots * SLOT_BYTES
        with tempfile.TemporaryFile(dir=directory) as file:
            os.posix_fallocate(file.fileno(), 0, self.size)
            self._map = mmap.mmap(file.fileno(), self.size)
        self.rows = torch.frombuffer(self._map, dtype=torch.uint8).view(slots, SLOT_BYTES)
        self._is_registered = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.unregister()

    def register(self) -> int:
        """Let the driver pin all of it; the driver's code, 0 if it did. Nothing happens if it is pinned already."""
        if self._is_registered:
            return 0
        code = int(torch.cuda.cudart().cudaHostRegister(self.rows.data_ptr(), self.size, 0))
        self._is_registered = code == 0
        return code

    def unregister(self) -> None:
        """Let the driver forget it. Raises: RuntimeError if it does not."""
        if self._is_registered:
            self._is_registered = False
            code = int(torch.cuda.cudart().cudaHostUnregister(self.rows.data_ptr()))
            if code:
                raise RuntimeError(f"cudaHostUnregister: {code}")


class _Location(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class _Attributes(ctypes.Structure):
    """cudaMemcpyAttributes."""

    _fields_ = [
        ("order", ctypes.c_int),
        ("source", _Location),
        ("target", _Location),
        ("flags", ctypes.c_uint),
    ]


class Batches:
    """`cudaMemcpyBatchAsync` of the runtime that torch has loaded.

    Raises: NoBatches if that has none (before CUDA 12.8).
    """

    def __init__(self) -> None:
        torch.cuda.init()
        self._runtime: Any = ctypes.CDLL(_runtime_path())
        version = ctypes.c_int()
        self._runtime.cudaRuntimeGetVersion(ctypes.byref(version))
        if version.value < 12_080 or not hasattr(self._runtime, "cudaMemcpyBatchAsync"):
            raise NoBatches(f"CUDA runtime {version.value // 1000}.{version.value % 1000 // 10}")
        self._tells_which_failed = version.value < 13_000

    def copy(
        self,
        source: torch.Tensor,
        target: torch.Tensor,
        order: Sequence[int],
        stream: torch.cuda.Stream,
        *,
        any_order: bool,
    ) -> None:
        """Copy these rows, a descriptor each, on a stream. any_order: sources may be read from the call on.

        Raises: RuntimeError with the runtime's code.
        """
        count, row = len(order), source.shape[1] * source.element_size()
        pointers, sizes = ctypes.c_void_p * count, ctypes.c_size_t * count
        targets = pointers(*(target.data_ptr() + n * row for n in order))
        sources = pointers(*(source.data_ptr() + n * row for n in order))
        attributes = _Attributes(order=_IN_ANY_ORDER if any_order else _IN_STREAM_ORDER)
        first, failed = ctypes.c_size_t(0), ctypes.c_size_t(0)
        given: list[Any] = [targets, sources, sizes(*[row] * count), ctypes.c_size_t(count)]
        given += [ctypes.byref(attributes), ctypes.byref(first), ctypes.c_size_t(1)]
        if self._tells_which_failed:
            given.append(ctypes.byref(failed))
        code = self._runtime.cudaMemcpyBatchAsync(*given, ctypes.c_void_p(stream.cuda_stream))
        if code:
            raise RuntimeError(f"cudaMemcpyBatchAsync: {code}")


def _runtime_path() -> str:
    """The CUDA runtime that this process has mapped. Raises: NoBatches if none is."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            path = line.split()[-1]
            if "libcudart" in path:
                return path
    raise NoBatches("torch was built without a shared CUDA runtime")
