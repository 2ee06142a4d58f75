"""The router's bytes of a chat are those of the engine's tokens, for the real tokenizers of known families.

The engine's own renderer makes the token ids, without an engine core. Chats are drawn from a seed (chats.py). A family
whose package can't be had is skipped with the reason (`make real-model`).
"""

import asyncio
import json
import shutil
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from hotspan.core.errors import ConfigError
from hotspan.demo.trained import trained_model
from hotspan.router.prompt import prompt_of
from hotspan.router.text import Prompts
from hotspan.router.types import PIECE_BYTES
from kit.real_tokenizers import tokenizer
from tests.router.chats import chats

pytestmark = pytest.mark.engine

CHAT = "/v1/chat/completions"
COUNT, GATE_COUNT = 150, 12
MOST_DRAWN = 600
"""Some templates refuse some chats; so many are drawn at most to have COUNT that are taken."""

LLAMA = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": 262144,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "dtype": "float32",
}
MLA = {
    "kv_lora_rank": 32,
    "q_lora_rank": None,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 1,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "smollm2": {},
    "qwen3": {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]},
    "llama3_1": {"model_type": "llama", "architectures": ["LlamaForCausalLM"]},
    "deepseek_v3": {"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], **MLA},
    "mistral_nemo": {"model_type": "mistral", "architectures": ["MistralForCausalLM"]},
    "gemma3": {"model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"]},
    "gptoss": {
        "model_type": "gpt_oss",
        "architectures": ["GptOssForCausalLM"],
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "layer_types": ["full_attention"],
    },
}


def directory_of(family: str, work: Path) -> Path:
    """The family's tokenizer with a configuration of its kind, as small as may be."""
    try:
        if family == "smollm2":
            return trained_model().path
        shutil.copytree(tokenizer(family), work / family)
    except ConfigError as error:
        pytest.skip(str(error))
    (work / family / "config.json").write_text(json.dumps(LLAMA | FAMILIES[family]))
    return work / family


def renderer(directory: Path) -> Any:
    """What turns bodies into token ids in the engine's server."""
    from vllm.config import ModelConfig, VllmConfig
    from vllm.renderers.online_renderer import OnlineRenderer
    from vllm.renderers.registry import renderer_from_config

    model = ModelConfig(model=str(directory), tokenizer=str(directory), dtype="float32", max_model_len=8192)
    config = VllmConfig(model_config=model)
    is_harmony = model.hf_config.model_type == "gpt_oss"
    return OnlineRenderer(
        config.model_config,
        renderer_from_config(config),
        request_logger=None,
        chat_template=None,
        chat_template_content_format="auto",
        enable_auto_tools=True,
        tool_parser=None if is_harmony else "hermes",
    )


def taken(engine: Any, seed: int) -> Iterator[tuple[dict[str, Any], list[int]]]:
    """Chats that the engine takes, with their token ids."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.exceptions import VLLMValidationError

    for body in islice(chats(seed), MOST_DRAWN):
        try:
            rendered = asyncio.run(engine.render_chat(ChatCompletionRequest(**json.loads(json.dumps(body)))))
        except VLLMValidationError:  # the template refuses it
            continue
        yield body, rendered[1][0]["prompt_token_ids"]


@pytest.mark.parametrize(
    ("family", "count"),
    [
        *((family, GATE_COUNT) for family in ("qwen3", "gemma3", "gptoss")),
        *(pytest.param(family, COUNT, marks=pytest.mark.slow) for family in FAMILIES),
    ],
)
def test_the_routers_bytes_are_the_engines(family: str, count: int, tmp_path: Path) -> None:
    """Chats with tools, thoughts, lists and many scripts: the same bytes, or both too short for a piece."""
    directory = directory_of(family, tmp_path)
    router, engine = Prompts.load(directory), renderer(directory)
    seen = 0
    for body, ids in islice(taken(engine, seed=7), count):
        theirs, ours = router.join(ids), router._bytes(prompt_of(CHAT, body), body)
        assert theirs is not None
        assert ours == theirs or (ours is None and len(theirs) < PIECE_BYTES), json.dumps(body)
        seen += 1
    assert seen == count and router.failed == 0
