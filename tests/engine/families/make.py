"""A model directory for each family: transformers' own class, random weights from one seed, the demo's tokenizer."""

import json
import shutil
from pathlib import Path
from typing import Any

from .table import Family

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
