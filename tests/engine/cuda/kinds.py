"""Kinds of KV caches that a simulated device may hold: layers, their pages, and the order of their axes in memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, MLAAttentionSpec, SlidingWindowSpec

from hotspan.engine.contract import ENGINE

WINDOW = 512
_SHARDS: dict[str, Any] = {"max_tp_shards": 1} if "max_tp_shards" in {f.name for f in fields(MLAAttentionSpec)} else {}


def _full(size: int, **other: Any) -> FullAttentionSpec:
    options: dict[str, Any] = {"num_kv_heads": 1, "head_size": 8, "dtype": torch.bfloat16}
    return FullAttentionSpec(block_size=size, **(options | other))


def _window(size: int) -> SlidingWindowSpec:
    return SlidingWindowSpec(block_size=size, num_kv_heads=1, head_size=8, dtype=torch.bfloat16, sliding_window=WINDOW)


def _state(size: int) -> MambaSpec:
    shape = (_full(size).page_size_bytes // 4,)
    return MambaSpec(block_size=size, shapes=(shape,), dtypes=(torch.float32,), mamba_cache_mode="align")


def _latent(size: int) -> MLAAttentionSpec:
    return MLAAttentionSpec(block_size=size, num_kv_heads=1, head_size=24, dtype=torch.bfloat16, **_SHARDS)


@dataclass(frozen=True)
class Kind:
    """layers: each one's spec for blocks of a size. layout: the engine's. is_replicated: all ranks hold the same."""

    name: str
    layers: Callable[[int], list[Any]]
    layout: str = "LBHNC"
    is_replicated: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)


ALL_KINDS = {
    kind.name: kind
    for kind in (
        Kind("full", lambda size: [_full(size)] * 3),
        Kind("heads last", lambda size: [_full(size, num_kv_heads=2)] * 2, layout="LBNHC"),
        Kind("across layers", lambda size: [_full(size)] * 3, layout="BLHNC"),
        Kind("windows", lambda size: [_full(size), _window(size)]),
        Kind("windows across layers", lambda size: [_full(size), _window(size)], layout="BLHNC"),
        Kind("states", lambda size: [_full(size), _state(size)], options={"enable_prefix_caching": True}),
        Kind("latents", lambda size: [_latent(size)] * 3, is_replicated=True),
        # A byte per number, and scales of another size behind them.
        Kind("fp8", lambda size: [_full(size, head_size=16, head_size_v=20, dtype=torch.uint8)] * 2),
    )
}

KINDS = {
    name: kind
    for name, kind in ALL_KINDS.items()
    if (ENGINE >= (0, 29) or kind.layout == "LBHNC") and (ENGINE >= (0, 27) or name != "states")
}
"""Those that hotspan takes with the installed vLLM: until 0.28 a layer's blocks lie in a tensor of their own, and with
0.26 it refuses recurrent states, of which this search finds another text's."""
