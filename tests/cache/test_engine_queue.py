"""What the cost model is told of the engine: who would be delayed, how busy it is, how long it may be held up."""

from hotspan.cache.choice import Run
from hotspan.cache.cost import CostModel
from hotspan.cache.engine_queue import EngineQueue
from hotspan.core.types import MIB, Tier
from hotspan.testing.clock import SimulatedClock

CHUNK = 256


def engine_queue() -> tuple[EngineQueue, SimulatedClock]:
    """Of an engine that computes 1,000 tokens a second, and of which that is known."""
    clock = SimulatedClock()
    cost = CostModel(2048, {Tier.DISK: 4}, clock)
    for tokens in (2048, 512, 64) * 8:
        cost.observe_step(tokens, 0, tokens / 1000)
    return EngineQueue(cost, 2048, clock), clock


def test_others_are_those_that_run_and_those_that_wait_to_be_computed() -> None:
    """A request delays all others, but for itself and for those that wait for tiers."""
    load, _ = engine_queue()
    for name in "abcd":
        load.arrive(name)
    load.admit("a", 1000, 0)
    text = load.text("b", 1000, CHUNK, waiting=1)
    assert (text.others, text.waiting) == (2, 1)
    load.forget("a")
    load.forget("c")
    assert load.text("b", 1000, CHUNK).others == 1


def test_a_request_has_waited_since_it_came() -> None:
    """What is told of a request counts from its arrival, not from when the scheduler came to it."""
    load, clock = engine_queue()
    load.arrive("a")
    clock.advance(3.0)
    assert load.text("a", 1000, CHUNK).waited_s == 3.0


def test_the_share_of_busy_time_follows_the_steps() -> None:
    """An engine that computes three quarters of the time is told to be about that busy."""
    load, clock = engine_queue()
    for number in range(400):
        load.arrive(str(number))
        load.forget(str(number))
        load.begin(0, 0, 1)
        clock.advance(0.75)
        load.end()
        clock.advance(0.25)
    text = load.text("a", 1000, CHUNK)
    assert 0.6 < text.utilization < 0.9
    assert 0.9 < text.per_s < 1.1


def test_an_idle_engine_may_be_held_up_and_a_busy_one_for_a_tenth_of_a_step() -> None:
    """Copies hold up nobody where nothing runs; else they are short beside the step."""
    load, _ = engine_queue()
    assert load.may_stall(10.0)
    load.admit("a", 1000, 0)
    assert load.may_stall(0.09) and not load.may_stall(0.2)


def with_disk(load: EngineQueue, seconds: float) -> CostModel:
    """The model, once it knows a disk whose transfers take so long, however many there are."""
    for _ in range(40):
        load._cost.begin_load(Tier.DISK, MIB)
        load._cost.end_load(Tier.DISK, MIB, seconds)
    return load._cost


CHAIN = [Run(Tier.DISK, 4, MIB)]


def test_a_busy_engine_loads_what_an_idle_one_computes() -> None:
    """A tier that is slower than the engine is used while seven others wait for the engine, and not while it idles."""
    load, clock = engine_queue()
    cost = with_disk(load, 1.5)
    assert cost.cut(load.text("x", 1030, CHUNK), CHAIN).chunks == 0
    clock.advance(1000.0)
    for number in range(7):
        load.arrive(str(number))
        load.admit(str(number), 1030, 0)
    load.begin(2048, 0, 2048)
    assert cost.cut(load.text("x", 1030, CHUNK), CHAIN).chunks == 4


def test_refusals_are_counted_with_what_they_cost() -> None:
    """What is slower to load would win nothing; what may take too long, what the model expected of it."""
    load, _ = engine_queue()
    cost = with_disk(load, 1.5)
    cost.cut(load.text("x", 1030, CHUNK), CHAIN)
    slower = cost.report().refusals["slower", False]
    assert (slower.requests, slower.tokens, slower.saved_s) == (1, 4 * CHUNK, 0.0)
    load, _ = engine_queue()
    cost = with_disk(load, 0.5)
    cost._trust = 0.0
    cost.cut(load.text("x", 1030, CHUNK), CHAIN)
    bound = cost.report().refusals["bound", False]
    assert (bound.requests, bound.tokens) == (1, 4 * CHUNK)
    assert 0.3 < bound.saved_s < 0.6
