"""Files that hold secrets: read only if nobody else can."""

import os
import stat
from collections.abc import Mapping
from pathlib import Path

from hotspan.core.errors import ConfigError
from hotspan.core.redaction import is_reference, is_secret, redacted_text

_MAX_BYTES = 4 << 20


def read_private(path: Path, what: str) -> str:
    """The text of a file that this user alone can read. `what` says in errors what it is: "the admin token".

    Raises: ConfigError if it is not there, is no regular file, is open to other users, or is no text.
    """
    try:
        with path.open("rb") as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise ConfigError(f"{path} is no file: give a file with {what}")
            if found.st_mode & 0o077:
                raise ConfigError(
                    f"{path} holds {what} and is open to other users (mode {stat.S_IMODE(found.st_mode):04o}): "
                    "chmod 600 it, and replace what they may have read"
                )
            data = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path} with {what} can't be read ({error.strerror}): give another file") from error
    if len(data) > _MAX_BYTES:
        raise ConfigError(f"{path} has more than {_MAX_BYTES >> 20} MiB: give a file with {what}")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is no UTF-8 text: give a file with {what}") from error


def is_token(text: str) -> bool:
    """Whether an HTTP header can carry it as a credential: visible ASCII, no spaces."""
    return bool(text) and all("!" <= letter <= "~" for letter in text)


def resolved(options: Mapping[str, str], environment: Mapping[str, str]) -> dict[str, str]:
    """Options with those that are secrets fetched from where they are: file:PATH or env:NAME.

    Raises: ConfigError for a secret that is written out, or is not there.
    """
    check_references(options)
    return {name: _fetched(name, value, environment) if is_secret(name) else value for name, value in options.items()}


def check_references(options: Mapping[str, str]) -> None:
    """Raise ConfigError for a secret that is written out, under whatever spelling of its name or in a URL."""
    for name, value in options.items():
        if not is_secret(name) and redacted_text(value) != value:
            raise ConfigError(f"{name} holds a password or a key: leave it out of the URL")
        if is_secret(name) and not is_reference(value):
            raise ConfigError(
                f"{name} is a secret: write {name}=file:/PATH (mode 0600) or {name}=env:NAME, not the secret itself"
            )


def _fetched(name: str, reference: str, environment: Mapping[str, str]) -> str:
    kind, _, where = reference.partition(":")
    if kind == "file":
        return read_private(Path(where).expanduser(), f"the {name}").strip()
    if not environment.get(where):
        raise ConfigError(f"{name} is to be in the variable {where}, which is not set")
    return environment[where]
