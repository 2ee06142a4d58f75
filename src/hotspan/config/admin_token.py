"""Where the admin token comes from, and where a server leaves one for commands of the same user.

A server that was given none makes one for its own life, in a file that only its user can read, so that `hotspan cache`
on the same host just works.
"""

import contextlib
import os
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import SplitResult

from hotspan.config.options import option
from hotspan.config.secrets import is_token, read_private
from hotspan.core.addresses import is_loopback
from hotspan.core.errors import ConfigError
from hotspan.core.private import is_private_directory, private_directory, write_whole

VARIABLE = "HOTSPAN_ADMIN_TOKEN"
_MIN_LENGTH = 16
_REMEDY = f"give one with --admin-token-file or {VARIABLE}"

HOW_TO_GIVE = f"give its admin token with --token, --admin-token-file or {VARIABLE}"
"""To a command that asks a server; the token of a server of this user on this host is found by itself."""


def given_token(file: Path | None, environment: Mapping[str, str]) -> str | None:
    """The token that the operator gave, by file or by environment; None if there is none.

    Raises: ConfigError for a file that others can read, or a token that is too short or can't be sent.
    """
    if file is not None:
        return _checked(read_private(file, "the admin token").strip(), str(file))
    if environment.get(VARIABLE):
        return _checked(environment[VARIABLE], VARIABLE)
    return None


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class AdminToken:
    """The admin token of a server, for a command that asks it."""

    token: str = option(
        "",
        f"Admin token of the server. Default: that of --admin-token-file, {VARIABLE}, or the token that a server of "
        "this user on this host has generated.",
    )
    admin_token_file: Path | None = option(None, "File (mode 0600) with the admin token of the server.")

    def of(self, url: SplitResult, environment: Mapping[str, str]) -> str | None:
        """What to send to the server at `url`; None if no token is known.

        Raises: ConfigError for a token that can't be sent, or a file that can't be used.
        """
        token = self.token
        if not token and self.admin_token_file is not None:
            token = read_private(self.admin_token_file, "the admin token").strip()
        token = token or environment.get(VARIABLE, "")
        if token and not is_token(token):
            raise ConfigError("the admin token holds what no header can carry: give visible ASCII without spaces")
        if token or not is_loopback(url.hostname or ""):  # a token of this host is nothing that another one should see
            return token or None
        return find_token(url.port or (443 if url.scheme == "https" else 80), environment)


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


@contextlib.contextmanager
def admin_token(port: int, file: Path | None, environment: Mapping[str, str]) -> Iterator[str]:
    """The token that the operator gave; or else one made for this server's life, left in a file for its user.

    Raises: ConfigError if the given one is unusable, or there is nowhere to leave one.
    """
    given = given_token(file, environment)
    if given is not None:
        yield given
        return
    token = secrets.token_urlsafe(32)
    path = token_file(private_directory(runtime_directories(environment)[0], "the admin token", _REMEDY), port)
    try:
        write_whole(path, token.encode())
    except OSError as error:
        raise ConfigError(f"the admin token can't be written to {path} ({error.strerror}): {_REMEDY}") from error
    try:
        yield token
    finally:
        with contextlib.suppress(OSError):
            if path.read_text() == token:  # not another server's, which took the port over
                path.unlink()


def _checked(token: str, origin: str) -> str:
    if len(token) < _MIN_LENGTH or not is_token(token):
        raise ConfigError(
            f"the admin token of {origin} is too short or can't be sent: give at least {_MIN_LENGTH} visible ASCII "
            "characters without spaces (openssl rand -hex 32)"
        )
    return token
