"""Secrets of every source and spelling: refused where they are written out, and never shown."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hotspan.cli.main import app
from hotspan.cli.serve import serve_options
from hotspan.config.own import CommandLine
from hotspan.core.errors import ConfigError
from hotspan.l2.open import parse_store_url
from hotspan.router.settings import parse_replica
from tests.config.rig import configured

SECRET = "sEcr3t/vAlue"
S3 = {"ram_gib": 1.0, "l2": "s3://bucket/kv"}


@pytest.mark.parametrize(
    "name",
    [
        *("secret_access_key", "aws_secret_access_key", "AWS_SECRET_ACCESS_KEY", "Aws_Secret_Access_Key"),
        *("session_token", "aws_session_token", "token", "aws_token", "AWS_TOKEN"),
        *("sse_customer_key_base64", "aws_sse_customer_key_base64"),
    ],
)
def test_a_secret_in_plain_text_is_refused(name: str) -> None:
    """Every spelling that the S3 client takes for a secret must be a reference, from whatever source, unrepeated."""
    sources: list[Callable[[], object]] = [
        lambda: configured(flags=S3 | {"l2_option": [f"{name}={SECRET}"]}),
        lambda: configured(own=S3 | {"l2-option": {name: SECRET}}),
        lambda: configured(variables={"HOTSPAN_L2": S3["l2"], "HOTSPAN_L2_OPTION": f"timeout_s=1,{name}={SECRET}"}),
        lambda: configured(serving=f"option.l2=s3://bucket/kv\noption.l2_option=timeout_s=1,{name}={SECRET}"),
    ]
    for source in sources:
        with pytest.raises(ConfigError, match="is a secret: write") as error:
            source()
        assert SECRET not in str(error.value) and "***" not in name
    done = configured(flags=S3 | {"l2_option": [f"{name}=env:NAME"]})
    assert done.cache is not None and done.cache.l2 is not None and done.cache.l2.options == {name: "env:NAME"}


@pytest.mark.parametrize(
    "url",
    [
        f"redis://:{SECRET}@cache",
        f"redis://user:{SECRET}@cache:6379/0",
        f"redis://:{SECRET.replace('/', 'x')}@cache",
        f"redis://cache?password={SECRET}",
        f"rediss://cache/0?db=1&Password={SECRET}",
        f"s3://AKIA:{SECRET}@bucket/kv",
        f"s3://{SECRET.replace('/', 'x')}@bucket/kv",
        f"s3://bucket/kv?X-Amz-Signature={SECRET}",
        f"s3://bucket/kv?aws_secret_access_key={SECRET}",
        f"sagemaker-hyperpod://user:{SECRET}@host:9200",
        f"redos://:{SECRET}@cache",
        f"lm://:{SECRET}@cache",
        f"file://user:{SECRET}@host/dir",
    ],
)
def test_a_secret_in_a_url_is_refused(url: str) -> None:
    """A URL with credentials, as its user or as a parameter, is an error that does not repeat them."""
    shown = (SECRET, SECRET.replace("/", "x"))
    for refuse in (
        lambda: parse_store_url("--l2", url),
        lambda: configured(flags={"ram_gib": 1.0}, variables={"HOTSPAN_L2": url}),
        lambda: configured(lmcache={"remote_url": url}),
    ):
        with pytest.raises(ConfigError) as error:
            refuse()
        assert not any(secret in str(error.value) for secret in shown)


@pytest.mark.parametrize("option", ["endpoint", "proxy_url"])
def test_a_secret_in_the_url_of_an_option_is_refused(option: str) -> None:
    """So is one in the URL that an option holds."""
    with pytest.raises(ConfigError, match="leave it out of the URL") as error:
        configured(flags=S3 | {"l2_option": [f"{option}=https://user:{SECRET}@host"]})
    assert SECRET not in str(error.value)


def test_what_a_url_can_not_say() -> None:
    """Parameters that no store reads are refused instead of dropped, and so is an option that S3's client lacks."""
    for url in ("s3://bucket/kv?region=eu-west-1", "file:///shared/kv?capacity_gib=5", "file:///shared#1"):
        with pytest.raises(ConfigError, match="has no effect there"):
            parse_store_url("--l2", url)
    with pytest.raises(ConfigError, match="did you mean log_entries"):
        configured(flags=S3 | {"l2_option": ["log_entry=2"]})


def test_nothing_shows_a_secret(tmp_path: Path) -> None:
    """No repr, no `config explain` and no origin holds what stands under a secret's name, nested or in text."""
    nested = {"headers": {"Authorization": SECRET}, "aws": [{"Secret_Access_Key": SECRET}]}
    own = tmp_path / "own.yaml"
    own.write_text(f"model: a/b\nhf-token: {SECRET}\nmodel-loader-extra-config: {json.dumps(nested)}\n")
    connector = {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}
    connector["kv_connector_extra_config"] = {"lmcache.extra_config": {"redis_password": SECRET}}  # type: ignore[assignment]
    words = ("--kv-transfer-config", json.dumps(connector), "--hf-overrides", json.dumps(nested))
    done = configured(*words, flags={"config": str(own)}, variables={"LMCACHE_REMOTE_URL": "redis://cache"})
    for value in (done, serve_options(done), done.engine, CommandLine("m", {"l2_option": [SECRET]}, [SECRET])):
        assert SECRET not in repr(value)
    for as_json in ((), ("--json",)):
        said = CliRunner().invoke(app, ["config", "explain", "--config", str(own), *as_json, *words])
        assert said.exit_code == 0 and SECRET not in said.output and "hf_token" in said.output


def test_errors_repeat_no_secret() -> None:
    """A wrong value that holds a secret is named, and not quoted."""
    for refuse in (
        lambda: configured(flags={"l2_option": [f"password={SECRET}", "x"]}),
        lambda: configured(variables={"HOTSPAN_L2_OPTION": f"AWS_TOKEN={SECRET},x"}),
        lambda: configured(lmcache={"extra_config": f'{{"s3_secret_access_key": "{SECRET}"'}),
        lambda: configured(serving=f'option.speculative_config={{"api_key": "{SECRET}"'),
        lambda: configured(variables={"HOTSPAN_KEK": SECRET, "HOTSPAN_CHUNK_TOKENS": "0", "HOTSPAN_KEY_STORE": "/x"}),
        lambda: parse_replica(f"http://user:{SECRET}@replica:8080"),
    ):
        with pytest.raises(ConfigError) as error:
            refuse()
        assert SECRET not in str(error.value)


def test_a_configuration_shows_neither_words_nor_values() -> None:
    """Its repr, which a log or a traceback may have, leaves out the command line and what each key was given."""
    shown = repr(configured(flags=S3 | {"l2_option": ["secret_access_key=env:NAME"]}))
    assert "words=" not in shown and "settings=" not in shown and "model=" in shown
