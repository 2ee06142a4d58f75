"""What every StorageTier must do. Derive a test class from StorageTierTests and give it a `tier` fixture:

    class TestMyTier(StorageTierTests):
        @pytest.fixture
        def tier(self, tmp_path, clock):
            tier = MyTier(tmp_path, self.SLOTS, self.PAYLOAD_BYTES, NAMESPACE, clock)
            yield tier
            tier.close(5.0)

The kit runs unchanged; the tier's `check()` is called after every test.
"""

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Protocol

import pytest

from hotspan.core.terms import MAX_LABELS, Scope, Terms, adapter_label, tag_labels, tenant_label
from hotspan.core.types import Chunk, ChunkKey
from hotspan.testing.chunks import HANG_S, aligned, chain, content, key_of
from hotspan.testing.clock import SimulatedClock
from hotspan.tiers.base import Losses, StorageTier, Transfer

NAMESPACE = bytes(range(32))
"""Of all chunks in the kit."""

TENANT = tenant_label("a tenant")
TERMS = Terms(tenant=TENANT)
"""On which the kit stores, where it says no others."""


class CheckedTier(StorageTier, Protocol):
    """A tier whose books can be checked while nothing is in flight."""

    def check(self) -> None: ...


def settle(tier: StorageTier, transfers: int, timeout_s: float = HANG_S) -> list[Transfer]:
    """Wait for that many transfers to end. Raises: AssertionError if they do not."""
    ended: list[Transfer] = []
    deadline = time.monotonic() + timeout_s
    while len(ended) < transfers:
        tier.wait(0.01)
        ended += tier.finished()
        if time.monotonic() > deadline:
            raise AssertionError(f"{transfers - len(ended)} of {transfers} transfers did not end in {timeout_s} s")
    return ended


def store(tier: StorageTier, chunk: Chunk, size: int, version: int = 0, terms: Terms = TERMS) -> Transfer | None:
    """Store the chunk's content and wait; None if the tier did not take it."""
    if not tier.submit_store(chunk, terms, aligned(size, content(chunk.key, size, version))):
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


class DurableSpy:
    """A `durable` that remembers what it was told, and how often."""

    def __init__(self) -> None:
        self.told: list[bool] = []
        self._called = threading.Event()

    def __call__(self, done: bool) -> None:
        self.told.append(done)
        self._called.set()

    def wait(self, tier: StorageTier, timeout_s: float = HANG_S) -> bool:
        """What it was told. Raises: AssertionError if that takes too long, or if it was told twice."""
        deadline = time.monotonic() + timeout_s
        while not self._called.wait(0.005):
            tier.finished()
            if time.monotonic() > deadline:
                raise AssertionError(f"nobody said in {timeout_s} s whether the invalidation is durable")
        (done,) = self.told
        return done


def invalidate(tier: StorageTier, scope: Scope) -> int:
    """Invalidate and wait until it is durable; how many chunks. Raises: AssertionError if it could not be made so."""
    spy = DurableSpy()
    removed = tier.invalidate([scope], spy)
    if not spy.wait(tier):
        raise AssertionError("the invalidation could not be made durable")
    return removed


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
