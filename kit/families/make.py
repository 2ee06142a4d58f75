"""A model directory for each family: transformers' own class, random weights from one seed, the demo's tokenizer."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from kit.demo_adapter import LORA_RANK, adapter_config
from kit.families.table import Family

_ADAPTED = ("q_proj", "v_proj", "o_proj")

_STD = 0.08
"""Large enough that attention is peaked, and an answer depends on the first token: wrong KV would show."""


def make_family(family: Family, directory: Path, tokenizer: Path) -> Path:
    """The family's shape as a model that vLLM can serve, in `directory`. tokenizer: a model that has one."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, family.config)(**family.fields)
    model = transformers.AutoModelForCausalLM.from_config(config)
    save(model, directory, family.architecture)
    for file in (*tokenizer.glob("tokenizer*"), tokenizer / "generation_config.json"):
        shutil.copy(file, directory)
    return directory


def make_adapter(directory: Path, model: Path, seed: int) -> Path:
    """A LoRA adapter for what the model has of _ADAPTED, of random matrices none of which is zero."""
    from safetensors import safe_open
    from safetensors.numpy import save_file

    rng, tensors = np.random.default_rng(seed), {}
    with safe_open(model / "model.safetensors", "numpy") as weights:
        for name in weights.keys():  # noqa: SIM118 -- no mapping
            *layer, projection, kind = name.split(".")
            if projection in _ADAPTED and kind == "weight":
                outputs, inputs = weights.get_slice(name).get_shape()
                module = ".".join(("base_model.model", *layer, projection))
                for part, shape in (("A", (LORA_RANK, inputs)), ("B", (outputs, LORA_RANK))):
                    tensors[f"{module}.lora_{part}.weight"] = rng.normal(0, _STD, shape).astype(np.float32)
    directory.mkdir()
    save_file(tensors, directory / "adapter_model.safetensors")
    targets = sorted({name.split(".")[-3] for name in tensors})
    (directory / "adapter_config.json").write_text(json.dumps(adapter_config(model.name, targets)))
    return directory


def save(model: Any, directory: Path, architecture: str | None = None) -> None:
    """Write a model with random weights, the same for one seed and release of PyTorch."""
    import torch

    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, _STD)
    model.save_pretrained(directory)
    if architecture is not None:
        config = json.loads((directory / "config.json").read_text())
        (directory / "config.json").write_text(json.dumps(config | {"architectures": [architecture]}))
