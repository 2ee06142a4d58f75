"""Which of several values counts, and what is said of the others."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotspan.config.origin import Source
from hotspan.core.errors import ConfigError
from tests.config.rig import configured, value

WAYS = {
    "job_queue_size": {
        Source.COMMAND_LINE: "flag",
        Source.SERVING_PROPERTIES: "job_queue_size",
        Source.SERVING: "SERVING_JOB_QUEUE_SIZE",
        Source.ALIAS: "MAX_CONCURRENT_REQUESTS",
        Source.CONFIG_PROPERTIES: "job_queue_size",
        Source.HOTSPAN_VARIABLE: "HOTSPAN_JOB_QUEUE_SIZE",
        Source.HOTSPAN_FILE: "job-queue-size",
    },
    "predict_timeout_s": {
        Source.COMMAND_LINE: "flag",
        Source.SAGEMAKER: "SAGEMAKER_MODEL_SERVER_TIMEOUT_SECONDS",
        Source.SERVING_PROPERTIES: "option.predict_timeout",
        Source.OPTION: "OPTION_PREDICT_TIMEOUT",
        Source.ALIAS: "PREDICT_TIMEOUT",
        Source.HOTSPAN_VARIABLE: "HOTSPAN_PREDICT_TIMEOUT_S",
        Source.HOTSPAN_FILE: "predict_timeout_s",
    },
    "max_num_seqs": {
        Source.COMMAND_LINE: "words",
        Source.SERVING_PROPERTIES: "option.max_rolling_batch_size",
        Source.OPTION: "OPTION_MAX_NUM_SEQS",
        Source.ALIAS: "MAX_BATCH_SIZE",
        Source.HOTSPAN_FILE: "max-num-seqs",
    },
    "chunk_tokens": {
        Source.COMMAND_LINE: "flag",
        Source.SERVING_PROPERTIES: "option.chunk_tokens",
        Source.OPTION: "OPTION_CHUNK_TOKENS",
        Source.HOTSPAN_VARIABLE: "HOTSPAN_CHUNK_TOKENS",
        Source.HOTSPAN_FILE: "chunk-tokens",
        Source.LMCACHE_CONNECTOR: "lmcache.chunk_size",
        Source.LMCACHE_VARIABLE: "LMCACHE_CHUNK_SIZE",
        Source.LMCACHE_FILE: "chunk_size",
    },
}


@st.composite
def written(draw: st.DrawFn) -> tuple[str, dict[Source, int]]:
    """A key, and what some of its sources say."""
    key = draw(st.sampled_from(sorted(WAYS)))
    return key, draw(st.dictionaries(st.sampled_from(sorted(WAYS[key])), st.integers(1, 999), min_size=1))


@settings(deadline=None)
@given(written())
def test_the_strongest_source_counts(case: tuple[str, dict[Source, int]]) -> None:
    """A value is that of its strongest source, with its origin; all others are listed as overridden, in their order."""
    key, says = case
    variables, serving, words, connector = {}, "option.model_id=org/name\n", [], {}
    flags, own, lmcache, server = {}, {}, {}, ""
    for source, number in says.items():
        name = WAYS[key][source]
        if source is Source.COMMAND_LINE and name == "words":
            words = [f"--max-num-seqs={number}"]
        elif source is Source.COMMAND_LINE:
            flags[key] = str(number)
        elif source is Source.SERVING_PROPERTIES:
            serving += f"{name} : {number}\n"
        elif source is Source.CONFIG_PROPERTIES:
            server = f"{name}={number}"
        elif source is Source.HOTSPAN_FILE:
            own[name] = number
        elif source is Source.LMCACHE_CONNECTOR:
            connector = {"kv_connector_extra_config": {name: number}}
        elif source is Source.LMCACHE_FILE:
            lmcache[name] = number
        else:
            variables[name] = str(number)
    if connector:
        serving += "option.kv_transfer_config=" + json.dumps({"kv_connector": "LMCacheConnectorV1"} | connector)
    done = configured(
        *words, flags=flags, own=own, lmcache=lmcache, variables=variables, serving=serving, server=server
    )
    setting = done.settings[key]
    order = sorted(says)
    assert (int(setting.value), setting.source) == (says[order[0]], order[0])
    assert (
        setting.given.origin != "default" and WAYS[key][order[0]].removeprefix("flag") in setting.given.origin + "words"
    )
    overridden = [given for given in setting.overridden if given.source < Source.IMPLIED]
    assert [(given.source, int(given.value)) for given in overridden] == [(one, says[one]) for one in order[1:]]


def test_every_key_has_an_origin() -> None:
    """Without anything written, every key of hotspan's is there, and its origin is that it is the default."""
    done = configured()
    assert {setting.source for name, setting in done.settings.items() if name != "model"} == {Source.DEFAULT}
    assert done.engine == () and done.engine_words == () and not done.names_tiers and done.notes == ()
    assert done.settings["model"].given.origin == "MODEL"


def test_equal_values_under_two_names_agree() -> None:
    """One file may say the same twice; saying two things of one key is an error that names both."""
    done = configured(serving="option.tensor_parallel_degree=2\noption.tensor_parallel_size=2")
    assert value(done, "tensor_parallel_size") == 2
    with pytest.raises(ConfigError) as error:
        configured(serving="option.tensor_parallel_degree=2\noption.tensor_parallel_size=4")
    said = str(error.value)
    assert "serving.properties:1: option.tensor_parallel_degree is 2" in said
    assert "serving.properties:2: option.tensor_parallel_size is 4" in said and "leave one of them out" in said


def test_names_of_one_source_have_an_order() -> None:
    """SageMaker's size in bytes counts before its size in MiB."""
    both = {"SAGEMAKER_MAX_REQUEST_SIZE": "1000", "SAGEMAKER_MAX_PAYLOAD_IN_MB": "6"}
    done = configured(variables=both)
    assert done.server.max_request_bytes == 1000
    assert done.settings["max_request_bytes"].overridden[0].value == 6 << 20


def test_empty_values_are_none() -> None:
    """What is empty says nothing."""
    done = configured(serving="job_queue_size=\noption.dtype= ", variables={"OPTION_DTYPE": "", "HOTSPAN_PORT": " "})
    assert done.server.job_queue_size == 1000 and "dtype" not in done.settings and done.server.port == 8080
