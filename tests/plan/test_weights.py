"""How large a model's weights are, and where they lie."""

import json
from pathlib import Path

import pytest

from hotspan.core.errors import ConfigError
from hotspan.plan.weights import model_directory, weights_bytes


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
