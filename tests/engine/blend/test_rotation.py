"""Rotation: fitted to keys of real models, it moves keys to where the model itself puts them, or is refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from hotspan.engine.blend.rotation import FIT_SHIFTS, Fit, Pairing, Rotation, Sample, fit_rotation

TOKENS, CHECK, LENGTH = 24, 40_001, 131_072
SHIFTS = (0, *FIT_SHIFTS, CHECK)
SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": LENGTH,
    "pad_token_id": 0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 32_768}
LINEAR = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}


def llama(**options: Any) -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, **options))


def gptj() -> Any:
    sizes = {"n_embd": 64, "n_head": 2, "n_layer": 2, "rotary_dim": 16, "n_inner": 64}
    return transformers.GPTJForCausalLM(transformers.GPTJConfig(vocab_size=64, n_positions=LENGTH, **sizes))


def partial(kind: str, share: float) -> Any:
    """Of a model that turns a part of each head."""
    config = getattr(transformers, f"{kind}Config")(**SMALL)
    config.partial_rotary_factor = share
    config.rope_parameters = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": share}
    return getattr(transformers, f"{kind}ForCausalLM")(config)


def gemma3() -> Any:
    options = {"head_dim": 16, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
    return transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**SMALL, **options))


def opt() -> Any:
    sizes = {"hidden_size": 64, "ffn_dim": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.OPTConfig(vocab_size=64, word_embed_proj_dim=64, max_position_embeddings=LENGTH, **sizes)
    return transformers.OPTForCausalLM(config)


MODELS: dict[str, tuple[Callable[[], Any], Pairing]] = {
    "llama": (llama, Pairing.HALVES),
    "llama-3": (lambda: llama(rope_parameters=LLAMA3), Pairing.HALVES),
    "yarn": (lambda: llama(rope_parameters=YARN), Pairing.HALVES),
    "linear": (lambda: llama(rope_parameters=LINEAR), Pairing.HALVES),
    "qwen2": (
        lambda: transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SMALL, max_window_layers=2)),
        Pairing.HALVES,
    ),
    "phi": (lambda: partial("Phi", 0.5), Pairing.HALVES),
    "glm": (lambda: partial("Glm", 0.5), Pairing.NEIGHBOURS),
    "gpt-j": (gptj, Pairing.NEIGHBOURS),
    "gemma3": (gemma3, Pairing.HALVES),
}


def kv(model: Any, ids: torch.Tensor, shift: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Each layer's keys and values of a text that begins at `shift`."""
    positions = torch.arange(shift, shift + ids.shape[1])[None]
    with torch.inference_mode():
        cache = model(input_ids=ids, position_ids=positions, use_cache=True).past_key_values
    return [(layer.keys[0].transpose(0, 1), layer.values[0].transpose(0, 1)) for layer in cache.layers]


def samples(build: Callable[[], Any], dtype: torch.dtype = torch.float32) -> list[Sample]:
    """A random model's keys and values, layer by layer."""
    torch.manual_seed(0)
    model = build().to(dtype).eval()
    ids = torch.randint(1, 64, (1, TOKENS))
    found = {shift: kv(model, ids, shift) for shift in SHIFTS}
    return [
        Sample(
            {shift: layers[n][0] for shift, layers in found.items()},
            {shift: layers[n][1] for shift, layers in found.items()},
            CHECK,
        )
        for n in range(len(found[0]))
    ]


def fits(layers: list[Sample]) -> list[Fit]:
    made: list[Fit] = []
    for sample in layers:
        made.append(fit_rotation(sample, made[-1].rotation if made else None))
    return made


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, torch.float32) for name in MODELS), *((name, torch.bfloat16) for name in ("llama-3", "glm", "gemma3"))],
    ids=str,
)
def test_keys_of_real_models_are_moved_to_where_the_model_puts_them(name: str, dtype: torch.dtype) -> None:
    """Default, Llama-3, YaRN and linear scaling; whole and partial heads; both pairings; thetas by layer."""
    build, pairing = MODELS[name]
    layers = samples(build, dtype)
    for sample, fit in zip(layers, fits(layers), strict=True):
        assert fit.is_good, (fit.key_residual, fit.value_residual)
        assert fit.rotation.pairing is pairing
        if dtype is torch.float32:
            assert fit.key_residual < 3e-4
            back = fit.rotation.moved(sample.keys[4096], -4096)
            assert torch.allclose(back, sample.keys[0], atol=2e-4 * float(sample.keys[0].abs().max()), rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_learnt_positions_are_refused(dtype: torch.dtype) -> None:
    """OPT adds its positions to the hidden state: no rotation explains its keys, and its values change too."""
    assert not any(fit.is_good for fit in fits(samples(opt, dtype)))


def test_scaling_that_depends_on_the_length_is_refused() -> None:
    """Dynamic NTK scaling gives other angles to longer texts: no rotation holds for all of them."""
    dynamic = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0}
    config = transformers.LlamaConfig(**SMALL | {"max_position_embeddings": 8192}, rope_parameters=dynamic)
    assert not any(fit.is_good for fit in fits(samples(lambda: transformers.LlamaForCausalLM(config))))


def test_a_layer_without_positions_moves_nothing() -> None:
    """Keys that do not depend on the position are taken as they are."""
    keys, values = torch.randn(2, TOKENS, 2, 16, generator=torch.Generator().manual_seed(0))
    sample = Sample(dict.fromkeys(SHIFTS, keys), dict.fromkeys(SHIFTS, values), CHECK)
    fit = fit_rotation(sample)
    assert fit.is_good and fit.rotation.pairing is Pairing.NONE
    assert fit.rotation.moved(keys, 77) is keys


def test_keys_that_are_no_numbers_are_refused() -> None:
    """A layer that overflows fits nothing."""
    keys = torch.full((TOKENS, 2, 16), torch.nan)
    assert not fit_rotation(Sample(dict.fromkeys(SHIFTS, keys), dict.fromkeys(SHIFTS, keys), CHECK)).is_good


def test_a_sample_without_its_check_is_refused() -> None:
    """Without a shift that it was not fitted to, nothing is known of a fit."""
    keys = torch.zeros(TOKENS, 2, 16)
    with pytest.raises(ValueError, match="tested at 5"):
        fit_rotation(Sample({0: keys, 1: keys}, {0: keys}, 5))


ROTATIONS = st.builds(
    lambda pairing, size, angles: Rotation(
        pairing, size, torch.tensor(angles[: size // 2], dtype=torch.float64).reshape(size // 2)
    ),
    st.sampled_from([Pairing.HALVES, Pairing.NEIGHBOURS]),
    st.integers(1, 8).map(lambda half: 2 * half),
    st.lists(st.floats(1e-6, 1.0), min_size=8, max_size=8),
)
MOVES = st.integers(-(10**5), 10**5)


@given(ROTATIONS, MOVES, MOVES, st.integers(0, 9))
@settings(max_examples=30)
def test_moves_add_up(rotation: Rotation, one: int, two: int, seed: int) -> None:
    """Two moves are one by their sum, a move and its opposite are none, and lengths of keys stay."""
    keys = torch.randn(3, 2, 16, generator=torch.Generator().manual_seed(seed))
    once = rotation.moved(keys, one + two)
    assert torch.allclose(rotation.moved(rotation.moved(keys, one), two), once, atol=1e-5)
    assert torch.allclose(rotation.moved(rotation.moved(keys, one), -one), keys, atol=1e-5)
    assert torch.allclose(once.norm(dim=-1), keys.norm(dim=-1), rtol=1e-5)
    assert torch.equal(once[..., rotation.size :], keys[..., rotation.size :])


@given(ROTATIONS, st.sampled_from([torch.float32, torch.float16, torch.bfloat16]))
def test_keys_that_stay_keep_their_bits(rotation: Rotation, dtype: torch.dtype) -> None:
    """A window at its old position is not rounded; whatever the shift, the type stays."""
    keys = torch.randn(3, 2, 16, generator=torch.Generator().manual_seed(1)).to(dtype)
    assert torch.equal(rotation.moved(keys, 0), keys)
    assert rotation.moved(keys, 5).dtype is dtype
