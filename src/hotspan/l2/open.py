"""Stores by their URL, with what else is said of them as text."""

import logging
import math
import stat
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, parse_qsl, quote, urlsplit, urlunsplit

from hotspan.core.errors import ConfigError, did_you_mean
from hotspan.core.redaction import is_secret, redacted, redacted_text
from hotspan.l2.base import ObjectStore
from hotspan.l2.hyperpod_settings import PREFIX, HyperpodSettings, parse_hyperpod_settings
from hotspan.l2.options import FILE, OVER_THE_DOOR, REDIS, S3, S3_WITHOUT_EFFECT, StoreOption
from hotspan.l2.s3_settings import S3Settings

logger = logging.getLogger(__name__)

SHARED_MEMORY = Path("/dev/shm")
DAEMON_PORT = 9200
SEGMENT_NAME = "ai_toolkit_cache"
"""The name of the daemon's shared memory where nothing else is said: HyperPod's."""

Options = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class StoreAddress:
    """A URL of a store, taken apart. `url` has no password in it."""

    scheme: str
    host: str
    port: int | None
    path: str
    url: str


def parse_store_url(option: str, url: str) -> StoreAddress:
    """Raises: ConfigError that names `option` and says what to write instead; it repeats no secret."""
    shown = redacted_text(url)
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:  # which quotes the URL
        raise ConfigError(f"{option} is {shown!r}, which is no URL: give SCHEME://HOST:PORT") from error
    if parts.scheme == "lm":
        raise ConfigError(
            f"{option} {shown}: LMCache's server speaks a protocol of its own, with values only LMCache can read. "
            f"Start `hotspan daemon --size-gib N` on the node and give sagemaker-hyperpod://127.0.0.1:{DAEMON_PORT} "
            "or redis://HOST:6379"
        )
    if parts.scheme not in _OPENERS:
        known = [f"{scheme}://" for scheme in _OPENERS]
        hint = did_you_mean(f"{parts.scheme}://", known, f"give one of {', '.join(known)}", cutoff=0.85)
        raise ConfigError(f"{option} is {shown!r}: {hint}")
    _refuse_secrets(option, parts)
    if parts.scheme == "file" and (parts.netloc or not parts.path.startswith("/")):
        raise ConfigError(f"{option} is {shown!r}: a directory is written file:///SHARED/DIRECTORY, with three slashes")
    if parts.scheme not in ("file",) and not parts.hostname:
        raise ConfigError(f"{option} is {shown!r}: the host is missing, as in {parts.scheme}://HOST")
    return StoreAddress(parts.scheme, parts.hostname or "", port, parts.path, url)


def _refuse_secrets(option: str, parts: SplitResult) -> None:
    """Raise ConfigError for a URL with a password, a user or a query that would be seen, or have no effect."""
    names = [name for name, _ in parse_qsl(parts.query, keep_blank_values=True)]
    is_redis = parts.scheme in ("redis", "rediss")
    if parts.password or (not is_redis and "@" in parts.netloc) or any(map(is_secret, names)):
        raise ConfigError(
            f"{option} holds a password or a key, which other users of the machine and the log would see: leave it out "
            f"and give {_instead(option, parts.scheme)}"
        )
    if (parts.query and not is_redis) or parts.fragment:
        raise ConfigError(
            f"{option} is {redacted_text(parts.geturl())!r}: what stands behind ? or # has no effect there: leave it "
            "out (options of an L2 are given with --l2-option)"
        )


def _instead(option: str, scheme: str) -> str:
    if scheme in ("redis", "rediss"):
        name = "log_password" if option == "--l2-log" else "password"
        return f"--l2-option {name}=file:/PATH (or {name}=env:NAME)"
    if scheme == "s3":
        return "secret_access_key=file:/PATH (or env:NAME) with --l2-option, or set AWS_SECRET_ACCESS_KEY and the like"
    return "none: this kind of L2 takes none"


def check_store(option: str, url: str, options: Options) -> None:
    """Raise ConfigError, as `open_store` would, for a URL or options that can't work; nothing is opened.

    options: secrets may be references still.
    """
    _SETTINGS[parse_store_url(option, url).scheme](options)


def open_store(option: str, url: str, options: Options) -> ObjectStore:
    """A client of the store at `url`; most connect when they are first used.

    options: of its client, by its own names; secrets as they are.
    Raises:  ConfigError for what can't work whatever the store does.
    """
    address = parse_store_url(option, url)
    return _OPENERS[address.scheme](address, options)


def _redis(address: StoreAddress, options: Options) -> ObjectStore:
    from hotspan.l2.redis import RedisStore

    given = dict(options)
    password = given.pop("password", None)
    url = address.url
    if password is not None:
        parts = urlsplit(url)
        user = quote(parts.username or "", safe="")
        host = parts.netloc.rpartition("@")[2]
        url = urlunsplit(parts._replace(netloc=f"{user}:{quote(password, safe='')}@{host}"))
    return RedisStore(url, **_redis_settings(given))


def _redis_settings(options: Options) -> dict[str, Any]:
    return {name: value for name, value in _typed(options, REDIS).items() if name != "password"}


def _file(address: StoreAddress, options: Options) -> ObjectStore:
    from hotspan.l2.file import FileStore

    return FileStore(address.path, **_file_settings(options))


def _file_settings(options: Options) -> dict[str, Any]:
    return _typed(options, FILE)


def _s3(address: StoreAddress, options: Options) -> ObjectStore:
    from hotspan.l2.s3 import S3Store

    return S3Store(address.url, _s3_settings(options))


def _s3_settings(options: Options) -> S3Settings:
    names = {option.name for option in S3}
    own = _typed({name: value for name, value in options.items() if name in names}, S3)
    client = {name: value for name, value in options.items() if name not in names}
    _check_client(client, sorted(names))
    unused = sorted(own.keys() & S3_WITHOUT_EFFECT)
    if unused:
        logger.warning("l2_options_without_effect options=%s: each chunk is an object of its own", ",".join(unused))
    own = {name: value for name, value in own.items() if name not in S3_WITHOUT_EFFECT}
    return S3Settings(client=client, **own)


def _check_client(client: Options, known: Sequence[str]) -> None:
    """Raise ConfigError for an option that is neither ours nor obstore's."""
    from obstore.exceptions import BaseError, UnknownConfigurationKeyError
    from obstore.store import S3Store as ObstoreS3

    for name in client:
        try:
            ObstoreS3("bucket", config={name: ""})  # type: ignore[arg-type]
        except UnknownConfigurationKeyError as error:
            hint = did_you_mean(name, known, f"it has {', '.join(known)} and obstore's (endpoint, ...)")
            raise ConfigError(f"--l2-option {name}: this L2 has no such option; {hint}") from error
        except (BaseError, ValueError):
            pass  # an empty value will not do for it; which it is to be is not known here


def _hyperpod(address: StoreAddress, options: Options) -> ObjectStore:
    """hotspan's own daemon by its local door if there is one, else whatever answers at the port."""
    from hotspan.l2.daemon import DaemonStore
    from hotspan.l2.hyperpod import HyperpodStore

    settings = _hyperpod_settings(options)
    door = SHARED_MEMORY / (settings.shared_memory_name.removeprefix("/") + ".sock")
    if _is_socket(door):
        unused = sorted({name.removeprefix(PREFIX) for name in options} - OVER_THE_DOOR)
        if unused:
            logger.warning("l2_options_without_effect options=%s: hotspan's daemon is at %s", ",".join(unused), door)
        return DaemonStore(door, deadline_s=settings.timeout_s)
    logger.info("l2_over_http host=%s door=%s: no local door there", address.host, door)
    return HyperpodStore(address.host, address.port or DAEMON_PORT, settings)


def _hyperpod_settings(options: Options) -> HyperpodSettings:
    named = {name if name.startswith(PREFIX) else PREFIX + name: value for name, value in options.items()}
    return parse_hyperpod_settings({PREFIX + "shared_memory_name": SEGMENT_NAME} | named)


_OPENERS: dict[str, Callable[[StoreAddress, Options], ObjectStore]] = {
    "sagemaker-hyperpod": _hyperpod,
    "redis": _redis,
    "rediss": _redis,
    "file": _file,
    "s3": _s3,
}

_SETTINGS: dict[str, Callable[[Options], object]] = {
    "sagemaker-hyperpod": _hyperpod_settings,
    "redis": _redis_settings,
    "rediss": _redis_settings,
    "file": _file_settings,
    "s3": _s3_settings,
}


def _is_socket(path: Path) -> bool:
    try:
        return stat.S_ISSOCK(path.stat().st_mode)
    except OSError:
        return False


def _typed(options: Options, known: Sequence[StoreOption]) -> dict[str, Any]:
    """Options as the store takes them. Raises: ConfigError for one that it has not, or that is no number."""
    kinds = {option.name: option.kind for option in known}
    values: dict[str, Any] = {}
    for name, value in options.items():
        if name not in kinds:
            hint = did_you_mean(name, kinds, f"it has {', '.join(sorted(kinds))}")
            raise ConfigError(f"--l2-option {name}: this L2 has no such option; {hint}")
        values[name] = _value(name, value, kinds[name])
    return values


def _value(name: str, text: str, kind: type) -> Any:
    shown = redacted(text, name)
    if kind is bool:
        if text.lower() in ("true", "false"):
            return text.lower() == "true"
        raise ConfigError(f"--l2-option {name} is {shown!r}: give true or false")
    try:
        value = kind(text)
    except ValueError as error:
        raise ConfigError(f"--l2-option {name} is {shown!r}: give a number") from error
    if kind is float and not math.isfinite(value):
        raise ConfigError(f"--l2-option {name} is {shown!r}: give a finite number")
    return value
