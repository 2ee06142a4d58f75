"""The key store on disk: private, atomic through crashes, shared without lost changes, and shredded for good."""

import os
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hotspan.core.errors import ConfigError, KeyUnavailable
from hotspan.core.private import locked
from hotspan.keyring import store as stores
from hotspan.keyring.records import (
    StoreHeader,
    TenantRecord,
    WrappedRoot,
    decode_header,
    decode_record,
    encode_record,
    file_name,
)
from hotspan.keyring.store import KeyStore, create_store
from hotspan.keyring.wrapped import pack

SECRET = bytes(range(100, 148))


def root(number: int) -> WrappedRoot:
    return WrappedRoot(number.to_bytes(16, "big"), 1_700_000_000.0, pack("local:test", SECRET))


def record(tenant: str = "acme", roots: int = 1) -> TenantRecord:
    return TenantRecord(tenant, pack("local:test", SECRET), tuple(root(n) for n in range(roots)))


def leftovers(store: Path) -> list[str]:
    return sorted(p.name for p in store.iterdir() if p.name not in ("lock", "writing", "store.json"))


def killed_at(call: str, store: Path, action: str) -> None:
    """Run `action` on the store in a process that dies, as by kill -9, when it comes to the system call `call`."""
    code = f"""
import os
from pathlib import Path
from hotspan.keyring.store import KeyStore
from tests.keyring.test_store import record, root
store = KeyStore(Path({str(store)!r}))
os.{call} = lambda *_, **__: os._exit(9)
{action}
"""
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2]).returncode == 9


def test_everything_is_private(store: Path) -> None:
    """The directory is 0700 and every file 0600, whatever the umask was."""
    before = os.umask(0)
    try:
        with KeyStore(store) as opened:
            assert opened.create(record())
            opened.update("acme", lambda r: r.with_root(root(1)))
    finally:
        os.umask(before)
    assert stat.S_IMODE(store.stat().st_mode) == 0o700
    assert {stat.S_IMODE(p.stat().st_mode) for p in store.iterdir()} == {0o600}


def test_a_directory_open_to_others_is_closed(store: Path) -> None:
    """Opening a store takes it back from group and others."""
    store.chmod(0o755)
    KeyStore(store).close()
    assert stat.S_IMODE(store.stat().st_mode) == 0o700


def test_what_was_written_is_read(store: Path) -> None:
    """A record survives closing and reopening, and its stamp changes with each change and only then."""
    with KeyStore(store) as opened:
        assert opened.read("acme") is None and opened.stamp("acme") is None
        opened.create(record())
        first = opened.read("acme")
        assert first is not None and first.record == record() and first.stamp == opened.stamp("acme")
        second = opened.update("acme", lambda r: r.with_root(root(1)))
        assert second is not None and second.stamp == opened.stamp("acme") != first.stamp
        assert opened.update("other", lambda r: r) is None
    with KeyStore(store) as opened:
        again = opened.read("acme")
        assert again is not None and again.record == record(roots=2) and again.stamp == second.stamp
        assert opened.tenants() == ["acme"]


@given(tenant=st.text(max_size=300))
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_any_tenant_name_has_a_file(store: Path, tenant: str) -> None:
    """Names with slashes, dots, NULs or none at all are tenants like others."""
    with KeyStore(store) as opened:
        opened.shred(tenant)
        assert opened.create(record(tenant))
        assert tenant in opened.tenants()


@given(content=st.binary(max_size=200))
def test_damaged_files_are_key_unavailable(content: bytes) -> None:
    """No content of a file leads to anything but a record or KeyUnavailable."""
    with pytest.raises(KeyUnavailable):
        decode_record(content, file_name("acme"))
    with pytest.raises(KeyUnavailable):
        decode_header(content)


@pytest.mark.parametrize(
    ("old", "new"),
    [(b'"version": 1', b'"version": 2'), (b"acme", b"evil"), (b'"roots"', b'"boots"'), (b'"id": "0', b'"id": "')],
)
def test_a_record_that_is_not_ours_is_refused(old: bytes, new: bytes) -> None:
    """Another version, another tenant's file, missing fields and short ids are KeyUnavailable."""
    content = encode_record(record())
    assert decode_record(content, file_name("acme")) == record()
    with pytest.raises(KeyUnavailable, match="damaged"):
        decode_record(content.replace(old, new), file_name("acme"))


@pytest.mark.parametrize("call", ["fsync", "replace", "utime"])
def test_a_crash_before_the_rename_leaves_the_old_state(store: Path, call: str) -> None:
    """A change cut off before it is published leaves the record as it was, and the next use removes the rest."""
    with KeyStore(store) as opened:
        opened.create(record())
    killed_at(call, store, "store.update('acme', lambda r: r.with_root(root(1)))")
    assert any(name.endswith(".tmp") for name in leftovers(store))
    with KeyStore(store) as opened:
        stored = opened.read("acme")
        assert stored is not None and stored.record == record()
    assert leftovers(store) == [file_name("acme")]


@pytest.mark.parametrize(("call", "there"), [("link", False), ("unlink", True)])
def test_a_crash_while_creating_leaves_nothing_or_all(store: Path, call: str, there: bool) -> None:
    """A creation cut off before or after its link is no tenant or a whole one."""
    killed_at(call, store, "store.create(record())")
    with KeyStore(store) as opened:
        stored = opened.read("acme")
        assert (stored.record if stored else None) == (record() if there else None)
    assert leftovers(store) == ([file_name("acme")] if there else [])


def test_a_crash_within_a_shred_does_not_bring_keys_back(store: Path) -> None:
    """Once the file's name is gone the keys are; the next use overwrites what the crash left."""
    with KeyStore(store) as opened:
        opened.create(record())
    with (store / file_name("acme")).open("rb") as file:
        killed_at("pwrite", store, "store.shred('acme')")
        with KeyStore(store) as opened:
            assert opened.read("acme") is None
        assert leftovers(store) == []
        assert set(file.read()) == {0}


def test_a_shred_is_on_disk_before_it_returns(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The keys are overwritten, that is synced, then unlinked, and that is synced."""
    calls: list[str] = []
    with KeyStore(store) as opened:
        opened.create(record(roots=2))
        with (store / file_name("acme")).open("rb") as file:
            for name in ("rename", "pwrite", "fsync", "unlink"):

                def spy(*args: object, _name: str = name, _real: object = getattr(os, name)) -> object:
                    calls.append(_name)
                    return _real(*args)  # type: ignore[operator]

                monkeypatch.setattr(os, name, spy)
            assert opened.shred("acme") == (root(0).id, root(1).id)
            assert calls == ["rename", "fsync", "pwrite", "fsync", "unlink", "fsync"]
            assert set(file.read()) == {0}
    assert leftovers(store) == []


def test_what_a_change_replaces_is_overwritten(store: Path) -> None:
    """The former file's content is gone from the disk, so that a later shred leaves no copy."""
    with KeyStore(store) as opened:
        opened.create(record())
        with (store / file_name("acme")).open("rb") as file:
            opened.update("acme", lambda r: r.with_root(root(1)))
            assert set(file.read()) == {0}


def test_what_a_dead_process_left_does_not_stop_the_living(store: Path) -> None:
    """A change that was cut off in one process is overwritten by the next change of another that was there before."""
    with KeyStore(store) as opened:
        opened.create(record())
        killed_at("replace", store, "store.update('acme', lambda r: r.with_root(root(1)))")
        draft = next(store.glob("*.tmp"))
        with draft.open("rb") as file:
            assert opened.update("acme", lambda r: r.with_root(root(2))) is not None
            assert set(file.read()) == {0}
        assert leftovers(store) == [file_name("acme")]


def test_a_reader_overtaken_by_a_change_reads_again(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is replaced, and overwritten, while it is read gives the new record and no damage."""
    with KeyStore(store) as opened:
        opened.create(record())
        real = os.fstat
        overtaken: list[int] = []

        def fstat(fd: int) -> os.stat_result:
            if not overtaken:
                overtaken.append(fd)
                opened.update("acme", lambda r: r.with_root(root(1)))
            return real(fd)

        monkeypatch.setattr(os, "fstat", fstat)
        stored = opened.read("acme")
        assert overtaken and stored is not None and stored.record == record(roots=2)


def test_shredding_what_is_damaged_or_absent_works(store: Path) -> None:
    """A tenant without keys, or with a damaged file, has none afterwards."""
    with KeyStore(store) as opened:
        assert opened.shred("acme") == ()
        (store / file_name("acme")).write_bytes(b"rubbish")
        with pytest.raises(KeyUnavailable, match="damaged"):
            opened.read("acme")
        assert opened.shred("acme") == ()
        assert opened.read("acme") is None


def test_changes_at_once_lose_none(store: Path) -> None:
    """Eight threads of two processes' worth of stores that append roots all succeed, and readers see whole records."""
    with KeyStore(store) as one, KeyStore(store) as two:
        one.create(record())
        faults: list[BaseException] = []

        def append(opened: KeyStore, number: int) -> None:
            try:
                for step in range(5):
                    new = root(100 * number + step)
                    opened.update("acme", lambda r, new=new: r.with_root(new))  # type: ignore[misc]
                    assert opened.read("acme") is not None
            except BaseException as error:
                faults.append(error)

        threads = [threading.Thread(target=append, args=((one, two)[n % 2], n + 1)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not faults
        stored = one.read("acme")
        assert stored is not None and len(stored.record.roots) == 41


def test_of_two_that_create_one_wins(store: Path) -> None:
    """Of many creations at once exactly one is written, whole."""
    wins: list[int] = []
    with KeyStore(store) as opened:

        def create(number: int) -> None:
            if opened.create(TenantRecord("acme", pack("local:test", SECRET), (root(number),))):
                wins.append(number)

        threads = [threading.Thread(target=create, args=(n,)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        stored = opened.read("acme")
        assert stored is not None and len(wins) == 1 and stored.record.roots == (root(wins[0]),)


def test_a_creation_no_longer_wanted_is_not_written(store: Path) -> None:
    """`wanted` is asked at the last moment."""
    with KeyStore(store) as opened:
        assert not opened.create(record(), wanted=lambda: False)
        assert leftovers(store) == []


def test_who_waits_too_long_for_another_s_change_changes_nothing(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A change that another process does not end is an OSError for every other one; afterwards all go through."""
    with KeyStore(store) as keys:
        assert keys.create(record())
        before = keys.read("acme")
        changes: list[Callable[[], object]] = [
            lambda: keys.create(record("other")),
            lambda: keys.update("acme", lambda found: record(roots=2)),
            lambda: keys.set_header(keys.header),
            keys.tenants,
            lambda: keys.shred("acme"),
        ]
        monkeypatch.setattr(stores, "_WRITING_TIMEOUT_S", 0.0)
        with locked(store / "writing"):
            for change in changes:
                with pytest.raises(TimeoutError, match="writing has been locked by another process"):
                    change()
            with pytest.raises(ConfigError, match="writing has been locked by another process"):
                KeyStore(store)
        assert keys.read("acme") == before and keys.read("other") is None
        for change in changes:
            change()
        assert keys.tenants() == ["other"]


def test_use_alone_excludes_servers_and_says_which(store: Path) -> None:
    """Servers share a store; a command that needs it alone names their process, and the other way round."""
    with (
        KeyStore(store),
        KeyStore(store),
        pytest.raises(ConfigError, match=rf"in use by process.*{os.getpid()}.*--server"),
    ):
        KeyStore(store, exclusive=True)
    with KeyStore(store, exclusive=True), pytest.raises(ConfigError, match="hotspan keys"):
        KeyStore(store)
    KeyStore(store, exclusive=True).close()


def test_directories_that_can_not_be_used_are_explained(store: Path, tmp_path: Path) -> None:
    """No store, a second store, foreign files and a file in place of a directory are errors that say what to do."""
    header = StoreHeader("local:test", 0.0)
    with pytest.raises(ConfigError, match="hotspan keys init"):
        KeyStore(tmp_path / "missing")
    with pytest.raises(ConfigError, match="already"):
        create_store(store, header)
    with pytest.raises(ConfigError, match="holds other files"):
        create_store(tmp_path, header)
    with pytest.raises(ConfigError, match="can't be used"):
        create_store(tmp_path / "kek", header)
    with pytest.raises(ConfigError, match="can't be used"):
        create_store(tmp_path / "kek" / "store", header)


def test_a_store_that_was_cut_off_while_being_made_can_be_made(tmp_path: Path) -> None:
    """What a crash of `keys init` leaves does not stand in the way of the next."""
    path = tmp_path / "store"
    path.mkdir()
    (path / "lock").touch()
    (path / "store.json.tmp").write_bytes(b"{")
    create_store(path, StoreHeader("local:test", 5.0))
    with KeyStore(path) as opened:
        assert opened.header == StoreHeader("local:test", 5.0)
