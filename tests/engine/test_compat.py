"""The installed vLLM is the one that hotspan was built for, and another one is refused with a sentence."""

import ast
import uuid
from importlib.util import find_spec
from pathlib import Path

import pytest

from hotspan.core.errors import EngineError
from hotspan.engine import compat
from hotspan.engine.cuda import SlabRegion
from hotspan.tiers.slab import SharedSlab


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


def test_slab_region_has_what_the_cuda_worker_uses() -> None:
    """Every attribute that vLLM's CUDA transfer worker reads of its region is there on the slab's stand-in."""
    path = Path(find_spec("vllm").submodule_search_locations[0]) / "v1/kv_offload/cpu/gpu_worker.py"
    used = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute):
            owner = ast.unparse(node.value)
            if owner in ("region", "mmap_region", "self._mmap_region"):
                used.add(node.attr)
    used.discard("create_next_canonical_view")  # only with canonical_layout, which hotspan does not ask for
    assert len(used) >= 6
    with SharedSlab(f"test-{uuid.uuid4().hex}", 2, 8192) as slab:
        region = SlabRegion(slab, 100, rank=0)
        assert [name for name in used if not hasattr(region, name)] == []
        first, second = region.create_next_worker_view(1000), region.create_next_worker_view(24)
        first[1, :] = 7
        second[1, :] = 9
        assert bytes(slab.slot(1)[100:1124]) == bytes([7] * 1000 + [9] * 24)
        assert bytes(slab.slot(0)) == bytes(8192)
        del first, second
        region.cleanup()
