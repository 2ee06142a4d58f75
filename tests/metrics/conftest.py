from pathlib import Path

import pytest

from hotspan.demo.model import make_demo_model
from tests.engine.rig import prepare_environment

prepare_environment()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_demo_model(tmp_path_factory.mktemp("models") / "tiny", "tiny").path
