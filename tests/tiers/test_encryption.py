"""Encryption at rest: what is on the disk says nothing of a chunk, and without its key the chunk is a miss."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hotspan.core.frame import HEADER_BYTES
from hotspan.core.terms import Scope, Terms
from hotspan.core.types import MIB, ChunkKey
from hotspan.testing.chunks import aligned, chain, content
from hotspan.testing.clock import SimulatedClock
from hotspan.testing.conformance import NAMESPACE, invalidate, load, store
from hotspan.tiers.base import Fault
from hotspan.tiers.disk import DiskOptions, DiskTier
from kit.simulated.keys import FixedKeys

SIZE, SLOTS = 8 * 4096, 6
CHUNKS = chain("a", 4)
ONE, OTHER = Terms(1), Terms(2)


@contextmanager
def opened(path: Path, keys: FixedKeys | None, size: int = SIZE) -> Iterator[DiskTier]:
    """A disk tier, checked and closed at the end, whose keys gave no nonce twice."""
    tier = DiskTier(DiskOptions(path, SLOTS * (HEADER_BYTES + size), keys=keys), NAMESPACE, size, SimulatedClock())
    try:
        yield tier
        tier.check()
    finally:
        tier.close(5.0)
    if keys is not None:
        keys.check()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where the tier lives."""
    return tmp_path / "disk"


def fault_of(tier: DiskTier, key: ChunkKey) -> Fault | None:
    """How a load ends; a good one has the right bytes."""
    result = load(tier, key, SIZE)
    assert result is not None
    assert result[0].fault is not None or result[1] == content(key, SIZE)
    return result[0].fault


def windows(path: Path, payload: bytes) -> int:
    """How many 64-byte windows of the payload are anywhere in the directory's files."""
    wanted = {payload[at : at + 64] for at in range(0, len(payload), 64)}
    found = 0
    for file in path.iterdir():
        data = file.read_bytes()
        found += sum(data.find(window) >= 0 for window in wanted)
    return found


def test_the_disk_holds_no_plaintext(path: Path) -> None:
    """No 64 bytes of any chunk, plain text or repeated bytes, are on the disk; without keys they all are."""
    text = (b"The quick brown fox jumps over the lazy dog. " * 1000)[:SIZE]
    for keys in (FixedKeys(), None):
        where = path.with_name("sealed" if keys else "plain")
        with opened(where, keys) as tier:
            for chunk in CHUNKS[:2]:
                store(tier, chunk, SIZE, terms=ONE)
            for chunk, payload in ((CHUNKS[2], text), (CHUNKS[3], bytes([0x5A]) * SIZE)):
                tier.submit_store(chunk, OTHER, aligned(SIZE, payload))
            wait_for(tier, 2)
        payloads = [*(content(chunk.key, SIZE) for chunk in CHUNKS[:2]), text, bytes([0x5A]) * SIZE]
        found = [windows(where, payload) for payload in payloads]
        assert found == [0] * 4 if keys else all(found)


def wait_for(tier: DiskTier, transfers: int) -> None:
    """Until so many transfers ended well."""
    while transfers:
        tier.wait(1.0)
        ended = tier.finished()
        assert all(transfer.fault is None for transfer in ended)
        transfers -= len(ended)


def test_equal_chunks_are_not_equal_on_the_disk(path: Path) -> None:
    """The same bytes stored twice are two ciphertexts that share no 64-byte window with each other."""
    payload = bytes(SIZE)
    with opened(path, FixedKeys()) as tier:
        for chunk in CHUNKS[:2]:
            tier.submit_store(chunk, ONE, aligned(SIZE, payload))
        wait_for(tier, 2)
    data = (path / "slab").read_bytes()
    slot = HEADER_BYTES + SIZE
    held = [data[at + HEADER_BYTES : at + slot] for at in range(0, len(data), slot) if data[at : at + 4] == b"HOTS"]
    assert len(held) == 2
    blocks = [{one[at : at + 16] for at in range(0, SIZE, 16)} for one in held]
    assert len(blocks[0]) == len(blocks[1]) == SIZE // 16 and not blocks[0] & blocks[1]


def test_a_shredded_tenants_chunks_are_misses(path: Path) -> None:
    """Once its key is shredded no chunk of a tenant loads, nor can be stored, here and after reopening; others' do."""
    keys = FixedKeys()
    with opened(path, keys) as tier:
        store(tier, CHUNKS[0], SIZE, terms=ONE)
        store(tier, CHUNKS[1], SIZE, terms=OTHER)
        keys.shred(1)
        assert [fault_of(tier, chunk.key) for chunk in CHUNKS[:2]] == [Fault.GONE, None]
        refused = store(tier, CHUNKS[2], SIZE, terms=ONE)
        assert refused is not None and refused.fault is Fault.GONE and not tier.lookup(CHUNKS[2].key)
    again = FixedKeys(writer=1)
    again.shred(1)
    with opened(path, again) as tier:
        assert fault_of(tier, CHUNKS[1].key) is None
        assert not tier.lookup(CHUNKS[0].key) or fault_of(tier, CHUNKS[0].key) is Fault.GONE


def test_keys_that_are_out_of_reach_cost_misses_only(path: Path) -> None:
    """While no key can be had loads and stores are misses, and what was stored is a hit again afterwards."""
    keys = FixedKeys()
    with opened(path, keys) as tier:
        store(tier, CHUNKS[0], SIZE, terms=ONE)
        keys.is_locked = True
        assert fault_of(tier, CHUNKS[0].key) is Fault.GONE
        refused = store(tier, CHUNKS[1], SIZE, terms=ONE)
        assert refused is not None and refused.fault is Fault.GONE
        keys.is_locked = False
        assert fault_of(tier, CHUNKS[0].key) is None
        assert store(tier, CHUNKS[1], SIZE, terms=ONE) is not None and fault_of(tier, CHUNKS[1].key) is None


def test_the_next_process_opens_what_the_last_one_sealed(path: Path) -> None:
    """Another writer with the same roots loads every chunk; one of other roots none."""
    roots = [chain(str(number), 1)[0] for number in range(4)]
    with opened(path, FixedKeys(writer=1)) as tier:
        for number, chunk in enumerate(roots):
            store(tier, chunk, SIZE, terms=Terms(number))
    with opened(path, FixedKeys(writer=2)) as tier:
        assert [fault_of(tier, chunk.key) for chunk in roots] == [None] * 4
    with opened(path, FixedKeys(writer=2, seed=5)) as tier:
        assert [fault_of(tier, chunk.key) for chunk in roots] == [Fault.CORRUPT] * 4


@pytest.mark.parametrize(
    ("first", "second"), [(None, FixedKeys(3)), (FixedKeys(3), None)], ids=["to-sealed", "to-plain"]
)
def test_plain_and_sealed_frames_are_never_mixed(path: Path, first: FixedKeys | None, second: FixedKeys | None) -> None:
    """With keys what was written without is a miss, and the other way round; the next store heals it."""
    with opened(path, first) as tier:
        store(tier, CHUNKS[0], SIZE, terms=ONE)
    with opened(path, second) as tier:
        assert fault_of(tier, CHUNKS[0].key) is Fault.CORRUPT
        tier.check()
        assert store(tier, CHUNKS[0], SIZE, terms=ONE) is not None and fault_of(tier, CHUNKS[0].key) is None


def test_a_nonce_is_never_given_twice(path: Path) -> None:
    """Over stores, discards, invalidations and stores anew, no two frames of a run share key and nonce."""
    keys = FixedKeys()
    seen: set[bytes] = set()
    stores = 0
    with opened(path, keys) as tier:
        for n in range(10):
            for number, chunk in enumerate(CHUNKS):
                stores += store(tier, chunk, SIZE, version=n, terms=Terms(number % 2)) is not None
            seen.update(frames(path))
            if n % 2:
                invalidate(tier, Scope(tenant=0))
            else:
                tier.discard(CHUNKS[n % 4].key)
            tier.check()
    given = sum(len(keys.sealing(tenant).given) for tenant in (0, 1))  # type: ignore[union-attr]
    assert given == stores > 20 and len(seen) == stores


def frames(path: Path) -> list[bytes]:
    """(key id, writer, nonce) of every frame in the slab."""
    data = (path / "slab").read_bytes()
    slot = HEADER_BYTES + SIZE
    return [data[at + 104 : at + 144] for at in range(0, len(data), slot) if data[at : at + 4] == b"HOTS"]


@pytest.mark.parametrize("size", [4096, MIB, MIB + 4096, 4 * MIB, 5 * MIB + 8192, 9 * MIB], ids=str)
def test_sealed_frames_of_many_segments(path: Path, size: int) -> None:
    """Frames of one to many segments and I/Os come back whole, and a flip in any segment is a fault."""
    chunk = CHUNKS[0]
    with opened(path, FixedKeys(), size) as tier:
        store(tier, chunk, size)
        result = load(tier, chunk.key, size)
        assert result is not None and result[0].fault is None and result[1] == content(chunk.key, size)
        (slot,) = tier.directory.table.slots()
    start = slot * (HEADER_BYTES + size) + HEADER_BYTES
    for number, at in enumerate(range(size - 1, -1, -MIB)):
        with (path / "slab").open("r+b") as slab:
            slab.seek(start + at)
            byte = slab.read(1)
            slab.seek(start + at)
            slab.write(bytes([byte[0] ^ 1]))
        with opened(path, FixedKeys(number + 1), size) as tier:
            result = load(tier, chunk.key, size)
            assert result is not None and result[0].fault is Fault.CORRUPT
            tier.check()
            store(tier, chunk, size)
            (slot,) = tier.directory.table.slots()
        start = slot * (HEADER_BYTES + size) + HEADER_BYTES
