"""Ways to move the metrics of requests: vLLM's scheduler without a model, in simulated time; the halves of blending and
of encoder outputs that live beside it; keys."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

from hotspan.cache.choice import Run, Text
from hotspan.cache.cost import CostModel
from hotspan.cache.reasons import REASONS
from hotspan.cache.rhythm import LEAST, OWN_GAPS
from hotspan.core.types import MIB, Tier
from hotspan.engine.blend.orders import Checked, Report, Speed
from hotspan.engine.metrics import CacheMetrics
from hotspan.engine.requests import RequestRecord
from hotspan.keyring.keyring import open_keyring
from hotspan.testing.clock import SimulatedClock
from kit.simulated.memory_store import MemoryServer
from kit.waiting import until
from tests.cache.rig import Rig
from tests.cache.test_levels import Levels
from tests.cache.test_rhythm import TEXT, Sessions
from tests.engine.blend.scheduler import WINDOW, Scheduler, learnt
from tests.engine.blend.test_agreement import Pool
from tests.engine.harness.core import CHUNK
from tests.engine.harness.simulated import SimulatedCore, simulated
from tests.engine.test_encoder_outputs import Engine, forget_ram
from tests.engine.test_weights import reload, running
from tests.keyring.rig import make_kek, make_store

TOKENS = 4 * CHUNK + 50


def what_requests_find(path: Path, model: Path) -> None:
    """Texts in RAM, on a disk and in an L2; tiers that are well, then slow, and that hang in the middle of a load."""
    for place in ("disk", "l2"):
        server = MemoryServer() if place == "l2" else None
        with simulated(model, disk=None if server else path / "kv", l2=server) as engine:
            engine.medium.slow(0.0005)
            texts = [engine.stored(engine.text(seed, TOKENS)) for seed in range(4)]
            for text in 2 * texts:
                engine.time(text)
            engine.forget_gpu()
            engine.ask(texts[-1])  # from RAM
            engine.ask(texts[-1], hotspan="not the client's to say")
            with patch.object(engine.manager.prefixes, "arrive", side_effect=RuntimeError("a mistake")):
                engine.ask(texts[-1])
            hang_in_the_middle(engine, texts[0])
            engine.medium.heal(1.0)
            for text in 3 * texts:
                engine.time(text)
            engine.medium.heal()


def hang_in_the_middle(engine: SimulatedCore, text: list[int]) -> None:
    """A request's loads have begun when the tier stops."""
    engine.forget()
    engine.medium.slow(0.001)
    engine.start("hangs", text)
    engine.step()
    engine.medium.hang()
    engine.finish()


def what_weights_do(path: Path, model: Path) -> None:
    """Weights that are reloaded from files, and changed in some other way; a request that comes in the middle."""
    with running(model, path / "kv") as engine:
        metrics = CacheMetrics(engine.cache, None)
        engine.stored(engine.text(1, TOKENS))
        reload(engine)
        metrics.report(1.0)
        engine.rpc("start_weight_update")
        engine.ask(engine.text(2, TOKENS))
        metrics.report(1.0)
        engine.rpc("finish_weight_update")
        engine.until_named()
        metrics.report(1.0)


def what_is_refused(path: Path, model: Path) -> None:
    """Why tokens are computed that lie in a lower tier: while the engine idles, and while it is busy."""
    with Rig(ram=1) as rig:
        cost = rig.cache.cost = CostModel(2048, {Tier.L2: 4}, rig.clock)
        metrics = CacheMetrics(rig.cache, None)
        for tokens in (2048, 512) * 4:
            cost.observe_step(tokens, 0, tokens / 1000)
        for step_s in (0.0, 0.01):
            idle_or_busy = Text(4 * CHUNK + 1, CHUNK, step_s=step_s)
            for load_s in (1.5, 0.5):  # computing takes a second
                for _ in range(20):
                    cost.begin_load(Tier.L2, MIB)
                    cost.end_load(Tier.L2, MIB, load_s)
                cost._trust, cost._tiers[Tier.L2]._caution = 0.0, 1.0
                rig.clock.advance(1000.0)
                cost.cut(idle_or_busy, [Run(Tier.L2, 4, MIB)])
            for why in ("late", "room"):
                cost._trust, cost._tiers[Tier.L2]._caution = 1.0, 1.0
                rig.clock.advance(1000.0)
                cost.settle(cost.cut(idle_or_busy, [Run(Tier.L2, 4, MIB)]), 1.0, 1, cut=why)
            cost.note_unanswered(idle_or_busy, CHUNK)
        rig.cache.stats.cuts += 1
        metrics.report(1.0)


def what_sessions_do(path: Path, model: Path) -> None:
    """Next turns that are announced: one is used, and then too many are not."""
    with Rig(ram=1) as rig:
        sessions, metrics = Sessions(), CacheMetrics(rig.cache, None)
        rig.cache.stats = sessions.stats
        sessions.turns(*[20.0] * OWN_GAPS)
        for number in range(LEAST + 1):
            for turn in sessions.after(19.0):
                sessions.rhythm.note(turn.source, *((0, 1) if number else (1, 0)))
            sessions.clock.advance(1.0)
            sessions.turn(chunks=TEXT)
        metrics.report(1.0)


def what_is_encoded(path: Path, model: Path) -> None:
    """Outputs of media that are encoded, and then loaded from each tier."""
    with Rig(ram=4, disk=8) as rig:
        engine, metrics = Engine(rig), CacheMetrics(rig.cache, None)
        engine.ask("a")
        engine.later("a")
        forget_ram(engine)
        engine.later("a")
        metrics.report(1.0)
        for name in list(engine.outputs._requests):
            engine.outputs.forget(name)
        engine.rig.land()
        engine.rig.land()
    levels: Any = Levels(MemoryServer(clock=SimulatedClock()), disk=0)
    engine, metrics = Engine(levels), CacheMetrics(levels.cache, levels.follower)
    engine.ask("a")
    forget_ram(engine)
    engine.later("a")
    metrics.report(1.0)
    levels.slab.close()


def what_is_blended(path: Path, model: Path) -> None:
    """Prompts that are blended, fail, are cancelled, or not worth it; checks that agree, differ, and find no room."""
    with Rig(ram=64) as rig:
        metrics = CacheMetrics(rig.cache, None)
        scheduler = Scheduler(rig.cache)
        blending, pool = scheduler.blending, Pool(200)
        blending.checks.bind(pool)  # type: ignore[arg-type]
        learnt(scheduler)
        for number in range(4):
            assert scheduler.run(scheduler.request(number % 2, 1 - number % 2)) is not None
            orders = scheduler.step(scheduler.request(), 0)
            for check in orders.checks if orders is not None else ():
                found = {check.number: Checked(number % 4 == 1, 0.5)}
                blending.note(Report(checked=found, seconds=0.25))
        pool.num_gpu_blocks = 1
        for _ in range(2):
            scheduler.run(scheduler.request(0, 1))
        for end in ("failed", "cancelled"):
            request = scheduler.request(0, 1)
            scheduler.match(request)
            blending.begin(request, list(range(99)))
            begun = scheduler.step(request, 0)
            assert begun is not None
            number = begun.blends[0].number
            if end == "cancelled":
                blending.end(request.request_id)
                scheduler.step(request, 0)
            blending.note(Report(ended=[number], failed=[number] if end == "failed" else []))
            blending.end(request.request_id)
        for left in (1, WINDOW // 2):  # the engine had no room for it, and meanwhile it has nearly all of the prompt
            request = scheduler.request(0, 1)
            record = RequestRecord(request=request, keyer=scheduler.keyer, groups=())
            assert blending.match(request, record, 0, 0)
            assert not blending.match(request, record, len(request.prompt_token_ids) - left, 0)
            blending.end(request.request_id)
        blending.note(Report(speed=Speed(token_s=1e-6, move_s=1.0)))
        scheduler.run(scheduler.request(0, 1))
        metrics.report(1.0)
        blending.note(Report(off="a test"))
        metrics.report(1.0)


def what_keys_do(path: Path, model: Path) -> None:
    """A tenant whose keys can't be read, and then can."""
    store, kek, clock = make_store(path, make_kek(path)), f"file:{path / 'kek'}", SimulatedClock()
    with Rig(ram=1) as rig, open_keyring(store, kek, {}, clock) as keyring:
        metrics = CacheMetrics(rig.cache, None, keyring)
        store.rename(path / "away")
        keyring.names("a")
        until(lambda: keyring.stats().failures == 1)
        metrics.report(1.0)
        (path / "away").rename(store)
        until(lambda: clock.advance(5) or keyring.stats().tenants == 1)
        metrics.report(1.0)


def what_is_computed(path: Path, model: Path) -> None:
    """Tokens of each reason; that each is told rightly, and no other: tests/engine/test_explaining.py."""
    with Rig(ram=1) as rig:
        rig.cache.stats.computed_tokens.update(list(REASONS))
        CacheMetrics(rig.cache, None).report(1.0)


WAYS = (
    what_is_computed,
    what_requests_find,
    what_weights_do,
    what_is_refused,
    what_sessions_do,
    what_is_encoded,
    what_is_blended,
    what_keys_do,
)
