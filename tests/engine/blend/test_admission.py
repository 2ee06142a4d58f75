"""The scheduler's half of blending over a real cache, without an engine: what is stored, reused, held and let go."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hotspan.cache.tiered import TieredCache
from hotspan.core.directives import BlendDirective
from hotspan.core.namespace import ChunkKeyer
from hotspan.core.terms import Scope, Terms
from hotspan.core.types import PAGE_BYTES, ChunkKey, Tier
from hotspan.engine.blend.agreement import LEAST
from hotspan.engine.blend.orders import Checked, Report, Selection
from hotspan.engine.blend.selectors import Selector
from hotspan.engine.requests import RequestRecord
from hotspan.tiers.slab import SharedSlab

from .scheduler import BLOCK, KEYER, WINDOW, Scheduler, learnt


@pytest.fixture
def cache() -> Iterator[TieredCache]:
    slab = SharedSlab("blend-admission", 32, PAGE_BYTES, Path("/dev/shm"))
    slab.unlink()
    cache = TieredCache(slab)
    yield cache
    cache.check()
    assert not any(entry.pins for entry in cache.ram.entries.values())
    cache.close(0.0)


@pytest.fixture
def scheduler(cache: TieredCache) -> Scheduler:
    return Scheduler(cache)


def forget_windows(cache: TieredCache) -> None:
    """As if there had been no room for them."""
    for entry in list(cache.ram.entries.values()):
        cache._forget_one(entry)


def test_the_second_sighting_is_stored_and_the_third_reused(scheduler: Scheduler) -> None:
    """With counts of what was reused, computed again, and computed of no window; the block names are private then."""
    learnt(scheduler)
    request = scheduler.request(0, 1)
    names = list(request.block_hashes)
    assert scheduler.run(request) == {"mode": "first_k", "reused": 4 * WINDOW - 1, "recomputed": 8, "fresh": 24}
    assert [one == other for one, other in zip(names, request.block_hashes, strict=True)] == [True] + [False] * 16
    stats = scheduler.cache.take_stats()
    assert stats.blends == {"blended": 1} and stats.windows_stored == 4 and stats.is_blending


def test_a_blended_request_leaves_nothing(scheduler: Scheduler) -> None:
    """Neither its chunks nor windows in it that were seen a second time."""
    learnt(scheduler)
    scheduler.run(scheduler.request(2))
    request = scheduler.request(0, 2, 1)
    record = RequestRecord(request=request, keyer=KEYER, groups=())
    assert scheduler.run(request, record) is not None
    assert scheduler.windows == 4 and not record.may_store


@pytest.mark.parametrize(
    "fields",
    [
        {"cache_salt": "s"},
        {"lora_request": "adapter"},
        {"mm_features": ["image"]},
        {"prompt_embeds": "embedded"},
        {"pooling_params": "pooling"},
        {"skip_reading_prefix_cache": True},
        {"num_preemptions": 1},
        {"num_output_tokens": 1},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_other_requests_are_computed(scheduler: Scheduler, fields: dict[str, Any]) -> None:
    """Another salt finds nothing; what is no plain text that begins is never blended."""
    learnt(scheduler)
    request = scheduler.request(0, 1, **fields)
    assert scheduler.match(request) == 0
    scheduler.blending.end(request.request_id)


@pytest.mark.parametrize(
    ("mode", "asked", "expected"),
    [("first_k", None, True), ("first_k", False, False), ("allowed", None, False), ("allowed", True, True)],
)
def test_server_and_request_decide(cache: TieredCache, mode: str, asked: bool | None, expected: bool) -> None:
    """A request may refuse; where it is only allowed, it has to ask."""
    scheduler = Scheduler(cache, mode)
    learnt(scheduler)
    request = scheduler.request(0, 1)
    record = RequestRecord(request=request, keyer=KEYER, groups=(), blend=asked)
    assert (scheduler.run(request, record) is not None) == expected


@pytest.mark.parametrize("record", [{"keyer": None}, {"keyer": ChunkKeyer(bytes(32), tenant=bytes(31) + b"b")}])
def test_others_find_nothing(scheduler: Scheduler, record: dict[str, Any]) -> None:
    """Who has no names for chunks, or is another tenant."""
    learnt(scheduler)
    request = scheduler.request(0, 1)
    assert scheduler.run(request, RequestRecord(request=request, groups=(), **record)) is None


def test_exact_loads_go_first(scheduler: Scheduler) -> None:
    """A request that loads an exact prefix from the tiers is blended only if that saves more of the rest."""
    learnt(scheduler)
    request = scheduler.request(0, 1)
    assert scheduler.match(request, loaded=16 * BLOCK) == 0
    scheduler.blending.end(request.request_id)
    request = scheduler.request(0, 1)
    assert scheduler.match(request, loaded=BLOCK) == len(request.prompt_token_ids) - 1
    scheduler.blending.end(request.request_id)


def test_a_window_that_left_ram_is_stored_again(scheduler: Scheduler) -> None:
    """Its sighting counts as the second one."""
    learnt(scheduler)
    forget_windows(scheduler.cache)
    assert scheduler.run(scheduler.request(0, 1)) is None and scheduler.windows == 4
    assert scheduler.run(scheduler.request(1, 0)) is not None


def test_an_invalidated_text_takes_all_windows_of_its_tenant(scheduler: Scheduler) -> None:
    """A text's windows are not known by its chunks' names."""
    learnt(scheduler)
    key = frozenset([ChunkKey(bytes(32))])
    others = [Scope(tenant=Terms().tenant + 1, keys=key), Scope(labels=frozenset([1]))]
    assert scheduler.cache.invalidate(others, lambda done: None)[Tier.RAM] == 0 and scheduler.windows == 4
    assert scheduler.cache.invalidate([Scope(Terms().tenant, keys=key)], lambda done: None)[Tier.RAM] == 4
    assert scheduler.windows == 0


def test_an_invalidated_request_stores_no_window(scheduler: Scheduler) -> None:
    """Though its windows were seen before."""
    scheduler.run(scheduler.request(0, 1))
    request = scheduler.request(1, 0)
    record = RequestRecord(request=request, keyer=KEYER, groups=())
    scheduler.match(request, record)
    record.may_store = False
    assert scheduler.step(request) is None and scheduler.windows == 0
    scheduler.blending.end(request.request_id)


def test_what_a_step_has_computed_is_stored_in_it(scheduler: Scheduler) -> None:
    """Window by window, as prefill goes on."""
    scheduler.run(scheduler.request(0, 1, 2))
    request = scheduler.request(2, 0, 1)
    scheduler.match(request)
    starts = []
    for computed in (60, 100, 400):
        orders = scheduler.step(request, computed - request.num_computed_tokens)
        request.num_computed_tokens = computed
        starts.append([store.start for store in orders.stores] if orders is not None else [])
    assert starts == [[], [22], [86, 152, 216, 282]]
    scheduler.blending.note(Report(unstored=list(scheduler.blending._store._storing), done=scheduler.blending._orders))
    assert scheduler.windows == 0
    scheduler.blending.end(request.request_id)


@pytest.mark.parametrize("steps", [(560,), (270, 290), (500, 60), (20, 20, 520)])
def test_every_window_is_stored_however_much_a_step_computes(scheduler: Scheduler, steps: tuple[int, ...]) -> None:
    """All eight of a prompt, in the step that computes them."""
    scheduler.run(scheduler.request(0, 1, 2, 3))
    request = scheduler.request(3, 2, 1, 0)
    scheduler.match(request)
    stored = 0
    for tokens in steps:
        orders = scheduler.step(request, tokens)
        request.num_computed_tokens += tokens
        stored += len(orders.stores) if orders is not None else 0
    assert stored == 8
    scheduler.blending.note(Report(stored=list(scheduler.blending._store._storing), done=scheduler.blending._orders))
    assert scheduler.windows == 8
    scheduler.blending.end(request.request_id)


def test_windows_beyond_a_steps_limit_are_stored_after_the_next(scheduler: Scheduler) -> None:
    """Also while the answer is written; not once the request may store no more."""
    scheduler.run(scheduler.request(0, 1, 2, 3))
    request = scheduler.request(3, 2, 1, 0)
    record = RequestRecord(request=request, keyer=KEYER, groups=())
    scheduler.match(request, record)
    request.num_computed_tokens = 545
    starts = []
    for tokens in (2, 1, 1):
        orders = scheduler.step(request, tokens)
        request.num_computed_tokens += tokens
        starts.append([store.start for store in orders.stores] if orders is not None else [])
        record.may_store = len(starts) < 2
    assert [len(each) for each in starts] == [4, 4, 0] and sorted(starts[0] + starts[1]) == starts[0] + starts[1]
    scheduler.blending.note(Report(unstored=list(scheduler.blending._store._storing), done=scheduler.blending._orders))
    scheduler.blending.end(request.request_id)


def test_an_abort_cancels_the_blend(scheduler: Scheduler) -> None:
    """Its windows stay until the worker has let go of them."""
    learnt(scheduler)
    request = scheduler.request(0, 1)
    scheduler.match(request)
    scheduler.blending.begin(request, list(range(99)))
    first = scheduler.step(request, 0)
    assert scheduler.blending.end(request.request_id) is None and scheduler.blending.is_busy
    second = scheduler.step(request, 0)
    assert first is not None and second is not None and second.cancelled == [first.blends[0].number]
    scheduler.blending.note(Report(ended=second.cancelled))
    assert not scheduler.blending.is_busy and scheduler.cache.stats.blends == {"cancelled": 1}


def test_a_cleared_cache_waits_for_what_is_in_flight(scheduler: Scheduler) -> None:
    """Slots that the worker still reads or writes are given to nobody."""
    learnt(scheduler)
    blended, storing = scheduler.request(0, 1), scheduler.request(2)
    scheduler.run(scheduler.request(2))
    scheduler.match(blended)
    scheduler.blending.begin(blended, list(range(99)))
    scheduler.match(storing)
    orders = scheduler.step(storing)
    assert orders is not None and orders.stores and orders.blends
    scheduler.cache.clear()
    scheduler.blending.clear()
    assert scheduler.blending.is_stale
    scheduler.blending.note(
        Report(ended=[orders.blends[0].number], stored=[store.key for store in orders.stores], done=orders.number)
    )
    assert not scheduler.blending.is_stale and scheduler.windows == 0
    scheduler.cache.end_clear()
    for request in (blended, storing):
        scheduler.blending.end(request.request_id)
    assert scheduler.run(scheduler.request(0, 1)) is None and scheduler.windows == 4


def test_a_worker_that_can_not_turns_it_off(cache: TieredCache) -> None:
    """And so do three failures in a row, with a reason."""
    scheduler = Scheduler(cache)
    learnt(scheduler)
    for _ in range(3):
        request = scheduler.request(0, 1)
        assert scheduler.match(request)
        scheduler.blending.begin(request, list(range(99)))
        orders = scheduler.step(request, 0)
        assert orders is not None
        number = orders.blends[0].number
        scheduler.blending.note(Report(ended=[number], failed=[number]))
        assert scheduler.blending.end(request.request_id) is None
    assert scheduler.blending.off == "3 blends in a row failed" and scheduler.cache.stats.is_blending is False
    assert scheduler.match(scheduler.request(0, 1)) == 0
    other = Scheduler(cache)
    other.blending.note(Report(off="KV events"))
    assert other.blending.off == "KV events" and other.match(other.request(0, 1)) == 0


class Pool:
    """An engine's blocks, as far as checks know them."""

    num_gpu_blocks = free = 200

    def get_num_free_blocks(self) -> int:
        return self.free

    def get_new_blocks(self, count: int) -> list[Any]:
        self.free -= count
        return [SimpleNamespace(block_id=number) for number in range(count)]

    def free_blocks(self, blocks: list[Any]) -> None:
        self.free += len(blocks)


def test_a_planted_drift_turns_blending_off(scheduler: Scheduler) -> None:
    """Every second blend is checked when its request has ended, in blocks that come back, and is reported."""
    learnt(scheduler)
    pool: Any = Pool()
    scheduler.blending.checks.bind(pool)
    for number in range(2 * LEAST):
        request = scheduler.request(number % 2, 1 - number % 2)
        assert scheduler.run(request) is not None
        orders = scheduler.step(request, 0)
        assert (orders is None) == (number % 2 == 0)
        if orders is not None:
            (check,) = orders.checks
            assert check.tokens.tolist() == request.prompt_token_ids and orders.check_budget == 512
            assert scheduler.blending.is_busy and pool.free < 200
            scheduler.blending.note(Report(checked={check.number: Checked(False, 1.0)}))
    assert scheduler.blending.off is not None and "only 0 of 10" in scheduler.blending.off
    assert pool.free == 200 and not scheduler.blending.is_busy
    assert scheduler.match(scheduler.request(0, 1)) == 0
    stats = scheduler.cache.take_stats()
    assert stats.is_blending is False and stats.blend_checks == {"differed": LEAST} and stats.blend_agreement == 0.0


@pytest.mark.parametrize(
    ("mode", "asked", "expected"),
    [
        ("query", None, Selection(Selector.QUERY, 0.15, 2)),
        ("query", True, Selection(Selector.QUERY, 0.15, 2)),
        ("query", BlendDirective("deviation", 0.1), Selection(Selector.DEVIATION, 0.1, 2)),
        ("deviation", BlendDirective(recompute_ratio=0.2), Selection(Selector.DEVIATION, 0.2, 2)),
        ("allowed", BlendDirective("query", check_layer=5), Selection(Selector.QUERY, 0.15, 5)),
        ("allowed", True, None),
        ("query", BlendDirective("first_k"), None),
    ],
)
def test_a_request_names_its_selector(
    cache: TieredCache, mode: str, asked: bool | BlendDirective | None, expected: Selection | None
) -> None:
    """Or has the server's. The worker gets it; what it chose, which it says steps before the end, is in the answer."""
    scheduler = Scheduler(cache, mode)
    for order in ((0, 1), (1, 0)):
        scheduler.run(scheduler.request(*order))
    request = scheduler.request(1, 0)
    record = RequestRecord(request=request, keyer=KEYER, groups=(), blend=asked)
    assert scheduler.match(request, record)
    assert scheduler.blending.begin(request, list(range(99))) is not None
    orders = scheduler.step(request, 1)
    assert orders is not None and orders.blends[0].selection == expected
    first = 2 * 4 if expected is None else 0
    number = orders.blends[0].number
    scheduler.blending.note(Report(selected={number: 40} if expected else {}))
    scheduler.blending.note(Report(ended=[number]))
    said = scheduler.blending.end(request.request_id)
    assert said is not None and said["recomputed"] == (40 if expected else first)
    assert said["mode"] == (expected.selector.value if expected else "first_k")


@pytest.mark.parametrize("mode", ["deviation", "query"])
def test_a_share_of_nothing_needs_no_choice(cache: TieredCache, mode: str) -> None:
    """The worker computes what is in no window, and no forward to choose what it would not compute."""
    scheduler = Scheduler(cache, mode)
    for order in ((0, 1), (1, 0)):
        scheduler.run(scheduler.request(*order))
    request = scheduler.request(1, 0)
    record = RequestRecord(request=request, keyer=KEYER, groups=(), blend=BlendDirective(recompute_ratio=0.0))
    assert scheduler.match(request, record)
    plan = scheduler.blending.begin(request, list(range(99)))
    orders = scheduler.step(request, 1)
    assert plan is not None and orders is not None
    (job,) = orders.blends
    assert job.selection is None and job.computed == list(plan.fresh)
    scheduler.blending.note(Report(ended=[job.number]))
    said = scheduler.blending.end(request.request_id)
    assert said is not None and (said["mode"], said["recomputed"]) == (mode, 0)
