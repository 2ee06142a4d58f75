"""The demo model: the same everywhere, servable, and never in the way of what is there."""

import hashlib
import json
import unicodedata
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from tokenizers import Tokenizer
from typer.testing import CliRunner

from hotspan.bench.prose import prose
from hotspan.cli.main import app
from hotspan.core.errors import ConfigError
from hotspan.demo.files import MARKER, bfloat16_bits
from hotspan.demo.model import SIZES, SPECIAL_TOKENS, DemoModel, make_demo_model
from kit.demo_adapter import make_demo_adapter


def digest(directory: Path) -> str:
    """One sha256 over every file's name and bytes."""
    total = hashlib.sha256()
    for file in sorted(directory.iterdir()):
        total.update(file.name.encode() + b"\0" + file.read_bytes())
    return total.hexdigest()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> DemoModel:
    return make_demo_model(tmp_path_factory.mktemp("models") / "tiny", "tiny")


@pytest.fixture(scope="module")
def tokenizer(tiny: DemoModel) -> Tokenizer:
    return Tokenizer.from_file(str(tiny.path / "tokenizer.json"))


def test_same_bytes_every_time(tiny: DemoModel, tmp_path: Path) -> None:
    """Two models of one size are the same, byte for byte, wherever they are."""
    assert digest(make_demo_model(tmp_path / "again", "tiny").path) == digest(tiny.path)


def test_demo_size_costs_what_it_says(tmp_path: Path) -> None:
    """The demo model has about 66 M parameters and leaves 10,240 bytes of KV a token, and its file says the same."""
    model = make_demo_model(tmp_path / "demo", "demo")
    assert 65e6 < model.parameters < 67e6
    assert model.kv_bytes_per_token == 10_240
    config = json.loads((model.path / "config.json").read_text())
    kv_elements = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]
    assert model.kv_bytes_per_token == 2 * kv_elements
    with safe_open(model.path / "model.safetensors", "numpy") as file:
        stored = sum(int(np.prod(file.get_slice(name).get_shape())) for name in file.keys())  # noqa: SIM118
    assert stored == model.parameters


def test_tiny_is_tiny(tiny: DemoModel) -> None:
    """The tiny model has about 3 M parameters, and its directory is little larger than they are."""
    assert 2.5e6 < tiny.parameters < 3.5e6
    assert sum(file.stat().st_size for file in tiny.path.iterdir()) < 1.1 * tiny.weight_bytes


def test_greedy_decoding_never_ends_early(tiny: DemoModel) -> None:
    """The output rows of the special tokens are zero, and those of no other token are."""
    raw = (tiny.path / "model.safetensors").read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:start])["lm_head.weight"]
    begin, end = header["data_offsets"]
    rows = np.frombuffer(raw[start + begin : start + end], "<u2").reshape(header["shape"])
    assert [i for i, row in enumerate(rows) if not row.any()] == list(range(len(SPECIAL_TOKENS)))


finite = st.floats(width=32, min_value=-(2.0**100), max_value=2.0**100, allow_subnormal=False)


@given(st.lists(finite, min_size=1))
def test_bfloat16_is_nearest(values: list[float]) -> None:
    """Rounding to bfloat16 errs by at most half of its last place, 2^-8 of the value."""
    exact = np.array(values, dtype=np.float32)
    back = (bfloat16_bits(exact).astype(np.uint32) << np.uint32(16)).view(np.float32)
    assert np.all(np.abs(back.astype(np.float64) - exact) <= np.abs(exact).astype(np.float64) * 2.0**-8)


@settings(max_examples=200, deadline=None)
@given(text=st.text())
def test_tokenizer_round_trip(tokenizer: Tokenizer, text: str) -> None:
    """Any text comes back from its tokens, up to Unicode normalization."""
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == unicodedata.normalize("NFC", text)


def test_transformers_agrees(tiny: DemoModel, tokenizer: Tokenizer) -> None:
    """transformers reads the same configuration, tokens and special tokens that the directory states."""
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.from_pretrained(tiny.path)
    theirs = transformers.AutoTokenizer.from_pretrained(tiny.path)
    text = prose(3, 300) + " <|im_end|>\n\n 12345 cafe\u0301"
    assert theirs(text).input_ids == tokenizer.encode(text).ids
    assert (config.model_type, config.vocab_size, config.max_position_embeddings) == ("qwen2", 768, 32768)
    assert len(theirs) == tokenizer.get_vocab_size() == SIZES["tiny"].vocabulary
    assert [theirs.convert_ids_to_tokens(i) for i in range(3)] == list(SPECIAL_TOKENS)
    assert theirs.eos_token_id == config.eos_token_id
    chat = theirs.apply_chat_template([{"role": "user", "content": "Hi."}], tokenize=False, add_generation_prompt=True)
    assert chat == "<|im_start|>user\nHi.<|im_end|>\n<|im_start|>assistant\n"


def test_found_again(tiny: DemoModel) -> None:
    """A model that is there already is used as it is."""
    before = (tiny.path / "model.safetensors").stat().st_mtime_ns
    assert make_demo_model(tiny.path, "tiny") == tiny
    assert (tiny.path / "model.safetensors").stat().st_mtime_ns == before


def test_foreign_directory_is_left_alone(tmp_path: Path) -> None:
    """A directory with other files is refused, by name, and stays as it was."""
    (tmp_path / "thesis.txt").write_text("final version 7")
    with pytest.raises(ConfigError, match=str(tmp_path)):
        make_demo_model(tmp_path, "tiny")
    assert [file.name for file in tmp_path.iterdir()] == ["thesis.txt"]


def test_other_size_and_damage_are_refused(tmp_path: Path) -> None:
    """A directory of another size, or with a shortened file, is refused with what is wrong."""
    model = make_demo_model(tmp_path / "model", "tiny")
    with pytest.raises(ConfigError, match="'tiny', not 'demo'"):
        make_demo_model(model.path, "demo")
    (model.path / "model.safetensors").write_bytes(b"short")
    with pytest.raises(ConfigError, match=r"damaged \(model.safetensors\)"):
        make_demo_model(model.path, "tiny")


def test_failure_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that dies halfway leaves neither a directory nor its own rubbish."""

    def no_space(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("hotspan.demo.model.write_json", no_space)
    with pytest.raises(OSError, match="No space"):
        make_demo_model(tmp_path / "model", "tiny")
    assert list(tmp_path.iterdir()) == []


def test_empty_directory_is_used(tmp_path: Path) -> None:
    """An empty directory, as mktemp makes it, is a fine place for a model."""
    make_demo_model(tmp_path, "tiny")
    assert (tmp_path / MARKER).is_file()


def test_adapters(tiny: DemoModel, tmp_path: Path) -> None:
    """An adapter repeats for its seed, differs between seeds, and fits the model's projections."""
    one = make_demo_adapter(tmp_path / "one", tiny.path, seed=1)
    again = make_demo_adapter(tmp_path / "again", tiny.path, seed=1)
    two = make_demo_adapter(tmp_path / "two", tiny.path, seed=2)
    assert digest(one) == digest(again) != digest(two)
    name = "base_model.model.model.layers.3.self_attn.v_proj.lora_B.weight"
    with safe_open(one / "adapter_model.safetensors", "numpy") as file:
        assert file.get_slice(name).get_shape() == [128, 8]
        assert len(list(file.keys())) == 4 * 2 * 2


def test_command(tmp_path: Path) -> None:
    """`hotspan demo-model` says what it made, and exits with 2 and the reason when it can't."""
    runner = CliRunner()
    made = runner.invoke(app, ["demo-model", str(tmp_path / "model"), "--size", "tiny"])
    assert made.exit_code == 0
    assert "3.3 M random parameters" in made.output
    refused = runner.invoke(app, ["demo-model", str(tmp_path / "other"), "--size", "huge"])
    assert refused.exit_code == 2
    assert "'huge'" in refused.output
