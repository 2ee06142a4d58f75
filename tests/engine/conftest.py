from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hotspan.demo.model import make_demo_model

from .rig import prepare_environment

if TYPE_CHECKING:  # it imports vLLM, for which the environment comes first
    from .harness.core import Core

prepare_environment()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_demo_model(tmp_path_factory.mktemp("models") / "tiny", "tiny").path


@pytest.fixture
def books_agree(engine: "Core") -> Iterator[None]:
    """After the test the module's engine comes to rest, and its cache and tiers agree on what they hold."""
    yield
    engine.finish()
    engine.settle()
    engine.check()
