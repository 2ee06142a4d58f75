"""The installed vLLM is the one that hotspan was built for, and another one is refused with a sentence."""

import pytest

from hotspan.core.errors import EngineError
from hotspan.engine import compat


def test_contract() -> None:
    """Every method that hotspan overrides or calls is there with the parameters it relies on."""
    compat.check_engine()


def test_other_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A vLLM outside of the range is named, with the range."""
    monkeypatch.setattr(compat, "engine_version", lambda: "0.99.0")
    with pytest.raises(EngineError, match=r"0\.99\.0 .* >=0\.32,<0\.34"):
        compat.check_engine()


def test_changed_method_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A vLLM whose interface changed under the same version is refused, naming the method."""
    monkeypatch.setattr(compat.OffloadingManager, "lookup", lambda self, key: None)
    with pytest.raises(EngineError, match=r"OffloadingManager\.lookup"):
        compat.check_engine()
