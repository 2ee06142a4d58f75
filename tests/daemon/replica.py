"""One replica without an engine: its L2 tier and its follower of the log, in a process that a test kills.

usage: python -m tests.daemon.replica SOCKET NAME SEED STOP_AT

It stores and loads texts in random order and says so, a line each: `stored TEXT`, `loaded TEXT`. A wrong byte ends it
with a traceback. With STOP_AT `put` or `lease` it says `stopped` in the middle of the first one, and waits there.
"""

import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from hotspan.core.terms import Terms
from hotspan.core.types import Chunk
from hotspan.l2 import daemon, follower
from hotspan.l2.follower import LogFollower
from hotspan.l2.remote import RemoteOptions, RemoteTier
from hotspan.testing.chunks import aligned, chain, content
from hotspan.tiers.base import Transfer
from kit.waiting import PATIENCE_S
from tests.daemon.rig import patient_store

SIZE = 1 << 18
LENGTH = 3
NAMESPACE = bytes(range(32))
TEXTS = [f"text {n}" for n in range(12)]


class Replica:
    """A tier on the daemon's store, driven as the cache drives one."""

    def __init__(self, unix_socket: Path, name: str) -> None:
        log = patient_store(unix_socket)
        assert log.log is not None
        self.follower = LogFollower(log.log, name, store=log)
        self.follower.start(PATIENCE_S)
        self.tier = RemoteTier(RemoteOptions(patient_store(unix_socket), self.follower, threads=2), NAMESPACE, SIZE)

    def known(self, chunks: Sequence[Chunk]) -> int:
        """How many chunks of a text are there, from its beginning on."""
        self.follower.foreign()  # as the engine does before it admits a request
        self.tier.ask(chunks, 0)
        self._until(lambda: not any(self.tier.is_asking(chunk.key) for chunk in chunks))
        found = [self.tier.lookup(chunk.key) for chunk in chunks]
        return found.index(False) if False in found else len(found)

    def load(self, chunk: Chunk) -> bool:
        """Whether it came. Raises: AssertionError for a wrong byte."""
        into = aligned(SIZE)
        if not self.tier.submit_load(chunk.key, into):
            return False
        (transfer,) = self._transfers(1)
        assert transfer.fault is not None or into == content(chunk.key, SIZE), "a wrong byte"
        return transfer.fault is None

    def store(self, chunk: Chunk, terms: Terms | None = None) -> bool:
        """Whether it is there now."""
        self.follower.foreign()
        payload = aligned(SIZE, content(chunk.key, SIZE))
        if not self.tier.submit_store(chunk, terms or Terms(), payload):
            return False
        (transfer,) = self._transfers(1)
        return transfer.fault is None

    def close(self) -> None:
        """As a replica that ends."""
        self.tier.close(2.0)
        self.follower.close()

    def _transfers(self, count: int) -> list[Transfer]:
        found: list[Transfer] = []
        deadline = time.monotonic() + 2 * PATIENCE_S
        while len(found) < count:
            assert time.monotonic() < deadline, "a transfer does not end"
            self.tier.wait(0.05)
            found += self.tier.finished()
        return found

    def _until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 2 * PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline, "no answer comes"
            self.tier.wait(0.05)
            assert not self.tier.finished()


def stop_in(what: str) -> None:
    """Stop where a put has its place, or where a read has its lease."""

    def stop(*_: object) -> None:
        print("stopped", flush=True)
        time.sleep(600)

    if what == "put":
        daemon.placed = stop  # type: ignore[assignment]
    else:
        of_get = daemon._lease_of

        def leased(answer: memoryview) -> tuple[int, int]:
            if of_get(answer)[0]:
                stop()
            return of_get(answer)

        daemon._lease_of = leased


def main(unix_socket: str, name: str, seed: str, stop_at: str) -> None:
    follower.STALE_S = follower.REPORT_TTL_S = PATIENCE_S
    replica, chance = Replica(Path(unix_socket), name), random.Random(seed)
    print("ready", flush=True)
    if stop_at:
        stop_in(stop_at)
    while True:
        text = chance.choice(TEXTS)
        chunks = chain(text, LENGTH)
        there = replica.known(chunks)
        if all(replica.load(chunk) for chunk in chunks[:there]) and there == LENGTH:
            print(f"loaded {text}", flush=True)
        elif all(replica.store(chunk) or replica.known(chunks) > chunk.index for chunk in chunks[there:]):
            print(f"stored {text}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
