"""How many values vLLM counts for a token of a model, by its own reading of the configuration."""

import logging
from pathlib import Path
from typing import Final

logger = logging.getLogger(__name__)

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
