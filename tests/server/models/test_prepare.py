"""From a store and a command line to what each model is started with."""

import json
from pathlib import Path
from typing import Any

import pytest

from hotspan.config.configuration import load_configuration
from hotspan.config.own import CommandLine
from hotspan.core.errors import ConfigError
from hotspan.core.types import GIB
from hotspan.plan.tiers import Extent
from hotspan.server.models.assignment import Assignment
from hotspan.server.models.run import Prepared, prepare
from hotspan.server.models.store import model_store
from tests.server.conftest import serve_options

NONE = {"CUDA_VISIBLE_DEVICES": ""}


def prepared(
    directory: Path, models: dict[str, str], *words: str, variables: dict[str, str] | None = None, **flags: Any
) -> Prepared:
    for name, text in models.items():
        (directory / name).mkdir()
        (directory / name / "serving.properties").write_text(text)
    line = CommandLine(str(directory), {"ram_gib": "0.25"} | flags, words)
    surroundings = NONE | (variables or {})
    store = model_store(line, surroundings, Path("/none"))
    assert store is not None
    return prepare(store, line, load_configuration(line, surroundings), directory.parent, ("run",), surroundings)


def told(setup: Prepared, number: int) -> Assignment:
    return Assignment.from_json(setup.models[number]._command.told.decode())


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "store").mkdir()
    return tmp_path / "store"


def test_each_model_is_told_its_own(directory: Path) -> None:
    """Names, limits and tiers are those of a model's files where they say some, and what holds for all otherwise."""
    models = {"a": "option.served_model_name=llama\njob_queue_size=5\noption.predict_timeout=500", "b": ""}
    setup = prepared(directory, models, "--dtype", "float32", variables={"HOTSPAN_JOB_QUEUE_SIZE": "7"})
    assert [model.names for model in setup.models] == [("a", "llama"), ("b",)]
    assert [model._command.words for model in setup.models] == [("run", "a"), ("run", "b")]
    assert setup.at_once == 1 and setup.server.job_queue_size == 5 + 7
    first, second = told(setup, 0), told(setup, 1)
    assert first.directory == str(directory / "a") and first.words == ("--dtype", "float32")
    assert first.cache and second.cache and first.cache.ram_bytes == second.cache.ram_bytes == GIB // 8
    assert first.engine[-4:] == ("--served-model-name", "a", "llama", "--disable-uvicorn-access-log")
    assert first.link.secret != second.link.secret and first.link.path != second.link.path
    own = first.configuration(NONE)
    assert own.server.job_queue_size == 5 and own.server.predict_timeout_s == 500
    assert setup.server.predict_timeout_s > 500


def test_secrets_stay_in_the_pipe(directory: Path) -> None:
    """A model's secret is in no command, no environment and no repr; the admin token is the front's alone."""
    token = "the-token-of-who-runs-this"
    setup = prepared(directory, {"a": "", "b": ""}, variables={"HOTSPAN_ADMIN_TOKEN": token})
    for number, model in enumerate(setup.models):
        secret = told(setup, number).link.secret
        assert len(secret) >= 32
        assert secret not in repr(model._command) + repr(model.link) + repr(told(setup, number))
        started = json.dumps([model._command.words, dict(model._command.variables)])
        assert secret not in started and token not in started


def test_the_port_is_the_fronts(directory: Path) -> None:
    """TLS, the access log, the plan and an administrator's port are not for a model's own server."""
    setup = prepared(directory, {"a": "", "b": ""})
    words = ("--ssl-keyfile", "k.pem", "--dtype", "float32", "--ssl-certfile=c.pem", "--enforce-eager")
    options = serve_options(engine=words, admin_port=9, extent=Extent.ALL)
    applied = told(setup, 0).applied(options)
    assert "ssl_keyfile" not in applied.engine_values and "ssl_certfile" not in applied.engine_values
    assert applied.engine_values["dtype"] == "float32" and applied.engine_values["enforce_eager"] is True
    assert applied.extent is None and applied.server.admin_port is None and applied.cache == told(setup, 0).cache


def test_names_that_contradict_each_other(directory: Path) -> None:
    """Two models of one name are an error that names both, and where a name belongs."""
    with pytest.raises(ConfigError, match="a and b are both called llama"):
        prepared(directory, {"a": "", "b": ""}, "--served-model-name", "llama")


def test_a_default_must_be_there(directory: Path) -> None:
    """A default that is no model is an error that says where it stands and what there is."""
    with pytest.raises(ConfigError, match=r"DEFAULT_MODEL.* is c, which is no model of the store: there are a, b"):
        prepared(directory, {"a": "", "b": ""}, variables={"HOTSPAN_DEFAULT_MODEL": "c"})


def test_a_models_mistake_names_the_model(directory: Path) -> None:
    """What one model's file has wrong is told with its name and its line."""
    with pytest.raises(ConfigError, match=r"the model b: .*b/serving.properties:1: job_queue_size"):
        prepared(directory, {"a": "", "b": "job_queue_size=many"})


def test_models_that_have_gpus_load_together(directory: Path) -> None:
    """With a GPU each they load at once, and each sees its own only; --models-at-once says otherwise."""
    setup = prepared(directory, {"a": "", "b": ""}, variables={"CUDA_VISIBLE_DEVICES": "4,5"})
    assert setup.at_once == 2
    assert [model._command.variables["CUDA_VISIBLE_DEVICES"] for model in setup.models] == ["4", "5"]
