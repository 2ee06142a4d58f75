"""Every vLLM in the range has what hotspan takes from it, and another one is refused with a sentence."""

import runpy
import sys
import uuid
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
from vllm.v1.kv_offload.base import OffloadingManager, ReqContext

from hotspan.core.errors import EngineError
from hotspan.engine import compat, contract
from hotspan.engine.cuda import SlabRegion
from hotspan.engine.manager import HotspanManager
from hotspan.tiers.slab import SharedSlab

from .contract import CLASSES, Sources, imports, missing, read_of_region
from .vllm_range import RELEASES, SOURCES

INSTALLED = Path(find_spec("vllm").submodule_search_locations[0]).parent
TREES = {contract.engine_version(): INSTALLED} | {
    release: SOURCES / release for release in RELEASES if (SOURCES / release).exists()
}
"""The installed one, and those that `make test-vllm-range` has fetched."""

ENGINE = """
from hotspan.engine.contract import ENGINE

if ENGINE >= (0, 29):
    from vllm.config import NewName
else:
    from vllm.config import OldName


def later() -> None:
    from vllm.missing import anything
"""


@cache
def sources(release: str) -> Sources:
    """A release's, parsed once."""
    return Sources(TREES[release])


@pytest.mark.parametrize("release", TREES)
def test_sources_have_what_hotspan_takes(release: str) -> None:
    """Names, signatures and attributes are there, wherever this release has them."""
    assert missing(sources(release), contract.release(release)) == []


@pytest.mark.parametrize(
    ("file", "before", "after", "said"),
    [
        ("v1/kv_offload/base.py", "def lookup(self, key:", "def look(self, key:", "has no OffloadingManager.lookup"),
        ("v1/kv_offload/base.py", "job_id: int\n    success: bool", "success: bool\n    job_id: int", "begins with"),
        (
            "v1/core/block_pool.py",
            "def evict_blocks(self, block_ids:",
            "def evict_blocks(self, ids:",
            "evict_blocks takes",
        ),
        ("v1/core/sched/output.py", "    req_ids: list[str]", "    ids: list[str]", "CachedRequestData has no"),
        ("exceptions.py", "class VLLMNotFoundError(", "class NotFound(", "adapters.py imports VLLMNotFoundError"),
    ],
)
def test_a_change_is_found(file: str, before: str, after: str, said: str) -> None:
    """A method, a parameter, a field's place or a class that is gone is named."""
    text = (INSTALLED / "vllm" / file).read_text()
    assert before in text
    doctored = Sources(INSTALLED, {f"vllm/{file}": text.replace(before, after)})
    assert any(said in line for line in missing(doctored, contract.ENGINE))


def test_a_release_is_not_taken_for_another() -> None:
    """What moved or came in between is missed: each side of a switch is looked for in its own releases."""
    for wrong in {(0, 26), (0, 33)} - {contract.ENGINE}:
        assert len(missing(sources(contract.engine_version()), wrong)) >= 4


def test_imports_of_every_branch_are_known(tmp_path: Path) -> None:
    """Of a switch the branch that is taken in a release, and what functions import."""
    (tmp_path / "new.py").write_text(ENGINE)
    assert [each.name for each in imports(tmp_path, (0, 29))] == ["NewName", "anything"]
    assert [each.name for each in imports(tmp_path, (0, 28))] == ["OldName", "anything"]
    problems = missing(sources(contract.engine_version()), contract.ENGINE, tmp_path)
    assert [line.split(",")[0] for line in problems] == [
        f"new.py imports {'NewName' if contract.ENGINE >= (0, 29) else 'OldName'} from vllm.config",
        "new.py imports anything from vllm.missing",
    ]


def test_contract() -> None:
    """Every method that hotspan overrides or calls is there with the parameters it relies on."""
    compat.check_engine(*CLASSES)
    looked_at = [method for method in contract.METHODS if method.module in sys.modules]
    assert len(looked_at) >= 20
    assert sum(len(contract.overrides(ours)) for ours in CLASSES) >= 30


def test_other_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A vLLM outside of the range is named, with the range: when engine/ is imported, and at each start."""
    for other in ("0.99.0", "0.25.1", "1.0.0", "0.34.0rc1", "main"):
        monkeypatch.setattr(compat, "engine_version", lambda found=other: found)
        with pytest.raises(EngineError, match=rf"{other} .* >=0\.26,<0\.34"):
            compat.check_engine()
    with monkeypatch.context() as patch, pytest.raises(EngineError, match=r"0\.34\.0"):
        patch.setattr("importlib.metadata.version", lambda name: "0.34.0")
        runpy.run_path(contract.__file__)
    for known in ("0.26.0", "0.32.0+cpu", "0.33.1rc2.dev7+g0", "0.33"):
        contract.check_version(known)


def test_changed_method_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A vLLM whose interface changed under the same version is refused, naming the method."""
    monkeypatch.setattr(OffloadingManager, "lookup", lambda self, key: None)
    with pytest.raises(EngineError, match=r"OffloadingManager\.lookup"):
        compat.check_engine(HotspanManager)
    monkeypatch.delattr(OffloadingManager, "lookup")
    with pytest.raises(EngineError, match=r"OffloadingManager\.lookup"):
        compat.check_engine(HotspanManager)


def test_a_request_keeps_what_was_kept_with_it() -> None:
    """State goes with a request's context, and no other request has it."""
    first, second = ReqContext("first"), ReqContext("second")
    compat.keep_state(first, ENGINE)
    assert compat.kept_state(first, str) is ENGINE
    assert compat.kept_state(second, str) is None


def test_hashes_mean_the_same_in_every_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the engine's core begins its chain of hashes, it begins with the seed that the namespace says."""
    from vllm.utils.hashing import sha256_cbor
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.engine import core

    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    for _ in range(2):
        compat.fix_hash_seed()
        core.init_none_hash(sha256_cbor)
        assert kv_cache_utils.NONE_HASH == sha256_cbor(compat.hash_seed()) == sha256_cbor("vllm-none-hash")
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    core.init_none_hash(sha256_cbor)
    assert kv_cache_utils.NONE_HASH == sha256_cbor(compat.hash_seed()) == sha256_cbor("7")


@pytest.mark.parametrize("release", TREES)
def test_slab_region_has_what_the_cuda_worker_reads(release: str) -> None:
    """Every attribute that vLLM's CUDA transfer worker reads of its region is there on the slab's stand-in."""
    read = read_of_region(sources(release))
    assert len(read) >= 6
    with SharedSlab(f"test-{uuid.uuid4().hex}", 2, 8192) as slab:
        region = SlabRegion(slab, 100, rank=0)
        assert [name for name in read if not hasattr(region, name)] == []
        assert region.cpu_page_size == region._row_stride
        region.cleanup()


def test_slab_region_gives_each_tensor_its_place() -> None:
    """Views come one after the other in every slot, from the worker's offset on."""
    with SharedSlab(f"test-{uuid.uuid4().hex}", 2, 8192) as slab:
        region = SlabRegion(slab, 100, rank=0)
        first, second = region.create_next_worker_view(1000), region.create_next_view(24)
        first[1, :] = 7
        second[1, :] = 9
        assert bytes(slab.slot(1)[100:1124]) == bytes([7] * 1000 + [9] * 24)
        assert bytes(slab.slot(0)) == bytes(8192)
        del first, second
        region.cleanup()
