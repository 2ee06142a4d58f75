"""The cache, one property at a time."""

from collections.abc import Sequence
from typing import Any

import pytest

from hotspan.cache.entry import Reader
from hotspan.core.terms import MAX_LABELS, Scope, Terms
from hotspan.core.types import Chunk, Lookup, Tier
from hotspan.testing.chunks import chain, content, key_of
from hotspan.tiers.base import Fault
from hotspan.tiers.shares import Share, Shares

from .rig import SIZE, Rig

HIT, MISS, RETRY = Lookup.HIT, Lookup.MISS, Lookup.RETRY


# -- store and load ------------------------------------------------------------------------------------------------


def test_what_is_stored_is_hit() -> None:
    """A chain is a MISS before it is stored, RETRY while the engine copies it, HIT after, and loads its bytes."""
    with Rig(ram=4) as rig:
        chunks, reader = chain("a", 3), Reader()
        assert rig.ask(chunks, reader) == [MISS]
        placed = rig.begin(chunks)
        assert [placement.chunk for placement in placed] == chunks
        assert rig.ask(chunks, Reader()) == [RETRY] * 3
        rig.cache.end_store(chunks)
        assert rig.ask(chunks, reader) == [HIT] * 3
        rig.load(chunks, reader)


def test_a_chunk_is_stored_once() -> None:
    """What is in RAM or on its way there is left out of a second store."""
    with Rig(ram=4) as rig:
        chunks = chain("a", 3)
        rig.begin(chunks[:2])
        assert [placement.chunk for placement in rig.begin(chunks)] == chunks[2:]
        rig.cache.end_store(chunks)
        assert rig.begin(chunks) == []


def test_chunks_without_parents_are_refused() -> None:
    """A chunk whose parent is on no tier is left out and counted; with a parent below it is taken."""
    with Rig(ram=4, disk=4) as rig:
        chunks = chain("a", 3)
        assert rig.store(chunks[1:]) == []
        assert rig.cache.take_stats().stores_refused == {Tier.RAM: 2}
        rig.put_below(chunks[:1])
        assert rig.store(chunks[1:]) == chunks[1:]


def test_a_failed_copy_is_a_miss_at_once() -> None:
    """When the engine's copy fails, its slot is free and who waited for it is told MISS without delay."""
    with Rig(ram=2) as rig:
        chunks, reader = chain("a", 1), Reader()
        rig.begin(chunks)
        assert rig.ask(chunks, reader) == [RETRY] and rig.cache.is_waiting(reader)
        rig.cache.end_store(chunks, success=False)
        assert not rig.cache.is_waiting(reader)
        assert rig.ask(chunks, reader) == [MISS]
        assert rig.cache.usage()[Tier.RAM].chunks == 0
        rig.cache.release(reader)


def test_only_hits_can_be_loaded() -> None:
    """`begin_load` of a chunk that is absent or still on its way raises KeyError and pins nothing."""
    with Rig(ram=4, disk=4) as rig:
        rig.put_below(below := chain("b", 1))
        rig.store(stored := chain("a", 1))
        reader = Reader()
        rig.ask(below, reader)
        for other in (below[0].key, key_of("nowhere")):
            with pytest.raises(KeyError):
                rig.cache.begin_load([stored[0].key, other], reader)
        rig.cache.release(reader)
        rig.land()
        assert not rig.cache.ram.is_pinned


# -- eviction ------------------------------------------------------------------------------------------------------


def test_leaves_go_first() -> None:
    """RAM under pressure gives up a chain from its end."""
    with Rig(ram=4) as rig:
        rig.store(old := chain("a", 4))
        rig.store(chain("b", 2))
        assert [rig.in_ram(chunk.key) for chunk in old] == [True, True, False, False]
        assert rig.cache.take_stats().evictions == {Tier.RAM: 2}


def test_used_chunks_outlive_a_flood_of_unused_ones() -> None:
    """A load counts as a use of the whole chain, which stays while texts pass that nobody asks again."""
    with Rig(ram=6) as rig:
        old, reader = chain("a", 2), Reader()
        rig.store(old)
        assert rig.ask(old, reader) == [HIT] * 2
        rig.load(old, reader)
        for name in "bcdefgh":
            rig.store(chain(name, 2))
        assert [rig.in_ram(chunk.key) for chunk in old] == [True, True]


def test_a_hit_stays_until_release() -> None:
    """What a reader was told HIT of is not evicted by any pressure until it lets go, nor during its load."""
    with Rig(ram=3) as rig:
        chunks, reader = chain("a", 2), Reader()
        rig.store(chunks)
        rig.ask(chunks, reader)
        for n in range(4):
            rig.store(chain(f"pressure {n}", 3))
            assert all(rig.in_ram(chunk.key) for chunk in chunks)
        keys = [chunk.key for chunk in chunks]
        rig.cache.begin_load(keys, reader)
        rig.store(chain("during", 3))
        assert all(rig.in_ram(key) for key in keys)
        rig.cache.end_load(keys)
        rig.store(chain("after", 3))
        assert not any(rig.in_ram(key) for key in keys)


def test_a_parent_makes_room_for_its_child_only_if_it_is_below() -> None:
    """With RAM for one chunk, a child takes its parent's place once the parent is persisted, not before."""
    with Rig(ram=1, disk=4) as rig:
        chunks = chain("a", 2)
        rig.store(chunks[:1])
        assert rig.store(chunks[1:]) == []
        rig.land()
        assert rig.store(chunks[1:]) == chunks[1:]
        assert not rig.in_ram(chunks[0].key) and rig.tier.lookup(chunks[0].key)


def test_a_parent_that_is_nowhere_else_stays() -> None:
    """Without a tier below a child never takes its parent's place."""
    with Rig(ram=1) as rig:
        chunks = chain("a", 2)
        rig.store(chunks[:1])
        assert rig.store(chunks[1:]) == [] and rig.in_ram(chunks[0].key)


def test_a_chunk_that_is_being_persisted_stays() -> None:
    """A slot is not reused while the tier below reads from it."""
    with Rig(ram=1, disk=4) as rig:
        rig.store(chain("a", 1))
        assert rig.stores and rig.store(chain("b", 1)) == []
        rig.land()
        assert rig.store(chain("b", 1)) != []


# -- promotion -----------------------------------------------------------------------------------------------------


def test_what_lies_below_is_promoted() -> None:
    """A chain below RAM is RETRY, then HIT with the right bytes and the tier that they came from."""
    with Rig(ram=4, disk=4) as rig:
        rig.put_below(chunks := chain("a", 3))
        reader = Reader()
        assert rig.ask(chunks, reader) == [RETRY] * 3
        assert rig.cache.is_waiting(reader) and rig.cache.is_moving
        rig.land()
        assert not rig.cache.is_waiting(reader) and not rig.cache.is_moving
        assert rig.ask(chunks, reader) == [HIT] * 3
        assert reader.promoted == {chunk.key: Tier.DISK for chunk in chunks}
        rig.load(chunks, reader)


def test_a_second_reader_waits_on_the_firsts_promotion() -> None:
    """One promotion serves two readers; it goes on when the first gives up."""
    with Rig(ram=4, disk=4) as rig:
        rig.put_below(chunks := chain("a", 2))
        first, second = Reader(), Reader()
        rig.ask(chunks, first)
        assert rig.ask(chunks, second) == [RETRY] * 2
        assert len(rig.loads) == 2
        rig.cache.release(first)
        rig.land()
        assert rig.ask(chunks, second) == [HIT] * 2
        rig.load(chunks, second)


@pytest.mark.parametrize("fault", list(Fault))
def test_a_failed_promotion_is_a_miss_and_counted(fault: Fault) -> None:
    """A promotion that fails is a MISS at once for who waited, one fault in the counts, and its slot is free again."""
    with Rig(ram=4, disk=4) as rig:
        rig.put_below(chunks := chain("a", 2))
        reader = Reader()
        rig.ask(chunks, reader)
        rig.tier.finish(rig.loads[0], fault)
        rig.cache.step()
        assert rig.ask(chunks, reader) == [MISS]
        assert rig.cache.take_stats().faults == {(Tier.DISK, fault.value): 1}
        assert not any(rig.tier.lookup(chunk.key) for chunk in chunks)  # what stood on it went with it
        rig.put_below(chunks[:1])
        assert rig.ask(chunks, reader) == [MISS]  # a tier that fails and says it has it can't keep a reader for ever
        rig.cache.release(reader)
        rig.land()
        assert rig.cache.usage()[Tier.RAM].chunks == 0
        assert len(rig.store(chain("b", 4))) == 4


def test_a_failed_promotion_takes_what_stood_on_the_chunk() -> None:
    """What stands on a chunk that could not be read is gone from both tiers, what it stands on stays."""
    with Rig(ram=4, disk=4) as rig:
        rig.put_below(chunks := chain("a", 3))
        reader = Reader()
        rig.ask(chunks, reader)
        rig.tier.finish(rig.loads[2])
        rig.cache.step()
        rig.tier.finish(next(flight for flight in rig.loads if flight.key == chunks[1].key), Fault.CORRUPT)
        rig.land()
        assert rig.ask(chunks, reader) == [HIT, MISS]
        assert [rig.in_ram(chunk.key) for chunk in chunks] == [True, False, False]
        assert [rig.tier.lookup(chunk.key) for chunk in chunks] == [True, False, False]
        rig.cache.release(reader)


def test_a_hanging_tier_costs_the_patience_and_no_more() -> None:
    """Up to 50 ms without progress the answer is RETRY, after that MISS for this reader for good."""
    with Rig(ram=4, disk=4) as rig:
        rig.put_below(chunks := chain("a", 2))
        reader = Reader()
        rig.ask(chunks, reader)
        rig.clock.advance(0.049)
        assert rig.cache.is_waiting(reader) and rig.ask(chunks, reader) == [RETRY] * 2
        rig.clock.advance(0.002)
        assert not rig.cache.is_waiting(reader) and rig.ask(chunks, reader) == [MISS]
        assert rig.ask(chunks, reader) == [MISS]
        assert rig.cache.take_stats().cuts == 1
        rig.cache.release(reader)


def test_progress_renews_the_patience() -> None:
    """A chain that lands chunk by chunk every 40 ms is waited for to its end."""
    with Rig(ram=4, disk=4) as rig:
        rig.put_below(chunks := chain("a", 4))
        reader = Reader()
        for _ in range(4):
            assert RETRY in rig.ask(chunks, reader)
            rig.clock.advance(0.04)
            rig.tier.finish(rig.loads[0])
            rig.cache.step()
        assert rig.ask(chunks, reader) == [HIT] * 4
        rig.load(chunks, reader)


def test_a_new_wait_has_its_own_patience() -> None:
    """A reader whose promotions all landed long ago may wait anew: the pause in between was not the tier's."""
    with Rig(ram=4, disk=4) as rig:
        rig.put_below(chunks := chain("a", 2))
        reader = Reader()
        assert rig.promote(chunks[:1], reader) == [HIT]
        rig.clock.advance(1.0)
        assert rig.ask(chunks, reader) == [HIT, RETRY]
        rig.land()
        assert rig.ask(chunks, reader) == [HIT, HIT]
        rig.load(chunks, reader)


def test_a_chain_longer_than_ram_is_cut_where_ram_ends() -> None:
    """RAM of four chunks serves the first four of a chain of ten, in one promotion, and never livelocks."""
    with Rig(ram=4, disk=10) as rig:
        rig.put_below(chunks := chain("a", 10))
        for _ in range(3):
            reader = Reader()
            assert rig.promote(chunks, reader) == [HIT] * 4 + [MISS]
            rig.load(chunks[:4], reader)


def test_two_readers_that_each_need_most_of_ram_do_not_deadlock() -> None:
    """Both get an answer without time passing, together no more than RAM holds; after one is done the other's rest
    can be promoted for the next request."""
    with Rig(ram=6, disk=10) as rig:
        one, other = chain("a", 5), chain("b", 5)
        rig.put_below(one + other)
        first, second = Reader(), Reader()
        rig.ask(one[:3], first)
        rig.ask(other[:3], second)
        rig.land()
        answers = [rig.ask(one, first), rig.ask(other, second)]
        assert answers == [[HIT] * 3 + [MISS]] * 2
        rig.load(one[:3], first)
        rig.load(other[:3], second)
        third = Reader()
        assert rig.promote(other, third) == [HIT] * 5
        rig.load(other, third)


def test_a_reader_without_anything_waits_for_others_to_make_room() -> None:
    """RAM full of what others load right now is worth a short wait, and what they leave is taken."""
    with Rig(ram=2, disk=4) as rig:
        rig.store(held := chain("a", 2))
        rig.land()
        rig.put_below(wanted := chain("b", 1))
        loader, reader = Reader(), Reader()
        rig.ask(held, loader)
        keys = [chunk.key for chunk in held]
        rig.cache.begin_load(keys, loader)
        assert rig.ask(wanted, reader) == [RETRY]
        rig.cache.end_load(keys)
        assert rig.promote(wanted, reader) == [HIT]
        rig.load(wanted, reader)


def test_who_holds_something_does_not_wait_for_room() -> None:
    """A reader with a prefix in RAM is cut at once where room ends, though others move: they may wait for it."""
    with Rig(ram=3, disk=6) as rig:
        moving, mine = chain("a", 2), chain("b", 2)
        rig.put_below(moving + mine[1:])
        rig.store(mine[:1])
        rig.land()
        first, second = Reader(), Reader()
        assert rig.ask(mine[:1], second) == [HIT]
        rig.ask(moving, first)
        assert rig.ask(mine, second) == [HIT, MISS]
        rig.cache.release(first)
        rig.cache.release(second)


def test_a_promotion_that_the_tier_refuses_is_a_miss() -> None:
    """If the tier finds a chunk and then won't load it, the answer is MISS and the slot is free again."""
    with Rig(ram=1, disk=4) as rig:
        rig.put_below(chunks := chain("a", 1))
        rig.tier.submit_load = lambda key, into: False  # type: ignore[method-assign]
        assert rig.ask(chunks, Reader()) == [MISS]
        assert rig.cache.usage()[Tier.RAM].chunks == 0


def test_waiting_for_room_ends_too() -> None:
    """Room that never comes is a MISS after the patience; room that can't come is a MISS at once."""
    with Rig(ram=2, disk=4) as rig:
        rig.store(held := chain("a", 2))
        rig.land()
        rig.put_below(wanted := chain("b", 1))
        loader, reader, other = Reader(), Reader(), Reader()
        rig.ask(held, loader)
        assert rig.ask(wanted, other) == [MISS]
        keys = [chunk.key for chunk in held]
        rig.cache.begin_load(keys, loader)
        assert rig.ask(wanted, reader) == [RETRY]
        rig.clock.advance(0.051)
        assert rig.ask(wanted, reader) == [MISS]
        rig.cache.end_load(keys)


def test_a_pin_follows_the_chunk_that_was_hit() -> None:
    """A reader that held a chunk whose promotion failed holds the one stored in its place, once it is told HIT."""
    with Rig(ram=2, disk=4) as rig:
        rig.put_below(chunks := chain("a", 1))
        reader = Reader()
        rig.ask(chunks, reader)
        rig.tier.finish(rig.loads[0], Fault.CORRUPT)
        rig.cache.step()
        rig.store(chunks)
        rig.land()
        assert rig.ask(chunks, reader) == [HIT]
        for n in range(3):
            rig.store(chain(f"pressure {n}", 2))
            rig.land()
        assert rig.in_ram(chunks[0].key)
        rig.load(chunks, reader)
        rig.land()
        assert not rig.cache.ram.is_pinned


# -- persisting ----------------------------------------------------------------------------------------------------


def test_what_is_stored_is_persisted_in_order() -> None:
    """Chunks go to the tier below by themselves, root first, as many at a time as it takes."""
    with Rig(ram=4, disk=4, store_depth=1) as rig:
        rig.store(chunks := chain("a", 4))
        order = []
        while rig.stores:
            order.append(rig.stores[0].key)
            rig.land_some()
        assert order == [chunk.key for chunk in chunks]
        assert not rig.cache.is_persisting


def test_what_waits_for_a_tier_stays_while_another_may_go() -> None:
    """A chunk that is below already makes room before an older one that still waits for its turn there."""
    with Rig(ram=3, disk=8, store_depth=1) as rig:
        written, waiting, newest = (chain(name, 1) for name in "abc")
        rig.put_below(written)
        rig.store(chain("first", 1))  # takes the tier's only place
        rig.store(waiting)
        rig.promote(written, Reader())
        rig.store(newest)
        assert rig.in_ram(waiting[0].key) and rig.in_ram(newest[0].key)
        assert not rig.cache.take_stats().stores_late


def test_what_leaves_before_it_is_written_is_counted() -> None:
    """A tier that is too slow: RAM goes on to take what is new, the oldest that waits goes, and nobody forgets it."""
    with Rig(ram=4, disk=64, store_depth=1) as rig:
        chunks = [chain(f"text {n}", 1)[0] for n in range(40)]
        for chunk in chunks:
            assert rig.store([chunk])
        for _ in chunks:
            rig.land()
        lost = sum(not rig.cache.where(chunk.key) for chunk in chunks)
        assert lost > 0 and rig.cache.take_stats().stores_late == {Tier.DISK: lost}
        assert not rig.cache.is_persisting


def test_a_refusal_is_not_an_offer_repeated() -> None:
    """A full tier is offered a chunk once a touch, also while it is busy: the second offer means a second use."""
    with Rig(ram=4, disk=1) as rig:
        first, second = chain("a", 1), chain("b", 1)
        rig.store(first)
        rig.store(second)
        assert rig.stores
        for _ in range(3):
            rig.cache.step()
        rig.land()
        assert rig.tier.refusals == [second[0].key]
        assert rig.cache.take_stats().stores_refused == {Tier.DISK: 1}
        reader = Reader()
        rig.ask(second, reader)
        rig.load(second, reader)
        rig.cache.step()
        assert rig.tier.refusals == [second[0].key] * 2


def test_a_failed_write_is_counted_and_not_below() -> None:
    """A write that fails leaves the chunk in RAM only; its next use offers it again."""
    with Rig(ram=4, disk=4) as rig:
        rig.store(chunks := chain("a", 1))
        rig.tier.finish(rig.stores[0], Fault.IO)
        rig.cache.step()
        stats = rig.cache.take_stats()
        assert stats.faults == {(Tier.DISK, "io"): 1} and not stats.store_bytes[Tier.DISK]
        reader = Reader()
        assert rig.ask(chunks, reader) == [HIT]
        rig.load(chunks, reader)
        rig.cache.step()
        assert [flight.key for flight in rig.stores] == [chunks[0].key]


def test_closing_writes_what_waits(caplog: pytest.LogCaptureFixture) -> None:
    """`close` gives a tier that works all chunks that wait, also one whose first write began just now."""
    rig = Rig(ram=4, disk=4, store_depth=1)
    rig.store(chunks := chain("a", 4))
    rig.tier._auto = True
    rig.cache.close(5.0)
    assert sorted(rig.tier.held) == sorted(chunk.key for chunk in chunks)
    assert "stores_given_up" not in caplog.text


def test_closing_leaves_a_tier_that_hangs_after_its_timeout(caplog: pytest.LogCaptureFixture) -> None:
    """The log has how many chunks it did not get: those that it had begun, that waited, and that failed meanwhile."""
    rig = Rig(ram=4, disk=4, store_depth=2)
    rig.store([Chunk(key_of(f"a{n}"), None) for n in range(4)])
    rig.tier.finish(rig.stores[0], Fault.IO)  # known when the cache is closed
    rig.tier.wait = rig.clock.advance  # type: ignore[method-assign]
    started = rig.clock.monotonic()
    rig.cache.close(0.2)
    assert 0.15 < rig.clock.monotonic() - started <= 0.2
    assert "stores_given_up tier=disk chunks=4" in caplog.text


# -- clear ---------------------------------------------------------------------------------------------------------


def test_clear_forgets_what_is_in_ram_alone() -> None:
    """After `clear` nothing is in RAM or on its way there; what lower tiers have is found again, and no log is told."""
    with Rig(ram=64, disk=8) as rig:
        rig.put_below(below := chain("b", 2))
        rig.store(stored := chain("a", 2))
        reader = Reader()
        rig.ask(below, reader)
        assert rig.loads and rig.stores
        assert rig.cache.clear() > 0
        assert not rig.cache.is_waiting(reader) and not rig.cache.ram.entries
        rig.cache.check()
        rig.cache.release(reader)
        rig.land()
        assert rig.cache.usage()[Tier.RAM].chunks == 0 and not rig.tier.invalidations
        for chunks in (stored, below):
            reader = Reader()
            assert rig.promote(chunks, reader) == [HIT, HIT]
            rig.load(chunks, reader)


def test_clearing_twice_leaks_no_slot() -> None:
    """A chunk stored anew while its old write still runs, and cleared again, gives both slots back."""
    with Rig(ram=4, disk=4) as rig:
        chunks = chain("a", 1)
        rig.store(chunks)
        rig.cache.clear()
        rig.store(chunks, version=1)
        rig.cache.check()
        rig.cache.clear()
        rig.cache.check()
        rig.land()
        assert rig.cache.usage()[Tier.RAM].chunks == 0


def test_a_promotion_that_outlives_an_invalidation_is_never_taken_for_a_new_one() -> None:
    """A load that hangs across an invalidation ends no other wait, though the chunk was stored and dropped again."""
    with Rig(ram=3, disk=4) as rig:
        rig.put_below(chunks := chain("a", 1))
        rig.ask(chunks, waiting := Reader())
        (hung,) = rig.loads
        rig.cache.invalidate([Scope()], lambda done: None)
        rig.cache.release(waiting)
        rig.store(chunks, version=1)
        rig.tier.finish(rig.stores[0])
        rig.cache.step()
        for n in range(2):
            rig.store(chain(f"pressure {n}", 1))
            for flight in rig.stores:
                rig.tier.finish(flight)
            rig.cache.step()
        assert not rig.in_ram(chunks[0].key) and rig.tier.lookup(chunks[0].key)
        reader = Reader()
        first = rig.ask(chunks, reader)
        rig.tier.finish(hung)
        rig.cache.step()
        rig.cache.check()
        if rig.ask(chunks, reader) != [HIT]:
            assert first in ([RETRY], [MISS])
        else:
            rig.load(chunks, reader, version=1)
        rig.cache.release(reader)
        rig.land()
        reader = Reader()
        assert rig.promote(chunks, reader) == [HIT]
        rig.load(chunks, reader, version=1)


def test_what_was_cleared_is_nobodys_ancestor() -> None:
    """A chunk forgotten while it is being written does not let its child be stored."""
    with Rig(ram=4, disk=4) as rig:
        chunks = chain("a", 2)
        rig.store(chunks[:1])
        rig.cache.clear()
        assert rig.store(chunks[1:]) == []


def test_a_chunk_stored_during_its_old_write_is_persisted_after_it() -> None:
    """When a forgotten write ends, the chunk that was stored anew meanwhile still goes to the tier below."""
    with Rig(ram=4, disk=4) as rig:
        chunks = chain("a", 1)
        rig.store(chunks)
        rig.cache.clear()
        rig.store(chunks, version=1)
        for _ in range(3):
            rig.land()
        assert rig.tier.lookup(chunks[0].key) and not rig.cache.is_persisting


# -- counts --------------------------------------------------------------------------------------------------------


def test_counts() -> None:
    """Bytes, hits, look-ups and evictions are counted once, by tier, and `take_stats` starts anew."""
    with Rig(ram=2, disk=8) as rig:
        assert rig.cache.stats.is_empty
        rig.store(chain("a", 2))
        rig.land()
        rig.put_below(below := chain("b", 2))
        reader = Reader()
        assert rig.promote(below, reader) == [HIT] * 2
        rig.load(below, reader)
        rig.cache.stats.lookup_tokens += 1000
        rig.cache.stats.hit_tokens.update({Tier.DISK: 512, Tier.RAM: 256})
        assert not rig.cache.stats.is_empty
        stats = rig.cache.take_stats()
        assert stats.store_bytes == {Tier.RAM: 2 * SIZE, Tier.DISK: 2 * SIZE}
        assert stats.load_bytes == {Tier.DISK: 2 * SIZE}
        assert len(stats.load_seconds[Tier.DISK]) == len(stats.store_seconds[Tier.DISK]) == 2
        assert stats.evictions == {Tier.RAM: 2}
        assert (stats.lookup_tokens, stats.hit_tokens) == (1000, {Tier.DISK: 512, Tier.RAM: 256})
        assert not stats.faults and not stats.cuts and not stats.stores_refused
        assert rig.cache.stats.is_empty and rig.cache.take_stats().lookup_tokens == 0


def test_usage_counts_chunks_and_bytes() -> None:
    """Usage is by tier, in chunks and bytes."""
    with Rig(ram=4, disk=8) as rig:
        rig.store(chain("a", 3))
        rig.land()
        usage = rig.cache.usage()
        assert (usage[Tier.RAM].chunks, usage[Tier.RAM].bytes, usage[Tier.RAM].capacity_bytes) == (
            3,
            3 * SIZE,
            4 * SIZE,
        )
        assert (usage[Tier.DISK].chunks, usage[Tier.DISK].capacity_chunks) == (3, 8)


def test_without_a_tier_below_ram_is_all_there_is() -> None:
    """A cache of RAM only answers HIT or MISS and has nothing to wait for."""
    with Rig(ram=2) as rig:
        rig.store(chain("a", 2))
        rig.cache.step()
        rig.cache.wait(10.0)
        assert rig.ask([*chain("a", 2), Chunk(key_of("x"), None)], Reader()) == [HIT, HIT, MISS]
        assert list(rig.cache.usage()) == [Tier.RAM]


# -- clear beside the engine's copies --------------------------------------------------------------------------------


def test_clear_keeps_slots_that_the_engine_uses() -> None:
    """Slots that the engine copies into or from at a `clear` are given to nobody before `end_clear`."""
    with Rig(ram=3) as rig:
        loading, reader = chain("a", 1), Reader()
        rig.store(loading)
        rig.ask(loading, reader)
        used = set(rig.cache.begin_load([loading[0].key], reader))
        used |= {placement.slot for placement in rig.begin(chain("b", 1))}
        rig.cache.clear()
        rig.cache.check()
        assert [placement.slot for placement in rig.begin(chain("c", 3)) if placement.slot in used] == []
        rig.cache.end_clear()
        rig.cache.check()
        assert len(rig.begin(chain("d", 2))) == 2


def test_clear_keeps_a_slot_that_is_written_and_loaded() -> None:
    """A write that ends after a `clear` does not free a slot from which the engine still loads."""
    with Rig(ram=1, disk=2) as rig:
        chunks, reader = chain("a", 1), Reader()
        rig.store(chunks)
        rig.ask(chunks, reader)
        rig.cache.begin_load([chunks[0].key], reader)
        rig.cache.clear()
        rig.land()
        assert rig.begin(chain("b", 1)) == []
        rig.cache.end_clear()
        assert len(rig.begin(chain("b", 1))) == 1


def test_a_reader_behind_others_in_the_queue_waits() -> None:
    """While others' chunks land, a reader whose own have not begun is told RETRY; not for ever."""
    with Rig(ram=60, disk=60) as rig:
        first, second = chain("a", 25), chain("b", 2)
        rig.put_below(first + second)
        rig.ask(first, Reader())
        late = Reader()
        rig.ask(second, late)
        answers = []
        for flight in list(rig.loads)[:25]:
            rig.clock.advance(0.045)
            rig.tier.finish(flight)
            rig.cache.step()
            answers.append(rig.ask(second, late)[-1])
        assert answers == [RETRY] * 22 + [MISS] * 3  # a second, 20 times the patience


# -- forget ----------------------------------------------------------------------------------------------------------


def tagged(*labels: int, expires_s: int = 0, tenant: int = 1) -> Reader:
    """A request that stores and hits under these tags."""
    return Reader(terms=Terms(tenant=tenant, labels=frozenset(labels), expires_s=expires_s))


def store_as(rig: Rig, chunks: Sequence[Chunk], reader: Reader) -> None:
    """Store chunks on a request's terms, and let them reach the tier below."""
    for placement in rig.cache.begin_store(chunks, reader):
        rig.slab.slot(placement.slot)[:] = content(placement.chunk.key, SIZE)
    rig.cache.end_store(chunks)
    rig.land()


def forget(rig: Rig, **scope: Any) -> dict[Tier, int]:
    """Invalidate, durably as far as the rig goes."""
    removed = rig.cache.invalidate([Scope(**scope)], lambda done: None)
    rig.cache.check()
    return removed


@pytest.mark.parametrize("scope", [{"tenant": 1}, {"labels": frozenset({7})}, {"tenant": 1, "labels": frozenset({7})}])
def test_a_scope_takes_its_chunks_and_no_others(scope: dict[str, Any]) -> None:
    """By tenant, by tag, by both: what matches goes from RAM and below, with what stands on it; the rest stays."""
    with Rig(8, 8) as rig:
        mine, theirs = chain("mine", 3), chain("theirs", 2)
        store_as(rig, mine[:2], tagged(7))
        store_as(rig, mine[2:], tagged())
        store_as(rig, theirs, tagged(8, tenant=2))
        assert forget(rig, **scope) == {Tier.RAM: 3, Tier.DISK: 3}
        assert not any(rig.in_ram(chunk.key) or rig.tier.lookup(chunk.key) for chunk in mine)
        assert all(rig.in_ram(chunk.key) and rig.tier.lookup(chunk.key) for chunk in theirs)


@pytest.mark.parametrize("how", ["expired", "not read", "not copied"])
def test_a_gap_hides_nothing_from_an_invalidation(how: str) -> None:
    """root (tag 7) -> mid -> leaf: mid is forgotten, 7 invalidated, root and mid stored anew: no leaf on any tier."""
    with Rig(8, 8) as rig:
        root, mid, leaf = chunks = chain("a", 3)
        store_as(rig, [root], tagged(7))
        if how == "not copied":
            rig.begin([mid, leaf])
            rig.cache.end_store([leaf])
            rig.land()
            rig.cache.end_store([mid], success=False)
        elif how == "expired":
            store_as(rig, [mid, leaf], tagged())
            rig.cache.join([mid], tagged(expires_s=int(rig.clock.unix()) + 10))
            rig.clock.advance(11)
            rig.cache.step()
        else:
            for chunk in (mid, leaf):
                rig.tier.put(chunk, Terms(tenant=1), content(chunk.key, SIZE))
            rig.ask(chunks, reader := tagged())
            rig.tier.finish(next(flight for flight in rig.loads if flight.key == leaf.key))
            rig.tier.finish(next(flight for flight in rig.loads if flight.key == mid.key), Fault.IO)
            rig.cache.step()
            rig.cache.release(reader)
        assert forget(rig, labels=frozenset({7})) == {Tier.RAM: 1, Tier.DISK: 1}
        store_as(rig, [root, mid], tagged())
        reader = tagged()
        assert rig.promote(chunks, reader) == [HIT, HIT, MISS]
        assert not rig.tier.lookup(leaf.key)
        rig.cache.release(reader)


def test_what_stands_on_a_chunk_below_goes_with_it() -> None:
    """A chunk in RAM whose parent lies below only is taken with it."""
    with Rig(4, 4) as rig:
        root, mid, leaf = chunks = chain("a", 3)
        rig.tier.put(root, Terms(tenant=1, labels=frozenset({7})), content(root.key, SIZE))
        store_as(rig, [mid, leaf], tagged())
        assert not rig.in_ram(root.key) and rig.in_ram(leaf.key)
        assert forget(rig, labels=frozenset({7})) == {Tier.RAM: 2, Tier.DISK: 3}
        assert not any(rig.in_ram(chunk.key) or rig.tier.lookup(chunk.key) for chunk in chunks)


def test_what_stood_on_a_chunk_that_was_nowhere_is_not_found_again() -> None:
    """A chunk in RAM whose parent was lost below is forgotten when that is stored anew: its tags are not known."""
    with Rig(4, 4) as rig:
        root, mid = chunks = chain("a", 2)
        rig.tier.put(root, Terms(tenant=1, labels=frozenset({7})), content(root.key, SIZE))
        store_as(rig, [mid], tagged())
        rig.tier.discard(root.key)
        store_as(rig, [root], tagged())
        forget(rig, labels=frozenset({7}))
        reader = tagged()
        assert rig.ask(chunks, reader) == [HIT, MISS]
        rig.cache.release(reader)


def test_what_is_refused_behind_a_gap_goes_below_with_its_parent() -> None:
    """A chunk whose copy ended before its parent's is not stored below alone; a later use stores both, in order."""
    with Rig(4, 4) as rig:
        root, mid = chunks = chain("a", 2)
        rig.begin(chunks)
        rig.cache.end_store([mid])
        assert not rig.stores
        rig.cache.end_store([root])
        rig.land()
        rig.ask(chunks, reader := Reader())
        rig.load(chunks, reader)
        rig.cache.step()
        rig.land()
        assert all(rig.tier.lookup(chunk.key) for chunk in chunks)


def test_more_tags_than_a_chunk_carries_take_it_with_any() -> None:
    """Hit under more than 64 tags, a chunk goes with every tag there is, in RAM and below; 64 are told apart."""
    for count, label, gone in ((MAX_LABELS, 1000, 0), (MAX_LABELS, 30, 1), (MAX_LABELS + 1, 1000, 1)):
        with Rig(4, 4) as rig:
            (chunk,) = chain("a", 1)
            store_as(rig, [chunk], tagged(1))
            for name in range(2, count + 1):
                rig.cache.join([chunk], tagged(name))
            assert forget(rig, labels=frozenset({label})) == {Tier.RAM: gone, Tier.DISK: gone}


def test_a_chunk_computed_again_shares_the_terms_of_its_copy_below() -> None:
    """What lies below and is stored into RAM under another tag goes with either tag, from both."""
    for label in (7, 8):
        with Rig(8, 8) as rig:
            (chunk,) = chain("a", 1)
            store_as(rig, [chunk], tagged(7))
            rig.cache._forget(rig.cache.ram.entries[chunk.key])
            store_as(rig, [chunk], tagged(8))
            assert forget(rig, labels=frozenset({label})) == {Tier.RAM: 1, Tier.DISK: 1}


def test_a_chunk_computed_again_while_its_tier_is_given_up_tags_its_copy_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tier that finds nothing while it is given up is told of the tags all the same: it may come back."""
    with Rig(ram=2, disk=4) as rig:
        (chunk,) = chain("a", 1)
        rig.put_below([chunk])
        with monkeypatch.context() as given_up:
            given_up.setattr(rig.tier, "lookup", lambda key: False)
            given_up.setattr(rig.tier, "finished", list)
            rig.cache.begin_store([chunk], Reader(terms=Terms(labels=frozenset({7}))))
            rig.cache.end_store([chunk])
        assert rig.tier.terms(chunk.key).labels == {7}


def test_a_store_in_flight_is_forgotten_with_its_slot_kept() -> None:
    """The engine goes on copying into a slot that was invalidated; nobody gets it, nor what it holds."""
    with Rig(1) as rig:
        (chunk,), (other,) = chain("a", 1), chain("b", 1)
        (placement,) = rig.cache.begin_store([chunk], tagged(7))
        assert forget(rig, labels=frozenset({7})) == {Tier.RAM: 1}
        assert rig.cache.begin_store([other], tagged()) == []
        assert rig.cache.begin_store([chunk], tagged()) == [], "two copies of one name could not be told apart"
        rig.cache.end_store([placement.chunk])
        assert not rig.in_ram(chunk.key)
        assert len(rig.cache.begin_store([chunk], tagged())) == 1


def test_a_load_in_flight_keeps_its_bytes() -> None:
    """A request that began to load before the invalidation gets what it was promised; the next one a miss."""
    with Rig(1) as rig:
        (chunk,), (other,) = chain("a", 1), chain("b", 1)
        store_as(rig, [chunk], tagged(7))
        reader = tagged()
        rig.ask([chunk], reader)
        (slot,) = rig.cache.begin_load([chunk.key], reader)
        forget(rig, labels=frozenset({7}))
        assert rig.cache.begin_store([other], tagged()) == []
        assert rig.slab.slot(slot) == content(chunk.key, SIZE)
        rig.cache.end_load([chunk.key])
        rig.cache.check()
        assert not rig.in_ram(chunk.key) and len(rig.cache.begin_store([other], tagged())) == 1


def test_a_promotion_in_flight_ends_as_a_miss() -> None:
    """A chunk that was invalidated on its way up is no hit when it lands."""
    with Rig(4, 4) as rig:
        (chunk,) = chain("a", 1)
        rig.put_below([chunk])
        reader = tagged()
        assert rig.ask([chunk], reader) == [Lookup.RETRY]
        forget(rig)
        rig.land()
        assert rig.ask([chunk], reader) == [Lookup.MISS]
        assert rig.cache.usage()[Tier.RAM].chunks == 0


def test_time_runs_out_in_ram_and_below() -> None:
    """From its expiry on a chunk is a miss, and its slot comes free; a hit takes the earlier expiry."""
    with Rig(4, 4) as rig:
        (chunk,) = chain("a", 1)
        now = int(rig.clock.unix())
        store_as(rig, [chunk], tagged(expires_s=now + 100))
        rig.cache.join([chunk], tagged(expires_s=now + 500))
        rig.cache.join([chunk], tagged(expires_s=now + 50))
        rig.clock.advance(49)
        assert rig.in_ram(chunk.key)
        rig.clock.advance(2)
        assert not rig.in_ram(chunk.key) and not rig.tier.lookup(chunk.key)
        assert rig.cache.usage()[Tier.RAM].chunks == 0


def test_what_expires_late_leaves_nothing_behind_when_it_is_evicted() -> None:
    """A flood of chunks that live for a day costs no memory once RAM gave them up; those in RAM still expire."""
    with Rig(ram=4) as rig:
        for n in range(500):
            (chunk,) = chain(f"text {n}", 1)
            store_as(rig, [chunk], Reader(terms=Terms(expires_s=int(rig.clock.unix()) + 86400)))
        assert len(rig.cache.ram.expiries) <= 2 * 4 + 64
        rig.clock.advance(86401)
        rig.cache.step()
        assert not rig.cache.ram.entries


def test_a_renewed_chunk_is_written_anew() -> None:
    """A hit that renews begins the time to live anew, in RAM and in the frame below."""
    with Rig(4, 4) as rig:
        (chunk,) = chain("a", 1)
        now = int(rig.clock.unix())
        store_as(rig, [chunk], tagged(expires_s=now + 100))
        reader = tagged(expires_s=now + 500)
        reader.renews = True
        rig.cache.join([chunk], reader)
        rig.cache.step()
        rig.land()
        rig.clock.advance(400)
        assert rig.in_ram(chunk.key) and rig.tier.lookup(chunk.key)


def test_a_renewed_chunk_brings_back_below_what_stood_on_it() -> None:
    """What goes below with a renewed chunk and is in RAM is written again, behind it."""
    with Rig(4, 4) as rig:
        chunks = chain("a", 3)
        now = int(rig.clock.unix())
        store_as(rig, chunks, tagged(expires_s=now + 100))
        reader = tagged(expires_s=now + 500)
        reader.renews = True
        rig.cache.join(chunks[:1], reader)
        rig.cache.step()
        rig.land()
        assert all(rig.tier.lookup(chunk.key) for chunk in chunks)


def test_a_large_tier_evicts_a_few_leaves_at_a_time() -> None:
    """The oldest go, a few at once so that a step costs less; a second that still waits for a lower tier stays."""
    roots = [chain(f"root-{number}", 1)[0] for number in range(4096 + 4)]
    with Rig(ram=4096, disk=1, store_depth=0) as rig:
        first, more = roots[:4096], roots[4096:]
        for chunk in first:
            rig.cache.end_store([placement.chunk for placement in rig.cache.begin_store([chunk])])
        queue = rig.cache._lower._queues[0]
        for chunk in first[:20]:
            queue.forget(chunk.key)  # these do not wait for the disk
        rig.store(more[:1])
        assert [chunk.key in rig.cache.ram.entries for chunk in first[:4]] == [False, False, True, True]
        for chunk in first[2:20]:
            queue.offer(chunk.key)
        rig.store(more[1:2])
        assert sum(chunk.key in rig.cache.ram.entries for chunk in first) == 4094
        rig.store(more[2:3])
        assert sum(chunk.key in rig.cache.ram.entries for chunk in first) == 4093


def test_a_large_tier_evicts_no_tenant_below_its_floor() -> None:
    """Who is at its floor gives one chunk for one of its own, and no more that others could have the room of."""
    shares = Shares(by_tenant={tenant: Share(floor=0.5) for tenant in (1, 2)})
    with Rig(ram=4096, shares=shares) as rig:
        for number in range(4096 + 2):
            place = chain(f"root-{number}", 1)
            reader = Reader(terms=Terms(tenant=1 + number % 2))
            rig.cache.end_store([each.chunk for each in rig.cache.begin_store(place, reader)])
            assert number < 4095 or rig.cache.ram.usage().tenants == {1: 2048, 2: 2048}


def test_what_finds_no_room_while_others_are_copied_is_asked_for_again() -> None:
    """Nothing is refused, or counted as refused, as long as a copy's end may make room; then it is."""
    with Rig(2) as rig:
        first, second = chain("a", 2), chain("b", 2)
        rig.begin(first)
        refused = rig.cache.stats.stores_refused
        assert rig.cache.try_store(second, tagged()) is None and not refused[Tier.RAM]
        assert rig.cache.begin_store(second, tagged()) == [] and refused[Tier.RAM] == 2
        rig.cache.end_store(first)
        placed = rig.cache.try_store(second, tagged())
        assert placed is not None and [each.chunk for each in placed] == second
        rig.cache.end_store(second)
        reader = tagged()
        rig.ask(second, reader)
        assert rig.cache.try_store(first, tagged()) == [] and refused[Tier.RAM] == 4, (
            "nothing is copied: no reason to wait"
        )
        rig.cache.release(reader)
