"""Who may use a server, what of the cache is theirs, and how long it is kept: the file of `--tenants`.

    tenants:
      acme: {keys: ["sk-...", "sha256:<hex of sha256(key)>"], floor: 0.2, quota: 0.6, ttl: 24h}
    retention:
      - {tag: "pii-*", ttl: 1h}
      - {tenant: acme, tag: secret, no_store: true}

A key is held as its SHA-256 only, from here on.
"""

import glob
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hotspan.config.documents import parse_entries
from hotspan.config.secrets import is_token, read_private
from hotspan.config.settings import TenantShare
from hotspan.core.credentials import key_digest
from hotspan.core.directives import RetentionRule, seconds
from hotspan.core.errors import ConfigError, did_you_mean
from hotspan.core.terms import DEFAULT_TENANT

_SECTIONS = ("tenants", "retention")
_TENANT_FIELDS = ("keys", "floor", "quota", "ttl")
_RULE_FIELDS = ("tenant", "tag", "ttl", "no_store")
_DIGEST = re.compile(r"sha256:([0-9a-fA-F]{64})")
_MAX_NAME_LENGTH = 128


@dataclass(frozen=True, slots=True)
class Tenant:
    """Somebody who shares the server with others.

    keys: SHA-256 of each API key.
    """

    name: str
    keys: tuple[bytes, ...] = field(repr=False)
    share: TenantShare


@dataclass(frozen=True, slots=True)
class Tenants:
    """Everybody who may use a server, and the rules on how long their texts are kept."""

    tenants: tuple[Tenant, ...] = ()
    retention: tuple[RetentionRule, ...] = ()

    @property
    def has_keys(self) -> bool:
        """Whether clients must show a key."""
        return any(tenant.keys for tenant in self.tenants)

    @property
    def names(self) -> tuple[str, ...]:
        """The tenants' names."""
        return tuple(tenant.name for tenant in self.tenants)

    @property
    def shares(self) -> tuple[TenantShare, ...]:
        """The tenants' parts of each tier."""
        return tuple(tenant.share for tenant in self.tenants)


def load_tenants(path: Path) -> Tenants:
    """The tenants of a file.

    Raises: ConfigError that names the file, what in it is wrong, and what to write; it never repeats a key.
    """
    return _Reader(path).read()


def read_api_key(given: object) -> bytes:
    """The SHA-256 of an API key, written as it is or as sha256:HEX. Raises: ValueError that does not repeat it."""
    if not isinstance(given, str) or not is_token(given):
        raise ValueError("that no header can carry: give visible ASCII characters without spaces")
    if not given.startswith("sha256:"):
        return key_digest(given)
    match = _DIGEST.fullmatch(given)
    if match is None:
        raise ValueError("that is no SHA-256: write sha256: and 64 hex digits")
    return bytes.fromhex(match[1])


class _Reader:
    """One file's way from text to Tenants."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._owners: dict[bytes, str] = {}  # key -> where it stood

    def read(self) -> Tenants:
        entries = parse_entries(read_private(self._path, "the tenants' keys"), self._path)
        document = self._mapping({entry.name: entry.value for entry in entries}, "", _SECTIONS)
        if not document:
            raise self._wrong("is empty: write a section tenants, with a name and keys for each")
        tenants, rules = [], []
        for name, given in self._names(document).items():
            where = f"tenants.{name}"
            fields = self._mapping({} if given is None else given, where, _TENANT_FIELDS)
            tenants.append(Tenant(name, self._keys(fields, name), self._share(fields, name)))
            if fields.get("ttl") is not None:
                rules.append(RetentionRule(tenant=glob.escape(name), ttl_s=self._ttl(fields["ttl"], f"{where}.ttl")))
        floors = sum(tenant.share.floor or 0.0 for tenant in tenants)
        if floors > 1 + 1e-9:
            raise self._wrong(f"gives floors that add up to {floors:g} of each tier: lower some, to 1 in all")
        names = tuple(tenant.name for tenant in tenants)
        rules += [self._rule(rule, f"retention[{n}]", names) for n, rule in enumerate(self._rules(document))]
        return Tenants(tuple(tenants), tuple(rules))

    def _names(self, document: Mapping[str, Any]) -> Mapping[str, Any]:
        if "tenants" not in document:
            return {}
        given = document["tenants"]
        if not isinstance(given, Mapping) or not given:
            raise self._wrong("has a section tenants without tenants: write a name and keys for each, or leave it out")
        for name in given:
            if not isinstance(name, str):
                raise self._wrong(f'has a tenant {name!r}, which YAML reads as no text: put it in quotes ("{name}")')
            if not 0 < len(name) <= _MAX_NAME_LENGTH or not name.isprintable() or name != name.strip():
                raise self._wrong(f"has a tenant {name!r}: give names of 1 to {_MAX_NAME_LENGTH} printable characters")
        return given

    def _keys(self, fields: Mapping[str, Any], name: str) -> tuple[bytes, ...]:
        where, given = f"tenants.{name}.keys", fields.get("keys")
        if given is None and name == DEFAULT_TENANT:
            return ()  # whose requests are those that come without a key
        if not isinstance(given, list) or not given:
            raise self._wrong(f"has no {where}: give a list of API keys, or nobody can be {name!r}")
        return tuple(self._key(key, f"{where}[{n}]") for n, key in enumerate(given))

    def _key(self, given: object, where: str) -> bytes:
        try:
            digest = read_api_key(given)
        except ValueError as error:
            raise self._wrong(f"has a {where} {error}") from None
        if digest in self._owners:
            raise self._wrong(f"has the same key as {self._owners[digest]} and as {where}: give each key once")
        self._owners[digest] = where
        return digest

    def _share(self, fields: Mapping[str, Any], name: str) -> TenantShare:
        where = f"tenants.{name}"
        quota = self._fraction(fields["quota"], f"{where}.quota") if fields.get("quota") is not None else 1.0
        floor = self._fraction(fields["floor"], f"{where}.floor") if fields.get("floor") is not None else None
        if floor is not None and floor > quota:
            raise self._wrong(f"has {where}.floor {floor:g} above its quota {quota:g}: lower it, or raise the quota")
        return TenantShare(name, floor, quota)

    def _fraction(self, value: object, where: str) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
            raise self._wrong(f"has {where} {value!r}: give a fraction of each tier, from 0 to 1")
        return float(value)

    def _ttl(self, value: object, where: str) -> int:
        try:
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"ttl is {value}: give a number of seconds")
            return seconds(value)
        except ValueError as error:
            raise self._wrong(f"has a wrong {where}: {error}") from error

    def _rules(self, document: Mapping[str, Any]) -> list[object]:
        given = document.get("retention") or []
        if not isinstance(given, list):
            raise self._wrong("has a section retention that is no list: begin each rule with a dash")
        return given

    def _rule(self, given: object, where: str, names: Collection[str]) -> RetentionRule:
        fields = self._mapping(given, where, _RULE_FIELDS)
        for name in ("tenant", "tag"):
            if name in fields and (not isinstance(fields[name], str) or not fields[name]):
                raise self._wrong(f"has {where}.{name} {fields[name]!r}: give a text, which may be a pattern (pii-*)")
        no_store = fields.get("no_store", False)
        if not isinstance(no_store, bool):
            raise self._wrong(f"has {where}.no_store {no_store!r}: give true or false")
        ttl = None if fields.get("ttl") is None else self._ttl(fields["ttl"], f"{where}.ttl")
        if ttl is None and not no_store:
            raise self._wrong(f"has a rule {where} that does nothing: give it a ttl or no_store: true")
        tenant = fields.get("tenant", "*")
        known = (*names, DEFAULT_TENANT)
        if not any(letter in tenant for letter in "*?[") and tenant not in known:
            raise self._wrong(f"has {where}.tenant {tenant!r}, who is no tenant: {_meant(tenant, known)}")
        return RetentionRule(tenant=tenant, tag=fields.get("tag"), ttl_s=ttl, no_store=no_store)

    def _mapping(self, given: object, where: str, known: Collection[str]) -> Mapping[str, Any]:
        if not isinstance(given, Mapping):
            raise self._wrong(f"has {where} where {', '.join(known)} belong: write name: value")
        for name in given:
            if name not in known:
                inside = f" in {where}" if where else ""
                raise self._wrong(f"has an unknown {_shown(name)}{inside}: {_meant(str(name), known)}")
        return given

    def _wrong(self, problem: str) -> ConfigError:
        return ConfigError(f"{self._path} {problem}")


def _meant(name: str, known: Collection[str]) -> str:
    return did_you_mean(name, known, f"it may be {', '.join(known)}")


def _shown(name: object) -> str:
    """A field's name, unless it looks like a key that stands in the wrong place."""
    text = str(name)
    return repr(text) if len(text) <= 24 and not text.startswith(("sk-", "sha256:")) else "field"
