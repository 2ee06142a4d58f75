"""Values of the engine's options that its parser takes and its start refuses, minutes later: ranges and paths."""

import json
from argparse import Namespace
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import TypeAdapter, ValidationError
from vllm.config import CacheConfig, LoRAConfig, ModelConfig, ParallelConfig, SchedulerConfig
from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers import ToolParserManager

from hotspan.core.errors import MALFORMED, did_you_mean

_CONFIGS: tuple[Any, ...] = (CacheConfig, LoRAConfig, ModelConfig, ParallelConfig, SchedulerConfig)
"""vLLM's, whose fields have the names of options, and bounds."""


_PATHS = ("tokenizer", "hf_config_path", "tool_parser_plugin", "reasoning_parser_plugin", "generation_config")
"""Options with a path, where they have no name at a hub."""

_OBJECTS = (
    *("hf_overrides", "speculative_config", "override_generation_config", "default_chat_template_kwargs"),
    *("limit_mm_per_prompt", "mm_processor_kwargs", "media_io_kwargs"),
)
"""Options with a JSON object, of which the parser takes any JSON, or any text."""

_OWN_LIMIT = "VLLM_ALLOW_LONG_MAX_MODEL_LEN"


def wrong_values(arguments: Namespace, surroundings: Mapping[str, str]) -> Iterator[str]:
    """What is wrong with the values of parsed arguments, one by one.

    surroundings: the environment, in which vLLM may be told to take a length above the model's.
    """
    yield from _out_of_range(arguments)
    yield from _missing(arguments)
    yield from _unknown_parsers(arguments)
    for name in _OBJECTS:
        value = getattr(arguments, name, None)
        if value is not None and not isinstance(value, Mapping) and not callable(value):
            yield f"{_flag(name)} is {value!r}: give a JSON object, as in '{{\"name\": 1}}'"
    if (longest := _longest(arguments)) is not None and surroundings.get(_OWN_LIMIT, "0").lower() in ("", "0", "false"):
        yield (
            f"--max-model-len is {arguments.max_model_len}, and the model's config.json has {longest} positions: give "
            f"at most {longest}"
        )


def _out_of_range(arguments: Namespace) -> Iterator[str]:
    for config in _CONFIGS:
        for name, field in config.__pydantic_fields__.items():
            value = getattr(arguments, name, None)
            if field.metadata and isinstance(value, int | float) and not isinstance(value, bool):
                try:
                    TypeAdapter(Annotated[(float, *field.metadata)]).validate_python(float(value))
                except ValidationError as error:
                    reason = error.errors()[0]["msg"].removeprefix("Input should be ")
                    yield f"{_flag(name)} is {value}: give a value {reason}"


def _missing(arguments: Namespace) -> Iterator[str]:
    """Paths that lead nowhere."""
    for module in getattr(arguments, "lora_modules", None) or ():
        if _is_missing(str(module.path)):
            yield f"--lora-modules {module.name}={module.path}: there is no such directory"
    template = getattr(arguments, "chat_template", None)
    if template is not None and "{" not in template and "/" in template and not Path(template).expanduser().exists():
        yield f"--chat-template {template}: there is no such file"
    for name in _PATHS:
        path = getattr(arguments, name, None)
        if isinstance(path, str) and _is_missing(path):
            yield f"{_flag(name)} {path}: there is no such file or directory"


def _unknown_parsers(arguments: Namespace) -> Iterator[str]:
    """Parsers of tool calls and of reasoning that vLLM has not; a plugin may bring others."""
    known = {
        "tool_call_parser": (ToolParserManager.list_registered, "tool_parser_plugin"),
        "reasoning_parser": (ReasoningParserManager.list_registered, "reasoning_parser_plugin"),
    }
    for name, (registered, plugin) in known.items():
        given = getattr(arguments, name, None)
        if name == "tool_call_parser" and not getattr(arguments, "enable_auto_tool_choice", False):
            continue  # it is not looked up
        if given and not getattr(arguments, plugin, None) and given not in (names := sorted(registered())):
            otherwise = f"give one of {', '.join(names)}"
            yield f"{_flag(name)} {given}: {did_you_mean(given, names, otherwise)}"


def _longest(arguments: Namespace) -> int | None:
    """The positions of a model on this machine, if a longer text is asked for; None if its configuration may allow it.

    Positions may be scaled, overridden, or in fields that vLLM reads and this does not: then vLLM decides at the start.
    """
    asked = arguments.max_model_len or 0
    if asked <= 0 or arguments.hf_overrides or getattr(arguments, "hf_config_path", None):
        return None
    if any(Path(arguments.model).glob("sentence_*_config.json")):
        return None
    try:
        config = json.loads((Path(arguments.model) / "config.json").read_text())
        text = config.get("text_config") or config
        scaling = text.get("rope_scaling") or text.get("rope_parameters") or {}
        longest = int(text["max_position_embeddings"])
    except (OSError, AttributeError, *MALFORMED):
        return None
    is_scaled = "model_max_length" in text or "factor" in json.dumps(scaling)  # by layer types, in parts
    return longest if asked > longest > 0 and not is_scaled else None


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _is_missing(path: str) -> bool:
    """Whether a path, and no name at a hub, leads nowhere."""
    is_path = path.startswith(("/", "./", "../", "~")) or path.count("/") > 1
    return is_path and "://" not in path and not Path(path).expanduser().exists()
