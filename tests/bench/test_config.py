import json
from dataclasses import replace
from pathlib import Path

import pytest

from conftest import StartServer
from hotspan.bench.config import BenchConfig, read_config_file, write_config_file
from hotspan.bench.kv_size import kv_bytes_per_token
from hotspan.bench.records import Slo
from hotspan.bench.runner import resolve_now
from hotspan.bench.workloads.long_doc_qa import LongDocQaOptions
from hotspan.bench.workloads.multi_round_chat import MultiRoundChatOptions
from hotspan.core.errors import ConfigError


def write_model(directory: Path, **more: object) -> Path:
    config = {"num_hidden_layers": 4, "num_attention_heads": 8, "hidden_size": 512, "torch_dtype": "bfloat16", **more}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def test_a_config_file_comes_back_equal(tmp_path: Path) -> None:
    """What is written is read back as the same settings, without the server's URL and key."""
    options = LongDocQaOptions(document_length=300, shuffle_policy="tile", text="prose")
    config = BenchConfig(options=options, model="m", tokens_per_gb_kvcache=7, seed=3, no_warmup=True)
    with_server = BenchConfig.from_flat(config.to_flat(), api_key="secret")
    path = tmp_path / "bench.json"
    write_config_file(path, with_server)
    assert BenchConfig.from_flat(read_config_file(path)) == config
    assert "secret" not in path.read_text() and "engine_url" not in path.read_text()
    assert "secret" not in repr(with_server)


def test_a_file_of_lmcache_is_read(tmp_path: Path) -> None:
    """A file with the keys that `lmcache bench engine` exports configures the same run."""
    path = tmp_path / "theirs.json"
    path.write_text(
        '{"model": "m", "workload": "long-doc-qa", "tokens_per_gb_kvcache": 6553, "kv_cache_volume": 100,'
        ' "ldqa_document_length": 9000, "ldqa_query_per_document": 4, "ldqa_num_inflight_requests": 5}'
    )
    config = BenchConfig.from_flat(read_config_file(path))
    expected = LongDocQaOptions(document_length=9000, query_per_document=4, num_inflight_requests=5)
    assert config == BenchConfig(options=expected, model="m", tokens_per_gb_kvcache=6553)


def test_a_chat_file_of_lmcache_is_read(tmp_path: Path) -> None:
    """The keys of the published multi-round-chat run configure its 100 sessions, whole numbers for rates included."""
    path = tmp_path / "theirs.json"
    path.write_text(
        '{"model": "m", "workload": "multi-round-chat", "tokens_per_gb_kvcache": 3000, "kv_cache_volume": 400,'
        ' "mrc_shared_prompt_length": 2000, "mrc_chat_history_length": 10000, "mrc_user_input_length": 50,'
        ' "mrc_output_length": 200, "mrc_qps": 8, "mrc_duration": 180}'
    )
    config = BenchConfig.from_flat(read_config_file(path))
    assert config.options == MultiRoundChatOptions(qps=8.0, duration=180.0)
    assert config.options.count(config.scale) == 100


def test_objectives_are_in_milliseconds() -> None:
    """The flags are milliseconds, the objective seconds; a bound that isn't named is none."""
    options = LongDocQaOptions(num_documents=1)
    assert BenchConfig(options=options).slo is None
    assert BenchConfig(options=options, slo_ttft_ms=1500).slo == Slo(1.5, None)
    assert BenchConfig(options=options, slo_ttft_ms=1500, slo_itl_ms=20).slo == Slo(1.5, 0.02)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"workload": "long-doc-qa", "ldqa_document_lenght": 5}', "did you mean ldqa_document_length"),
        ('{"workload": "long-doc-qa", "seed": "one"}', "seed is 'one': give a whole number"),
        ('{"workload": "long-doc-qa", "seed": true}', "seed is True: give a whole number"),
        ("[]", "one JSON object"),
        ("{", "can't be read as JSON"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    """An unknown key, a value of another type or no JSON at all is an error that says so."""
    path = tmp_path / "bench.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_config_file(path)


def test_an_unknown_workload_is_refused() -> None:
    """The error lists the workloads there are."""
    with pytest.raises(ConfigError, match="long-doc-qa"):
        BenchConfig.from_flat({"workload": "long-doc"})


def test_kv_bytes_are_worked_out_from_the_model(tmp_path: Path) -> None:
    """The size is that of the plan (plan/shape.py), latent attention and 16 bits for a model in float32 included."""
    assert kv_bytes_per_token(write_model(tmp_path)) == 2 * 4 * 8 * 64 * 2
    assert kv_bytes_per_token(write_model(tmp_path, num_key_value_heads=2, head_dim=128)) == 2 * 4 * 2 * 128 * 2
    assert kv_bytes_per_token(write_model(tmp_path, dtype="float32")) == 2 * 4 * 8 * 64 * 2
    assert kv_bytes_per_token(write_model(tmp_path, kv_lora_rank=512, qk_rope_head_dim=64)) == 4 * (512 + 64) * 2
    nested = {"text_config": {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 256}}
    assert kv_bytes_per_token(write_model(tmp_path, **nested)) == 2 * 2 * 4 * 64 * 2


def test_a_model_of_another_layout_is_refused(tmp_path: Path) -> None:
    """Layers that can't be sized and an incomplete or absent config.json are errors that name the flag to use."""
    for more in ({"block_configs": [{}]}, {"num_hidden_layers": None}):
        with pytest.raises(ConfigError, match="--tokens-per-gb-kvcache"):
            kv_bytes_per_token(write_model(tmp_path, **more))
    with pytest.raises(ConfigError, match="--tokens-per-gb-kvcache"):
        kv_bytes_per_token(tmp_path / "nothing")


def test_tokens_per_gib_come_from_the_servers_model(serve: StartServer, tmp_path: Path) -> None:
    """A local model directory that the server names gives tokens per GiB; a flag goes before it."""
    server = serve(root=str(write_model(tmp_path)))
    found = resolve_now(BenchConfig(options=LongDocQaOptions(), engine_url=server.url + "/v1/"))
    assert (found.model, found.tokens_per_gb_kvcache) == ("small", 2**30 // 8192)
    given = BenchConfig(options=LongDocQaOptions(), engine_url=server.url, tokens_per_gb_kvcache=5)
    assert resolve_now(given).tokens_per_gb_kvcache == 5


def test_tokens_per_gib_come_from_the_servers_metrics(serve: StartServer) -> None:
    """A model whose directory isn't here is sized by what a hotspan server says that it keeps of a token."""
    server = serve(root="org/model", token_bytes=8192)
    found = resolve_now(BenchConfig(options=LongDocQaOptions(), engine_url=server.url))
    assert found.tokens_per_gb_kvcache == 2**30 // 8192


def lmcache_engine(model: str, **layout: object) -> dict[str, object]:
    return {"model_name": model, "world_size": 4, "kv_cache_layout": layout}


@pytest.mark.parametrize("group", ["cache_context_meta", "cb_gpu_context_meta"])
def test_tokens_per_gib_come_from_an_lmcache_server(serve: StartServer, tmp_path: Path, group: str) -> None:
    """Its size is of one rank, and goes before the config.json; a flag goes before it."""
    engines = {"7": lmcache_engine("other"), "8": lmcache_engine("small", cache_size_per_token=1024)}
    server = serve(root=str(write_model(tmp_path)), status={group: engines})
    asked = BenchConfig(options=LongDocQaOptions(), engine_url=server.url, lmcache_url=server.url + "/")
    assert resolve_now(asked).tokens_per_gb_kvcache == 2**30 // (4 * 1024)
    assert resolve_now(replace(asked, tokens_per_gb_kvcache=5)).tokens_per_gb_kvcache == 5
    assert "lmcache_url" not in asked.to_flat(portable=True)


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (None, "can't be read"),
        ([], "none: is an engine connected"),
        ({"cache_context_meta": {"8": None}}, "none: is an engine connected"),
        ({"cache_context_meta": {"8": lmcache_engine("large", cache_size_per_token=1)}}, "its models: large"),
        ({"cache_context_meta": {"8": lmcache_engine("small")}}, "--tokens-per-gb-kvcache"),
        ({"cache_context_meta": {"8": {"model_name": "small", "kv_cache_layout": 3}}}, "--tokens-per-gb-kvcache"),
    ],
)
def test_an_lmcache_server_that_does_not_tell_is_an_error(serve: StartServer, status: object, message: str) -> None:
    """No page, no such model, or no size: the run does not begin with a size that the user did not mean."""
    server = serve(status=status, token_bytes=8192)
    with pytest.raises(ConfigError, match=message):
        resolve_now(BenchConfig(options=LongDocQaOptions(), engine_url=server.url, lmcache_url=server.url))


def test_an_lmcache_url_needs_a_scheme() -> None:
    """A host and port alone are refused, as they are for --engine-url."""
    with pytest.raises(ConfigError, match="--lmcache-url must start with http"):
        BenchConfig(options=LongDocQaOptions(), lmcache_url="localhost:8080")


def test_tokens_per_gib_that_nobody_knows_are_asked_for(serve: StartServer) -> None:
    """A model that isn't here is an error that lists the three ways out."""
    config = BenchConfig(options=LongDocQaOptions(), engine_url=serve(root="org/model").url)
    with pytest.raises(ConfigError, match="--ldqa-num-documents"):
        resolve_now(config)
    counted = BenchConfig(options=LongDocQaOptions(num_documents=2), engine_url=config.engine_url)
    assert resolve_now(counted).model == "small"
