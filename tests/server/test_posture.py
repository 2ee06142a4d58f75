"""The posture of a server: what is well, what may surprise, and what somebody could use."""

from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotspan.config.server_settings import ServerSettings
from hotspan.config.settings import CacheSettings, DiskSettings, EncryptionSettings, L2Settings
from hotspan.plan.tiers import Extent
from hotspan.server.facts import SEGMENT, SOCKET, Facts, FileFact
from hotspan.server.findings import Finding, Severity
from hotspan.server.options import ServeOptions
from hotspan.server.posture import files_of, posture

from .conftest import serve_options
from .test_principal import known

KEYS = known(acme="key-a")
PRIVATE, PUBLIC = FileFact(True, 0o700), FileFact(True, 0o755)
STORE, KEK, DISK, TOKEN = Path("/k/store"), Path("/safe/kek"), Path("/nvme/hotspan"), Path("/etc/token")
SEALED = EncryptionSettings(f"file:{KEK}", str(STORE))
FILES = {STORE: PRIVATE, KEK: PRIVATE, DISK: PRIVATE, TOKEN: FileFact(True, 0o600)}


def options(**given: Any) -> ServeOptions:
    return serve_options(**{"model": "m", "cache": CacheSettings(1 << 30)} | given)


def cache(**given: Any) -> CacheSettings:
    return CacheSettings(1 << 30, **given)


def facts(files: dict[Path, FileFact] | None = None, **given: Any) -> Facts:
    return Facts(files=MappingProxyType(FILES | (files or {})), **given)


def judged(what: str, options: ServeOptions, facts: Facts) -> list[Finding]:
    return [finding for finding in posture(options, facts) if finding.what == what]


def severity(what: str, options: ServeOptions, facts: Facts) -> str:
    found = judged(what, options, facts)
    assert len(found) == 1, f"{what}: {found}"
    return found[0].severity.value


def test_a_plain_server_on_loopback_is_well() -> None:
    """What `hotspan serve MODEL` starts has nothing bad and nothing to warn of."""
    assert {finding.severity for finding in posture(options(), facts())} == {Severity.OK}


def test_a_careful_server_is_well() -> None:
    """Keys, TLS, a port for administration, encryption, a private disk and a sealed L2: nothing is left to do."""
    careful = options(
        host="0.0.0.0",
        tenants=KEYS,
        admin_port=8081,
        admin_token_file=TOKEN,
        engine=("--ssl-certfile", "c.pem", "--ssl-keyfile", "k.pem"),
        cache=cache(
            encryption=SEALED,
            disk=DiskSettings(str(DISK), 1),
            l2=L2Settings("rediss://cache:6379", {"password": "file:/p"}),
        ),
    )
    assert [finding for finding in posture(careful, facts()) if finding.severity is not Severity.OK] == []


OPEN = {"host": "0.0.0.0"}
CLIENT_ADAPTERS = ServerSettings(client_adapters=Path("/opt/ml"))


@pytest.mark.parametrize(
    ("what", "expected", "given", "known_facts"),
    [
        ("exposure", "bad", OPEN, {}),
        ("exposure", "warning", OPEN | {"insecure": True}, {}),
        ("exposure", "ok", OPEN | {"tenants": KEYS}, {}),
        ("exposure", "ok", {"host": "::1"}, {}),
        ("exposure", "ok", {"host": "localhost"}, {}),
        ("exposure", "bad", {"host": "gpu-7"}, {}),
        ("TLS", "warning", OPEN, {}),
        ("TLS", "warning", {"admin_port": 9, "admin_host": "0.0.0.0"}, {}),
        ("TLS", "ok", OPEN | {"engine": ("--ssl-certfile", "c", "--ssl-keyfile", "k")}, {}),
        ("TLS", "bad", {"engine": ("--ssl-keyfile", "k")}, {}),
        ("API keys", "warning", OPEN, {}),
        ("API keys", "ok", OPEN | {"tenants": KEYS}, {}),
        ("admin token", "bad", {"admin_token_file": Path("/nowhere")}, {}),
        ("admin token", "bad", {"admin_token_file": TOKEN}, {"files": {TOKEN: FileFact(True, 0o640)}}),
        ("admin token", "bad", {"admin_token_file": TOKEN}, {"files": {TOKEN: FileFact(False, 0o600)}}),
        ("admin address", "warning", OPEN, {}),
        ("admin address", "ok", OPEN | {"admin_port": 8081}, {}),
        ("adapters", "ok", OPEN, {}),
        ("adapters", "ok", {"server": CLIENT_ADAPTERS}, {}),
        ("adapters", "ok", OPEN | {"tenants": KEYS, "server": CLIENT_ADAPTERS}, {}),
        ("adapters", "warning", OPEN | {"server": CLIENT_ADAPTERS}, {}),
        ("metrics", "warning", OPEN, {}),
        ("metrics", "ok", OPEN, {"environment": {"HOTSPAN_ADMIN_TOKEN": "t"}}),
        ("metrics", "ok", OPEN | {"tenants": KEYS}, {}),
        ("tenants", "warning", {"is_isolated": False}, {}),
        ("encryption at rest", "warning", {"cache": cache(disk=DiskSettings(str(DISK), 1))}, {}),
        ("encryption at rest", "warning", {"extent": Extent.ALL}, {}),
        ("encryption at rest", "ok", {"cache": None}, {}),
        ("encryption at rest", "ok", {"extent": Extent.ALL, "cache": cache(persistence="none")}, {}),
        (
            "key store",
            "bad",
            {"cache": cache(disk=DiskSettings("/d", 1), encryption=SEALED)},
            {"files": {STORE: PUBLIC}},
        ),
        ("disk", "bad", {"cache": cache(disk=DiskSettings(str(DISK), 1))}, {"files": {DISK: PUBLIC}}),
        ("disk", "ok", {"cache": cache(disk=DiskSettings("/not/yet", 1))}, {}),
        ("daemon", "warning", {}, {"daemon_hosts": ("0.0.0.0",)}),
        ("daemon", "warning", {}, {"daemon_hosts": ("127.0.0.1", "::")}),
        ("daemon", "ok", {}, {"daemon_hosts": ("127.0.0.1",)}),
        ("core dumps", "warning", {}, {"core_bytes": -1}),
        ("swap", "warning", {}, {"has_swap": True}),
        ("media URLs", "ok", {"engine": ("--allowed-media-domains", "a", "b")}, {}),
        (
            "media URLs",
            "warning",
            {"engine": ("--allowed-media-domains", "a")},
            {"environment": {"VLLM_MEDIA_URL_ALLOW_REDIRECTS": "1"}},
        ),
        ("local media", "warning", {"engine": ("--allowed-local-media-path", "/")}, {}),
        ("custom code", "warning", {"engine": ("--trust-remote-code",)}, {}),
        ("custom code", "ok", {"engine": ("--no-trust-remote-code",)}, {}),
        ("start", "bad", {}, {"refusal": "secure mode takes no code"}),
    ],
)
def test_one_thing_at_a_time(what: str, expected: str, given: dict[str, Any], known_facts: dict[str, Any]) -> None:
    """Each subject is judged by what it depends on, and says what to do unless it is well."""
    files = known_facts.pop("files", None) if "files" in known_facts else None
    found = judged(what, options(**given), facts(files, **known_facts))
    assert [finding.severity.value for finding in found] == [expected]
    assert all((finding.severity is Severity.OK) != bool(finding.remedy) for finding in found)


@pytest.mark.parametrize(
    ("url", "client", "plain", "environment"),
    [
        ("redis://127.0.0.1:6379", {}, "ok", {}),
        ("redis://cache:6379", {"password": "env:P"}, "bad", {}),
        ("rediss://cache:6379", {}, "bad", {}),
        ("rediss://cache:6379", {"password": "env:P"}, "ok", {}),
        ("s3://bucket/prefix", {}, "ok", {}),
        ("s3://bucket/prefix", {"endpoint": "http://minio:9000"}, "bad", {}),
        ("s3://bucket/prefix", {}, "bad", {"AWS_ENDPOINT_URL": "http://minio:9000"}),
        ("sagemaker-hyperpod://127.0.0.1:9200", {}, "ok", {}),
        ("sagemaker-hyperpod://10.0.0.7:9200", {}, "bad", {}),
        ("sagemaker-hyperpod://10.0.0.7:9200", {}, "ok", {"NODE_IP": "10.0.0.7"}),
        ("file:///nvme/hotspan", {}, "bad", {}),
    ],
)
def test_the_way_to_an_l2(url: str, client: dict[str, str], plain: str, environment: dict[str, str]) -> None:
    """An L2 that strangers can read and write is bad for plain chunks and a warning for sealed ones."""
    known_facts = facts({DISK: PUBLIC}, environment=environment)
    assert severity("L2", options(cache=cache(l2=L2Settings(url, client))), known_facts) == plain
    sealed = options(cache=cache(l2=L2Settings(url, client), encryption=SEALED))
    assert severity("L2", sealed, known_facts) == ("ok" if plain == "ok" else "warning")


def test_keys_of_encryption() -> None:
    """A key-encryption key that others read, that lies in its own store, or that is in the environment is told."""
    disk = DiskSettings(str(DISK), 1)

    def kek(reference: str, **files: FileFact) -> list[str]:
        asked = options(cache=cache(disk=disk, encryption=EncryptionSettings(reference, str(STORE))))
        found = judged("key-encryption key", asked, facts({Path("/safe/kek"): files.get("kek", PRIVATE)}))
        return [finding.severity.value for finding in found]

    assert kek("file:/safe/kek") == [] and kek("aws-kms:alias/hotspan") == []
    assert kek("file:/safe/kek", kek=FileFact(True, 0o644)) == ["bad"]
    assert kek(f"file:{STORE}/kek") == ["bad"]
    assert kek("env:KEK") == ["warning"]


@pytest.mark.parametrize("path", [SEGMENT, SOCKET])
def test_the_daemons_memory(path: Path) -> None:
    """A daemon whose memory or socket every user may open is bad; a group's may be."""
    for permissions, expected in ((0o666, {"ok", "bad"}), (0o660, {"ok"}), (0o600, {"ok"})):
        found = judged("shared memory", options(), facts({path: FileFact(False, permissions)}))
        assert {finding.severity.value for finding in found} == expected


def test_code_of_the_models(tmp_path: Path) -> None:
    """A model.py that would be executed is named, and looked for where it would be."""
    server = ServerSettings(formatters=tmp_path)
    script = tmp_path / "model.py"
    asked = options(server=server)
    assert script in files_of(asked)
    assert severity("custom code", asked, facts()) == "ok"
    [finding] = judged("custom code", asked, facts({script: PUBLIC}))
    assert finding.severity is Severity.WARNING and str(script) in finding.state


@given(
    host=st.sampled_from(["127.0.0.1", "0.0.0.0", "::", "localhost", "host"]),
    admin_port=st.sampled_from([None, 9]),
    insecure=st.booleans(),
    has_keys=st.booleans(),
    is_isolated=st.booleans(),
    is_sealed=st.booleans(),
    l2=st.sampled_from([None, "redis://u:secret@cache", "rediss://cache", "s3://b", "file:///x", "redis://localhost"]),
    engine=st.lists(st.sampled_from(["--trust-remote-code", "--ssl-certfile=c", "--allowed-media-domains=a", "stray"])),
)
def test_any_configuration_is_judged(
    host: str,
    admin_port: int | None,
    insecure: bool,
    has_keys: bool,
    is_isolated: bool,
    is_sealed: bool,
    l2: str | None,
    engine: list[str],
) -> None:
    """Whatever is combined: no error, no secret is said, a remedy where it is not well, and keys never hurt."""
    settings = cache(encryption=SEALED if is_sealed else None, l2=None if l2 is None else L2Settings(l2))
    asked = options(
        host=host,
        admin_port=admin_port,
        insecure=insecure,
        is_isolated=is_isolated,
        engine=tuple(engine),
        cache=settings,
        tenants=KEYS if has_keys else known(),
    )
    found = posture(asked, facts())
    assert all(bool(finding.remedy) != (finding.severity is Severity.OK) for finding in found)
    assert "secret" not in "".join(finding.state + finding.remedy for finding in found)
    bad = {finding.what for finding in found if finding.severity is Severity.BAD}
    assert bad >= {
        finding.what for finding in posture(replace(asked, tenants=KEYS), facts()) if finding.severity is Severity.BAD
    }


def test_this_machine(tmp_path: Path) -> None:
    """What is looked up is what is so: modes as they are, what is not there left out, and never an error."""
    open_, closed = tmp_path / "open", tmp_path / "closed"
    open_.mkdir(mode=0o755)
    closed.mkdir(mode=0o700)
    open_.chmod(0o755)
    found = Facts.probe({"A": "b"}, [open_, closed, tmp_path / "missing"])
    assert found.files[open_] == FileFact(True, 0o755) and not found.files[open_].is_private
    assert found.files[closed].is_private and tmp_path / "missing" not in found.files
    assert found.environment == {"A": "b"} and found.open_files != 0
