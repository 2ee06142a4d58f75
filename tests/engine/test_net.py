"""Nothing that a request says, and no mistake of hotspan's, ends the engine: real scheduler, known bytes, no model."""

import inspect
import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from vllm import SamplingParams
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.exceptions import VLLMValidationError
from vllm.v1.kv_offload.base import OffloadingManager

from hotspan.cache.lower import LowerTiers
from hotspan.cache.ram import RamTier
from hotspan.cache.stats import CacheStats
from hotspan.cache.tiered import TieredCache
from hotspan.cache.waits import Waits
from hotspan.core.terms import DEFAULT_TENANT, tenant_label
from hotspan.core.types import Tier
from hotspan.engine.admin import Administrator
from hotspan.engine.connector import HotspanConnector
from hotspan.engine.inline import InlineLoads
from hotspan.engine.manager import HotspanManager
from hotspan.engine.net import LEFT_OUT, has_net, netted
from hotspan.engine.prefixes import GpuPrefixes
from hotspan.engine.requests import Admission
from kit.engine import CHUNK
from tests.hostile import NAMES, hostile

from .harness.core import Core, core

_numbers = itertools.count()

OUTSIDE = {
    "bind": "at the start, without a request",
    "shutdown": "at the end, without a request",
    "load_adapter": "the engine reports to who loads an adapter what this raises",
    "unload_adapter": "as load_adapter",
    "end_namespace": "weights must not change before it has ended: who changes them is told what it raises",
    "begin_namespace": "as end_namespace; without it nothing is cached",
    "reset_outputs": "the engine reports to who resets them what this raises",
    "named_requests": "a figure",
    "keyer": "of Administrator's texts thread, whose future has what it raises; of admit, which has a net",
    "named": "as keyer",
    "invalidate": "the administrator's command is answered with what it raises",
    "prepare_load": "_slots has a net: a load that can not be prepared has failed, and vLLM computes it",
    "explain_requests": "at the start",
    "end_allocation": "of the connector's update_state_after_alloc: complete_load and leave_out have nets",
    "engine_tokens": "a figure",
    "has_failed_load": "a figure",
    "is_own": "a figure",
    "reset_cache": "a reset that did not happen must not be taken for one",
    "leave_out": "is what the net calls, within a net",
    "group_count": "a figure of the start",
    "token_bytes": "a figure of the start",
}
"""Methods of the manager without a net, and why."""

OF_CONNECTOR = {
    "bind_gpu_block_pool": "at the start",
    "on_new_request": "run_waiting and admit have nets; look and require_bound end what must not go on",
    "request_finished": "_retire and _report have nets; the rest is vLLM's",
    "request_finished_all_groups": "as request_finished",
    "update_state_after_alloc": "has a net of its own: what vLLM counts on is reported as lost; begin has a net",
    "build_connector_meta": "as on_new_request; _end_clear, begin_step, forget_ended, _orders and idle have nets",
    "get_kv_connector_stats": "end_step and get_stats have nets",
    "reset_cache": "a reset that did not happen must not be taken for one",
    "update_connector_output": "note_copies, complete_load, complete_store, _note_blends, _end_clear have nets",
    "build_prom_metrics": "at the start",
    "get_handshake_metadata": "at the start, a worker's",
    "set_xfer_handshake_metadata_pp_aware": "at the start",
    "start_load_kv": "a worker's: bytes that are not copied must not be computed with",
    "get_finished": "a worker's: as start_load_kv",
    "get_transfer_results": "a worker's: as start_load_kv",
    "build_connector_worker_meta": "a worker's: as start_load_kv",
    "get_block_ids_with_load_errors": "a worker's: as start_load_kv",
    "shutdown": "at the end",
}
"""What the connector overrides of vLLM's without a net around it, and why nothing of ours can raise out of it."""

OF_VLLM = {
    *("get_external_cache_hit_sources", "get_finished_count", "get_kv_connector_kv_cache_events"),
    *("get_loaded_kv_cache_group_ids", "get_mem_pool_context", "get_required_kvcache_layout"),
    *("has_pending_block_frees", "register_finished_partial_tail", "requires_kv_delivery", "scheduler", "role"),
    *("requires_piecewise_for_cudagraph", "supports_divergent_local_hybrid_hits", "bind_kv_cache_manager"),
    *("bind_connector_metadata", "clear_connector_metadata", "has_connector_metadata", "build_kv_connector_stats"),
    *("finish_forward", "handle_preemptions", "register_kv_caches", "reset_capture_state", "save_kv_layer"),
    *("set_host_xfer_buffer_ops", "set_xfer_handshake_metadata", "wait_for_layer_load", "wait_for_save"),
}
"""What vLLM calls of a connector that is vLLM's own: nothing of ours is in it but the manager."""

OF_VLLM_MANAGER = {"touch", "has_pending_work", "take_events"}
"""The same of the manager: these do nothing."""


def entries(*owners: type) -> set[str]:
    """What vLLM may call of a class: the public names of its interfaces."""
    return {name for owner in owners for base in owner.__mro__ for name in vars(base) if not name.startswith("_")}


def test_each_entry_has_a_net() -> None:
    """Whatever vLLM or the connector may call has the net, or stands in a list with the reason; so does what a later
    vLLM adds to its interfaces.
    """
    methods = {
        name: member
        for owner in HotspanManager.__mro__
        if owner.__module__.startswith("hotspan.")
        for name, member in vars(owner).items()
        if not name.startswith("_") and (inspect.isfunction(member) or isinstance(member, property))
    }
    assert {name for name, method in methods.items() if not has_net(method)} == OUTSIDE.keys()
    assert entries(OffloadingManager) - methods.keys() == OF_VLLM_MANAGER
    assert has_net(Administrator.run_waiting)
    asked = entries(OffloadingConnector)
    overridden = {name for name in vars(HotspanConnector) if name in asked}
    assert {name for name in overridden if not has_net(vars(HotspanConnector)[name])} == OF_CONNECTOR.keys()
    assert asked - overridden == OF_VLLM


# -- what requests say -------------------------------------------------------------------------------------------------


def attack(engine: Core, bodies: list[Any], prompt: list[int]) -> int:
    """Hand requests with these parameters to the scheduler, together, and let them end; how many there were.

    vLLM's API server refuses integers that are too large.
    """
    taken = 0
    for body in bodies:
        try:
            params = SamplingParams(
                max_tokens=1, temperature=0, ignore_eos=True, extra_args={"kv_transfer_params": body}
            )
        except (ValueError, VLLMValidationError):
            continue
        with patch("tests.engine.harness.core.sampling", lambda tokens, given, params=params: params):
            engine.start(f"hostile-{next(_numbers)}", prompt, 1)
        taken += 1
    assert len(engine.finish()) == taken
    return taken


def is_alive(engine: Core, seed: int) -> None:
    """An ordinary request is cached, and its bytes are its own; nobody became another tenant."""
    prompt = engine.stored(engine.text(seed, 3 * CHUNK))
    engine.forget_gpu()
    assert engine.ask(prompt) > 0
    assert engine.cache.usage()[Tier.RAM].tenants.keys() <= {tenant_label(DEFAULT_TENANT)}
    engine.check()


def run_hostile(model: Path, bodies: int) -> None:
    rng, answered = random.Random(39), 0
    with core(model, cache={"is_served": False}) as engine:
        prompt = engine.text(1, CHUNK + 8)
        while answered < bodies:
            answered += attack(engine, [hostile(rng) for _ in range(50)], prompt)
        is_alive(engine, 2)


def test_hostile_parameters_end_no_engine(tiny_model: Path) -> None:
    """1,000 bodies against one's own vLLM: all are answered, none is more than uncached, none chooses its tenant."""
    run_hostile(tiny_model, 1000)


@pytest.mark.slow
def test_ten_thousand_hostile_bodies(tiny_model: Path) -> None:
    """The same with 10,000."""
    run_hostile(tiny_model, 10_000)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=9), inner, max_size=5)
    ),
    max_leaves=12,
)


def test_any_json_is_admitted(tiny_model: Path) -> None:
    """Whatever JSON a request brings as its parameters, with and without hotspan's server, the engine goes on."""
    for is_served in (False, True):
        with core(tiny_model, cache={"is_served": is_served}) as engine:
            prompt = engine.text(1, CHUNK + 8)

            @settings(max_examples=300, deadline=None, database=None, suppress_health_check=list(HealthCheck))
            @given(JSON)
            def say(body: Any) -> None:
                attack(engine, [body], prompt)  # noqa: B023 (called within the turn)

            say()
            engine.check()


@pytest.mark.parametrize("given", ["x", {}, {"tenant": "other", "what": 1}, {"tenant": "other"}])
def test_what_only_the_server_may_say_is_refused(tiny_model: Path, given: Any) -> None:
    """The three bodies that ended an engine, and the one that chose a tenant: answered, and not cached."""
    with core(tiny_model, cache={"is_served": False}) as engine:
        prompt = engine.text(1, 2 * CHUNK + 8)
        before = LEFT_OUT.counts.copy()
        attack(engine, [{"hotspan": given}], prompt)
        engine.settle()
        assert engine.cache.usage()[Tier.RAM].chunks == 0 and LEFT_OUT.counts - before == {"directives": 1}
        is_alive(engine, 2)


# -- mistakes of ours --------------------------------------------------------------------------------------------------

FAILING: list[tuple[type, str]] = [
    *((TieredCache, name) for name in ("lookup", "is_waiting", "ask", "try_store", "join", "release", "step")),
    *((GpuPrefixes, name) for name in ("arrive", "keep", "end", "terms", "expire")),
]


@pytest.mark.parametrize(("owner", "name"), FAILING, ids=[name for _, name in FAILING])
def test_a_mistake_leaves_requests_out(tiny_model: Path, owner: type, name: str) -> None:
    """Any of these raises half of the time: all requests are answered, no byte is wrong, later ones are cached."""
    rng = random.Random(name)
    whole: Callable[..., Any] = getattr(owner, name)

    def failing(self: Any, *args: Any, **options: Any) -> Any:
        if rng.random() < 0.5:
            raise KeyError("a mistake")
        return whole(self, *args, **options)

    said = {"hotspan": {"tenant": DEFAULT_TENANT, "tags": ["a", "b"]}}
    with core(tiny_model) as engine:
        texts = [engine.text(seed, 2 * CHUNK + 8) for seed in range(4)]
        before = LEFT_OUT.counts["error"]
        with patch.object(owner, name, failing):
            for number in range(24):
                engine.start(f"asked-{number}", texts[number % 4], 2, **said)
                engine.core.step()
                if number % 6 == 5:
                    engine.finish()
            engine.finish()
        assert engine.runner.wrong == 0 and LEFT_OUT.counts["error"] > before
        engine.settle()
        is_alive(engine, 9)


@pytest.mark.parametrize("is_inline", [False, True])
@pytest.mark.parametrize("name", ["begin_load", "_touch", "release"])
def test_a_load_that_can_not_be_prepared_is_computed(tiny_model: Path, name: str, is_inline: bool) -> None:
    """Whatever raises while a load is prepared, beside a step or within one: answers are those of computing, later
    requests hit, and the chunks of the failed load can still be loaded.
    """
    whole: Callable[..., Any] = getattr(TieredCache, name)
    with core(tiny_model) as engine:
        if not is_inline:
            engine.connector._inline = None
        prompt = engine.text(7, 3 * CHUNK + 8)
        engine.start("computed", prompt, 4)
        engine.finish()
        engine.forget_gpu()
        begin, is_failing = TieredCache.begin_load, [False]

        def began(self: Any, *args: Any) -> Any:
            is_failing[0] = True
            try:
                return begin(self, *args)
            finally:
                is_failing[0] = False

        def failing(self: Any, *args: Any) -> Any:
            if is_failing[0]:
                raise KeyError("a mistake")
            return whole(self, *args)

        before = LEFT_OUT.counts["error"]
        with patch.object(TieredCache, name, failing), patch.object(TieredCache, "begin_load", began):
            if name == "begin_load":
                is_failing[0] = True
                TieredCache.begin_load = failing  # type: ignore[method-assign]
            engine.start("failed", prompt, 4)
            engine.finish()
        assert engine.answers["failed"] == engine.answers["computed"] and LEFT_OUT.counts["error"] > before
        assert is_inline or engine.runner.wrong == 0
        engine.runner.wrong = 0  # of the step whose output vLLM dropped
        engine.forget_gpu()
        assert engine.ask(prompt) == 3 * CHUNK
        assert engine.runner.wrong == 0
        is_alive(engine, 9)


ENDING: list[tuple[type, str]] = [
    *((TieredCache, name) for name in ("end_load", "end_store", "begin_load", "release", "_touch", "_end_one")),
    *((RamTier, name) for name in ("copied", "let_go", "touch")),
    *((LowerTiers, name) for name in ("offer", "step")),
    *((Waits, name) for name in ("wake", "release")),
    *((HotspanManager, name) for name in ("_note_saved", "prepare_load", "begin")),
    *((InlineLoads, name) for name in ("answer", "fresh", "take")),
    *((HotspanConnector, name) for name in ("_retire", "_end_clear", "_begin_load")),
    (CacheStats, "loaded"),
    (Admission, "may_keep"),
]
"""What ends loads and stores, and what begins them, down to single steps of it. A method with a net fails inside it."""


def half_failing(whole: Callable[..., Any], is_failing: Callable[[], bool], raised: list[int]) -> Callable[..., Any]:
    """The method, which raises half of the time; within its net, if it has one. Mutates: `raised`, how often."""
    inside, rng = inspect.unwrap(whole), random.Random(whole.__qualname__)

    def failing(self: Any, *args: Any, **options: Any) -> Any:
        if is_failing() and rng.random() < 0.5:
            raised[0] += 1
            raise KeyError("a mistake")
        return inside(self, *args, **options)

    if not has_net(whole):
        return failing
    failing.__qualname__ = whole.__qualname__
    return netted(closed_over(whole, "instead"))(failing)


def closed_over(function: Any, name: str) -> Any:
    """A variable of the scope that a function was made in."""
    return inspect.getclosurevars(function).nonlocals[name]


@pytest.mark.parametrize("is_inline", [False, True])
@pytest.mark.parametrize(("owner", "name"), ENDING, ids=[f"{owner.__name__}.{name}" for owner, name in ENDING])
def test_a_mistake_at_an_end_leaves_nothing_pinned(
    tiny_model: Path, tmp_path: Path, owner: type, name: str, is_inline: bool
) -> None:
    """Any of these raises half of the time: the engine goes on, answers are those of computing, and some steps later
    no slot is pinned or waits for a copy.
    """
    is_failing, raised = False, [0]
    with core(tiny_model, disk=tmp_path / "disk") as engine:
        if not is_inline:
            engine.connector._inline = None
        texts = [engine.text(seed, 3 * CHUNK + 8) for seed in range(4)]
        for number, text in enumerate(texts):
            engine.start(f"computed-{number}", text, 3)
        engine.finish()
        before = LEFT_OUT.counts["error"]
        with patch.object(owner, name, half_failing(getattr(owner, name), lambda: is_failing, raised)):
            for turn in range(6):
                engine.forget_gpu()
                is_failing = True
                for number, text in enumerate(texts):
                    engine.start(f"asked-{turn}-{number}", text, 3)
                    engine.step()
                engine.ask(engine.text(50 + turn, 3 * CHUNK + 8))
                engine.until(lambda: not engine.connector._scheduler._jobs, engine.step)
                is_failing = False
                for number in range(4):
                    assert engine.answers[f"asked-{turn}-{number}"] == engine.answers[f"computed-{number}"]
                for _ in range(3):  # what is left to do is done
                    engine.ask(engine.text(100 + turn, CHUNK + 8))
        engine.settle()
        entries = engine.cache.ram.entries.values()
        assert [entry for entry in entries if entry.pins or entry.is_used] == [] and not engine.cache.ram.forgotten
        assert engine.cache._loading == engine.cache._storing == 0
        assert (raised[0] > 0) is is_called(name, is_inline)
        assert LEFT_OUT.counts["error"] - before >= (raised[0] > 0)
        engine.runner.wrong = 0  # of steps whose output vLLM dropped
        is_alive(engine, 9)


def is_called(name: str, is_inline: bool) -> bool:
    """Whether the engine comes by there."""
    return is_inline or name not in ("answer", "fresh", "take")
