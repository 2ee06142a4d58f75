"""Stores by their URL, with what else is said of them as text."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from urllib.parse import SplitResult, parse_qsl, urlsplit

from hotspan.core.errors import ConfigError, did_you_mean
from hotspan.core.redaction import is_secret, redacted_text
from hotspan.core.shared_memory import SHARED_MEMORY
from hotspan.l2.base import ObjectStore
from hotspan.l2.options import (
    HYPERPOD_PREFIX,
    ON_UNIX_SOCKET,
    FileOptions,
    HyperpodOptions,
    RedisOptions,
    S3Options,
    options_of,
    parse_options,
)

DAEMON_PORT = 9200


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
    if parts.scheme not in _KINDS:
        known = [f"{scheme}://" for scheme in _KINDS]
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


def check_store(option: str, url: str, given: Mapping[str, str]) -> None:
    """Raise ConfigError, as `open_store` would, for a URL or options that can't work; nothing is opened.

    given: secrets may be references still.
    """
    store_options(parse_store_url(option, url).scheme, given)


def store_options(scheme: str, given: Mapping[str, str]) -> Any:
    """The options of the kind of store that a scheme names. Raises: ConfigError for what is none of them."""
    kind = _KINDS[scheme].options
    if kind is HyperpodOptions:
        return parse_options(kind, given, HYPERPOD_PREFIX)
    if kind is S3Options:
        names = {each.name for each in options_of(kind)}
        client = {name: value for name, value in given.items() if name not in names}
        _check_client(client, sorted(names))
        given = {name: value for name, value in given.items() if name in names}
        return parse_options(kind, given, client=client)
    return parse_options(kind, given)


def open_store(option: str, url: str, given: Mapping[str, str]) -> ObjectStore:
    """A client of the store at `url`; most connect when they are first used.

    given:  options of its client, by its own names; secrets as they are.
    Raises: ConfigError for what can't work whatever the store does.
    """
    address = parse_store_url(option, url)
    return _KINDS[address.scheme].open(address, store_options(address.scheme, given), given)


def _redis(address: StoreAddress, options: RedisOptions, given: Mapping[str, str]) -> ObjectStore:
    from hotspan.l2.redis import RedisStore

    return RedisStore(address.url, options)


def _file(address: StoreAddress, options: FileOptions, given: Mapping[str, str]) -> ObjectStore:
    from hotspan.l2.file import FileStore

    return FileStore(address.path, options)


def _s3(address: StoreAddress, options: S3Options, given: Mapping[str, str]) -> ObjectStore:
    from hotspan.l2.s3 import S3Store

    return S3Store(address.url, options)


def _check_client(client: Mapping[str, str], known: Sequence[str]) -> None:
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


def _hyperpod(address: StoreAddress, options: HyperpodOptions, given: Mapping[str, str]) -> ObjectStore:
    """hotspan's own daemon by its Unix socket once there is one, else whatever answers at the port."""
    from hotspan.l2.node import open_node

    path = SHARED_MEMORY / (options.shared_memory_name.removeprefix("/") + ".sock")
    unused = sorted({name.removeprefix(HYPERPOD_PREFIX) for name in given} - ON_UNIX_SOCKET)
    return open_node(path, (address.host, address.port or DAEMON_PORT), options, unused)


class _Kind(NamedTuple):
    """What a scheme names."""

    options: type
    open: Callable[[StoreAddress, Any, Mapping[str, str]], ObjectStore]


_KINDS = {
    "sagemaker-hyperpod": _Kind(HyperpodOptions, _hyperpod),
    "redis": _Kind(RedisOptions, _redis),
    "rediss": _Kind(RedisOptions, _redis),
    "file": _Kind(FileOptions, _file),
    "s3": _Kind(S3Options, _s3),
}
