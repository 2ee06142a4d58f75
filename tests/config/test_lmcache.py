"""LMCache's configuration, as its users have written it."""

import pytest

from hotspan.config.configuration import Configuration
from hotspan.config.settings import BlendSettings, DiskSettings, L2Settings
from hotspan.core.errors import ConfigError
from hotspan.core.types import GIB
from tests.config.rig import CONNECTOR, configured

PUBLISHED = """
*# lmcache_config.yaml*
*# 256 Tokens per KV Chunk*
**chunk_size**: 128
*# Enable Disk backend*
**local_disk**: "file://tmp/cache/" # Fixed for SM customers
*# 5GB of Disk memory*
**max_local_disk_size**: 6.0 # Changes with Model Size
*# Disable OS page cache in favor of CPU Pinned Memory*
**extra_config**: {'use_odirect': True} # Fixed for SM customers
# 5GB of Pinned CPU memory
**max_local_cpu_size**: 5.0 # default
"""


def warnings(done: Configuration) -> str:
    return " | ".join(str(note) for note in done.notes if note.is_warning)


def l2(url: str | None, **more: object) -> L2Settings | None:
    cache = configured(lmcache={"remote_url": url} | more).cache
    assert cache is not None
    return cache.l2


def test_the_published_sample() -> None:
    """The sample as it is published, asterisks and the missing slash included, is taken over with two warnings."""
    done = configured(lmcache=PUBLISHED)
    assert done.cache is not None and done.names_tiers
    assert done.cache.chunk_tokens == 128 and done.cache.ram_bytes == 5 * GIB
    assert done.cache.disk == DiskSettings("/tmp/cache", 6 * GIB)
    assert "asterisks" in warnings(done) and "file:///tmp/cache/" in warnings(done)
    assert done.settings["chunk_tokens"].given.place.endswith("lmcache.yaml:4")


def test_sizes_are_for_each_worker() -> None:
    """What LMCache gives to each process, hotspan's tiers have for all of them together."""
    lmcache = {"max_local_cpu_size": 20, "local_disk": "file:///nvme/", "max_local_disk_size": 100}
    done = configured("--tensor-parallel-size", "8", "-pp=2", lmcache=lmcache)
    assert done.cache is not None and done.cache.disk is not None
    assert (done.cache.ram_bytes, done.cache.disk.bytes) == (320 * GIB, 1600 * GIB)
    assert "20 for each of 16 workers" in done.settings["ram_gib"].given.origin


def test_connector_alone() -> None:
    """LMCache's connector without any file takes LMCache's default of RAM, and is none of the engine's options."""
    for words in (["--kv-transfer-config", CONNECTOR, "--seed", "1"], ["--seed", "1"]):
        serving = "" if len(words) > 2 else f"option.kv_transfer_config={CONNECTOR}"
        done = configured(*words, serving=serving)
        assert done.cache is not None and done.cache.ram_bytes == 5 * GIB
        assert "kv-transfer-config" not in " ".join(done.engine_words) and done.words == ("--seed", "1")
        assert done.settings["ram_gib"].given.origin == "LMCache's default"


def test_connector_carries_settings() -> None:
    """lmcache.* beside the connector counts before variables, and those before the file; its server is noted."""
    extra = '"kv_connector_extra_config":{"lmcache.max_local_cpu_size":3,"lmcache.mp.port":5555,"other":1}'
    config = f'{{"kv_connector":"LMCacheMPConnector",{extra}}}'
    variables = {"LMCACHE_MAX_LOCAL_CPU_SIZE": "2", "LMCACHE_CHUNK_SIZE": "'64'", "LMCACHE_LOG_LEVEL": "DEBUG"}
    lmcache = {"max_local_cpu_size": 1, "chunk_size": 32}
    done = configured("--kv-transfer-config", config, variables=variables, lmcache=lmcache)
    assert done.cache is not None and (done.cache.ram_bytes, done.cache.chunk_tokens) == (3 * GIB, 64)
    assert any("hotspan daemon" in note.text for note in done.notes)


def test_no_cache_leaves_the_connector_to_the_engine() -> None:
    """With --no-cache the engine gets the connector that was asked for."""
    words = ("--kv-transfer-config", CONNECTOR)
    done = configured(*words, flags={"no_cache": True})
    assert done.cache is None and done.engine_words == words
    done = configured(flags={"no_cache": True}, serving=f"option.kv_transfer_config={CONNECTOR}")
    assert "--kv-transfer-config" in done.engine_words


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://cache:6379", "redis://cache:6379"),
        ("valkey://cache:6379", "redis://cache:6379"),
        ("fs://localhost:0/mnt/kv", "file:///mnt/kv"),
        ("file:///tmp/lmcache", "file:///tmp/lmcache"),
        ("sagemaker-hyperpod://10.0.0.1:9200", "sagemaker-hyperpod://10.0.0.1:9200"),
        ("s3://bucket/prefix", "s3://bucket/prefix"),
    ],
)
def test_remotes(url: str, expected: str) -> None:
    """A remote becomes the L2."""
    assert l2(url) == L2Settings(expected)


def test_remotes_with_options() -> None:
    """HyperPod's settings go with it, and a bucket's host says its region."""
    extra = {"sagemaker_hyperpod_timeout_ms": 900, "sagemaker_hyperpod_use_https": False, "s3_part_size": 5}
    assert l2("sagemaker-hyperpod://h:9200", extra_config=extra) == L2Settings(
        "sagemaker-hyperpod://h:9200",
        {"sagemaker_hyperpod_timeout_ms": "900", "sagemaker_hyperpod_use_https": "false"},
    )
    assert l2("s3://kv.s3.eu-west-1.amazonaws.com/a") == L2Settings("s3://kv/a", {"region": "eu-west-1"})
    assert l2("redis://c") != l2(None) is None


def test_options_stay_with_their_remote() -> None:
    """An L2 that the command line names is not told what LMCache says of another one."""
    lmcache = {"remote_url": "sagemaker-hyperpod://h", "extra_config": {"sagemaker_hyperpod_timeout_ms": 900}}
    done = configured(flags={"l2": "redis://cache"}, lmcache=lmcache)
    assert done.cache is not None and done.cache.l2 == L2Settings("redis://cache")
    assert configured(lmcache={"extra_config": {"sagemaker_hyperpod_timeout_ms": 900}}).cache is not None


def test_what_hotspan_does_otherwise() -> None:
    """What asks for what hotspan does is noted; what asks for something else is a warning, unless it is off."""
    quiet = {"local_cpu": True, "remote_serde": "naive", "save_decode_cache": True, "use_gds": False}
    done = configured(lmcache=quiet | {"enable_blending": False, "local_disk": None, "max_local_disk_size": 0})
    assert warnings(done) == "" and len(done.notes) == 3
    assert done.cache is not None and done.cache.disk is None and not done.cache.prompts_only
    assert done.cache.blend is None
    blended = configured(lmcache={"enable_blending": True, "blend_special_str": " # # ", "blend_min_tokens": 300})
    assert blended.cache is not None and "approximate" in warnings(blended)
    assert blended.cache.blend == BlendSettings("deviation", min_tokens=300, separators=(" # # ",))
    for ratios in ([0.2, 0.3], 0.2, "0.2,0.3", "[0.2]"):
        given = configured(lmcache={"enable_blending": True, "blend_recompute_ratios": ratios})
        assert given.cache is not None and given.cache.blend == BlendSettings("deviation", recompute_ratio=0.2)
    for layers in (3, "3", [3, 5]):
        given = configured(lmcache={"enable_blending": True, "blend_check_layers": layers})
        assert given.cache is not None and given.cache.blend == BlendSettings("deviation", check_layer=3)
    assert "a share of the tokens" in warnings(configured(lmcache={"blend_thresholds": [0.15]}))
    assert "prefill" in warnings(configured(lmcache={"enable_xpyd": True}))


def test_automatic() -> None:
    """lmcache_auto_config is hotspan's --auto, with LMCache's connector beside it as LMI sets it."""
    assert configured(flags={"auto": True}).is_auto
    serving = f"option.lmcache_auto_config=True\noption.kv_transfer_config={CONNECTOR}"
    done = configured(serving=serving)
    assert done.is_auto and not done.names_tiers


@pytest.mark.parametrize(
    ("lmcache", "expected"),
    [
        ({"max_local_cpu_size": "5GB"}, "max_local_cpu_size is '5GB': give GiB as a plain number, without a unit: 5"),
        ({"max_local_cpu_size": "512 MiB"}, "without a unit: 0.5"),
        ({"max_local_cpu_size": "abc"}, "max_local_cpu_size is 'abc': give GiB as a plain number"),
        ({"max_local_cpu_size": float("nan")}, "give GiB as a plain number"),
        ({"max_local_cpu_size": 0}, "max_local_cpu_size = 0"),
        ({"chunk_size": "big"}, "chunk_size is 'big': give a whole number"),
        ({"chunk_size": 0}, "lmcache.yaml:1: chunk_size is 0: give a whole number above 0"),
        ({"local_cpu": "perhaps"}, "local_cpu is 'perhaps': give true or false"),
        ({"local_disk": "file:///a/"}, "--disk is given without --disk-gib"),
        ({"max_local_disk_size": 5}, "--disk-gib is given without --disk"),
        ({"local_disk": "/a,/b", "max_local_disk_size": 5}, "one directory"),
        ({"remote_url": "lm://cache:65432"}, "hotspan daemon --size-gib"),
        ({"remote_url": "redos://cache"}, "did you mean redis://"),
        ({"remote_url": "redis://:pw@cache"}, "password=file:/PATH"),
        ({"chunk_sise": 5}, "lmcache.yaml:1: chunk_sise: LMCache has no such key: did you mean chunk_size"),
        ({"extra_config": {"use_odirct": True}}, "did you mean use_odirect"),
        ({"extra_config": {"sagemaker_hyperpod_timeout": 5}}, "did you mean sagemaker_hyperpod_timeout_ms"),
        ({"extra_config": {"sagemaker_hyperpod_timeout_ms": 5}}, "extra_config: timeout_ms is 5"),
        ({"extra_config": "x"}, "give a JSON object"),
        ("- chunk_size: 5", "no mapping"),
        ("chunk_size: 5\nchunk_size: 6", "lmcache.yaml:2 is no YAML: 'chunk_size' stands here twice"),
        ("a: [", "is no YAML"),
        ("[a]: 5", "lmcache.yaml:1 is no YAML: a name is a list or mapping"),
        ("a: \x01", "is no YAML"),
    ],
)
def test_what_is_wrong_is_named(lmcache: object, expected: str) -> None:
    """An error names key, value, place and remedy."""
    with pytest.raises(ConfigError) as error:
        configured(lmcache=lmcache)  # type: ignore[arg-type]
    assert expected in str(error.value) and "lmcache.yaml" in str(error.value)


def test_variables_are_checked() -> None:
    """A variable's typo or wrong value is named as it was written."""
    with pytest.raises(ConfigError, match=r"LMCACHE_CHUNK_SIZ: .*did you mean LMCACHE_CHUNK_SIZE"):
        configured(variables={"LMCACHE_CHUNK_SIZ": "5"})
    with pytest.raises(ConfigError, match="environment: LMCACHE_MAX_LOCAL_CPU_SIZE is '5GB'"):
        configured(variables={"LMCACHE_MAX_LOCAL_CPU_SIZE": "5GB"})
