"""What every StorageTier must do. Derive a test class from StorageTierTests and give it a `tier` fixture:

    class TestMyTier(StorageTierTests):
        @pytest.fixture
        def tier(self, tmp_path):
            tier = MyTier(tmp_path, slots=self.SLOTS, payload_bytes=self.PAYLOAD_BYTES)
            yield tier
            tier.close(5.0)

The kit runs unchanged; a tier that also has `check()` is checked after every test.
"""

import time
from collections.abc import Iterator
from typing import Protocol

import pytest

from hotspan.core.types import Chunk, ChunkKey
from hotspan.testing.chunks import aligned, chain, content, key_of
from hotspan.tiers.base import StorageTier, Transfer


class CheckedTier(StorageTier, Protocol):
    """A tier whose books can be checked while nothing is in flight."""

    def check(self) -> None: ...


def settle(tier: StorageTier, transfers: int, timeout_s: float = 10.0) -> list[Transfer]:
    """Wait for that many transfers to end. Raises: AssertionError if they do not."""
    ended: list[Transfer] = []
    deadline = time.monotonic() + timeout_s
    while len(ended) < transfers:
        tier.wait(0.01)
        ended += tier.finished()
        if time.monotonic() > deadline:
            raise AssertionError(f"{transfers - len(ended)} of {transfers} transfers did not end in {timeout_s} s")
    return ended


def store(tier: StorageTier, chunk: Chunk, size: int, version: int = 0) -> Transfer | None:
    """Store the chunk's content and wait; None if the tier did not take it."""
    if not tier.submit_store(chunk, aligned(size, content(chunk.key, size, version))):
        return None
    (transfer,) = settle(tier, 1)
    return transfer


def load(tier: StorageTier, key: ChunkKey, size: int) -> tuple[Transfer, bytes] | None:
    """Load a chunk and wait: how it ended and the bytes; None if the tier has it not."""
    into = aligned(size)
    if not tier.submit_load(key, into):
        return None
    (transfer,) = settle(tier, 1)
    return transfer, bytes(into)


class StorageTierTests:
    """The conformance kit."""

    PAYLOAD_BYTES = 3 * 4096
    SLOTS = 8

    @pytest.fixture
    def tier(self) -> Iterator[CheckedTier]:
        """A fresh tier of SLOTS slots for payloads of PAYLOAD_BYTES; close it afterwards."""
        raise NotImplementedError("give the class a `tier` fixture")

    @pytest.fixture(autouse=True)
    def _books_agree(self, tier: CheckedTier) -> Iterator[None]:
        yield
        tier.check()

    def test_what_was_never_stored_is_not_here(self, tier: CheckedTier) -> None:
        """An empty tier finds nothing, loads nothing and counts nothing."""
        assert not tier.lookup(key_of("a"))
        assert not tier.submit_load(key_of("a"), aligned(self.PAYLOAD_BYTES))
        assert tier.finished() == []
        assert (tier.usage().chunks, tier.usage().bytes, tier.usage().capacity_chunks) == (0, 0, self.SLOTS)

    def test_a_load_returns_what_was_stored(self, tier: CheckedTier) -> None:
        """Every stored chunk is found and loads byte for byte."""
        chunks = chain("a", self.SLOTS)
        for chunk in chunks:
            transfer = store(tier, chunk, self.PAYLOAD_BYTES)
            assert transfer is not None and transfer.fault is None
            assert (transfer.key, transfer.is_load, transfer.bytes) == (chunk.key, False, self.PAYLOAD_BYTES)
        for chunk in reversed(chunks):
            assert tier.lookup(chunk.key)
            result = load(tier, chunk.key, self.PAYLOAD_BYTES)
            assert result is not None
            transfer, data = result
            assert (transfer.key, transfer.is_load, transfer.fault) == (chunk.key, True, None)
            assert data == content(chunk.key, self.PAYLOAD_BYTES)
        assert tier.usage().chunks == self.SLOTS

    def test_a_store_is_not_readable_before_it_is_reported(self, tier: CheckedTier) -> None:
        """Between submit_store and its report the chunk is neither found nor loaded nor stored again."""
        (chunk,) = chain("a", 1)
        payload = aligned(self.PAYLOAD_BYTES, content(chunk.key, self.PAYLOAD_BYTES))
        assert tier.submit_store(chunk, payload)
        assert not tier.lookup(chunk.key)
        assert not tier.submit_load(chunk.key, aligned(self.PAYLOAD_BYTES))
        assert not tier.submit_store(chunk, payload)
        settle(tier, 1)
        assert tier.lookup(chunk.key)

    def test_a_chunk_is_stored_once(self, tier: CheckedTier) -> None:
        """A second store of a chunk that is here is refused, and changes nothing."""
        (chunk,) = chain("a", 1)
        store(tier, chunk, self.PAYLOAD_BYTES)
        assert store(tier, chunk, self.PAYLOAD_BYTES, version=1) is None
        result = load(tier, chunk.key, self.PAYLOAD_BYTES)
        assert result is not None and result[1] == content(chunk.key, self.PAYLOAD_BYTES)
        assert tier.usage().chunks == 1

    def test_transfers_are_reported_once(self, tier: CheckedTier) -> None:
        """`finished` names every transfer exactly once, several loads of one chunk included."""
        (chunk,) = chain("a", 1)
        store(tier, chunk, self.PAYLOAD_BYTES)
        buffers = [aligned(self.PAYLOAD_BYTES) for _ in range(5)]
        assert all(tier.submit_load(chunk.key, buffer) for buffer in buffers)
        assert [transfer.key for transfer in settle(tier, 5)] == [chunk.key] * 5
        assert tier.finished() == []
        assert all(buffer == content(chunk.key, self.PAYLOAD_BYTES) for buffer in buffers)

    def test_wait_is_bounded(self, tier: CheckedTier) -> None:
        """`wait` returns after its timeout when nothing moves."""
        started = time.monotonic()
        tier.wait(0.02)
        assert time.monotonic() - started < 2

    def test_a_discarded_chunk_is_gone(self, tier: CheckedTier) -> None:
        """After `discard` a chunk is not found, others are, and it can be stored anew with other bytes."""
        first, second = chain("a", 2)
        store(tier, first, self.PAYLOAD_BYTES)
        store(tier, second, self.PAYLOAD_BYTES)
        tier.discard(second.key)
        tier.discard(key_of("never here"))
        assert not tier.lookup(second.key) and tier.lookup(first.key)
        assert load(tier, second.key, self.PAYLOAD_BYTES) is None
        assert store(tier, second, self.PAYLOAD_BYTES, version=1) is not None
        result = load(tier, second.key, self.PAYLOAD_BYTES)
        assert result is not None and result[1] == content(second.key, self.PAYLOAD_BYTES, 1)

    def test_a_chunk_discarded_while_it_is_written_never_appears(self, tier: CheckedTier) -> None:
        """`discard` between submit_store and the report wins: the transfer is reported, the chunk is not here."""
        (chunk,) = chain("a", 1)
        assert tier.submit_store(chunk, aligned(self.PAYLOAD_BYTES))
        tier.discard(chunk.key)
        assert [transfer.key for transfer in settle(tier, 1)] == [chunk.key]
        assert not tier.lookup(chunk.key)

    def test_clear_forgets_everything(self, tier: CheckedTier) -> None:
        """`clear` says how many chunks there were, none is found after, and all the room is there again."""
        for chunk in chain("a", self.SLOTS):
            store(tier, chunk, self.PAYLOAD_BYTES)
        assert tier.clear() == self.SLOTS
        assert not any(tier.lookup(chunk.key) for chunk in chain("a", self.SLOTS))
        deadline = time.monotonic() + 10
        while tier.usage().chunks and time.monotonic() < deadline:
            tier.wait(0.01)
            assert tier.finished() == []
        for chunk in chain("b", self.SLOTS):
            assert store(tier, chunk, self.PAYLOAD_BYTES) is not None

    def test_a_full_tier_stays_right(self, tier: CheckedTier) -> None:
        """Offered three times what it holds, twice, it keeps to its capacity, and what it finds is whole and rooted."""
        chains = [chain(name, self.SLOTS // 2) for name in "abcdef"]
        for _ in range(2):
            for chunks in chains:
                for chunk in chunks:
                    store(tier, chunk, self.PAYLOAD_BYTES)
        found = 0
        for chunks in chains:
            held = [tier.lookup(chunk.key) for chunk in chunks]
            assert held == sorted(held, reverse=True), "a chunk is here without its ancestors"
            for chunk in chunks[: sum(held)]:
                result = load(tier, chunk.key, self.PAYLOAD_BYTES)
                assert result is not None and result[1] == content(chunk.key, self.PAYLOAD_BYTES)
                found += 1
        assert 0 < found <= self.SLOTS

    def test_a_full_queue_is_no_fault(self, tier: CheckedTier) -> None:
        """Stores beyond what the tier queues are refused, and `can_store` says so beforehand."""
        taken = 0
        for chunk in chain("a", self.SLOTS):
            could = tier.can_store()
            took = tier.submit_store(chunk, aligned(self.PAYLOAD_BYTES, content(chunk.key, self.PAYLOAD_BYTES)))
            assert could or not took
            taken += took
        assert all(transfer.fault is None for transfer in settle(tier, taken))

    def test_wrong_sizes_are_the_callers_bug(self, tier: CheckedTier) -> None:
        """A buffer of another size raises ValueError, for stores and loads."""
        (chunk,) = chain("a", 1)
        for size in (self.PAYLOAD_BYTES - 4096, self.PAYLOAD_BYTES + 4096):
            with pytest.raises(ValueError):
                tier.submit_store(chunk, aligned(size))
            with pytest.raises(ValueError):
                tier.submit_load(chunk.key, aligned(size))

    def test_touching_strangers_is_harmless(self, tier: CheckedTier) -> None:
        """`touch` of chunks that are not here changes nothing."""
        tier.touch([key_of("a"), key_of("b")])
        assert tier.usage().chunks == 0 and not tier.lookup(key_of("a"))

    def test_closing_twice_is_harmless(self, tier: CheckedTier) -> None:
        """The second `close` does nothing."""
        tier.close(5.0)
        tier.close(5.0)
