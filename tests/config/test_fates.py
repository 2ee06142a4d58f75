"""Every name that is accepted, from every source: it changes something, or the start names it.

Both tables are walked whole: keys.py for what acts, lmi_accepted.py and lmcache_names.py for what does not.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from hotspan.cli.flags import show_warnings
from hotspan.config import fates, kinds, lmcache_names
from hotspan.config.configuration import Configuration
from hotspan.config.fates import Fate, Foreign
from hotspan.config.inert import OF_STORES, RULES
from hotspan.config.keys import BY_NAME, KEYS
from hotspan.config.lmi import SECURE_ONLY
from hotspan.config.lmi_accepted import ACCEPTED, SAGEMAKER_ACCEPTED
from hotspan.config.options import Option, Spelling
from hotspan.config.settings import CacheSettings
from hotspan.core.errors import ConfigError
from tests.config.rig import CONNECTOR, configured

SAMPLES: Mapping[kinds.Kind, Any] = {
    kinds.GIB: "3",
    kinds.PATH: "/tmp/hotspan-none",
    kinds.TEXT: "text",
    kinds.PAIRS: "timeout_s=2",
    kinds.INTEGER: "77",
    kinds.COUNT: "77",
    kinds.NUMBER: "0.5",
    kinds.FRACTION: "0.5",
    kinds.NATURAL: "77",
    kinds.SECONDS: "77",
    kinds.BOOLEAN: "true",
    kinds.INVERTED: "false",
    kinds.BLENDING: "true",
    kinds.FIRST_NUMBER: "0.5",
    kinds.FIRST_INTEGER: "3",
    kinds.TEXTS: "text",
    kinds.VERBATIM: "text",
    kinds.PATTERNS: "text",
    kinds.MEBIBYTES: "77",
    kinds.DEGREE: "4",
    kinds.ANY: "512",
    kinds.DTYPE: "bf16",
    kinds.TASK: "embed",
    kinds.NORMALIZE: "false",
    kinds.JSON: '{"a": 1}',
    kinds.ADDRESS: "127.0.0.2:77",
    kinds.LISTING: "https://a.example,https://b.example",
}
OF_KEY = {
    "l2": "redis://cache",
    "l2_log": "redis://log",
    "disk_compress": "always",
    "l2_compress": "always",
    "model_digest": "sampled",
    "persistence": "none",
    "kek": "env:KEK",
    "model": "other/model",
    "admin_host": "127.0.0.2",
    "kv_transfer_config": CONNECTOR,
    "compat": "lmi",
    "sessions_path": "/dev/shm/none",
    "blend": "first_k",
}
LMCACHE = {"extra_config": '{"sagemaker_hyperpod_timeout_ms": 900}'}
BESIDE: Mapping[str, Mapping[str, Any]] = {
    "disk": {"disk_gib": "2"},
    "disk_gib": {"disk": "/tmp/hotspan-disk"},
    "l2_option": {"l2": "redis://cache"},
    "l2_log": {"l2": "redis://cache"},
    "disk_compress": {"disk": "/tmp/hotspan-disk", "disk_gib": "2"},
    "l2_compress": {"l2": "redis://cache"},
    "kek": {"key_store": "/tmp/keys"},
    "key_store": {"kek": "env:KEK"},
    "admin_host": {"admin_port": "9999"},
    "blend_first_k": {"blend": "allowed"},
    "blend_min_tokens": {"blend": "allowed"},
    "blend_separator": {"blend": "allowed"},
    "blend_check_every": {"blend": "allowed"},
    "blend_min_agreement": {"blend": "allowed"},
    "blend_recompute_ratio": {"blend": "allowed"},
    "blend_check_layer": {"blend": "allowed"},
}
"""What a key needs beside it to be sound."""


def sample(key: Option, spelling: Spelling | None = None) -> str:
    kind = key.kind if spelling is None or spelling.kind is None else spelling.kind
    return str(OF_KEY.get(key.name) or SAMPLES[kind] if kind is key.kind else SAMPLES[kind])


def effect(done: Configuration) -> tuple[object, ...]:
    """What a server is started with."""
    server, tenants = done.server, done.tenants
    return done.model, done.cache, server, tenants, done.engine_words, done.extent, done.is_isolated


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    """Values that are files which are read."""
    directory = tmp_path_factory.mktemp("files")
    tenants, lmcache = directory / "tenants.yaml", directory / "lmcache.yaml"
    tenants.write_text('tenants: {acme: {keys: ["a-key-of-acme"]}}')
    tenants.chmod(0o600)
    lmcache.write_text("max_local_cpu_size: 9\n")
    return {"tenants": str(tenants), "lmcache_config_file": str(lmcache)}


def ways(key: Option, text: str) -> list[tuple[str, dict[str, Any]]]:
    """Every name under which a value may be written, with where."""
    found: list[tuple[str, dict[str, Any]]] = []
    if key.name != "model":
        value = [text] if key.kind is kinds.PAIRS else text
        found.append((key.flag, {"flags": {key.name: value}} if key.is_own else {"own": {key.name: text}}))
        found.append((f"yaml {key.name}", {"own": {key.name: text}}))
    if key.is_own:
        found.append((f"HOTSPAN_{key.name.upper()}", {"variables": {f"HOTSPAN_{key.name.upper()}": text}}))
    for spelling in key.spellings:
        written = sample(key, spelling) if spelling.kind else text
        found.append((spelling.name, {"serving": f"{spelling.name}={written}"}))
        if spelling.name.startswith("option."):
            variable = "OPTION_" + spelling.name.removeprefix("option.").upper()
        else:
            variable = "SERVING_" + spelling.name.upper()
        found.append((variable, {"variables": {variable: written}}))
    for spelling in key.variables:
        found.append((spelling.name, {"variables": {spelling.name: sample(key, spelling) if spelling.kind else text}}))
    return found


def merged(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    return {**one, "flags": {**other, **one.get("flags", {})}}


@pytest.mark.parametrize("key", KEYS, ids=lambda key: key.name)
def test_what_acts_changes_something(key: Option, files: Mapping[str, str]) -> None:
    """Each name of each key, from each source, changes what a server or its engine is started with."""
    text = files.get(key.name) or sample(key)
    beside = BESIDE.get(key.name, {})
    named = None if key.name == "model" else "org/name"
    for name, way in ways(key, text):
        is_lmi = "serving" in way or not name.startswith(("--", "yaml", "HOTSPAN"))
        base: dict[str, Any] = {"flags": beside, "model": named}
        if is_lmi:  # other variables are read with LMI's configuration only
            base["server"] = "job_queue_size=1000"
        if key.name == "model":
            assert configured(**merged(way, beside), model=None).model == "other/model", name
            continue
        try:
            before: object = effect(configured(**base))
        except ConfigError:
            before = "unsound"  # the half of a pair
        after = effect(configured(**{**base, **merged(way, beside)}))
        assert after != before, f"{name} changes nothing"


@pytest.mark.parametrize("key", [key for key in KEYS if key.lmcache], ids=lambda key: key.name)
def test_what_acts_of_lmcache_changes_something(key: Option) -> None:
    """Each of LMCache's names of a key changes it, in its YAML, in its variables and in its connector."""
    assert key.lmcache is not None
    name = key.lmcache.name
    text = LMCACHE.get(name) or sample(key, key.lmcache)
    beside: dict[str, Any] = {"local_disk": {"max_local_disk_size": 1}, "max_local_disk_size": {"local_disk": "/tmp/a"}}
    beside |= {
        f"blend_{name}": {"enable_blending": True}
        for name in ("min_tokens", "special_str", "recompute_ratios", "check_layers")
    }
    beside["extra_config"] = {"remote_url": "sagemaker-hyperpod://h"}
    whole = {"chunk_size": 256, **beside.get(name, {})}

    def outcome(**given: Any) -> object:
        try:
            done: CacheSettings | None = configured(**given).cache
        except ConfigError:
            return "unsound"
        return done

    before = outcome(lmcache=whole)
    connector = json.loads(CONNECTOR) | {"kv_connector_extra_config": {"lmcache." + name: text}}
    for given in (
        {"lmcache": {**whole, name: text}},
        {"lmcache": whole, "variables": {"LMCACHE_" + name.upper(): text}},
        {"lmcache": whole, "own": {"kv-transfer-config": connector}},
    ):
        assert outcome(**given) not in (before, "unsound")


def asked(name: str, declared: Foreign) -> Any:
    """A value that asks for something else than happens."""
    return {kinds.BOOLEAN: declared.has_off, kinds.INTEGER: 7, kinds.NUMBER: 7.5}.get(declared.kind, "else")


def started(done: Configuration, capsys: pytest.CaptureFixture[str]) -> str:
    """What the start says."""
    show_warnings(done)
    return capsys.readouterr().err


def check_fate(declared: Foreign, name: str, given: Mapping[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    if declared.fate is Fate.REFUSED:
        with pytest.raises(ConfigError) as error:
            configured(**given)
        assert name in str(error.value) and declared.instead in str(error.value)
        return
    said = started(configured(**given), capsys)
    assert any(name in line and declared.instead in line for line in said.splitlines()), (name, said)


@pytest.mark.parametrize("name", ACCEPTED)
def test_what_does_not_act_of_lmi_is_named(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each name that sets nothing is named at the start with what happens instead, or refused with what to do."""
    declared = ACCEPTED[name]
    text = str(asked(name, declared)).lower()
    check_fate(declared, name, {"serving": f"{name}={text}"}, capsys)
    check_fate(declared, name, {"server": f"{name}={text}"}, capsys)
    for value in declared.as_is - {""}:
        assert name not in started(configured(serving=f"{name}={value}"), capsys)


@pytest.mark.parametrize("name", SAGEMAKER_ACCEPTED)
def test_what_does_not_act_of_sagemaker_is_named(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The same of the platform's variables."""
    check_fate(SAGEMAKER_ACCEPTED[name], name, {"variables": {name: "7"}}, capsys)


@pytest.mark.parametrize("name", lmcache_names.ACCEPTED)
def test_what_does_not_act_of_lmcache_is_named(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The same of LMCache's YAML, variables and connector; what turns off what hotspan has not says nothing."""
    declared = lmcache_names.ACCEPTED[name]
    value = asked(name, declared)
    check_fate(declared, name, {"lmcache": {name: value}}, capsys)
    check_fate(declared, name.upper(), {"variables": {"LMCACHE_" + name.upper(): str(value)}}, capsys)
    connector = {"kv_connector": "LMCacheConnectorV1", "kv_connector_extra_config": {f"lmcache.{name}": value}}
    check_fate(declared, name, {"own": {"kv-transfer-config": connector}}, capsys)
    for quiet in (declared.as_is - {""}) | ({None} if declared.has_off else set()):
        assert name not in started(configured(lmcache={name: quiet}), capsys)


@pytest.mark.parametrize("name", [*lmcache_names.EXTRA, "somebodys_plugin"])
def test_what_does_not_act_of_extra_config_is_named(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The same of the mapping that LMCache leaves to its back ends."""
    declared = lmcache_names.EXTRA.get(name, lmcache_names.UNKNOWN)
    value = "else" if declared.has_off else False
    check_fate(declared, name, {"lmcache": {"extra_config": {name: value}}}, capsys)


@pytest.mark.parametrize("name", lmcache_names.VARIABLES)
def test_what_does_not_act_of_other_variables_is_named(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The same of LMCACHE_* that are no keys."""
    variable = "LMCACHE_" + name.upper() + ("X" if name.endswith("_") else "")
    declared = lmcache_names.VARIABLES[name]
    check_fate(declared, variable, {"variables": {variable: "else" if declared.has_off else "false"}}, capsys)


def test_a_server_of_lmcache_is_not_asked(capsys: pytest.CaptureFixture[str]) -> None:
    """LMCacheMPConnector and its settings are named; its server's memory is no RAM tier of 5 GiB a rank."""
    connector = {
        "kv_connector": "LMCacheMPConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "fail",
        "kv_connector_extra_config": {"lmcache.mp.host": "tcp://localhost", "other": 1},
    }
    done = configured(own={"kv-transfer-config": connector}, gpus=2)
    said = started(done, capsys)
    for name in ("LMCacheMPConnector", "lmcache.mp.host", "kv_load_failure_policy", "other"):
        assert name in said
    assert done.extent is not None and not done.names_tiers
    plain = configured(own={"kv-transfer-config": {**connector, "kv_connector": "LMCacheConnectorV1"}})
    assert plain.names_tiers and plain.cache is not None


@pytest.mark.parametrize(
    ("rule", "name"), [(rule, name) for rule in RULES for name in rule.names], ids=lambda value: str(value)[:24]
)
def test_settings_without_effect_are_named(
    rule: Any, name: str, files: Mapping[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    """A setting that has no effect beside others is named with the reason; where it has, nothing is said."""
    key = BY_NAME.get(name)
    text = files.get(name) or (sample(key) if key else "false")
    beside = dict(BESIDE.get(name, {}))
    if "no-cache" in rule.instead:
        beside["no_cache"] = True
    elif "without --disk or --l2" in rule.instead:
        beside["ram_gib"] = "2"
    elif "no-sessions" in rule.instead:
        beside["no_sessions"] = True
    own: dict[str, Any] = {name: text}
    if name == "prefix_caching_hash_algo":
        own = {name: "xxhash"}
    elif "--client-adapters" in rule.instead:
        own["enable_lora"] = True
    elif name == "per_request_spec_decode_metrics":
        own = {name: "none", "speculative-config": {"method": "ngram", "num_speculative_tokens": 2}}
    said = started(configured(own=own, flags=beside), capsys)
    assert any(name in line and rule.instead in line for line in said.splitlines()), said
    quiet = {"own": own, "flags": BESIDE.get(name, {})}
    if name in ("adapters", "adapter_copies", "formatter_timeout_s") or name.startswith("max_"):
        quiet["own"] = own | {"enable_lora": True}
        if name == "max_client_adapters":
            quiet["flags"] = {"client_adapters": "/tmp/adapters"}
    elif name == "kv_events_key":
        quiet["own"] = own | {"kv-events-config": {"enable_kv_cache_events": True}}
    elif name in ("kek", "key_store"):
        quiet["flags"] = {**BESIDE[name], "ram_gib": "2", "l2": "redis://cache"}
    elif key is None:
        quiet = {}
    assert rule.instead not in started(configured(**quiet), capsys)


def test_the_counts_of_drafts_by_vllms_short_options(capsys: pytest.CaptureFixture[str]) -> None:
    """`none` is said to have no effect also where --spec-method asks for drafts."""
    own = {"per-request-spec-decode-metrics": "none", "spec-method": "ngram", "spec-tokens": 2}
    assert "always say how many were accepted" in started(configured(own=own), capsys)


def test_settings_of_a_directory_of_models(capsys: pytest.CaptureFixture[str]) -> None:
    """What only several models have use for is named where one is served, and only there."""
    done = configured(flags={"default_model": "a", "partial": True, "models_at_once": "2"})
    said = started(done, capsys)
    assert all(BY_NAME[name].flag in said for name in OF_STORES.names)
    show_warnings(done, is_store=True)
    assert capsys.readouterr().err == ""


def test_what_stands_beside_other_things(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Shares without tiers, a second admin token, controls without secure mode, and options of another L2."""
    tenants, token = tmp_path / "tenants.yaml", tmp_path / "token"
    tenants.write_text('tenants: {acme: {keys: ["a-key-of-acme"], quota: 0.5}}')
    tenants.chmod(0o600)
    flags = {"no_cache": True, "tenants": str(tenants), "admin_token_file": str(token)}
    variables = {"HOTSPAN_ADMIN_TOKEN": "0123456789abcdef", **dict.fromkeys(SECURE_ONLY, "DISALLOW_PICKLE_FILES")}
    said = started(configured(flags=flags, variables=variables), capsys)
    for name in ("--tenants", "HOTSPAN_ADMIN_TOKEN", *SECURE_ONLY):
        assert name in said
    assert "0123456789abcdef" not in said
    lmcache = {"extra_config": {"sagemaker_hyperpod_timeout_ms": 900}}
    assert "no L2 is named" in started(configured(lmcache=lmcache), capsys)
    lmcache |= {"remote_url": "sagemaker-hyperpod://h"}
    assert "the L2 is another one" in started(configured(flags={"l2": "redis://c"}, lmcache=lmcache), capsys)


def test_packages_are_not_installed(capsys: pytest.CaptureFixture[str]) -> None:
    """LMI installs the model's requirements.txt at the start; hotspan says that it does not."""
    said = started(configured(model=None, files=["config.json", "requirements.txt"]), capsys)
    assert "requirements.txt: hotspan installs nothing" in said
    assert started(configured(model=None, files=["config.json"]), capsys) == ""


@pytest.mark.parametrize("name", ["kv_offloading_size", "kv_offloading_backend"])
def test_vllms_own_offloading_is_refused(name: str) -> None:
    """It would take the place of hotspan's connector inside vLLM; without hotspan's tiers it may."""
    with pytest.raises(ConfigError, match="would take the place of hotspan's tiers"):
        configured("--" + name.replace("_", "-"), "5")
    assert configured("--" + name.replace("_", "-"), "5", flags={"no_cache": True}).cache is None


def test_nothing_has_two_fates() -> None:
    """A name either acts or is declared once; a second declaration is an error."""
    acting = {spelling.name.lower() for key in KEYS for spelling in key.spellings}
    assert not acting & {name.lower() for name in ACCEPTED}
    assert not {key.lmcache.name for key in KEYS if key.lmcache} & lmcache_names.ACCEPTED.keys()
    assert not {spelling.name for key in KEYS for spelling in key.variables} & {*SAGEMAKER_ACCEPTED, *SECURE_ONLY}
    one = fates.foreign(kinds.ANY, "nothing", "a b")
    with pytest.raises(ValueError, match="declared twice: a"):
        fates.table(one, fates.foreign(kinds.ANY, "nothing", "a"))
