"""What is counted as cached of a prompt is what vLLM's scheduler does not compute of it, at each edge.

Real scheduler, connector, cache and tiers, no model. A prompt's computed tokens are those that the scheduler hands to
the model, which a test counts itself.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from vllm import SamplingParams
from vllm.v1.kv_offload.base import LookupResult
from vllm.v1.request import Request

from hotspan.cache.tiered import TieredCache
from hotspan.core.types import Tier
from kit.engine import CHUNK

from .harness.core import BLOCK, Core, core
from .harness.layers import States, Windows


@dataclass
class Scheduled:
    """Prompt tokens that the scheduler had computed for each request, whatever it counts: all from the first one on.
    What a step computed whose output was dropped is computed again."""

    computed: Counter[str] = field(default_factory=Counter)


@contextmanager
def watched(engine: Core) -> Iterator[Scheduled]:
    """Count what is handed to the model."""
    seen, schedule = Scheduled(), engine.scheduler.schedule

    def scheduling(*args: Any, **options: Any) -> Any:
        output = schedule(*args, **options)
        for name, tokens in output.num_scheduled_tokens.items():
            request = engine.scheduler.requests[name]
            if not request.num_output_tokens and not request.num_preemptions:
                first = request.num_computed_tokens - tokens
                seen.computed[name] = max(seen.computed[name], request.num_prompt_tokens - first)
        return output

    with patch.object(engine.scheduler, "schedule", scheduling):
        yield seen


def unreported(engine: Core) -> Any:
    """Leave the counts where they are: a report takes them."""
    return patch.object(engine.manager, "get_stats", lambda: None)


@dataclass(frozen=True)
class Counts:
    """What hotspan counted while a request ran."""

    lookups: int
    hits: int
    tiers: frozenset[Tier]


def counted(engine: Core, request: Request) -> Counts:
    """Run a request; its counts. All that says how much of it was cached agrees with what was computed."""
    stats = engine.cache.stats
    lookups, hits, reasons = stats.lookup_tokens, stats.hit_tokens.copy(), stats.computed_tokens.copy()
    name, prompt = request.request_id, request.num_prompt_tokens
    with watched(engine) as seen, unreported(engine):
        engine.core.add_request(request)
        engine.finish()
    record = engine.manager.explainer.last(None, 1)[0]
    found = stats.hit_tokens - hits
    cached, computed = engine.cached[name], seen.computed[name]
    assert cached + computed == prompt
    assert (record.request_id, record.prompt_tokens, record.cached_tokens) == (name, prompt, cached)
    assert (stats.computed_tokens - reasons).total() == computed
    assert found.total() <= cached
    assert stats.lookup_tokens - lookups in (0, prompt)
    return Counts(stats.lookup_tokens - lookups, found.total(), frozenset(found))


_NUMBERS = iter(range(1_000_000))


def request(engine: Core, prompt: list[int], tokens: int = 1, **sampling: Any) -> Request:
    options = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, **sampling)
    hasher = engine.core.request_block_hasher
    return Request(f"counted-{next(_NUMBERS)}", list(prompt), options, None, block_hasher=hasher)


@pytest.fixture(scope="module")
def engine(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Core]:
    with core(tiny_model, disk=tmp_path_factory.mktemp("counts") / "kv") as running:
        yield running


@pytest.mark.parametrize("is_inline", [False, True])
@pytest.mark.parametrize("extra", [-1, 0, 1, BLOCK, BLOCK + 1])
@pytest.mark.parametrize("tier", [Tier.RAM, Tier.DISK])
def test_a_prompt_near_whole_chunks(engine: Core, tier: Tier, extra: int, is_inline: bool) -> None:
    """Of a prompt of whole chunks one token is computed, and is no hit; of a longer one the rest."""
    text = engine.stored(engine.text(100 + extra, 3 * CHUNK + max(extra, 0)))
    engine.forget_gpu()
    if tier is Tier.DISK:
        engine.evict_ram()
    with patch.object(engine.connector, "_inline", engine.connector._inline if is_inline else None):
        found = counted(engine, request(engine, text[: 3 * CHUNK + extra]))
    whole = 3 * CHUNK if extra > 0 else 3 * CHUNK - 1 if extra == 0 else 2 * CHUNK
    assert found == Counts(3 * CHUNK + extra, whole, frozenset([tier]))


@pytest.mark.parametrize("kept", [BLOCK, CHUNK, CHUNK + BLOCK, 2 * CHUNK])
def test_what_the_engine_s_own_pool_has_is_no_hit_of_a_tier(engine: Core, kept: int) -> None:
    """Tokens behind those that the pool has are hits, also where the pool has a part of a chunk."""
    text = engine.stored(engine.text(200 + kept, 3 * CHUNK + 5))
    engine.forget_gpu()
    with patch.object(engine.manager, "lookup", lambda *_: LookupResult.MISS):
        engine.ask(text[: kept + 1])  # computed, so that the pool has it
    found = counted(engine, request(engine, text))
    assert found == Counts(3 * CHUNK + 5, 3 * CHUNK - kept, frozenset([Tier.RAM]))


def test_a_prompt_shorter_than_a_chunk(engine: Core) -> None:
    """It is looked up, and no hit."""
    text = engine.stored(engine.text(300, CHUNK - 1))
    engine.forget_gpu()
    assert counted(engine, request(engine, text)) == Counts(CHUNK - 1, 0, frozenset())


def test_what_may_not_read_the_cache_is_no_miss(engine: Core) -> None:
    """A request for the log probabilities of its prompt is not looked up, and nothing is promoted for it."""
    text = engine.stored(engine.text(400, 2 * CHUNK + 9))
    engine.forget_gpu()
    engine.evict_ram()
    loads = engine.cache.stats.load_bytes.total()
    assert counted(engine, request(engine, text, prompt_logprobs=1)) == Counts(0, 0, frozenset())
    assert counted(engine, request(engine, text, skip_reading_prefix_cache=True)) == Counts(0, 0, frozenset())
    assert engine.cache.stats.load_bytes.total() == loads


def test_a_load_that_fails_is_no_hit(engine: Core) -> None:
    """What could not be loaded after all is computed, and counted so."""
    text = engine.stored(engine.text(500, 2 * CHUNK + 9))
    for inline in (engine.connector._inline, None):
        engine.forget_gpu()

        def failing(*_: Any) -> Any:
            raise KeyError("a mistake")

        with (
            patch.object(engine.connector, "_inline", inline),
            patch.object(TieredCache, "begin_load", failing),
        ):
            assert counted(engine, request(engine, text)).hits == 0
        engine.runner.wrong = 0  # of the step whose output vLLM dropped


def test_a_request_is_counted_once(engine: Core) -> None:
    """One that is preempted and loads its text again is no second look-up and no second hit."""
    text = engine.stored(engine.text(600, 3 * CHUNK + 5))
    engine.forget_gpu()
    stats, asked = engine.cache.stats, request(engine, text, 8)
    lookups, hits = stats.lookup_tokens, stats.hit_tokens.total()
    with unreported(engine):
        engine.core.add_request(asked)
        engine.until(lambda: asked.num_output_tokens > 2, engine.step)
        engine.scheduler.running.remove(asked)
        engine.scheduler._preempt_request(asked, 0.0)
        assert engine.scheduler.reset_prefix_cache()
        engine.finish()
    assert asked.num_preemptions == 1
    assert (stats.lookup_tokens - lookups, stats.hit_tokens.total() - hits) == (len(text), 3 * CHUNK)


@pytest.mark.parametrize("layers", [Windows, States])
def test_layers_of_which_only_the_end_is_loaded(layers: Any, tiny_model: Path) -> None:
    """The tokens before it are not computed either: hits are those that the scheduler counts as loaded."""
    with core(tiny_model, runner=layers) as engine:
        text = engine.stored(engine.text(1, 7 * CHUNK + 30))
        engine.forget_gpu()
        found = counted(engine, request(engine, text))
        assert found == Counts(len(text), engine.cached[asked_last(engine)], frozenset([Tier.RAM]))


def asked_last(engine: Core) -> str:
    return str(engine.manager.explainer.last(None, 1)[0].request_id)
