"""Values of the engine's options that its parser takes and its start refuses, minutes later: ranges and paths."""

from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from pydantic import TypeAdapter, ValidationError
from vllm.config import CacheConfig, LoRAConfig, ModelConfig, ParallelConfig, SchedulerConfig

_CONFIGS: tuple[Any, ...] = (CacheConfig, LoRAConfig, ModelConfig, ParallelConfig, SchedulerConfig)
"""vLLM's, whose fields have the names of options, and bounds."""


def wrong_values(arguments: Namespace) -> Iterator[str]:
    """What is wrong with the values of parsed arguments, one by one."""
    for config in _CONFIGS:
        for name, field in config.__pydantic_fields__.items():
            value = getattr(arguments, name, None)
            if field.metadata and isinstance(value, int | float) and not isinstance(value, bool):
                try:
                    TypeAdapter(Annotated[(float, *field.metadata)]).validate_python(float(value))
                except ValidationError as error:
                    reason = error.errors()[0]["msg"].removeprefix("Input should be ")
                    yield f"--{name.replace('_', '-')} is {value}: give a value {reason}"
    for module in getattr(arguments, "lora_modules", None) or ():
        if _is_missing(str(module.path)):
            yield f"--lora-modules {module.name}={module.path}: there is no such directory"
    template = getattr(arguments, "chat_template", None)
    if template is not None and "{" not in template and "/" in template and not Path(template).expanduser().exists():
        yield f"--chat-template {template}: there is no such file"


def _is_missing(path: str) -> bool:
    """Whether a path, and no name at a hub, leads nowhere."""
    is_path = path.startswith(("/", "./", "../", "~")) or path.count("/") > 1
    return is_path and "://" not in path and not Path(path).expanduser().exists()
