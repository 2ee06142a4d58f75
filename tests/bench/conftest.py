import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from openai_server import Behaviour, OpenAIServer

from hotspan.bench import runner

StartServer = Callable[..., OpenAIServer]


@pytest.fixture
def serve() -> Iterator[StartServer]:
    """Starts servers of a given behaviour and stops them after the test."""
    with ExitStack() as stack:

        def start(**behaviour: Any) -> OpenAIServer:
            return stack.enter_context(OpenAIServer(Behaviour(**behaviour)))

        yield start


@pytest.fixture(autouse=True)
def prompt_counters(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in's counters are up to date at once: nothing has to be waited for."""
    monkeypatch.setattr(runner, "_SETTLE_S", 0.0)
