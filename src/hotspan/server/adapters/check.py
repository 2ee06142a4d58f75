"""Whether an adapter fits the model, from its configuration and its tensors' names and shapes, without loading it.

What the engine does not say it does not say loudly: weights that are smaller than the model's are copied into a corner
of the slot, and modules that the model does not have are left out, so that the base model would answer.
"""

import json
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open

from hotspan.http.errors import HttpError
from hotspan.server.adapters.source import CONFIG, WEIGHTS

_MAX_CONFIG_BYTES = 1 << 20
_HALF = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<half>[AB])\.weight")
_LORA = "LORA"
_MAX_NAME_LENGTH = 256
_ATOM = r"(?:[\w-]|\\?\.|\\d|\[[\w-]+\])"
_PATTERN = re.compile(rf"\^?{_ATOM}*(?:{_ATOM}[*+?]{_ATOM}*)?\$?")
"""Regular expressions that take at most quadratic time: no groups, no alternatives, one repetition."""
_REPETITION_COST = 50
_MAX_MATCHES = 400_000
"""Matches of patterns against modules. The engine computes nothing else meanwhile: 0.4 s, or 60 s for 560 patterns."""


class Shape(NamedTuple):
    """The sizes of a linear layer."""

    outputs: int
    inputs: int


@dataclass(frozen=True, slots=True)
class AdapterLimits:
    """The limits of the engine.

    max_rank: the largest rank of a module (--max-lora-rank).
    shapes:   the model's linear layers by module name; empty where they can't be known.
    """

    max_rank: int
    shapes: Mapping[str, Shape] = field(default_factory=dict)


def check_adapter(directory: Path, limits: AdapterLimits) -> None:
    """Raise HttpError for an adapter that can't be loaded, or that would be applied only in part."""
    config = _config(directory / CONFIG)
    ranks = _ranks(config)
    if max(ranks) > limits.max_rank:
        raise HttpError(
            400,
            f"the adapter's rank is {max(ranks)} and the engine takes {limits.max_rank}: serve with --max-lora-rank "
            f"{max(ranks)} or more",
        )
    modules = _modules(directory / WEIGHTS, limits.max_rank)
    _check_cost(config, modules)
    for module, shape in modules.items():
        known = limits.shapes.get(module)
        if known is not None and shape is not None and shape != known:
            raise HttpError(
                400,
                f"the adapter's {module} is {shape.inputs} -> {shape.outputs} and the model's is {known.inputs} -> "
                f"{known.outputs}: it was trained for another model",
            )
    if not limits.shapes.keys() & modules.keys() and _kinds(limits.shapes) & _kinds(modules):
        raise HttpError(
            400, f"the model has none of the adapter's modules ({_few(modules)}): it was trained for another model"
        )


def model_shapes(model: Path) -> Mapping[str, Shape]:
    """The linear layers of the model in a local directory; empty where names in files need not be the engine's.

    Blocks: for reading the headers of its safetensors files.
    """
    try:
        config = json.loads((model / "config.json").read_bytes())
        if "vision_config" in config or "text_config" in config:
            return {}  # the engine renames parts of such models
        return {
            name.removesuffix(".weight"): Shape(*shape)
            for file in sorted(model.glob("*.safetensors"))
            for name, shape in _tensors(file).items()
            if name.endswith(".weight") and len(shape) == 2
        }
    except (OSError, ValueError, SafetensorError):
        return {}


def _config(path: Path) -> Mapping[str, Any]:
    if path.stat().st_size > _MAX_CONFIG_BYTES:
        raise HttpError(400, f"{CONFIG} is {path.stat().st_size} bytes long: give the one that PEFT wrote")
    try:
        config = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise HttpError(400, f"{CONFIG} is no JSON ({error}): give the one that PEFT wrote") from error
    if not isinstance(config, dict):
        raise HttpError(400, f"{CONFIG} holds no JSON object: give the one that PEFT wrote")
    kind = config.get("peft_type", _LORA)
    if kind != _LORA:
        raise HttpError(400, f"{CONFIG} says peft_type {kind!r}: only {_LORA} adapters can be served")
    targets = config.get("target_modules")
    if not targets or not isinstance(targets, str | list):
        raise HttpError(400, f"{CONFIG} says target_modules {targets!r}: it must name the modules that are adapted")
    alpha = config.get("lora_alpha")
    if not isinstance(alpha, int | float) or isinstance(alpha, bool):
        raise HttpError(400, f"{CONFIG} says lora_alpha {alpha!r}: it must be a number")
    for name, plain in (("bias", "none"), ("use_dora", False)):
        if config.get(name, plain) != plain:
            raise HttpError(400, f"{CONFIG} says {name} {config[name]!r}, which the engine can't serve: train without")
    return config


def _ranks(config: Mapping[str, Any]) -> list[int]:
    pattern = config.get("rank_pattern") or {}
    ranks = [config.get("r"), *(pattern.values() if isinstance(pattern, dict) else [pattern])]
    for rank in ranks:
        if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
            raise HttpError(400, f"{CONFIG} says rank {rank!r} (r or rank_pattern): it must be a whole number above 0")
    return ranks


def _check_cost(config: Mapping[str, Any], modules: Collection[str]) -> None:
    """Raise HttpError for patterns that could stop the engine, which matches each of them against each module."""
    cost = 0
    for name in ("rank_pattern", "alpha_pattern"):
        patterns = config.get(name) or {}
        if not isinstance(patterns, dict):
            raise HttpError(400, f"{CONFIG} says {name} {patterns!r:.80}: give an object of patterns and numbers")
        for pattern in patterns:
            if len(pattern) > _MAX_NAME_LENGTH or not _PATTERN.fullmatch(pattern):
                raise HttpError(
                    400,
                    f"{CONFIG} has the pattern {pattern!r:.80} in {name}, and matching it could take for ever: use "
                    "module names, without groups, alternatives or more than one of * + ?",
                )
            cost += len(modules) * (_REPETITION_COST if re.search("[*+?]", pattern) else 1)
    if cost > _MAX_MATCHES:
        raise HttpError(
            400,
            f"{CONFIG} has too many patterns in rank_pattern and alpha_pattern for {len(modules):,} modules: the "
            "engine would stand still while it matches them",
        )


def _modules(path: Path, max_rank: int) -> dict[str, Shape | None]:
    """The adapted modules; None where a module's two halves are no plain matrices."""
    try:
        tensors = _tensors(path)
    except SafetensorError as error:
        raise HttpError(400, f"{WEIGHTS} is damaged or no safetensors file ({error}): copy it again") from error
    halves: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, shape in tensors.items():
        if found := _HALF.fullmatch(name):
            halves.setdefault(found["module"], {})[found["half"]] = shape
    if not halves:
        raise HttpError(400, f"{WEIGHTS} holds no LoRA weights ({_few(tensors)}): give the file that PEFT wrote")
    if too_long := next((module for module in halves if len(module) > _MAX_NAME_LENGTH), None):
        raise HttpError(
            400,
            f"{WEIGHTS} has a module of {len(too_long)} characters ({too_long:.40}...): give the file that PEFT wrote",
        )
    return {module: _shape(module, pair, max_rank) for module, pair in halves.items()}


def _shape(module: str, pair: Mapping[str, tuple[int, ...]], max_rank: int) -> Shape | None:
    if pair.keys() != {"A", "B"}:
        raise HttpError(400, f"{WEIGHTS} has only half of {module} (lora_{min(pair)}): give the whole adapter")
    a, b = pair["A"], pair["B"]
    if len(a) != 2 or len(b) != 2:
        return None
    if a[0] != b[1]:
        raise HttpError(400, f"{WEIGHTS} has halves of {module} with ranks {a[0]} and {b[1]}: they must be equal")
    if a[0] > max_rank:
        raise HttpError(
            400,
            f"{WEIGHTS} has {module} with rank {a[0]}, and the engine takes {max_rank}: serve with --max-lora-rank "
            f"{a[0]} or more",
        )
    return Shape(b[0], a[1])


def _tensors(path: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes. Raises: SafetensorError, also if data are missing at the end."""
    with safe_open(path, framework="numpy") as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118


def _kinds(modules: Iterable[str]) -> set[str]:
    return {module.rpartition(".")[2] for module in modules}


def _few(names: Iterable[str]) -> str:
    found = sorted(names)
    return ", ".join(found[:3]) + (f" and {len(found) - 3} more" if len(found) > 3 else "")
