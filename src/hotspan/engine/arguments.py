"""The engine's options: whatever vLLM takes, checked so that a typo is an error that names what was meant.

And the tiers of an engine for which nobody named any.
"""

import contextlib
import dataclasses
import re
from argparse import SUPPRESS, Namespace
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import psutil
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform
from vllm.utils.argparse_utils import FlexibleArgumentParser

from hotspan.config.connector import HASH, transfer_config
from hotspan.config.engine_options import split_words
from hotspan.config.environment import environment
from hotspan.config.planned import with_named
from hotspan.config.settings import CacheSettings
from hotspan.config.wrong import each, is_collecting, together
from hotspan.core.errors import ConfigError, did_you_mean
from hotspan.engine.contract import ENGINE, STATES_SINCE, engine_version
from hotspan.engine.entrypoints import make_arg_parser, validate_parsed_serve_args
from hotspan.engine.hosts import over_hosts_refused
from hotspan.engine.values import wrong_values
from hotspan.plan.host import Host
from hotspan.plan.memory import available_memory
from hotspan.plan.shape import ModelShape
from hotspan.plan.tiers import Extent, TierPlan, choose_tiers
from hotspan.plan.weights import is_remote, model_directory, weights_bytes

_ARGUMENT = re.compile(r"argument (-[\w/-]+)")
_HUB_ID = re.compile(r"[\w][\w.-]*/[\w][\w.-]*")
_NGRAM = ("ngram", "[ngram]")
_NO_DRAFT_FILES = ("ngram", "[ngram]", "ngram_gpu", "suffix", "extract_hidden_states", "custom_class")
"""Methods of speculative decoding that load no draft model."""

_NO_GRPC = "hotspan serves HTTP only"
_NO_SUPERVISOR = "hotspan runs one engine behind its own server: `hotspan route` balances between several"
_NO_H11 = "hotspan's server has limits of its own for heads of requests"
NOT_SERVED = {
    "grpc": _NO_GRPC,
    "grpc_port": _NO_GRPC,
    "api_server_count": "hotspan runs one API server an engine",
    "uds": "hotspan listens on --host and --port",
    "data_parallel_supervisor_port": _NO_SUPERVISOR,
    "dp_supervisor_probe_interval_s": _NO_SUPERVISOR,
    "dp_supervisor_probe_timeout_s": _NO_SUPERVISOR,
    "dp_supervisor_probe_failure_threshold": _NO_SUPERVISOR,
    "h11_max_incomplete_event_size": _NO_H11,
    "h11_max_header_count": _NO_H11,
}
"""Options of vLLM's server that hotspan's does not have, and why."""


class _Parser(FlexibleArgumentParser):
    """vLLM's parser, raising instead of printing its usage and exiting."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"an engine option is wrong: {message}")


def parse_engine_arguments(model: str, options: Sequence[str], own_options: Sequence[str] = ()) -> Namespace:
    """vLLM's arguments for serving `model`.

    own_options: hotspan's option names, to suggest as well.
    Raises: ConfigError for an unknown option (naming the nearest known ones), a wrong value, or a missing model.
    """
    _check_model(model)
    parser = make_arg_parser(_Parser(allow_abbrev=False))
    known = [name for action in parser._actions for name in action.option_strings]
    arguments, unknown = _parsed(parser, model, options)
    for before, word in zip(["", *unknown], unknown, strict=False):
        if before.startswith("--") and not word.startswith("-"):
            continue  # the value of an option that is named already
        with each():
            raise ConfigError(_unknown(word, [*known, *own_options]))
    arguments.model = model
    for wrong in wrong_values(arguments, environment()):
        with each():
            raise ConfigError(wrong)
    _check_draft(draft_model(arguments))
    if arguments.gpu_memory_utilization == parser.get_default("gpu_memory_utilization"):
        _share_host_memory(arguments)
    for name, reason in NOT_SERVED.items():
        given = getattr(arguments, name, None)
        if given != parser.get_default(name) and (name, given) != ("api_server_count", 1):
            raise ConfigError(f"--{name.replace('_', '-')} can't be used: {reason}")
    with together():
        _validate(arguments)
    return arguments


def _validate(arguments: Namespace) -> None:
    """Raise ConfigError for what vLLM's own check of a server's options refuses."""
    try:
        validate_parsed_serve_args(arguments)
    except Exception as error:  # vLLM's code: which errors it raises differs between its versions
        raise ConfigError(f"the engine refuses these options: {error}") from error


def _parsed(parser: _Parser, model: str, options: Sequence[str]) -> tuple[Namespace, list[str]]:
    """What the parser makes of the options, and the words that it does not know.

    Where all that is wrong is collected, an option with a wrong value is left out after the parser has named it.
    """
    try:
        return parser.parse_known_args([model, *options])
    except ConfigError as error:
        named = _ARGUMENT.search(str(error))
        flags = named[1].split("/") if named is not None else []
        left = [group for group in split_words(options) if group.words[0].partition("=")[0] not in flags]
        words = [word for group in left for word in group.words]
        if not is_collecting() or len(words) == len(options):
            raise
        with each():
            raise
        return _parsed(parser, model, words)


def show_options(about: str) -> None:
    """Print vLLM's options, without those that hotspan refuses, and exit with status 0.

    about: "all", a group such as "CacheConfig", or a part of a name.
    """
    parser = make_arg_parser(FlexibleArgumentParser(prog="hotspan serve MODEL", allow_abbrev=False))
    for action in parser._actions:
        if action.dest in NOT_SERVED:
            action.help = SUPPRESS
    parser.parse_args([f"--help={about}"])


def why_no_tiers(arguments: Namespace) -> str | None:
    """Why tiers can't serve the model of these arguments; None if they can, or if its configuration can't be read."""
    try:
        model = AsyncEngineArgs.from_cli_args(arguments).create_model_config()
    except (ValueError, OSError, ImportError, NotImplementedError):
        return None  # the engine reports it when it starts
    if not model.is_prefix_caching_supported:
        return f"no request can reuse the KV cache of another with {model.architecture}"
    if model.is_hybrid and ENGINE < STATES_SINCE:
        return f"{model.architecture} has recurrent states, which are not kept with vLLM {engine_version()}"
    if model.is_hybrid and arguments.enable_prefix_caching is False:
        return f"{model.architecture} has recurrent states, which are not kept with --no-enable-prefix-caching"
    return None


def add_cache(arguments: Namespace, settings: CacheSettings | None) -> None:
    """Make the engine use hotspan's tiers (None: the engine's own prefix cache only).

    Answers then have the number of cached tokens and, with speculative decoding, of drafted and accepted ones.

    Mutates: `arguments`.
    Raises:  ConfigError where an engine option stands in the way.
    """
    arguments.enable_prompt_tokens_details = True
    if _speculation(arguments) and getattr(arguments, "per_request_spec_decode_metrics", None) == "none":
        arguments.per_request_spec_decode_metrics = "summary"
    if settings is None:
        return
    if arguments.kv_transfer_config is not None:
        raise ConfigError("--kv-transfer-config is hotspan's to set: leave it out, or serve with --no-cache")
    arguments.kv_transfer_config = transfer_config(dataclasses.replace(settings, is_served=True))
    arguments.prefix_caching_hash_algo = HASH


def check_hosts(arguments: Namespace, settings: CacheSettings | None, *, is_headless: bool = False) -> int:
    """Over how many hosts one engine of these arguments is.

    is_headless: this is a further one, without the server.

    Raises: ConfigError for tiers that such an engine can't have (engine/hosts.py), or that each host would size itself,
            and for adapters, of which there are private copies on the server's host only.
    """
    _check_node(arguments, is_headless=is_headless)
    ranks = arguments.tensor_parallel_size * arguments.pipeline_parallel_size * arguments.prefill_context_parallel_size
    replicas = arguments.data_parallel_size
    local = arguments.data_parallel_size_local or max(replicas * ranks // arguments.nnodes // ranks, 1)
    hosts = max(1, arguments.nnodes // max(1, replicas // local))  # as vLLM's ParallelConfig.nnodes_within_dp
    if hosts == 1:
        return 1
    if arguments.enable_lora:
        raise ConfigError(
            "--enable-lora can't be had by an engine over several hosts: adapters are loaded from copies that are on "
            "the server's host only. Leave it out, or give each host an engine of its own, behind `hotspan route`"
        )
    if settings is not None:
        over_hosts_refused(settings, f"--nnodes {arguments.nnodes}")
        if not settings.ram_bytes:
            raise ConfigError(
                "the hosts of one engine need RAM tiers of one size, which nobody can choose for all of them: give "
                "--ram-gib, the same on each host, or --no-cache"
            )
    return hosts


def check_replicas(arguments: Namespace) -> None:
    """Raise ConfigError for replicas that would be on further hosts: nobody starts their schedulers there."""
    replicas, ranks = arguments.data_parallel_size, arguments.tensor_parallel_size * arguments.pipeline_parallel_size
    local = arguments.data_parallel_size_local or max(replicas * ranks // arguments.nnodes // ranks, 1)
    if arguments.nnodes > 1 and local < replicas:
        raise ConfigError(
            f"--data-parallel-size {replicas} with --nnodes {arguments.nnodes} has replicas on further hosts, and "
            "`hotspan serve` runs those of one host: give each host a server of its own, behind `hotspan route`, or "
            "start the engine by your own `vllm serve` (docs/add-to-vllm.md)"
        )


def _check_node(arguments: Namespace, *, is_headless: bool) -> None:
    """Raise ConfigError for a host that would have no ranks to run, or none of whose ranks the server would know."""
    if arguments.headless and not is_headless:
        raise ConfigError("--headless is for one model: there is no server to choose between several")
    if is_headless and (arguments.nnodes < 2 or not arguments.node_rank):
        raise ConfigError(
            "--headless runs the ranks of a further host of one engine: give --nnodes and --node-rank, from 1 on, and "
            "--master-addr, as on the host with the server (--node-rank 0). Replicas on other hosts are servers of "
            "their own, behind `hotspan route`"
        )
    if arguments.node_rank and not is_headless:
        raise ConfigError(
            f"--node-rank {arguments.node_rank} is a host without the server, which is on that of --node-rank 0: give "
            "--headless as well"
        )


def plan_engine(
    arguments: Namespace, host: Host, settings: CacheSettings | None = None, extent: Extent = Extent.ALL
) -> TierPlan:
    """The tiers for the engine of these arguments; data-parallel replicas have one plan each.

    settings: what was named, which the plan has as it is.
    Mutates: `arguments`: a CPU engine for which nobody said so gets the pool of the plan.
    """
    if settings is not None and host.memory is not None and current_platform.is_cpu():
        # The engine's own pool is part of what a RAM tier leaves that was named.
        left = host.memory.bytes - settings.ram_bytes * arguments.data_parallel_size
        host = replace(host, memory=replace(host.memory, bytes=max(0, left)))
    shape, weights = None, 0
    with contextlib.suppress(ConfigError, OSError):  # a model that is not here yet: the machine alone decides
        directory = model_directory(arguments.model)
        weights = weights_bytes(directory) + _draft_bytes(draft_model(arguments))
        shape = ModelShape.from_config(
            directory,
            kv_dtype=arguments.kv_cache_dtype,
            dtype=str(arguments.dtype),
            tensor_parallel=arguments.tensor_parallel_size,
        )
        if (arguments.max_model_len or 0) > 0:
            shape = replace(shape, max_tokens=arguments.max_model_len)
    plan = choose_tiers(
        host,
        shape,
        workers=arguments.data_parallel_size,
        is_cpu_engine=current_platform.is_cpu(),
        weights_bytes=weights,
        engine_pool_bytes=arguments.kv_cache_memory_bytes,
        requests=arguments.max_num_seqs,
        extent=extent,
    )
    if settings is not None:
        plan = with_named(plan, settings)
    if plan.engine_pool_bytes is not None and plan.ram_bytes:
        arguments.kv_cache_memory_bytes = plan.engine_pool_bytes
    return plan


def draft_model(arguments: Namespace) -> str | None:
    """The directory, hub id or address of the draft model; None for a method without one (n-gram, suffix, MTP)."""
    found = _speculation(arguments)
    model, method = found.get("model"), found.get("method")
    if not isinstance(model, str) or method in _NO_DRAFT_FILES or model in _NGRAM:
        return None
    return None if method is None and is_class(model) else model


def with_draft_model(arguments: Namespace, directory: Path) -> None:
    """Let the engine load the draft model from a directory. Mutates: `arguments`."""
    if getattr(arguments, "spec_model", None) is not None:  # in its place: the engine refuses what is given twice
        arguments.spec_model = str(directory)
    else:
        arguments.speculative_config = {**arguments.speculative_config, "model": str(directory)}


def draft_class(arguments: Namespace) -> str | None:
    """The Python class that the engine is to import and draft with, if it is given one."""
    found = _speculation(arguments)
    model, method = found.get("model"), found.get("method")
    return str(model) if method == "custom_class" or (method is None and is_class(model)) else None


def draft_format(arguments: Namespace) -> str | None:
    """The load format of the draft model; None if it is the target's."""
    load = _speculation(arguments).get("draft_load_config")
    return str(load.get("load_format", "auto")).lower() if isinstance(load, dict) else None


def is_class(model: object) -> bool:
    """Whether vLLM takes a draft model's name for that of a Python class, as in package.Proposer."""
    return isinstance(model, str) and "." in model and all(part.isidentifier() for part in model.split("."))


def _speculation(arguments: Namespace) -> dict[str, Any]:
    """--speculative-config with what --spec-method and --spec-model add; empty without speculative decoding."""
    given = arguments.speculative_config
    found = {str(name).replace("-", "_"): value for name, value in given.items()} if isinstance(given, dict) else {}
    added = {"method": getattr(arguments, "spec_method", None), "model": getattr(arguments, "spec_model", None)}
    return found | {name: value for name, value in added.items() if value is not None}


def _check_draft(model: str | None) -> None:
    if model is None or is_remote(model):
        return
    path = Path(model)
    if not (path.is_dir() and (path / "config.json").exists()) and (path.exists() or not _HUB_ID.fullmatch(model)):
        raise ConfigError(
            f"the draft model of --speculative-config is {model}, which is no directory with a config.json: give a "
            "local directory, a hub id (organisation/name) or s3://BUCKET/PREFIX"
        )


def _draft_bytes(model: str | None) -> int:
    """The size of the draft model's weights; 0 if it is not on this machine."""
    with contextlib.suppress(ConfigError, OSError):
        return 0 if model is None else weights_bytes(model_directory(model))
    return 0


def _share_host_memory(arguments: Namespace) -> None:
    """On CPU the engine would take 92 % of the host's memory for its pool and refuse to start if it is not free.

    Half of what is free leaves room for the weights, hotspan's RAM tier and the neighbours; --gpu-memory-utilization or
    --kv-cache-memory-bytes say otherwise.
    """
    if current_platform.is_cpu() and arguments.kv_cache_memory_bytes is None:
        left = available_memory().bytes  # of a container's limit, too, which the engine does not look at
        arguments.gpu_memory_utilization = max(0.001, round(0.5 * left / psutil.virtual_memory().total, 3))


def _check_model(model: str) -> None:
    if is_remote(model):
        return  # `hotspan config check` asks about the options of one that is not fetched
    path = Path(model)
    if path.is_dir():
        if not (path / "config.json").exists():
            raise ConfigError(f"{model} holds no config.json: give the directory of a Hugging Face model")
        return
    if path.exists() or path.is_absolute() or not _HUB_ID.fullmatch(model) or model.startswith("."):
        raise ConfigError(
            f"there is no model directory {model}: give `hotspan serve MODEL [options]` a local directory, a hub id "
            "(organisation/name) or s3://BUCKET/PREFIX; `hotspan demo-model DIR` makes a small model"
        )


def _unknown(word: str, known: Sequence[str]) -> str:
    name = word.split("=", 1)[0]
    if not name.startswith("-"):
        return f"{name!r} belongs to no option: options are written --name value, after the model"
    otherwise = "`hotspan serve --help` lists hotspan's options"
    return f"unknown option {name}: {did_you_mean(name.replace('_', '-'), known, otherwise, count=3)}"
