"""What the installed engine counts of a model, beside what its config.json was read as (shape.py).

Where the two differ one of them is wrong, and a plan that rests on either is refused. Without vLLM, and for a model
that it has no class for or that needs code from its repository, there is nothing to compare.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Final

from hotspan.core.errors import ConfigError
from hotspan.plan.shape import ModelShape
from hotspan.plan.states import DTYPE_BYTES
from hotspan.plan.tiers import Reason

_WHAT: Final = "KV by vLLM"


def check_shape(directory: Path, ask: Callable[[Path], int | None]) -> Reason:
    """Whether vLLM counts as many values of a token as hotspan, in words.

    ask: how many it counts (`engine.model_values`); None if it can't.

    Raises: ConfigError if it counts others.
    """
    shape = ModelShape.from_config(directory)
    sizes = {layers.token_bytes for layers in shape.layers if layers.token_bytes}
    if len(sizes) != 1 or shape.kv_dtype not in DTYPE_BYTES or (values := ask(directory)) is None:
        return Reason(_WHAT, "not asked", "vLLM is not installed, or can't read this model: KV is by config.json alone")
    (size,) = sizes
    ours = size // DTYPE_BYTES[shape.kv_dtype]
    if ours != values:
        raise ConfigError(
            f"{directory}: vLLM keeps {values:,} values of a token in each layer, and hotspan reads {ours:,} from "
            "config.json, so a plan for this model would be wrong. Start `hotspan serve` with it: its log says what a "
            "token takes"
        )
    return Reason(_WHAT, "the same", f"{values:,} values of a token in each layer that keeps any")
