"""What lies on disk comes back as it was: after eviction, after a restart, for the same engine and for no other."""

from pathlib import Path

import pytest

from hotspan.demo.model import make_demo_model

from .rig import CHUNK, Rig, rig

pytestmark = pytest.mark.engine

SLOT_GIB = 1.0 / 1024  # one chunk of the tiny model in float32 is a MiB


def fill(engine: Rig, prompt: list[int], tokens: int = 16) -> list[int]:
    """Store a prompt and give the tokens of the engine's own prefix-cache hit."""
    engine.ask(prompt, tokens)
    own = engine.ask(prompt, tokens)
    assert own.cached >= len(prompt) - 2 * CHUNK
    engine.settle()
    return own.tokens


def churn(engine: Rig, seed: int) -> None:
    """Push everything else out of the engine's pool and out of RAM."""
    for n in range(4):
        engine.ask(engine.text(1000 * seed + n, 3000), 1)
        engine.settle()
    engine.forget_gpu()


def test_disk_hits_and_restart(tiny_model: Path, tmp_path: Path) -> None:
    """RAM holds one text, disk all: each comes back from disk byte-identical, also in a new engine."""
    with rig(tiny_model, ram_gib=16 * SLOT_GIB, disk=tmp_path / "kv") as engine:
        prompts = [engine.text(n, 2900) for n in range(2)]
        own = [fill(engine, prompt) for prompt in prompts]
        churn(engine, 1)
        for prompt, tokens in zip(prompts, own, strict=True):
            hit = engine.ask(prompt, 16)
            assert (hit.cached, hit.tokens) == (2900 // CHUNK * CHUNK, tokens)
            churn(engine, 2)
        assert engine.digests.wrong == 0
        engine.cache.check()
        stored = dict(engine.digests.stored)
    with rig(tiny_model, ram_gib=16 * SLOT_GIB, disk=tmp_path / "kv") as engine:
        engine.digests.stored.update(stored)
        for prompt, tokens in zip(prompts, own, strict=True):
            hit = engine.ask(prompt, 16)
            assert (hit.cached, hit.tokens) == (2900 // CHUNK * CHUNK, tokens)
            engine.settle()
            engine.forget_gpu()
        assert engine.digests.loaded >= 4 * (2900 // CHUNK)
        assert engine.digests.wrong == 0
        engine.cache.check()


def test_ram_smaller_than_one_chain(tiny_model: Path, tmp_path: Path) -> None:
    """With RAM for 5 chunks and a text of 11, the prefix that fits is loaded, the rest computed, and nothing hangs."""
    with rig(tiny_model, ram_gib=5 * SLOT_GIB, disk=tmp_path / "kv") as engine:
        prompt = engine.text(1, 2900)
        own = fill(engine, prompt)
        churn(engine, 3)
        hit = engine.ask(prompt, 16)
        assert hit.tokens == own
        assert 0 < hit.cached <= 5 * CHUNK
        assert engine.digests.wrong == 0
        engine.settle()
        engine.cache.check()


def test_nothing_else_hits(tiny_model: Path, tmp_path: Path) -> None:
    """Over one directory, another dtype, another model of the same shape or another chunk size finds nothing."""
    directory = tmp_path / "kv"
    with rig(tiny_model, disk=directory) as engine:
        prompt = engine.text(1, 1500)
        fill(engine, prompt)
    other = make_demo_model(tmp_path / "other", "tiny").path
    weights = other / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-2:] = bytes(byte ^ 1 for byte in data[-2:])
    weights.write_bytes(data)
    with rig(other, disk=directory) as engine:
        assert engine.ask(prompt, 4).cached == 0
    with rig(tiny_model, disk=directory, dtype="bfloat16") as engine:
        assert engine.ask(prompt, 4).cached == 0
    with rig(tiny_model, disk=directory) as engine:
        assert engine.ask(prompt, 4).cached == 1500 // CHUNK * CHUNK
