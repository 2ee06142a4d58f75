"""Model families that see, each as a tiny model of random weights with its processor, made without the hub."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from hotspan.demo.model import make_demo_model

from .make import save
from .table import HEADS, SIZES

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


SIGHTS: Final = (_qwen("Qwen2VL", 14, {"embed_dim": 64, "hidden_size": 128, "mlp_ratio": 2}),)


def make_sight(sight: Sight, directory: Path) -> Path:
    """The family's shape as a model that vLLM can serve."""
    import transformers

    base, model = make_demo_model(directory / "base", "tiny").path, directory / "model"
    config = getattr(transformers, sight.config)(**sight.fields)
    save(transformers.AutoModelForImageTextToText.from_config(config), model)
    _write_tokenizer(sight, base, model)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    parts = {name: getattr(transformers, kind)(**fields) for name, (kind, fields) in sight.parts.items()}
    getattr(transformers, sight.processor)(tokenizer=tokenizer, **parts, **sight.options).save_pretrained(model)
    return model


def _write_tokenizer(sight: Sight, base: Path, model: Path) -> None:
    tokenizer = json.loads((base / "tokenizer.json").read_text())
    known = tokenizer["added_tokens"]
    known += [known[0] | {"id": _FIRST + n, "content": token} for n, token in enumerate(sight.tokens)]
    options = json.loads((base / "tokenizer_config.json").read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    options.pop("chat_template", None)
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    (model / "tokenizer_config.json").write_text(json.dumps(options))
