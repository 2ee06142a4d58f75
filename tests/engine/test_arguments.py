"""Every option of vLLM's own server: hotspan's server acts on it, or refuses it."""

import dataclasses
from pathlib import Path

import pytest
from typer.testing import CliRunner
from vllm.config import ParallelConfig
from vllm.entrypoints.launchers.cli_args import FrontendArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from hotspan.cli.main import app
from hotspan.config.connector import transfer_config
from hotspan.config.settings import CacheOptions, CacheSettings
from hotspan.core.aftermath import Aftermath
from hotspan.core.errors import ConfigError
from hotspan.engine.arguments import (
    NOT_SERVED,
    _draft_bytes,
    add_cache,
    check_hosts,
    check_replicas,
    draft_class,
    draft_model,
    parse_engine_arguments,
    with_draft_model,
)
from hotspan.engine.hosts import nodes

OURS = {"host", "port", "headless"}
"""hotspan's own flags, by the same names, and what it does in its own way (server/headless.py)."""

IN_THE_APP = """
lora_modules chat_template chat_template_content_format trust_request_chat_template trust_request_mm_kwargs
default_chat_template_kwargs response_role return_tokens_as_token_ids enable_auto_tool_choice
exclude_tools_when_tool_choice_none tool_call_parser tool_parser_plugin tool_strict_level tool_server max_log_len
enable_prompt_tokens_details enable_per_request_metrics enable_server_load_tracking enable_force_include_usage
sse_keep_alive_interval enable_tokenizer_info_endpoint enable_log_outputs enable_log_deltas cohere_is_reasoning_model
cohere_format anthropic_disabled_thinking_effort log_error_stack tokens_only enable_scale_out fingerprint_mode
fingerprint_value root_path middleware enable_request_id_headers disable_fastapi_docs enable_offline_docs
enable_flash_late_interaction
"""
"""What vLLM's own app acts on, which hotspan serves (config/inert.py has what is fixed there)."""

IN_OUR_SERVER = {
    *("uvicorn_log_level", "disable_uvicorn_access_log", "disable_access_log_for_endpoints"),  # server/run.py
    *("allow_credentials", "allowed_origins", "allowed_methods", "allowed_headers"),  # server/cors.py
    *("ssl_keyfile", "ssl_certfile", "ssl_ca_certs", "ssl_cert_reqs", "ssl_ciphers"),  # server/hardening.py
}
REFUSED_ELSEWHERE = {"api_key", "enable_ssl_refresh"}
"""Refused by server/hardening.py."""

VALUES = {"grpc": (), "uds": ("/tmp/socket",)}


def test_all_options_of_the_server_are_known() -> None:
    """Each option of vLLM's server is in one list; an option that vLLM adds is put into one before it is accepted."""
    known = [*OURS, *IN_THE_APP.split(), *IN_OUR_SERVER, *REFUSED_ELSEWHERE, *NOT_SERVED]
    assert len(known) == len(set(known))
    assert {field.name for field in dataclasses.fields(FrontendArgs)} <= set(known)


@pytest.mark.parametrize("name", NOT_SERVED)
def test_what_hotspan_has_not_is_refused(name: str) -> None:
    """An option that hotspan's server could not follow is an error with the reason."""
    flag = "--" + name.replace("_", "-")
    with pytest.raises(ConfigError, match=f"{flag} can't be used: {NOT_SERVED[name]}"):
        parse_engine_arguments("org/name", (flag, *VALUES.get(name, ("7",))))


@pytest.mark.parametrize("template", ["/nosuch.jinja", "nosuch.jinja", "~/nosuch.jinja"])
def test_a_template_that_is_not_there_is_an_error_of_ours(template: str) -> None:
    """Also where vLLM raises an error that is no ValueError: `hotspan serve` prints one line, not a traceback."""
    with pytest.raises(ConfigError, match="nosuch"):
        parse_engine_arguments("org/name", ("--chat-template", template))


def test_prompts_only_reaches_the_engine() -> None:
    """--prompts-only is vLLM's own switch for what is offloaded."""
    for prompts_only in (True, False):
        extra = transfer_config(CacheSettings(1 << 30, prompts_only=prompts_only))["kv_connector_extra_config"]
        assert extra["offload_prompt_only"] is prompts_only
        assert CacheSettings.from_json(extra["hotspan"]).prompts_only is prompts_only


# -- speculative decoding ----------------------------------------------------------------------------------------------

DRAFTS: tuple[tuple[tuple[str, ...], str | None, str | None], ...] = (
    ((), None, None),
    (('--speculative-config={"method": "eagle", "model": "org/head"}',), "org/head", None),
    (('-sc={"model": "s3://bucket/head", "num-speculative-tokens": 2}',), "s3://bucket/head", None),
    (("--spec-method", "draft_model", "--spec-model", "org/draft"), "org/draft", None),
    (('--speculative-config={"method": "ngram"}',), None, None),
    (('--speculative-config={"model": "[ngram]"}',), None, None),
    (('--speculative-config={"method": "mtp"}',), None, None),
    (('--speculative-config={"model": "package.Proposer"}',), None, "package.Proposer"),
    (('--speculative-config={"method": "custom_class", "model": "package.Proposer"}',), None, "package.Proposer"),
)


@pytest.mark.parametrize(("words", "model", "class_name"), DRAFTS)
def test_the_draft_model_in_every_spelling(words: tuple[str, ...], model: str | None, class_name: str | None) -> None:
    """However vLLM lets one write it, the draft model is known: to be fetched, measured and held to secure mode."""
    arguments = parse_engine_arguments("org/name", words)
    assert (draft_model(arguments), draft_class(arguments)) == (model, class_name)
    if model is not None:
        with_draft_model(arguments, Path("/models/head"))
        assert draft_model(arguments) == "/models/head"
        given = arguments.speculative_config or {}
        short = {name for name in ("method", "model") if getattr(arguments, f"spec_{name}") is not None}
        assert short.isdisjoint(given), "the engine refuses what is given twice"


def test_a_draft_model_that_is_not_there(tmp_path: Path) -> None:
    """A path that leads to no model is refused when the options are read, not when the engine has loaded the target."""
    for model in (str(tmp_path), str(tmp_path / "missing"), "./missing", "package.Proposer"):
        with pytest.raises(ConfigError, match="draft model of --speculative-config is"):
            parse_engine_arguments("org/name", (f'--speculative-config={{"method": "eagle", "model": "{model}"}}',))


@pytest.mark.parametrize(("words", "level"), [((), "none"), (DRAFTS[4][0], "summary")])
def test_answers_have_the_counts_of_drafts(words: tuple[str, ...], level: str) -> None:
    """A server that drafts tokens counts for each request how many were accepted, also without tiers."""
    arguments = parse_engine_arguments("org/name", words)
    add_cache(arguments, None)
    assert arguments.per_request_spec_decode_metrics == level


def test_a_draft_model_takes_memory(tmp_path: Path) -> None:
    """The weights of the draft model count where tiers are sized by what a machine has."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(bytes(1000))
    drafting = parse_engine_arguments("org/name", (f'-sc={{"method": "eagle", "model": "{tmp_path}"}}',))
    assert _draft_bytes(draft_model(drafting)) == 1000
    assert _draft_bytes("org/not-on-this-machine") == 0


def test_a_method_whose_package_is_missing(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Suffix decoding without its package is a refused configuration that names the package, not a traceback."""
    from vllm.config import speculative

    from hotspan.engine.launch import _start

    monkeypatch.setattr(speculative, "has_arctic_inference", lambda: False)
    words = ('--speculative-config={"method": "suffix", "num_speculative_tokens": 2}', "--max-model-len", "512")
    arguments = parse_engine_arguments(str(tiny_model), words)
    with Aftermath() as aftermath, pytest.raises(ConfigError, match="refuses this configuration: Arctic Inference"):
        _start(arguments, aftermath)


def test_the_help_of_serve_leads_to_vllms_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its help names --help-engine, which shows what vLLM takes: by name or all, without what hotspan refuses."""
    monkeypatch.setattr(FlexibleArgumentParser, "_search_keyword", None)  # it outlives the parser

    def shown(*words: str) -> str:
        done = CliRunner().invoke(app, ["serve", *words], env={"COLUMNS": "200"})
        assert done.exit_code == 0, done.output
        return done.output

    assert "`hotspan serve --help-engine all`" in " ".join(shown("--help").split())
    found = shown("--help-engine", "max-model-len")
    assert "--max-model-len" in found and "--dtype" not in found
    everything = shown("--help-engine", "all")
    assert "--max-model-len" in everything and "--dtype" in everything
    assert not {f"--{name.replace('_', '-')}" for name in NOT_SERVED} & set(everything.replace(",", " ").split())


# -- several hosts -----------------------------------------------------------------------------------------------------

RAM = CacheSettings(1 << 30)
NODE = ("--tensor-parallel-size", "2", "--nnodes", "2", "--node-rank")


@pytest.mark.parametrize(
    ("words", "hosts"),
    [
        ("--tensor-parallel-size 2", 1),
        ("--tensor-parallel-size 2 --nnodes 2", 2),
        ("--tensor-parallel-size 4 --pipeline-parallel-size 2 --nnodes 4", 4),
        ("--data-parallel-size 2 --nnodes 2", 1),
        ("--data-parallel-size 4 --nnodes 2", 1),
        ("--data-parallel-size 2 --tensor-parallel-size 4 --nnodes 4", 2),
        ("--data-parallel-size 2 --data-parallel-size-local 2 --tensor-parallel-size 2 --nnodes 2", 2),
    ],
)
def test_how_many_hosts_share_an_engine(words: str, hosts: int) -> None:
    """As vLLM's configuration counts them, before there is one; a disk is refused where they are several."""
    arguments = parse_engine_arguments("org/name", words.split())
    assert check_hosts(arguments, RAM) == hosts
    ranks = {name: getattr(arguments, name) for name in ("tensor_parallel_size", "pipeline_parallel_size", "nnodes")}
    local = arguments.data_parallel_size_local or max(arguments.data_parallel_size // arguments.nnodes, 1)
    replicas = {"data_parallel_size": arguments.data_parallel_size, "data_parallel_size_local": local}
    assert nodes(ParallelConfig(**ranks, **replicas, distributed_executor_backend="mp")) == hosts
    disk = CacheOptions(ram_gib=1.0, disk=Path("/disk"), disk_gib=1.0).settings()
    if hosts == 1:
        check_hosts(arguments, disk)
    else:
        with pytest.raises(ConfigError, match=f"--disk.*--nnodes {arguments.nnodes}.*RAM alone"):
            check_hosts(arguments, disk)


@pytest.mark.parametrize(
    ("words", "is_headless", "settings", "said"),
    [
        ((*NODE, "1"), False, RAM, "--node-rank 1 is a host without the server.*--headless"),
        ((*NODE, "0", "--headless"), True, RAM, "--headless runs the ranks of a further host.*--node-rank"),
        (("--headless",), True, RAM, "--headless runs the ranks of a further host.*hotspan route"),
        ((*NODE, "1", "--headless"), False, RAM, "--headless is for one model"),
        ((*NODE, "0"), False, CacheSettings(0), "--ram-gib, the same on each host, or --no-cache"),
        ((*NODE, "0", "--enable-lora"), False, RAM, "--enable-lora.*copies"),
        ((*NODE, "0", "--enable-lora"), False, None, "--enable-lora.*copies"),
    ],
)
def test_what_a_host_of_several_can_not_be(
    words: tuple[str, ...], is_headless: bool, settings: CacheSettings | None, said: str
) -> None:
    """A host without ranks of its own, one without its server, sizes that would differ, adapters that are elsewhere."""
    with pytest.raises(ConfigError, match=said):
        check_hosts(parse_engine_arguments("org/name", words), settings, is_headless=is_headless)


def test_the_hosts_of_an_engine() -> None:
    """The one with the server, and a further one."""
    assert check_hosts(parse_engine_arguments("org/name", (*NODE, "0")), RAM) == 2
    assert check_hosts(parse_engine_arguments("org/name", (*NODE, "0")), None) == 2
    assert check_hosts(parse_engine_arguments("org/name", (*NODE, "1", "--headless")), RAM, is_headless=True) == 2


@pytest.mark.parametrize(
    ("words", "is_refused"),
    [
        ("--data-parallel-size 2 --nnodes 2", True),
        ("--data-parallel-size 2 --tensor-parallel-size 4 --nnodes 4", True),
        ("--data-parallel-size 2", False),
        ("--tensor-parallel-size 2 --nnodes 2", False),
    ],
)
def test_replicas_on_further_hosts_are_refused(words: str, is_refused: bool) -> None:
    """`hotspan serve` starts no scheduler on a further host, and says what to do instead of waiting for one."""
    arguments = parse_engine_arguments("org/name", tuple(words.split()))
    if is_refused:
        with pytest.raises(ConfigError, match="behind `hotspan route`"):
            check_replicas(arguments)
    else:
        check_replicas(arguments)
