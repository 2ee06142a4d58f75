"""Models that answer with vectors, and models of whose texts nothing can be kept."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from hotspan.config.settings import CacheOptions
from hotspan.core.errors import ConfigError
from hotspan.engine.arguments import parse_engine_arguments, transfer_config, why_no_tiers
from kit.engine import rig
from kit.families.make import make_family, save
from kit.families.table import FAMILIES

pytestmark = pytest.mark.engine


def family(name: str) -> Any:
    (found,) = [each for each in FAMILIES if each.name == name]
    return found


@pytest.fixture(scope="module")
def encoder(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """BERT's shape."""
    import transformers

    directory = tmp_path_factory.mktemp("bert") / "model"
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    save(transformers.BertModel(transformers.BertConfig(vocab_size=1024, **sizes)), directory)
    shutil.copy(tiny_model / "tokenizer.json", directory)
    options = json.loads((tiny_model / "tokenizer_config.json").read_text())
    (directory / "tokenizer_config.json").write_text(
        json.dumps(options | {"tokenizer_class": "PreTrainedTokenizerFast"})
    )
    return directory


@pytest.mark.slow
def test_embeddings_of_a_decoder_hit(tiny_model: Path) -> None:
    """An embedding model with causal attention loads what it has stored, and gives the vector of its own hit."""
    with rig(tiny_model, runner="pooling", convert="embed") as engine:
        text = {"prompt_token_ids": engine.text(1, 1500)}

        def vector() -> list[float]:
            return list(engine.llm.embed([text], use_tqdm=False)[0].outputs.embedding)

        vector()
        own = vector()
        engine.settle()
        engine.forget_gpu()
        before = engine.digests.loaded
        assert vector() == pytest.approx(own, abs=1e-5)
        assert engine.digests.loaded == before + 1500 // 256 * 2 and engine.digests.wrong == 0


def test_an_encoder_is_served_without_tiers(encoder: Path) -> None:
    """Nothing of a text that attends both ways can be kept; a causal model's can."""
    reason = why_no_tiers(parse_engine_arguments(str(encoder), []))
    assert reason is not None and reason.endswith("with BertModel")


def test_hybrids_without_prefix_caching_are_served_without_tiers(tiny_model: Path, tmp_path: Path) -> None:
    """Without it the engine keeps no recurrent states at the ends of blocks; with it tiers are of use."""
    model = make_family(family("Qwen3-Next"), tmp_path / "model", tiny_model)
    assert why_no_tiers(parse_engine_arguments(str(model), [])) is None
    reason = why_no_tiers(parse_engine_arguments(str(model), ["--no-enable-prefix-caching"]))
    assert reason is not None and "--no-enable-prefix-caching" in reason
    assert why_no_tiers(parse_engine_arguments(str(tiny_model), ["--no-enable-prefix-caching"])) is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options", "error"),
    [
        ("encoder", {"runner": "pooling"}, "nothing of a text that another request could use"),
        ("Qwen3-Next", {"enable_prefix_caching": False, "dtype": "bfloat16"}, "--enable-prefix-caching"),
    ],
)
def test_engines_of_others_are_told_why(
    name: str, options: dict[str, Any], error: str, encoder: Path, tiny_model: Path, tmp_path: Path
) -> None:
    """Where hotspan is put into an engine that somebody else starts, the engine ends with the reason."""
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    model = encoder if name == "encoder" else make_family(family(name), tmp_path / "model", tiny_model)
    settings = CacheOptions(ram_gib=0.05).settings()
    try:
        with pytest.raises(ConfigError, match=error):
            LLM(
                str(model),
                kv_transfer_config=transfer_config(settings),
                prefix_caching_hash_algo="sha256_cbor",
                gpu_memory_utilization=0.05,
                enforce_eager=True,
                max_model_len=512,
                **options,
            )
    finally:
        cleanup_dist_env_and_memory()
