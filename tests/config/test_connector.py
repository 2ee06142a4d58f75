"""The tiers of a vLLM that somebody else starts."""

import tomllib
from pathlib import Path
from typing import Any

import pytest

import hotspan
from hotspan.config.connector import connector_settings, step_timeout_s, transfer_config
from hotspan.config.server_settings import ServerSettings
from hotspan.config.settings import CacheSettings
from hotspan.core.errors import ConfigError
from hotspan.core.types import GIB

ROOT = Path(__file__).parents[2]


def read(extra: dict[str, Any], variables: dict[str, str], workers: int = 1) -> CacheSettings:
    return connector_settings(extra, variables, workers).cache


def test_tiers_come_from_variables() -> None:
    """HOTSPAN_* name the tiers; LMI's variables are for `hotspan serve` and change nothing."""
    found = read({}, {"HOTSPAN_RAM_GIB": "2", "OPTION_TENSOR_PARALLEL_DEGREE": "max", "HF_MODEL_ID": "other/model"})
    assert found.ram_bytes == 2 * GIB


def test_tiers_come_from_the_extra_config() -> None:
    """The extra config counts before variables, with numbers as JSON has them."""
    found = read({"hotspan.ram_gib": 3, "hotspan.chunk-tokens": 512}, {"HOTSPAN_RAM_GIB": "2"})
    assert (found.ram_bytes, found.chunk_tokens) == (3 * GIB, 512)


def test_tiers_come_from_lmcache_file(tmp_path: Path) -> None:
    """LMCACHE_CONFIG_FILE is read, and its size is for each worker."""
    file = tmp_path / "lmcache.yaml"
    file.write_text("max_local_cpu_size: 3\n")
    assert read({}, {"LMCACHE_CONFIG_FILE": str(file)}, workers=2).ram_bytes == 6 * GIB


def test_tiers_come_from_a_file(tmp_path: Path) -> None:
    """HOTSPAN_CONFIG names hotspan's own file."""
    file = tmp_path / "hotspan.yaml"
    file.write_text("ram-gib: 5\n")
    assert read({}, {"HOTSPAN_CONFIG": str(file)}).ram_bytes == 5 * GIB


def test_complete_settings_are_taken_as_they_are() -> None:
    """What `transfer_config` writes is what the connector reads, whatever the environment has."""
    settings = CacheSettings(7 * GIB, chunk_tokens=128)
    assert read(transfer_config(settings)["kv_connector_extra_config"], {"HOTSPAN_RAM_GIB": "2"}) == settings


@pytest.mark.parametrize(
    ("extra", "variables", "message"),
    [
        ({}, {}, "no tier is named"),
        ({"hotspan.ram_gb": 3}, {}, "ram_gib"),
        ({}, {"HOTSPAN_RAM_GB": "3"}, "HOTSPAN_RAM_GIB"),
        ({"hotspan.ram_gib": "much"}, {}, "ram"),
        ({"hotspan.auto": True}, {}, "alone chooses sizes"),
        ({"hotspan.disk": "/d", "hotspan.disk_gib": 5, "hotspan.port": 1}, {}, "hotspan.port"),
        ({}, {"HOTSPAN_NO_CACHE": "true"}, "leave one of them out"),
    ],
)
def test_what_cannot_work_is_named(extra: dict[str, Any], variables: dict[str, str], message: str) -> None:
    """An unknown key, a wrong value or no tier is an error that names it."""
    with pytest.raises(ConfigError, match=message):
        read(extra, variables)


def test_engine_options_round_trip(tmp_path: Path) -> None:
    """engine_options() gives what the connector reads, and the hash algorithm that its keys need."""
    options = hotspan.engine_options(ram="512MiB", disk=tmp_path, disk_size="1TiB", chunk_tokens=128)
    found = read(options["kv_transfer_config"]["kv_connector_extra_config"], {})
    assert found.disk is not None
    assert (found.ram_bytes, found.disk.bytes, found.chunk_tokens) == (GIB // 2, 1024 * GIB, 128)
    assert options["prefix_caching_hash_algo"] == "sha256_cbor"
    assert options["kv_transfer_config"] == hotspan.transfer_config(
        ram="512MiB", disk=tmp_path, disk_size="1TiB", chunk_tokens=128
    )


def test_api_keys_are_refused(tmp_path: Path) -> None:
    """A file of tenants with keys is an error, since nothing would check them; one with retention rules acts."""
    file = tmp_path / "tenants.yaml"
    variables = {"HOTSPAN_RAM_GIB": "1", "HOTSPAN_TENANTS": str(file)}
    file.write_text("retention: [{ttl: 1h}]\n")
    file.chmod(0o600)
    assert read({}, variables).retention[0].ttl_s == 3600
    file.write_text("tenants: {acme: {keys: [sk-0123456789abcdef0123456789]}}\n")
    with pytest.raises(ConfigError, match="API keys"):
        read({}, variables)


def test_what_only_hotspan_serve_reads_is_named(tmp_path: Path) -> None:
    """Options of the server and of the engine in hotspan's sources have no effect here, and are named."""
    file = tmp_path / "hotspan.yaml"
    file.write_text("ram-gib: 5\nmax-model-len: 4096\n")
    variables = {"HOTSPAN_CONFIG": str(file), "HOTSPAN_JOB_QUEUE_SIZE": "7", "LMCACHE_CACHE_POLICY": "LRU"}
    notes = " ".join(str(note) for note in connector_settings({}, variables).notes if note.is_warning)
    assert all(name in notes for name in ("max-model-len", "HOTSPAN_JOB_QUEUE_SIZE", "LMCACHE_CACHE_POLICY"))
    assert connector_settings({}, {"HOTSPAN_RAM_GIB": "1", "HOTSPAN_KV_EVENTS_KEY": str(file)}).notes == ()


@pytest.mark.parametrize(
    "tiers", [{"ram": "32"}, {"ram": "32GB"}, {"ram": "1GiB", "disk": "/x"}, {"ram": "1GiB", "a": 1}]
)
def test_engine_options_refuse(tiers: dict[str, Any]) -> None:
    """A size without a binary unit, a disk without a size and an unknown option are errors."""
    with pytest.raises(ConfigError):
        hotspan.engine_options(**tiers)


def test_the_entry_point_is_declared() -> None:
    """vLLM's general plugins load hotspan.server.control:register."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["vllm.general_plugins"] == {"hotspan": "hotspan.server.control:register"}


def test_the_step_timeout_is_that_of_serve() -> None:
    """HOTSPAN_STEP_TIMEOUT_S, which the engine reads elsewhere than the tiers; without it serve's default."""
    assert step_timeout_s({}) == ServerSettings().step_timeout_s
    assert step_timeout_s({"HOTSPAN_STEP_TIMEOUT_S": "7.5"}) == 7.5
    with pytest.raises(ConfigError, match="HOTSPAN_STEP_TIMEOUT_S"):
        step_timeout_s({"HOTSPAN_STEP_TIMEOUT_S": "soon"})
