"""OutputConnector: vLLM's interface for encoder outputs, over hotspan's tiers.

scheduler   EncoderOutputs: what to load and store     -- orders, with the step -->
worker      vLLM's encoder cache <-> slots of the slab <-- report, with its output --
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from vllm.config import ECTransferConfig, VllmConfig
from vllm.distributed.ec_transfer import ensure_ec_transfer_initialized, ensure_ec_transfer_shutdown
from vllm.distributed.ec_transfer.ec_connector.base import (
    ECConnectorBase,
    ECConnectorMetadata,
    ECConnectorRole,
    ECConnectorWorkerMetadata,
)
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ECConnectorOutput
from vllm.v1.request import Request

from hotspan.engine.encoder import slots
from hotspan.engine.encoder.outputs import CONNECTOR, EncoderOutputs, Orders, Report

logger = logging.getLogger(__name__)

_HALF: Final = "half"

Slots = Callable[[int], memoryview]
"""The memory of a slot."""


def offer_outputs(vllm_config: VllmConfig, outputs: EncoderOutputs) -> None:
    """Let the scheduler that is being made ask for encoder outputs. Mutates: the configuration of this process."""
    _configure(vllm_config, outputs)


def offer_slots(vllm_config: VllmConfig, slot: Slots) -> None:
    """Let the worker of this process load and store encoder outputs. Mutates: the configuration of this process."""
    _configure(vllm_config, slot)
    ensure_ec_transfer_shutdown()  # of an engine that this process had before
    ensure_ec_transfer_initialized(vllm_config)


def _configure(vllm_config: VllmConfig, half: EncoderOutputs | Slots) -> None:
    """Name the connector. Not in the engine's arguments: it would then encode an example at each start, and end if it
    can't."""
    vllm_config.ec_transfer_config = ECTransferConfig(
        ec_connector=CONNECTOR,
        ec_connector_module_path=__name__,
        ec_role="ec_both",
        ec_connector_extra_config={_HALF: half},
    )


@dataclass
class StepOrders(ECConnectorMetadata):
    """What goes to the worker with a step."""

    orders: Orders


@dataclass
class StepReport(ECConnectorWorkerMetadata):
    """What comes with a step's output. There is one worker."""

    report: Report

    def aggregate(self, other: ECConnectorWorkerMetadata) -> ECConnectorWorkerMetadata:
        return self


class OutputConnector(ECConnectorBase):
    """Either half: the scheduler's over EncoderOutputs, the worker's over the slab."""

    def __init__(self, vllm_config: VllmConfig, role: ECConnectorRole) -> None:
        super().__init__(vllm_config, role)
        self._half: Any = vllm_config.ec_transfer_config.ec_connector_extra_config[_HALF]
        self._orders = Orders()
        self._report: Report | None = None
        self._began_s = 0.0

    # -- the scheduler's -----------------------------------------------------------------------------------------------

    def ensure_cache_available(self, request: Request, num_computed_tokens: int) -> bool:
        return bool(self._half.is_ready(request.request_id, num_computed_tokens))

    def has_cache_item(self, identifier: str) -> bool:
        return bool(self._half.begin_load(identifier))

    def update_state_after_alloc(self, request: Request, index: int) -> None:
        self._half.schedule(request.request_id, request.mm_features[index].identifier)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> ECConnectorMetadata:
        computes = scheduler_output.total_num_scheduled_tokens > 0
        return StepOrders(self._half.orders(scheduler_output.free_encoder_mm_hashes, computes=computes))

    def update_connector_output(self, connector_output: ECConnectorOutput) -> None:
        meta = connector_output.ec_connector_worker_meta
        if isinstance(meta, StepReport):
            self._half.note(meta.report)

    # -- the worker's --------------------------------------------------------------------------------------------------

    def start_load_caches(self, encoder_cache: dict[str, torch.Tensor], **kwargs: Any) -> None:
        meta = self._get_connector_metadata()
        self._orders = meta.orders if isinstance(meta, StepOrders) else Orders()
        self._report = Report(self._orders.number) if self._orders.number else None
        for identifier, (slot, rows) in self._orders.loads.items():
            encoder_cache[identifier] = slots.get(self._half(slot), rows)
        self._began_s = time.perf_counter()

    def save_caches(self, encoder_cache: dict[str, torch.Tensor], mm_hash: str, **kwargs: Any) -> None:
        report = self._report
        if report is None or mm_hash not in self._orders.stores:
            return
        if report.encoder_s is None:  # the first one is saved when all are encoded
            report.encoder_s = time.perf_counter() - self._began_s
        index, rows = self._orders.stores[mm_hash]
        output, slot = encoder_cache[mm_hash], self._half(index)
        try:
            if slots.is_kept(output, rows):
                report.stored[mm_hash] = output.nbytes if slots.fits(output, slot) else 0
                if report.stored[mm_hash]:
                    slots.put(output, slot)
        except Exception:  # it is not stored, and the request goes on
            report.stored.pop(mm_hash, None)
            logger.exception("encoder_output_not_stored")

    def build_connector_worker_meta(self) -> ECConnectorWorkerMetadata | None:
        report, self._report = self._report, None
        return StepReport(report) if report is not None else None
