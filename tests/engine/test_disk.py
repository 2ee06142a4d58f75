"""The disk below an engine: too small a RAM is no obstacle, and no other engine finds what is there."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hotspan.cli.cache import cache
from hotspan.demo.model import make_demo_model

from .harness.core import CHUNK, core

LENGTH = 2900
SLOT_GIB = 16 / (1 << 20)
"""A chunk of the harness's model is 16 KiB."""


def test_ram_smaller_than_one_chain(tiny_model: Path, tmp_path: Path) -> None:
    """With RAM for 5 chunks and a text of 11, the prefix that fits is loaded, the rest computed, and nothing hangs."""
    with core(tiny_model, ram_gib=5 * SLOT_GIB, disk=tmp_path / "kv") as engine:
        prompt = engine.stored(engine.text(1, LENGTH))
        for n in range(4):
            engine.stored(engine.text(2 + n, LENGTH))
        engine.forget_gpu()
        assert 0 < engine.ask(prompt) <= 5 * CHUNK
        engine.settle()
        engine.check()


@pytest.mark.parametrize("changed", ["weights", "dtype", "chunk"])
def test_nothing_else_hits(tiny_model: Path, tmp_path: Path, changed: str) -> None:
    """Over one directory, another model of the same shape, another dtype or another chunk size finds nothing; the same
    engine finds everything, also after them."""
    other, options = tiny_model, {}
    if changed == "weights":
        other = make_demo_model(tmp_path / "other", "tiny").path
        weights = other / "model.safetensors"
        data = bytearray(weights.read_bytes())
        data[-2:] = bytes(byte ^ 1 for byte in data[-2:])
        weights.write_bytes(data)
    else:
        options = {"dtype": "float32"} if changed == "dtype" else {"cache": {"chunk_tokens": CHUNK // 2}}
    with core(tiny_model, disk=tmp_path / "kv") as engine:
        prompt = engine.stored(engine.text(1, LENGTH))
    with core(other, disk=tmp_path / "kv", **options) as engine:
        assert engine.ask(prompt) == 0
        engine.check()
    with core(tiny_model, disk=tmp_path / "kv") as engine:
        assert engine.ask(prompt) == LENGTH // CHUNK * CHUNK


def test_a_directory_that_no_engine_uses_is_invalidated_by_a_command(tiny_model: Path, tmp_path: Path) -> None:
    """`hotspan cache invalidate --directory`: the next engine computes what had the tag, and loads the rest; while an
    engine uses the directory, the command says so and changes nothing.
    """
    words = ["invalidate", "--directory", str(tmp_path / "kv"), "--tag", "gone"]
    with core(tiny_model, disk=tmp_path / "kv") as engine:
        gone, kept = engine.text(1, LENGTH), engine.text(2, LENGTH)
        engine.stored(gone, tags=["gone"])
        engine.stored(kept, tags=["kept"])
        refused = CliRunner().invoke(cache, words)
        assert refused.exit_code == 2 and "in use" in refused.output.replace("\n", " "), refused.output
    done = CliRunner().invoke(cache, [*words, "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.output)["removed"] == {"disk_chunks": LENGTH // CHUNK}
    again = CliRunner().invoke(cache, words)
    assert again.exit_code == 0 and "forgotten: 0 chunks" in again.output, again.output
    with core(tiny_model, disk=tmp_path / "kv") as engine:
        assert engine.ask(gone) == 0
        assert engine.ask(kept) == LENGTH // CHUNK * CHUNK
        engine.check()
