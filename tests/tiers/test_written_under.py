"""Under which names a directory was written: what is kept, what a start that finds another name says."""

import json
import logging
from pathlib import Path

import pytest

from hotspan.tiers.directory import NAMES_FILE, TIER
from hotspan.tiers.written_under import MAX_BYTES, Name, difference, name_of, note_directory, pack_names, parse_names

FIELDS: dict[str, str | int | bytes] = {
    "model": b"\1" * 32,
    "hash": "sha256_cbor:0",
    "engine": "vllm 0.32.0",
    "chunk_tokens": 128,
    "hf_config": '{"long": "' + "x" * 1000 + '"}',
    "environment.VLLM_TOKEN": "a secret",
}


def name(number: int = 0, **fields: str | int | bytes) -> Name:
    """A namespace with some fields that are others."""
    return name_of(bytes([number]) * 32, FIELDS | fields)


@pytest.mark.parametrize(
    ("now", "said"),
    [
        ({"engine": "vllm 0.33.0"}, "the versions (vllm 0.32.0 then, vllm 0.33.0 now)"),
        ({"chunk_tokens": 256}, "chunk_tokens (128 then, 256 now)"),
        ({"hash": "sha256_cbor:1"}, "PYTHONHASHSEED"),
        ({"model": b"\2" * 32}, "the model's files"),
        ({"hf_config": "{}"}, "the model's configuration"),
        ({"environment.VLLM_TOKEN": "another"}, "environment.VLLM_TOKEN"),
        ({"environment.VLLM_OTHER": "1"}, "environment.VLLM_OTHER (set now only)"),
        ({"model": b"\2" * 32, "chunk_tokens": 64}, "the model's files, chunk_tokens (128 then, 64 now)"),
    ],
)
def test_what_differs_is_named(now: dict[str, str | int | bytes], said: str) -> None:
    """A seed, a version, an option or weights: in words, and with its values where anybody may read them."""
    known = parse_names(pack_names(name(), []))
    assert difference(name(1, **now), known) == said


def test_nothing_is_said_where_nothing_was_written_or_the_name_is_known() -> None:
    """A new directory, and one that this name was written in, whoever came last."""
    assert difference(name(), []) is None
    known = parse_names(pack_names(name(1, engine="vllm 0.33.0"), parse_names(pack_names(name(), []))))
    assert [one.namespace for one in known] == ["01" * 32, "00" * 32]
    assert difference(name(), known) is difference(name(1), known) is None
    assert difference(name(2, engine="vllm 0.33.0", hash="sha256_cbor:1"), known) == "PYTHONHASHSEED", "the likest"


def test_no_secret_is_kept() -> None:
    """Values of the environment, seeds and long texts are there as digests, which no two names share."""
    data = pack_names(name(**{"environment.VLLM_OTHER": "a secret"}), [])
    assert b"a secret" not in data and b"sha256_cbor:0" not in data and b"xxx" not in data and b"vllm 0.32.0" in data
    (kept,) = parse_names(data)
    assert kept.parts["environment.VLLM_OTHER"] != kept.parts["environment.VLLM_TOKEN"]


def test_what_is_kept_is_bounded() -> None:
    """The newest names, in 64 KiB, however many and long they are."""
    known: list[Name] = []
    for number in range(100):
        wide = {f"{'option' * 14}{n}": "x" * 48 for n in range(number * 10)}
        data = pack_names(name(number, **wide), known)
        known = parse_names(data)
        assert len(data) <= MAX_BYTES and known[0].namespace == name(number).namespace and len(known) <= 8
    assert difference(name(100), known) is not None


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff",
        b"[]",
        b"[" * 100_000,
        b'{"names": 1}',
        b'{"names": [{"namespace": "00"}]}',
        b'{"names": [{"namespace": "00", "parts": [1, 2]}]}',
        b'{"names": {"a": 1}}',
        b'{"names": "abc"}',
        json.dumps({"names": [{"namespace": "x" * MAX_BYTES, "parts": {}}]}).encode(),
    ],
)
def test_what_can_not_be_understood_is_nothing(data: bytes) -> None:
    """Whoever writes there, may write anything."""
    assert parse_names(data) == []


def test_a_log_has_no_more_than_words(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Text of whoever writes the directory comes to no log but as short plain words."""
    parts = {f"part{n}\nforged": "x" for n in range(100)} | {"engine": "1\nforged" * 100, "chunk_tokens": "12"}
    (tmp_path / NAMES_FILE).write_text(json.dumps({"names": [{"namespace": "00", "parts": parts}]}))
    note_directory(tmp_path, name())
    (said,) = caplog.messages
    assert "forged" not in said and "\n" not in said and len(said) < 500 + len(str(tmp_path))
    assert "the versions, " in said and "chunk_tokens (12 then, 128 now)" in said


def test_a_directory_says_once_that_it_is_cold(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The first start under another name says so, the next ones under both do not; the file is the tier's own."""
    caplog.set_level(logging.WARNING)
    note_directory(tmp_path, name())
    assert caplog.messages == []
    note_directory(tmp_path, name(1, hash="sha256_cbor:1"))
    assert ["PYTHONHASHSEED" in said for said in caplog.messages] == [True]
    for number in (0, 1):
        note_directory(tmp_path, name(number))
    assert len(caplog.messages) == 1
    assert {path.name for path in tmp_path.iterdir()} <= set(TIER.files)
    assert (tmp_path / NAMES_FILE).stat().st_mode & 0o777 == 0o600


def test_a_directory_that_takes_nothing_fails_no_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What can't be read or written is said, and that is all."""
    (tmp_path / f"{NAMES_FILE}.new").mkdir()
    note_directory(tmp_path, name())
    assert ["disk_names_not_written" in said for said in caplog.messages] == [True]
    note_directory(tmp_path / "nothing", name())
