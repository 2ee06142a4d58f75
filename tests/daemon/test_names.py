"""A running daemon whose clients remove its shared memory's name."""

import json
import os
import subprocess
import sys

from kit.waiting import until
from tests.daemon.rig import DaemonProcess

VALUE = b"value of a client" * 100

ATTACH = """
import sys
from multiprocessing import shared_memory
memory = shared_memory.SharedMemory(name=sys.argv[1])
offset, size = map(int, sys.argv[2:])
sys.stdout.buffer.write(bytes(memory.buf[offset : offset + size]))
memory.close()
"""


def read_by_name(daemon: DaemonProcess) -> bytes:
    """The value as a client of Python's standard library reads it, in a process of its own that ends then."""
    status, lease = daemon.request("POST", "/v1/kv/b/k/leases")
    assert status == 200
    (place,) = json.loads(lease)["offsets"]
    words = [sys.executable, "-c", ATTACH, daemon.name, str(place["offset"]), str(place["len"])]
    return subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True).stdout


def restored(daemon: DaemonProcess) -> int:
    return int(daemon.stats()["segment_names_restored"])


def test_a_client_that_ends_takes_the_name_from_nobody(fresh_daemon: DaemonProcess) -> None:
    """Processes that attach by name read the value, one after the other, though the end of each unlinks the name."""
    before = fresh_daemon.segment.stat().st_ino
    assert fresh_daemon.request("PUT", "/v1/kv/b/k", VALUE)[0] == 200
    for ended in range(1, 4):
        assert read_by_name(fresh_daemon) == VALUE
        if sys.version_info < (3, 13):  # whose resource tracker unlinks what it did not make
            until(lambda count=ended: restored(fresh_daemon) >= count, "the name")  # type: ignore[misc]
    assert fresh_daemon.segment.stat().st_ino == before


def test_a_removed_name_is_back_and_a_foreign_file_stays(fresh_daemon: DaemonProcess) -> None:
    """After `rm` and `mv` the name is back; a file that somebody put there stays, and is reported, until it is gone."""
    segment = fresh_daemon.segment
    before = segment.stat().st_ino
    segment.unlink()
    until(segment.exists, "the name")
    moved = segment.rename(segment.with_name(f"{segment.name}-moved"))
    until(segment.exists, "the name")
    moved.unlink()
    assert segment.stat().st_ino == before
    fresh_daemon.freeze()
    segment.unlink()
    segment.write_bytes(b"theirs")
    fresh_daemon.thaw()
    until(lambda: fresh_daemon.stats()["segment_named"] == 0, "the warning")
    assert segment.read_bytes() == b"theirs"
    segment.unlink()
    until(lambda: fresh_daemon.stats()["segment_named"] == 1, "the name")
    assert segment.stat().st_ino == before and restored(fresh_daemon) == 3


def test_a_kill_leaves_nothing_for_good(fresh_daemon: DaemonProcess) -> None:
    """A client ends after the daemon was killed: the next daemon starts, and at its end no file is left."""
    assert fresh_daemon.request("PUT", "/v1/kv/b/k", VALUE)[0] == 200
    fresh_daemon.stop()
    fresh_daemon.segment.unlink()
    fresh_daemon.start()
    assert fresh_daemon.request("PUT", "/v1/kv/b/k", VALUE)[0] == 200 and read_by_name(fresh_daemon) == VALUE
    fresh_daemon.end()
    assert not [name for name in os.listdir("/dev/shm") if fresh_daemon.name in name]
