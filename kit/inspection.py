"""How vLLM finds out what a model's class can do: in the process that asks, and not in one of its own.

vLLM starts that process so that a look at a class does not initialize CUDA. It imports vLLM once more, for 9 s of CPU
time, for each class whose answer is not in vLLM's cache, which a fresh machine does not have.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Final

_REGISTRY: Final = "vllm.model_executor.models.registry"


class _Here(MetaPathFinder):
    """Finds the registry of models, and changes it once it is imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _REGISTRY:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            vars(spec.loader)["exec_module"] = _changing(spec.loader)
        return spec


def _changing(loader: Loader) -> Callable[[ModuleType], None]:
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        execute(module)
        if "_run_in_subprocess" in vars(module):  # not in every release of vLLM
            vars(module)["_run_in_subprocess"] = _run

    return exec_module


def _run(look: Callable[[], Any]) -> Any:
    return look()


def inspect_in_process() -> None:
    """From now on, if vLLM was not imported yet."""
    sys.meta_path.insert(0, _Here())
