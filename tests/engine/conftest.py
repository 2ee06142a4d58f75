from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:  # it imports vLLM, for which the environment comes first
    from .harness.core import Core


@pytest.fixture
def books_agree(engine: "Core") -> Iterator[None]:
    """After the test the module's engine comes to rest, and its cache and tiers agree on what they hold."""
    yield
    engine.finish()
    engine.settle()
    engine.check()
