import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from openai_server import StartServer as StartServer
from openai_server import serve as serve

from hotspan.bench import runner


@pytest.fixture(autouse=True)
def prompt_counters(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in's counters are up to date at once: nothing has to be waited for."""
    monkeypatch.setattr(runner, "_SETTLE_S", 0.0)
