"""Where the admin token comes from, and where a server leaves one for commands of the same user.

A server that was given none makes one for its own life, in a file that only its user can read, so that `hotspan cache`
on the same host just works.
"""

import os
from collections.abc import Mapping
from pathlib import Path

from hotspan.config.secrets import is_token, read_private
from hotspan.core.errors import ConfigError
from hotspan.core.private import is_private_directory

VARIABLE = "HOTSPAN_ADMIN_TOKEN"
_MIN_LENGTH = 16


def given_token(file: Path | None, environment: Mapping[str, str]) -> str | None:
    """The token that the operator gave, by file or by environment; None if there is none.

    Raises: ConfigError for a file that others can read, or a token that is too short or can't be sent.
    """
    if file is not None:
        return _checked(read_private(file, "the admin token").strip(), str(file))
    if environment.get(VARIABLE):
        return _checked(environment[VARIABLE], VARIABLE)
    return None


def runtime_directories(environment: Mapping[str, str]) -> tuple[Path, ...]:
    """Where running servers of this user leave their tokens, best first: a service may lack what a shell has set."""
    fallback = Path(f"/tmp/hotspan-{os.geteuid()}")
    session = environment.get("XDG_RUNTIME_DIR")
    return (Path(session) / "hotspan", fallback) if session and Path(session).is_dir() else (fallback,)


def token_file(directory: Path, port: int) -> Path:
    """The file with the token of the server on `port`."""
    return directory / f"{port}.token"


def find_token(port: int, environment: Mapping[str, str]) -> str | None:
    """The token that a server of this user on this host's `port` made for itself; None if there is none."""
    for directory in runtime_directories(environment):
        file = token_file(directory, port)
        if is_private_directory(directory) and file.exists():
            return read_private(file, "the admin token").strip() or None
    return None


def _checked(token: str, origin: str) -> str:
    if len(token) < _MIN_LENGTH or not is_token(token):
        raise ConfigError(
            f"the admin token of {origin} is too short or can't be sent: give at least {_MIN_LENGTH} visible ASCII "
            "characters without spaces (openssl rand -hex 32)"
        )
    return token
