"""Compressed chunks in an L2: fewer bytes over the link, the same bytes back, and a miss for all else."""

import hashlib

import pytest

from hotspan.core.frame import HEADER_BYTES, FrameIdentity, seal
from hotspan.core.terms import Terms
from hotspan.core.types import PAGE_BYTES, ChunkKey, Compress
from hotspan.daemon import disk
from hotspan.daemon.stored import StoredObject
from hotspan.l2.base import PREAMBLE_BYTES
from hotspan.l2.follower import LogFollower
from hotspan.l2.remote import RemoteOptions, RemoteTier
from hotspan.testing.chunks import aligned, chain, content, key_of
from hotspan.testing.clock import SimulatedClock
from hotspan.tiers.base import Fault, Transfer
from hotspan.tiers.record import RECORD_BYTES, Record, pack, unpack
from kit.simulated.inline import InlineQueues
from kit.simulated.keys import FixedKeys
from kit.simulated.memory_store import MemoryServer

SIZE = 64 * PAGE_BYTES
NAMESPACE = bytes(range(32))
CHUNK = chain("text", 1)[0]


class Replica:
    """A tier over a server that others share; all that it begins ends at once."""

    def __init__(self, server: MemoryServer, compress: Compress, keys: FixedKeys | None = None) -> None:
        self._queues = InlineQueues()
        self._follower = LogFollower(server.log(), compress, server.clock)
        self._follower.poll()
        self._follower.foreign()
        options = RemoteOptions(
            server.store(), self._follower, keys=keys, compress=compress, queue=self._queues.queue, threads=1
        )
        self._tier = RemoteTier(options, NAMESPACE, SIZE, server.clock)

    def store(self, payload: bytes | None = None) -> Transfer:
        """Store the chunk."""
        payload = content(CHUNK.key, SIZE) if payload is None else payload
        assert self._tier.submit_store(CHUNK, Terms(tenant=1), aligned(SIZE, payload))
        (transfer,) = self._finished()
        return transfer

    def load(self) -> bytes | Fault | None:
        """The chunk as a replica gets it that asks for it; None if it is not there."""
        self._tier.ask([CHUNK], 1)
        self._finished()
        into = aligned(SIZE)
        if not self._tier.submit_load(CHUNK.key, into):
            return None
        (transfer,) = self._finished()
        return transfer.fault or bytes(into)

    def _finished(self) -> list[Transfer]:
        self._queues.run()
        ended = self._tier.finished()
        self._queues.run()
        return ended


@pytest.fixture
def server() -> MemoryServer:
    return MemoryServer(clock=SimulatedClock())


def object_of(server: MemoryServer, key: ChunkKey = CHUNK.key) -> bytearray:
    return bytearray(server.data[server.objects[key]])


@pytest.mark.parametrize("keys", [None, FixedKeys()], ids=["plain", "sealed"])
@pytest.mark.parametrize("reader", ["never", "auto", "always"])
def test_fewer_bytes_cross_and_the_same_come_back(
    server: MemoryServer, reader: Compress, keys: FixedKeys | None
) -> None:
    """An object is at most 1/1.35 of a plain one, header and record included; a reader of each mode gets the chunk."""
    stored = Replica(server, "always", keys).store()
    assert stored.fault is None and stored.bytes == SIZE
    assert 1.35 * len(object_of(server)) <= PREAMBLE_BYTES + HEADER_BYTES + SIZE
    assert Replica(server, reader, keys).load() == content(CHUNK.key, SIZE)


@pytest.mark.parametrize("writer", ["never", "auto", "always"])
def test_what_is_plain_is_read_in_each_mode(server: MemoryServer, writer: Compress) -> None:
    """Noise is stored as it is, and nothing is compressed where nothing is known of the link."""
    payload = hashlib.shake_128(b"noise").digest(SIZE)
    stored = Replica(server, writer).store(payload)
    assert stored.packing is not None and stored.packing.choice == ("left" if writer == "always" else "plain")
    assert len(object_of(server)) == PREAMBLE_BYTES + HEADER_BYTES + SIZE
    assert Replica(server, "always").load() == payload


def test_a_frame_that_restores_other_bytes_is_a_miss(server: MemoryServer) -> None:
    """Also with tags that hold: the digest of what comes out has to hold, too; and it is deleted."""
    Replica(server, "always").store()
    data = object_of(server)
    record = unpack(bytes(data[:RECORD_BYTES]))
    assert record is not None and record.unpacked_bytes == SIZE
    payload = memoryview(data)[PREAMBLE_BYTES + HEADER_BYTES :]
    payload[SIZE // 4] ^= 1
    identity = FrameIdentity(record.key, NAMESPACE, record.stamp, record.terms.generation, 0, SIZE)
    seal(memoryview(data)[PREAMBLE_BYTES : PREAMBLE_BYTES + HEADER_BYTES], payload, identity)
    server.data[server.objects[CHUNK.key]] = bytes(data)
    replica = Replica(server, "always")
    assert replica.load() is Fault.CORRUPT
    assert CHUNK.key not in server.objects and replica.load() is None


@pytest.mark.parametrize("change", [{"unpacked_bytes": 2 * SIZE}, {"unpacked_bytes": 0}, {"payload_bytes": 1 << 39}])
def test_a_record_of_another_size_is_a_miss(server: MemoryServer, change: dict[str, int]) -> None:
    """A record can make a reader take no more memory than a chunk has; an earlier version's reader finds nothing."""
    Replica(server, "always").store()
    data = object_of(server)
    record = unpack(bytes(data[:RECORD_BYTES]))
    assert record is not None
    data[:RECORD_BYTES] = pack(record._replace(**change))  # type: ignore[arg-type]
    server.data[server.objects[CHUNK.key]] = bytes(data)
    assert Replica(server, "always").load() is None


def test_a_record_keeps_both_sizes() -> None:
    """And a plain one has the bytes that it had before there was compression."""
    plain = Record(key_of("a"), None, NAMESPACE, SIZE, Terms(tenant=1), 5)
    assert pack(plain)[104:112] == SIZE.to_bytes(8, "little") and unpack(pack(plain)) == plain
    packed = plain._replace(payload_bytes=3 * PAGE_BYTES, unpacked_bytes=SIZE)
    assert unpack(pack(packed)) == packed and packed.chunk_bytes == SIZE
    assert pack(packed)[104:112] == (3 * PAGE_BYTES | 64 << 40).to_bytes(8, "little")
    for wrong in ({"unpacked_bytes": SIZE + 1}, {"unpacked_bytes": 1 << 60}, {"payload_bytes": 1 << 40}):
        with pytest.raises(ValueError, match="bytes of payload"):
            pack(plain._replace(**wrong))  # type: ignore[arg-type]


def test_the_daemons_disk_keeps_both_sizes() -> None:
    """What it reads from its table after a restart is the record that the object was put with."""
    record = Record(CHUNK.key, None, NAMESPACE, 3 * PAGE_BYTES, Terms(tenant=1), 5, unpacked_bytes=SIZE)
    size = PREAMBLE_BYTES + HEADER_BYTES + record.payload_bytes
    kept = disk._object(unpack(pack(disk._record(StoredObject(CHUNK.key, size, (), pack(record))))) or record)
    assert (kept.size, unpack(kept.record)) == (size, record)
