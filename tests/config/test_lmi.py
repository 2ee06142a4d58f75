"""LMI's files and variables, as their users have written them."""

from pathlib import Path

import pytest

from hotspan.config.configuration import Places, load_configuration, visible_gpus
from hotspan.config.origin import Source
from hotspan.config.own import CommandLine
from hotspan.core.errors import ConfigError
from tests.config.rig import configured, value

SAGEMAKER = """
# A model from the hub on eight GPUs
engine=Python
option.model_id=meta-llama/Llama-3.1-70B-Instruct
option.tensor_parallel_degree=max
option.rolling_batch=vllm
option.async_mode=true
option.entryPoint=djl_python.lmi_vllm.vllm_async_service
option.max_rolling_batch_size=64
option.max_rolling_batch_prefill_tokens=16384
option.quantize=fp8
option.dtype=bf16
option.trust_remote_code=false
option.enable_lora=true
option.max_cpu_loras=70
option.speculative_config={"method":"eagle3","model":"a/b","num_speculative_tokens":4}
option.limit_mm_per_prompt={"image":4,"video":0}
option.model_loading_timeout=1800
option.sessions_expiration=600
job_queue_size=500
maxWorkers=1
"""


def test_a_sagemaker_model() -> None:
    """Every line of a usual serving.properties lands where it belongs, under vLLM's names, or is noted."""
    done = configured(model=None, serving=SAGEMAKER, files=["adapters/a/adapter_config.json", "model.py"], gpus=8)
    assert done.model == "meta-llama/Llama-3.1-70B-Instruct"
    words = " ".join(done.engine_words)
    for expected in (
        *("--tensor-parallel-size 8", "--max-num-seqs 64", "--max-num-batched-tokens 16384", "--quantization fp8"),
        *("--dtype bfloat16", "--no-trust-remote-code", "--enable-lora", "--max-loras 4", "--max-cpu-loras 70"),
        '--speculative-config {"method": "eagle3", "model": "a/b", "num_speculative_tokens": 4}',
        *('--limit-mm-per-prompt {"image": 4, "video": 0}', "--served-model-name lmi"),
    ):
        assert expected in words
    server = done.server
    assert (server.job_queue_size, server.startup_timeout_s) == (500, 1800.0)
    assert not server.no_sessions and server.session_expiry_s == 600.0
    assert server.adapters is not None and server.adapters.name == "adapters" and server.formatters is not None
    noted = " ".join(note.where for note in done.notes)
    assert all(name in noted for name in ("engine", "option.rolling_batch", "option.entryPoint", "maxWorkers"))


def test_variables_alone() -> None:
    """A container that is configured by variables only."""
    variables = {
        "HF_MODEL_ID": "org/name",
        "TENSOR_PARALLEL_DEGREE": "2",
        "HF_MODEL_TRUST_REMOTE_CODE": "true",
        "OPTION_ENTRYPOINT": "djl_python.huggingface",
        "OPTION_ENGINE": "Python",
        "OPTION_enable_prefix_caching": "False",
        "ENABLE_CUDA_GRAPHS": "true",
        "CUDA_MEMORY_FRACTION": "0.8",
        "MAX_BATCH_SIZE": "7",
        "MAX_BATCH_PREFILL_TOKENS": "4096",
        "HF_MODEL_QUANTIZE": "awq",
        "HF_REVISION": "v1.0",
        "HF_TASK": "embedding",
        "SAGEMAKER_STARTUP_TIMEOUT": "90",
        "SAGEMAKER_BIND_TO_PORT": "8081",
        "SAGEMAKER_SECURE_MODE": "true",
        "OPTION_NORMALIZE": "false",
        "OPTION_ENABLE_STATEFUL_SESSIONS": "false",
        "SAGEMAKER_REGION": "eu-west-1",
        "SERVING_LOAD_MODELS": "test::Python=/opt/ml/model",
        "OPTION_MAX_MODEL_LEN": "32768",
    }
    done = configured(model=None, variables=variables)
    words = " ".join(done.engine_words)
    for expected in (
        *("--tensor-parallel-size 2", "--trust-remote-code", "--no-enforce-eager", "--gpu-memory-utilization 0.8"),
        *("--max-num-seqs 7", "--runner pooling", "--no-enable-prefix-caching", "--max-model-len 32768"),
        '--pooler-config {"use_activation": false}',
        *("--max-num-batched-tokens 4096", "--quantization awq", "--revision v1.0"),
    ):
        assert expected in words
    assert done.model == "org/name" and done.server.no_sessions and done.server.secure
    assert (done.server.startup_timeout_s, done.server.port) == (90.0, 8081)


def test_number_of_gpus_by_sagemaker() -> None:
    """SM_NUM_GPUS is the degree of parallelism where nothing nearer says so."""
    platform = {"HF_MODEL_ID": "org/name", "SM_NUM_GPUS": "4"}
    nearer = {4: {}, 2: {"TENSOR_PARALLEL_DEGREE": "2"}, 1: {"OPTION_TENSOR_PARALLEL_DEGREE": "1"}}
    for expected, variables in nearer.items():
        assert value(configured(model=None, variables=platform | variables), "tensor_parallel_size") == expected


def test_aliases_yield() -> None:
    """An alias counts only where its target is unset."""
    aliases = {"HF_MODEL_QUANTIZE": "awq", "MAX_BATCH_PREFILL_TOKENS": "4096"}
    targets = {"OPTION_QUANTIZE": "fp8", "OPTION_MAX_ROLLING_BATCH_PREFILL_TOKENS": "512"}
    done = configured(variables=aliases | targets)
    assert (value(done, "quantization"), value(done, "max_num_batched_tokens")) == ("fp8", "512")


@pytest.mark.parametrize(
    ("line", "warning"),
    [
        ("engine=Python", None),
        ("engine=MPI", "only vLLM is served"),
        ("engine=python\noption.async_mode=true\noption.rolling_batch=disable", None),
        ("option.rolling_batch=auto", None),
        ("option.rolling_batch=trtllm", "only vLLM is served"),
        ("minWorkers=1\nmaxWorkers=1", None),
        ("maxWorkers=4", "one hotspan is one replica"),
        ("gpu.maxworkers=2", "one hotspan is one replica"),
        ("batch_size=8", "vLLM batches continuously"),
        ("batch_size=1", None),
    ],
)
def test_what_is_accepted_and_not_served(line: str, warning: str | None) -> None:
    """Keys of LMI's own server are noted; one that asks for what is not done is a warning, which the start shows."""
    notes = configured(serving=line).notes
    assert len(notes) == line.count("=")
    assert [note.text.partition(",")[0].partition(":")[0].partition(";")[0] for note in notes if note.is_warning] == (
        [warning] if warning else []
    )


def test_workers_by_sagemaker() -> None:
    """The platform's own number of workers is a warning above one, too."""
    for name in ("SAGEMAKER_NUM_MODEL_WORKERS", "SAGEMAKER_MODEL_SERVER_WORKERS"):
        warned = [configured(variables={name: number}).notes[0].is_warning for number in ("1", "2")]
        assert warned == [False, True]
        with pytest.raises(ConfigError, match=f"environment: {name} is 'four': give a whole number"):
            configured(variables={name: "four"})


def test_case_of_variables() -> None:
    """OPTION_* is lower-cased if all of it is upper case, and kept as it is otherwise."""
    done = configured(variables={"OPTION_SEED_2": "1", "OPTION_someThing": "2"})
    assert value(done, "seed_2") == "1" and value(done, "someThing") == "2"


def test_other_peoples_variables_change_nothing() -> None:
    """Without LMI's configuration, variables with common names are not read; Kubernetes' own never are."""
    ambient = {"MAX_BATCH_SIZE": "3", "SM_NUM_GPUS": "8", "HF_MODEL_ID": "other/model", "SAGEMAKER_REGION": "x"}
    links = {
        "HOTSPAN_PORT": "tcp://10.0.0.1:8080",
        "HOTSPAN_SERVICE_HOST": "10.0.0.1",
        "SERVING_PORT_80_TCP_PORT": "80",
        "LMCACHE_SERVER_SERVICE_PORT": "65432",
        "HOTSPAN_SERVICE_PORT_HTTP": "80",
        "OPTION_PORT": "tcp://1.2.3.4:1",
    }
    assert configured("--seed", "1", variables=ambient | links).settings == configured("--seed", "1").settings


def test_degree_of_parallelism() -> None:
    """`max`, and LMI's default, are all GPUs over the stages; a hub model on the command line takes what vLLM takes."""
    stages = configured(serving="option.tensor_parallel_degree=max\noption.pipeline_parallel_degree=2", gpus=8)
    assert value(stages, "tensor_parallel_size") == 4
    assert value(configured(serving="job_queue_size=1", gpus=4), "tensor_parallel_size") == 4
    assert "tensor_parallel_size" not in configured(serving="job_queue_size=1", gpus=1).settings
    assert value(configured(serving="option.tensor_parallel_degree=max"), "tensor_parallel_size") == 1
    assert "tensor_parallel_size" not in configured(gpus=4).settings


def test_visible_gpus(tmp_path: Path) -> None:
    """CUDA_VISIBLE_DEVICES says how many; else the devices are counted."""
    for name in ("nvidia0", "nvidia1", "nvidiactl", "null"):
        (tmp_path / name).touch()
    assert visible_gpus({}, tmp_path) == 2 and visible_gpus({}, tmp_path / "none") == 0
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "3, 5,7"}, tmp_path) == 3
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == 0 == visible_gpus({"CUDA_VISIBLE_DEVICES": "-1"})


def test_address() -> None:
    """The server's address has both parts, and is an error otherwise."""
    server = configured(server="inference_address=http://0.0.0.0:9000").server
    assert (server.host, server.port) == ("0.0.0.0", 9000)
    for text in ("0.0.0.0:9000", "http://host", "http://host:port", "unix:/x"):
        with pytest.raises(ConfigError, match=r"config.properties:1: inference_address .*http://ADDRESS:PORT"):
            configured(server=f"inference_address={text}")


def load(model: str | None, container: Path) -> tuple[str, Source]:
    done = load_configuration(CommandLine(model), {}, places=Places(container, container / "none"))
    return done.model, done.settings["model"].source


def test_model_of_the_container(tmp_path: Path) -> None:
    """The model is what the container holds: itself, or the one model in it; several, or none, are an error."""
    with pytest.raises(ConfigError, match="no model is named"):
        load(None, tmp_path / "none")
    one = tmp_path / "store" / "one"
    one.mkdir(parents=True)
    with pytest.raises(ConfigError, match="no model is named"):
        load(None, tmp_path / "store")
    (one / "config.json").touch()
    assert load(None, tmp_path / "store") == (str(one), Source.DEFAULT) == load(None, one)
    (tmp_path / "store" / "two").mkdir()
    (tmp_path / "store" / "two" / "serving.properties").touch()
    with pytest.raises(ConfigError, match=r"several models \(one, two\)"):
        load(None, tmp_path / "store")
    assert load("org/name", tmp_path / "store") == ("org/name", Source.COMMAND_LINE)


def test_model_directory_that_names_weights(tmp_path: Path) -> None:
    """MODEL may be where serving.properties lies: it names the weights, unless they lie there, too."""
    (tmp_path / "serving.properties").write_text("option.model_id=org/name\noption.dtype=fp16")
    assert load(str(tmp_path), tmp_path / "none") == ("org/name", Source.SERVING_PROPERTIES)
    (tmp_path / "config.json").touch()
    assert load(str(tmp_path), tmp_path / "none") == (str(tmp_path), Source.COMMAND_LINE)


@pytest.mark.parametrize(
    ("serving", "variables"),
    [
        ("option.dtype=bf16", {}),
        ("engine=Python\noption.rolling_batch=vllm\noption.async_mode=true", {}),
        ("", {"OPTION_ROLLING_BATCH": "vllm"}),
        ("", {"SERVING_JOB_QUEUE_SIZE": "10"}),
    ],
)
def test_what_is_only_accepted_is_lmis_configuration_too(
    tmp_path: Path, serving: str, variables: dict[str, str]
) -> None:
    """Its defaults, names and formatters hold for MODEL, whatever is written in LMI's way."""
    for name in ("config.json", "model.py"):
        (tmp_path / name).touch()
    if serving:
        (tmp_path / "serving.properties").write_text(serving)
    nowhere = Places(tmp_path / "none", tmp_path / "none")
    done = load_configuration(CommandLine(str(tmp_path)), variables | {"MAX_BATCH_SIZE": "7"}, places=nowhere)
    assert done.server.formatters == tmp_path
    assert (value(done, "served_model_name"), value(done, "max_num_seqs")) == ("lmi", 7)


def test_code_is_found_in_containers_only(tmp_path: Path) -> None:
    """model.py beside a model that somebody downloaded is not taken for formatters without LMI's configuration."""
    for name in ("config.json", "model.py"):
        (tmp_path / name).touch()
    plain = load_configuration(CommandLine(str(tmp_path)), {}, places=Places(tmp_path / "none", tmp_path / "none"))
    assert plain.server.formatters is None
    container = load_configuration(CommandLine(), {}, places=Places(tmp_path, tmp_path / "none"))
    assert container.server.formatters == tmp_path
    (tmp_path / "model.py").unlink()
    container = load_configuration(CommandLine(), {}, places=Places(tmp_path, tmp_path / "none"))
    assert container.server.formatters is None is container.server.adapters


@pytest.mark.parametrize(
    ("serving", "expected"),
    [
        ("option.tensor_parallel_degree=two", "option.tensor_parallel_degree is 'two': give a whole number"),
        ("option.dtype=bf16\noption.max_loras=0", "serving.properties:2: option.max_loras is '0'"),
        ("option.limit_mm_per_prompt={image: 4}", "option.limit_mm_per_prompt is '{image: 4}': give a JSON object"),
        ("option.task=translate", "option.task is 'translate': give one of auto"),
        ("jobs_queue_size=5", "there is no such key: did you mean job_queue_size"),
        ("option.config=x", "there is no such key"),
        ("option.enable_lora=maybe", "give true or false"),
        ("option.lmcache_config_file=none.yaml", "there is no file"),
        ("option.lmcache_auto_config=True\noption.lmcache_config_file=x", "leave one of them out"),
        ('option.kv_transfer_config={"kv_connector":"NixlConnector"}', "kv_connector is 'NixlConnector'"),
        ("option.kv_transfer_config=LMCache", "option.kv_transfer_config is 'LMCache': give a JSON object"),
        ('option.kv_transfer_config={"kv_connector":"LMCacheConnectorV1","kv_role":"kv_producer"}', "give kv_both"),
        ("option.ram_gib=0", "--ram-gib 0.0 comes from"),
        ("batch_size=abc", "serving.properties:1: batch_size is 'abc': give a whole number"),
        ("maxWorkers=four", "serving.properties:1: maxWorkers is 'four': give a whole number"),
        ("option.async_mode=perhaps", "option.async_mode is 'perhaps': give true or false"),
        (
            "option.enable_lora=true\noption.max_loras=8\noption.max_cpu_loras=2",
            "serving.properties:3: option.max_cpu_loras = 2: 2 adapters are kept in memory, and a batch may have 8",
        ),
        ("option.enable_lora=true\noption.max_cpu_loras=2", "a batch may have 4 (LMI's default)"),
        ("option.disk=/x", "--disk is given without --disk-gib"),
    ],
)
def test_what_is_wrong_is_named(serving: str, expected: str) -> None:
    """An error names key, value, place and remedy."""
    with pytest.raises(ConfigError) as error:
        configured(model=None, serving=serving)
    assert expected in str(error.value) and "serving.properties:" in str(error.value)


def test_secrets_are_not_said() -> None:
    """A token or password is neither in what explains a value nor in an error about it."""
    done = configured(serving="option.hf_token=hf_s3cret")
    assert "s3cret" not in done.settings["hf_token"].given.origin and "s3cret" not in repr(done)
    with pytest.raises(ConfigError) as error:
        configured(lmcache={"remote_url": "redis://:s3cret@h"})
    assert "s3cret" not in str(error.value)
