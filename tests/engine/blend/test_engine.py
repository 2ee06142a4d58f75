"""Blending in a real engine: any runs give the bits of a prefill, and approximate KV stays with its own request."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hotspan.core.directives import Directives
from hotspan.core.terms import Scope, tag_labels, tenant_label
from hotspan.engine.blend import admission
from hotspan.engine.blend.forward import EngineForward
from hotspan.engine.blend.selftest import CanNotBlend, self_test
from hotspan.engine.net import LEFT_OUT
from kit.engine import Rig

from .engine import WINDOW, Library, ask, blended_and_exact, blending, empty, forward, of

ROUNDING = 2e-5
"""In float32 the attention of long texts is summed in tiles that depend on what is computed together, also in prefills
of the engine's own; keys are up to 5."""

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@pytest.fixture(scope="module")
def shared(tiny_model: Path) -> Iterator[Rig]:
    with blending(tiny_model) as engine:
        yield engine


@pytest.fixture
def engine(shared: Rig) -> Iterator[Rig]:
    """The engine, whose caches are empty; at rest and in order afterwards."""
    empty(shared)
    yield shared
    shared.settle()
    assert not of(shared).is_busy and not of(shared)._requests
    assert not any(entry.pins for entry in shared.cache.ram.entries.values())
    shared.cache.check()
    of(shared).index.check()
    assert shared.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == 47


def distance(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """The largest difference."""
    return max(float((one - other).abs().max()) for one, other in zip(found, expected, strict=True))


def test_permuted_documents_are_blended(engine: Rig) -> None:
    """Seen once, stored the second time, reused the third; the answer says how much. Metrics count the same."""
    library = Library(engine, 1000, 3)
    library.learn()
    engine.cache.take_stats()
    answer = ask(engine, library.prompt(2, 1, 0))[0]
    assert answer.blend is not None and answer.blend["reused"] == 6 * WINDOW
    assert answer.blend["recomputed"] == 3 * 16 and answer.blend["fresh"] < 200
    assert answer.cached <= 128  # the exact prefix


@pytest.mark.parametrize("name", ["_reader", "_selection", "isolated"])
def test_a_blend_that_can_not_begin_is_computed(engine: Rig, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Whatever raises once the engine counts on a blend, before its windows are pinned or after: the answer is that of
    an exact request, the mistake is counted, and later requests are blended.
    """
    library = Library(engine, 1500, 3)
    library.learn()
    prompt = library.prompt(2, 1, 0)
    before = LEFT_OUT.counts["error"]
    with monkeypatch.context() as patched:
        begin, owner = admission.Blending.begin, admission if name == "isolated" else admission.Blending

        def failing(*_: object, **__: object) -> None:
            raise KeyError("a mistake")

        def begun(self: admission.Blending, *args: Any) -> Any:
            with monkeypatch.context() as inside:
                inside.setattr(owner, name, failing)
                return begin(self, *args)

        patched.setattr(admission.Blending, "begin", begun)
        answer = ask(engine, prompt)[0]
    assert answer.blend is None and LEFT_OUT.counts["error"] > before
    assert answer.tokens == ask(engine, prompt, blend=False)[0].tokens
    assert ask(engine, library.prompt(1, 0, 2))[0].blend is not None


def test_all_recomputed_is_the_prefill(engine: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slices of 7 tokens give what one gives; with every reused token computed again they are those of a prefill, and
    with the default they are not."""
    library = Library(engine, 2000, 3)
    library.learn()
    prompt = library.prompt(2, 1, 0)
    whole, exact = blended_and_exact(engine, prompt)
    assert distance(whole, exact) > 1.0
    monkeypatch.setattr(admission, "_MIN_BUDGET", 7)
    monkeypatch.setattr(of(engine), "_step_tokens", 7)
    sliced, _ = blended_and_exact(engine, prompt)
    assert distance(sliced, whole) < ROUNDING
    plan, settings = admission.plan_spans, replace(of(engine)._settings, first_k=len(prompt))
    monkeypatch.setattr(of(engine), "_settings", settings)
    monkeypatch.setattr(admission, "plan_spans", lambda *given, **named: plan(*given[:4], 0.0, **named))
    assert distance(*blended_and_exact(engine, prompt)) < ROUNDING


@pytest.mark.parametrize("is_isolated", [True, False])
def test_exact_requests_never_find_what_was_blended(
    engine: Rig, monkeypatch: pytest.MonkeyPatch, is_isolated: bool
) -> None:
    """After a blended request, the same prompt asked for exactly has the answer of an engine that never blended, and no
    tier has a chunk of it. Without isolation (the control) it has not."""
    library = Library(engine, 3000, 3)
    prompts = [library.prompt(*order) for order in ([2, 1, 0], [0, 2, 1], [1, 0, 2])]
    full = [ask(engine, prompt, blend=False)[0].logprobs for prompt in prompts]
    empty(engine)
    library.learn()
    engine.settle()
    before = set(engine.cache.ram.entries)
    if not is_isolated:
        monkeypatch.setattr(admission, "isolated", lambda names, *_: list(names))
        monkeypatch.setattr(engine.manager.prefixes, "_evict", lambda names: 0)
    assert all(ask(engine, prompt)[0].blend for prompt in prompts)
    engine.settle()
    assert set(engine.cache.ram.entries) == before
    again = [ask(engine, prompt, blend=False)[0].logprobs for prompt in prompts]
    off = np.abs(np.array(again) - np.array(full)).max()
    assert off < 1e-5 if is_isolated else off > 1e-3


def test_exact_requests_in_mixed_load_are_exact(engine: Rig) -> None:
    """Exact and blended requests together: those have the tokens that the engine gives them alone."""
    library = Library(engine, 4000, 3)
    library.learn()
    exact = [library.prompt(2, 1, 0), library.prompt(0, 2, 1), engine.text(4900, 700), engine.text(4901, 300)]
    sampling = [{"blend": False}, {"blend": True}]
    for number, prompt in enumerate(exact):
        engine.start(f"exact-{number}", prompt, 8, **sampling[0])
        engine.start(f"blended-{number}", library.prompt(1, 0, 2), 8, **sampling[1])
    answers: dict[str, Any] = {}
    while engine.llm.llm_engine.has_unfinished_requests():
        answers |= {output.request_id: output for output in engine.llm.llm_engine.step() if output.finished}
    assert sum(bool(output.kv_transfer_params) for output in answers.values()) == 4
    for number, prompt in enumerate(exact):
        found = next(output for name, output in answers.items() if name.startswith(f"exact-{number}"))
        engine.forget_gpu()
        engine.forget_ram()
        of(engine).off = "the reference is exact"
        assert engine.is_same(prompt, list(found.outputs[0].token_ids))
        of(engine).off = None


def test_a_prefix_in_the_tiers_gives_way_to_windows(engine: Rig) -> None:
    """Where RAM has an exact prefix of two chunks, and windows of nearly all: these are taken. An exact request then
    loads the prefix, and has the tokens of an engine without caches."""
    library = Library(engine, 11_000, 3)
    library.learn()
    engine.settle()
    engine.forget_gpu()
    prompt = library.prompt(0, 2, 1)
    answer = ask(engine, prompt)[0]
    assert answer.blend is not None and answer.cached == 0
    assert answer.blend["reused"] == 5 * WINDOW  # those within the prefix are not looked for
    exact = ask(engine, prompt, blend=False)[0]
    assert exact.blend is None and exact.cached == 2 * WINDOW
    empty(engine)
    assert engine.is_same(prompt, exact.tokens)


def test_windows_of_others_are_never_found(engine: Rig) -> None:
    """Neither a salt, nor its absence, nor another tenant finds what one has stored."""
    library = Library(engine, 5000, 3)
    ways: list[dict[str, Any]] = [
        {"hotspan": Directives(tenant="a").to_json()},
        {"hotspan": Directives(tenant="b").to_json()},
        {"salt": "s", "hotspan": Directives(tenant="a").to_json()},
        {"salt": "t", "hotspan": Directives(tenant="a").to_json()},
    ]
    for way in ways:
        for order in ([0, 1, 2], [1, 2, 0]):
            engine.forget_gpu()
            assert ask(engine, library.prompt(*order), **way)[0].blend is None
    for way in ways:
        engine.forget_gpu()
        assert ask(engine, library.prompt(2, 1, 0), **way)[0].blend is not None


@pytest.mark.parametrize("how", ["tag", "tenant", "text", "expiry", "clear"])
def test_an_invalidated_documents_windows_are_gone(engine: Rig, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever names it: nothing of it is reused, and RAM has none of its windows."""
    library = Library(engine, 6000, 3)
    library.learn(tags=["doc"], **({"ttl": 3600} if how == "expiry" else {}))
    engine.settle()
    tenant = tenant_label(Directives().tenant)
    assert any(entry.terms.is_window for entry in engine.cache.ram.entries.values())
    if how == "clear":
        engine.llm.llm_engine.engine_core.engine_core.scheduler.reset_prefix_cache(reset_connector=True)
    elif how == "expiry":
        unix = engine.cache._clock.unix
        monkeypatch.setattr(engine.cache._clock, "unix", lambda: unix() + 7200, raising=False)
        engine.cache.step()
    else:
        scope = {
            "tag": Scope(tenant, labels=tag_labels({"doc"}, None)),
            "tenant": Scope(tenant),
            "text": Scope(tenant, keys=frozenset([bytes(32)])),
        }[how]
        engine.manager.invalidate([scope], lambda done: None)
    assert not any(entry.terms.is_window for entry in engine.cache.ram.entries.values())
    monkeypatch.undo()
    assert ask(engine, library.prompt(2, 1, 0))[0].blend is None
    assert how in ("tenant", "clear") or ask(engine, library.prompt(0, 2, 1))[0].blend is not None  # stored again


def test_a_request_is_aborted_while_it_is_blended(engine: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """At any slice: blocks, slots and pins come free, and the next requests are as ever."""
    library = Library(engine, 7000, 3)
    library.learn()
    monkeypatch.setattr(admission, "_MIN_BUDGET", 7)
    monkeypatch.setattr(of(engine), "_step_tokens", 7)
    for steps in range(5):
        name = f"aborted-{steps}"
        engine.start(name, library.prompt(2, 1, 0), 8)
        engine.step(steps)
        engine.llm.llm_engine.abort_request([name], internal=False)
        engine.settle()
        assert not of(engine).is_busy
    assert ask(engine, library.prompt(2, 1, 0))[0].blend is not None


def test_a_blended_request_is_preempted(engine: Rig) -> None:
    """It goes on as any other and is blended once; what it leaves is found by no exact request."""
    library = Library(engine, 10_000, 3)
    prompt = library.prompt(2, 1, 0)
    full = ask(engine, prompt, blend=False)[0].logprobs
    empty(engine)
    library.learn()
    jobs = of(engine)._jobs
    engine.start("preempted", prompt, 200)
    (request,) = engine.scheduler.requests.values()
    while not request.num_output_tokens:
        engine.step()
    pool = engine.scheduler.kv_cache_manager.block_pool
    taken = pool.get_new_blocks(pool.get_num_free_blocks())
    while not request.num_preemptions:
        engine.step()
    pool.free_blocks(taken)
    outputs: list[Any] = []
    while engine.llm.llm_engine.has_unfinished_requests():
        outputs += [output for output in engine.llm.llm_engine.step() if output.finished]
    assert len(outputs[0].outputs[0].token_ids) == 200
    assert outputs[0].kv_transfer_params["blend"]["reused"] == 6 * WINDOW and of(engine)._jobs == jobs + 1
    assert ask(engine, prompt, blend=False)[0].logprobs == pytest.approx(full, abs=1e-5)


def test_a_failed_blend_is_an_ordinary_prefill(engine: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever fails, the answer is exact; after three failures in a row blending is off, with a reason."""
    library = Library(engine, 8000, 3)
    prompts = [library.prompt(2, 1, 0) for _ in range(4)]
    full = [ask(engine, prompt, blend=False)[0] for prompt in prompts]
    empty(engine)
    library.learn()

    def failing(*_: Any, **__: Any) -> torch.Tensor:
        raise RuntimeError("as it may be")

    with monkeypatch.context() as patched:
        patched.setattr(forward(), "compute", failing)
        for prompt, expected in zip(prompts, full, strict=True):
            answer = ask(engine, prompt)[0]
            assert answer.blend is None and answer.tokens == expected.tokens
    assert of(engine).off == "3 blends in a row failed"
    of(engine).off, of(engine)._failures = None, 0


@pytest.mark.parametrize(
    ("name", "broken"),
    [
        ("write", lambda *_: None),
        ("compute", lambda *_: 1 / 0),
        ("read", lambda self, blocks, run, layer: torch.rand(run.tokens, 2, 2, 32)),
        ("layers", None),
    ],
)
def test_an_engine_that_is_otherwise_does_not_blend(
    engine: Rig, monkeypatch: pytest.MonkeyPatch, name: str, broken: Any
) -> None:
    """The self-test finds it out, and says what."""
    runner, size = forward()._runner, 1 << 30
    self_test(runner, size, WINDOW)
    if broken is not None:
        monkeypatch.setattr(EngineForward, name, broken)
    else:
        monkeypatch.setattr(runner.vllm_config.compilation_config, "static_forward_context", {})
    with pytest.raises(CanNotBlend):
        self_test(runner, size, WINDOW)
    with pytest.raises(CanNotBlend, match="a slot has 5"):
        monkeypatch.undo()
        self_test(runner, 5, WINDOW)
