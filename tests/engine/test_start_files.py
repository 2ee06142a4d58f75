"""Files that change while an engine starts: what it caches has a name that no other engine finds."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hotspan.demo.model import make_demo_model
from hotspan.engine import start_files
from hotspan.engine.start_files import changed_files, note_files, watch_starts

from .harness.core import core
from .harness.runner import KnownBytes
from .weights_sequences import Late, write_weights


@pytest.fixture
def model(tiny_model: Path, tmp_path: Path) -> Path:
    """A directory of its own, whose files may be replaced."""
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


def test_kv_of_files_that_were_replaced_meanwhile_is_not_found(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The workers have read the old ones, and the digest would be of the new ones."""
    with core(model, disk=tmp_path / "disk", runner=Late) as engine:
        text = engine.stored(engine.text(1, 1100))
        engine.forget_gpu()
        assert engine.ask(text) > 0, "this engine alone knows what it has"
        engine.check()
        former = engine.manager.namespace
    assert "weights_have_no_digest files=" in caplog.text and "model.safetensors" in caplog.text
    with core(model, disk=tmp_path / "disk") as engine:
        assert engine.manager.namespace != former
        assert engine.ask(text) == 0
        engine.stored(text)
        engine.check()
    with core(model, disk=tmp_path / "disk") as engine:
        assert engine.ask(text) > 0, "files that stay as they are have a name that lasts"
        engine.check()


@pytest.mark.parametrize("is_older", [True, False])
def test_files_that_nobody_noted_are_known_by_their_times(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, is_older: bool
) -> None:
    """A vLLM that is told to load other plugins alone notes none: files of before its process are as they were."""
    with core(tiny_model) as engine:
        known = engine.manager.namespace
    monkeypatch.setattr(start_files, "note_files", lambda config: None)
    began_s = (tiny_model / "model.safetensors").stat().st_ctime + (10 if is_older else -10)
    monkeypatch.setattr(start_files.psutil.Process, "create_time", lambda process: began_s)
    with core(tiny_model) as engine:
        assert (engine.manager.namespace == known) is is_older


def config_of(model: Path, draft: Path | None = None, scales: Path | None = None) -> Any:
    def named(path: Path) -> Any:
        multimodal = SimpleNamespace(mm_encoder_fp8_scale_path=None if scales is None else str(scales))
        return SimpleNamespace(model=str(path), trust_remote_code=True, revision=None, multimodal_config=multimodal)

    speculative = None
    if draft is not None:
        speculative = SimpleNamespace(model=str(draft), method="eagle", draft_model_config=named(draft))
    return SimpleNamespace(model_config=named(model), speculative_config=speculative)


@pytest.mark.parametrize("what", ["weights", "config", "code", "draft", "scales", "gone", "new"])
def test_each_file_that_decides_kv_is_looked_at(tmp_path: Path, what: str) -> None:
    model, draft, scales = tmp_path / "model", tmp_path / "draft", tmp_path / "scales.json"
    for directory in (model, draft):
        make_demo_model(directory, "tiny")
        (directory / "modeling.py").write_text("0")
    scales.write_text("{}")
    config = config_of(model, draft, scales)
    note_files(config)
    assert changed_files(config) == []
    (model / "tokenizer.json").write_text("{}")  # decides no KV
    assert changed_files(config) == []
    changed = {
        "weights": model / "model.safetensors",
        "config": model / "config.json",
        "code": model / "modeling.py",
        "draft": draft / "model.safetensors",
        "scales": scales,
        "gone": model / "modeling.py",
        "new": model / "more.safetensors",
    }[what]
    if what == "gone":
        changed.unlink()
    elif what in ("weights", "draft"):
        write_weights(changed.parent, 7)
    else:
        changed.write_text("1")
    assert changed_files(config) == [str(changed)]


def test_what_a_worker_fetched_from_a_hub_has_not_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files of a hub's cache lie under names that tell their content: they may come while the engine starts."""
    snapshot, blobs = tmp_path / "snapshots" / "1", tmp_path / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    config = config_of(snapshot)
    note_files(config)
    (blobs / "0a").write_text("{}")
    (snapshot / "config.json").symlink_to(blobs / "0a")
    assert changed_files(config) == []
    note_files(config)
    (blobs / "0b").write_text("{ }")
    (snapshot / "config.json").unlink()
    (snapshot / "config.json").symlink_to(blobs / "0b")
    assert changed_files(config) == [str(snapshot / "config.json")]


def test_each_executor_notes_its_files_once() -> None:
    """vLLM calls plugins again and again."""
    watch_starts()
    watch_starts()
    assert not hasattr(KnownBytes.__init__.__wrapped__, "notes_files")  # type: ignore[attr-defined]
