"""The workloads by the name that `--workload` takes."""

from types import MappingProxyType
from typing import Final

from hotspan.bench.workloads.base import WorkloadOptions
from hotspan.bench.workloads.long_doc_qa import LongDocQaOptions
from hotspan.bench.workloads.multi_round_chat import MultiRoundChatOptions

WORKLOADS: Final[MappingProxyType[str, type[WorkloadOptions]]] = MappingProxyType(
    {options.NAME: options for options in (LongDocQaOptions, MultiRoundChatOptions)}
)
