"""KV events of a replica: on this machine unless an address is named, and with a key where they would tell secrets."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from hotspan.config.kv_events import published
from hotspan.config.settings import CacheSettings, EncryptionSettings
from hotspan.core.errors import ConfigError
from hotspan.server.findings import Severity
from hotspan.server.hardening import check_start, hardened
from hotspan.server.posture import posture

from .test_posture import KEK, KEYS, SEALED, STORE, cache, facts, options

PLAIN = cache()
ANYWHERE, HERE = "tcp://*:5557", "tcp://127.0.0.1:5557"


def events(**config: Any) -> tuple[str, ...]:
    return ("--kv-events-config", json.dumps({"enable_kv_cache_events": True, **config}))


@pytest.fixture
def key(tmp_path: Path) -> Path:
    file = tmp_path / "key"
    file.write_text("k" * 64)
    file.chmod(0o600)
    return file


def test_nobody_named_an_address() -> None:
    """Without an endpoint events are published on loopback; all else that was given stays."""
    guarded = hardened(options(engine=events(topic="kv"), tenants=KEYS), {})
    config = json.loads(guarded.engine_values["kv_events_config"])
    assert config == {"enable_kv_cache_events": True, "topic": "kv", "endpoint": HERE}


SECRETS = [
    {"tenants": KEYS},
    {"cache": cache(encryption=SEALED)},
    {"cache": cache(persistence="none")},
]


@pytest.mark.parametrize("secret", SECRETS)
@pytest.mark.parametrize(
    "config",
    [{"endpoint": ANYWHERE}, {"endpoint": HERE, "replay_endpoint": "tcp://*:5558"}, {"endpoint": "tcp://10.0.0.5:1"}],
)
def test_open_events_beside_secrets_are_refused(secret: dict[str, Any], config: dict[str, str], key: Path) -> None:
    """Tenants, encryption or --persistence none and an open endpoint contradict each other, unless there is a key."""
    given = options(engine=events(**config), **secret)
    for check in (hardened, check_start):
        with pytest.raises(ConfigError, match="--kv-events-key FILE"):
            check(given, {})
    settings: CacheSettings = secret.get("cache", PLAIN)
    keyed = options(**{"engine": events(**config), **secret, "cache": replace(settings, events_key=key)})
    assert hardened(keyed, {}).engine_values["kv_events_config"]
    [finding] = [each for each in posture(given, facts()) if each.what == "KV events"]
    assert finding.severity is Severity.BAD and "--kv-events-key" in finding.remedy
    [finding] = [each for each in posture(keyed, facts()) if each.what == "KV events"]
    assert finding.severity is Severity.OK


@pytest.mark.parametrize("value", ["true", 1, "1", "on", "Yes", 1.0, "t"])
def test_other_ways_to_say_true_are_seen(value: object) -> None:
    """vLLM takes words and numbers for true, and so does the check; what is said twice counts as vLLM takes it."""
    from vllm.config import KVEventsConfig

    words = events(enable_kv_cache_events=value, endpoint=ANYWHERE)
    assert TypeAdapter(KVEventsConfig).validate_json(words[1]).enable_kv_cache_events is True
    with pytest.raises(ConfigError, match="--kv-events-key"):
        hardened(options(engine=words, tenants=KEYS), {})
    last = ("--kv_events_config=" + words[1],)
    with pytest.raises(ConfigError, match="--kv-events-key"):
        hardened(options(engine=(*events(endpoint=HERE), *last), tenants=KEYS), {})
    assert published(options(engine=(*words, *events(enable_kv_cache_events="off"))).engine_values) is None


def test_without_tiers_there_is_no_key() -> None:
    """An engine of vLLM's alone publishes at every address: refused beside tenants, with what to do."""
    with pytest.raises(ConfigError, match="without --no-cache"):
        hardened(options(cache=None, engine=events(), tenants=KEYS), {})
    assert hardened(options(cache=None, engine=events()), {}).engine[:2] == events()


def test_a_key_for_nothing_is_refused(key: Path) -> None:
    """A key without events is a mistake that nobody would notice."""
    for engine in ((), events(publisher="null"), ("--kv-events-config", "{}")):
        with pytest.raises(ConfigError, match="without KV events"):
            hardened(options(engine=engine, cache=cache(events_key=key)), {})


@pytest.mark.parametrize(
    ("config", "severity"), [({"endpoint": ANYWHERE}, Severity.WARNING), ({}, Severity.WARNING), (None, Severity.OK)]
)
def test_doctor_says_who_can_follow(config: dict[str, str] | None, severity: Severity) -> None:
    """Events without a key are worth a warning, on this machine too."""
    given = options(engine=() if config is None else events(**config))
    hardened(given, {})
    [finding] = [each for each in posture(given, facts()) if each.what == "KV events"]
    assert finding.severity is severity


def test_settings_go_to_the_engine_and_back(key: Path) -> None:
    """The file's name, never what is in it, is among the settings that the engine's process gets."""
    settings = cache(events_key=key, encryption=EncryptionSettings(f"file:{KEK}", str(STORE)))
    said = json.dumps(settings.to_json())
    assert CacheSettings.from_json(json.loads(said)) == settings and "kkkk" not in said
