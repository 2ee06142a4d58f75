"""What is pinned is evicted last: while the pin lives, up to its quota and its tenant's floor; nothing else changes."""

from itertools import pairwise
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hotspan.cache.entry import Reader
from hotspan.core.terms import Terms
from hotspan.core.types import Chunk, ChunkKey, Tier
from hotspan.testing.chunks import aligned, chain, content
from hotspan.testing.clock import SimulatedClock
from hotspan.tiers.disk import DiskOptions, DiskTier
from hotspan.tiers.pins import MAX_HELD, MAX_PINS, Kept, Pins
from hotspan.tiers.shares import Share, Shares
from tests.operations import operations

from .rig import SIZE, Rig

TAG, HOLD_S = frozenset({7}), 60.0


def store(rig: Rig, chunks: list[Chunk], tenant: int = 0, labels: frozenset[int] = frozenset()) -> None:
    """Into RAM, on a tenant's terms."""
    placed = rig.cache.begin_store(chunks, Reader(terms=Terms(tenant=tenant, labels=labels)))
    rig.cache.end_store([placement.chunk for placement in placed])
    rig.cache.check()


def flood(rig: Rig, count: int, tenant: int = 0) -> None:
    for n in range(count):
        store(rig, chain(f"flood of {tenant}: {n}", 1), tenant)


def kept(rig: Rig, chunks: list[Chunk]) -> int:
    return sum(chunk.key in rig.cache.ram.entries for chunk in chunks)


def test_what_is_pinned_outlives_what_is_not() -> None:
    """A flood larger than RAM leaves it; without the pin, and after its end, it goes."""
    for size, hold_s, left in ((3 * SIZE, HOLD_S, 3), (0, HOLD_S, 0), (3 * SIZE, 0.0, 0)):
        with Rig(8) as rig:
            text = chain("pinned", 3)
            store(rig, text, labels=TAG)
            assert rig.cache.pins.put(0, TAG, size, hold_s)
            flood(rig, 40)
            assert kept(rig, text) == left == rig.cache.usage()[Tier.RAM].pinned_chunks


def test_a_pin_ends() -> None:
    """By its time, or by a pin of the same tags without a quota."""
    for ends_by_time in (True, False):
        with Rig(8) as rig:
            text = chain("pinned", 3)
            store(rig, text, labels=TAG)
            rig.cache.pins.put(0, TAG, 3 * SIZE, HOLD_S)
            flood(rig, 20)
            assert kept(rig, text) == 3
            if ends_by_time:
                rig.clock.advance(HOLD_S)
            else:
                rig.cache.pins.put(0, TAG, 0, HOLD_S)
            for n in range(40):
                store(rig, chain(f"more {n}", 1))
            assert not kept(rig, text) and not rig.cache.usage()[Tier.RAM].pinned_chunks


def test_a_held_prefix_outlives_what_follows_it() -> None:
    """Of a text whose first chunks are pinned by the last of them, these stay until the later of two ends; the rest of
    it goes, and so does the same text of another tenant's pin.
    """
    with Rig(8) as rig:
        text, other = chain("held", 4), chain("not his", 2)
        store(rig, text)
        store(rig, other)
        rig.cache.pins.hold(0, text[1].key, 2 * SIZE, HOLD_S)
        rig.cache.pins.hold(0, text[1].key, 2 * SIZE, HOLD_S / 2)
        rig.cache.pins.hold(9, other[1].key, 2 * SIZE, HOLD_S)
        rig.clock.advance(HOLD_S - 1)
        flood(rig, 40)
        assert [chunk.key in rig.cache.ram.entries for chunk in text] == [True, True, False, False]
        assert not kept(rig, other)
        rig.clock.advance(1)
        for n in range(40):
            store(rig, chain(f"more {n}", 1))
        assert not kept(rig, text)


def test_held_prefixes_are_bounded() -> None:
    """Of too many, those that end first go; pins of tags have their own bound."""
    clock = SimulatedClock()
    pins = Pins(clock)
    for n in range(MAX_HELD + 10):
        pins.hold(0, ChunkKey(bytes([n % 256, n // 256]) * 16), SIZE, HOLD_S + n)
    assert len(pins.of(0)) == MAX_HELD
    assert min(pin.until_s for pin in pins.of(0)) == clock.monotonic() + HOLD_S + 10
    assert pins.put(0, TAG, SIZE, HOLD_S) and len(pins.of(0)) == MAX_HELD + 1


def test_no_more_than_the_quota_is_kept() -> None:
    """Of two texts with the tag, as many chunks as the quota holds stay, each with all that it stands on."""
    with Rig(12) as rig:
        texts = [chain("one", 3), chain("two", 3)]
        for text in texts:
            store(rig, text, labels=TAG)
        rig.cache.pins.put(0, TAG, 4 * SIZE, HOLD_S)
        flood(rig, 60)
        assert sorted(kept(rig, text) for text in texts) in ([1, 3], [0, 3], [2, 2])
        assert rig.cache.usage()[Tier.RAM].pinned_chunks <= 4


def test_no_more_than_the_floor_is_kept() -> None:
    """However large the quotas of a tenant's pins are together."""
    with Rig(8) as rig:
        for n, tag in enumerate((TAG, frozenset({8}))):
            rig.cache.pins.put(0, tag, 8 * SIZE, HOLD_S)
            for m in range(3):
                store(rig, chain(f"text {n} {m}", 1), labels=tag)
        flood(rig, 40)
        assert rig.cache.usage()[Tier.RAM].pinned_chunks == 4 == rig.cache.ram.floor(0)


def test_a_request_finds_room_where_all_is_pinned() -> None:
    """Pinned chunks go when nothing else may."""
    with Rig(4, shares=Shares(by_tenant={0: Share(floor=1.0)})) as rig:
        store(rig, chain("pinned", 4), labels=TAG)
        rig.cache.pins.put(0, TAG, 4 * SIZE, HOLD_S)
        store(rig, chain("new", 2))
        assert kept(rig, chain("new", 2)) == 2


def test_pins_are_bounded() -> None:
    """A tenant has a few; one of the same tags takes the place of its former."""
    pins = Pins(SimulatedClock())
    assert all(pins.put(1, frozenset({n + 1}), SIZE, HOLD_S) for n in range(MAX_PINS))
    assert not pins.put(1, frozenset({1000}), SIZE, HOLD_S) and pins.put(2, frozenset({1000}), SIZE, HOLD_S)
    assert pins.put(1, frozenset({1}), 2 * SIZE, HOLD_S) and len(pins.live()) == MAX_PINS + 1


def test_a_disk_evicts_what_is_pinned_last(tmp_path: Path) -> None:
    """As RAM does."""
    pins = Pins()
    with_pins = DiskOptions(tmp_path / "kv", 8 * (SIZE + 4096), shares=Shares(), pins=pins)
    tier = DiskTier(with_pins, bytes(32), SIZE)
    pins.put(0, TAG, 2 * SIZE, HOLD_S)

    def stored(chunk: Chunk, labels: frozenset[int] = frozenset()) -> None:
        for _ in range(2):  # the second offer may evict
            tier.submit_store(chunk, Terms(labels=labels), aligned(SIZE, content(chunk.key, SIZE)))
        while tier._storing:
            tier.wait(1.0)
            tier.finished()

    text = chain("pinned", 2)
    for chunk in text:
        stored(chunk, TAG)
    for n in range(30):
        stored(*chain(f"flood {n}", 1))
    assert all(tier.lookup(chunk.key) for chunk in text) and tier.kept.chunks == 2 and tier.losses.evicted > 20
    tier.check()
    tier.close(5.0)


TENANTS = (1, 2, 3)


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_pins_take_nobodys_share(data: st.DataObject) -> None:
    """However tenants pin and store: none that has its floor or less loses a chunk to others."""
    with Rig(16, shares=Shares(by_tenant={1: Share(floor=0.3)})) as rig:
        quotas = {tenant: data.draw(st.integers(0, 20)) for tenant in TENANTS}
        for tenant, quota in quotas.items():
            rig.cache.pins.put(tenant, TAG, quota * SIZE, HOLD_S)
        for n in range(data.draw(st.integers(1, 30))):
            tenant = data.draw(st.sampled_from(TENANTS))
            before = rig.cache.ram.usage().tenants
            labels = data.draw(st.sampled_from([TAG, frozenset()]))
            store(rig, chain(f"text {n}", data.draw(st.integers(1, 3))), tenant, labels)
            after = rig.cache.ram.usage().tenants
            for other in {*before} - {tenant}:
                assert after.get(other, 0) >= min(before[other], rig.cache.ram.floor(other))
            for each in TENANTS:
                assert rig.cache.ram.kept.of(each) <= min(quotas[each], after.get(each, 0))


def test_an_eviction_costs_the_same_whatever_is_pinned() -> None:
    """63 pins of one tenant, of other quotas each and on a long text, make an eviction walk the text once; pins of
    other tenants add nothing. Counted: the look-ups of parents, and the steps of Python."""
    walked = [0]
    path = [chunk.key for chunk in chain("long", 1000)]
    parents = dict(pairwise(reversed(path)))

    def parent(key: ChunkKey) -> ChunkKey | None:
        walked[0] += 1
        return parents.get(key)

    def cost(pins: Pins) -> tuple[int, int]:
        kept, walked[0] = Kept(pins, SIZE, lambda tenant: 100_000, parent), 0
        steps = operations(lambda: kept.keeps(path[-1], lambda key: Terms(labels=frozenset(range(200)))))
        kept.check()
        return walked[0], steps

    none, one, many = Pins(SimulatedClock()), Pins(SimulatedClock()), Pins(SimulatedClock())
    one.put(0, frozenset({1}), 999 * SIZE, HOLD_S)
    for n in range(63):
        many.put(0, frozenset({n}), (999 - n) * SIZE, HOLD_S)
    assert cost(none)[0] == 0 and cost(one)[0] == cost(many)[0] == 1000
    assert cost(many)[1] < cost(one)[1] + 2000
    before = cost(many)
    for tenant in range(1, 500):
        many.put(tenant, frozenset({1}), SIZE, HOLD_S)
    assert cost(many) == before
    many.put(0, frozenset({100}), 1000 * SIZE, HOLD_S)
    assert cost(many)[0] == 1000


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_what_is_kept_is_what_one_pin_after_the_other_would_keep(data: st.DataObject) -> None:
    """Whether a chunk is kept is what a plain search over all pins finds, and the counts are true after every step."""
    clock, floor = SimulatedClock(), [5]
    pins = Pins(clock)
    keys = [chunk.key for text in ("a", "b") for chunk in chain(text, 4)]
    parents = {key: keys[at - 1] for at, key in enumerate(keys) if at % 4}
    kept = Kept(pins, SIZE, lambda tenant: floor[0], parents.get)

    def expected(key: ChunkKey) -> bool:
        for pin in pins.of(0):
            mine, path = kept._counts.get(pin, 0), 0
            at: ChunkKey | None = key
            while at is not None and pin not in kept._keepers.get(at, ()):
                path, at = path + 1, parents.get(at)
            if path <= min(pin.bytes // SIZE - mine, floor[0] - kept.of(0)):
                return True
        return False

    for _ in range(data.draw(st.integers(1, 30))):
        match data.draw(st.sampled_from(["put", "keeps", "left", "floor", "time"])):
            case "put":
                pins.put(0, frozenset({data.draw(st.integers(0, 3))}), data.draw(st.integers(0, 6)) * SIZE, HOLD_S)
            case "keeps":
                key = data.draw(st.sampled_from(keys))
                kept.chunks  # noqa: B018  forgets what has ended
                wanted = expected(key)
                assert kept.keeps(key, lambda key: Terms(labels=frozenset(range(4)))) is wanted
            case "left":
                kept.left(data.draw(st.sampled_from(keys)))
            case "floor":
                floor[0] = data.draw(st.integers(0, 8))
            case "time":
                clock.advance(data.draw(st.sampled_from([1.0, HOLD_S])))
        kept.chunks  # noqa: B018
        kept.check()
