"""What a benchmark is asked to do, from flags and a JSON file, with flat keys in both."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from itertools import islice
from pathlib import Path
from typing import Any, Self

from hotspan.bench.records import TIMED_ROUNDS, RoundName, Slo
from hotspan.bench.workloads import WORKLOADS
from hotspan.bench.workloads.base import ClosedLoop, OpenLoop, Round, Scale, WorkloadOptions
from hotspan.bench.workloads.sessions import Arrivals, due_times
from hotspan.config.kinds import COUNT, NATURAL, NOT_NEGATIVE, POSITIVE, TEXT, between
from hotspan.config.options import build, check, option, options_of
from hotspan.core.errors import ConfigError, did_you_mean
from hotspan.core.types import MIB, PAGE_BYTES, round_up


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchConfig:
    """One run of one workload against one server.

    `options` are the workload's own, with its prefix. `salt` is the `cache_salt` of all requests, if not empty.
    """

    options: WorkloadOptions
    engine_url: str = option("", "URL of the server, such as http://localhost:8080. Required.")
    model: str = option("", "Model name. Default: the first model that the server lists.")
    kv_cache_volume: float = option(100.0, "Size of the KV cache that the workload fills, in GiB.", kind=POSITIVE)
    tokens_per_gb_kvcache: int = option(
        0,
        "Tokens per GiB of KV cache. Default: from --lmcache-url, the model's config.json, or the server's metrics.",
        kind=NATURAL,
    )
    model_config: str = option(
        "",
        "Directory with the model's config.json. Default: the directory that the server reports, if it is local. If "
        "it is given and has a tokenizer.json, long-doc-permutator, prefix-suffix-tuner and (with --rag-dataset) "
        "rag-qa-quality send the requests that LMCache's bench makes with that tokenizer.",
    )
    lmcache_url: str = option(
        "", "URL of an LMCache server's HTTP port, which tells the tokens per GiB. Default: not asked."
    )
    seed: int = option(42, "Random seed for texts and order.")
    ignore_eos: bool = option(False, "Generate the maximum number of tokens and ignore end-of-text tokens (vLLM only).")
    no_warmup: bool = option(False, "Skip the warm-up round.")
    engine_pid: int = option(
        0, "Process ID of a local server, to measure the CPU time of it and its child processes. Default: none."
    )
    slo_ttft_ms: float = option(
        0.0,
        "Maximum time to first token of requests that count as goodput, in ms. Default: no limit.",
        kind=NOT_NEGATIVE,
    )
    slo_itl_ms: float = option(
        0.0,
        "Maximum mean inter-token latency of requests that count as goodput, in ms. Default: no limit.",
        kind=NOT_NEGATIVE,
    )
    request_timeout: float = option(1800.0, "Maximum time without received data before a request fails, in seconds.")
    request_rate: float = option(
        0.0,
        "Send the requests of the query round at this rate per second, whatever earlier answers take (open loop). "
        "Default: as the workload does. multi-round-chat has --mrc-qps, trace-replay --trace-rate-scale.",
        kind=NOT_NEGATIVE,
    )
    arrivals: Arrivals = option("poisson", "Distribution of arrivals for --request-rate: poisson, or even.")
    check: int = option(
        0,
        "Requests to send again and compare with answers computed without a cache, or found in the engine's own. "
        "Default: 0 (no check).",
        kind=NATURAL,
    )
    rounds: tuple[RoundName, ...] = TIMED_ROUNDS
    api_key: str = field(default="", repr=False)
    admin_token: str = field(default="", repr=False)
    salt: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        check(self)
        if self.engine_url and not self.engine_url.startswith(("http://", "https://")):
            raise ConfigError(f"--engine-url must start with http:// or https://, not {self.engine_url!r}")
        if self.lmcache_url and not self.lmcache_url.startswith(("http://", "https://")):
            raise ConfigError(f"--lmcache-url must start with http:// or https://, not {self.lmcache_url!r}")

    @property
    def base_url(self) -> str:
        """The server's URL without a trailing slash or /v1."""
        return self.engine_url.rstrip("/").removesuffix("/v1")

    @property
    def played(self) -> tuple[RoundName, ...]:
        """The rounds to play."""
        return (RoundName.QUERY, RoundName.ANEW) if self.no_warmup else self.rounds

    @property
    def slo(self) -> Slo | None:
        """The objective that goodput is counted against, or None if none was named."""
        if not self.slo_ttft_ms and not self.slo_itl_ms:
            return None
        return Slo(self.slo_ttft_ms / 1e3 or None, self.slo_itl_ms / 1e3 or None)

    @property
    def scale(self) -> Scale:
        """How much KV the workload touches, once tokens per GiB is resolved if it needs that."""
        return Scale(self.kv_cache_volume, self.tokens_per_gb_kvcache or None)

    def paced(self, round: Round) -> Round:
        """The round at the rate of --request-rate, if it is the query round and there is one.

        Raises: ConfigError for a workload with times of its own.
        """
        if not self.request_rate or round.name is not RoundName.QUERY:
            return round
        if not isinstance(round, ClosedLoop):
            raise ConfigError(f"--request-rate: {self.options.NAME} has arrival times of its own; leave it out")
        due = due_times(self.request_rate, self.arrivals, self.seed)
        return OpenLoop(round.name, round.prompts, tuple(islice(due, len(round.prompts))))

    def to_flat(self, *, portable: bool = False) -> dict[str, Any]:
        """The configuration in flat keys; `portable` leaves out what belongs to one server or machine."""
        left_out = {"engine_url", "engine_pid", "model_config", "lmcache_url"} if portable else set()
        flat: dict[str, Any] = {"workload": self.options.NAME}
        flat |= {option.name: getattr(self, option.name) for option in GENERAL if option.name not in left_out}
        prefix = self.options.PREFIX
        return flat | {f"{prefix}_{f.name}": getattr(self.options, f.name) for f in fields(self.options)}

    @classmethod
    def from_flat(cls, flat: Mapping[str, Any], **more: Any) -> Self:
        """The configuration that `to_flat` gives; keys of other workloads are let pass.

        Raises: ConfigError for an unknown workload.
        """
        name = str(flat.get("workload", ""))
        if name not in WORKLOADS:
            raise ConfigError(f"--workload must be one of {', '.join(WORKLOADS)}; {name!r} is none of them")
        kind = WORKLOADS[name]
        return build(cls, flat, options=build(kind, flat, f"{kind.PREFIX}_"), **more)


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageBench:
    """What of storage and memory to measure, and on how much."""

    directory: Path = option(Path("."), "Directory to measure. A temporary directory is created in it.")
    size_gib: float = option(1.0, "Size of the slab and of fio's file, in GiB.", kind=between(0.01, 1e6, float))
    chunk_mib: float = option(14.0, "Chunk size, in MiB.", kind=between(0.02, 1e6, float))
    threads: int = option(4, "Number of I/O threads and of fio jobs.", kind=COUNT)
    repetitions: int = option(3, "Number of rounds. Medians are reported.", kind=COUNT)
    output: Path | None = option(None, "Write results and machine data to this JSON file.")
    require_fio: bool = option(False, "Fail with exit status 2 if fio is not installed. Default: measure without fio.")

    @property
    def payload_bytes(self) -> int:
        return round_up(int(self.chunk_mib * MIB), PAGE_BYTES)


GENERAL = options_of(BenchConfig, panel="General options")
"""Options that every workload shares."""

OPTIONS = (
    *GENERAL,
    *(option for name, kind in WORKLOADS.items() for option in options_of(kind, f"{kind.PREFIX}_", f"{name} options")),
)
_KEYS = {"workload": TEXT} | {option.name: option.kind for option in OPTIONS}


def read_config_file(path: Path) -> dict[str, Any]:
    """The flat keys in a JSON file.

    Raises: ConfigError if it can't be read, is no object, or has unknown keys or values of the wrong type.
    """
    try:
        flat = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"--config {path} can't be read as JSON: {error}") from error
    if not isinstance(flat, dict):
        raise ConfigError(f'--config {path} must hold one JSON object, such as {{"workload": "long-doc-qa"}}')
    values = {}
    for key, value in flat.items():
        if key not in _KEYS:
            hint = did_you_mean(key, _KEYS, "see 'hotspan bench engine --help'")
            raise ConfigError(f"{path}: unknown key {key!r} in the benchmark's configuration: {hint}")
        values[key] = value if value == "" else _KEYS[key].parse(value, f"{path}: {key}")
    return values


def write_config_file(path: Path, config: BenchConfig) -> None:
    """The portable keys of `config`, readable by `read_config_file`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(config.to_flat(portable=True), indent=2) + "\n")
