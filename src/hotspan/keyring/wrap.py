"""Key-encryption keys (KEK): what wraps the tenants' keys, and is itself never in the key store.

    file:/path/to/kek                                32 bytes, raw, hex or base64, in a file of mode 0600
    env:NAME                                         32 bytes, hex or base64, in the caller's environment
    aws-kms:KEY_ID_OR_ARN[?region=..&endpoint=..]    stays inside the KMS (keyring/kms.py)

A wrapped key says itself which of them opens it (keyring/wrapped.py).
"""

import base64
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol
from urllib.parse import parse_qsl, urlsplit

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from hotspan.core.errors import ConfigError, KeyUnavailable, did_you_mean
from hotspan.core.private import sync_directory, write_new
from hotspan.keyring.kms import open_kms
from hotspan.keyring.wrapped import changed, pack, unpack, wrapped_by

KEY_BYTES = 32
_NONCE_BYTES = 12
_FORMS = "give file:/path/to/kek, env:NAME or aws-kms:KEY_ID_OR_ARN"
_ENCODINGS = f"{KEY_BYTES} bytes as {2 * KEY_BYTES} hex digits or as base64"


class KeyWrapper(Protocol):
    """A key-encryption key. Any thread may call it."""

    @property
    def id(self) -> str:
        """Says which KEK this is, in every key it wraps; not a secret."""
        ...

    def wrap(self, key: bytes, context: bytes) -> bytes:
        """`key`, readable only through this KEK and only with the same `context`. Raises: KeyUnavailable."""
        ...

    def unwrap(self, blob: bytes, context: bytes) -> bytes:
        """The key that `wrap` was given.

        Blocks:  for the KMS, at most about 15 s; not at all for a local KEK.
        Raises:  KeyUnavailable if another KEK wrapped it, if it or its context was changed, or if the KMS is out of
                 reach.
        """
        ...


class LocalWrapper:
    """A KEK that this process holds: AES-256-GCM, a random nonce for each wrap, the context as associated data."""

    __slots__ = ("_aead", "id")

    def __init__(self, kek: bytes) -> None:
        if len(kek) != KEY_BYTES:
            raise ValueError(f"a key-encryption key has {KEY_BYTES} bytes")
        self._aead = AESGCM(kek)
        # Derived from the key and not from where it lies, so that a moved file is still the same KEK.
        name = HKDF(algorithm=SHA256(), length=8, salt=None, info=b"hotspan-kek-id-1").derive(kek)
        self.id = f"local:{name.hex()}"

    def __repr__(self) -> str:
        return f"LocalWrapper({self.id})"

    def wrap(self, key: bytes, context: bytes) -> bytes:
        nonce = os.urandom(_NONCE_BYTES)
        return pack(self.id, nonce + self._aead.encrypt(nonce, key, context))

    def unwrap(self, blob: bytes, context: bytes) -> bytes:
        sealed = unpack(self.id, blob)
        try:
            return self._aead.decrypt(sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:], context)
        except (InvalidTag, ValueError):
            raise changed() from None


class ChangingWrapper:
    """Wraps by `new` and unwraps what `new` or `old` wrapped: for the time in which one KEK replaces another."""

    __slots__ = ("_new", "_old", "id")

    def __init__(self, new: KeyWrapper, old: KeyWrapper) -> None:
        self._new = new
        self._old = old
        self.id = new.id

    def wrap(self, key: bytes, context: bytes) -> bytes:
        return self._new.wrap(key, context)

    def unwrap(self, blob: bytes, context: bytes) -> bytes:
        wrapper = self._new if wrapped_by(blob) == self._new.id else self._old
        return wrapper.unwrap(blob, context)


def open_wrapper(reference: str, environment: Mapping[str, str]) -> KeyWrapper:
    """The KEK that `reference` names; no KMS is asked yet.

    Raises: ConfigError with what to write instead. It never repeats what might be a key given by mistake.
    """
    scheme, colon, rest = reference.partition(":")
    if colon and rest:
        if scheme == "file":
            return LocalWrapper(_read_kek(Path(rest)))
        if scheme == "env":
            return LocalWrapper(_kek_of_environment(rest, environment))
        if scheme == "aws-kms":
            return _open_aws(rest)
    raise ConfigError(f"that is no reference to a key-encryption key: {_FORMS}")


def create_kek(path: Path) -> None:
    """Write a fresh random KEK to `path`, as hex, mode 0600; on disk before this returns.

    Raises: ConfigError if `path` exists or can't be written.
    """
    try:
        write_new(path, os.urandom(KEY_BYTES).hex().encode() + b"\n")
        sync_directory(path.parent)
    except FileExistsError:
        raise ConfigError(f"{path} exists already: leave out --new-kek to use it, or name a new file") from None
    except OSError as error:
        raise ConfigError(f"no key can be written to {path} ({error.strerror}): name another file") from error


def try_wrapper(wrapper: KeyWrapper) -> None:
    """Wrap and unwrap once. Blocks for the KMS. Raises: KeyUnavailable if this KEK can't be used."""
    probe = os.urandom(KEY_BYTES)
    if wrapper.unwrap(wrapper.wrap(probe, b"hotspan-probe"), b"hotspan-probe") != probe:
        raise KeyUnavailable(f"{wrapper.id} returns other keys than it was given: use another")


def _read_kek(path: Path) -> bytes:
    try:
        # Nonblocking, or a named pipe would hold us here; links are followed, as mounted secrets are links.
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError(
            f"the key-encryption key {path} can't be read ({error.strerror}): name another file, "
            "or make one with `hotspan keys init --new-kek`"
        ) from error
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise ConfigError(f"the key-encryption key {path} is not a regular file: name one that is")
        if found.st_mode & 0o077:
            raise ConfigError(
                f"the key-encryption key {path} can be read by other users: chmod 600 it, and replace the key "
                "if one of them may have"
            )
        content = os.read(fd, 4 * KEY_BYTES)  # of a regular file: all of it, if it is a key
    finally:
        os.close(fd)
    if len(content) == KEY_BYTES:
        if all(0x20 <= byte < 0x7F for byte in content):
            raise ConfigError(f"the key-encryption key {path} holds a text, not random bytes: put {_ENCODINGS} there")
        return content
    return _decoded(content, f"the key-encryption key {path}")


def _kek_of_environment(name: str, environment: Mapping[str, str]) -> bytes:
    value = environment.get(name)
    if value is None:
        raise ConfigError(f"the environment has no variable {name}, which --kek names: set it to {_ENCODINGS}")
    return _decoded(value.encode(errors="replace"), f"the environment variable {name}")


def _decoded(content: bytes, what: str) -> bytes:
    text = content.strip()
    try:
        key = bytes.fromhex(text.decode()) if len(text) == 2 * KEY_BYTES else _unbase64(text)
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise ConfigError(f"{what} is not {_ENCODINGS}: make one with `openssl rand -hex {KEY_BYTES}`")
    return key


def _unbase64(text: bytes) -> bytes:
    standard = text.translate(bytes.maketrans(b"-_", b"+/")).rstrip(b"=")
    return base64.b64decode(standard + b"=" * (-len(standard) % 4), validate=True)


def _open_aws(rest: str) -> KeyWrapper:
    key, _, query = rest.partition("?")
    options = dict(parse_qsl(query, keep_blank_values=True))
    for name in options.keys() - {"region", "endpoint"}:
        hint = did_you_mean(name, ("region", "endpoint"), "region and endpoint may follow")
        raise ConfigError(f"an aws-kms: key takes no option {name!r}: {hint}")
    if not key:
        raise ConfigError("aws-kms: names no key: give aws-kms:KEY_ID_OR_ARN")
    endpoint = options.get("endpoint")
    if endpoint is not None:
        _check_endpoint(endpoint)
    return open_kms(key, options.get("region"), endpoint)


def _check_endpoint(endpoint: str) -> None:
    """Without TLS the tenants' keys would cross the network in the clear."""
    try:
        scheme, host = urlsplit(endpoint).scheme, urlsplit(endpoint).hostname
    except ValueError:
        scheme, host = "", None
    if host is None or scheme not in ("https", "http"):
        raise ConfigError("the endpoint of an aws-kms: key is not a URL: give https://HOST[:PORT]")
    if scheme == "http" and host not in ("localhost", "127.0.0.1", "::1"):
        raise ConfigError(f"the endpoint http://{host} would carry keys in the clear: give https://")
