"""What every StorageTier must do. Derive a test class from StorageTierTests and give it a `tier` fixture:

    class TestMyTier(StorageTierTests):
        @pytest.fixture
        def tier(self, tmp_path, clock):
            tier = MyTier(tmp_path, self.SLOTS, self.PAYLOAD_BYTES, NAMESPACE, clock)
            yield tier
            tier.close(5.0)

The kit runs unchanged; the tier's `check()` is called after every test.
"""

import time
from dataclasses import replace

import pytest

from hotspan.core.terms import Scope, Terms, adapter_label, tag_labels, tenant_label
from hotspan.core.types import Chunk
from hotspan.testing.any_tier import AnyTierTests
from hotspan.testing.chunks import HANG_S, aligned, chain, content, key_of
from hotspan.testing.clock import SimulatedClock
from hotspan.testing.driving import NAMESPACE, TENANT, TERMS, CheckedTier, DurableSpy, invalidate, load, settle, store
from hotspan.tiers.base import Losses

__all__ = [
    "NAMESPACE",
    "TENANT",
    "TERMS",
    "AnyTierTests",
    "CheckedTier",
    "DurableSpy",
    "StorageTierTests",
    "invalidate",
    "load",
    "settle",
    "store",
]


class StorageTierTests(AnyTierTests):
    """The conformance kit of a tier that knows what it has: the same, and what stands on what is there."""

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

    def test_an_expired_chunk_is_not_found(self, tier: CheckedTier, clock: SimulatedClock) -> None:
        """From the second of its expiry on a chunk is a miss, also if the expiry was joined; others stay."""
        stored, joined, kept = (chain(name, 1)[0] for name in "abc")
        at = int(clock.unix()) + 10
        store(tier, stored, self.PAYLOAD_BYTES, terms=Terms(TENANT, expires_s=at))
        store(tier, joined, self.PAYLOAD_BYTES)
        store(tier, kept, self.PAYLOAD_BYTES)
        tier.join(joined.key, Terms(expires_s=at))
        clock.advance(at - clock.unix() - 0.5)
        assert tier.lookup(stored.key) and tier.lookup(joined.key)
        clock.advance(0.5)
        for chunk in (stored, joined):
            assert not tier.lookup(chunk.key)
            assert not tier.submit_load(chunk.key, aligned(self.PAYLOAD_BYTES))
        assert tier.lookup(kept.key)

    def test_an_expired_chunk_makes_room(self, tier: CheckedTier, clock: SimulatedClock) -> None:
        """Some time after its expiry a chunk holds no slot, and can be stored anew."""
        (chunk,) = chain("a", 1)
        store(tier, chunk, self.PAYLOAD_BYTES, terms=Terms(TENANT, expires_s=int(clock.unix()) + 10))
        clock.advance(20)
        self._until_empty(tier)
        assert tier.losses == Losses(expired=1)
        assert store(tier, chunk, self.PAYLOAD_BYTES, version=1) is not None
        result = load(tier, chunk.key, self.PAYLOAD_BYTES)
        assert result is not None and result[1] == content(chunk.key, self.PAYLOAD_BYTES, 1)

    def test_invalidating_everything_forgets_everything(self, tier: CheckedTier) -> None:
        """The empty scope says how many chunks there were, none is found after, and all the room is there again."""
        for chunk in chain("a", self.SLOTS):
            store(tier, chunk, self.PAYLOAD_BYTES)
        assert invalidate(tier, Scope()) == self.SLOTS
        assert not any(tier.lookup(chunk.key) for chunk in chain("a", self.SLOTS))
        self._until_empty(tier)
        for chunk in chain("b", self.SLOTS):
            assert store(tier, chunk, self.PAYLOAD_BYTES) is not None

    @pytest.mark.parametrize(
        "scope",
        [
            Scope(tenant=TENANT),
            Scope(adapter=adapter_label("an adapter")),
            Scope(labels=tag_labels(["x"])),
            Scope(labels=tag_labels(["x"], "s")),
            Scope(tenant=TENANT, labels=tag_labels(session="s")),
            Scope(keys=frozenset([chain("mine", 1)[0].key])),
        ],
        ids=["tenant", "adapter", "tag", "tag-and-session", "session-of-tenant", "keys"],
    )
    def test_an_invalidation_takes_what_its_scope_says(self, tier: CheckedTier, scope: Scope) -> None:
        """Each scope takes the chunk that matches, what stands on it, and nothing of others."""
        mine, others = chain("mine", 2), chain("others", 2)
        terms = Terms(TENANT, adapter_label("an adapter"), tag_labels(["x", "y"], "s"))
        store(tier, mine[0], self.PAYLOAD_BYTES, terms=terms)
        store(tier, mine[1], self.PAYLOAD_BYTES, terms=Terms(tenant_label("another")))
        for chunk in others:
            store(tier, chunk, self.PAYLOAD_BYTES, terms=Terms(tenant_label("another"), labels=tag_labels(["y"])))
        assert invalidate(tier, scope) == 2
        assert [tier.lookup(chunk.key) for chunk in mine + others] == [False, False, True, True]
        for chunk in mine:
            assert load(tier, chunk.key, self.PAYLOAD_BYTES) is None
        assert invalidate(tier, scope) == 0
        assert store(tier, mine[0], self.PAYLOAD_BYTES, version=1, terms=terms) is not None
        result = load(tier, mine[0].key, self.PAYLOAD_BYTES)
        assert result is not None and result[1] == content(mine[0].key, self.PAYLOAD_BYTES, 1)

    def test_all_labels_of_a_scope_must_match(self, tier: CheckedTier) -> None:
        """A scope of two tags takes chunks that carry both, and not those with one of them."""
        both, one = chain("both", 1)[0], chain("one", 1)[0]
        store(tier, both, self.PAYLOAD_BYTES, terms=Terms(TENANT, labels=tag_labels(["x", "y", "z"])))
        store(tier, one, self.PAYLOAD_BYTES, terms=Terms(TENANT, labels=tag_labels(["x", "z"])))
        assert invalidate(tier, Scope(labels=tag_labels(["x", "y"]))) == 1
        assert not tier.lookup(both.key) and tier.lookup(one.key)

    def test_the_namespace_is_a_scope(self, tier: CheckedTier) -> None:
        """An invalidation of this namespace takes everything, one of another nothing."""
        for chunk in chain("a", 2):
            store(tier, chunk, self.PAYLOAD_BYTES)
        assert invalidate(tier, Scope(namespace=bytes(32))) == 0
        assert invalidate(tier, Scope(namespace=NAMESPACE)) == 2

    def test_what_stands_on_named_keys_goes(self, tier: CheckedTier) -> None:
        """An invalidation by keys takes the chunk that is named and its descendants, and nothing if it is not here."""
        chunks = chain("a", 4)
        for chunk in chunks:
            store(tier, chunk, self.PAYLOAD_BYTES)
        scope = Scope(keys=frozenset([chunks[1].key, key_of("never here")]))
        assert invalidate(tier, scope) == 3
        assert [tier.lookup(chunk.key) for chunk in chunks] == [True, False, False, False]
        assert invalidate(tier, scope) == 0

    def test_what_stands_on_a_forgotten_chunk_goes(self, tier: CheckedTier) -> None:
        """`discard` takes the descendants too, on all branches; ancestors and others stay."""
        chunks, others = chain("a", 4), chain("b", 2)
        branch = Chunk(key_of("branch"), chunks[1].key, 2)
        for chunk in [*chunks, branch, *others]:
            store(tier, chunk, self.PAYLOAD_BYTES)
        tier.discard(chunks[1].key)
        assert [tier.lookup(chunk.key) for chunk in chunks] == [True, False, False, False]
        assert not tier.lookup(branch.key) and all(tier.lookup(chunk.key) for chunk in others)

    def test_what_stands_on_an_expired_chunk_goes(self, tier: CheckedTier, clock: SimulatedClock) -> None:
        """Some time after a chunk's expiry its descendants hold no slots, whatever their own terms; all are counted."""
        chunks = chain("a", 3)
        store(tier, chunks[0], self.PAYLOAD_BYTES, terms=Terms(TENANT, expires_s=int(clock.unix()) + 10))
        for chunk in chunks[1:]:
            store(tier, chunk, self.PAYLOAD_BYTES)
        clock.advance(20)
        self._until_empty(tier)
        assert not any(tier.lookup(chunk.key) for chunk in chunks)
        assert tier.losses == Losses(expired=len(chunks))

    def test_a_descendant_that_is_being_written_goes(self, tier: CheckedTier) -> None:
        """What stands on a discarded chunk and is on its way is reported, and never appears."""
        root, mid = chain("a", 2)
        store(tier, root, self.PAYLOAD_BYTES)
        assert tier.submit_store(mid, TERMS, aligned(self.PAYLOAD_BYTES))
        tier.discard(root.key)
        assert [transfer.key for transfer in settle(tier, 1)] == [mid.key]
        assert store(tier, root, self.PAYLOAD_BYTES) is not None and not tier.lookup(mid.key)

    def test_nothing_is_stored_behind_a_gap(self, tier: CheckedTier) -> None:
        """A chunk whose parent is not here is refused, however often it is offered, until the parent is here."""
        root, mid, leaf = chain("a", 3)
        store(tier, root, self.PAYLOAD_BYTES)
        for _ in range(3):
            assert store(tier, leaf, self.PAYLOAD_BYTES) is None
        assert tier.usage().chunks == 1
        assert store(tier, mid, self.PAYLOAD_BYTES) is not None and store(tier, leaf, self.PAYLOAD_BYTES) is not None

    @pytest.mark.parametrize("scope", [Scope(), Scope(tenant=TENANT), Scope(keys=frozenset([chain("a", 1)[0].key]))])
    def test_a_store_in_flight_does_not_come_back(self, tier: CheckedTier, scope: Scope) -> None:
        """`invalidate` between submit_store and the report wins: the transfer is reported, the chunk is not here."""
        (chunk,) = chain("a", 1)
        assert tier.submit_store(chunk, TERMS, aligned(self.PAYLOAD_BYTES))
        spy = DurableSpy()
        assert tier.invalidate([scope], spy) == 1
        assert not tier.lookup(chunk.key)
        assert [transfer.key for transfer in settle(tier, 1)] == [chunk.key]
        assert spy.wait(tier) and not tier.lookup(chunk.key)
        assert store(tier, chunk, self.PAYLOAD_BYTES, version=1) is not None
        result = load(tier, chunk.key, self.PAYLOAD_BYTES)
        assert result is not None and result[1] == content(chunk.key, self.PAYLOAD_BYTES, 1)

    def test_usage_counts_tenants(self, tier: CheckedTier) -> None:
        """`usage` says how many chunks each tenant holds."""
        for name, count in (("one", 2), ("two", 1)):
            for chunk in chain(name, count):
                store(tier, chunk, self.PAYLOAD_BYTES, terms=Terms(tenant_label(name)))
        assert tier.usage().tenants == {tenant_label("one"): 2, tenant_label("two"): 1}

    def _until_empty(self, tier: CheckedTier) -> None:
        deadline = time.monotonic() + HANG_S
        while True:
            assert tier.finished() == []
            if not tier.usage().chunks or time.monotonic() > deadline:
                break
            tier.wait(0.01)
        assert tier.usage().chunks == 0

    def test_a_full_tier_stays_right(self, tier: CheckedTier) -> None:
        """Offered three times what it holds, twice, it keeps to its capacity, and what it finds is whole and rooted.

        What gave way is counted, once for each chunk; of what its owner takes nothing is.
        """
        chains = [chain(name, self.SLOTS // 2) for name in "abcdef"]
        found = stored = 0
        for _ in range(2):
            for chunks in chains:
                for chunk in chunks:
                    stored += store(tier, chunk, self.PAYLOAD_BYTES) is not None
        for chunks in chains:
            held = [tier.lookup(chunk.key) for chunk in chunks]
            assert held == sorted(held, reverse=True), "a chunk is here without its ancestors"
            for chunk in chunks[: sum(held)]:
                result = load(tier, chunk.key, self.PAYLOAD_BYTES)
                assert result is not None and result[1] == content(chunk.key, self.PAYLOAD_BYTES)
                found += 1
        assert tier.losses == Losses(evicted=stored - found), "what gave way is not what was counted"
        capacity = tier.usage().capacity_chunks  # of chunks as those that are here, some of which may be compressed
        assert 0 < found <= capacity and capacity >= self.SLOTS
        before = replace(tier.losses)
        tier.discard(chains[0][0].key)
        assert invalidate(tier, Scope()) <= found and tier.losses == before
