"""Every way into vLLM's workers is known: harmless by name, or it ends the namespace. A new one fails these tests."""

import ast
import importlib
import inspect
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import pytest

from hotspan.engine import contract
from hotspan.engine.weights import HARMLESS

from .vllm_range import RELEASES, SOURCES

INSTALLED: Final = Path(str(find_spec("vllm").submodule_search_locations[0])).parent  # type: ignore[union-attr,index]
TREES: Final = {contract.engine_version(): INSTALLED} | {
    release: SOURCES / release for release in RELEASES if (SOURCES / release).exists()
}

CHANGES: Final = frozenset(
    {
        # Weights, and nothing else.
        *("reload_weights", "start_weight_update", "start_draft_weight_update", "update_weights"),
        *("finish_weight_update", "reset_weights"),
        # With a level or tags that say so.
        *("sleep", "wake_up", "discard"),
        # The process or its shape: nobody can say what is left.
        *("checkpoint_prepare", "checkpoint_restore", "elastic_ep_execute", "reinitialize_distributed", "load_model"),
        *("init_device", "init_worker", "adjust_rank", "update_config", "update_environment_variables"),
        # They hand out the model, or run a program's function on it.
        *("apply_model", "get_model", "get_draft_model"),
        # A connection that is made with the engine, and an executor's own.
        *("sleep_mode_backend", "wait_for_comm", "randomize_dummy_inputs"),
    }
)
"""Methods of workers that end the namespace, because they are not harmless."""

ADAPTERS: Final = frozenset({"add_lora"})
"""Looked at by itself."""

WORKERS: Final = (
    "vllm/v1/worker/worker_base.py",
    "vllm/v1/worker/gpu_worker.py",
    "vllm/v1/worker/cpu_worker.py",
)

CORE: Final = {
    "asks the workers by the executor, whose calls are followed": """
        collective_rpc sleep wake_up release_kv_cache_memory add_lora remove_lora list_loras pin_lora profile
        save_sharded_state execute_dummy_batch reset_mm_cache reset_encoder_cache compute_weight_checksums
        pause_scheduler reinitialize_distributed commit_prepared_elastic_ep shutdown
    """,
    "asks nobody, or steps": """
        get_supported_tasks get_kv_cache_group_metadata add_request abort_requests log_error_detail
        capture_iteration_details step post_step step_with_batch_queue reset_prefix_cache resume_scheduler
        is_scheduler_paused is_sleeping pause_generation preprocess_add_request set_weight_version get_weight_version
    """,
    "of the process": """
        startup_handshake run_engine_core has_work is_running run_busy_loop process_input_sockets
        process_output_sockets barrier wait_for_init run eep_handle_engine_core_notification
    """,
}
"""Public methods of the engine core, which its clients may call by name."""


@cache
def methods(path: Path) -> dict[str, list[str]]:
    """Public methods of each class in a file."""
    tree = ast.parse(path.read_text())
    return {
        each.name: [
            one.name
            for one in each.body
            if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef) and not one.name.startswith("_")
        ]
        for each in tree.body
        if isinstance(each, ast.ClassDef)
    }


def asked(tree: Path) -> Iterator[tuple[str, str]]:
    """The names that anything in a release asks its workers for, and where."""
    for path in (tree / "vllm").rglob("*.py"):
        text = path.read_text()
        if "collective_rpc" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "").endswith("collective_rpc"):
                first = node.args[0] if node.args else None
                if isinstance(first, ast.Constant) and isinstance(first.value, str):
                    yield first.value, str(path.relative_to(tree))


@pytest.mark.parametrize("release", TREES)
def test_every_method_of_a_worker_is_known(release: str) -> None:
    """What a worker can be asked for is harmless by name, an adapter's, or ends the namespace."""
    known = HARMLESS | CHANGES | ADAPTERS
    found = {
        name
        for file in WORKERS
        for owner, names in methods(TREES[release] / file).items()
        if "Worker" in owner and "Async" not in owner
        for name in names
    }
    assert len(found) > 30
    assert sorted(found - known) == []


@pytest.mark.parametrize("release", TREES)
def test_every_name_that_vllm_asks_workers_for_is_known(release: str) -> None:
    """Wherever in vLLM: engine, executor, servers, trainers."""
    known = HARMLESS | CHANGES | ADAPTERS
    assert sorted({(name, where) for name, where in asked(TREES[release]) if name not in known}) == []


@pytest.mark.parametrize("release", TREES)
def test_every_call_of_the_engine_core_is_known(release: str) -> None:
    """A client may call any method of the core by its name: each goes by the executor, or leaves the workers alone."""
    known = {name for names in CORE.values() for name in names.split()}
    found = {
        name
        for owner, names in methods(TREES[release] / "vllm/v1/engine/core.py").items()
        if owner.startswith(("EngineCore", "DPEngineCore", "DPMoEEngineCore")) and not owner.endswith("State")
        for name in names
    }
    assert sorted(found - known) == []


@pytest.mark.parametrize("release", TREES)
def test_the_core_reaches_its_workers_by_the_executor_alone(release: str) -> None:
    """The engine core never asks an executor for a worker, nor does the executor hand one out but to itself."""
    text = (TREES[release] / "vllm/v1/engine/core.py").read_text()
    assert "driver_worker" not in text
    tree = ast.parse((TREES[release] / "vllm/v1/executor/abstract.py").read_text())
    (executor,) = (each for each in tree.body if isinstance(each, ast.ClassDef) and each.name == "Executor")
    init = next(
        each
        for each in tree.body[tree.body.index(executor)].body  # type: ignore[attr-defined]
        if isinstance(each, ast.FunctionDef) and each.name == "init_kv_output_aggregator"
    )
    assert [arg.arg for arg in init.args.args] == ["self", "connector"]


def test_no_executor_overrides_where_it_is_followed() -> None:
    """`init_kv_output_aggregator` is the base class's: from there every executor of an engine is known."""
    for module, name in (
        ("uniproc_executor", "UniProcExecutor"),
        ("multiproc_executor", "MultiprocExecutor"),
        ("ray_executor", "RayDistributedExecutor"),
        ("ray_executor_v2", "RayExecutorV2"),
    ):
        try:
            executor = getattr(importlib.import_module(f"vllm.v1.executor.{module}"), name)
        except ImportError:
            continue  # Ray is not installed
        assert "init_kv_output_aggregator" not in vars(executor)
        parameters = list(inspect.signature(executor.collective_rpc).parameters)
        assert parameters[:5] == ["self", "method", "timeout", "args", "kwargs"]


def test_the_lists_are_apart() -> None:
    """No method is both harmless and not."""
    assert not HARMLESS & (CHANGES | ADAPTERS)
