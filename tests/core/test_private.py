"""Private directories and locks: who else may look in, who waits, and for how long."""

import os
import threading
from pathlib import Path

import pytest

from hotspan.core.errors import ConfigError
from hotspan.core.private import (
    SHARED,
    close_to_others,
    is_private_directory,
    lock,
    locked,
    open_lock,
    private_directory,
    sync_directory,
)


def test_a_private_directory_is_this_users_alone(tmp_path: Path) -> None:
    """It is made with its parents, found again, and refused with a remedy where others may look in."""
    path = private_directory(tmp_path / "a" / "b", "the model", "name another")
    assert path.stat().st_mode & 0o777 == 0o700 and private_directory(path, "the model", "name another") == path
    (tmp_path / "link").symlink_to(path)
    path.chmod(0o750)
    for other in (path, tmp_path / "link"):
        assert not is_private_directory(other)
        with pytest.raises(ConfigError, match=r"the model can't be kept in .* open to other users.*name another"):
            private_directory(other, "the model", "name another")
    assert is_private_directory(path, forbidden=0o022), "others may read, and nobody may write"
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="Not a directory"):
        private_directory(tmp_path / "file" / "c", "the model", "name another")


@pytest.mark.parametrize("mode", [0o700, 0o777, 0o500])
def test_a_directory_is_closed_to_others(tmp_path: Path, mode: int) -> None:
    """Whatever its mode was, this user's directory has 0700 then."""
    tmp_path.chmod(mode)
    assert close_to_others(tmp_path) and tmp_path.stat().st_mode & 0o777 == 0o700


def test_locks_exclude_threads_and_end_with_their_descriptor(tmp_path: Path) -> None:
    """Shared locks stand together, an exclusive one alone; closing the file frees it."""
    one, other, third = (open_lock(tmp_path / "lock") for _ in range(3))
    assert lock(one, SHARED) and lock(other, SHARED) and not lock(third)
    os.close(one)
    assert not lock(third)
    os.close(other)
    assert lock(third)
    os.close(third)
    assert (tmp_path / "lock").stat().st_mode & 0o777 == 0o600


def test_who_waits_for_a_lock_gets_it_or_an_error(tmp_path: Path) -> None:
    """Within `locked` nobody else is; who may not wait is told which file it was."""
    path, inside = tmp_path / "lock", threading.Semaphore(0)

    def enter() -> None:
        with locked(path):
            inside.release()

    with locked(path):
        with pytest.raises(TimeoutError, match="lock has been locked by another process"), locked(path, 0.0):
            pass
        waiting = threading.Thread(target=enter)
        waiting.start()
        assert not inside.acquire(blocking=False)
    waiting.join(60)
    assert inside.acquire(blocking=False)


def test_a_directory_is_synced_by_path_and_by_descriptor(tmp_path: Path) -> None:
    """Also one that was opened only to name files in it."""
    sync_directory(tmp_path)
    fd = os.open(tmp_path, os.O_PATH)
    try:
        sync_directory(fd)
    finally:
        os.close(fd)
