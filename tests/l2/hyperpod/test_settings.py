"""What users have written is read, and what can't work is an error that says what would."""

from collections.abc import Callable

import pytest

from hotspan.core.errors import ConfigError
from hotspan.l2.hyperpod import HyperpodStore
from hotspan.l2.options import HYPERPOD_PREFIX, HyperpodOptions, parse_options
from tests.daemon_protocol.peer import Peer
from tests.l2.hyperpod.rig import Object, there


def parsed(given: dict[str, object]) -> HyperpodOptions:
    return parse_options(HyperpodOptions, given, HYPERPOD_PREFIX)


class TestSettings:
    def test_defaults_are_what_users_have(self) -> None:
        """Without any key the settings are those that HyperPod's users have."""
        assert parsed({}) == HyperpodOptions(
            bucket="lmcache",
            shared_memory_name="ai_toolkit_cache",
            max_concurrent_requests=100,
            max_connections=256,
            max_connections_per_host=128,
            timeout_ms=5000,
            lease_wait_timeout_ms=1000,
            lease_ttl_s=30.0,
            put_stream_chunk_bytes=65536,
            use_https=False,
            max_lease_size_mb=None,
        )
        assert HyperpodOptions().connections == 100 and HyperpodOptions().lease_timeout_s == 1.5

    def test_every_key_is_read(self) -> None:
        """Each key with the prefix sets its own field, as a number or flag or as text."""
        given = {
            "bucket": "b",
            "shared_memory_name": "ai_toolkit_cache",
            "max_concurrent_requests": 7,
            "max_connections": 8,
            "max_connections_per_host": 9,
            "timeout_ms": 100,
            "lease_wait_timeout_ms": 0,
            "lease_ttl_s": 12.5,
            "put_stream_chunk_bytes": 1024,
            "use_https": True,
            "max_lease_size_mb": 64,
        }
        expected = HyperpodOptions(**given)  # type: ignore[arg-type]
        assert parsed({f"sagemaker_hyperpod_{key}": value for key, value in given.items()}) == expected
        as_text = {f"sagemaker_hyperpod_{key}": str(value) for key, value in given.items()}
        assert parsed(as_text) == expected
        assert parsed({"sagemaker_hyperpod_lease_ttl_s": 30}).lease_ttl_s == 30.0

    @pytest.mark.parametrize(
        ("key", "meant"),
        [
            ("sagemaker_hyperpod_buckett", "sagemaker_hyperpod_bucket"),
            ("sagemaker_hyperpod_lease_ttl", "sagemaker_hyperpod_lease_ttl_s"),
            ("hyperpod_use_https", "use_https"),
        ],
    )
    def test_an_unknown_key_is_an_error_with_the_one_that_was_meant(self, key: str, meant: str) -> None:
        """The message names both."""
        with pytest.raises(ConfigError, match=f"{key}.*did you mean {meant}\\?"):
            parsed({key: "1"})

    def test_a_key_like_none_is_told_all(self) -> None:
        """Where nothing is near, the message lists what there is."""
        with pytest.raises(ConfigError, match="it has bucket, "):
            parsed({"zzz": 1})

    @pytest.mark.parametrize(
        ("key", "value"),
        [
            ("timeout_ms", 99),
            ("timeout_ms", "soon"),
            ("timeout_ms", 1.5),
            ("timeout_ms", True),
            ("timeout_ms", None),
            ("timeout_ms", 2**31),
            ("put_stream_chunk_bytes", 1023),
            ("max_connections", 0),
            ("max_connections_per_host", -1),
            ("max_concurrent_requests", 0),
            ("lease_wait_timeout_ms", -1),
            ("lease_ttl_s", 0),
            ("lease_ttl_s", -1.0),
            ("lease_ttl_s", float("nan")),
            ("lease_ttl_s", "inf"),
            ("lease_ttl_s", 10**400),
            ("use_https", "yes"),
            ("use_https", 1),
            ("bucket", ""),
            ("bucket", "hotspan"),  # its objects have updates that only clients of the Unix socket see
            ("bucket", 5),
            ("bucket", "a\nb"),
            ("shared_memory_name", ""),
            ("shared_memory_name", ".."),
            ("shared_memory_name", "a/b"),
            ("shared_memory_name", "/"),
            ("shared_memory_name", "x" * 256),
            ("shared_memory_name", "a\0b"),
            ("max_lease_size_mb", 0),
            ("max_lease_size_mb", "large"),
        ],
    )
    def test_what_can_not_work_is_an_error(self, key: str, value: object) -> None:
        """The message names the key and says what would do."""
        with pytest.raises(ConfigError, match=f"{key} is .*: give "):
            parsed({f"sagemaker_hyperpod_{key}": value})

    def test_a_posix_name_may_begin_with_a_slash(self, peer: Peer, make: Callable[..., HyperpodStore]) -> None:
        """`/name` is the segment `name`."""
        store = make(shared_memory_name=f"/{peer.name}")
        one = Object()
        assert one.put(store) and one.get(store, there(store, one.key))
