"""A tiny model that sees, of random weights: BLIP-2's shape, which needs neither a download nor torchvision."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from hotspan.demo.model import SPECIAL_TOKENS, make_demo_model

SIDE = 28
"""Pixels of an image's side."""
_IMAGE_TOKEN = 768  # after the demo tokenizer's own
_STD = 0.2  # large enough that an answer depends on the image
_LAYERS, _HIDDEN, _RANK = 2, 128, 8


def make_vision_model(directory: Path) -> Path:
    """A model directory that vLLM can serve; a few seconds."""
    import torch
    from transformers import Blip2Config, Blip2ForConditionalGeneration

    base = make_demo_model(directory / "base", "tiny").path
    model = directory / "vision"
    model.mkdir()
    tokenizer = json.loads((base / "tokenizer.json").read_text())
    tokenizer["added_tokens"].append(tokenizer["added_tokens"][0] | {"id": _IMAGE_TOKEN, "content": "<image>"})
    options = json.loads((base / "tokenizer_config.json").read_text())
    options |= {"tokenizer_class": "PreTrainedTokenizerFast", "extra_special_tokens": {"image_token": "<image>"}}
    layers = {"num_hidden_layers": 2, "num_attention_heads": 2, "initializer_range": _STD}
    vision = layers | {"hidden_size": 64, "intermediate_size": 128, "image_size": SIDE, "patch_size": SIDE // 2}
    former = layers | {"hidden_size": 64, "intermediate_size": 128, "encoder_hidden_size": 64, "vocab_size": 16}
    text = {
        "model_type": "opt",
        "vocab_size": 1024,
        "hidden_size": _HIDDEN,
        "word_embed_proj_dim": _HIDDEN,
        "ffn_dim": 256,
    }
    text |= {"num_hidden_layers": _LAYERS, "num_attention_heads": 4, "max_position_embeddings": 4096, "init_std": _STD}
    text |= {"bos_token_id": 0, "pad_token_id": 0, "eos_token_id": len(SPECIAL_TOKENS) - 1}
    config = Blip2Config(
        vision_config=vision,
        qformer_config=former | {"cross_attention_frequency": 1},
        text_config=text,
        num_query_tokens=4,
        image_token_index=_IMAGE_TOKEN,
        initializer_range=_STD,
    )
    torch.manual_seed(0)
    Blip2ForConditionalGeneration(config).save_pretrained(model)
    written: dict[str, Any] = {
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": options,
        "processor_config.json": {"processor_class": "Blip2Processor", "num_query_tokens": 4},
        "preprocessor_config.json": {
            "image_processor_type": "BlipImageProcessor",
            "processor_class": "Blip2Processor",
            "size": {"height": SIDE, "width": SIDE},
            "image_mean": [0.5] * 3,
            "image_std": [0.5] * 3,
            **dict.fromkeys(("do_resize", "do_normalize", "do_rescale", "do_convert_rgb"), True),
        },
    }
    for name, value in written.items():
        (model / name).write_text(json.dumps(value))
    return model


def make_vision_adapter(directory: Path, seed: int) -> Path:
    """A LoRA adapter of random weights for the language model in it."""
    directory.mkdir(parents=True)
    numbers = np.random.default_rng(seed)
    tensors = {}
    for layer in range(_LAYERS):
        for module in ("q_proj", "v_proj"):
            name = f"base_model.model.language_model.model.decoder.layers.{layer}.self_attn.{module}"
            for half, shape in (("A", (_RANK, _HIDDEN)), ("B", (_HIDDEN, _RANK))):
                tensors[f"{name}.lora_{half}.weight"] = numbers.normal(0, _STD, shape).astype(np.float32)
    save_file(tensors, directory / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": _RANK, "lora_alpha": 2 * _RANK, "target_modules": ["q_proj", "v_proj"]}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory
