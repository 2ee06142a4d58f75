"""Every option of vLLM's own server: hotspan's server acts on it, or refuses it."""

import dataclasses
from pathlib import Path

import pytest
from typer.testing import CliRunner
from vllm.entrypoints.launchers.cli_args import FrontendArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from hotspan.cli.main import app
from hotspan.config.connector import transfer_config
from hotspan.config.settings import CacheSettings
from hotspan.core.aftermath import Aftermath
from hotspan.core.errors import ConfigError
from hotspan.engine.arguments import (
    NOT_SERVED,
    _draft_bytes,
    add_cache,
    draft_class,
    draft_model,
    parse_engine_arguments,
    with_draft_model,
)

OURS = {"host", "port"}
"""hotspan's own flags, by the same names."""

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

VALUES = {"headless": (), "grpc": (), "uds": ("/tmp/socket",)}


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
