"""`hotspan daemon --disk`: a real daemon with a real disk that is killed, restarted, filled, broken and stopped."""

import errno
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hotspan.core.errors import DirectoryError
from hotspan.core.frame import HEADER_BYTES
from hotspan.core.terms import Scope, Terms
from hotspan.core.types import MIB
from hotspan.daemon.options import DaemonOptions
from hotspan.daemon.server import run_daemon
from hotspan.l2.base import updates_of
from hotspan.testing.chunks import aligned, content, key_of
from hotspan.tiers.files import Files
from kit.waiting import until
from tests.daemon.rig import DaemonProcess, HangingDaemon, PatientDaemon, patient_store
from tests.daemon.test_protocol import Client
from tests.daemon.test_sharing import PAYLOAD_BYTES, chunk, reads_whole, share

"""Whoever waits for a disk that hangs waits for longer."""

NAMES = [str(n) for n in range(40)]  # more than the memory of 16 MiB holds


def warm_daemon(disk: Path) -> DaemonProcess:
    """16 MiB of memory over 128 MiB of disk."""
    return PatientDaemon(1 / 64, ("--disk", str(disk), "--disk-gib", "0.125"))


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    """The daemon's directory."""
    return tmp_path / "disk"


@pytest.fixture
def warm(disk: Path) -> Iterator[DaemonProcess]:
    """A daemon with a disk."""
    daemon = warm_daemon(disk)
    daemon.start()
    yield daemon
    daemon.close()


def value(name: str, size: int = PAYLOAD_BYTES) -> bytes:
    """The bytes of that name."""
    return content(key_of(name), size)


def saved(daemon: DaemonProcess) -> bool:
    """Whether all is on disk that is to be there."""
    stats = daemon.stats()
    return bool(stats["disk_unsaved"] == 0 and stats["pinned_bytes"] == 0)


def fill(daemon: DaemonProcess, names: list[str] = NAMES) -> None:
    """Put values, slowly enough for the disk."""
    client = Client(daemon)
    for name in names:
        assert client.put("b", name, value(name)) == 200
        until(lambda: saved(daemon), "the copy")
    client.close()


def leased(daemon: DaemonProcess, name: str) -> bytes | None:
    """What a lease gives; None for a miss."""
    client = Client(daemon)
    status, lease = client.lease("b", name, timeout_ms=30_000)
    if status != 200:
        return None
    data = client.bytes(lease)
    client.release(lease["id"])
    client.close()
    return data


def test_what_gave_way_is_leased_and_found(warm: DaemonProcess, disk: Path) -> None:
    """More than memory holds is all there for both kinds of clients, and the figures say where."""
    fill(warm)
    stats = warm.stats()
    assert stats["objects"] < 16 and stats["disk_objects"] == 40 == stats["disk_stored"] and stats["disk_late"] == 0
    for name in NAMES[:5]:
        assert leased(warm, name) == value(name)
    assert warm.stats()["disk_loaded"] >= 5

    store = patient_store(warm.unix_socket)
    record, frame = chunk("own")
    store.put(record, frame)
    until(lambda: saved(warm), "the copy")
    fill(warm, [f"more {n}" for n in range(16)])
    assert [each is not None for each in store.find([record.key, key_of("nobody")])] == [True, False]
    loaded = warm.stats()["disk_loaded"]
    assert reads_whole(store, record.key) and reads_whole(store, record.key)
    assert warm.stats()["disk_loaded"] == loaded + 1
    usage = store.usage()
    assert usage.objects == 57 and usage.capacity_bytes == 144 * MIB - 4096
    store.close()
    page = warm.request("GET", "/metrics")[1].decode()
    assert "hotspan_daemon_disk_objects 57.0" in page and "hotspan_daemon_disk_loaded_total" in page
    assert {each.stat().st_mode & 0o777 for each in disk.iterdir()} == {0o600}


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_restarted_daemon_is_warm(warm: DaemonProcess, number: signal.Signals) -> None:
    """After any end what was on disk is there, and the log goes on: no replica has to forget anything.

    Tags that hits added are there, too; a chunk that was updated before it was stored is taken by any tag.
    """
    store = patient_store(warm.unix_socket)
    assert store.log is not None
    record, frame = chunk("own")
    store.put(record, frame)
    update = updates_of(Terms(labels=frozenset([7])), 5)
    absent, absent_frame = chunk("absent")
    store.add_updates({record.key: update, absent.key: update})
    generation = store.log.append([Scope(tenant=4)], "me")
    before = store.log.read(0)
    fill(warm)
    assert warm.end(number) == (0 if number == signal.SIGTERM else -signal.SIGKILL)
    warm.start()
    assert warm.stats()["disk_objects"] == 41
    after = store.log.read(0)
    assert after == before and after.generation == generation
    (found,) = store.find([record.key])
    assert found is not None and found.terms.labels == {7} and reads_whole(store, record.key)
    for name in NAMES:
        assert leased(warm, name) == value(name)
    assert store.put(absent, absent_frame)
    (found,) = store.find([absent.key])
    assert found is not None and found.terms.is_wild
    store.close()


def test_an_end_that_is_announced_leaves_nothing_unwritten(warm: DaemonProcess) -> None:
    """What was put the moment before SIGTERM is there after the restart."""
    client = Client(warm)
    for name in NAMES[:12]:
        assert client.put("b", name, value(name)) == 200
    client.close()
    assert warm.end() == 0
    warm.start()
    assert [leased(warm, name) == value(name) for name in NAMES[:12]] == [True] * 12


def test_two_kinds_of_clients_share_a_disk_that_is_too_small(disk: Path) -> None:
    """Where memory and disk both hold only a part, nothing is read but what was put, and no byte of either is lost."""
    daemon = PatientDaemon(1 / 32, ("--disk", str(disk), "--disk-gib", str(1 / 10)))
    try:
        daemon.start()
        share(daemon, lambda stats: stats["disk_evicted"] > 5 and stats["disk_loaded"] > 5, released=1.0)
        until(lambda: saved(daemon) and daemon.idle(), "the end of all I/O")
        stats = daemon.stats()
    finally:
        daemon.close()
    assert stats["disk_evicted"] > 5 and stats["disk_loaded"] > 5 and stats["disk_corrupt"] == 0 == stats["disk_faults"]
    assert stats["free_bytes"] == stats["capacity_bytes"] - stats["used_bytes"]


def test_what_was_deleted_stays_away(warm: DaemonProcess) -> None:
    """A DELETE that was answered, by either server, holds after a kill; so does what took its name."""
    store, client = patient_store(warm.unix_socket), Client(warm)
    record, frame = chunk("own")
    store.put(record, frame)
    fill(warm, NAMES[:3])
    store.delete([record.key])
    for name in NAMES[:2]:
        assert client.ask("DELETE", f"/v1/kv/b/{name}")[0] == 200
    assert client.put("b", "1", b"another") == 200
    until(lambda: saved(warm), "the copy")
    store.delete([record.key])  # answered when it is durable, and with it all that was noted before
    client.close()
    warm.stop()
    warm.start()
    assert store.find([record.key]) == [None]
    assert [leased(warm, name) for name in NAMES[:3]] == [None, b"another", value("2")]
    store.close()


def test_an_invalidation_survives_a_kill(warm: DaemonProcess) -> None:
    """Each invalidation that was answered is in the log of the daemon that was killed right afterwards."""
    store = patient_store(warm.unix_socket)
    assert store.log is not None
    for n in range(5):
        generation = store.log.append([Scope(tenant=n)], "me")
        warm.stop()
        warm.start()
        page = store.log.read(0)
        assert page.generation == generation and [each.scopes[0].tenant for each in page.entries] == list(range(n + 1))
    store.close()


def test_a_replica_that_read_more_makes_it_forget(warm: DaemonProcess) -> None:
    """A daemon whose disk is not of this log (an older one was put in its place) forgets hotspan's own chunks."""
    store = patient_store(warm.unix_socket)
    assert store.log is not None
    record, frame = chunk("own")
    store.put(record, frame)
    fill(warm, NAMES[:2])
    before = store.log.read(0)
    warm.stop()
    warm.start()
    after = store.log.read(before.generation + 1000)
    assert after.epoch != before.epoch and after.floor > before.generation + 1000
    assert store.find([record.key]) == [None] and leased(warm, "1") == value("1")
    store.close()


def test_wrong_bytes_on_disk_are_misses(warm: DaemonProcess, disk: Path) -> None:
    """A disk that changed behind the daemon's back gives misses and nothing else; a table that did is not believed."""
    fill(warm, NAMES[:20])
    assert warm.end() == 0
    slab = disk / "slab"
    data = bytearray(slab.read_bytes())
    for at in range(PAYLOAD_BYTES // 2, len(data), 4 * PAYLOAD_BYTES):
        data[at] ^= 1
    slab.write_bytes(data)
    warm.start()
    values = [leased(warm, name) for name in NAMES[:20]]
    assert all(found in (None, value(name)) for name, found in zip(NAMES, values, strict=False))
    assert 5 <= sum(found is None for found in values) == warm.stats()["disk_corrupt"] < 20
    assert warm.end() == 0
    table = disk / "objects"
    said = bytearray(table.read_bytes())
    for at in range(4096, len(said), 256):
        said[at + 100] ^= 1
    table.write_bytes(said)
    warm.start()
    assert [leased(warm, name) for name in NAMES[:20]] == [None] * 20


def test_a_disk_that_hangs_holds_nobody(disk: Path) -> None:
    """While it hangs memory is leased as ever, what is on disk is a miss in time, and the end does not wait."""
    daemon = HangingDaemon(disk)
    try:
        daemon.start()
        fill(daemon, NAMES[:30])
        store = patient_store(daemon.unix_socket)
        log = store.log
        assert log is not None
        record, frame = chunk("own")
        daemon.hang()
        client = Client(daemon)
        assert client.put("b", "new", value("new")) == 200 and store.put(record, frame)
        for name in NAMES[:4]:
            assert client.lease("b", name, timeout_ms=300)[0] in (404, 504)
        until(lambda: daemon.stats()["disk_is_up"] == 0, "the notice that it hangs")
        for _ in range(50):
            assert leased(daemon, "new") == value("new") and reads_whole(store, record.key)
            assert client.lease("b", "0", timeout_ms=60_000)[0] == 404
        assert client.ask("DELETE", "/v1/kv/b/new")[0] == 503 and client.lease("b", "new")[0] == 404
        with pytest.raises(OSError):
            log.append([Scope()], "me")
        daemon.release()

        def is_confirmed() -> bool:
            try:
                return bool(log.append([Scope()], "me"))
            except OSError:  # not within a second
                return False

        until(lambda: leased(daemon, "9") == value("9"), "the disk")
        until(is_confirmed, "the disk's confirmation")
        daemon.hang()
        assert client.put("b", "newer", value("newer")) == 200
        client.close()
        store.close()
        assert daemon.end() == 0
    finally:
        daemon.close()


def test_a_lease_waits_for_a_slow_disk_no_longer_than_it_said(disk: Path) -> None:
    """A lease of what is on a disk that hangs ends before it does: on the Unix socket it is a miss, over HTTP 504."""
    daemon = HangingDaemon(disk, kinds="preadv")
    try:
        daemon.start()
        fill(daemon, NAMES[:30])
        store, client = patient_store(daemon.unix_socket), Client(daemon)
        record, frame = chunk("own")
        store.put(record, frame)
        fill(daemon, [f"more {n}" for n in range(16)])
        (found,) = store.find([record.key])
        assert found is not None

        daemon.hang()
        assert not store.get(found, [aligned(HEADER_BYTES), aligned(PAYLOAD_BYTES)])
        daemon.release()
        until(lambda: reads_whole(store, record.key), "the read")
        daemon.hang()
        assert client.lease("b", "3", timeout_ms=400)[0] == 504
        daemon.release()
        until(lambda: leased(daemon, "3") == value("3"), "the read")
        store.close()
        client.close()
    finally:
        daemon.close()


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        (("--disk", "DIR"), "belong together"),
        (("--disk-gib", "1"), "belong together"),
        (("--disk", "DIR", "--disk-gib", "nan"), "--disk-gib"),
        (("--disk", "DIR", "--disk-gib", "-1"), "--disk-gib"),
        (("--disk", "DIR", "--disk-gib", "1000000"), "lower --disk-gib"),
        (("--disk", "/proc/nothing", "--disk-gib", "0.01"), "--disk"),
    ],
)
def test_what_can_not_work_is_said(disk: Path, options: tuple[str, ...], hint: str) -> None:
    """Each is one line with what to do, and status 2; no memory is taken."""
    daemon = DaemonProcess(0.01, tuple(str(disk) if word == "DIR" else word for word in options))
    done = subprocess.run(daemon.command(), capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and hint in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert not daemon.segment.exists()


@pytest.mark.parametrize("name", ["objects", "log"])
def test_a_file_that_can_not_be_read_is_said(disk: Path, name: str) -> None:
    """What stands in the place of the table or the log is an error with status 2, and left alone."""
    (disk / name).mkdir(parents=True)
    done = subprocess.run(warm_daemon(disk).command(), capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "--disk" in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert (disk / name).is_dir()


def test_a_log_whose_disk_fails_is_said(disk: Path) -> None:
    """A log that can't be looked at when the daemon starts is an error that names the directory; no memory stays."""

    class Failing(Files):
        log_fd = -1

        def open(self, path: Path, flags: int, mode: int = 0o600) -> int:
            fd = super().open(path, flags, mode)
            self.log_fd = fd if path.name == "log" else self.log_fd
            return fd

        def stat(self, fd: int) -> os.stat_result:
            if fd == self.log_fd:
                raise OSError(errno.EIO, "the disk fails")
            return super().stat(fd)

    daemon = DaemonProcess()
    disk.mkdir(mode=0o700)
    (disk / "objects").touch()
    (disk / "log").write_bytes(b"x")
    of: dict[str, Any] = {"port": 0, "shared_memory_name": daemon.name, "size_gib": 1 / 64}
    with pytest.raises(DirectoryError, match="the disk fails"):
        run_daemon(DaemonOptions(disk=disk, disk_gib=1 / 64, **of), files=Failing())
    assert not daemon.segment.exists()


def test_a_second_daemon_is_refused(warm: DaemonProcess, disk: Path) -> None:
    """One directory has one daemon; the first goes on."""
    done = subprocess.run(warm_daemon(disk).command(), capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "is in use by process" in done.stderr
    assert warm.stats()["disk_is_up"] == 1
