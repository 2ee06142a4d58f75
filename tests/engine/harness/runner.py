"""What stands in for the model: it writes known bytes as KV, and checks before each step what attention would read."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.executor.abstract import Executor
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.worker.worker_base import CompilationTimes

_LAYER = "model.layers.0.self_attn.attn"
_HEAD = 8
_MULTIPLIER = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1
_MIXED = 0x5EED5EED5EED5EED


def weights_of(directory: Path) -> int:
    """What stands for the weights that a directory has."""
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(directory.glob("*.safetensors"))))
    return int.from_bytes(digest.digest()[:8], "little")


def kv_of(tokens: list[int], lora: str | None = None, weights: int = 0) -> list[int]:
    """The KV of each token: a number that differs if any token up to it does, the adapter or the weights."""
    state = (hash(lora) & _MASK if lora else 1) ^ weights
    found = []
    for token in tokens:
        state = ((state ^ token) * _MULTIPLIER + 0x7F4A7C15) & _MASK
        state ^= state >> 29
        found.append(state)
    return found


@dataclass
class Row:
    """A request in the batch.

    blocks: of each KV cache group. prompt: tokens of its text. is_mixed: it came before the weights changed, and what
    it computes is nobody's.
    """

    tokens: list[int]
    kv: list[int]
    lora: str | None
    blocks: list[list[int]]
    prompt: int
    is_mixed: bool = False

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
    weights: that it has. mixed: requests that were there when they changed.
    on_step: called in each step that computes something, with how many tokens of each request were computed before and
             how many are now. Copies between engine and RAM take no time then.
    """

    on_step: Callable[[list[tuple[int, int]]], None] | None = None

    def _init_executor(self) -> None:
        self.wrong = self.read = self.steps = 0
        self._rows: dict[str, Row] = {}
        self._directory = Path(self.model_config.model)
        self.weights = weights_of(self._directory)
        self.mixed: set[str] = set()
        self._adapters: dict[int, str] = {}

    # -- start -----------------------------------------------------------------------------------------------------

    def collective_rpc(self, method: Any, timeout: Any = None, args: Any = (), kwargs: Any = None, **_: Any) -> Any:
        if callable(method):
            return [method(self)]
        return [getattr(self, f"_{method}", lambda *rest, **named: None)(*args, **(kwargs or {}))]

    def _get_kv_cache_spec(self) -> dict[str, Any]:
        size = self.cache_config.block_size
        return {_LAYER: FullAttentionSpec(block_size=size, num_kv_heads=1, head_size=_HEAD, dtype=torch.float32)}

    def _get_supported_kv_cache_layouts(self) -> list[str]:
        return ["LBHNC"]

    def _set_kv_cache_layout(self, layout: str, cp_kv_cache_interleave_size: int = 1) -> None:  # the latter since 0.33
        self.cache_config.kv_cache_layout = layout

    def _determine_available_memory(self) -> int:
        return 1 << 30

    def _get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    def _compile_or_warm_up_model(self) -> CompilationTimes:
        return CompilationTimes(0.0, 0.0)

    def get_kv_connector_handshake_metadata(self) -> Any:
        return []

    def _add_lora(self, lora: Any) -> bool:
        self._adapter(lora)
        return True

    def _remove_lora(self, number: int) -> bool:
        return self._adapters.pop(number, None) is not None

    def _adapter(self, lora: Any) -> str | None:
        """What stands for an adapter's content, which is read as vLLM reads it: once, unless it says otherwise."""
        if lora is None:
            return None
        if lora.load_inplace or lora.lora_int_id not in self._adapters:
            files = sorted(path for path in Path(lora.lora_path).glob("*") if path.is_file())
            content = hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()
            self._adapters[lora.lora_int_id] = content if files else lora.lora_name
        return self._adapters[lora.lora_int_id]

    def _reload_weights(self, weights_path: str | None = None, **_: Any) -> None:
        self._directory = Path(weights_path) if weights_path is not None else self._directory
        self.weights = weights_of(self._directory)

    def _update_weights(self, update_info: Any) -> None:
        self.weights = int(update_info)

    def _sleep(self, level: int = 1) -> None:
        self.weights ^= 0 if level == 1 else 1 << 40  # what is left there

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
        if hasattr(connector, "get_transfer_results") and hasattr(output, "failed_recving"):  # since vLLM 0.30
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

    def mix(self, names: Iterable[str]) -> None:
        """These requests are there while the weights change."""
        self.mixed.update(names)
        for name in self.mixed & self._rows.keys():
            self._rows[name].is_mixed = True

    def _compute(self, output: SchedulerOutput) -> dict[str, list[int]]:
        for name in output.finished_req_ids:
            self._rows.pop(name, None)
        computed: dict[str, int] = {}
        for new in output.scheduled_new_reqs:
            lora = self._adapter(new.lora_request)
            tokens = list(new.prompt_token_ids or ())
            blocks = [list(each) for each in new.block_ids]
            kv = kv_of(tokens, lora, self.weights)
            self._rows[new.req_id] = Row(tokens, kv, lora, blocks, len(tokens), new.req_id in self.mixed)
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
        kv = np.asarray(row.kv[:end], np.uint64)
        if row.is_mixed:
            kv ^= np.uint64(_MIXED)
        else:
            self.read += computed
            self.wrong += int((here[:computed] != kv[:computed]).sum())
        self._kv[blocks[computed:], places[computed:] % self._block, 0] = kv[computed:]
