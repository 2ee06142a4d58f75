"""What the installed engine counts of a model, beside what its config.json was read as (shape.py).

Where the two differ one of them is wrong, and a plan that rests on either is refused. Without vLLM, and for a model
that it has no class for or that needs code from its repository, there is nothing to compare.
"""

import logging
from pathlib import Path
from typing import Final

from hotspan.core.errors import ConfigError
from hotspan.plan.shape import ModelShape
from hotspan.plan.states import DTYPE_BYTES
from hotspan.plan.tiers import Reason

logger = logging.getLogger(__name__)

_WHAT: Final = "KV by vLLM"
_SET_BY_CLASS: Final = ("gpt_bigcode",)
"""Types of models whose class has other heads than vLLM counts in their configuration."""


def engine_values(directory: Path) -> int | None:
    """Values that vLLM counts for one token in a layer with attention: keys and values, or latents; None if it can't.

    Takes seconds where vLLM is not imported yet.
    """
    said = logging.getLogger("vllm")
    level = said.level
    try:
        said.setLevel(logging.CRITICAL + 1)  # what it can't read is not its user's fault here
        import vllm.config  # noqa: F401  its modules import each other: this one comes first
        from vllm.transformers_utils.config import get_config, get_hf_text_config
        from vllm.transformers_utils.model_arch_config_convertor import (
            MODEL_ARCH_CONFIG_CONVERTORS,
            ModelArchConfigConvertorBase,
        )

        config = get_config(str(directory), trust_remote_code=False)
        if config.model_type in _SET_BY_CLASS:
            return None
        kind = MODEL_ARCH_CONFIG_CONVERTORS.get(config.model_type, ModelArchConfigConvertorBase)
        read = kind(config, get_hf_text_config(config))
        size = int(read.get_head_size())
        return size if read.is_deepseek_mla() else 2 * int(read.get_total_num_kv_heads()) * size
    except Exception as error:  # not installed, of another release, or it does not know the model
        logger.info("engine_not_asked model=%s error=%s", directory, error)
        return None
    finally:
        said.setLevel(level)


def check_shape(directory: Path) -> Reason:
    """Whether vLLM counts as many values of a token as hotspan, in words.

    Raises: ConfigError if it counts others.
    """
    shape = ModelShape.from_config(directory)
    sizes = {layers.token_bytes for layers in shape.layers if layers.token_bytes}
    if len(sizes) != 1 or shape.kv_dtype not in DTYPE_BYTES or (values := engine_values(directory)) is None:
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
