"""Settings of the L2, and its secrets."""

import json
from pathlib import Path

import pytest

from hotspan.config.secrets import resolved
from hotspan.config.settings import CacheOptions, CacheSettings
from hotspan.core.errors import ConfigError
from tests.config.rig import configured


def test_settings_travel() -> None:
    """An L2 with options and a log of its own is the same after its way to the engine."""
    settings = CacheOptions(ram_gib=1, l2="redis://a", l2_option={"timeout_s": "2"}, l2_log="redis://b").settings()
    assert CacheSettings.from_json(json.loads(json.dumps(settings.to_json()))) == settings
    assert settings.l2 is not None and settings.l2.options == {"timeout_s": "2"}


def test_nothing_leaves_memory_without_persistence() -> None:
    """--persistence none refuses an L2."""
    with pytest.raises(ConfigError, match="--l2 sends it away"):
        CacheOptions(ram_gib=1, l2="redis://a", persistence="none").settings()


@pytest.mark.parametrize("given", [{"l2_option": {"a": "b"}}, {"l2_log": "redis://a"}, {"l2_compress": "always"}])
def test_options_need_an_l2(given: dict[str, object]) -> None:
    """What belongs to an L2 is refused without one."""
    with pytest.raises(ConfigError, match="--l2"):
        CacheOptions(ram_gib=1, **given).settings()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("url", "option", "expected"),
    [
        ("redis://h", "timeout=5", "did you mean timeout_s"),
        ("redis://h", "timeout_s=abc", "give a number"),
        ("file:///shared", "capacity=1", "capacity_gib"),
        ("s3://b/p", "connections=many", "give a number"),
        ("sagemaker-hyperpod://h", "timeout=5", "did you mean timeout_ms"),
    ],
)
def test_options_are_checked_before_anything_starts(url: str, option: str, expected: str) -> None:
    """A name or value that the store would refuse is refused with the configuration, which names its place."""
    name, _, text = option.partition("=")
    with pytest.raises(ConfigError, match=expected):
        configured(flags={"ram_gib": 1.0, "l2": url, "l2_option": {name: text}})
    assert configured(flags={"ram_gib": 1.0, "l2": "redis://h", "l2_option": {"password": "env:P"}}).cache is not None


def test_a_log_has_a_password_of_its_own() -> None:
    """log_password goes to the log's client alone, as a reference; without a log it is refused."""
    flags = {"ram_gib": 1.0, "l2": "sagemaker-hyperpod://h", "l2_option": ["log_password=env:P", "timeout_ms=500"]}
    done = configured(flags=flags | {"l2_log": "rediss://log"})
    assert done.cache is not None and done.cache.l2 is not None
    assert done.cache.l2.store_options == {"timeout_ms": "500"}
    assert done.cache.l2.log_options == {"password": "env:P"}
    with pytest.raises(ConfigError, match="belongs to a log of its own"):
        configured(flags=flags)
    with pytest.raises(ConfigError, match="--l2-option log_password=file"):
        configured(flags=flags | {"l2_log": "redis://:pw@log"})


def test_secrets_are_fetched(tmp_path: Path) -> None:
    """A password is read from its file or variable; written out, or where nothing is, it is refused unrepeated."""
    path = tmp_path / "password"
    path.write_text("s3cret\n")
    path.chmod(0o600)
    assert resolved({"password": f"file:{path}", "prefix": "x"}, {}) == {"password": "s3cret", "prefix": "x"}
    assert resolved({"password": "env:P"}, {"P": "s3cret"}) == {"password": "s3cret"}
    for reference in ("s3cret", "env:MISSING", "file:", f"file:{tmp_path}/none"):
        with pytest.raises(ConfigError) as error:
            resolved({"password": reference}, {})
        assert "s3cret" not in str(error.value)
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="other users"):
        resolved({"password": f"file:{path}"}, {})
