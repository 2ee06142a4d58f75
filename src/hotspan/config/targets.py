"""From settings that count to the dataclasses that the tiers and the server are built from."""

from typing import Any

from hotspan.config.keys import BY_NAME, CACHE
from hotspan.config.options import build
from hotspan.config.origin import Settings, Source, shown
from hotspan.config.secrets import check_references
from hotspan.config.server_settings import ServerSettings
from hotspan.config.settings import CacheOptions, CacheSettings, L2Settings
from hotspan.config.tenants import Tenants
from hotspan.core.errors import ConfigError
from hotspan.l2.open import check_store

_CACHE_NAMES = {option.name for option in CACHE} - {"lmcache_config_file"}


def build_cache(settings: Settings, tenants: Tenants) -> CacheSettings | None:
    """What the tiers are; None without them.

    Raises: ConfigError that says which option is wrong, where it stands and what would do.
    """
    value = {name: setting.value for name, setting in settings.items()}
    try:
        told = L2Settings(value["l2"] or "", value["l2_option"] or {})
        for name, given in (("l2", told.store_options), ("l2_log", told.log_options)):
            if value[name] is not None:
                check_references(given)
                check_store(BY_NAME[name].flag, value[name], given)
        if value["no_cache"]:
            if value["kv_events_key"] is not None:
                raise ConfigError(
                    "--kv-events-key needs hotspan's tiers, and --no-cache leaves them out: give one of them"
                )
            return None
        if _is_ram_chosen(settings):
            value["ram_gib"] = None
        options = build(CacheOptions, value)
        return options.settings(is_strict=tenants.has_keys, tenants=tenants.shares, retention=tenants.retention)
    except ConfigError as error:
        raise ConfigError(f"{error}{_origins(settings)}") from error


def _is_ram_chosen(settings: Settings) -> bool:
    return not settings.is_given("ram_gib") and (settings.is_on("auto") or not settings.names_tiers)


def _origins(settings: Settings) -> str:
    """Which of the cache's options stood elsewhere than on the command line, where they have other names."""
    elsewhere = [
        f"{BY_NAME[name].flag} {shown(name, setting.value)} comes from {setting.given.origin}"
        for name, setting in settings.items()
        if name in _CACHE_NAMES
        if Source.COMMAND_LINE < setting.source < Source.IMPLIED
    ]
    return f" ({'; '.join(elsewhere)})" if elsewhere else ""


def build_server(settings: Settings) -> ServerSettings:
    """What the server does besides caching. Raises: ConfigError."""
    if settings["admin_port"].value is None and settings.is_given("admin_host"):
        raise ConfigError(f"{settings['admin_host'].given.origin} is given without --admin-port: give both")
    value = {name: setting.value for name, setting in settings.items()} | _admin_address(settings)
    if value["forget_closed_sessions"] and value["no_cache"]:
        raise ConfigError(
            f"{settings['forget_closed_sessions'].given.origin} forgets what hotspan's tiers hold, and "
            f"{settings['no_cache'].given.origin} leaves them out: give one of them"
        )
    _check_loras(settings)
    return build(ServerSettings, value)


def _admin_address(settings: Settings) -> dict[str, Any]:
    """What --admin-address says of --admin-host and --admin-port."""
    address = settings["admin_address"].value
    if address is None:
        return {}
    for name in ("admin_port", "admin_host"):
        if settings.is_given(name):
            whole, part = settings["admin_address"].given.origin, settings[name].given.origin
            raise ConfigError(f"{whole} has host and port: leave {part} out")
    host, _, port = address.rpartition(":")
    return {"admin_host": host.strip("[]"), "admin_port": int(port)}


def _check_loras(settings: Settings) -> None:
    """The engine would refuse it only when the model is about to be loaded."""
    max_loras, held = settings.count("max_loras", 1), settings.count("max_cpu_loras", 0)
    if not settings.is_on("enable_lora") or not 0 < held < max_loras:
        return
    batch = settings["max_loras"].given.origin
    raise ConfigError(
        f"{settings['max_cpu_loras'].given.origin}: {held} adapters are kept in memory, and a batch may have "
        f"{max_loras} ({batch}): give a max_cpu_loras of at least {max_loras}, or a smaller max_loras"
    )
