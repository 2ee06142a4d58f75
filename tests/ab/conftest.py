import sys
from pathlib import Path

import pytest

from hotspan.ab import servers
from tests.bench.openai_server import StartServer as StartServer
from tests.bench.openai_server import serve as serve

FAKE = Path(__file__).parents[1] / "demo" / "fake_hotspan.py"


@pytest.fixture
def fake_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers that are started are the demo's stand-in: no engine."""
    monkeypatch.setattr(servers, "serve_command", lambda model, more: (sys.executable, str(FAKE), str(model), *more))
