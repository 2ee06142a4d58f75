import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from hotspan.ab import servers
from tests.bench.openai_server import Behaviour, OpenAIServer

FAKE = Path(__file__).parents[1] / "demo" / "fake_hotspan.py"

StartServer = Callable[..., OpenAIServer]


@pytest.fixture
def serve() -> Iterator[StartServer]:
    """Starts servers of a given behaviour and stops them after the test."""
    with ExitStack() as stack:

        def start(**behaviour: Any) -> OpenAIServer:
            return stack.enter_context(OpenAIServer(Behaviour(**behaviour)))

        yield start


@pytest.fixture
def fake_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers that are started are the demo's stand-in: no engine."""
    monkeypatch.setattr(servers, "serve_command", lambda model, more: (sys.executable, str(FAKE), str(model), *more))
