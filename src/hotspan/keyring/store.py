"""The key store: a directory of wrapped keys that outlives every server, shared by the servers of one host.

    DIR/lock                 shared by those who use the store, exclusive to the commands that need it at rest
    DIR/writing              held for the moment of one change
    DIR/store.json           format, KEK
    DIR/SHA256(TENANT).json  one tenant's keys (keyring/records.py)
    DIR/*.tmp                a change under way, or cut off: whoever holds `writing` next removes it

Files are 0600 in a 0700 directory. A change is written beside, synced, renamed, and the directory synced: after a crash
the old state stands or the new one. What a change replaces is overwritten.
"""

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from hotspan.core.errors import ConfigError, KeyUnavailable
from hotspan.core.private import (
    EXCLUSIVE,
    SHARED,
    close_to_others,
    let_go,
    lock,
    locked,
    open_lock,
    sync_directory,
    write_new,
)
from hotspan.keyring.records import (
    StoreHeader,
    TenantRecord,
    decode_header,
    decode_record,
    encode_header,
    encode_record,
    file_name,
)

_HEADER = "store.json"
_WRITING_TIMEOUT_S = 10.0
_READ_ATTEMPTS = 5


class FileStamp(NamedTuple):
    """Differs when a file was replaced."""

    inode: int
    modified_ns: int
    size: int


class Stored(NamedTuple):
    """A tenant's record and the stamp of the file that it was read from."""

    record: TenantRecord
    stamp: FileStamp


class KeyStore:
    """An open key store. Any thread may call it; every method blocks for the disk, none for a KMS."""

    def __init__(self, path: Path, *, exclusive: bool = False) -> None:
        """Use the store at `path` until `close`, together with others or alone.

        Raises: ConfigError if there is none, if it can't be used, or if others use it in a way that excludes this one;
                KeyUnavailable if store.json is damaged.
        """
        self.path = path
        if not (path / _HEADER).exists():
            raise ConfigError(f"{path} holds no key store: make one with `hotspan keys init --store {path} --kek REF`")
        try:
            self._lock = _lock(path, exclusive)
            try:
                _keep_private(path)
                self.header = decode_header((path / _HEADER).read_bytes())
                with self._writing():
                    self._sweep()
            except BaseException:
                let_go(self._lock)
                raise
        except OSError as error:
            raise _unusable(path, error) from error

    def __repr__(self) -> str:
        return f"KeyStore({str(self.path)!r})"

    def __enter__(self) -> "KeyStore":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the store; again is harmless."""
        if self._lock >= 0:
            let_go(self._lock)
            self._lock = -1

    def stamp(self, tenant: str) -> FileStamp | None:
        """The stamp of the tenant's file now; None if it has none. Raises: OSError."""
        try:
            return _stamp(os.stat(self.path / file_name(tenant)))
        except FileNotFoundError:
            return None

    def read(self, tenant: str) -> Stored | None:
        """The tenant's record; None if it has none. Raises: OSError; KeyUnavailable if the file is damaged."""
        return self._read(file_name(tenant))

    def tenants(self) -> list[str]:
        """The names of the tenants that have keys, sorted; no change is under way meanwhile.

        Raises: OSError; KeyUnavailable if a file is damaged.
        """
        with self._writing():
            found = [self._read(p.name) for p in self.path.glob("*.json") if p.name != _HEADER]
        return sorted(stored.record.tenant for stored in found if stored is not None)

    def create(self, record: TenantRecord, wanted: Callable[[], bool] = lambda: True) -> bool:
        """Write the first record of a tenant; False if it has one, or if `wanted()` says no at the last moment.

        Two that create at once: one wins, and the other reads what it wrote.
        Raises: OSError.
        """
        name = file_name(record.tenant)
        with self._writing():
            if not wanted():
                return False
            draft = self._draft(name, encode_record(record))
            try:
                os.link(draft, self.path / name)
            except FileExistsError:
                return False
            finally:
                os.unlink(draft)
            sync_directory(self.path)
            return True

    def update(self, tenant: str, change: Callable[[TenantRecord], TenantRecord]) -> Stored | None:
        """Replace the tenant's record by `change` of it, with no other change in between; None if it has none.

        Raises: OSError; KeyUnavailable if the file is damaged.
        """
        name = file_name(tenant)
        with self._writing():
            stored = self._read(name)
            if stored is None:
                return None
            record = change(stored.record)
            self._replace(name, encode_record(record))
            return Stored(record, _stamp(os.stat(self.path / name)))

    def set_header(self, header: StoreHeader) -> None:
        """Replace what the store says of itself. Raises: OSError."""
        with self._writing():
            self._replace(_HEADER, encode_header(header))
            self.header = header

    def shred(self, tenant: str) -> tuple[bytes, ...]:
        """Destroy the tenant's keys, for good before this returns; the ids of its roots, as far as they were readable.

        The rename takes the keys away at one point in time; what a crash leaves after it is swept by the next change.
        Raises: OSError if it can't be made durable: then the keys may still be there.
        """
        name = file_name(tenant)
        with self._writing():
            roots: tuple[bytes, ...] = ()
            with contextlib.suppress(KeyUnavailable):
                stored = self._read(name)
                roots = stored.record.root_ids if stored is not None else ()
            with contextlib.suppress(FileNotFoundError):
                os.rename(self.path / name, self.path / f"{name}.shred.tmp")
            sync_directory(self.path)
            self._sweep(name)
            return roots

    def _read(self, name: str) -> Stored | None:
        for _ in range(_READ_ATTEMPTS):
            try:
                fd = os.open(self.path / name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            except FileNotFoundError:
                return None
            with os.fdopen(fd, "rb") as file:
                content = file.read()
                found = os.fstat(fd)
            if found.st_nlink:  # else it was replaced and overwritten as we read: the next one is whole
                return Stored(decode_record(content, name), _stamp(found))
        raise KeyUnavailable(f"the key store's file {name} changes faster than it can be read: it is tried again")

    def _replace(self, name: str, content: bytes) -> None:
        old = os.open(self.path / name, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            os.replace(self._draft(name, content), self.path / name)
            sync_directory(self.path)
            _overwrite(old)
        finally:
            os.close(old)

    def _draft(self, name: str, content: bytes) -> Path:
        self._sweep(name)
        draft = self.path / f"{name}.tmp"
        write_new(draft, content)
        return draft

    def _sweep(self, name: str = "") -> None:
        """Overwrite and remove drafts of `name`. To be called with `writing` held: no draft is then anyone's."""
        found = sorted(self.path.glob(f"{name}*.tmp"))
        for draft in found:
            fd = os.open(draft, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                if os.fstat(fd).st_nlink == 1:  # else `create` was cut off and this is the tenant's live file, too
                    _overwrite(fd)
            finally:
                os.close(fd)
            os.unlink(draft)
        if found:
            sync_directory(self.path)

    def _writing(self) -> contextlib.AbstractContextManager[None]:
        """Exclude every other change, of this process and of others. Raises: TimeoutError after 10 s."""
        return locked(self.path / "writing", _WRITING_TIMEOUT_S)


def create_store(path: Path, header: StoreHeader) -> None:
    """Make an empty key store in `path`; durable before this returns.

    Raises: ConfigError if there is one, if `path` holds other files, or if it can't be written.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_empty(path)
        _keep_private(path)
        lock = _lock(path, exclusive=True)
        try:
            _check_empty(path)  # again: another may have made one since
            draft = path / f"{_HEADER}.tmp"
            draft.unlink(missing_ok=True)
            write_new(draft, encode_header(header))
            os.rename(draft, path / _HEADER)
            sync_directory(path)
            sync_directory(path.parent)
        finally:
            let_go(lock)
    except OSError as error:
        raise _unusable(path, error) from error


def _check_empty(path: Path) -> None:
    if (path / _HEADER).exists():
        raise ConfigError(f"{path} holds a key store already: use it, or give --store another directory")
    foreign = sorted(p.name for p in path.iterdir() if p.name not in ("lock", "lost+found", f"{_HEADER}.tmp"))
    if foreign:
        raise ConfigError(f"{path} holds other files ({', '.join(foreign[:3])}): give --store an empty directory")


def _overwrite(fd: int) -> None:
    """Zeros over the whole file, on disk. A copying file system or an SSD may keep the old blocks for a while."""
    size = os.fstat(fd).st_size
    done = 0
    while done < size:
        done += os.pwrite(fd, bytes(size - done), done)
    os.fsync(fd)


def _stamp(found: os.stat_result) -> FileStamp:
    return FileStamp(found.st_ino, found.st_mtime_ns, found.st_size)


def _keep_private(path: Path) -> None:
    if not close_to_others(path):
        raise ConfigError(f"the key store {path} is open to other users and not this user's: chmod 700 it")


def _lock(path: Path, exclusive: bool) -> int:
    fd = open_lock(path / "lock")
    if lock(fd, EXCLUSIVE if exclusive else SHARED):
        return fd
    owners = _lock_owners(fd)
    let_go(fd)
    who = f"process(es) {', '.join(map(str, owners))}" if owners else "another process"
    what = "give --server URL, or stop it" if exclusive else "wait until `hotspan keys` is done there"
    raise ConfigError(f"the key store {path} is in use by {who}: {what}")


def _lock_owners(fd: int) -> list[int]:
    """The processes that hold the lock, as far as the kernel shows them to us (proc(5), /proc/locks)."""
    found = os.fstat(fd)
    file = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
    try:
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return []
    rows = [line.split() for line in lines]
    found_pids = {int(row[4]) for row in rows if len(row) > 5 and row[1] == "FLOCK" and row[5] == file}
    return sorted(pid for pid in found_pids if pid > 0)  # 0 stands for a process of another container


def _unusable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"the key store {path} can't be used ({error.strerror or error}): give --store another directory"
    )
