"""The file of tenants: what it gives, and the sentence for whatever is wrong with it."""

import hashlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotspan.config.settings import CacheOptions, CacheSettings, TenantShare
from hotspan.config.tenants import Tenants, load_tenants
from hotspan.core.credentials import key_digest
from hotspan.core.directives import RetentionRule
from hotspan.core.errors import ConfigError

SECRET = "sk-the-secret-of-acme"


def written(directory: Path, text: str, mode: int = 0o600) -> Path:
    path = directory / "tenants.yaml"
    path.write_text(text)
    path.chmod(mode)
    return path


def refused(directory: Path, text: str, mode: int = 0o600) -> str:
    with pytest.raises(ConfigError) as error:
        load_tenants(written(directory, text, mode))
    said = str(error.value)
    assert said.startswith(str(directory / "tenants.yaml")) and SECRET not in said
    return said


def test_whole_file(tmp_path: Path) -> None:
    """Keys as text and as SHA-256, shares, a tenant's time to live and rules of retention."""
    digest = hashlib.sha256(b"sk-two").hexdigest()
    known = load_tenants(
        written(
            tmp_path,
            f"""
            tenants:
              acme: {{keys: [{SECRET}, "sha256:{digest}"], floor: 0.2, quota: 0.6, ttl: 24h}}
              globex:
                keys: [sk-three]
            retention:
              - {{tag: "pii-*", ttl: 1h}}
              - {{tenant: acme, tag: secret, no_store: true}}
            """,
        )
    )
    assert known.names == ("acme", "globex") and known.has_keys
    assert known.tenants[0].keys == (key_digest(SECRET), key_digest("sk-two"))
    assert known.shares == (TenantShare("acme", 0.2, 0.6), TenantShare("globex", None, 1.0))
    assert known.retention == (
        RetentionRule(tenant="acme", ttl_s=86400),
        RetentionRule(tag="pii-*", ttl_s=3600),
        RetentionRule(tenant="acme", tag="secret", no_store=True),
    )


def test_settings_carry_it_into_the_engine(tmp_path: Path) -> None:
    """Shares and rules survive the way through the engine's JSON."""
    known = load_tenants(written(tmp_path, f"tenants: {{acme: {{keys: [{SECRET}], quota: 0.5, ttl: 5m}}}}"))
    settings = CacheOptions(ram_gib=1).settings(is_strict=True, tenants=known.shares, retention=known.retention)
    assert CacheSettings.from_json(settings.to_json()) == settings
    assert settings.is_strict and settings.tenants[0].quota == 0.5 and settings.retention[0].ttl_s == 300


def test_no_key_is_kept_or_shown(tmp_path: Path) -> None:
    """What is loaded holds no key, and its repr no digest."""
    known = load_tenants(written(tmp_path, f"tenants: {{acme: {{keys: [{SECRET}]}}}}"))
    assert SECRET not in repr(known) and str(key_digest(SECRET)) not in repr(known)


def test_retention_alone_needs_no_keys(tmp_path: Path) -> None:
    """A file of rules only leaves the server open to its one tenant; `default` may have a share without a key."""
    known = load_tenants(written(tmp_path, "tenants: {default: {quota: 0.5}}\nretention: [{ttl: 7d}]"))
    assert not known.has_keys and known.retention == (RetentionRule(ttl_s=7 * 86400),)


def test_a_name_is_no_pattern(tmp_path: Path) -> None:
    """The time to live of tenant a*b does not reach tenant axb."""
    known = load_tenants(written(tmp_path, 'tenants: {"a*b": {keys: [k1], ttl: 1h}, axb: {keys: [k2]}}'))
    (rule,) = known.retention
    from hotspan.core.directives import Directives

    assert rule.applies(Directives(tenant="a*b")) and not rule.applies(Directives(tenant="axb"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "is empty"),
        ("tenants:", "without tenants"),
        ("tenants: {}", "without tenants"),
        ("- acme", "write one `name: value`"),
        ("tenant: {acme: {keys: [a]}}", "unknown 'tenant': did you mean tenants?"),
        ("tenants: {acme: {key: [a]}}", "unknown 'key' in tenants.acme: did you mean keys?"),
        ("tenants: {acme: {keys: [a], flor: 1}}", "did you mean floor?"),
        ("tenants: {acme: }", "has no tenants.acme.keys"),
        ("tenants: {acme: {keys: []}}", "has no tenants.acme.keys"),
        (f"tenants: {{acme: {{keys: {SECRET}}}}}", "has no tenants.acme.keys"),
        (f"tenants: {{acme: {{keys: ['{SECRET} ']}}}}", "tenants.acme.keys[0] that no header can carry"),
        ("tenants: {acme: {keys: ['']}}", "no header can carry"),
        ("tenants: {acme: {keys: [123]}}", "no header can carry"),
        ("tenants: {acme: {keys: ['sha256:abc']}}", "sha256: and 64 hex digits"),
        (f"tenants: {{a: {{keys: [{SECRET}]}}, b: {{keys: [x, {SECRET}]}}}}", "tenants.a.keys[0] and as tenants.b.ke"),
        (
            f"tenants: {{a: {{keys: [{SECRET}, 'sha256:{hashlib.sha256(SECRET.encode()).hexdigest()}']}}}}",
            "give each key once",
        ),
        ("tenants: {a: {keys: [x]}, a: {keys: [y]}}", ":1 is no YAML: 'a' stands here twice"),
        ("tenants: {1: {keys: [x]}}", 'put it in quotes ("1")'),
        ("tenants: {' a': {keys: [x]}}", "printable characters"),
        ("tenants: {a: {keys: [x], quota: 60}}", "tenants.a.quota 60: give a fraction"),
        ("tenants: {a: {keys: [x], quota: .nan}}", "give a fraction"),
        ("tenants: {a: {keys: [x], floor: true}}", "give a fraction"),
        ("tenants: {a: {keys: [x], floor: 0.5, quota: 0.4}}", "above its quota"),
        ("tenants: {a: {keys: [x], floor: 0.6}, b: {keys: [y], floor: 0.5}}", "add up to 1.1"),
        ("tenants: {a: {keys: [x], ttl: 1 week}}", "wrong tenants.a.ttl: ttl is '1 week'"),
        ("tenants: {a: {keys: [x], ttl: .inf}}", "wrong tenants.a.ttl"),
        ("retention: {ttl: 1h}", "no list"),
        ("retention: [1h]", "has retention[0] where tenant, tag"),
        ("retention: [{tag: x}]", "does nothing"),
        ("retention: [{tag: 5, ttl: 1h}]", "retention[0].tag 5"),
        ("retention: [{no_store: 'yes'}]", "retention[0].no_store 'yes'"),
        ("tenants: {acme: {keys: [x]}}\nretention: [{tenant: acne, ttl: 1h}]", "did you mean acme?"),
        ("tenants:\n  acme: {keys: [x]\n", ":3 is no YAML"),
        ("tenants:\n\tacme: 1", ":2 is no YAML"),
        ("!!python/object/apply:os.system ['true']", "is no mapping"),
        ("tenants: !!python/object/apply:os.system ['true']", ":1 is no YAML"),
        ("[tenants]: 1", ":1 is no YAML: a name is a list or mapping"),
        ('tenants: "\0"', "is no YAML"),
    ],
)
def test_mistakes(tmp_path: Path, text: str, expected: str) -> None:
    """What is wrong is named with its place and what to write, and a key is never repeated."""
    assert expected in refused(tmp_path, text)


@pytest.mark.parametrize("mode", [0o604, 0o640, 0o660, 0o644])
def test_open_to_others(tmp_path: Path, mode: int) -> None:
    """A file that other users can read is refused, with the command that closes it."""
    assert "chmod 600" in refused(tmp_path, f"tenants: {{acme: {{keys: [{SECRET}]}}}}", mode)


def test_missing_file_and_directory(tmp_path: Path) -> None:
    """A file that is not there, a directory in its place, and bytes that are no text."""
    with pytest.raises(ConfigError, match="No such file"):
        load_tenants(tmp_path / "nothing")
    with pytest.raises(ConfigError, match="give another file"):
        load_tenants(tmp_path)
    path = written(tmp_path, "")
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="no UTF-8"):
        load_tenants(path)


@given(st.text(max_size=200))
def test_any_text_is_tenants_or_a_sentence(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    """Whatever the file holds, the answer is Tenants or one ConfigError."""
    path = tmp_path_factory.mktemp("any") / "tenants.yaml"
    path.write_text(text, encoding="utf-8", errors="replace")
    path.chmod(0o600)
    try:
        assert isinstance(load_tenants(path), Tenants)
    except ConfigError as error:
        assert str(path) in str(error)
