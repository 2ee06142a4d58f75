"""What every tier below RAM must do, also one that has to ask what it has."""

import time
from collections.abc import Iterator

import pytest

from hotspan.core.terms import MAX_LABELS, Scope, Terms, adapter_label, tag_labels, tenant_label
from hotspan.testing.chunks import HANG_S, aligned, chain, content, key_of
from hotspan.testing.clock import SimulatedClock
from hotspan.testing.driving import TENANT, TERMS, CheckedTier, DurableSpy, invalidate, load, settle, store


class AnyTierTests:
    """What every tier below RAM does, one that must ask what it has among them."""

    PAYLOAD_BYTES = 3 * 4096
    SLOTS = 8

    @pytest.fixture
    def clock(self) -> SimulatedClock:
        """The time by which the tier expires chunks."""
        return SimulatedClock()

    @pytest.fixture
    def tier(self) -> Iterator[CheckedTier]:
        """A fresh tier of SLOTS slots for payloads of PAYLOAD_BYTES, on `clock`; close it afterwards."""
        raise NotImplementedError("give the class a `tier` fixture")

    @pytest.fixture(autouse=True)
    def _books_agree(self, tier: CheckedTier) -> Iterator[None]:
        yield
        tier.check()

    def test_a_store_is_not_readable_before_it_is_reported(self, tier: CheckedTier) -> None:
        """Between submit_store and its report the chunk is neither found nor loaded nor stored again."""
        (chunk,) = chain("a", 1)
        payload = aligned(self.PAYLOAD_BYTES, content(chunk.key, self.PAYLOAD_BYTES))
        assert tier.submit_store(chunk, TERMS, payload)
        assert not tier.lookup(chunk.key)
        assert not tier.submit_load(chunk.key, aligned(self.PAYLOAD_BYTES))
        assert not tier.submit_store(chunk, TERMS, payload)
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
        assert time.monotonic() - started < HANG_S

    def test_a_chunk_discarded_while_it_is_written_never_appears(self, tier: CheckedTier) -> None:
        """`discard` between submit_store and the report wins: the transfer is reported, the chunk is not here."""
        (chunk,) = chain("a", 1)
        assert tier.submit_store(chunk, TERMS, aligned(self.PAYLOAD_BYTES))
        tier.discard(chunk.key)
        assert [transfer.key for transfer in settle(tier, 1)] == [chunk.key]
        assert not tier.lookup(chunk.key)

    def test_terms_are_those_of_the_store(self, tier: CheckedTier) -> None:
        """A chunk is kept on the terms it was stored on; of what is not here there are none."""
        (chunk,) = chain("a", 1)
        terms = Terms(TENANT, adapter_label("an adapter"), tag_labels(["x", "y"], "s"), expires_s=4_000_000_000)
        store(tier, chunk, self.PAYLOAD_BYTES, terms=terms)
        kept = tier.terms(chunk.key)
        assert (kept.tenant, kept.adapter, kept.labels) == (terms.tenant, terms.adapter, terms.labels)
        assert kept.expires_s == terms.expires_s and not kept.is_wild
        with pytest.raises(KeyError):
            tier.terms(key_of("never here"))

    def test_joined_terms_add_up(self, tier: CheckedTier) -> None:
        """After `join` a chunk carries the labels of both, the earlier expiry, and its own tenant and bytes."""
        (chunk,) = chain("a", 1)
        store(tier, chunk, self.PAYLOAD_BYTES, terms=Terms(TENANT, labels=tag_labels(["x"])))
        for expires_s in (4_000_000_000, 3_000_000_000, 4_000_000_000):
            tier.join(chunk.key, Terms(tenant_label("another"), labels=tag_labels(["y"]), expires_s=expires_s))
        kept = tier.terms(chunk.key)
        assert (kept.tenant, kept.labels, kept.expires_s) == (TENANT, tag_labels(["x", "y"]), 3_000_000_000)
        result = load(tier, chunk.key, self.PAYLOAD_BYTES)
        assert result is not None and result[1] == content(chunk.key, self.PAYLOAD_BYTES)

    def test_joining_strangers_is_harmless(self, tier: CheckedTier) -> None:
        """`join` of a chunk that is not here changes nothing."""
        tier.join(key_of("a"), TERMS)
        assert tier.usage().chunks == 0 and not tier.lookup(key_of("a"))

    def test_a_join_while_it_is_written_counts(self, tier: CheckedTier) -> None:
        """Labels that come between submit_store and its report are there afterwards."""
        (chunk,) = chain("a", 1)
        assert tier.submit_store(chunk, TERMS, aligned(self.PAYLOAD_BYTES, content(chunk.key, self.PAYLOAD_BYTES)))
        tier.join(chunk.key, Terms(labels=tag_labels(["late"])))
        settle(tier, 1)
        assert tier.terms(chunk.key).labels == tag_labels(["late"])
        assert invalidate(tier, Scope(labels=tag_labels(["late"]))) == 1

    @pytest.mark.parametrize("count", [40, MAX_LABELS, MAX_LABELS + 1])
    def test_a_chunk_of_many_labels_goes_with_each(self, tier: CheckedTier, count: int) -> None:
        """However many tags a chunk has collected, an invalidation of any one of them takes it."""
        (chunk,) = chain("a", 1)
        names = [str(n) for n in range(count)]
        for wanted in [*names[::21], names[-1]]:
            store(tier, chunk, self.PAYLOAD_BYTES)
            for name in names:
                tier.join(chunk.key, Terms(labels=tag_labels([name])))
            assert invalidate(tier, Scope(labels=tag_labels([wanted]))) == 1
            assert not tier.lookup(chunk.key)

    def test_nothing_survives_an_invalidation_behind_a_gap(self, tier: CheckedTier) -> None:
        """What stands on a tagged chunk is gone after the tag's invalidation, also if a chunk in between went first."""
        root, mid, leaf = chain("a", 3)
        tagged = Terms(TENANT, labels=tag_labels(["x"]))
        for chunk in (root, mid, leaf):
            store(tier, chunk, self.PAYLOAD_BYTES, terms=tagged if chunk is root else TERMS)
        tier.discard(mid.key)
        assert invalidate(tier, Scope(labels=tag_labels(["x"]))) == 1
        for chunk in (root, mid):
            assert store(tier, chunk, self.PAYLOAD_BYTES, version=1) is not None
        assert [tier.lookup(chunk.key) for chunk in (root, mid, leaf)] == [True, True, False]
        assert load(tier, leaf.key, self.PAYLOAD_BYTES) is None

    def test_a_load_in_flight_is_not_disturbed(self, tier: CheckedTier) -> None:
        """A chunk invalidated while it is read is reported once, with a fault or whole, and is gone."""
        (chunk,) = chain("a", 1)
        store(tier, chunk, self.PAYLOAD_BYTES)
        into = aligned(self.PAYLOAD_BYTES)
        assert tier.submit_load(chunk.key, into)
        assert tier.invalidate([Scope()], DurableSpy()) == 1
        (transfer,) = settle(tier, 1)
        assert transfer.fault is not None or into == content(chunk.key, self.PAYLOAD_BYTES)
        assert not tier.lookup(chunk.key)

    def test_durable_is_told_once(self, tier: CheckedTier) -> None:
        """Every invalidation, also one that takes nothing, tells its `durable` exactly once, here and after `close`."""
        spies = [DurableSpy() for _ in range(5)]
        for number, spy in enumerate(spies):
            tier.invalidate([Scope(tenant=number + 1)], spy)
        tier.close(5.0)
        late = DurableSpy()
        tier.invalidate([Scope()], late)
        assert [spy.wait(tier) for spy in spies] == [True] * 5
        late.wait(tier)
        assert all(len(spy.told) == 1 for spy in [*spies, late])

    def test_a_full_queue_is_no_fault(self, tier: CheckedTier) -> None:
        """Stores beyond what the tier queues are refused, and `can_store` says so beforehand."""
        taken = 0
        for chunk in chain("a", self.SLOTS):
            could = tier.can_store()
            took = tier.submit_store(chunk, TERMS, aligned(self.PAYLOAD_BYTES, content(chunk.key, self.PAYLOAD_BYTES)))
            assert could or not took
            taken += took
        assert all(transfer.fault is None for transfer in settle(tier, taken))

    def test_wrong_sizes_are_the_callers_bug(self, tier: CheckedTier) -> None:
        """A buffer of another size raises ValueError, for stores and loads."""
        (chunk,) = chain("a", 1)
        for size in (self.PAYLOAD_BYTES - 4096, self.PAYLOAD_BYTES + 4096):
            with pytest.raises(ValueError):
                tier.submit_store(chunk, TERMS, aligned(size))
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
