"""Stores by their URL."""

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any
from urllib.parse import urlsplit

from hotspan.core.errors import ConfigError
from hotspan.tiers.stores.base import ObjectStore

SCHEMES = ("sagemaker-hyperpod", "redis", "rediss", "file", "s3")


@dataclass(frozen=True, slots=True)
class StoreAddress:
    """A URL of a store, taken apart."""

    scheme: str
    host: str
    port: int | None
    path: str
    url: str


def parse_store_url(option: str, url: str) -> StoreAddress:
    """Raises: ConfigError that names `option` and says what to write instead."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"{option} is {url!r}, which is no URL ({error})") from error
    if parts.scheme == "lm":
        raise ConfigError(
            f"{option} {url}: LMCache's server speaks a protocol of its own, with values only LMCache can read. Start "
            "`hotspan daemon --size-gib N` on the node and give sagemaker-hyperpod://HOST:9200, or use redis://HOST:6379"
        )
    if parts.scheme not in SCHEMES:
        meant = get_close_matches(parts.scheme, SCHEMES, 1)
        hint = f"did you mean {meant[0]}://?" if meant else "give one of " + ", ".join(f"{name}://" for name in SCHEMES)
        raise ConfigError(f"{option} is {url!r}: {hint}")
    if parts.scheme == "file" and (parts.netloc or not parts.path.startswith("/")):
        raise ConfigError(f"{option} is {url!r}: a directory is written file:///SHARED/DIRECTORY, with three slashes")
    if parts.scheme != "file" and not parts.hostname:
        raise ConfigError(f"{option} is {url!r}: the host is missing, as in {parts.scheme}://HOST")
    return StoreAddress(parts.scheme, parts.hostname or "", port, parts.path, url)


def open_store(option: str, url: str, options: Mapping[str, str]) -> ObjectStore:
    """A client of the store at `url`; it connects when it is first used.

    Raises: ConfigError for what can't work whatever the store does.
    """
    address = parse_store_url(option, url)
    if address.scheme in ("redis", "rediss"):
        from hotspan.tiers.stores.redis import RedisStore

        return RedisStore(url, **_typed(options, {"prefix": str, "timeout_s": float, "ttl_s": float}))
    if address.scheme == "file":
        from hotspan.tiers.stores.file import FileStore

        return FileStore(address.path, **_typed(options, {"capacity_gib": float}))
    raise NotImplementedError(address.scheme)


def _typed(options: Mapping[str, str], kinds: Mapping[str, type]) -> dict[str, Any]:
    """Options as the store takes them. Raises: ConfigError for one that it has not, or that is no number."""
    values: dict[str, Any] = {}
    for name, value in options.items():
        if name not in kinds:
            meant = get_close_matches(name, kinds, 1)
            hint = f"did you mean {meant[0]}?" if meant else "it has " + ", ".join(sorted(kinds))
            raise ConfigError(f"--l2-option {name}: this L2 has no such option; {hint}")
        try:
            values[name] = kinds[name](value)
        except ValueError as error:
            raise ConfigError(f"--l2-option {name} is {value!r}: give a number") from error
    return values
