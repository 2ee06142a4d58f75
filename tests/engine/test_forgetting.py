"""What an owner takes back is never served again: not from the engine's own prefix cache, RAM or disk."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from hotspan.core.directives import RetentionRule
from hotspan.core.terms import Scope
from hotspan.testing.clock import SimulatedClock

from .harness.core import CHUNK, Core, core

BLOCK = 128
LENGTH = 900
"""Tokens of a text: three chunks and a bit; the engine's own cache finds seven blocks of 128 in it."""

OWN = LENGTH // BLOCK * BLOCK
WHOLE = LENGTH // CHUNK * CHUNK


@pytest.fixture(scope="module")
def clock() -> SimulatedClock:
    return SimulatedClock()


@pytest.fixture(scope="module")
def engine(tiny_model: Path, clock: SimulatedClock, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Core]:
    rules = (RetentionRule(tag="brief", ttl_s=60), RetentionRule(tag="secret", no_store=True))
    disk = tmp_path_factory.mktemp("forgetting") / "kv"
    with running(tiny_model, disk=disk, clock=clock, cache={"retention": rules}) as engine:
        yield engine
        engine.check()


@pytest.fixture(autouse=True)
def _books_agree(engine: Core) -> Iterator[None]:
    yield
    engine.settle()
    engine.check()


@pytest.fixture
def later(clock: SimulatedClock) -> Callable[[float], None]:
    """Lets it be so many seconds after the test's beginning."""
    began_s = clock.monotonic()
    return lambda seconds: clock.advance(began_s + seconds - clock.monotonic())


def running(model: Path, disk: Path, **options: Any) -> AbstractContextManager[Core]:
    return core(model, disk=disk, block_size=BLOCK, num_gpu_blocks_override=48, **options)


def stored(engine: Core, seed: int, **directives: object) -> list[int]:
    """A text that lies on every tier."""
    prompt = engine.text(seed, LENGTH)
    engine.ask(prompt, 1, **directives)
    engine.settle()
    return prompt


def cached_below(engine: Core, prompt: list[int]) -> int:
    """Tokens that hotspan's tiers give when the engine's own cache has nothing."""
    engine.forget_gpu()
    return engine.ask(prompt, 1)


def test_a_tag_takes_its_text_from_every_tier(engine: Core) -> None:
    """After the receipt nothing of the document is found, on the GPU, in RAM or on disk; another document is."""
    first, second = (stored(engine, 10 + n, tags=[f"doc-{n}"]) for n in range(2))
    receipt = engine.administer(do="invalidate", tags=["doc-0"])
    assert receipt["is_durable"]
    removed = receipt["removed"]
    assert (removed["gpu_blocks"], removed["ram_chunks"], removed["disk_chunks"]) == (OWN // BLOCK, 3, 3)
    assert engine.ask(first, 1) == 0
    assert engine.ask(second, 1) == OWN
    assert cached_below(engine, second) == WHOLE


def test_a_version_goes_alone_and_with_its_document(engine: Core) -> None:
    """`name@2` takes that version only, `name` takes all."""
    old, new = (stored(engine, 20 + n, tags=[f"manual@{n}"]) for n in range(2))
    engine.administer(do="invalidate", tags=["manual@0"])
    assert (engine.ask(old, 1), engine.ask(new, 1)) == (0, OWN)
    engine.administer(do="invalidate", tags=["manual"])
    assert engine.ask(new, 1) == 0


def test_what_was_computed_on_top_goes_too(engine: Core) -> None:
    """An untagged request that continued a tagged text loses its continuation as well."""
    prompt = stored(engine, 30, tags=["base"])
    longer = prompt[:WHOLE] + engine.text(31, 600)
    assert engine.ask(longer, 1) > 0
    engine.settle()
    engine.administer(do="invalidate", tags=["base"])
    assert engine.ask(longer, 1) == 0


@pytest.mark.parametrize("below", [False, True])
def test_tags_can_begin_behind_a_shared_beginning(engine: Core, below: bool) -> None:
    """With `tags_from` the system prompt before the document stays, in the engine's own cache and in the tiers."""
    prompt = engine.text(40 + below, 2 * CHUNK) + engine.text(42, 700)
    engine.ask(prompt, 1, tags=["tail"], tags_from=2 * CHUNK)
    engine.settle()
    engine.administer(do="invalidate", tags=["tail"])
    assert (cached_below(engine, prompt) if below else engine.ask(prompt, 1)) == 2 * CHUNK


def test_a_hit_in_the_engines_own_cache_leaves_its_tag(engine: Core) -> None:
    """A chunk carries the tag of a request that found it on the GPU and never asked the tiers."""
    prompt = stored(engine, 50)
    assert engine.ask(prompt, 1, tags=["later"]) == OWN
    engine.administer(do="invalidate", tags=["later"])
    assert cached_below(engine, prompt) == 0


def test_a_request_that_has_just_ended_leaves_nothing(engine: Core) -> None:
    """Its last chunks may be stored in the step after its end; an invalidation in between finds it, and keeps none."""
    prompt = engine.text(160, 3 * CHUNK)
    engine.start("160001", prompt, 1, tags=["ended"])
    while "160001" not in engine.step():
        pass
    assert engine.administer(do="invalidate", tags=["ended"])["requests_in_flight"] == 1
    engine.settle()
    assert engine.ask(prompt, 1) == 0
    engine.step()
    assert not engine.core.scheduler.connector.manager._records


def named(by: str, prompt: list[int]) -> dict[str, object]:
    """What an invalidation names."""
    return {"tags": ["moving"]} if by == "tag" else {"tenant": "default", "tokens": prompt}


@pytest.mark.parametrize("by", ["tag", "tokens"])
def test_a_running_request_leaves_nothing(engine: Core, by: str) -> None:
    """A request that runs goes on to its end, whether all of its text is named or the beginning; neither what it had
    computed nor what it computes later is ever found."""
    prompt = engine.text(60 if by == "tag" else 61, 3000)
    engine.start("running", prompt, 300, tags=["moving"])
    engine.step(2)
    receipt = engine.administer(do="invalidate", **named(by, prompt[:LENGTH]))
    assert receipt["requests_in_flight"] == 1 and receipt["removed"]["gpu_blocks"] > 0
    engine.step(3)
    engine.start("meanwhile", prompt[:2900], 1, no_store=True)
    assert engine.finish() == {"running": 0, "meanwhile": 0}
    engine.settle()
    assert engine.ask(prompt, 1) == 0


@pytest.mark.parametrize("by", ["tag", "tokens"])
def test_a_waiting_request_leaves_nothing_either(engine: Core, by: str) -> None:
    """A request that was admitted before the invalidation and begins to run after it is not found, while it runs and
    when it has ended."""
    prompt = engine.text(65 if by == "tag" else 68, LENGTH)
    engine.start("waiting", prompt, 20, tags=["moving"])
    receipt = engine.administer(do="invalidate", **named(by, prompt))
    assert receipt["requests_in_flight"] == 1 and receipt["is_durable"]
    engine.step(3)
    engine.start("meanwhile", prompt, no_store=True)
    assert engine.finish() == {"waiting": 0, "meanwhile": 0}
    engine.settle()
    assert engine.ask(prompt, 1) == 0


@pytest.mark.parametrize("by", ["tag", "tokens", "everything"])
def test_a_text_that_was_held_leaves_nothing(engine: Core, later: Callable[[float], None], by: str) -> None:
    """A request whose text was held elsewhere while it was invalidated is answered, and nothing of it is ever found.

    One that is of another tag, or whose text has come since, is kept as ever.
    """
    seed = {"tag": 62, "tokens": 63, "everything": 64}[by]
    prompt, other = engine.text(seed, LENGTH), engine.text(seed + 1000, LENGTH)
    scope = {"tenant": "default"} if by == "everything" else named(by, prompt)
    held = {"tenant": "default", "tags": ["moving"], "held_since": later_s(later, 10.0, engine)}
    later(11.0)
    assert engine.administer(do="invalidate", **scope)["is_durable"]
    later(12.0)
    assert engine.ask(prompt, 1, hotspan=held) == 0
    engine.settle()
    assert engine.ask(prompt, 1, no_store=True) == 0
    fresh = {"tenant": "default", "tags": ["moving"], "held_since": later_s(later, 12.0, engine)}
    engine.ask(prompt, 1, hotspan=fresh)
    engine.settle()
    assert engine.ask(prompt, 1) > 0
    if by != "everything":
        engine.ask(other, 1, hotspan=held | {"tags": ["staying"]})
        engine.settle()
        assert engine.ask(other, 1) > 0


def later_s(later: Callable[[float], None], seconds: float, engine: Core) -> float:
    """The monotonic time, so many seconds after the test's beginning."""
    later(seconds)
    return engine.core.scheduler.connector.manager._clock.monotonic()


def test_a_chunk_keeps_its_tags_on_every_way(engine: Core) -> None:
    """Loaded from below by an untagged request, and kept by the engine alone, or stored from there anew: it is found by
    its tag."""
    prompt = stored(engine, 66, tags=["travelling"])
    engine.forget_gpu()
    assert engine.ask(prompt, 1) == WHOLE  # untagged; from RAM into the engine's own cache
    engine.evict_ram()
    engine.cache._lower.tiers[0].storage.invalidate([Scope()], lambda done: None)  # as if evicted
    engine.settle()
    engine.ask(prompt + engine.text(67, 600), 1)
    engine.settle()  # untagged; from the engine's own cache into RAM
    engine.administer(do="invalidate", tags=["travelling"])
    assert engine.ask(prompt, 1) == 0  # neither in the engine's own cache nor in RAM


def test_a_store_in_flight_brings_nothing_back(engine: Core) -> None:
    """Copies and writes that were on their way when the invalidation came end nowhere."""
    prompt = engine.text(70, 2000)
    engine.start("70001", prompt, 1, tags=["flying"])
    engine.finish()
    engine.administer(do="invalidate", tags=["flying"])
    engine.settle()
    assert engine.ask(prompt, 1) == 0
    assert engine.administer(do="check")["tiers"]["disk"]["corrupt"] == {}


def test_sessions_and_tenants_go_by_name(engine: Core) -> None:
    """A session takes its turns; a tenant takes everything of its own."""
    prompt = stored(engine, 80, session="chat-7")
    assert engine.administer(do="invalidate", session="chat-8")["removed"]["ram_chunks"] == 0
    assert engine.ask(prompt, 1) == OWN
    engine.administer(do="invalidate", session="chat-7")
    assert engine.ask(prompt, 1) == 0
    prompt = stored(engine, 81)
    assert engine.administer(do="invalidate", tenant="nobody")["removed"]["ram_chunks"] == 0
    assert engine.ask(prompt, 1) == OWN
    assert engine.administer(do="invalidate", tenant="default")["removed"]["ram_chunks"] > 0
    assert engine.ask(prompt, 1) == 0


def test_a_text_goes_by_its_tokens(engine: Core) -> None:
    """Named by its tokens a text goes, and what shares no chunk with it stays; `tokens_from` spares its beginning."""
    prompt, other = stored(engine, 90), stored(engine, 91)
    engine.administer(do="invalidate", tenant="default", tokens=prompt, tokens_from=2 * CHUNK)
    assert engine.ask(prompt, 1) == 2 * CHUNK
    engine.administer(do="invalidate", tenant="default", tokens=prompt)
    assert engine.ask(prompt, 1) == 0
    assert engine.ask(other, 1) == OWN


def test_a_model_goes_whole(engine: Core) -> None:
    """Everything of this model and layout goes."""
    prompt = stored(engine, 95)
    engine.administer(do="invalidate", model=True)
    assert engine.ask(prompt, 1) == 0
    assert engine.cache.usage()[next(iter(engine.cache.usage()))].chunks <= 4


def test_time_runs_out_on_every_tier(engine: Core, later: Callable[[float], None]) -> None:
    """Past its time to live a text is found neither on the GPU nor below, and before it is."""
    prompt = stored(engine, 100, ttl=100)
    later(90)
    assert engine.ask(prompt, 1) == OWN
    later(102)
    assert engine.ask(prompt, 1) == 0
    other = stored(engine, 101, ttl=100)
    later(250)
    assert cached_below(engine, other) == 0


def test_a_hit_does_not_renew_unless_asked(engine: Core, later: Callable[[float], None]) -> None:
    """The shortest time that applied holds; a request may ask to begin it anew, on every tier."""
    prompt = stored(engine, 110, ttl=100)
    later(60)
    engine.ask(prompt, 1, ttl=1000)
    engine.forget_gpu()
    later(102)
    assert cached_below(engine, prompt) == 0
    prompt = stored(engine, 111, ttl=100)
    engine.forget_gpu()
    later(160)
    assert engine.ask(prompt, 1, ttl=100, renew=True) == WHOLE
    engine.settle()
    later(230)
    assert cached_below(engine, prompt) == WHOLE


def test_rules_of_retention_hold_for_every_request(engine: Core, later: Callable[[float], None]) -> None:
    """A rule on a tag shortens what the request asked for, and forbids storing where it says so."""
    prompt = stored(engine, 120, tags=["brief"], ttl=1000)
    later(62)
    assert engine.ask(prompt, 1) == 0
    secret = stored(engine, 121, tags=["secret"])
    assert engine.ask(secret, 1) == 0


def test_what_was_preempted_and_is_not_to_be_stored_is_nowhere(engine: Core) -> None:
    """Blocks that a request finds again after it was preempted are its own: they leave with it."""
    prompt = engine.text(19, LENGTH)
    asked = engine.start("preempted", prompt, 8, no_store=True)
    engine.until(lambda: asked.num_output_tokens > 2, engine.step)
    engine.scheduler.running.remove(asked)
    engine.scheduler._preempt_request(asked, 0.0)
    engine.finish()
    assert asked.num_preemptions == 1
    assert engine.ask(prompt) == 0


def test_what_may_not_be_stored_is_nowhere(engine: Core) -> None:
    """no_store leaves nothing on any tier, and may still use what others stored."""
    prompt = engine.text(130, LENGTH)
    engine.ask(prompt, 1, no_store=True)
    engine.settle()
    assert engine.ask(prompt, 1) == 0
    engine.settle()
    assert engine.ask(prompt, 1, no_store=True) == OWN
    assert engine.ask(prompt, 1) == OWN


def test_what_was_forgotten_stays_forgotten_after_a_restart(tiny_model: Path, tmp_path: Path) -> None:
    """A new engine over the same disk finds what was kept and nothing of what was taken back."""
    with running(tiny_model, disk=tmp_path / "kv") as engine:
        kept, gone = stored(engine, 140, tags=["kept"]), stored(engine, 141, tags=["gone"])
        assert engine.administer(do="invalidate", tags=["gone"])["is_durable"]
    with running(tiny_model, disk=tmp_path / "kv") as engine:
        assert engine.ask(kept, 1) == WHOLE
        assert engine.ask(gone, 1) == 0
        engine.settle()
        engine.administer(do="invalidate", tags=["kept"])
        assert engine.ask(kept, 1) == 0


@pytest.mark.parametrize("running", [False, True])
def test_resets_one_after_the_other(tiny_model: Path, running: bool) -> None:
    """The engine takes a reset of the connector before it has made a step since the last one, with copies in flight."""
    with core(tiny_model) as engine:
        text = engine.text(1, 4 * CHUNK)
        engine.start("stores", text, 8)
        engine.until(lambda: engine.core.scheduler.connector.connector_scheduler._jobs, engine.step)
        for _ in range(3):
            engine.core.reset_prefix_cache(reset_running_requests=running, reset_connector=True)
        engine.finish()
        engine.settle()
        engine.ask(text)
        assert engine.ask(text) >= 3 * CHUNK
        engine.check()
