"""KV events of a replica: nobody but routers with the key follows them where they leave the machine."""

import json
from dataclasses import replace

from hotspan.config.kv_events import FLAG, LOCAL_ENDPOINT, OPTION, Published, published, read_key
from hotspan.core.errors import ConfigError
from hotspan.server.options import ServeOptions


def guarded_events(options: ServeOptions) -> ServeOptions:
    """The same, with KV events on this machine only unless an address was named for them.

    Raises: ConfigError where events would tell other machines what the rest of the configuration keeps secret.
    """
    events = published(options.engine_values)
    key = None if options.cache is None else options.cache.events_key
    if key is not None:
        if events is None:
            raise ConfigError(f"{FLAG} is given without KV events: give --{_option()} too, or leave it out")
        read_key(key)
    if events is None:
        return options
    if options.cache is None:
        named = replace(events, endpoint=events.endpoint or "tcp://*:5557")  # vLLM's default, and vLLM's publisher
        _check(named, options)
        return options
    if events.endpoint is None:
        events = replace(events, endpoint=LOCAL_ENDPOINT)
    _check(events, options)
    config = json.dumps({**events.config, "endpoint": events.endpoint})
    return replace(options, engine=(*options.engine, f"--{_option()}={config}"))


def secrets_of(options: ServeOptions) -> tuple[str, ...]:
    """What a configuration keeps from others and KV events tell, by the options that say so."""
    cache = options.cache
    found = {
        "--tenants": options.has_keys,
        "--kek": cache is not None and cache.encryption is not None,
        "--persistence none": cache is not None and cache.persistence == "none",
    }
    return tuple(name for name, is_so in found.items() if is_so)


def _check(events: Published, options: ServeOptions) -> None:
    is_keyed = options.cache is not None and options.cache.events_key is not None
    if not events.open_addresses or is_keyed:
        return
    if kept := secrets_of(options):
        without = "" if options.cache is not None else " (a key needs hotspan's tiers, without --no-cache)"
        raise ConfigError(
            f"--{_option()} publishes all tenants' tokens and salts at {', '.join(events.open_addresses)} to whoever "
            f"connects, and {', '.join(kept)} keeps them secret: give {FLAG} FILE here and to the router{without}, "
            f"or publish at {LOCAL_ENDPOINT}"
        )


def _option() -> str:
    return OPTION.replace("_", "-")
