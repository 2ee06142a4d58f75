"""Two ranks of one engine, each with a slab of its own, as on two hosts: an executor over two `KnownBytes`."""

from __future__ import annotations

import copy
from concurrent.futures import Future
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig

from .runner import KnownBytes

NODES: dict[str, Any] = {"tensor_parallel_size": 2, "nnodes": 2, "distributed_executor_backend": "mp"}
"""vLLM's options with which the configuration tells of them."""


class TwoHosts(KnownBytes):
    """vLLM's executor over two ranks, of which the second finds its slab by another name: each node has its own id.

    ranks: with what each found in its own KV cache.
    """

    def _init_executor(self) -> None:
        super()._init_executor()
        self.ranks = [KnownBytes(self._config_of(rank)) for rank in range(2)]

    def _config_of(self, rank: int) -> Any:
        config = copy.copy(self.vllm_config)
        config.parallel_config = copy.copy(config.parallel_config)
        config.parallel_config.rank = rank
        config.kv_transfer_config = copy.deepcopy(config.kv_transfer_config)
        if rank:
            config.kv_transfer_config.engine_id += "-elsewhere"
            self.alter(config)
        return config

    def alter(self, config: Any) -> None:
        """Start the second rank with other options."""

    @property
    def found_wrong(self) -> int:
        return sum(rank.wrong for rank in self.ranks)

    def _initialize_from_config(self, configs: list[KVCacheConfig]) -> None:
        for rank in self.ranks:
            rank._initialize_from_config(configs)

    def get_kv_connector_handshake_metadata(self) -> Any:
        return [{(0, n): rank.connector.get_handshake_metadata()} for n, rank in enumerate(self.ranks)]

    def execute_model(self, scheduler_output: SchedulerOutput, non_block: bool = False) -> Any:
        self.steps += 1
        outputs = [rank.execute_model(scheduler_output) for rank in self.ranks]
        result = self._aggregator.aggregate(outputs)
        self.wrong, self.read = self.found_wrong, sum(rank.read for rank in self.ranks)
        done: Future[Any] = Future()
        done.set_result(result)
        return done if non_block else result

    def init_kv_output_aggregator(self, connector: Any) -> None:
        super().init_kv_output_aggregator(connector)
        self._aggregator = KVOutputAggregator.from_connector(connector, len(self.ranks))

    def shutdown(self) -> None:
        for rank in self.ranks:
            rank.shutdown()
