"""hotspan as the connector of a vLLM that somebody else starts: its --kv-transfer-config, and the tiers it names."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from hotspan.config.configuration import Places, load_configuration
from hotspan.config.keys import CACHE, CONFIG_FILE
from hotspan.config.kinds import ADDRESS, SECONDS
from hotspan.config.origin import Note, Source
from hotspan.config.own import CommandLine
from hotspan.config.server_settings import ServerSettings
from hotspan.config.settings import AdminSettings, CacheOptions, CacheSettings
from hotspan.core.errors import ConfigError, did_you_mean

CONNECTOR: Final = "HotspanConnector"
CONNECTOR_MODULE: Final = "hotspan.engine.connector"
HASH: Final = "sha256_cbor"
"""The prefix-caching hash algorithm of the engine that hotspan's keys need."""

_SIZE: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([MGT])iB")
_GIB: Final = {"M": 1 / 1024, "G": 1.0, "T": 1024.0}
_PREFIX: Final = "hotspan."
_VARIABLES: Final = ("HOTSPAN_", "LMCACHE_")
SPEC: Final = {"spec_name": "HotspanSpec", "spec_module_path": "hotspan.engine.spec"}
_NOWHERE: Final = Places(Path("/nonexistent"), Path("/nonexistent"))
_NO_MODEL: Final = str(_NOWHERE.model)
"""The engine has its model; LMI's files in its directory are for `hotspan serve`."""
_ADMIN: Final = ("admin_address", "admin_host", "admin_port", "admin_token_file")
_READ: Final = frozenset({CONFIG_FILE.name, *_ADMIN, *(option.name for option in CACHE)})
_ELSEWHERE: Final = "step_timeout_s"
"""Of the process that answers health checks, where that has hotspan's middleware (server/step_health.py)."""
_KNOWS_EVENTS: Final = ("--kv-events-config={}",)
"""Whether KV events are published is the engine's own option, which is not read here."""
_TIERS: Final = "HOTSPAN_RAM_GIB=32, LMCACHE_CONFIG_FILE, HOTSPAN_CONFIG, or hotspan.ram_gib in the extra config"


def transfer_config(settings: CacheSettings) -> dict[str, Any]:
    """The --kv-transfer-config that puts hotspan into an engine, also one that somebody else starts."""
    return {
        "kv_connector": CONNECTOR,
        "kv_connector_module_path": CONNECTOR_MODULE,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra_config(settings),
    }


def extra_config(settings: CacheSettings) -> dict[str, Any]:
    """The kv_connector_extra_config of these tiers."""
    return SPEC | {"offload_prompt_only": settings.prompts_only, "hotspan": settings.to_json()}


@dataclass(frozen=True, slots=True)
class ConnectorSettings:
    """The tiers of an engine that somebody else starts. notes: what was written and has no effect there."""

    cache: CacheSettings
    notes: tuple[Note, ...] = ()


def connector_settings(
    extra: Mapping[str, Any], surroundings: Mapping[str, str], workers: int = 1
) -> ConnectorSettings:
    """The tiers that a kv_connector_extra_config names, else HOTSPAN_* or LMCACHE_* and their files.

    extra:   "hotspan" has complete settings, as `transfer_config` writes them; otherwise "hotspan.ram_gib" is what
             --ram-gib is to `hotspan serve`, and so on.
    workers: processes of the engine, for LMCache's sizes, which are for each.
    Raises:  ConfigError that names key, value, origin and remedy, also if no tier is named: nothing is chosen here.
    """
    if "hotspan" in extra:
        return ConnectorSettings(CacheSettings.from_json(extra["hotspan"]))
    own = {name: value for name, value in surroundings.items() if name.startswith(_VARIABLES)}
    command_line = CommandLine(_NO_MODEL, _flags(extra), [f"--tensor-parallel-size={workers}", *_KNOWS_EVENTS])
    configuration = load_configuration(command_line, own, places=_NOWHERE)
    settings = configuration.settings
    if settings.is_on("no_cache"):
        raise ConfigError(f"{settings['no_cache'].given.origin}: {CONNECTOR} is the cache: leave one of them out")
    if configuration.is_auto or not configuration.names_tiers or configuration.cache is None:
        raise ConfigError(f"no tier is named for {CONNECTOR}, and `hotspan serve` alone chooses sizes: give {_TIERS}")
    if not configuration.cache.ram_bytes:
        raise ConfigError(f"{CONNECTOR} has no RAM tier, which every other tier needs: give {_TIERS}")
    if configuration.tenants.has_keys:
        raise ConfigError(
            f"{settings['tenants'].given.origin} has API keys, which `hotspan serve` alone checks: serve the model "
            "with it, or leave the keys out"
        )
    unused = (
        setting.given
        for name, setting in settings.items()
        if name not in _READ and name != _ELSEWHERE and Source.COMMAND_LINE < setting.source < Source.IMPLIED
    )
    notes = (Note(given.origin, "only `hotspan serve` reads it: it has no effect", is_warning=True) for given in unused)
    cache = replace(configuration.cache, admin=_admin(configuration.server))
    return ConnectorSettings(cache, (*configuration.notes, *notes))


def _admin(server: ServerSettings) -> AdminSettings | None:
    """Where the engine is administered by TCP; None if nobody has named an address."""
    if server.admin_port is None:
        return None
    file = server.admin_token_file
    return AdminSettings(
        server.admin_host, server.admin_port, None if file is None else str(file.expanduser().absolute())
    )


def step_timeout_s(surroundings: Mapping[str, str]) -> float:
    """How long an engine's step may take before health checks are 503. Raises: ConfigError."""
    variable = f"HOTSPAN_{_ELSEWHERE.upper()}"
    given = surroundings.get(variable)
    return ServerSettings().step_timeout_s if given is None else float(SECONDS.parse(given, variable))


def _flags(extra: Mapping[str, Any]) -> dict[str, Any]:
    """The options of the tiers in an extra config. Raises: ConfigError for a name that is none of them."""
    flags: dict[str, Any] = {}
    for name, value in extra.items():
        if name.startswith(_PREFIX):
            key = name.removeprefix(_PREFIX).replace("-", "_")
            if key not in _READ:
                hint = did_you_mean(key, _READ, "docs/configuration.md lists the options of the tiers")
                raise ConfigError(f"kv_connector_extra_config: there is no {name!r}: {hint}")
            flags[key] = value
    return flags


def named_transfer_config(
    *,
    ram: str,
    disk: str | Path | None = None,
    disk_size: str | None = None,
    admin_address: str | None = None,
    admin_token_file: str | Path | None = None,
    **options: Any,
) -> dict[str, Any]:
    """The --kv-transfer-config with these tiers, as `hotspan.transfer_config`.

    ram, disk_size: such as "32GiB". disk: a directory; it needs disk_size.
    admin_address:  "HOST:PORT", where the engine takes commands beside its Unix socket.
    options:        other fields of `CacheOptions`, such as l2 and chunk_tokens.
    Raises:         ConfigError for what is no size, or a combination that can't work.
    """
    if (disk is None) != (disk_size is None):
        raise ConfigError("disk and disk_size belong together: give both, such as disk='/nvme', disk_size='500GiB'")
    tiers: dict[str, Any] = {"ram_gib": _gib("ram", ram)}
    if disk is not None and disk_size is not None:
        tiers |= {"disk": Path(disk), "disk_gib": _gib("disk_size", disk_size)}
    known = CacheOptions.__dataclass_fields__
    for name in options:
        if name not in known:
            raise ConfigError(f"there is no {name!r}: {did_you_mean(name, known, 'docs/configuration.md lists them')}")
    settings = CacheOptions(**tiers, **options).settings()
    if admin_address is not None:
        host, _, port = ADDRESS.parse(admin_address, "admin_address").rpartition(":")
        file = None if admin_token_file is None else str(Path(admin_token_file).expanduser().absolute())
        settings = replace(settings, admin=AdminSettings(host.strip("[]"), int(port), file))
    elif admin_token_file is not None:
        raise ConfigError("admin_token_file belongs to an address: give admin_address, such as '127.0.0.1:8081'")
    return transfer_config(settings)


def engine_options(**tiers: Any) -> dict[str, Any]:
    """The arguments for vLLM's `LLM(model, **hotspan.engine_options(ram="32GiB"))`.

    Takes, and raises: as `named_transfer_config`.
    """
    return {
        "kv_transfer_config": named_transfer_config(**tiers),
        "enable_prefix_caching": True,
        "prefix_caching_hash_algo": HASH,
    }


def _gib(name: str, text: str) -> float:
    found = _SIZE.fullmatch(text)
    if found is None:
        raise ConfigError(f"{name} is {text!r}: give a number and MiB, GiB or TiB, such as '32GiB'")
    return float(found[1]) * _GIB[found[2]]
