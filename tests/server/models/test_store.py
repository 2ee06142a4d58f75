"""Which directory is a store of several models."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from hotspan.cli.main import app
from hotspan.config.own import CommandLine
from hotspan.core.errors import ConfigError
from hotspan.server.models.store import model_store, stored_models


def make(directory: Path, *models: str, files: tuple[str, ...] = ()) -> Path:
    for name in models:
        (directory / name).mkdir(parents=True)
        (directory / name / "config.json").write_text("{}")
    for name in files:
        (directory / name).touch()
    return directory


def names(directory: Path) -> list[str] | None:
    found = stored_models(directory)
    return None if found is None else [model.name for model in found]


def test_every_entry_is_a_model(tmp_path: Path) -> None:
    """Directories and archives are models, by their names without endings; what is hidden is not looked at."""
    store = make(tmp_path / "s", "b", "a", files=("c.tar.gz", "D-1.zip", ".cache"))
    assert names(store) == ["D-1", "a", "b", "c"]
    found = {model.name: model.is_archive for model in stored_models(store) or ()}
    assert found == {"D-1": True, "a": False, "b": False, "c": True}


def test_what_is_one_model(tmp_path: Path) -> None:
    """A model with directories, one directory alone, a stray file, and nothing at all are no stores."""
    assert names(make(tmp_path / "model", "adapters", "more", files=("config.json",))) is None
    assert names(make(tmp_path / "alone", "a")) is None
    assert names(make(tmp_path / "stray", "a", "b", files=("README",))) is None
    (tmp_path / "empty").mkdir()
    assert names(tmp_path / "none") is None and names(tmp_path / "empty") is None
    (tmp_path / "packed").mkdir()
    assert names(make(tmp_path / "packed", files=("a.tgz",))) == ["a"]


def test_entries_that_can_not_be_served(tmp_path: Path) -> None:
    """A directory without a model, two entries of one name and a name for no URL are errors that name the entry."""
    (make(tmp_path / "notes", "a", "b") / "notes").mkdir()
    with pytest.raises(ConfigError, match="notes/notes is no model"):
        stored_models(tmp_path / "notes")
    with pytest.raises(ConfigError, match="are both called a"):
        stored_models(make(tmp_path / "twice", "a", "b", files=("a.zip",)))
    with pytest.raises(ConfigError, match="can't be a model's name"):
        stored_models(make(tmp_path / "blank", "a", "b c"))


def test_who_is_named_counts(tmp_path: Path) -> None:
    """MODEL beats HF_MODEL_ID beats the container; a store is one wherever it is named; else there is one model."""
    container, other = make(tmp_path / "container", "a", "b"), make(tmp_path / "other", "x", "y")
    found = model_store(CommandLine(), {}, container)
    assert found and found.is_container and found.directory == container
    named = model_store(CommandLine(str(other)), {"HF_MODEL_ID": "org/model"}, container)
    assert named and not named.is_container and [model.name for model in named.models] == ["x", "y"]
    assert model_store(CommandLine(str(other / "x")), {}, container) is None
    assert model_store(CommandLine(), {"HF_MODEL_ID": "org/model"}, container) is None
    by_variable = model_store(CommandLine(), {"HOTSPAN_MODEL": str(other)}, container)
    assert by_variable and not by_variable.is_container
    (tmp_path / "hotspan.yaml").write_text(f"model: {other}")
    assert model_store(CommandLine(flags={"config": str(tmp_path / "hotspan.yaml")}), {}, container) == by_variable


@pytest.mark.parametrize("words", [("--nnodes", "2"), ("--headless",)])
def test_a_store_is_on_one_host(tmp_path: Path, words: tuple[str, ...]) -> None:
    """Options that spread one engine over hosts are refused for a directory of models, before anything starts."""
    store = make(tmp_path / "s", "a", "b")
    run = CliRunner().invoke(app, ["serve", str(store), "--ram-gib", "1", *words])
    assert run.exit_code == 2 and "--nnodes and --headless are for one model" in run.output
