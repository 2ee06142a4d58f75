"""From settings that count to the dataclasses that the tiers and the server are built from."""

from collections.abc import Mapping
from pathlib import Path
from typing import cast

from hotspan.config.keys import BY_NAME, CACHE
from hotspan.config.origin import Setting, Source, shown
from hotspan.config.secrets import check_references
from hotspan.config.server_settings import Compat, ServerSettings, SessionSettings, StoreSettings
from hotspan.config.settings import CacheSettings, L2Settings, cache_settings
from hotspan.config.tenants import Tenants
from hotspan.core.errors import ConfigError
from hotspan.l2.open import check_store

_CACHE_NAMES = {option.name for option in CACHE} - {"lmcache_config_file"}


def is_on(settings: Mapping[str, Setting], name: str) -> bool:
    """Whether a setting is there and true."""
    return name in settings and settings[name].value is True


def count(settings: Mapping[str, Setting], name: str, default: int) -> int:
    """A whole number that the engine gets; what it would refuse counts as the default here."""
    text = str(settings[name].value) if name in settings else ""
    return int(text) if text.isdecimal() and int(text) > 0 else default


def names_tiers(settings: Mapping[str, Setting]) -> bool:
    """Whether anybody said what the tiers are."""
    return any(settings[name].source is not Source.DEFAULT for name in ("ram_gib", "disk", "l2", "no_cache"))


def build_cache(settings: Mapping[str, Setting], tenants: Tenants) -> CacheSettings | None:
    """What the tiers are; None without them.

    Raises: ConfigError that says which option is wrong, where it stands and what would do.
    """
    value = {name: setting.value for name, setting in settings.items()}
    try:
        told = L2Settings(value["l2"] or "", value["l2_option"] or {})
        for name, options in (("l2", told.store_options), ("l2_log", told.log_options)):
            if value[name] is not None:
                check_references(options)
                check_store(BY_NAME[name].flag, value[name], options)
        if value["no_cache"]:
            if value["kv_events_key"] is not None:
                raise ConfigError(
                    "--kv-events-key needs hotspan's tiers, and --no-cache leaves them out: give one of them"
                )
            return None
        return cache_settings(
            ram_gib=None if _is_ram_chosen(settings) else value["ram_gib"],
            disk=_path(value["disk"]),
            disk_gib=value["disk_gib"],
            l2=value["l2"],
            l2_options=value["l2_option"],
            l2_log=value["l2_log"],
            chunk_tokens=value["chunk_tokens"],
            prompts_only=value["prompts_only"],
            model_digest=value["model_digest"],
            persistence=value["persistence"],
            kek=value["kek"],
            key_store=_path(value["key_store"]),
            events_key=_path(value["kv_events_key"]),
            is_isolated=not value["share_across_tenants"],
            is_strict=tenants.has_keys,
            tenants=tenants.shares,
            retention=tenants.retention,
        )
    except ConfigError as error:
        raise ConfigError(f"{error}{_origins(settings)}") from error


def _is_ram_chosen(settings: Mapping[str, Setting]) -> bool:
    is_named = settings["ram_gib"].source is not Source.DEFAULT
    return not is_named and (is_on(settings, "auto") or not names_tiers(settings))


def _origins(settings: Mapping[str, Setting]) -> str:
    """Which of the cache's options stood elsewhere than on the command line, where they have other names."""
    elsewhere = [
        f"{BY_NAME[name].flag} {shown(name, setting.value)} comes from {setting.given.origin}"
        for name, setting in settings.items()
        if name in _CACHE_NAMES
        if Source.COMMAND_LINE < setting.source < Source.IMPLIED
    ]
    return f" ({'; '.join(elsewhere)})" if elsewhere else ""


def build_server(settings: Mapping[str, Setting]) -> ServerSettings:
    """What the server does besides caching. Raises: ConfigError."""
    if settings["admin_port"].value is None and settings["admin_host"].source is not Source.DEFAULT:
        raise ConfigError(f"{settings['admin_host'].given.origin} is given without --admin-port: give both")
    value = {name: setting.value for name, setting in settings.items()}
    if value["forget_closed_sessions"] and value["no_cache"]:
        raise ConfigError(
            f"{settings['forget_closed_sessions'].given.origin} forgets what hotspan's tiers hold, and "
            f"{settings['no_cache'].given.origin} leaves them out: give one of them"
        )
    sessions = SessionSettings(
        Path(value["sessions_path"]),
        value["session_expiry_s"],
        is_strict=value["strict_sessions"],
        close_forgets=value["forget_closed_sessions"],
    )
    _check_loras(settings)
    return ServerSettings(
        host=value["host"],
        port=value["port"],
        job_queue_size=value["job_queue_size"],
        max_request_bytes=value["max_request_bytes"],
        predict_timeout_s=value["predict_timeout_s"],
        startup_timeout_s=value["startup_timeout_s"],
        sessions=None if value["no_sessions"] else sessions,
        compat=cast(Compat, value["compat"]),
        adapters=_path(value["adapters"]),
        adapter_copies=_path(value["adapter_copies"]),
        client_adapters=_path(value["client_adapters"]),
        max_client_adapters=value["max_client_adapters"],
        formatters=_path(value["formatters"]),
        formatter_timeout_s=value["formatter_timeout_s"],
        is_secure=value["secure"],
        admin_token_file=_path(value["admin_token_file"]),
        is_insecure=value["insecure"],
        admin_host=value["admin_host"],
        admin_port=value["admin_port"],
        store=StoreSettings(value["default_model"], value["partial"], value["models_at_once"]),
    )


def _check_loras(settings: Mapping[str, Setting]) -> None:
    """The engine would refuse it only when the model is about to be loaded."""
    most, held = count(settings, "max_loras", 1), count(settings, "max_cpu_loras", 0)
    if not is_on(settings, "enable_lora") or not 0 < held < most:
        return
    batch = settings["max_loras"].given.origin
    raise ConfigError(
        f"{settings['max_cpu_loras'].given.origin}: {held} adapters are kept in memory, and a batch may have {most} "
        f"({batch}): give a max_cpu_loras of at least {most}, or a smaller max_loras"
    )


def _path(value: str | None) -> Path | None:
    return None if value is None else Path(value).expanduser()
