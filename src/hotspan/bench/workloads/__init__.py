"""The workloads by the name that `--workload` takes."""

from types import MappingProxyType
from typing import Final

from hotspan.bench.workloads.base import WorkloadOptions
from hotspan.bench.workloads.long_doc_qa import LongDocQaOptions

WORKLOADS: Final[MappingProxyType[str, type[WorkloadOptions]]] = MappingProxyType(
    {options.NAME: options for options in (LongDocQaOptions,)}
)
