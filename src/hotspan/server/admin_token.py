"""The admin token of a running server, and the file by which commands of the same user find it."""

import contextlib
import os
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path

from hotspan.config.admin_token import VARIABLE, given_token, runtime_directories, token_file
from hotspan.core.errors import ConfigError
from hotspan.core.private import private_directory


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
    _write(path, token)
    try:
        yield token
    finally:
        with contextlib.suppress(OSError):
            if path.read_text() == token:  # not another server's, which took the port over
                path.unlink()


def _write(path: Path, token: str) -> None:
    part = path.with_suffix(".part")
    try:
        part.unlink(missing_ok=True)
        fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with os.fdopen(fd, "w") as file:
            file.write(token)
        part.rename(path)
    except OSError as error:
        raise ConfigError(f"the admin token can't be written to {path} ({error.strerror}): {_REMEDY}") from error


_REMEDY = f"give one with --admin-token-file or {VARIABLE}"
