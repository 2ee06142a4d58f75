"""An engine whose ranks are on several hosts: RAM alone, in each host's own slab; all else is refused at the start."""

import dataclasses
import random
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from vllm.config import ParallelConfig

from hotspan.config.connector import transfer_config
from hotspan.config.settings import BlendSettings, CacheOptions, CacheSettings, L2Settings
from hotspan.core.errors import ConfigError
from hotspan.core.shared_memory import SHARED_MEMORY
from hotspan.engine import spec
from hotspan.engine.hosts import RankReport, check_reports, check_shape, mark, ranks_here
from hotspan.tiers.slab import SharedSlab
from kit.simulated.memory_store import MemoryServer

from .harness.core import CHUNK, core
from .harness.hosts import NODES, TwoHosts

LENGTH = 1500
WHOLE = LENGTH // CHUNK * CHUNK

RAM = CacheSettings(1 << 30)
BELOW = {
    "--disk": CacheOptions(ram_gib=1.0, disk=Path("/disk"), disk_gib=1.0).settings(),
    **{
        f"--l2 {url}": dataclasses.replace(RAM, l2=L2Settings(url))
        for url in ("file:///shared", "redis://cache:6379", "s3://bucket/kv", "sagemaker-hyperpod://", "daemon:///x")
    },
    "--blend": dataclasses.replace(RAM, blend=BlendSettings()),
}
"""What moves bytes of chunks in the scheduler's process, by the option to name."""


def two_nodes(**more: Any) -> ParallelConfig:
    given = {
        "nnodes": 2,
        "distributed_executor_backend": "mp",
        "tensor_parallel_size": 2,
        "data_parallel_size_local": 1,
    }
    return ParallelConfig(**(given | more))


# -- what the configuration tells --------------------------------------------------------------------------------------


@pytest.mark.parametrize("asked", BELOW)
@pytest.mark.parametrize("rank", [0, 1])
def test_what_the_scheduler_moves_is_refused_over_nodes(asked: str, rank: int) -> None:
    """A disk, an L2 of any kind, and blending are refused on each node, in words that name what can be had instead."""
    with pytest.raises(ConfigError, match=rf"{asked.split()[0]}.*--nnodes 2.*RAM alone \(--ram-gib") as refused:
        check_shape(two_nodes(node_rank=rank), BELOW[asked])
    assert "hotspan route" in str(refused.value)


@pytest.mark.parametrize(
    "shape",
    [
        {"tensor_parallel_size": 2},
        {"tensor_parallel_size": 1, "pipeline_parallel_size": 2},
        {"tensor_parallel_size": 2, "data_parallel_size": 2, "nnodes": 4},
        {"tensor_parallel_size": 8, "nnodes": 4},
    ],
    ids=str,
)
def test_each_shape_over_nodes_is_known(shape: dict[str, int]) -> None:
    """Whichever ranks are spread, a disk is refused and RAM is not."""
    check_shape(two_nodes(**shape), RAM)
    with pytest.raises(ConfigError, match="--disk"):
        check_shape(two_nodes(**shape), BELOW["--disk"])


@pytest.mark.parametrize(
    "shape",
    [
        {"nnodes": 1},
        {"nnodes": 2, "tensor_parallel_size": 2, "data_parallel_size": 2, "data_parallel_size_local": 1},
        {"nnodes": 1, "distributed_executor_backend": "ray"},
    ],
    ids=str,
)
def test_an_engine_on_one_host_has_all_tiers(shape: dict[str, Any]) -> None:
    """One node; replicas on a node each; and Ray, whose placement the slab tells later."""
    for settings in (RAM, *BELOW.values()):
        check_shape(two_nodes(**shape), settings)


def test_the_external_launcher_is_refused() -> None:
    """Its schedulers, one beside each rank, must decide alike, and a cache makes them differ; alone it is one rank."""
    shape: dict[str, Any] = {"nnodes": 1, "distributed_executor_backend": "external_launcher"}
    with pytest.raises(ConfigError, match=r"external launcher.*mp or ray"):
        check_shape(two_nodes(**shape), RAM)
    check_shape(two_nodes(**shape, tensor_parallel_size=1), RAM)


# -- what the slab tells -----------------------------------------------------------------------------------------------


def test_a_rank_is_here_if_its_mark_is(tmp_path: Path) -> None:
    """Only the ranks that mapped the scheduler's own file are found, and no mark is left in it."""
    other = tmp_path / "other"
    other.mkdir()
    with SharedSlab("one", 2, 8192, tmp_path) as here, SharedSlab("one", 2, 8192, other) as elsewhere:
        with SharedSlab("one", 2, 8192, tmp_path) as again:
            mark(again, 0)
            mark(elsewhere, 2000)
            mark(again, 4000)
            assert ranks_here(here, 2000, 4) == [0, 2]
        assert here.slot(0) == bytes(8192)


OWN = RankReport(0, slots=10, slot_bytes=8192, rank_bytes=4096, blocks_per_chunk=2)


def test_reports_of_all_ranks_are_needed() -> None:
    """A rank that reports nothing was started without the connector; where vLLM drops reports, those there count."""
    both = [dataclasses.replace(OWN, rank=rank) for rank in range(2)]
    check_reports(both, OWN, 2)
    check_reports(both[1:], OWN, None)
    with pytest.raises(ConfigError, match="rank 1 of this engine runs without hotspan's connector"):
        check_reports(both[:1], OWN, 2)


@pytest.mark.parametrize("field", ["slots", "slot_bytes", "rank_bytes", "blocks_per_chunk"])
def test_slots_of_another_shape_are_refused(field: str) -> None:
    """A rank whose slots lie elsewhere than the scheduler reckons would mix the bytes of two chunks."""
    other = dataclasses.replace(OWN, rank=1, **{field: getattr(OWN, field) * 2})
    with pytest.raises(ConfigError, match=r"rank 1 has other slots.*same --ram-gib and --chunk-tokens"):
        check_reports([OWN, other], OWN, 2)


# -- a whole engine, without a model -----------------------------------------------------------------------------------


CONFIGURED = pytest.mark.parametrize("nodes", [NODES, {"tensor_parallel_size": 2}], ids=["known", "unknown"])
"""Whether the configuration tells of the hosts, as --nnodes does; with Ray, or one's own executor, it does not."""


@CONFIGURED
def test_ram_over_hosts(tiny_model: Path, nodes: dict[str, Any]) -> None:
    """RAM hits are right on both hosts, after resets, preemptions and invalidations; a slab's name stays nowhere."""
    with core(
        tiny_model, runner=TwoHosts, num_gpu_blocks_override=40, max_model_len=2048, ram_gib=0.02, **nodes
    ) as engine:
        assert not list(SHARED_MEMORY.glob("hotspan-slab-*elsewhere"))
        rng = random.Random(1)
        texts = [engine.text(n, LENGTH) for n in range(6)]
        assert engine.ask(texts[0], tags=["doc"]) == 0
        engine.forget_gpu()
        assert engine.ask(texts[0]) == WHOLE
        for turn in range(12):
            for n in rng.sample(range(6), 3):  # more than the pool holds: some are preempted
                engine.start(f"{turn}-{n}", texts[n], 40, tags=[f"t{n}"])
            engine.step(rng.randrange(1, 8))
            if turn % 3 == 0:
                engine.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=turn % 2 == 0)
            if turn % 4 == 1:
                engine.administer(do="invalidate", tags=[f"t{turn % 6}"])
            engine.finish()
        assert engine.runner.read and engine.runner.found_wrong == 0
        engine.settle()
        engine.cache.check()
        engine.forget_gpu()
        engine.administer(do="invalidate", tags=["doc", "t0"])
        assert engine.ask(texts[0]) == 0


@CONFIGURED
def test_reloaded_weights_over_hosts(tiny_model: Path, nodes: dict[str, Any]) -> None:
    """Files on the scheduler's host do not tell what the other host has loaded: nothing of before is found again."""
    with core(tiny_model, runner=TwoHosts, **nodes) as engine:
        text = engine.text(1, LENGTH)
        assert engine.ask(text) == 0
        engine.settle()
        engine.core.collective_rpc("reload_weights")
        engine.forget_gpu()
        assert engine.administrator.weights.state.source == "random"
        assert engine.ask(text) == 0
        engine.forget_gpu()
        assert engine.ask(text) == WHOLE


@pytest.fixture
def slabs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Path]]:
    """The files of this test's slabs: other tests have theirs beside them."""
    made: list[Path] = []

    class Noted(SharedSlab):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            made.append(self.path)

    monkeypatch.setattr(spec, "SharedSlab", Noted)
    yield made
    for path in made:  # the ranks of an engine that does not start are ended, and drop them; here nobody ends them
        path.unlink(missing_ok=True)


@pytest.mark.parametrize("tier", ["disk", "l2", "blend"])
@CONFIGURED
def test_lower_tiers_over_hosts_are_refused(
    tiny_model: Path, tmp_path: Path, slabs: list[Path], nodes: dict[str, Any], tier: str
) -> None:
    """The engine does not start, nothing is written to a disk, and no slab keeps its name, whatever told of hosts."""
    asked: dict[str, Any] = {
        "disk": {"disk": tmp_path / "kv"},
        "l2": {"l2": MemoryServer()},
        "blend": {"cache": {"blend": BlendSettings()}},
    }[tier]
    refused = pytest.raises(ConfigError, match=rf"--{tier}.*several hosts")
    with refused, core(tiny_model, runner=TwoHosts, **asked, **nodes):
        pass
    assert not (tmp_path / "kv").exists()
    assert bool(slabs) == (nodes is not NODES)  # what the configuration tells is known before there are any
    assert not [path for path in slabs if path.exists() and not path.name.endswith("-elsewhere")]


@CONFIGURED
def test_adapters_over_hosts_are_refused(tiny_model: Path, slabs: list[Path], nodes: dict[str, Any]) -> None:
    """The other host's files of an adapter may be others than those that name its KV: the engine does not start."""
    refused = pytest.raises(ConfigError, match=r"adapters \(--enable-lora\).*several hosts.*hotspan route")
    with refused, core(tiny_model, runner=TwoHosts, enable_lora=True, max_lora_rank=8, **nodes):
        pass
    assert bool(slabs) == (nodes is not NODES)
    assert not [path for path in slabs if path.exists() and not path.name.endswith("-elsewhere")]


class OtherRam(TwoHosts):
    """The second host was given less RAM."""

    def alter(self, config: Any) -> None:
        config.kv_transfer_config.kv_connector_extra_config["hotspan"]["ram_bytes"] //= 2


class NoConnector(TwoHosts):
    """The second host was started without hotspan."""

    def get_kv_connector_handshake_metadata(self) -> Any:
        return [*super().get_kv_connector_handshake_metadata()[:1], None]


class Silent(TwoHosts):
    """An executor that asks its workers nothing."""

    def get_kv_connector_handshake_metadata(self) -> Any:
        return []


@pytest.mark.parametrize(
    ("runner", "said"), [(OtherRam, "rank 1 has other slots"), (NoConnector, "rank 1 of this engine runs without")]
)
def test_hosts_with_other_options_are_refused(tiny_model: Path, runner: type[TwoHosts], said: str) -> None:
    """Each node has a command line of its own: what they must have in common is compared before the first request."""
    with pytest.raises(ConfigError, match=said), core(tiny_model, runner=runner, **NODES):
        pass


def test_ranks_that_report_nothing_are_not_cached(tiny_model: Path, slabs: list[Path]) -> None:
    """Where nobody compares the hosts' slabs, requests are answered and not cached."""
    with core(tiny_model, runner=Silent, **NODES) as engine:
        text = engine.text(1, LENGTH)
        engine.ask(text)
        engine.settle()
        engine.forget_gpu()
        assert engine.ask(text) == 0
    assert not [path for path in slabs if path.exists()], "a rank that was asked for no report kept its slab's name"


# -- what looks into a slot --------------------------------------------------------------------------------------------

LOOKS: dict[str, str] = {
    "cache/lower.py": "stores to a lower tier: refused",
    "cache/waits.py": "loads from a lower tier: refused",
    "engine/encoder/outputs.py": "reads an output's shape: left out where the only rank is elsewhere",
    "engine/hosts.py": "marks",
    "engine/connector.py": "a worker's outputs, in its own slab",
    "engine/blend/start.py": "a worker's windows, in its own slab; refused",
    "engine/blend/steps.py": "as above",
    "engine/worker.py": "a worker's copies, in its own slab",
    "engine/cuda.py": "as above",
    "engine/gaps.py": "as above",
    "tiers/slab.py": "the slab itself",
    "bench/storage.py": "a benchmark's own slab",
}
"""Each module that reads or writes bytes of slots, and why it is right over hosts."""


def test_all_that_look_into_slots_are_known() -> None:
    """A module that begins to look into the slab fails this test until it has its reason above."""
    source = Path(__file__).parents[2] / "src" / "hotspan"
    looks = ("slab.slot(", "slab.view", "worker.slot(", " slot(index)", "self._slot(", "def slot(", "worker.slot)")
    found = {
        str(path.relative_to(source))
        for path in source.rglob("*.py")
        if any(words in path.read_text() for words in looks)
    }
    assert found == LOOKS.keys()


def test_two_engines_of_one_id_do_not_share_ram(tiny_model: Path) -> None:
    """`engine_id` may be given, and be the same: the ranks of each find their own file, whenever both start."""

    def config(tiers: CacheSettings) -> dict[str, Any]:
        return transfer_config(tiers) | {"engine_id": "given"}

    found: list[set[str]] = []
    with patch("tests.engine.harness.core.transfer_config", config), ExitStack() as stack:
        for _ in range(2):
            with patch.object(spec, "SharedSlab", wraps=SharedSlab) as opened:
                stack.enter_context(core(tiny_model))
            assert opened.call_count > 1
            found.append({call.args[0] for call in opened.call_args_list})
    assert [len(names) for names in found] == [1, 1] and found[0] != found[1]
    assert all("given" in name for names in found for name in names)
