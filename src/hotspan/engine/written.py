"""Whether somebody wrote into a model's tensors without any call that tells: a program that has the model in its own
process, as `LLM()` without a process of its own lets it.

Torch counts the writes to each tensor, and a tensor that is replaced lies elsewhere. A write by `.data`, NumPy or a
pointer counts nothing: on CPUs a few bytes of each tensor are compared for that, so that new weights are seen, and the
change of a few elements may not be. On other devices such a write is not seen, nor is one from another process.
"""

import hashlib
from typing import Any, Final

import numpy as np
import torch

_SAMPLES: Final = 16
"""Bytes of each tensor that are compared."""


class WrittenModel:
    """The parameters of one model, as they were when they were last looked at."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._parts: list[dict[str, Any]] = []
        self._parameters: list[dict[str, torch.Tensor | None]] = []
        self._inner: list[int] = []
        self._places: list[int] = []
        self._samples: list[Any] = []
        self._seen = self._state()

    def changed(self) -> bool:
        """Whether they are others since the last call. Takes about a microsecond for each tensor."""
        before, self._seen = self._seen, self._state()
        return before != self._seen

    def _state(self) -> tuple[int, bytes]:
        if self._inner != [id(part) for parts in self._parts for part in parts.values()] or not self._parts:
            modules = list(self._model.modules())
            self._parts = [module._modules for module in modules]
            self._parameters = [module._parameters for module in modules if module._parameters]
            self._inner = [id(part) for parts in self._parts for part in parts.values()]
        tensors = [tensor for named in self._parameters for tensor in named.values() if tensor is not None]
        places = [tensor.data_ptr() for tensor in tensors]
        if places != self._places:
            self._places, self._samples = places, [each for each in map(_sample, tensors) if each is not None]
        seen = hashlib.blake2b(np.array(places, np.uint64).tobytes(), digest_size=16)
        if self._samples:
            seen.update(np.concatenate(self._samples).tobytes())
        return sum(map(_writes, tensors)), seen.digest()


def _writes(tensor: torch.Tensor) -> int:
    """How often torch wrote into it; tensors of inference mode do not count."""
    return 0 if tensor.is_inference() else tensor._version


def _sample(tensor: torch.Tensor) -> Any | None:
    """A view of a few bytes, evenly apart and at each place within an element; None where that can't be had."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous() or not tensor.numel():
        return None
    data = tensor.detach().view(-1).view(torch.uint8).numpy()
    return data[:: max(1, len(data) // _SAMPLES) | 1]
