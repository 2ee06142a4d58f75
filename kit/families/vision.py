"""Model families that see, each as a tiny model of random weights with its processor, made without the hub."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from safetensors import torch as torch_file

from hotspan.demo.model import make_demo_model
from kit.families.make import save
from kit.families.table import HEADS, SIZES

_BYTE_255: Final = "\u00ff"
"""Of a byte-level vocabulary: the name of a byte that no UTF-8 has."""

_FIRST: Final = 768  # id of the first token after the demo tokenizer's own
_TEXT: Final = MappingProxyType({**SIZES, **HEADS})
_QWEN_TOKENS: Final = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
_QWEN_IDS: Final = MappingProxyType(
    {f"{name}_token_id": _FIRST + n for n, name in enumerate(("image", "video", "vision_start", "vision_end"))}
)
_ROPE: Final = MappingProxyType({"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]})
_PIXELS: Final = MappingProxyType({"shortest_edge": 28 * 28, "longest_edge": 224 * 224})


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """A family that sees.

    name:      what the docs call it.
    config:    transformers' configuration class. fields: what it is made of.
    tokens:    that its tokenizer has beside the text's.
    processor: transformers' class. parts: its image and video processors, by its parameter, and what they are made of.
    options:   further parameters of the processor.
    image, video: what a prompt has in their place.
    renamed:   a part of the names of weights, and what published models have in its place.
    """

    name: str
    config: str
    fields: Mapping[str, Any]
    tokens: tuple[str, ...]
    processor: str
    parts: Mapping[str, tuple[str, Mapping[str, Any]]]
    options: Mapping[str, Any]
    image: str
    video: str | None = None
    needs_torchvision: bool = False
    renamed: tuple[str, str] | None = None

    def __str__(self) -> str:
        return self.name.lower().replace(" ", "-")

    @property
    def chat_template(self) -> str:
        """Each part of a message where it stands."""
        media = {"image": self.image} | ({"video": self.video} if self.video is not None else {})
        cases = "".join(f"{{% elif part['type'] == '{kind}' %}}{mark}" for kind, mark in media.items())
        part = f"{{% if part['type'] == 'text' %}}{{{{ part['text'] }}}}{cases}{{% endif %}}"
        return (
            f"{{% for message in messages %}}{{% for part in message['content'] %}}{part}{{% endfor %}}{{% endfor %}}"
        )


def _qwen(name: str, patch: int, vision: Mapping[str, Any]) -> Sight:
    """One of the two; `name` as transformers begins the names of its classes."""
    sizes = {"patch_size": patch, "temporal_patch_size": 2, "merge_size": 2, "size": dict(_PIXELS)}
    layers = {"depth": 2, "num_heads": 2, "patch_size": patch, "spatial_merge_size": 2, "temporal_patch_size": 2}
    return Sight(
        name=name.replace("VL", "-VL"),
        config=f"{name}Config",
        fields={
            "text_config": {**_TEXT, "rope_parameters": dict(_ROPE)},
            "vision_config": layers | dict(vision),
            **_QWEN_IDS,
        },
        tokens=_QWEN_TOKENS,
        processor=f"{name}Processor",
        parts={
            "image_processor": ("Qwen2VLImageProcessor", sizes),
            "video_processor": (f"{name}VideoProcessor", sizes),
        },
        options={},
        image="<|vision_start|><|image_pad|><|vision_end|>",
        video="<|vision_start|><|video_pad|><|vision_end|>",
        needs_torchvision=True,
    )


SIGHTS: Final = (
    Sight(
        name="LLaVA",
        config="LlavaConfig",
        fields={
            "text_config": {**_TEXT, "model_type": "llama"},
            "vision_config": {
                "model_type": "clip_vision_model",
                "hidden_size": 64,
                "intermediate_size": 128,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "image_size": 56,
                "patch_size": 14,
                "projection_dim": 64,
            },
            "image_token_index": _FIRST,
            "image_seq_length": 16,
        },
        tokens=("<image>",),
        processor="LlavaProcessor",
        parts={
            "image_processor": (
                "CLIPImageProcessor",
                {"size": {"shortest_edge": 56}, "crop_size": {"height": 56, "width": 56}},
            )
        },
        options={"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
        image="<image>",
        needs_torchvision=True,
        renamed=("vision_tower.", "vision_tower.vision_model."),
    ),
    Sight(
        name="Mistral3",
        config="Mistral3Config",
        fields={
            "text_config": {**_TEXT, "model_type": "mistral", "sliding_window": None},
            "vision_config": {
                "model_type": "pixtral",
                "hidden_size": 64,
                "intermediate_size": 128,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "head_dim": 32,
                "image_size": 112,
                "patch_size": 14,
            },
            "image_token_index": _FIRST,
            "spatial_merge_size": 2,
            "tie_word_embeddings": False,
        },
        tokens=("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
        processor="PixtralProcessor",
        parts={"image_processor": ("PixtralImageProcessor", {"size": {"longest_edge": 112}, "patch_size": 14})},
        options={"patch_size": 14, "spatial_merge_size": 2},
        image="[IMG]",
        needs_torchvision=True,
    ),
    _qwen("Qwen2VL", 14, {"embed_dim": 64, "hidden_size": 128, "mlp_ratio": 2}),
    _qwen(
        "Qwen3VL",
        16,
        {
            "hidden_size": 64,
            "intermediate_size": 128,
            "out_hidden_size": 128,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0, 1],
        },
    ),
)


def make_sight(sight: Sight, directory: Path) -> Path:
    """The family's shape as a model that vLLM can serve."""
    base, model = make_demo_model(directory / "base", "tiny").path, directory / "model"
    save(_shape(sight), model)
    _write_tokenizer(sight, base, model)
    _complete(sight, model)
    return model


def make_seeing_target(target: Path, model: Path) -> Path:
    """LLaVA around a trained Llama, whose tokenizer loses a token that no text has to the image's."""
    (llava,) = (sight for sight in SIGHTS if sight.name == "LLaVA")
    tokenizer = json.loads((target / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    image = vocabulary.pop(_BYTE_255)
    vocabulary[llava.image] = image
    tokenizer["added_tokens"].append(tokenizer["added_tokens"][0] | {"id": image, "content": llava.image})
    fields = {"text_config": json.loads((target / "config.json").read_text()), "image_token_index": image}
    sight = replace(llava, fields={**llava.fields, **fields, "tie_word_embeddings": False})
    shape = _shape(sight)
    weights = torch_file.load_file(target / "model.safetensors")
    save(shape, model)
    shape.lm_head.weight.data.copy_(weights.pop("lm_head.weight"))
    shape.model.language_model.load_state_dict({name.removeprefix("model."): each for name, each in weights.items()})
    shape.save_pretrained(model)
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    shutil.copy(target / "tokenizer_config.json", model)
    _complete(sight, model)
    return model


def _shape(sight: Sight) -> Any:
    import torch
    import transformers

    torch.manual_seed(0)  # of what `save` leaves as it is
    return transformers.AutoModelForImageTextToText.from_config(getattr(transformers, sight.config)(**sight.fields))


def _complete(sight: Sight, model: Path) -> None:
    """Give a model's directory its processor, and its weights the names that published models have."""
    import transformers

    if sight.renamed:
        _rename_weights(model / "model.safetensors", *sight.renamed)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    parts = {name: getattr(transformers, kind)(**fields) for name, (kind, fields) in sight.parts.items()}
    getattr(transformers, sight.processor)(tokenizer=tokenizer, **parts, **sight.options).save_pretrained(model)


def _rename_weights(file: Path, old: str, new: str) -> None:
    weights = {name.replace(old, new): tensor for name, tensor in torch_file.load_file(file).items()}
    torch_file.save_file(weights, file, metadata={"format": "pt"})


def _write_tokenizer(sight: Sight, base: Path, model: Path) -> None:
    tokenizer = json.loads((base / "tokenizer.json").read_text())
    known = tokenizer["added_tokens"]
    known += [known[0] | {"id": _FIRST + n, "content": token} for n, token in enumerate(sight.tokens)]
    options = json.loads((base / "tokenizer_config.json").read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    options.pop("chat_template", None)
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    (model / "tokenizer_config.json").write_text(json.dumps(options))
