"""The options of `hotspan plan`, and what the options of `hotspan serve` that may follow them say of an engine."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import typer

from hotspan.cli.flags import ENGINE_OPTIONS, OWN_OPTIONS, load
from hotspan.cli.options import takes
from hotspan.config.admin_token import AdminToken
from hotspan.config.configuration import Configuration
from hotspan.config.keys import FLAGS
from hotspan.config.kinds import COUNT, FRACTION, NOT_NEGATIVE, POSITIVE
from hotspan.config.options import json_option, option, options_of
from hotspan.core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """What to plan for."""

    workers: int | None = option(
        None,
        "Number of engines of this model on this machine, which share its RAM, drives and price. Default: "
        "--data-parallel-size, else with --machine as many as its GPUs run, else 1.",
        kind=COUNT,
    )
    models: int = option(1, "Number of models of this size on this machine.", kind=COUNT)
    tp: int = option(1, "Tensor-parallel size of each engine.", kind=COUNT)
    kv_dtype: str = option("auto", "Data type of the KV cache, as --kv-cache-dtype.")
    cpu: bool = option(False, "Device of the engine. Default: --gpu.", also="--gpu")
    disk: Path | None = option(
        None, "Directory for the disk tier. Implies --auto. Default: with --auto, common directories are checked."
    )
    auto: bool = option(
        False, "Plan for `hotspan serve --auto`. Default: plan for `hotspan serve` without tier options."
    )
    max_num_seqs: int | None = option(None, "Maximum number of concurrent requests, as --max-num-seqs.", kind=COUNT)
    measure: bool = option(
        True, "Measure disks by writing and reading up to 256 MiB each. Default: measure.", also="--no-measure"
    )
    users: int = option(100, "Number of texts in the working set.", kind=COUNT)
    tokens: int = option(10_000, "Tokens per text.", kind=COUNT)
    reuse: float | None = option(
        None,
        "Share of requests that ask for a text again, 0 to 1. Default: 1, or the hit rates that --from-metrics "
        "measured in the place of those of --users and --tokens.",
        kind=FRACTION,
    )
    prefill_rate: float | None = option(
        None,
        "Prefill rate of the engine, in tokens per second. Default: measured, or estimated with --machine.",
        kind=POSITIVE,
    )
    ram_rate: float | None = option(
        None,
        "Transfer rate between RAM and the engine, in GB/s. Default: measured, or estimated with --machine.",
        kind=POSITIVE,
    )
    disk_rate: float | None = option(None, "Read rate of the disk, in GB/s. Default: measured.", kind=POSITIVE)
    l2_rate: float | None = option(None, "Read rate of the L2, in GB/s. Default: measured.", kind=POSITIVE)
    l2_size: float = option(0.0, "Part of a shared L2 that this engine may fill, in GiB.", kind=NOT_NEGATIVE)
    machine: str | None = option(
        None, "Plan for this type of machine instead of this host, such as p4de.24xlarge. Implies --auto."
    )
    hourly_price: float | None = option(
        None, "Price of the whole machine, in USD per hour. Default: from --prices, or the shipped list.", kind=POSITIVE
    )
    prices: Path | None = option(
        None,
        'TOML file with a table prices."TYPE" for each type of machine: usd_per_hour, source and date. Default: the '
        "shipped list.",
    )
    extra_price: float = option(
        0.0, "One-off price of memory, drives or storage that the machine's tiers need, in USD.", kind=NOT_NEGATIVE
    )
    requests_per_hour: float | None = option(
        None, "Requests per hour and engine, for savings per month and payback.", kind=POSITIVE
    )
    from_metrics: str | None = option(
        None,
        "URL of a running `hotspan serve`, whose measured rates, sizes and, without --reuse, hit rates are used.",
    )
    admin: AdminToken = field(default_factory=AdminToken)
    json: bool = json_option()
    output: Path | None = option(None, "Write the plan to this JSON file.")
    report: Path | None = option(None, "Write the plan, with a plot, to this HTML file.", also="--html")

    @property
    def is_auto(self) -> bool:
        """Whether to plan for `hotspan serve --auto`."""
        return self.auto or self.disk is not None or self.machine is not None


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What of the engine's options, of the command line or of the model's files, sizes it."""

    tp: int
    data_parallel: int | None
    kv_dtype: str
    dtype: str
    max_model_len: int | None
    max_num_seqs: int | None
    utilization: float | None
    pool_bytes: int | None


def configuration_of(model: str, options: PlanOptions, words: Sequence[str]) -> Configuration:
    """What `hotspan serve MODEL` would be given with these options. Raises: ConfigError."""
    app = typer.Typer()

    @app.command(context_settings=ENGINE_OPTIONS)
    @takes(FLAGS)
    def serve(context: typer.Context, **_flags: Any) -> None: ...

    is_sized = any(word.partition("=")[0] in ("--disk-gib", "--disk-compress") for word in words)
    disk = ("--disk", str(options.disk)) if options.disk is not None and is_sized else ()
    command = typer.main.get_command(app)
    with command.make_context("serve", [*disk, *words]) as context:
        return load(cast(typer.Context, context), model)


def engine_options(options: PlanOptions, configuration: Configuration) -> EngineOptions:
    """Those that plan itself takes come first."""
    parser = argparse.ArgumentParser(exit_on_error=False, add_help=False, allow_abbrev=False)
    for flags, kind in (
        (("--tensor-parallel-size", "-tp"), int),
        (("--data-parallel-size", "-dp"), int),
        (("--max-model-len",), int),
        (("--max-num-seqs",), int),
        (("--gpu-memory-utilization",), float),
        (("--kv-cache-memory-bytes",), int),
    ):
        parser.add_argument(*flags, type=kind)
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--dtype", default="auto")
    words = [word.replace("_", "-") if word.startswith("--") else word for word in configuration.engine_words]
    try:
        given, others = parser.parse_known_args(words)
    except argparse.ArgumentError as error:
        raise ConfigError(str(error)) from error
    if others:  # only vLLM knows whether it has them: seconds
        from hotspan.engine.arguments import parse_engine_arguments

        own = tuple(each.flag for each in options_of(PlanOptions))
        parse_engine_arguments(configuration.model, configuration.engine_words, own_options=(*OWN_OPTIONS, *own))
    return EngineOptions(
        tp=options.tp if options.tp > 1 else given.tensor_parallel_size or 1,
        data_parallel=given.data_parallel_size,
        kv_dtype=given.kv_cache_dtype if options.kv_dtype == "auto" else options.kv_dtype,
        dtype=given.dtype,
        max_model_len=given.max_model_len,
        max_num_seqs=options.max_num_seqs or given.max_num_seqs,
        utilization=given.gpu_memory_utilization,
        pool_bytes=given.kv_cache_memory_bytes,
    )
