"""Adapters whose weights change under their name: real scheduler, cache and tiers, known bytes, no model."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from vllm.lora.request import LoRARequest

from .harness.core import Core
from .test_weights import TEXT, running


@pytest.fixture
def engine(tiny_model: Path, tmp_path: Path) -> Iterator[Core]:
    with running(tiny_model, tmp_path / "disk") as engine:
        yield engine
        engine.finish()
        engine.settle()
        engine.check()


def adapter(directory: Path) -> Path:
    """An adapter's directory with weights that no other has; written anew if it is there."""
    directory.mkdir(exist_ok=True)
    (directory / "adapter_config.json").write_text("{}")
    (directory / "adapter_model.safetensors").write_bytes(os.urandom(1000))
    return directory


def load(engine: Core, path: Path, *, number: int = 1, name: str = "a", in_place: bool = False) -> LoRARequest:
    """Load an adapter as vLLM's server does; what its requests come with."""
    lora = LoRARequest(name, number, str(path), load_inplace=in_place)
    users = [
        request.request_id
        for request in engine.scheduler.requests.values()
        if request.lora_request is not None and request.lora_request.lora_int_id == number
    ]
    engine.runner.mix(users if in_place else ())
    engine.core.add_lora(lora)
    return LoRARequest(name, number, str(path))


def test_an_adapter_in_place_finds_nothing_of_before(engine: Core, tmp_path: Path) -> None:
    """Neither in vLLM's own cache, which goes by the name, nor in a tier; the base model's texts stay."""
    base = engine.stored(engine.text(9, TEXT))
    lora = load(engine, adapter(tmp_path / "a"))
    text = engine.stored(engine.text(1, TEXT), lora=lora)
    lora = load(engine, adapter(tmp_path / "a"), in_place=True)
    assert engine.ask(text, lora=lora) == 0
    assert engine.ask(text, lora=lora) > 0
    engine.forget_gpu()
    engine.evict_ram()
    assert engine.ask(text, lora=lora) > 0
    assert engine.ask(base) > 0
    assert engine.connector.weights.state.changes == 0


def test_the_same_content_in_place_stays_cached(engine: Core, tmp_path: Path) -> None:
    """Its name is its content."""
    path = adapter(tmp_path / "a")
    lora = load(engine, path)
    text = engine.stored(engine.text(1, TEXT), lora=lora)
    assert engine.ask(text, lora=load(engine, path, in_place=True)) > 0


def test_a_running_request_of_it_leaves_nothing(engine: Core, tmp_path: Path) -> None:
    """It goes on with the new weights."""
    lora = load(engine, adapter(tmp_path / "a"))
    text = engine.text(1, 3000)
    engine.start("running", text, 100, lora=lora)
    engine.step()
    lora = load(engine, adapter(tmp_path / "a"), in_place=True)
    engine.finish()
    engine.settle()
    assert engine.ask(text, lora=lora) == 0


def test_a_load_that_is_none_names_nothing_anew(engine: Core, tmp_path: Path) -> None:
    """An engine that has the id keeps its weights, whatever the files are now: such texts are not cached."""
    lora = load(engine, adapter(tmp_path / "a"))
    text = engine.stored(engine.text(1, TEXT), lora=lora)
    load(engine, adapter(tmp_path / "a"))
    more = engine.text(2, TEXT)
    engine.ask(more, lora=lora)
    engine.settle()
    engine.forget_gpu()
    assert engine.ask(more, lora=lora) == 0
    engine.core.remove_lora(1)
    lora = load(engine, tmp_path / "a")
    assert engine.ask(text, lora=lora) == 0
    engine.forget_gpu()
    assert engine.ask(more, lora=lora) == 0


def test_an_id_with_two_paths_is_not_cached(engine: Core, tmp_path: Path) -> None:
    """The engine has read one of them, and nobody says which."""
    one = load(engine, adapter(tmp_path / "a"))
    text = engine.text(1, TEXT)
    two = LoRARequest("a", 1, str(adapter(tmp_path / "b")))
    engine.ask(text, lora=two)
    engine.ask(text, lora=one)
    engine.settle()
    assert not engine.cache.ram.entries
    engine.forget_gpu()
    assert engine.ask(text, lora=load(engine, tmp_path / "b", in_place=True)) == 0
    engine.settle()
    assert engine.cache.ram.entries


def test_a_name_with_other_content_finds_nothing_of_before(engine: Core, tmp_path: Path) -> None:
    """Under another id, or unloaded and loaded again."""
    lora = load(engine, adapter(tmp_path / "a"))
    text = engine.stored(engine.text(1, TEXT), lora=lora)
    assert engine.ask(text, lora=LoRARequest("a", 2, str(adapter(tmp_path / "b")))) == 0
    engine.core.remove_lora(1)
    assert engine.ask(text, lora=load(engine, adapter(tmp_path / "a"))) == 0


def test_files_that_change_under_a_request_that_reads_them(engine: Core, tmp_path: Path) -> None:
    """A request that has its adapter read in each step stores nothing of the steps after the files have changed."""
    path = adapter(tmp_path / "a")
    lora = LoRARequest("a", 1, str(path), load_inplace=True)
    text = engine.text(1, 3000)
    engine.start("running", text, 10, lora=lora)
    engine.step()
    adapter(path)
    engine.runner.mix(["running"])
    engine.finish()
    engine.settle()
    assert len(engine.cache.ram.entries) <= 1024 // 256, "of the first step"
