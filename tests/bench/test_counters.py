import asyncio
import os
import subprocess
import sys

import pytest

from hotspan.bench.counters import CacheCounters, ProcessTreeCpu, settled_seconds
from hotspan.bench.records import CacheUse

BURN = "import time\nend = time.process_time() + {seconds}\nwhile time.process_time() < end: pass\n"
PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", {burn!r}])
child.wait()
print("reaped", flush=True)
time.sleep(60)
"""


def test_a_child_that_has_ended_still_counts() -> None:
    """CPU time of a descendant is in the tree's sum while it runs and after it has ended."""
    burn = BURN.format(seconds=0.4)
    process = subprocess.Popen([sys.executable, "-c", PARENT.format(burn=burn)], stdout=subprocess.PIPE)
    try:
        cpu = ProcessTreeCpu(process.pid)
        assert process.stdout is not None and process.stdout.readline() == b"reaped\n"
        after = cpu.seconds()
        tick = 1 / os.sysconf("SC_CLK_TCK")  # user and system time are each told in whole ticks
        assert after is not None and after > 0.4 - 2.5 * tick
        assert after <= (cpu.seconds() or 0.0) < after + 0.4
    finally:
        process.kill()
        process.communicate()


def test_a_tree_whose_root_has_ended_is_unknown() -> None:
    """Once the root has ended and was waited for there is no figure, rather than a wrong one."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    cpu = ProcessTreeCpu(process.pid)
    assert cpu.seconds() is not None
    process.communicate(b"\n")
    assert cpu.seconds() is None


def settled(readings: list[float | None]) -> tuple[float | None, float]:
    """What `settled_seconds` says of these readings, the last of which repeats, and how long it waited."""
    waited = 0.0

    async def sleep(seconds: float) -> None:
        nonlocal waited
        waited += seconds

    def seconds() -> float | None:
        return readings.pop(0) if len(readings) > 1 else readings[0]

    return asyncio.run(settled_seconds(seconds, sleep)), waited


def test_cpu_time_is_read_once_it_has_come_to_rest() -> None:
    """The figure has what was used in the background until a window of 0.3 s with less than 5 % of a core."""
    assert settled([10.0]) == (10.0, pytest.approx(0.3))
    assert settled([10.0, 10.01]) == (10.01, pytest.approx(0.3)), "a tick of the clock is rest"
    assert settled([10.0, 10.3, 10.5, 10.51, 99.0]) == (10.51, pytest.approx(0.9))


def test_a_server_that_never_rests_is_waited_for_3_s() -> None:
    """A server that keeps computing gets the figure of the last of ten windows."""
    assert settled([float(i) for i in range(50)]) == (10.0, pytest.approx(3.0))


def test_a_server_that_ends_meanwhile_has_no_figure() -> None:
    """A process that is gone while it is waited for has no CPU time, rather than a wrong one."""
    assert settled([10.0, None])[0] is None
    assert settled([None])[0] is None


def page(*lines: str) -> CacheCounters | None:
    return CacheCounters.parse("\n".join(lines) + "\n")


def test_counters_are_summed_over_labels() -> None:
    """Engines and workers of one server count together, tiers apart."""
    found = page(
        'vllm:prefix_cache_hits_total{engine="0"} 5',
        'vllm:prefix_cache_hits_total{engine="1"} 7',
        'hotspan_cache_hit_tokens_total{tier="ram",worker="0"} 1e+02',
        'hotspan_cache_hit_tokens_total{tier="ram",worker="1"} 1',
        'hotspan_cache_hit_tokens_total{tier="disk",worker="0"} 2',
        "hotspan_cache_lookup_tokens_total 300",
    )
    assert found == CacheCounters({"gpu": 12.0, "ram": 101.0, "disk": 2.0}, 300.0)


def test_deltas_start_from_zero_for_what_is_new_or_was_reset() -> None:
    """A counter that appears, or that a restart set back, counts from zero and is never negative."""
    before = CacheCounters({"gpu": 50.0, "ram": 10.0}, 100.0)
    now = CacheCounters({"gpu": 20.0, "ram": 25.0, "disk": 3.0}, 130.0)
    assert now.since(before) == CacheUse({"gpu": 20.0, "ram": 15.0, "disk": 3.0}, 30.0)
    assert now.since(None) == CacheUse(now.hit_tokens, 130.0)


def test_another_connectors_hits_are_external() -> None:
    """vLLM's count of a connector's hits is a tier only where hotspan doesn't say more."""
    external = "vllm:external_prefix_cache_hits_total 9"
    assert page("vllm:prefix_cache_hits_total 1", external) == CacheCounters({"gpu": 1.0, "external": 9.0}, None)
    asked = "vllm:external_prefix_cache_queries_total 30"
    missed = page("vllm:prefix_cache_hits_total 1", external.replace(" 9", " 0"), asked)
    assert missed == CacheCounters({"gpu": 1.0, "external": 0.0}, None)
    both = page(external, 'hotspan_cache_hit_tokens_total{tier="ram"} 9')
    assert both == CacheCounters({"ram": 9.0}, 0.0)


def test_a_page_without_cache_counters_is_none() -> None:
    """A server that counts nothing about caches has no counters, rather than zeros."""
    assert page("# HELP up is it", "up 1") is None


def test_created_timestamps_are_not_counted() -> None:
    """The `_created` samples next to a counter are no tokens."""
    found = page("vllm:prefix_cache_hits_total 4", "vllm:prefix_cache_hits_created 1.7e9")
    assert found == CacheCounters({"gpu": 4.0}, None)


def test_an_engine_without_a_connector_has_no_other_cache() -> None:
    """vLLM has the counters of connectors in any case; nobody is asked, so they stay at 0."""
    zeros = ("vllm:external_prefix_cache_hits_total 0", "vllm:external_prefix_cache_queries_total 0")
    found = page("vllm:prefix_cache_hits_total 1", *zeros)
    assert found == CacheCounters({"gpu": 1.0}, None)
    assert found is not None and "outside" not in found.describe()
