"""Key-encryption keys: where they come from, and that what they wrap opens only as it was wrapped."""

import base64
import os
import stat
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotspan.core.errors import ConfigError, KeyUnavailable
from hotspan.keyring.wrap import ChangingWrapper, LocalWrapper, create_kek, open_wrapper, try_wrapper
from hotspan.keyring.wrapped import wrapped_by
from tests.keyring.conftest import Kms

KEK = bytes(range(200, 232))


def kek_file(directory: Path, content: bytes, mode: int = 0o600) -> Path:
    path = directory / "a-kek"
    path.write_bytes(content)
    path.chmod(mode)
    return path


@given(key=st.binary(max_size=64), context=st.binary(max_size=64))
def test_what_was_wrapped_comes_back(key: bytes, context: bytes) -> None:
    """Unwrapping with the same KEK and context gives the key, which does not stand in the blob."""
    wrapper = LocalWrapper(KEK)
    blob = wrapper.wrap(key, context)
    assert wrapper.unwrap(blob, context) == key
    assert wrapped_by(blob) == wrapper.id
    assert len(key) < 8 or key not in blob


def test_every_changed_bit_and_every_cut_is_found() -> None:
    """A blob with any bit flipped, or cut anywhere, is KeyUnavailable and never a key."""
    wrapper = LocalWrapper(KEK)
    blob = wrapper.wrap(bytes(32), b"context")
    for bit in range(8 * len(blob)):
        bad = bytearray(blob)
        bad[bit // 8] ^= 1 << bit % 8
        with pytest.raises(KeyUnavailable):
            wrapper.unwrap(bytes(bad), b"context")
    for end in range(len(blob)):
        with pytest.raises(KeyUnavailable):
            wrapper.unwrap(blob[:end], b"context")


def test_another_context_does_not_open() -> None:
    """A blob wrapped for one purpose does not open for another."""
    wrapper = LocalWrapper(KEK)
    with pytest.raises(KeyUnavailable, match="another tenant's"):
        wrapper.unwrap(wrapper.wrap(bytes(32), b"tenant a"), b"tenant b")


def test_another_kek_is_named() -> None:
    """With the wrong KEK the error names both, and what to give."""
    one, other = LocalWrapper(KEK), LocalWrapper(bytes(32))
    with pytest.raises(KeyUnavailable, match=rf"{one.id}.*{other.id}.*--kek"):
        other.unwrap(one.wrap(bytes(32), b""), b"")


def test_the_same_key_wraps_differently_each_time() -> None:
    """No nonce comes twice."""
    wrapper = LocalWrapper(KEK)
    assert len({wrapper.wrap(bytes(32), b"") for _ in range(100)}) == 100


def test_a_changing_wrapper_reads_old_and_new() -> None:
    """During a change of the KEK both kinds of blobs open, and new ones are of the new KEK."""
    old, new = LocalWrapper(KEK), LocalWrapper(bytes(32))
    both = ChangingWrapper(new, old)
    assert both.unwrap(old.wrap(b"a", b""), b"") == b"a"
    assert both.unwrap(new.wrap(b"b", b""), b"") == b"b"
    assert wrapped_by(both.wrap(b"c", b"")) == both.id == new.id


@pytest.mark.parametrize(
    "content",
    [
        KEK,
        KEK.hex().encode(),
        KEK.hex().upper().encode() + b"\n",
        base64.b64encode(KEK),
        base64.urlsafe_b64encode(KEK).rstrip(b"=") + b"\n",
    ],
    ids=["raw", "hex", "HEX", "base64", "urlsafe"],
)
def test_a_file_may_hold_the_kek_in_any_usual_form(tmp_path: Path, content: bytes) -> None:
    """Raw, hex and base64 spellings of a key are the same KEK, through a link too."""
    link = tmp_path / "link"
    link.symlink_to(kek_file(tmp_path, content))
    assert open_wrapper(f"file:{link}", {}).id == LocalWrapper(KEK).id


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o602])
def test_a_file_open_to_others_is_refused(tmp_path: Path, mode: int) -> None:
    """A KEK that group or others can reach is an error that says chmod 600."""
    with pytest.raises(ConfigError, match="chmod 600"):
        open_wrapper(f"file:{kek_file(tmp_path, KEK, mode)}", {})


def test_what_is_no_kek_file_is_refused(tmp_path: Path) -> None:
    """A missing file, a directory and a named pipe are errors at once, not a wait."""
    os.mkfifo(tmp_path / "pipe", 0o600)
    for name, words in (("missing", "can't be read"), ("pipe", "regular file"), (".", "regular file")):
        with pytest.raises(ConfigError, match=words):
            open_wrapper(f"file:{tmp_path / name}", {})


@pytest.mark.parametrize(
    "content", [b"", b"correct horse battery staple 1234", b"x" * 32, KEK[:31], KEK.hex().encode()[:-1]]
)
def test_weak_and_broken_content_is_refused_without_being_shown(tmp_path: Path, content: bytes) -> None:
    """Content that is not 32 random bytes is an error that does not repeat it."""
    with pytest.raises(ConfigError) as caught:
        open_wrapper(f"file:{kek_file(tmp_path, content)}", {})
    assert not content or content.decode(errors="replace") not in str(caught.value)


@pytest.mark.parametrize("spelling", [KEK.hex(), base64.b64encode(KEK).decode()])
def test_the_environment_that_is_passed_in_may_hold_the_kek(spelling: str) -> None:
    """env:NAME reads the mapping that the caller gives and nothing else."""
    assert open_wrapper("env:A_KEK", {"A_KEK": spelling}).id == LocalWrapper(KEK).id
    with pytest.raises(ConfigError, match="no variable A_KEK"):
        open_wrapper("env:A_KEK", {})
    with pytest.raises(ConfigError, match="variable A_KEK is not 32 bytes"):
        open_wrapper("env:A_KEK", {"A_KEK": "short"})


@pytest.mark.parametrize("reference", ["", "file:", "env:", KEK.hex(), f"raw:{KEK.hex()}", "aws-kms:"])
def test_what_is_no_reference_is_refused_without_being_shown(reference: str) -> None:
    """An unknown reference, perhaps the key itself, is an error that does not repeat it."""
    with pytest.raises(ConfigError) as caught:
        open_wrapper(reference, {})
    assert KEK.hex() not in str(caught.value)
    assert "aws-kms:KEY_ID_OR_ARN" in str(caught.value)


def test_a_new_kek_is_private_and_never_replaces_one(tmp_path: Path) -> None:
    """create_kek makes a usable 0600 file and refuses to overwrite it."""
    path = tmp_path / "kek"
    create_kek(path)
    before = path.read_bytes()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    try_wrapper(open_wrapper(f"file:{path}", {}))
    with pytest.raises(ConfigError, match="exists already"):
        create_kek(path)
    assert path.read_bytes() == before


def test_a_wrapper_does_not_show_its_key() -> None:
    """Neither repr nor id contain the key."""
    shown = repr(LocalWrapper(KEK)) + LocalWrapper(KEK).id
    assert KEK.hex() not in shown and KEK.hex()[:16] not in shown


def test_kms_wraps_and_binds_the_context(kms: Kms) -> None:
    """A key wrapped by the KMS comes back, and only with its context and through its KMS key."""
    wrapper = open_wrapper(kms.reference(), {})
    blob = wrapper.wrap(KEK, b"tenant a")
    assert wrapper.unwrap(blob, b"tenant a") == KEK
    assert KEK not in blob
    with pytest.raises(KeyUnavailable, match="another tenant's"):
        wrapper.unwrap(blob, b"tenant b")
    other = open_wrapper(kms.reference(kms.other_key), {})
    with pytest.raises(KeyUnavailable, match="--kek"):
        other.unwrap(blob, b"tenant a")
    forged = blob.replace(wrapper.id.encode(), other.id.encode())
    with pytest.raises(KeyUnavailable, match="AWS KMS refuses"):
        other.unwrap(forged, b"tenant a")


def test_a_kms_out_of_reach_is_key_unavailable(kms: Kms) -> None:
    """A cut line and an unknown key are KeyUnavailable with what to check."""
    wrapper = open_wrapper(kms.reference(), {})
    kms.gate.set("refuse")
    with pytest.raises(KeyUnavailable, match=r"does not answer.*check network"):
        wrapper.wrap(KEK, b"")
    kms.gate.set("open")
    with pytest.raises(KeyUnavailable, match=r"refuses.*NotFoundException"):
        open_wrapper(kms.reference("nope"), {}).wrap(KEK, b"")


def test_kms_calls_are_bounded(kms: Kms) -> None:
    """The client waits 2 s for a connection and 5 s for an answer, twice at most."""
    wrapper: Any = open_wrapper(kms.reference(), {})
    config = wrapper._client.meta.config
    assert (config.connect_timeout, config.read_timeout) == (2, 5)
    assert config.retries["total_max_attempts"] == 2


def test_the_region_of_an_arn_is_used(kms: Kms) -> None:
    """An ARN needs no region option; a bare id without one is an error that says how to give it."""
    wrapper: Any = open_wrapper("aws-kms:arn:aws:kms:ap-south-1:123456789012:key/abc", {})
    assert wrapper._client.meta.region_name == "ap-south-1"
    with pytest.raises(ConfigError, match=r"\?region=REGION"):
        open_wrapper("aws-kms:abc", {})


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("regoin=eu-west-1", "did you mean region"),
        ("secret=1", "region and endpoint"),
        ("region=eu-west-1&endpoint=http://kms.example.com", "in the clear"),
        ("region=eu-west-1&endpoint=kms", "not a URL"),
        ("region=eu-west-1&endpoint=http://[", "not a URL"),
    ],
)
def test_bad_kms_options_are_refused(query: str, words: str) -> None:
    """An unknown option, and an endpoint that would leak keys, are errors that say what to write."""
    with pytest.raises(ConfigError, match=words):
        open_wrapper(f"aws-kms:abc?{query}", {})


def test_without_boto3_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """A KMS reference without the optional package is an error, not an ImportError."""
    monkeypatch.setitem(sys.modules, "boto3", None)
    with pytest.raises(ConfigError, match=r"hotspan\[aws\]"):
        open_wrapper("aws-kms:abc?region=eu-west-1", {})
