"""From an engine's model runner to blending in it, if it can blend."""

from collections.abc import Callable
from typing import Any

from hotspan.engine.blend.selftest import CanNotBlend, self_test
from hotspan.engine.blend.steps import BlendSteps

__all__ = ["CanNotBlend", "started"]


def started(runner: Any, spec: Any, slot: Callable[[int], memoryview]) -> BlendSteps:
    """What carries out the scheduler's orders. Blocks: for the self-test. Raises: CanNotBlend that says why it can't.

    spec: of hotspan's tiers. slot: the memory of a slot.
    """
    tokens = spec.blocks_per_chunk * runner.kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
    forward, rotations, speed = self_test(runner, spec.rank_bytes, tokens)
    return BlendSteps(forward, rotations, lambda index: slot(index)[: spec.rank_bytes], tokens, speed)
