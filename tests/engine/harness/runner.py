"""What stands in for the model: it writes known bytes as KV, and checks before each step what attention would read."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.executor.abstract import Executor
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

_LAYER = "model.layers.0.self_attn.attn"
_HEAD = 8
_MULTIPLIER = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def kv_of(tokens: list[int], lora: str | None = None) -> list[int]:
    """The KV of each token: a number that differs if any token up to it does, or the adapter."""
    state = hash(lora) & _MASK if lora else 1
    found = []
    for token in tokens:
        state = ((state ^ token) * _MULTIPLIER + 0x7F4A7C15) & _MASK
        state ^= state >> 29
        found.append(state)
    return found


@dataclass
class Row:
    """A request in the batch. blocks: of each KV cache group. prompt: tokens of its text."""

    tokens: list[int]
    kv: list[int]
    lora: str | None
    blocks: list[list[int]]
    prompt: int

    def cut(self, answered: int) -> None:
        """Drop tokens that were sampled in a step whose output the scheduler dropped."""
        del self.tokens[self.prompt + answered :], self.kv[self.prompt + answered :]

    def append(self, token: int) -> None:
        self.tokens.append(token)
        state = ((self.kv[-1] ^ token) * _MULTIPLIER + 0x7F4A7C15) & _MASK
        self.kv.append(state ^ (state >> 29))


class KnownBytes(Executor):
    """vLLM's executor over one worker without weights.

    wrong:   how many tokens were found with another KV than theirs, where attention would have read it.
    read:    how many were compared.
    on_step: called in each step that computes something, with how many tokens of each request were computed before and
             how many are now. Copies between engine and RAM take no time then.
    """

    on_step: Callable[[list[tuple[int, int]]], None] | None = None

    def _init_executor(self) -> None:
        self.wrong = self.read = self.steps = 0
        self._rows: dict[str, Row] = {}

    # -- start -----------------------------------------------------------------------------------------------------

    def collective_rpc(self, method: Any, timeout: Any = None, args: Any = (), kwargs: Any = None, **_: Any) -> Any:
        return [getattr(self, f"_{method}", lambda *rest: None)(*args)]

    def _get_kv_cache_spec(self) -> dict[str, Any]:
        size = self.cache_config.block_size
        return {_LAYER: FullAttentionSpec(block_size=size, num_kv_heads=1, head_size=_HEAD, dtype=torch.float32)}

    def _get_supported_kv_cache_layouts(self) -> list[str]:
        return ["LBHNC"]

    def _set_kv_cache_layout(self, layout: str) -> None:
        self.cache_config.kv_cache_layout = layout

    def _determine_available_memory(self) -> int:
        return 1 << 30

    def _get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    def compile_or_warm_up_model(self) -> None:
        return

    def get_kv_connector_handshake_metadata(self) -> Any:
        return []

    def _add_lora(self, lora: Any) -> bool:
        return True

    def _initialize_from_config(self, configs: list[KVCacheConfig]) -> None:
        (config,) = configs
        (spec,) = (group.kv_cache_spec for group in config.kv_cache_groups)
        self._block = spec.block_size
        floats = spec.page_size_bytes // 4
        self._cache = torch.zeros((config.num_blocks, floats), dtype=torch.float32)
        # One number a token, in the first eight bytes of its place in the page.
        self._kv = self._cache.numpy().view(np.uint64).reshape(config.num_blocks, self._block, -1)
        self.connector = KVConnectorFactory.create_connector(self.vllm_config, KVConnectorRole.WORKER, config)
        self.connector.register_kv_caches({_LAYER: self._cache})

    # -- a step ----------------------------------------------------------------------------------------------------

    def execute_model(self, scheduler_output: SchedulerOutput, non_block: bool = False) -> Any:
        self.steps += 1
        connector, output = self.connector, KVConnectorOutput()
        connector.handle_preemptions(scheduler_output.kv_connector_metadata)
        connector.bind_connector_metadata(scheduler_output.kv_connector_metadata)
        # As vLLM does: loads that this step's requests need come first, others beside it.
        begins_with_loads = getattr(scheduler_output, "has_sync_kv_loads", True)
        if begins_with_loads:
            connector.start_load_kv(None)
        sampled = self._compute(scheduler_output)
        if not begins_with_loads:
            connector.start_load_kv(None)
        connector.wait_for_save()
        if self.on_step is not None:
            worker = connector.connector_worker.worker
            worker.wait(set(worker._pending))
        if hasattr(connector, "get_transfer_results") and hasattr(output, "failed_recving"):  # since vLLM 0.32
            results = connector.get_transfer_results(scheduler_output.finished_req_ids)
            output.finished_sending, output.finished_recving = results.finished_sending, results.finished_recving
            output.failed_recving = results.failed_recving
        else:
            output.finished_sending, output.finished_recving = connector.get_finished(scheduler_output.finished_req_ids)
        output.invalid_block_ids = connector.get_block_ids_with_load_errors()
        output.kv_connector_stats = connector.get_kv_connector_stats()
        output.kv_connector_worker_meta = connector.build_connector_worker_meta()
        connector.clear_connector_metadata()
        names = list(scheduler_output.num_scheduled_tokens)
        result = ModelRunnerOutput(names, {name: n for n, name in enumerate(names)}, [sampled[name] for name in names])
        result.kv_connector_output = output
        done: Future[ModelRunnerOutput] = Future()
        done.set_result(result)
        return done if non_block else result

    def check_health(self) -> None:
        return

    def shutdown(self) -> None:
        self.connector.shutdown()

    # -- inside ----------------------------------------------------------------------------------------------------

    def _compute(self, output: SchedulerOutput) -> dict[str, list[int]]:
        for name in output.finished_req_ids:
            self._rows.pop(name, None)
        computed: dict[str, int] = {}
        for new in output.scheduled_new_reqs:
            lora = new.lora_request.lora_name if new.lora_request is not None else None
            tokens = list(new.prompt_token_ids or ())
            blocks = [list(each) for each in new.block_ids]
            self._rows[new.req_id] = Row(tokens, kv_of(tokens, lora), lora, blocks, len(tokens))
            computed[new.req_id] = new.num_computed_tokens
        cached = output.scheduled_cached_reqs
        for n, name in enumerate(cached.req_ids):
            row, blocks = self._rows[name], cached.new_block_ids[n]
            if name in cached.resumed_req_ids:
                row.blocks = [list(each) for each in blocks] if blocks else [[] for _ in row.blocks]
            elif blocks:
                for held, more in zip(row.blocks, blocks, strict=True):
                    held += more
            row.cut(cached.num_output_tokens[n])
            computed[name] = cached.num_computed_tokens[n]
        if self.on_step is not None and output.num_scheduled_tokens:
            self.on_step([(computed[name], count) for name, count in output.num_scheduled_tokens.items()])
        return {name: self._run(name, computed[name], count) for name, count in output.num_scheduled_tokens.items()}

    def _run(self, name: str, computed: int, count: int) -> list[int]:
        """Read what was computed before, compute what is scheduled, and sample once the text is complete."""
        row, end = self._rows[name], computed + count
        self._attend(row, computed, end)
        if end < len(row.tokens):
            return []
        row.append(3 + row.kv[end - 1] % 700)
        return row.tokens[-1:]

    def _attend(self, row: Row, computed: int, end: int) -> None:
        """Compare what was computed before, and write what is computed now."""
        places = np.arange(end)
        blocks = np.asarray(row.blocks[0])[places // self._block]
        here = self._kv[blocks, places % self._block, 0]
        self.read += computed
        self.wrong += int((here[:computed] != np.asarray(row.kv[:computed], np.uint64)).sum())
        self._kv[blocks[computed:], places[computed:] % self._block, 0] = row.kv[computed:end]
