"""Two replicas of a node at once on one daemon: one is killed wherever it is, the other notices nothing."""

import queue
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hotspan.core.terms import Scope, Terms, tag_labels
from hotspan.l2 import follower
from hotspan.testing.chunks import chain
from kit.waiting import PATIENCE_S, until
from tests.daemon.replica import LENGTH, TEXTS, Replica
from tests.daemon.rig import DaemonProcess, PatientDaemon, patient_store
from tests.l2.receipts import missing


class ReplicaProcess:
    """A replica that stores and loads until it is killed."""

    def __init__(self, daemon: DaemonProcess, name: str, seed: int, stop_at: str = "") -> None:
        command = [sys.executable, "-m", "tests.daemon.replica", str(daemon.unix_socket), name, str(seed), stop_at]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self._lines: queue.Queue[str] = queue.Queue()
        self.said: Counter[str] = Counter()
        self.stored: set[str] = set()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait_for(self, *words: str, times: int = 1) -> None:
        """Until it has said one of these that often since the last call."""
        deadline = time.monotonic() + 2 * PATIENCE_S
        while times:
            if self._lines.get(timeout=deadline - time.monotonic()).startswith(words):
                times -= 1

    def kill(self) -> None:
        """It ends in the middle of whatever it does. Raises: AssertionError if it had ended before."""
        assert self._process.poll() is None, self._process.communicate()[1]
        self.end()

    def end(self) -> None:
        """Leave nothing of it."""
        self._process.kill()
        self._process.wait()
        self._reader.join(PATIENCE_S)
        for stream in (self._process.stdout, self._process.stderr):
            assert stream is not None
            stream.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            what, _, text = line.strip().partition(" ")
            self.said[what] += 1
            if what in ("stored", "loaded"):
                self.stored.add(text)
            self._lines.put(line)


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replicas in this process, too, go on when the machine stands still."""
    for name in ("STALE_S", "REPORT_TTL_S"):
        monkeypatch.setattr(follower, name, PATIENCE_S)


@pytest.fixture(params=["memory", "disk"])
def node(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[DaemonProcess]:
    """A daemon whose memory holds all texts, or with less memory and a disk that holds them."""
    options = ("--disk", str(tmp_path / "disk"), "--disk-gib", "0.125") if request.param == "disk" else ()
    daemon = PatientDaemon(1 / 16 if not options else 1 / 128, options)
    daemon.start()
    yield daemon
    daemon.close()


@pytest.fixture
def start(node: DaemonProcess) -> Iterator[Callable[..., ReplicaProcess]]:
    """Starts replicas of the node (name, seed, where to stop), of which nothing is left afterwards."""
    started: list[ReplicaProcess] = []

    def start(*of: Any) -> ReplicaProcess:
        started.append(ReplicaProcess(node, *of))
        return started[-1]

    yield start
    for replica in started:
        replica.end()


def test_a_killed_replica_leaves_the_other_in_peace(node: DaemonProcess, start: Callable[..., ReplicaProcess]) -> None:
    """One is killed again and again wherever it is; the other reads and writes on, and a restarted one finds all."""
    chance = random.Random(9)
    steady = start("steady", 1)
    stored: set[str] = set()
    for n in range(3):
        other = start("other", 100 + n)
        other.wait_for("ready")
        steady.wait_for("stored", "loaded", times=3)
        time.sleep(chance.uniform(0.05, 0.4))
        other.kill()
        stored |= other.stored
        steady.wait_for("loaded", times=5)
    until(lambda: stored | steady.stored == set(TEXTS), "all texts")
    steady.kill()
    until(node.idle, "the end of what the killed ones had")
    store, after = patient_store(node.unix_socket), Replica(node.unix_socket, "other")
    missing = store.find([chunk.key for text in TEXTS for chunk in chain(text, LENGTH)], is_chain=False).count(None)
    assert missing <= node.stats()["disk_late"], "more is gone than the disk was too slow for"
    for chunks in (chain(text, LENGTH) for text in TEXTS):
        if None not in store.find([chunk.key for chunk in chunks]):
            assert after.known(chunks) == LENGTH and all(after.load(chunk) for chunk in chunks)
    after.close()
    store.close()


@pytest.mark.parametrize("stop_at", ["put", "lease"])
def test_killed_in_the_middle(node: DaemonProcess, start: Callable[..., ReplicaProcess], stop_at: str) -> None:
    """Killed with a place reserved, or a lease held, a replica frees it; the other stores and reads that very text."""
    other = Replica(node.unix_socket, "steady")
    if stop_at == "lease":
        for text in TEXTS:
            assert all(other.store(chunk) for chunk in chain(text, LENGTH))
        until(node.idle, "the copies on disk")
    killed = start("killed", 4, stop_at)
    killed.wait_for("stopped")
    assert not node.idle()
    text = chain(TEXTS[0], LENGTH)
    assert all(other.known(text) > chunk.index or other.store(chunk) for chunk in text), "it is in the way"
    assert set(other.follower._log.replicas()) == {"steady", "killed"}
    killed.kill()
    until(node.idle, "the end of what the killed one had")
    for text in (chain(name, LENGTH) for name in TEXTS):
        for chunk in text:
            assert other.known(text) > chunk.index or other.store(chunk)
        assert other.known(text) == LENGTH and all(other.load(chunk) for chunk in text)
    other.close()


def test_what_one_invalidates_the_other_does_not_read(node: DaemonProcess) -> None:
    """An invalidation takes for both replicas, and for one that is started after the daemon, what it names, only."""
    one, two = Replica(node.unix_socket, "one"), Replica(node.unix_socket, "two")
    for text, tag in (("secret", "red"), ("public", "green")):
        for chunk in chain(text, LENGTH):
            assert one.store(chunk, Terms(labels=tag_labels([tag])))
    assert two.known(chain("secret", LENGTH)) == LENGTH == two.known(chain("public", LENGTH))
    one.follower.append([Scope(labels=tag_labels(["red"]))])
    until(lambda: not missing(one.follower), "the other replica reads the log")
    for replica in (one, two):
        assert replica.known(chain("secret", LENGTH)) == 0 and replica.known(chain("public", LENGTH)) == LENGTH
    until(node.idle, "the copies on disk")
    has_disk = node.stats()["disk_capacity_bytes"] > 0
    one.close()
    two.close()
    node.stop()
    node.start()
    three = Replica(node.unix_socket, "three")
    assert three.known(chain("secret", LENGTH)) == 0
    assert three.known(chain("public", LENGTH)) == (LENGTH if has_disk else 0)
    three.close()
