"""How large a model's weights are, and where they lie."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from hotspan.core.errors import ConfigError
from hotspan.plan.weights import Weights, dense_parameters, find_weights, model_directory, weights_bytes

from . import models


def write(directory: Path, **sizes: int) -> None:
    for name, size in sizes.items():
        (directory / name.replace("__", "-").replace("_DOT_", ".")).write_bytes(bytes(size))


def test_safetensors_count_and_else_bin_files(tmp_path: Path) -> None:
    """Safetensors are the model where there are any; else its *.bin, without what a training left."""
    write(tmp_path, pytorch_model__1_DOT_bin=300, pytorch_model__2_DOT_bin=200, training_args_DOT_bin=9)
    assert weights_bytes(tmp_path) == 500
    write(tmp_path, model__1_DOT_safetensors=70, model__2_DOT_safetensors=30)
    assert weights_bytes(tmp_path) == 100
    assert weights_bytes(tmp_path / "..") == 0


def test_a_model_that_is_there_twice_counts_once(tmp_path: Path) -> None:
    """What the index names is the model: a consolidated copy beside it is not loaded."""
    write(tmp_path, a_DOT_safetensors=70, b_DOT_safetensors=30, consolidated_DOT_safetensors=100)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"x": "a.safetensors", "y": "b.safetensors", "z": "a.safetensors"}}))
    assert weights_bytes(tmp_path) == 100
    for broken in ("", "[]", '{"weight_map": 3}'):
        index.write_text(broken)
        assert weights_bytes(tmp_path) == 200, "an index that says nothing is no index"


def test_an_index_without_its_files_gives_the_size(tmp_path: Path) -> None:
    """Where a file of the index is missing, its total counts; with all of them, the files do."""
    index = {"metadata": {"total_size": 5000}, "weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert weights_bytes(tmp_path) == 5000
    assert find_weights(tmp_path) == Weights(5000, "total_size of model.safetensors.index.json")
    write(tmp_path, a_DOT_safetensors=70)
    assert weights_bytes(tmp_path) == 5000
    write(tmp_path, b_DOT_safetensors=30)
    assert weights_bytes(tmp_path) == 100


QWEN2_7B = models.QWEN_7B | {"intermediate_size": 18944, "vocab_size": 152064}
PUBLISHED: Mapping[str, tuple[models.Config, int]] = {
    "Qwen2.5-7B": (QWEN2_7B, 7_615_616_512),
    "Qwen2.5-1.5B": (
        QWEN2_7B
        | {"hidden_size": 1536, "num_attention_heads": 12, "num_key_value_heads": 2, "intermediate_size": 8960}
        | {"vocab_size": 151936, "tie_word_embeddings": True},
        1_543_714_304,
    ),
    "Qwen2.5-72B": (
        QWEN2_7B
        | {"hidden_size": 8192, "num_attention_heads": 64, "num_key_value_heads": 8, "intermediate_size": 29568}
        | {"num_hidden_layers": 80},
        72_706_203_648,
    ),
    "Qwen3-8B": (
        QWEN2_7B
        | {"model_type": "qwen3", "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8}
        | {"intermediate_size": 12288, "vocab_size": 151936, "num_hidden_layers": 36, "head_dim": 128},
        8_190_735_360,
    ),
    "Llama-3.1-70B": (models.LLAMA_70B | {"intermediate_size": 28672, "vocab_size": 128256}, 70_553_706_496),
    "Mistral-7B-v0.1": (models.MISTRAL_7B | {"intermediate_size": 14336, "vocab_size": 32000}, 7_241_732_096),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_dense_models_config_gives_its_parameters(name: str) -> None:
    """Exactly as many as its published files have."""
    config, parameters = PUBLISHED[name]
    assert dense_parameters(config) == parameters


@pytest.mark.parametrize(
    "changed",
    [{"model_type": "mixtral"}, {"quantization_config": {"quant_method": "awq"}}, {"vocab_size": None}],
)
def test_no_size_is_made_up(changed: models.Config, tmp_path: Path) -> None:
    """For another architecture, a quantised model or an incomplete config the size is unknown, with the reason."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN2_7B | changed))
    found = find_weights(tmp_path)
    assert found.bytes is None and "config.json is not enough" in found.why


def test_a_config_alone_gives_the_weights_in_the_engines_type(tmp_path: Path) -> None:
    """Two bytes a parameter, and four with --dtype float32."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN2_7B))
    assert find_weights(tmp_path).bytes == 2 * 7_615_616_512
    assert find_weights(tmp_path, "float32").bytes == 4 * 7_615_616_512


def test_links_count_as_what_they_point_to(tmp_path: Path) -> None:
    """A hub snapshot is made of links to blobs."""
    write(tmp_path, blob=123)
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot" / "model.safetensors").symlink_to(tmp_path / "blob")
    assert weights_bytes(tmp_path / "snapshot") == 123


def test_a_model_is_found_by_its_path_or_in_the_hubs_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory is itself; a hub id is its downloaded snapshot; what is neither is an error that says what to do."""
    assert model_directory(str(tmp_path)) == tmp_path
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    for missing in ("/no/such/model", "nobody/no-such-model", "a b"):
        with pytest.raises(ConfigError, match="is not on this machine"):
            model_directory(missing)
    repository = tmp_path / "models--somebody--some-model"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("abc")
    (repository / "snapshots" / "abc").mkdir(parents=True)
    assert model_directory("somebody/some-model") == repository / "snapshots" / "abc"
