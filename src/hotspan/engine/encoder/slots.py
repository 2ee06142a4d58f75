"""An encoder output in a slot of the slab.

      0             64                             64 + size            slot's end
      +-------------+------------------------------+--------------------+
      | header      | rows x width elements        | zeros              |
      +-------------+------------------------------+--------------------+

The frame of a lower tier covers the whole slot, as it does for a chunk of KV (core/frame.py).
"""

import struct
from typing import Final, NamedTuple

import torch

_MAGIC: Final = b"HSENCOD1"
_HEADER: Final = struct.Struct("<8sQQ16s")
_HEADER_BYTES: Final = 64
_TYPES: Final = {str(each).encode(): each for each in (torch.float32, torch.float16, torch.bfloat16)}


class Shape(NamedTuple):
    """What a slot holds: one row per embedding."""

    rows: int
    width: int
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """The size of the output."""
        return self.rows * self.width * self.dtype.itemsize


def is_kept(output: torch.Tensor, rows: int) -> bool:
    """Whether it is an output of that many embeddings, of a type that can be written down."""
    return output.dim() == 2 and output.shape[0] == rows and str(output.dtype).encode() in _TYPES


def fits(output: torch.Tensor, slot: memoryview) -> bool:
    """Whether a slot is large enough for it."""
    return _HEADER_BYTES + output.nbytes <= len(slot)


def put(output: torch.Tensor, slot: memoryview) -> None:
    """Write an output that is kept and fits; nothing of what was in the slot remains. Mutates: `slot`."""
    place, end = torch.frombuffer(slot, dtype=torch.uint8), _HEADER_BYTES + output.nbytes
    place[:_HEADER_BYTES] = 0
    place[_HEADER_BYTES:end] = output.detach().contiguous().view(torch.uint8).flatten()
    place[end:] = 0
    _HEADER.pack_into(slot, 0, _MAGIC, *output.shape, str(output.dtype).encode())


def shape_of(slot: memoryview, rows: int) -> Shape | None:
    """What a slot holds; None if it is no output of that many embeddings."""
    magic, found, width, dtype = _HEADER.unpack_from(slot, 0)
    shape = Shape(found, width, _TYPES.get(dtype.rstrip(b"\0"), torch.float32))
    is_right = magic == _MAGIC and found == rows and dtype.rstrip(b"\0") in _TYPES
    return shape if is_right and _HEADER_BYTES + shape.bytes <= len(slot) else None


def get(slot: memoryview, rows: int) -> torch.Tensor:
    """A copy of the output in a slot. Raises: ValueError if it holds none of that many embeddings."""
    shape = shape_of(slot, rows)
    if shape is None:
        raise ValueError(f"a slot does not hold the encoder output of {rows} rows that it was loaded for")
    data = torch.frombuffer(slot, dtype=shape.dtype, offset=_HEADER_BYTES, count=rows * shape.width)
    return data.reshape(rows, shape.width).clone()
