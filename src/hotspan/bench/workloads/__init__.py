"""The workloads by the name that `--workload` takes."""

from types import MappingProxyType
from typing import Final

from hotspan.bench.workloads.base import WorkloadOptions
from hotspan.bench.workloads.long_doc_permutator import LongDocPermutatorOptions
from hotspan.bench.workloads.long_doc_qa import LongDocQaOptions
from hotspan.bench.workloads.multi_round_chat import MultiRoundChatOptions
from hotspan.bench.workloads.prefix_repetition import PrefixRepetitionOptions
from hotspan.bench.workloads.prefix_suffix_tuner import PrefixSuffixTunerOptions
from hotspan.bench.workloads.rag_qa_quality import RagQaQualityOptions
from hotspan.bench.workloads.random_prefill import RandomPrefillOptions
from hotspan.bench.workloads.trace_replay import TraceReplayOptions

WORKLOADS: Final[MappingProxyType[str, type[WorkloadOptions]]] = MappingProxyType(
    {
        options.NAME: options
        for options in (
            LongDocQaOptions,
            MultiRoundChatOptions,
            LongDocPermutatorOptions,
            RagQaQualityOptions,
            RandomPrefillOptions,
            PrefixSuffixTunerOptions,
            PrefixRepetitionOptions,
            TraceReplayOptions,
        )
    }
)
