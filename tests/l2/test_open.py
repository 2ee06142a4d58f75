"""Stores by URL: what is taken, and what is refused in words that help."""

import contextlib
import socket
from pathlib import Path

import pytest

from hotspan.core.errors import ConfigError
from hotspan.l2 import open as opening
from hotspan.l2.file import FileStore
from hotspan.l2.hyperpod import HyperpodStore
from hotspan.l2.node import NodeStore
from hotspan.l2.open import open_store, parse_store_url
from hotspan.l2.redis import RedisStore
from hotspan.l2.s3 import S3Store


@pytest.mark.parametrize(
    ("url", "kind"),
    [
        ("redis://cache:6379/1", RedisStore),
        ("rediss://cache", RedisStore),
        ("s3://bucket/prefix", S3Store),
        ("sagemaker-hyperpod://127.0.0.1:9200", NodeStore),
    ],
)
def test_the_scheme_names_the_store(url: str, kind: type) -> None:
    """Each scheme opens its store, without asking anybody."""
    store = open_store("--l2", url, {"shared_memory_name": "hotspan-no-such-segment"} if "hyperpod" in url else {})
    assert isinstance(store, kind)
    store.close()


def test_a_directory_is_a_store(tmp_path: Path) -> None:
    """file:/// opens a shared directory."""
    store = open_store("--l2", tmp_path.as_uri(), {"capacity_gib": "0.5"})
    assert isinstance(store, FileStore)
    store.close()


def test_our_own_daemon_is_reached_by_its_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the daemon's socket lies beside its segment, hotspan's replicas use it instead of HTTP."""
    monkeypatch.setattr(opening, "SHARED_MEMORY", tmp_path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(tmp_path / "ai_toolkit_cache.sock"))
        store = open_store("--l2", "sagemaker-hyperpod://127.0.0.1:9200", {})
        assert isinstance(store, NodeStore) and store.is_own
        store.close()


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("lm://cache:65432", "hotspan daemon"),
        ("reddis://cache", "did you mean redis://?"),
        ("http://cache", "give one of"),
        ("file://relative/path", "three slashes"),
        ("redis://", "host is missing"),
        ("redis://cache:port", "no URL"),
        ("redis://:s3cret@cache", "password=file:/PATH"),
    ],
)
def test_what_can_not_work_says_what_would(url: str, says: str) -> None:
    """A wrong URL is an error that names the option and what to write instead, and repeats no password."""
    with pytest.raises(ConfigError) as error:
        parse_store_url("--l2", url)
    assert "--l2" in str(error.value) and says in str(error.value) and "s3cret" not in str(error.value)


@pytest.mark.parametrize(
    ("url", "options", "says"),
    [
        ("redis://cache", {"timout_s": "1"}, "did you mean timeout_s?"),
        ("redis://cache", {"timeout_s": "soon"}, "give a number"),
        ("redis://cache", {"timeout_s": "nan"}, "finite"),
        ("sagemaker-hyperpod://h", {"lease_ttl": "3"}, "lease_ttl_s"),
        ("s3://bucket", {"connections": "0"}, "connections"),
    ],
)
def test_options_that_can_not_work_are_refused(url: str, options: dict[str, str], says: str) -> None:
    """An unknown option, or a value that is none, is an error that names it."""
    with pytest.raises(ConfigError, match=says.replace("?", r"\?")):
        open_store("--l2", url, options)


def test_hyperpods_own_names_are_taken() -> None:
    """The configuration keys that users of managed tiered storage have work as they are."""
    options = {"sagemaker_hyperpod_shared_memory_name": "none", "sagemaker_hyperpod_timeout_ms": "900"}
    with contextlib.closing(open_store("--l2", "sagemaker-hyperpod://127.0.0.1", options)) as store:
        assert isinstance(store, NodeStore) and not store.is_own
        assert isinstance(store.by_http, HyperpodStore)
        options = store.by_http.blobs.daemon.options
        assert (options.shared_memory_name, options.timeout_ms) == ("none", 900)
