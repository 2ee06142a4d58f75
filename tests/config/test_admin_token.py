"""Where the admin token comes from, and how commands of the same user find it."""

import os
from pathlib import Path

import pytest

from hotspan.config.admin_token import VARIABLE, admin_token, find_token, given_token, runtime_directories
from hotspan.core.errors import ConfigError

TOKEN = "0123456789abcdef-admin"
PORT = 1
"""No server's: commands look for a server's token in /tmp, too."""


def surroundings(directory: Path) -> dict[str, str]:
    return {"XDG_RUNTIME_DIR": str(directory)}


def test_given_by_file_or_environment(tmp_path: Path) -> None:
    """The file comes before the environment, and a line end is no part of it."""
    path = tmp_path / "token"
    path.write_text(TOKEN + "\n")
    path.chmod(0o600)
    assert given_token(path, {VARIABLE: "another-token-of-20"}) == TOKEN
    assert given_token(None, {VARIABLE: TOKEN}) == TOKEN
    assert given_token(None, {}) is None


@pytest.mark.parametrize("token", ["", "tiny", "with spaces in between it"])
def test_unusable_tokens(tmp_path: Path, token: str) -> None:
    """Too short to be a secret, or no header can carry it: refused without repeating it."""
    path = tmp_path / "token"
    path.write_text(token)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="at least 16") as refused:
        given_token(path, {})
    assert not token or token not in str(refused.value).replace(str(path), "")
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        given_token(path, {})


def test_made_for_one_life(tmp_path: Path) -> None:
    """Without one, a random token lies in a 0600 file in a 0700 directory as long as the server runs, and no longer."""
    with admin_token(PORT, None, surroundings(tmp_path)) as token:
        file = tmp_path / "hotspan" / f"{PORT}.token"
        assert file.read_text() == token and len(token) >= 32
        assert file.stat().st_mode & 0o777 == 0o600 and file.parent.stat().st_mode & 0o777 == 0o700
        assert find_token(PORT, surroundings(tmp_path)) == token
        assert find_token(8081, surroundings(tmp_path)) is None
    assert not list((tmp_path / "hotspan").iterdir())


def test_stale_file_is_replaced(tmp_path: Path) -> None:
    """What a killed server left does not stand in the way, and a server takes away only its own token."""
    (tmp_path / "hotspan").mkdir(mode=0o700)
    file = tmp_path / "hotspan" / f"{PORT}.token"
    file.write_text("stale")
    with admin_token(PORT, None, surroundings(tmp_path)) as token:
        assert file.read_text() == token
        file.write_text("of the next server")
    assert file.read_text() == "of the next server"


def test_given_token_is_written_nowhere(tmp_path: Path) -> None:
    """A token that the operator gave stays where it was."""
    with admin_token(PORT, None, surroundings(tmp_path) | {VARIABLE: TOKEN}) as token:
        assert token == TOKEN and not list(tmp_path.iterdir())


@pytest.mark.parametrize("how", ["open", "link", "file"])
def test_directory_that_is_not_ours_alone(tmp_path: Path, how: str) -> None:
    """A directory that others can enter, a link or a file in its place: no token is left there, none is found there."""
    directory = tmp_path / "hotspan"
    if how == "open":
        directory.mkdir()
        directory.chmod(0o755)
        (directory / f"{PORT}.token").write_text("planted")
    elif how == "link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        directory.symlink_to(tmp_path / "elsewhere")
    else:
        directory.write_text("")
    with pytest.raises(ConfigError, match="--admin-token-file"), admin_token(PORT, None, surroundings(tmp_path)):
        pass
    assert find_token(PORT, surroundings(tmp_path)) is None


def test_without_a_session_directory() -> None:
    """Without XDG_RUNTIME_DIR it is a directory of this user in /tmp; commands look in both."""
    fallback = Path(f"/tmp/hotspan-{os.geteuid()}")
    assert runtime_directories({}) == (fallback,)
    assert runtime_directories({"XDG_RUNTIME_DIR": "/nonexistent"}) == (fallback,)
    assert runtime_directories({"XDG_RUNTIME_DIR": "/tmp"}) == (Path("/tmp/hotspan"), fallback)
