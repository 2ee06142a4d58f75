"""The one server that nearly all of these tests ask."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from .rig import SAGEMAKER, Container, make_model_directory
from .rig import container as serving


@pytest.fixture(scope="package")
def container(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Container]:
    scratch = tmp_path_factory.mktemp("container")
    model = make_model_directory(scratch / "model", tiny_model, scratch)
    variables = {"HF_MODEL_ID": str(model), "HOTSPAN_CLIENT_ADAPTERS": str(scratch / "artifacts"), **SAGEMAKER}
    with serving(scratch, variables) as running:
        yield running
