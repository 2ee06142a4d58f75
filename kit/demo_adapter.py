"""LoRA adapters for the demo model: of different seeds, they have it answer differently."""

import json
from pathlib import Path
from typing import Any, Final

from hotspan.demo.files import Tensor, publish, write_json, write_safetensors

VERSION: Final = 1
LORA_RANK: Final = 8
# The product of two LoRA matrices, scaled by alpha / rank = 2, is about as large as the weights it is added to.
_LORA_STD: Final = 0.1


def make_demo_adapter(directory: Path, model_dir: Path, seed: int) -> Path:
    """A LoRA adapter (PEFT's format, rank 8, query and value projections) for the demo model in `model_dir`.

    Returns `directory`.
    """
    config = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    hidden, kv_width = config["hidden_size"], config["num_key_value_heads"] * config["head_dim"]
    tensors: list[Tensor] = []
    for layer in range(config["num_hidden_layers"]):
        for projection, width in (("q_proj", hidden), ("v_proj", kv_width)):
            name = f"base_model.model.model.layers.{layer}.self_attn.{projection}"
            tensors.append(Tensor(f"{name}.lora_A.weight", (LORA_RANK, hidden), _LORA_STD))
            tensors.append(Tensor(f"{name}.lora_B.weight", (width, LORA_RANK), _LORA_STD))

    def write(path: Path) -> None:
        write_safetensors(path / "adapter_model.safetensors", tensors, seed)
        write_json(path / "adapter_config.json", adapter_config(model_dir.name, ["q_proj", "v_proj"]))

    marker = {
        "made_by": "hotspan demo adapter",
        "model": [hidden, kv_width, config["num_hidden_layers"]],
        "seed": seed,
        "version": VERSION,
    }
    publish(directory, marker, write)
    return directory


def adapter_config(model_name: str, targets: list[str]) -> dict[str, Any]:
    """PEFT's configuration of an adapter of LORA_RANK."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": model_name,
        "r": LORA_RANK,
        "lora_alpha": 2 * LORA_RANK,
        "lora_dropout": 0.0,
        "target_modules": targets,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
