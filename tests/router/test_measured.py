"""What replicas say of themselves in their metrics reaches the fleet."""

import asyncio
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotspan.cache.cost import CostModel
from hotspan.core.types import MIB, Tier
from hotspan.router.load import Speeds, TierSpeed
from hotspan.router.measured import Told, told_by
from hotspan.router.types import Medium
from hotspan.testing.chunks import chain
from hotspan.testing.clock import SimulatedClock
from kit.waiting import until_async
from tests.cache.rig import SIZE, Rig

from .rig import replicas, routed, say_ok

NAME = b"hotspan_cost_prefill_tokens_per_second"
PAGE = b"""# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig
vllm:cache_config_info{block_size="16",engine="0",kv_cache_max_concurrency="3.5",kv_cache_size_tokens="400000"} 1.0
hotspan_cost_prefill_tokens_per_second{engine="0",model_name="m"} 12345.0
hotspan_cost_latency_seconds{engine="0",model_name="m",tier="disk"} 0.002
hotspan_cost_bytes_per_second{engine="0",model_name="m",tier="disk"} 3e+09
hotspan_cost_bytes_per_second{engine="0",model_name="m",tier="l2"} 0.0
hotspan_cache_capacity_bytes{engine="0",model_name="m",tier="ram"} 6e+10
hotspan_cache_capacity_bytes{engine="0",model_name="m",tier="disk"} 1.2e+11
hotspan_cache_token_bytes{engine="0",model_name="m"} 100000.0
"""
TOLD = Told(12345.0, {Medium.DISK: TierSpeed(30_000.0, 0.002)}, 1_200_000)


@pytest.mark.parametrize(
    ("page", "rate"),
    [
        (b"", None),
        (b"# TYPE x gauge\nhotspan_cost_prefill_tokens_per_second 1500.5\nother 1\n", 1500.5),
        (b'%b{engine="0"} 1e3\n%b{engine="1"} 2e3' % (NAME, NAME), 3e3),
        (b"hotspan_cost_prefill_tokens_per_second 0.0\n", None),
        (b"xhotspan_cost_prefill_tokens_per_second 5\n", None),
        (b"hotspan_cost_prefill_tokens_per_second 1.2.3\n", None),
        (b"hotspan_cost_prefill_tokens_per_second -5\n", None),
        (b"hotspan_cost_prefill_tokens_per_second NaN\n", None),
    ],
)
def test_the_rate_is_found(page: bytes, rate: float | None) -> None:
    """The gauge of all engines adds up; a page without one, or with 0 (not measured yet), tells nothing."""
    assert told_by(page) == Told(rate)


def test_tiers_and_capacity_are_found() -> None:
    """In tokens: what the largest of pool and tiers keeps, and the speed of the tiers that were measured."""
    assert told_by(PAGE) == TOLD
    assert told_by(PAGE.replace(b"hotspan_cache_token_bytes", b"x")) == Told(12345.0, {}, 400_000)
    assert told_by(PAGE.replace(b'tokens="400000"', b'tokens="None"')) == TOLD
    speeds = TOLD.over(Speeds(tokens_per_s=1.0, cache_tokens=2))
    assert (speeds.tokens_per_s, speeds.cache_tokens) == (12345.0, 1_200_000)
    assert speeds.tiers == {**Speeds().tiers, Medium.DISK: TierSpeed(30_000.0, 0.002)}
    assert Told().over(speeds) == speeds


@given(st.binary(max_size=200), st.sampled_from(PAGE.splitlines()))
def test_no_page_is_an_error(page: bytes, line: bytes) -> None:
    """Whatever a replica answers, what is found are speeds that can be."""
    told_by(line.rpartition(b" ")[0] + b" " + page).over(Speeds())
    told_by(PAGE + page).over(Speeds())


def test_what_an_engine_reports_is_understood() -> None:
    """The engine's gauges, as they are, tell the router the engine's speed, its tiers' and how much they keep."""
    pytest.importorskip("vllm")
    from hotspan.engine.metrics import CacheMetrics

    cost = CostModel(2048, {Tier.DISK: 2}, clock=SimulatedClock())
    for tokens in (512, 1024, 2048) * 20:
        cost.observe_step(tokens, 0, 0.01 + tokens / 20_000)
    for size in (MIB, 4 * MIB) * 20:
        cost.begin_load(Tier.DISK, size)
        cost.end_load(Tier.DISK, size, 0.001 + size / 1e9)
    with Rig(ram=8, disk=32) as rig:
        rig.store(chain("text", 2))
        rig.cache.cost = cost
        stats = CacheMetrics(rig.cache, None).report(SIZE / 256)
        assert stats is not None
        told = told_by(_page(stats.data))
    assert told.tokens_per_s == pytest.approx(20_000, rel=0.1)
    assert told.cache_tokens == 32 * 256
    known = cost.report().tiers[Tier.DISK]
    assert known.bytes_per_s > 0
    assert told.tiers == {Medium.DISK: TierSpeed(known.bytes_per_s / (SIZE / 256), known.latency_s)}


def _page(data: Mapping[str, Mapping[str, Mapping[tuple[str, ...], object]]]) -> bytes:
    """Gauges as Prometheus' text has them; that vLLM puts an engine's label before others is seen on a real one."""
    lines = []
    for values in data.values():
        for name, by in values.items():
            for labels, value in by.items() if isinstance(by, Mapping) else ():
                tier = f',tier="{labels[0]}"' if labels else ""
                lines.append(f'{name}{{engine="0"{tier}}} {value}')
    return "\n".join(lines).encode()


async def test_replicas_are_asked() -> None:
    """A replica that says 12,345 tokens/s is taken at its word, and one that says nothing for as fast as that."""
    async with replicas(say_ok, say_ok) as (one, two):
        one.metrics = PAGE.decode()
        async with routed([one, two]) as at:
            async with asyncio.timeout(60):
                while await at.metric("replica_tokens_per_second", replica=one.url) != 12345:
                    await asyncio.sleep(0.01)
            assert await at.metric("replica_tokens_per_second", replica=two.url) == 12345
            assert at.router.fleet.replicas[one.url].load.speeds == TOLD.over(Speeds())
            assert at.router.fleet.replicas[two.url].load.speeds == Speeds()
            assert (one.works, two.works) == (0, 0)


async def test_a_replica_that_has_computed_nothing_tells_its_size() -> None:
    """How much it keeps is believed at once; a speed that it has not measured changes nothing."""
    async with replicas(say_ok) as (one,):
        one.metrics = PAGE.decode().replace("12345.0", "0.0")
        async with routed([one]) as at:
            load = at.router.fleet.replicas[one.url].load
            await until_async(lambda: load.speeds.cache_tokens == TOLD.cache_tokens)
            assert load.tokens_per_s == Speeds().tokens_per_s
            assert load.learnt_tokens == 0
