"""LMCache's configuration, taken over: its YAML, LMCACHE_* and the connectors that kv_transfer_config names."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from hotspan.config import kinds
from hotspan.config.documents import parse_entries
from hotspan.config.environment import is_service_link
from hotspan.config.keys import KEYS, meant
from hotspan.config.kinds import Kind
from hotspan.config.lmcache_names import ACCEPTED, EXTRA, MULTI_PROCESS, RENAMED, UNKNOWN, VARIABLES
from hotspan.config.origin import ENVIRONMENT, Given, Note, Source, said, shown
from hotspan.core.documents import read_text
from hotspan.core.errors import ConfigError
from hotspan.l2.options import HYPERPOD_PREFIX, HyperpodOptions, parse_options

MULTI_PROCESS_CONNECTORS = frozenset({"LMCacheMPConnector"})
"""Those whose cache is in a server of LMCache's, and not in the replica."""

CONNECTORS = MULTI_PROCESS_CONNECTORS | {"LMCacheConnector", "LMCacheConnectorV1", "LMCacheConnectorV1Dynamic"}
"""What vLLM calls LMCache."""

DEFAULT_RAM_GIB = 5.0
"""What LMCache takes of host memory, for each worker, where nothing is said."""

_VARIABLE = "LMCACHE_"
_FILE = "config_file"
_IN_CONNECTOR = "lmcache."
_READ = ("kv_connector", "kv_role", "kv_connector_extra_config")
_BOLD = re.compile(r"^(\s*)\*\*(\w+)\*\*(\s*:)", re.MULTILINE)
_ITALIC_COMMENT = re.compile(r"^(\s*)\*(#.*)$", re.MULTILINE)
_S3_HOST = re.compile(r"(.+?)\.s3[.-]([a-z0-9-]+)\.amazonaws\.com")
_TARGETS: dict[str, tuple[str, Kind]] = {
    key.lmcache.name: (key.name, key.lmcache.kind or key.kind) for key in KEYS if key.lmcache
}
_PER_WORKER = frozenset({"max_local_cpu_size", "max_local_disk_size"})


class LmcacheReader:
    """What LMCache's files and variables say of hotspan's tiers. `givens` and `notes` grow with each read.

    workers: the processes that each have what LMCache calls max_local_cpu_size; hotspan's tiers are for all of them.
    """

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self.givens: list[Given] = []
        self.notes: list[Note] = []

    def read_file(self, path: Path) -> None:
        """Take a YAML file. Raises: ConfigError that names key, value, place and remedy."""
        text = read_text(path)
        plain = _ITALIC_COMMENT.sub(r"\1\2", _BOLD.sub(r"\1\2\3", text))
        if plain != text:
            self._warn(str(path), "names and comments with asterisks, as on a web page, are read without them")
        for entry in parse_entries(plain, path):
            self._take(Given(entry.name, entry.value, Source.LMCACHE_FILE, entry.name, entry.place))

    def read_variables(self, surroundings: Mapping[str, str]) -> None:
        """Take LMCACHE_*. Raises: as read_file."""
        for variable, raw in sorted(surroundings.items()):
            if not variable.startswith(_VARIABLE) or not raw.strip() or is_service_link(variable, raw):
                continue
            name = variable.removeprefix(_VARIABLE).lower()
            prefix = next((prefix for prefix in VARIABLES if name.startswith(prefix)), None)
            if prefix is not None:
                self.notes.append(VARIABLES[prefix].settle(name, _unquoted(raw), said(ENVIRONMENT, variable)))
            elif name != _FILE:
                self._take(Given(name, _unquoted(raw), Source.LMCACHE_VARIABLE, variable, ENVIRONMENT))

    def read_connector(self, config: Mapping[str, Any], place: str) -> None:
        """Take a kv_transfer_config that names LMCache's connector. Raises: as read_file."""
        role = config.get("kv_role", "kv_both")
        if role != "kv_both":
            raise ConfigError(
                f"{place}: kv_role is {role!r}, and hotspan stores and loads in every replica: give kv_both"
            )
        extra = config.get("kv_connector_extra_config") or {}
        if not isinstance(extra, Mapping):
            raise ConfigError(
                f"{place}: kv_connector_extra_config is {shown('', extra)!r}: give a JSON object, or leave it out"
            )
        if config["kv_connector"] in MULTI_PROCESS_CONNECTORS:
            self._warn(f"{place}: {config['kv_connector']}", MULTI_PROCESS.instead)
        for name in sorted(config.keys() - set(_READ)):
            self._warn(f"{place}: {name}", "hotspan's connector takes the place of LMCache's, and sets this itself")
        for name, raw in extra.items():
            if str(name).startswith(f"{_IN_CONNECTOR}mp."):
                self.notes.append(MULTI_PROCESS.settle(name, raw, f"{place}: {name}"))
            elif str(name).startswith(_IN_CONNECTOR):
                plain = str(name).removeprefix(_IN_CONNECTOR)
                self._take(Given(plain, raw, Source.LMCACHE_CONNECTOR, str(name), place))
            else:
                self.notes.append(UNKNOWN.settle(name, raw, f"{place}: {name}"))

    def _take(self, given: Given) -> None:
        name = RENAMED.get(given.key, given.key)
        if name in ACCEPTED:
            self.notes.append(ACCEPTED[name].settle(name, given.value, given.where))
        elif name not in _TARGETS:
            known = [*_TARGETS, *ACCEPTED]
            if given.source is Source.LMCACHE_VARIABLE:
                known = [_VARIABLE + name.upper() for name in known]
            raise ConfigError(f"{given.where}: LMCache has no such key: {meant(given.written, known)}")
        elif given.value is not None:
            self._take_over(name, given)

    def _take_over(self, name: str, given: Given) -> None:
        if name == "local_disk":
            self._give(given, "disk", self._directory(given))
        elif name == "remote_url":
            self._take_remote(given)
        elif name == "extra_config":
            self._take_extra(given)
        else:
            key, kind = _TARGETS[name]
            parsed = kind.parse(given.value, given.where)
            if name in _PER_WORKER:
                parsed *= self._workers
            if name == "enable_blending" and parsed != "off":
                text = "answers with reused text are approximate (docs/blending.md); set false for exact ones only"
                self.notes.append(Note(given.where, text, is_warning=True, event="blending_asked_for"))
            if name != "max_local_disk_size" or parsed:  # 0 is what LMCache has without a disk
                self._give(given, key, parsed)

    def _directory(self, given: Given) -> str:
        text: str = kinds.PATH.parse(given.value, given.where)
        if "," in text:
            raise ConfigError(f"{given.where} is {text!r}: hotspan's disk tier is one directory: give one")
        if not text.startswith("file://"):
            return text
        path = text.removeprefix("file://")
        if not path.startswith("/"):
            self._warn(given.where, f"{text} is a slash short: /{path} is meant, as file:///{path}")
        return "/" + path.lstrip("/")

    def _take_remote(self, given: Given) -> None:
        text: str = kinds.TEXT.parse(given.value, given.where)
        try:
            url = urlsplit(text)
        except ValueError as error:
            raise ConfigError(
                f"{given.where} is {shown(given.key, text)!r}, which is no URL: give SCHEME://HOST"
            ) from error
        if url.scheme in ("fs", "file"):
            text = f"file://{url.path}" if url.scheme == "fs" else text
        elif url.scheme == "valkey":
            text = "redis" + text.removeprefix("valkey")
        elif url.scheme == "s3" and (host := _S3_HOST.fullmatch(url.netloc)):
            text = f"s3://{host[1]}{url.path}"
            self._give(given, "l2_option", {"region": host[2]})
        self._give(given, "l2", text)

    def _take_extra(self, given: Given) -> None:
        extra = kinds.JSON.parse(given.value, given.where)
        hyperpod = {name: inner for name, inner in extra.items() if name.startswith(HYPERPOD_PREFIX)}
        for name in extra.keys() - hyperpod.keys():
            if name not in EXTRA and (near := meant(name, EXTRA)).startswith("did"):
                raise ConfigError(f"{given.where}: {name}: LMCache has no such key: {near}")
            self.notes.append(EXTRA.get(name, UNKNOWN).settle(name, extra[name], f"{given.where}: {name}"))
        if hyperpod:
            try:
                parse_options(HyperpodOptions, hyperpod, HYPERPOD_PREFIX)
            except ConfigError as error:
                raise ConfigError(f"{given.where}: {error}") from error
            self._give(given, "l2_option", kinds.PAIRS.parse(hyperpod, given.where))

    def _give(self, given: Given, key: str, parsed: Any) -> None:
        written = given.value if isinstance(given.value, str) else json.dumps(given.value, default=str)
        if given.key in _PER_WORKER and self._workers > 1:
            written += f" for each of {self._workers} workers"
        self.givens.append(Given(key, parsed, given.source, given.written, given.place, written))

    def _warn(self, where: str, text: str) -> None:
        self.notes.append(Note(where, text, is_warning=True))


def _unquoted(text: str) -> str | None:
    text = text.strip()
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        text = text[1:-1]
    return None if text.lower() in ("none", "null") else text
