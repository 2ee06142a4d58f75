"""What models keep of a token, worked out by hand from their published configs."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotspan.core.errors import ConfigError
from hotspan.core.types import PAGE_BYTES, round_up
from hotspan.plan.shape import LayerKind, ModelShape

from . import models
from .models import Config

FULL, LATENT, WINDOW, STATE = LayerKind.FULL, LayerKind.LATENT, LayerKind.WINDOW, LayerKind.STATE


def kinds(shape: ModelShape) -> dict[tuple[LayerKind, int | None], int]:
    return {(layers.kind, layers.window): layers.count for layers in shape.layers}


@pytest.mark.parametrize(
    ("config", "layers", "bytes_per_token"),
    [
        (models.QWEN_7B, {(FULL, None): 28}, 28 * 2 * 4 * 128 * 2),  # 56 KiB: storage-limits' figure for 7B
        (models.LLAMA_70B, {(FULL, None): 80}, 80 * 2 * 8 * 128 * 2),  # 320 KiB
        (models.DEEPSEEK_V3, {(LATENT, None): 61}, 61 * (512 + 64) * 2),
        (models.GPT_OSS_20B, {(WINDOW, 128): 12, (FULL, None): 12}, 24 * 2 * 8 * 64 * 2),
        (models.GEMMA3_27B, {(WINDOW, 1024): 52, (FULL, None): 10}, 62 * 2 * 16 * 128 * 2),
        (models.GEMMA3_4B, {(WINDOW, 1024): 29, (FULL, None): 5}, 34 * 2 * 4 * 256 * 2),
        (models.GEMMA2_9B, {(WINDOW, 4096): 21, (FULL, None): 21}, 42 * 2 * 8 * 256 * 2),
        (models.MISTRAL_7B, {(WINDOW, 4096): 32}, 32 * 2 * 8 * 128 * 2),
        (models.MISTRAL_7B | {"sliding_window": None}, {(FULL, None): 32}, 32 * 2 * 8 * 128 * 2),
        (models.MISTRAL_7B | {"sliding_window": 0}, {(FULL, None): 32}, 32 * 2 * 8 * 128 * 2),
        (models.QWEN3_NEXT, {(STATE, None): 36, (FULL, None): 12}, 12 * 2 * 2 * 256 * 2),
        (models.GRANITE_4, {(STATE, None): 36, (FULL, None): 4}, 4 * 2 * 8 * 128 * 2),
    ],
)
def test_published_models(config: Config, layers: dict[Any, int], bytes_per_token: int) -> None:
    """Kinds of layers and bytes a token are those that the model's paper or card gives."""
    shape = ModelShape.from_config(config)
    assert kinds(shape) == layers
    assert shape.kv_bytes_per_token == bytes_per_token


def test_a_window_that_is_switched_on_holds_from_its_first_layer() -> None:
    """Qwen's window counts only with use_sliding_window, and only from max_window_layers on."""
    on = models.QWEN_7B | {"use_sliding_window": True, "max_window_layers": 20, "sliding_window": 4096}
    assert kinds(ModelShape.from_config(on)) == {(FULL, None): 20, (WINDOW, 4096): 8}
    left_out = {name: value for name, value in models.QWEN_7B.items() if name != "use_sliding_window"}
    assert kinds(ModelShape.from_config(left_out)) == {(FULL, None): 28}


def test_a_pattern_stands_for_a_list() -> None:
    """The old form of Gemma 3 (every sixth layer sees all) and the new one (layer_types) are the same shape."""
    text = models.GEMMA3_27B["text_config"]
    listed = ["full_attention" if (n + 1) % 6 == 0 else "sliding_attention" for n in range(62)]
    assert ModelShape.from_config(text | {"sliding_window_pattern": 6}).layers == ModelShape.from_config(text).layers
    assert ModelShape.from_config(text | {"layer_types": listed}).layers == ModelShape.from_config(text).layers


@pytest.mark.parametrize(
    ("how", "states", "full"),
    [
        ({"hybrid_override_pattern": "M-M*-ME*"}, 3, 2),
        ({"attn_type_list": [0, 1, 0, 0, 1, 0, 0, 0]}, 6, 2),
        ({"attn_layer_indices": [3]}, 7, 1),
        ({"attn_layer_period": 4, "attn_layer_offset": 2}, 6, 2),
        ({"layers_block_type": ["mamba"] * 6 + ["attention"] * 2}, 6, 2),
    ],
)
def test_each_way_to_say_which_layers_attend(how: Config, states: int, full: int) -> None:
    """Layers of fixed state and of attention are told apart however the config says it."""
    config = models.LLAMA_70B | {"num_hidden_layers": 8} | how
    shape = ModelShape.from_config(config)
    assert kinds(shape) == {(STATE, None): states, (FULL, None): full}
    assert shape.kv_bytes_per_token == full * 2 * 8 * 128 * 2


def test_layers_that_reuse_anothers_kv_keep_none() -> None:
    """Gemma 3n's last layers share: they are not counted."""
    config = models.GEMMA2_9B | {"num_kv_shared_layers": 20}
    assert kinds(ModelShape.from_config(config)) == {(WINDOW, 4096): 11, (FULL, None): 11}


def test_a_count_of_shared_heads_that_is_switched_off_does_not_count() -> None:
    """ChatGLM's configs give multi_query_group_num also where multi_query_attention is false: each head has its own."""
    config = {name: value for name, value in models.QWEN_7B.items() if name != "num_key_value_heads"}
    config |= {"multi_query_group_num": 2, "multi_query_attention": False}
    assert ModelShape.from_config(config).kv_bytes_per_token == 28 * 2 * 28 * 128 * 2
    assert ModelShape.from_config(config | {"multi_query_attention": True}).kv_bytes_per_token == 28 * 2 * 2 * 128 * 2


@pytest.mark.parametrize(("ranks", "factor"), [(1, 1), (2, 1), (4, 1), (8, 2), (16, 4)])
def test_ranks_split_heads_and_then_copy_them(ranks: int, factor: int) -> None:
    """Four KV heads over more than four ranks are there more than once, and take as much more."""
    shape = ModelShape.from_config(models.QWEN_7B, tensor_parallel=ranks)
    assert shape.kv_bytes_per_token == factor * 57344


def test_a_latent_is_on_every_rank_and_once_in_a_tier() -> None:
    """MLA's latent can't be split: eight ranks keep eight copies, and their tiers one, as those of one rank do."""
    one = ModelShape.from_config(models.DEEPSEEK_V3)
    eight = ModelShape.from_config(models.DEEPSEEK_V3, tensor_parallel=8)
    assert eight.kv_bytes_per_token == 8 * one.kv_bytes_per_token == eight.copies * 70_272
    assert eight.tier_bytes_per_token == one.tier_bytes_per_token and eight.chunk_bytes == one.chunk_bytes


def test_copies_of_heads_are_stored_each() -> None:
    """KV heads that are fewer than the ranks take a place for each rank in a tier, too."""
    shape = ModelShape.from_config(models.QWEN_7B, tensor_parallel=8)
    assert shape.copies == 1 and shape.tier_bytes_per_token == shape.kv_bytes_per_token


@pytest.mark.parametrize(
    ("config", "asked", "factor"),
    [
        ({}, {"kv_dtype": "fp8"}, 0.5),
        ({}, {"kv_dtype": "fp8_e5m2"}, 0.5),
        ({}, {"kv_dtype": "fp8_e4m3"}, 0.5),
        ({}, {"kv_dtype": "fp8_inc"}, 0.5),
        ({}, {"dtype": "float32"}, 2),
        ({}, {"dtype": "float32", "kv_dtype": "bfloat16"}, 1),
        ({"torch_dtype": "float32"}, {}, 1),  # the engine's "auto" computes float32 models in 16 bits
        ({"torch_dtype": None, "dtype": "float16"}, {}, 1),
        ({"quantization_config": {"kv_cache_scheme": {"num_bits": 8, "type": "float"}}}, {}, 0.5),
        ({"quantization_config": {"kv_cache_scheme": None}}, {}, 1),
        ({"quantization_config": {"quantization": {"kv_cache_quant_algo": "FP8"}}}, {}, 0.5),
        ({"quantization_config": {"kv_cache_scheme": {"num_bits": 8, "type": "float"}}}, {"kv_dtype": "bfloat16"}, 1),
    ],
)
def test_dtypes(config: Config, asked: dict[str, str], factor: float) -> None:
    """A value of KV has the bytes of the cache's dtype: the one asked for, the quantisation's, or the model's."""
    shape = ModelShape.from_config(models.QWEN_7B | config, **asked)  # type: ignore[arg-type]
    assert shape.kv_bytes_per_token == factor * 57344


def test_an_indexer_keeps_its_keys_too() -> None:
    """DeepSeek V3.2's sparse attention adds 128 bytes and a 4-byte scale a layer; a packed fp8 latent is 656."""
    config = models.DEEPSEEK_V3 | {"index_head_dim": 128}
    assert ModelShape.from_config(config).kv_bytes_per_token == 61 * (576 * 2 + 132)
    assert ModelShape.from_config(config, kv_dtype="fp8_ds_mla").kv_bytes_per_token == 61 * (656 + 132)


def test_a_window_bounds_what_comes_back_and_not_what_is_kept() -> None:
    """All tokens of a text are kept, and of the layers with a window only its last ones are loaded."""
    shape = ModelShape.from_config(models.GPT_OSS_20B)
    layer = 2 * 8 * 64 * 2
    assert shape.text_bytes(10_240) == 10_240 * 24 * layer
    assert shape.load_bytes(10_240) == 12 * layer * (10_240 + 128)
    assert shape.load_bytes(100) == 24 * layer * 100


def test_a_state_is_kept_with_every_chunk_and_loaded_once() -> None:
    """Fixed state takes the same of each chunk, and comes back once however long the text is.

    A chunk has as many tokens as the engine's block, in which keys and values are as large as a layer's state.
    """
    shape = ModelShape.from_config(models.QWEN3_NEXT)
    state = shape.state_bytes
    assert state is not None and state > 0
    assert shape.chunk_tokens == 544
    assert shape.chunk_bytes == round_up(544 * shape.kv_bytes_per_token + state, PAGE_BYTES)
    assert shape.text_bytes(1200) == 2 * shape.chunk_bytes
    assert shape.load_bytes(2560) - shape.load_bytes(256) == 2304 * shape.kv_bytes_per_token


def test_a_state_that_is_not_known_is_said_to_be_unknown() -> None:
    """A state-space layer of a kind that hotspan can't size does not count as nothing."""
    config = models.LLAMA_70B | {"layer_types": ["conv", "full_attention"] * 40}
    assert ModelShape.from_config(config).state_bytes is None
    assert ModelShape.from_config(models.LLAMA_70B).state_bytes == 0


def test_a_directory_and_its_config_are_the_same(tmp_path: Path) -> None:
    """A model may be given by its directory, by its config.json, or parsed."""
    (tmp_path / "config.json").write_text(json.dumps(models.QWEN_7B))
    parsed = ModelShape.from_config(models.QWEN_7B)
    assert ModelShape.from_config(tmp_path) == ModelShape.from_config(tmp_path / "config.json") == parsed
    assert parsed.max_tokens == 32768


@pytest.mark.parametrize(
    ("config", "asked", "said"),
    [
        ({"num_hidden_layers": None}, {}, "lacks num_hidden_layers"),
        ({"num_key_value_heads": "four"}, {}, "num_key_value_heads is 'four'"),
        ({"hidden_size": -1}, {}, "hidden_size is -1"),
        ({"layer_types": ["telepathy"] * 28}, {}, "'telepathy'"),
        ({"layer_types": ["mlp"] * 28}, {}, "no layer that keeps"),
        ({"per_layer_config": [{}]}, {}, "per_layer_config"),
        ({"compress_ratios": [4]}, {}, "compress_ratios"),
        ({}, {"tensor_parallel": 3}, "can't be split over 3 ranks"),
        ({}, {"tensor_parallel": 0}, "give at least 1"),
        ({}, {"kv_dtype": "nvfp4"}, "nvfp4"),
        ({}, {"dtype": "int8"}, "int8"),
        ({"attn_layer_period": "often"}, {}, "can't be understood"),
    ],
)
def test_what_can_not_be_sized_is_an_error_that_names_it(config: Config, asked: dict[str, Any], said: str) -> None:
    """No figure is made up: the error says which key, value or option it is about."""
    with pytest.raises(ConfigError, match=said):
        ModelShape.from_config(models.QWEN_7B | config, **asked)


@pytest.mark.parametrize("text", ["", "[]", "{", "\xff"])
def test_a_file_that_is_no_config_is_an_error_that_names_it(text: str, tmp_path: Path) -> None:
    """A config.json that is missing, broken or no object says so, with its path."""
    with pytest.raises(ConfigError, match=str(tmp_path)):
        ModelShape.from_config(tmp_path)
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=str(tmp_path)):
        ModelShape.from_config(tmp_path)


KEYS = sorted({key for config in (models.QWEN3_NEXT, models.DEEPSEEK_V3, models.GEMMA2_9B) for key in config})
KEYS += ["quantization_config", "text_config", "layer_types", "hybrid_override_pattern", "num_kv_shared_layers"]
KEYS += ["attn_type_list", "attn_layer_indices", "attn_layer_period", "sliding_window_pattern", "index_head_dim"]
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 200) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=3),
    max_leaves=5,
)


@settings(deadline=None)
@given(st.sampled_from([models.QWEN3_NEXT, models.GEMMA2_9B, models.DEEPSEEK_V3]), st.data())
def test_any_config_gives_a_shape_or_a_clear_error(base: Config, data: st.DataObject) -> None:
    """Whatever stands in a config.json, the answer is a shape with sane figures or a ConfigError."""
    config = base | data.draw(st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=4))
    try:
        shape = ModelShape.from_config(config)
    except ConfigError:
        return
    assert shape.kv_bytes_per_token >= 0 and shape.chunk_bytes > 0
    assert shape.tier_bytes_per_token >= shape.kv_bytes_per_token
    assert 0 <= shape.load_bytes(1000) <= 1000 * shape.kv_bytes_per_token + (shape.state_bytes or 0)
