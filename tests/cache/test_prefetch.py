"""What is announced is brought into RAM, within bounds, behind everything else, and dropped again if nobody comes."""

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hotspan.cache.entry import Reader
from hotspan.cache.prefetch import ANSWERS_S, MAX_PREFETCHES, Found, by_longest
from hotspan.core.terms import Scope, Terms
from hotspan.core.types import Chunk, Lookup, Tier
from hotspan.testing.chunks import chain, content
from hotspan.tiers.base import Fault
from hotspan.tiers.pace import Pace
from hotspan.tiers.shares import Share, Shares
from tests.operations import operations

from .rig import SIZE, Rig

RAM, HOLD_S = 16, 30.0  # one tenant has a floor of 8, of which prefetches may pin 4
MOST = 4


def announce(rig: Rig, chunks: list[Chunk], tenant: int = 0, hold_s: float = HOLD_S) -> list[Found]:
    """What is told of an announcement."""
    told: list[Found] = []
    rig.cache.prefetches.begin(chunks, tenant, hold_s, told.append)
    return told


def put(rig: Rig, chunks: list[Chunk], tenant: int, label: int = 0) -> None:
    """Let the disk hold chunks of a tenant."""
    terms = Terms(tenant=tenant, labels=frozenset({label} if label else ()))
    for chunk in chunks:
        rig.tier.put(chunk, terms, content(chunk.key, SIZE))


def land(rig: Rig) -> None:
    while rig.tier.flights:
        rig.land()


def test_what_is_announced_is_a_hit_before_it_is_asked_for() -> None:
    """The first look-up is told HIT, of the right bytes; the load ends the prefetch."""
    with Rig(RAM, 20) as rig:
        text = chain("a", 3)
        rig.put_below(text)
        (found,) = announce(rig, text)
        assert found == Found({Tier.DISK: 3}, 3)
        land(rig)
        reader = Reader()
        assert rig.ask(text, reader) == [Lookup.HIT] * 3 and not rig.loads
        rig.load(text, reader)
        assert not rig.cache.ram.is_pinned and not rig.cache.prefetches.is_moving
        assert rig.cache.take_stats().prefetches == {"started": 3, "used": 3}


def test_what_is_in_ram_and_what_is_nowhere_is_left_alone() -> None:
    """Chunks behind a gap are not brought: no request could load them."""
    with Rig(RAM, 20) as rig:
        text, other = chain("a", 5), chain("b", 2)
        rig.store(text[:2])
        rig.put_below([text[2], text[4], *other[1:]])
        rig.tier.held.pop(text[0].key, None)
        (found,) = announce(rig, [*text, *other])
        assert found == Found({Tier.RAM: 2, Tier.DISK: 1}, 1)
        land(rig)
        assert rig.in_ram(text[2].key) and not rig.in_ram(text[4].key)


def test_no_more_than_the_share_is_pinned() -> None:
    """Half of the floor, over all announcements of a tenant; what is beyond is left out, parents first come."""
    with Rig(RAM, 40) as rig:
        first, second = chain("a", 3), chain("b", 6)
        rig.put_below([*first, *second])
        assert announce(rig, first)[0].started == 3
        assert announce(rig, second)[0].started == MOST - 3
        land(rig)
        assert rig.cache.prefetches.held(0) == MOST and rig.in_ram(second[0].key) and not rig.in_ram(second[1].key)


def test_what_nobody_comes_for_is_dropped() -> None:
    """When its time is over, its slots are free, and the disk has it still."""
    with Rig(RAM, 20) as rig:
        text = chain("a", 3)
        rig.put_below(text)
        announce(rig, text)
        land(rig)
        rig.clock.advance(HOLD_S)
        rig.cache.step()
        assert not rig.cache.ram.entries and rig.cache.prefetches.ends_s is None
        assert rig.cache.take_stats().prefetches == {"started": 3, "unused": 3}
        assert all(rig.tier.lookup(chunk.key) for chunk in text)


def test_an_announcement_is_renewed_by_another() -> None:
    """What is announced twice is held for the later one's time."""
    with Rig(RAM, 20) as rig:
        text = chain("a", 2)
        rig.put_below(text)
        announce(rig, text)
        land(rig)
        rig.clock.advance(HOLD_S - 1)
        announce(rig, text)
        rig.clock.advance(HOLD_S - 1)
        rig.cache.step()
        assert rig.cache.prefetches.held(0) == 2 and all(rig.in_ram(chunk.key) for chunk in text)


def test_requests_promotions_go_first() -> None:
    """While a request waits for chunks, no prefetch starts one."""
    with Rig(RAM, 40) as rig:
        asked, text = chain("a", 2), chain("b", 3)
        rig.put_below([*asked, *text])
        reader = Reader()
        assert rig.ask(asked, reader)[0] is Lookup.RETRY
        announce(rig, text)
        rig.cache.step()
        assert {flight.key for flight in rig.loads} <= {chunk.key for chunk in asked}
        land(rig)
        rig.ask(asked, reader)
        land(rig)
        assert all(rig.in_ram(chunk.key) for chunk in text)


def test_a_request_that_finds_no_room_ends_prefetches() -> None:
    """What they pinned makes room for its chunks."""
    with Rig(6, 40, shares=Shares(by_tenant={0: Share(floor=1.0)})) as rig:
        text, asked = chain("a", 3), chain("b", 6)
        rig.put_below([*text, *asked])
        announce(rig, text)
        land(rig)
        reader = Reader()
        rig.promote(asked, reader)
        rig.promote(asked, reader)
        assert rig.ask(asked, reader) == [Lookup.HIT] * 6


@pytest.mark.parametrize("fault", [Fault.IO, Fault.CORRUPT])
def test_a_chunk_that_can_not_be_read_ends_its_text(fault: Fault) -> None:
    """What stands on it is not brought, and no pin stays."""
    with Rig(RAM, 20) as rig:
        text = chain("a", 3)
        rig.put_below(text)
        announce(rig, text)
        rig.tier.finish(rig.loads[1], fault)
        land(rig)
        assert rig.in_ram(text[0].key) and not rig.in_ram(text[1].key)
        rig.clock.advance(HOLD_S)
        rig.cache.step()
        assert not rig.cache.ram.is_pinned


def test_what_was_invalidated_meanwhile_is_gone() -> None:
    """Also where it is on its way."""
    with Rig(RAM, 20) as rig:
        text = chain("a", 3)
        put(rig, text, 0, label=7)
        announce(rig, text)
        rig.cache.invalidate([Scope(labels=frozenset({7}))], lambda done: None)
        land(rig)
        assert not any(rig.in_ram(chunk.key) for chunk in text)
        rig.clock.advance(HOLD_S)
        rig.cache.step()
        assert not rig.cache.ram.is_pinned and rig.cache.usage()[Tier.RAM].chunks == 0


def test_chunks_of_another_tenant_are_not_brought() -> None:
    """Where tenants share texts, each pays for its own."""
    with Rig(RAM, 20) as rig:
        put(rig, chain("a", 2), tenant=1)
        assert announce(rig, chain("a", 2), tenant=2)[0].started == 0 and not rig.loads


def test_announcements_are_bounded() -> None:
    """With one more than may be, the tenant's oldest ends."""
    with Rig(RAM, 20) as rig:
        text = chain("a", 1)
        rig.put_below(text)
        announce(rig, text)
        land(rig)
        for _ in range(MAX_PREFETCHES + 1):
            announce(rig, text)
        assert len(rig.cache.prefetches._all) <= MAX_PREFETCHES and rig.cache.prefetches.held(0) == 1


def crowded(rig: Rig, others: int) -> None:
    """Many announcements of another tenant that each hold one chunk, and as many that wait for their turn."""
    for n in range(others):
        text = chain(f"other {n}", 1)
        put(rig, text, tenant=1)
        announce(rig, text, tenant=1)
        land(rig)
    assert rig.cache.prefetches.held(1) == others


def test_what_requests_and_announcements_cost_does_not_depend_on_other_announcements() -> None:
    """A load, an announcement of what is in RAM, and the counts cost the same beside 250 announcements of another
    tenant as beside 10, for each chunk of the text.
    """

    def costs(others: int) -> tuple[int, ...]:
        with Rig(2000, 2000) as rig:
            text = chain("text", 100)
            rig.store(text)
            crowded(rig, others)
            prefetches = rig.cache.prefetches
            load = operations(lambda: prefetches.used([chunk.key for chunk in text]))
            announced = operations(lambda: announce(rig, text, tenant=0))
            rig.cache.check()
            return load, announced, operations(lambda: (prefetches.held(0), prefetches.ends_s, prefetches.is_moving))

    assert costs(250) == costs(10)


def test_an_own_announcement_is_found_by_its_chunks() -> None:
    """Announcing again what 250 announcements hold one chunk each of costs what the text has."""

    def cost(others: int) -> int:
        with Rig(2000, 2000) as rig:
            crowded(rig, others)
            texts = [chunk for n in range(10) for chunk in chain(f"other {n}", 1)]
            steps = operations(lambda: announce(rig, texts, tenant=1))
            assert rig.cache.prefetches.held(1) == others
            rig.cache.check()
            return steps

    assert cost(250) == cost(10)


def test_a_chunk_that_was_brought_anew_has_the_pin_of_its_stay() -> None:
    """An announcement that holds what was invalidated leaves alone what another one brings under the same name."""
    with Rig(RAM, 20) as rig:
        text = chain("a", 1)
        put(rig, text, 0, label=7)
        announce(rig, text)
        land(rig)
        rig.cache.invalidate([Scope(labels=frozenset({7}))], lambda done: None)
        put(rig, text, 0)
        announce(rig, text)
        land(rig)
        announce(rig, text)
        rig.cache.check()
        assert rig.cache.ram.entries[text[0].key].pins == 1
        rig.clock.advance(HOLD_S)
        rig.cache.step()
        rig.cache.check()
        assert not rig.cache.ram.is_pinned and rig.cache.prefetches.ends_s is None


def test_answers_are_looked_at_once() -> None:
    """While tiers answer chunk by chunk, waiting for a text of 400 costs four times one of 100, not sixteen times."""

    def cost(chunks: int) -> int:
        with Rig(RAM, 2 * chunks) as rig, pytest.MonkeyPatch.context() as patched:
            text, known = chain("a", chunks), set[bytes]()
            patched.setattr(rig.tier, "is_asking", lambda key: key not in known)
            announce(rig, text)
            total = 0
            for chunk in text:
                total += operations(rig.cache.prefetches.step)
                known.add(chunk.key)
            return total

    assert cost(400) < 6 * cost(100)


@pytest.mark.parametrize("answers", [True, False])
def test_a_tier_that_must_ask_is_waited_for(answers: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until it has answered, for a while; what it does not answer by then is not there."""
    with Rig(RAM, 20) as rig:
        text, is_known = chain("a", 3), False
        monkeypatch.setattr(rig.tier, "is_asking", lambda key: not is_known)
        told = announce(rig, text)
        rig.cache.step()
        assert not told and rig.cache.prefetches.is_moving
        if answers:
            is_known = True
            rig.put_below(text)
        else:
            rig.clock.advance(ANSWERS_S)
        rig.cache.step()
        assert told == [Found({Tier.DISK: 3}, 3) if answers else Found({}, 0)]
        land(rig)
        assert rig.cache.prefetches.held(0) == (3 if answers else 0)


def test_a_tag_finds_its_chunks_and_what_they_stand_on() -> None:
    """On disk and in RAM; each behind its parent, the longest text first."""
    with Rig(RAM, 40) as rig:
        short, long, other = chain("a", 2), chain("b", 4), chain("c", 2)
        put(rig, long[:2], 1)
        put(rig, long[2:], 1, label=5)
        put(rig, short, 1, label=5)
        put(rig, other, 1, label=6)
        found = rig.cache.labelled(Scope(tenant=1, labels=frozenset({5})))
        assert [chunk.key for chunk in found] == [chunk.key for chunk in [*long, *short]]
        assert by_longest({}) == []


TENANTS = (1, 2, 3)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_prefetch_takes_nobodys_share(data: st.DataObject) -> None:
    """Whoever holds how much: no tenant falls below its floor, and a tenant at its own floor takes room of nobody."""
    floors = data.draw(st.lists(st.sampled_from([None, 0.0, 0.2, 0.33]), min_size=3, max_size=3))
    shares = Shares(by_tenant={tenant: Share(floor) for tenant, floor in zip(TENANTS, floors, strict=True)})
    with Rig(RAM, 100, shares=shares) as rig:
        for n in range(data.draw(st.integers(0, 12))):
            tenant = data.draw(st.sampled_from(TENANTS))
            text = chain(f"{n}", data.draw(st.integers(1, 6)))
            placed = rig.cache.begin_store(text, Reader(terms=Terms(tenant=tenant)))
            rig.cache.end_store([placement.chunk for placement in placed])
            land(rig)
        asker = data.draw(st.sampled_from(TENANTS))
        text = chain("announced", data.draw(st.integers(1, 12)))
        put(rig, text, asker)
        before = dict(rig.cache.ram.usage().tenants)
        announce(rig, text, asker)
        land(rig)
        after = rig.cache.ram.usage().tenants
        prefetches = rig.cache.prefetches
        assert prefetches.held(asker) <= prefetches.most(asker)
        for tenant in {*before} - {asker}:
            lost = before[tenant] - after.get(tenant, 0)
            assert not lost or after[tenant] >= rig.cache.ram.floor(tenant)
            assert not lost or before.get(asker, 0) < rig.cache.ram.floor(asker)


def test_a_paced_load_is_paced_from_its_first_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pace is set before a load is handed to the tier, whose threads begin at once."""
    pace, begun = Pace(), list[bool]()
    with Rig(RAM, 20, pace=pace) as rig:
        submit_load = rig.tier.submit_load

        def noted(*given: Any, **named: Any) -> bool:
            begun.append(pace.is_slow)
            return submit_load(*given, **named)

        monkeypatch.setattr(rig.tier, "submit_load", noted)
        rig.put_below(text := chain("a", 3))
        rig.cache.prefetches.is_busy = True
        announce(rig, text)
        land(rig)
        assert begun == [True] * 3


def test_beside_requests_the_disk_is_paced_until_one_waits_for_it() -> None:
    """One chunk at a time and slowly, where the engine computes on the CPU; at full speed if one waits, or none is."""
    pace = Pace()
    with Rig(RAM, 20, pace=pace) as rig:
        text, other = chain("a", 4), chain("b", 2)
        rig.put_below([*text, *other])
        prefetches = rig.cache.prefetches
        prefetches.is_busy = True
        announce(rig, text)
        rig.cache.step()
        assert pace.is_slow and len(rig.loads) == 1
        reader = Reader()
        assert rig.ask(other, reader) == [Lookup.RETRY] * 2 and not pace.is_slow
        rig.cache.step()
        assert not pace.is_slow and len(rig.loads) == 3
        rig.land_some()
        rig.cache.release(reader)
        rig.cache.step()
        assert pace.is_slow and len(rig.loads) == 1
        prefetches.is_busy = False
        rig.cache.step()
        assert not pace.is_slow and len(rig.loads) == 3
        land(rig)
        prefetches.is_busy = True
        rig.cache.step()
        assert not pace.is_slow


def test_the_end_of_a_prefetch_is_told() -> None:
    """Once, with the chunks that were used and those that were not; without any if nothing was brought."""
    with Rig(RAM, 20) as rig:
        text = chain("a", 3)
        rig.put_below(text)
        ends: list[tuple[int, int]] = []
        for chunks in (text, chain("b", 2)):
            rig.cache.prefetches.begin(chunks, 0, HOLD_S, lambda found: None, lambda *end: ends.append(end))
        assert ends == [(0, 0)]
        land(rig)
        reader = Reader()
        rig.ask(text[:2], reader)
        rig.load(text[:2], reader)
        assert len(ends) == 1
        rig.clock.advance(HOLD_S)
        rig.cache.step()
        assert ends == [(0, 0), (2, 1)]
