"""One daemon, two kinds of clients, more than fits, and clients and daemons that die: no wrong byte anywhere."""

import contextlib
import errno
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from hotspan.core.deadline import Deadline
from hotspan.core.frame import HEADER_BYTES, FrameIdentity, seal, verify
from hotspan.core.terms import Scope, Terms
from hotspan.core.types import ChunkKey
from hotspan.l2.base import PREAMBLE_BYTES
from hotspan.l2.daemon import DaemonStore
from hotspan.testing.chunks import aligned, content, key_of
from hotspan.tiers.record import Record, pack
from kit.waiting import PATIENCE_S, until
from tests.daemon.rig import DaemonProcess, patient_store
from tests.daemon.test_protocol import Client

PAYLOAD_BYTES = 1 << 20
NAMESPACE = bytes(32)


def chunk(name: str) -> tuple[Record, list[memoryview]]:
    """A whole chunk of that name, its frame in two parts."""
    key = key_of(name)
    header, payload = aligned(HEADER_BYTES), aligned(PAYLOAD_BYTES, content(key, PAYLOAD_BYTES))
    seal(header, payload, FrameIdentity(key, NAMESPACE))
    return Record(key, None, NAMESPACE, PAYLOAD_BYTES, Terms()), [header, payload]


def reads_whole(store: DaemonStore, key: ChunkKey) -> bool:
    """Whether a chunk is there; its frame holds then. Raises: AssertionError if it does not."""
    (found,) = store.find([key])
    into = [aligned(HEADER_BYTES), aligned(PAYLOAD_BYTES)]
    if found is None or not store.get(found, into):
        return False
    assert verify(into[0], into[1], FrameIdentity(key, NAMESPACE)) is None
    return True


def share(
    daemon: DaemonProcess, is_enough: Callable[[dict[str, Any]], bool], released: float = 0.9
) -> list[Counter[str]]:
    """How much three replicas and three HTTP clients put and read: in 3 s, and until each did some and it `is_enough`.

    is_enough: told what the daemon's stats say. released: how many of HTTP's leases; the others end by time.
    Raises:    AssertionError for wrong bytes.
    """
    names = [f"{n}" for n in range(90)]
    chunks = {name: chunk(name) for name in names}
    rng = random.Random(5)
    values = {name: name.encode() + rng.randbytes(rng.choice([5000, 900_000, 1_800_000])) for name in names}
    is_over = threading.Event()
    counts = [Counter(puts=0, hits=0) for _ in range(6)]

    def replica(seed: int, count: Counter[str]) -> None:
        chance, store = random.Random(seed), patient_store(daemon.unix_socket)
        while not is_over.is_set():
            name = chance.choice(names)
            record, frame = chunks[name]
            if reads_whole(store, record.key):
                count["hits"] += 1
                continue
            try:
                count["puts"] += store.put(record, frame)
            except OSError as error:
                assert error.errno == errno.ENOSPC
        store.close()

    def stranger(seed: int, count: Counter[str]) -> None:
        chance, client = random.Random(seed), Client(daemon)
        while not is_over.is_set():
            name = chance.choice(names)
            status, lease = client.lease("lmcache", name, timeout_ms=chance.choice([0, 500]))
            if status == 200:
                count["hits"] += 1
                assert client.bytes(lease) == values[name]
                if chance.random() < released:
                    client.release(lease["id"])
            else:
                assert status in (404, 504)
                status = client.put("lmcache", name, values[name])
                assert status in (200, 409, 507)
                count["puts"] += status == 200
        client.close()

    with ThreadPoolExecutor(6) as threads:
        done = [threads.submit(kind, n, counts[n]) for n, kind in enumerate([replica, stranger] * 3)]

        def can_end() -> bool:
            if any(each.done() for each in done):
                return True
            did_all = all(min(count.values()) > 30 for count in counts)
            return did_all and is_enough(daemon.stats())

        try:
            until(can_end, "enough")
        finally:
            is_over.set()
        for each in done:
            each.result(PATIENCE_S)
    return counts


def test_two_kinds_of_clients_share_what_does_not_fit(fresh_daemon: DaemonProcess) -> None:
    """Replicas and HTTP clients put and read three times what fits: all that is read is what was put."""
    counts = share(fresh_daemon, lambda stats: stats["evicted"] > 30)
    stats = fresh_daemon.stats()
    assert stats["evicted"] > 30 and stats["stored"] == sum(count["puts"] for count in counts)
    assert stats["stored"] == stats["objects"] + stats["evicted"]


def test_both_kinds_read_each_others_objects(daemon: DaemonProcess) -> None:
    """What a replica put is leased under its key in hotspan's bucket, record first; what was put there is found."""
    store, client = patient_store(daemon.unix_socket), Client(daemon)
    record, frame = chunk("of a replica")
    assert store.put(record, frame)
    status, lease = client.lease("hotspan", record.key.hex())
    value = pack(record).ljust(PREAMBLE_BYTES, b"\0") + b"".join(map(bytes, frame))
    assert status == 200 and client.bytes(lease) == value
    assert client.put("hotspan", record.key.hex(), value) == 409

    record, frame = chunk("by HTTP")
    value = pack(record).ljust(PREAMBLE_BYTES, b"\0") + b"".join(map(bytes, frame))
    assert client.put("hotspan", record.key.hex(), value) == 200
    assert reads_whole(store, record.key) and not store.put(record, frame)

    nonsense = key_of("nonsense")
    assert client.put("hotspan", nonsense.hex(), bytes(20_000)) == 200
    assert store.find([nonsense]) == [None]
    store.close()
    client.close()


PUTS = """
import sys
from pathlib import Path
from tests.daemon.rig import patient_store
from tests.daemon.test_sharing import chunk, reads_whole
store = patient_store(Path(sys.argv[1]))
chunks = [chunk(str(n)) for n in range(8)]
print("ready", flush=True)
while True:
    for record, frame in chunks:
        store.put(record, frame)
        reads_whole(store, record.key)
        store.delete([record.key])
"""


def test_killed_replicas_leave_no_half_of_anything(fresh_daemon: DaemonProcess) -> None:
    """Replicas killed wherever they are hold nothing afterwards, and none of their chunks is there in part."""
    store, chance = patient_store(fresh_daemon.unix_socket), random.Random(11)
    for _ in range(2):
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", PUTS, str(fresh_daemon.unix_socket)],
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
            for _ in range(2)
        ]
        for process in processes:
            assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        time.sleep(chance.uniform(0.02, 0.1))  # so that the kill comes anywhere
        for process in processes:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
        for n in range(8):
            reads_whole(store, key_of(str(n)))
        store.delete([key_of(str(n)) for n in range(8)])
        until(lambda: fresh_daemon.stats()["pinned_bytes"] == 0, "the end of what the killed ones had")
    stats = fresh_daemon.stats()
    assert stats["objects"] == 0 and stats["free_bytes"] == stats["capacity_bytes"]
    store.close()


def test_a_stopped_reader_reads_nothing_wrong(fresh_daemon: DaemonProcess) -> None:
    """While a stopped client's leases run out and its bytes are given to others, it does not take those for its own."""
    store = DaemonStore(fresh_daemon.unix_socket, deadline_s=PATIENCE_S, lease_s=0.3)
    record, frame = chunk("a")
    store.put(record, frame)
    (found,) = store.find([record.key])
    assert found is not None
    client = Client(fresh_daemon)
    time.sleep(0.35)  # as a process that is stopped: the lease is over, and the clock is the real one
    capacity = fresh_daemon.stats()["capacity_bytes"]
    assert client.put("b", "everything", bytes(capacity)) == 200
    assert not store.get(found, [aligned(HEADER_BYTES), aligned(PAYLOAD_BYTES)])
    store.close()
    client.close()


def test_a_restarted_daemon_is_another(fresh_daemon: DaemonProcess) -> None:
    """After a kill and a start clients find an empty cache and a new log, and let go of the old memory."""
    store, client = patient_store(fresh_daemon.unix_socket), Client(fresh_daemon)
    assert store.log is not None
    record, frame = chunk("a")
    store.put(record, frame)
    store.log.append([Scope()], "me")
    before, old = store.log.read(0), fresh_daemon.segment.stat().st_ino
    with contextlib.ExitStack() as at_once:
        for _ in range(3):  # connections of several threads, idle afterwards
            at_once.enter_context(store._client.connection(Deadline(PATIENCE_S)))
    assert mapped(old)
    fresh_daemon.stop()
    with pytest.raises(OSError):
        store.find([record.key])
    client.close()
    assert not mapped(old), "memory of a daemon that is gone is held"
    fresh_daemon.start()
    assert fresh_daemon.segment.stat().st_ino != old
    assert store.find([record.key]) == [None]
    after = store.log.read(before.generation)
    assert after.epoch != before.epoch and after.floor > before.generation and not after.entries
    assert store.put(record, frame) and reads_whole(store, record.key)
    store.close()


def mapped(inode: int) -> bool:
    """Whether this process maps a file."""
    return any(line.split()[4] == str(inode) for line in Path("/proc/self/maps").read_text().splitlines())
