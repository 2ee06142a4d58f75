"""What a storm of invalidations by one tenant costs the others: a thousand document updates a minute, over 8 replicas.

usage: python -m benchmarks.invalidation_storm [--seconds 60] [--directory DIR] [--output FILE]

Each replica is what an engine has below it: RAM, a disk tier with O_DIRECT in DIR, and an L2 that all share; once a
shared directory in DIR, once a redis-server that is started here. Four tenants ask for texts at a steady rate, each
request at any replica. First alone; then while a fifth one, a pipeline, updates documents, as the router has it done:
one replica forgets a document's tag and writes it to the shared log, the others are told which entry that is, and the
new version is stored. No model runs: one thread plays the eight schedulers, and what a request misses it stores. A
receipt is complete when it is durable on every replica's disk and in the L2's log, and all replicas have read it.
"""

import itertools
import json
import os
import random
import shutil
import statistics
import sys
import tempfile
import threading
import time
import uuid
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.harness import arguments
from hotspan.bench.machine import write_results
from hotspan.cache.entry import Reader
from hotspan.cache.tiered import TieredCache
from hotspan.core.terms import Scope, Terms, tag_labels, tenant_label
from hotspan.core.types import Chunk, ChunkKey, Lookup, Tier
from hotspan.engine.receipts import Receipts
from hotspan.l2.base import ObjectStore
from hotspan.l2.file import FileStore
from hotspan.l2.follower import LogFollower
from hotspan.l2.redis import RedisStore
from hotspan.l2.remote import RemoteOptions, RemoteTier
from hotspan.testing.chunks import chain, content
from hotspan.tiers.disk import DiskOptions, DiskTier
from hotspan.tiers.lower import LowerTier
from hotspan.tiers.slab import SharedSlab
from kit.measure import quantile
from kit.redis_server import redis_server

NAMESPACE = bytes(range(32))
PIPELINE = tenant_label("pipeline")
OTHERS = [tenant_label(f"tenant {number}") for number in range(4)]
P99_S, HIT_RATE_LOSS = 1.0, 0.01

Connect = Callable[[], ObjectStore]


@dataclass(frozen=True, slots=True)
class Settings:
    """How much. Texts of others are `texts` per tenant; the pipeline has `documents`."""

    seconds: float = 60.0
    replicas: int = 8
    updates_per_minute: int = 1000
    requests_per_s: float = 40.0
    texts: int = 16
    chunks: int = 6
    documents: int = 100
    payload_kib: int = 64
    ram_chunks: int = 128

    @property
    def payload_bytes(self) -> int:
        return self.payload_kib << 10

    @property
    def disk_bytes(self) -> int:
        """Room for all that there is, twice."""
        return 2 * (len(OTHERS) * self.texts + self.documents) * self.chunks * (self.payload_bytes + 4096)


@dataclass(frozen=True, slots=True, eq=False)
class Text:
    """What somebody asks for."""

    chunks: Sequence[Chunk]
    terms: Terms


@dataclass(slots=True, eq=False)
class Request:
    """A text that is looked up until nothing of it is on its way."""

    text: Text
    reader: Reader


@dataclass(slots=True)
class Receipt:
    """One update: complete when every replica has said that it is durable and read by all."""

    began_s: float
    waits_for: int
    is_durable: bool = True
    missing: set[str] = field(default_factory=set)
    ended_s: float = 0.0


@dataclass(slots=True)
class Round:
    """What one mode showed. asked and hits: chunks of the other tenants. wrong: hits with other bytes."""

    seconds: float = 0.0
    asked: int = 0
    hits: int = 0
    wrong: int = 0
    by_tier: Counter[str] = field(default_factory=Counter)
    receipts: list[Receipt] = field(default_factory=list)


class Replica:
    """One engine's cache, and its receipts."""

    def __init__(self, number: int, directory: Path, connect: Connect, settings: Settings) -> None:
        self.settings = settings
        self.slab = SharedSlab(f"storm-{uuid.uuid4().hex}", settings.ram_chunks, settings.payload_bytes)
        self.slab.unlink()
        log_store = connect()
        if log_store.log is None:
            raise SystemExit("this store keeps no log")
        self.follower = LogFollower(log_store.log, f"replica-{number}", store=log_store)
        disk = DiskOptions(directory / f"disk-{number}", settings.disk_bytes, threads=2)

        def open_disk(again: bool) -> DiskTier:
            return DiskTier(disk, NAMESPACE, settings.payload_bytes)

        def open_l2(again: bool) -> RemoteTier:
            return RemoteTier(RemoteOptions(connect(), self.follower, threads=2), NAMESPACE, settings.payload_bytes)

        self.disk, self.l2 = LowerTier(open_disk), LowerTier(open_l2)
        self.cache = TieredCache(self.slab, self.disk, self.l2, namespace=NAMESPACE, patience_s=2.0)
        self.requests: list[Request] = []
        self.receipts = Receipts(self.follower.replica, self.follower)
        self.follower.start()

    def follow(self) -> None:
        """What an engine does between two steps, an idle one too."""
        if self.follower.position is not None and (scopes := self.follower.foreign()):
            self.cache.invalidate(scopes, lambda done: None, is_foreign=True)

    def invalidate(
        self,
        scopes: Sequence[Scope],
        receipt: Receipt,
        lock: threading.Lock,
        *,
        logged: int | None = None,
        then: Callable[[dict[str, Any]], None] = lambda said: None,
    ) -> None:
        """Forget, complete this replica's part of a receipt, then call `then` with that part, on any thread.

        logged: the generation of the entry that another replica wrote.
        """

        def tell(said: dict[str, Any]) -> None:
            with lock:
                receipt.waits_for -= 1
                receipt.is_durable &= said["is_durable"]
                receipt.missing.update(said.get("replicas_missing", ()))
                receipt.ended_s = time.monotonic()
            then(said)

        is_foreign = logged is not None
        self.cache.invalidate(scopes, lambda done: self.receipts.ended(done, tell, logged), is_foreign=is_foreign)

    def ask(self, text: Text) -> None:
        reader = Reader(terms=text.terms)
        self.cache.ask(text.chunks, reader)
        self.requests.append(Request(text, reader))

    def step(self, found: Round) -> None:
        """Go on with every request as far as that is possible now."""
        self.follow()
        self.cache.step()
        waiting = []
        for request in self.requests:
            if not self._is_ended(request, found):
                waiting.append(request)
        self.requests = waiting

    def store(self, text: Text, first: int) -> None:
        """What an engine computed of a text from a chunk on."""
        placements = self.cache.begin_store(text.chunks[first:], Reader(terms=text.terms))
        for placement in placements:
            self.slab.slot(placement.slot)[:] = content(placement.chunk.key, self.settings.payload_bytes)
        self.cache.end_store([placement.chunk for placement in placements])

    def close(self) -> None:
        self.receipts.close()
        self.cache.close(5.0)
        self.follower.close()

    def _is_ended(self, request: Request, found: Round) -> bool:
        hits: list[ChunkKey] = []
        text, reader = request.text, request.reader
        for chunk in text.chunks:
            answer = self.cache.lookup(chunk, reader)
            if answer is Lookup.RETRY:
                return False
            if answer is Lookup.MISS:
                break
            hits.append(chunk.key)
        self.cache.join(text.chunks, reader)
        promoted = dict(reader.promoted)
        for key, slot in zip(hits, self.cache.begin_load(hits, reader), strict=True):
            found.wrong += bytes(self.slab.slot(slot)) != content(key, self.settings.payload_bytes)
        self.cache.end_load(hits)
        self.cache.release(reader)
        if text.terms.tenant != PIPELINE:
            found.asked += len(text.chunks)
            found.hits += len(hits)
            found.by_tier.update(promoted.get(key, Tier.RAM).value for key in hits)
        self.store(text, len(hits))
        return True


class Fleet:
    """Replicas over one L2, and the texts of all tenants."""

    def __init__(self, directory: Path, connect: Connect, settings: Settings) -> None:
        self.settings = settings
        self.connect = connect
        self.replicas = [Replica(number, directory, connect, settings) for number in range(settings.replicas)]
        self.others = [
            Text(chain(f"{tenant}/{number}", settings.chunks), Terms(tenant, labels=tag_labels([f"text {number}"])))
            for tenant in OTHERS
            for number in range(settings.texts)
        ]
        self._versions: Counter[int] = Counter()
        self._to_do: deque[Callable[[], None]] = deque()  # on the schedulers' thread
        self._lock = threading.Lock()

    def document(self, number: int) -> Text:
        """The present version of one of the pipeline's documents."""
        chunks = chain(f"document {number}@{self._versions[number]}", self.settings.chunks)
        return Text(chunks, Terms(PIPELINE, labels=tag_labels([f"document {number}"])))

    def warm(self) -> None:
        """Everything is stored, and lies in the L2 and on every disk."""
        texts = [*self.others, *map(self.document, range(self.settings.documents))]
        for text in texts:
            self.replicas[0].ask(text)
            self._settle()
        for replica in self.replicas[1:]:
            for text in texts:
                replica.ask(text)
            self._settle()

    def play(self, *, is_storm: bool, seed: int) -> Round:
        """Requests of others at a steady rate, and updates if there is a storm."""
        settings, rng, found = self.settings, random.Random(seed), Round()
        updates = itertools.cycle(range(settings.documents))
        began_s = time.monotonic()
        asked = updated = 0
        while (now_s := time.monotonic() - began_s) < settings.seconds:
            while asked < now_s * settings.requests_per_s:
                rng.choice(self.replicas).ask(rng.choice(self.others))
                asked += 1
            while is_storm and updated < now_s * settings.updates_per_minute / 60:
                self._update(next(updates), rng.choice(self.replicas), found)
                updated += 1
            self._step(found)
            time.sleep(0.001)
        self._settle(found)
        deadline_s = time.monotonic() + 10.0
        while any(receipt.waits_for for receipt in found.receipts) and time.monotonic() < deadline_s:
            self._settle(found)
        found.seconds = now_s
        return found

    def on_disks(self) -> list[set[ChunkKey]]:
        """Which of the others' chunks each replica's disk has."""
        chunks = [chunk.key for text in self.others for chunk in text.chunks]
        return [{key for key in chunks if replica.disk.lookup(key)} for replica in self.replicas]

    def lost_in_l2(self) -> int:
        """How many of the others' chunks a replica that begins now does not find in the L2."""
        scratch = Path(tempfile.mkdtemp(prefix="storm-"))
        fresh = Replica(len(self.replicas), scratch, self.connect, self.settings)
        lost = 0
        while not fresh.follower.is_fresh:  # it reads the whole log first
            time.sleep(0.01)
        for text in self.others:
            fresh.l2.storage.ask(text.chunks, text.terms.tenant)
            while fresh.l2.storage.asking:
                fresh.l2.wait(0.1)
                fresh.l2.finished()
            lost += sum(not fresh.l2.lookup(chunk.key) for chunk in text.chunks)
        fresh.close()
        shutil.rmtree(scratch)
        return lost

    def close(self) -> None:
        for replica in self.replicas:
            replica.close()

    # -- inside --------------------------------------------------------------------------------------------------------

    def _update(self, number: int, at: Replica, found: Round) -> None:
        receipt = Receipt(time.monotonic(), len(self.replicas))
        found.receipts.append(receipt)
        scopes = [Scope(tenant=PIPELINE, labels=tag_labels([f"document {number}"]))]

        def tell_others(logged: int | None) -> None:
            for replica in self.replicas:
                if replica is not at:
                    replica.invalidate(scopes, receipt, self._lock, logged=logged)
            self._versions[number] += 1
            at.ask(self.document(number))

        def logged(said: dict[str, Any]) -> None:
            generation = said["log"]["generation"] if "log" in said else None
            self._to_do.append(lambda: tell_others(generation))

        at.invalidate(scopes, receipt, self._lock, then=logged)

    def _step(self, found: Round) -> None:
        while self._to_do:
            self._to_do.popleft()()
        for replica in self.replicas:
            replica.step(found)

    def _settle(self, found: Round | None = None) -> None:
        """Go on until no request waits and nothing is on its way to a tier."""
        found, deadline_s = found or Round(), time.monotonic() + 60
        while self._to_do or any(replica.requests or replica.cache.is_persisting for replica in self.replicas):
            self._step(found)
            if time.monotonic() > deadline_s:
                raise SystemExit("the replicas don't come to rest")
            time.sleep(0.0005)


@contextmanager
def syncs(directory: Path) -> Iterator[list[float]]:
    """How long the disk takes meanwhile to sync a small new file and its name, ten times a second: is it healthy?"""
    seconds: list[float] = []
    ending = threading.Event()

    def run() -> None:
        while not ending.wait(0.1):
            began_s = time.monotonic()
            path = directory / "sync"
            with path.open("wb") as file:
                file.write(bytes(300))
                file.flush()
                os.fsync(file.fileno())
            entered = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
            os.fsync(entered)
            os.close(entered)
            seconds.append(time.monotonic() - began_s)
            path.unlink()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    yield seconds
    ending.set()
    thread.join()


def measure(name: str, directory: Path, connect: Connect, settings: Settings) -> dict[str, object]:
    """Both rounds over one L2."""
    fleet = Fleet(directory, connect, settings)
    fleet.warm()
    before_disks, before_l2 = fleet.on_disks(), fleet.lost_in_l2()
    calm = fleet.play(is_storm=False, seed=1)
    with syncs(directory) as synced:
        storm = fleet.play(is_storm=True, seed=1)
    lost = sum(len(before - after) for before, after in zip(before_disks, fleet.on_disks(), strict=True))
    lost_l2 = fleet.lost_in_l2() - before_l2
    seconds = [receipt.ended_s - receipt.began_s for receipt in storm.receipts if not receipt.waits_for]
    rates = [each.hits / max(1, each.asked) for each in (calm, storm)]
    result: dict[str, object] = {
        "l2": name,
        "is_direct": all(replica.disk.storage.directory.direct for replica in fleet.replicas),  # type: ignore[attr-defined]
        "updates": len(storm.receipts),
        "updates_per_minute": round(60 * len(storm.receipts) / storm.seconds),
        "receipts_failed": sum(not receipt.is_durable for receipt in storm.receipts),
        "receipts_unfinished": sum(receipt.waits_for > 0 for receipt in storm.receipts),
        "receipts_missing_a_replica": sum(bool(receipt.missing) for receipt in storm.receipts),
        "receipt_p50_s": round(statistics.median(seconds), 4) if seconds else None,
        "receipt_p99_s": round(quantile(seconds, 0.99), 4) if seconds else None,
        "sync_p50_s": round(quantile(synced, 0.5), 4),
        "sync_p99_s": round(quantile(synced, 0.99), 4),
        "load_average": round(os.getloadavg()[0], 1),
        "others_chunks_asked": [calm.asked, storm.asked],
        "others_hit_rate": [round(rate, 5) for rate in rates],
        "others_hits_by_tier": [dict(calm.by_tier), dict(storm.by_tier)],
        "wrong_bytes": calm.wrong + storm.wrong,
        "others_chunks_lost_on_disks": lost,
        "others_chunks_lost_in_l2": lost_l2,
        "tiers_given_up": sum(replica.disk.trips + replica.l2.trips for replica in fleet.replicas),
    }
    result["is_met"] = bool(
        seconds
        and quantile(seconds, 0.99) < P99_S
        and rates[1] >= rates[0] - HIT_RATE_LOSS
        and not (lost or lost_l2 or calm.wrong or storm.wrong)
        and not (result["receipts_failed"] or result["receipts_unfinished"])
    )
    fleet.close()
    return result


@contextmanager
def stores(directory: Path) -> Iterator[list[tuple[str, Connect]]]:
    """A shared directory and a Redis server: how each replica connects to it."""
    with redis_server(directory) as server:
        yield [
            ("shared directory", lambda: FileStore(directory / "l2")),
            ("Redis", lambda: RedisStore(server.url)),
        ]


def main() -> int:
    options = arguments(__doc__, seconds=60.0, updates_per_minute=1000, directory=Path)
    settings = Settings(seconds=options.seconds, updates_per_minute=options.updates_per_minute)
    results = []
    with tempfile.TemporaryDirectory(prefix="storm-", dir=options.directory) as scratch, stores(Path(scratch)) as all_:
        for name, connect in all_:
            directory = Path(scratch) / name.replace(" ", "-")
            directory.mkdir()
            results.append(measure(name, directory, connect, settings))
            print(json.dumps(results[-1], indent=1), flush=True)
    is_met = all(result["is_met"] for result in results)
    print(f"no other tenant loses anything, and receipts take less than {P99_S:g} s: {'yes' if is_met else 'NO'}")
    if options.output is not None:
        program = "python -m benchmarks.invalidation_storm"
        write_results(options.output, "invalidation-storm", program, settings=asdict(settings), results=results)
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main())
