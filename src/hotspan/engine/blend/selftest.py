"""Whether this engine can blend: checked at its start, in blocks that nobody uses yet.

What is checked is what blending relies on: any runs give the same bits as one run, K and V can be read and written,
and each layer's keys can be moved to other positions. Whatever fails turns blending off, with a reason.
"""

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec

from hotspan.engine.blend.forward import EngineForward
from hotspan.engine.blend.orders import Speed
from hotspan.engine.blend.rotation import FIT_SHIFTS, LIMITS, Fit, Rotation, Sample, fit_rotation, residual
from hotspan.engine.blend.runs import Run

_FIT_TOKENS = 24
_GARBAGE = 7.0
_EDGES = (1, 2, 5, 40, 41)
"""Ends of short runs; the others are `_RUN_TOKENS` long."""

_RUN_TOKENS = 16


class CanNotBlend(Exception):
    """Why an engine can't blend."""


class Tested(NamedTuple):
    """An engine that can blend. rotations: of its layers."""

    forward: EngineForward
    rotations: list[Rotation]
    speed: Speed


def self_test(runner: Any, slot_bytes: int, window_tokens: int) -> Tested:
    """What is needed to blend with this runner. Blocks: for a few forwards of up to 3 blocks of tokens.

    slot_bytes: of RAM for a window of `window_tokens` tokens.
    Mutates:    free blocks of the KV cache, which are zero afterwards.
    Raises:     CanNotBlend that says why it can't be.
    """
    if reason := unsupported(runner.vllm_config, runner.kv_cache_config):
        raise CanNotBlend(reason)
    try:
        forward = EngineForward(runner)
        needed = len(forward.layers) * window_tokens * int(np.prod(forward.token_shape)) * forward.dtype.itemsize
        if needed > slot_bytes:
            raise CanNotBlend(f"a window of {window_tokens} tokens takes {needed} bytes, and a slot has {slot_bytes}")
        return _tested(runner, forward)
    except CanNotBlend:
        raise
    except Exception as error:  # an engine that can't blend serves all the same
        raise CanNotBlend(f"the engine's interfaces are not as expected ({type(error).__name__}: {error})") from error


def unsupported(config: Any, kv_cache: Any) -> str | None:
    """The first property of an engine that blending was not tested with; None if there is none."""
    model, parallel, groups = config.model_config, config.parallel_config, kv_cache.kv_cache_groups
    spec: Any = groups[0].kv_cache_spec if len(groups) == 1 else None
    reasons = {
        "pipeline, data or context parallelism": parallel.world_size > parallel.tensor_parallel_size
        or parallel.data_parallel_size > 1
        or parallel.decode_context_parallel_size > 1,
        "LoRA adapters": config.lora_config is not None,
        "speculative decoding": config.speculative_config is not None,
        "a multimodal model": model.is_multimodal_model,
        "an encoder-decoder model": model.is_encoder_decoder,
        "prompt embeddings": model.enable_prompt_embeds,
        "a quantised KV cache": config.cache_config.cache_dtype != "auto",
        "KV events, which would publish approximate blocks": config.kv_events_config is not None
        and config.kv_events_config.enable_kv_cache_events,
        "several KV cache groups": len(groups) != 1,
        "other than full attention": type(spec) is not FullAttentionSpec
        or spec.sliding_window is not None
        or spec.attention_chunk_size is not None,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def _tested(runner: Any, forward: EngineForward) -> Tested:
    blocks = 1 + max(1, -(-64 // forward.block_tokens))  # block 0 is the engine's own
    if runner.kv_cache_config.num_blocks < 2 * blocks + 1:
        raise CanNotBlend("the engine's KV cache is too small to try it")
    count = min((blocks - 1) * forward.block_tokens + 13, runner.model_config.max_model_len)
    vocabulary = runner.model_config.get_vocab_size()
    tokens = np.random.default_rng(0).integers(0, vocabulary, count).astype(np.uint32)
    whole, pieces = list(range(1, 1 + blocks)), list(range(1 + blocks, 1 + 2 * blocks))
    try:
        token_s = _check_runs(forward, tokens, whole, pieces)
        move_s = _check_writing(forward, count, whole, pieces)
        rotations = _fitted(forward, tokens[:_FIT_TOKENS], whole, runner.model_config.max_model_len)
    finally:
        forward.fill([*whole, *pieces], 0.0)
    return Tested(forward, rotations, Speed(token_s, move_s, len(forward.layers)))


def _check_runs(forward: EngineForward, tokens: np.ndarray[Any, Any], whole: list[int], pieces: list[int]) -> float:
    """Many runs give the bits of one, whatever was in the blocks before; several forwards the same but for rounding.

    Returns the seconds that a token takes.
    """
    everything = Run(0, len(tokens))
    forward.compute(tokens, whole, [everything])
    began_s = time.perf_counter()
    forward.compute(tokens, whole, [everything])
    token_s = (time.perf_counter() - began_s) / len(tokens)
    ends = sorted({end for end in (*_EDGES, *range(48, len(tokens), _RUN_TOKENS)) if end < len(tokens)})
    many = [Run(start, stop) for start, stop in zip([0, *ends], [*ends, len(tokens)], strict=True)]
    for order in (many, [Run(0, ends[-1]), Run(ends[-1], len(tokens))]):
        forward.fill(pieces, _GARBAGE)
        forward.compute(tokens, pieces, order)
        _check_same(forward, everything, whole, pieces, f"{len(order)} runs differ from one")
    forward.fill(pieces, _GARBAGE)
    for run in many:  # one forward each, as in several steps
        forward.compute(tokens, pieces, [run])
    for layer in range(len(forward.layers)):  # matrices of other sizes may be rounded otherwise, as in any prefill
        off = residual(forward.read(pieces, everything, layer), forward.read(whole, everything, layer))
        if forward.is_any(off > LIMITS.get(forward.dtype, 0.0)):
            raise CanNotBlend(f"several forwards differ from one by {off:.1e} (layer {layer})")
    return token_s


def _check_writing(forward: EngineForward, count: int, whole: list[int], pieces: list[int]) -> float:
    """What was read can be written elsewhere. Returns the seconds that a token takes."""
    run = Run(0, count)
    forward.fill(pieces, _GARBAGE)
    began_s = time.perf_counter()
    for layer in range(len(forward.layers)):
        read = forward.read(whole, run, layer)
        forward.write(pieces, run, layer, read[:, 0], read[:, 1])
    move_s = (time.perf_counter() - began_s) / count
    _check_same(forward, run, whole, pieces, "K and V are not what was written")
    return move_s


def _check_same(forward: EngineForward, run: Run, one: Sequence[int], other: Sequence[int], otherwise: str) -> None:
    for layer in range(len(forward.layers)):
        if forward.is_any(not torch.equal(forward.read(one, run, layer), forward.read(other, run, layer))):
            raise CanNotBlend(f"{otherwise} (layer {layer})")


def _fitted(forward: EngineForward, tokens: np.ndarray[Any, Any], blocks: list[int], max_tokens: int) -> list[Rotation]:
    """How each layer's keys depend on their positions."""
    run, last = Run(0, len(tokens)), max_tokens - len(tokens)
    check = last - 7 if last - 7 not in FIT_SHIFTS else last - 6
    keys: list[dict[int, torch.Tensor]] = [{} for _ in forward.layers]
    values: list[dict[int, torch.Tensor]] = [{} for _ in forward.layers]
    if check <= 1:
        raise CanNotBlend(f"a model of {max_tokens} tokens is too short to move keys in")
    for shift in (0, *(each for each in FIT_SHIFTS if each <= last), check):
        forward.compute(tokens, blocks, [run], shift)
        for layer in range(len(forward.layers)):
            read = forward.read(blocks, run, layer)
            keys[layer][shift], values[layer][shift] = read[:, 0], read[:, 1]
    fits: list[Fit] = []
    for layer in range(len(forward.layers)):
        fit = fit_rotation(Sample(keys[layer], values[layer], check), fits[-1].rotation if fits else None)
        if forward.is_any(not fit.is_good):
            raise CanNotBlend(f"keys of layer {layer} can't be moved: they are {fit.key_residual:.1e} off")
        fits.append(fit)
    return [fit.rotation for fit in fits]
