"""Tiers and tenants of all replicas together: what counts, what counts once, and what is left out by name."""

import json
from collections.abc import Mapping
from typing import Any

import orjson
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from hotspan.core.types import Tier
from hotspan.http.upstream import BrokenError, UnreachedError
from hotspan.router import caches
from hotspan.router.caches import (
    Contents,
    FleetCaches,
    ReplicaFigures,
    TenantFigures,
    TierFigures,
    contents_in,
    figures_in,
    tenants_together,
    tiers_together,
)
from hotspan.testing.clock import SimulatedClock
from kit.waiting import until_async

from .rig import Fake, replicas, routed, say

GPU, RAM, DISK, L2 = Tier.GPU, Tier.RAM, Tier.DISK, Tier.L2
PAGE = """# HELP vllm:cache_config_info x
vllm:cache_config_info{engine="0",kv_cache_size_tokens="1000"} 1.0
vllm:cache_config_info{engine="1",kv_cache_size_tokens="1000"} 1.0
vllm:kv_cache_usage_perc{engine="0"} 0.5
vllm:kv_cache_usage_perc{engine="1"} 0.0
vllm:prefix_cache_hits_total{engine="0"} 300.0
hotspan_cache_token_bytes{engine="0"} 100.0
hotspan_cache_token_bytes{engine="1"} 100.0
hotspan_cache_lookup_tokens_total{engine="0"} 4000.0
hotspan_cache_lookup_tokens_total{engine="1"} 6000.0
hotspan_cache_hit_tokens_total{engine="0",tier="ram"} 2000.0
hotspan_cache_hit_tokens_total{engine="1",tier="ram"} 1000.0
hotspan_cache_hit_tokens_total{engine="1",tier="l2"} 500.0
hotspan_cache_used_bytes{engine="0",tier="ram"} 10.0
hotspan_cache_used_bytes{engine="1",tier="ram"} 20.0
hotspan_cache_used_bytes{engine="0",tier="l2"} 700.0
hotspan_cache_used_bytes{engine="1",tier="l2"} 800.0
hotspan_cache_capacity_bytes{engine="0",tier="ram"} 100.0
hotspan_cache_capacity_bytes{engine="1",tier="ram"} 100.0
hotspan_cache_capacity_bytes{engine="0",tier="l2"} 0.0
hotspan_cache_capacity_bytes{engine="1",tier="l2"} 0.0
hotspan_cache_evictions_total{engine="0",tier="ram"} 7.0
hotspan_cache_evictions_total{engine="1",tier="ram"} 5.0
hotspan_cache_tier_up{engine="0",tier="ram"} 1.0
hotspan_cache_tier_up{engine="0",tier="l2"} 1.0
hotspan_cache_tier_up{engine="1",tier="l2"} 0.0
"""
FIGURES = ReplicaFigures(
    10_000.0,
    {
        GPU: TierFigures(50_000.0, 200_000.0, 300.0),
        RAM: TierFigures(30.0, 200.0, 3000.0, evicted_chunks=12.0),
        L2: TierFigures(800.0, 0.0, 500.0, is_up=False),
    },
)
"""Of PAGE."""


def answer(*cores: Mapping[str, Any]) -> bytes:
    """What `/hotspan/cache` of a server with these engine cores answers."""
    return json.dumps({"replicas": cores}).encode()


def core(ram: Mapping[str, int], hits: Mapping[str, int], store: str | None = None) -> dict[str, Any]:
    """One engine core whose chunks in RAM have 10 bytes each, and no disk."""
    chunks = sum(ram.values())
    tiers = {"ram": {"chunks": chunks, "bytes": 10 * chunks, "tenants": ram, "is_up": True}}
    tiers["l2"] = {"chunks": 9, "bytes": 90, "tenants": {}, "store": store}
    return {"replica": "r", "tiers": tiers, "texts": [], "hit_tokens": hits, "is_encrypted": False}


def l2(used: float, size: float = 0.0) -> ReplicaFigures:
    """A replica with an L2 alone."""
    return ReplicaFigures(100.0, {L2: TierFigures(used, size, 10.0)})


def tier(found: Mapping[str, Any], which: Tier) -> Mapping[str, Any]:
    """One tier of what is told."""
    (tier,) = [each for each in found["tiers"] if each["tier"] == which.value]
    return tier


# -- one replica -------------------------------------------------------------------------------------------------------


def test_a_replicas_figures_are_those_of_its_engine_cores() -> None:
    """Sums of bytes and tokens; of the L2, which all cores share, the largest count; a tier of size 0 is there."""
    assert figures_in(PAGE.encode()) == FIGURES


@pytest.mark.parametrize(
    "page",
    [
        "",
        'vllm:prefix_cache_hits_total 5\nvllm:cache_config_info{kv_cache_size_tokens="10"} 1\n',
        'hotspan_cache_capacity_bytes{tier="tape"} 5\nhotspan_cache_capacity_bytes{level="ram"} 5\n',
        'hotspan_cache_capacity_bytes{tier="ram"} NaN\n',
        'hotspan_cache_capacity_bytes{tier="ram"} -1\nhotspan_cache_capacity_bytes{tier="disk"} +Inf\n',
        'hotspan_cache_capacity_bytes{tier="l2"} 1e300\n',
    ],
)
def test_a_page_without_tiers_has_no_figures(page: str) -> None:
    """Neither vLLM's alone, nor tiers that do not exist, nor sizes that are impossible."""
    assert figures_in(page.encode()) is None


def test_a_replicas_tenants_are_those_of_its_engine_cores() -> None:
    """Bytes by the tier's mean size of a chunk; a server of an older version tells neither tokens nor its store."""
    both = answer(core({"acme": 3, "globex": 1}, {"acme": 512}, "abc"), core({"acme": 2}, {"initech": 256}, "abc"))
    tenants = {"acme": TenantFigures(50, 0, 512), "globex": TenantFigures(10), "initech": TenantFigures(0, 0, 256)}
    assert contents_in(both) == Contents(tenants, "abc")
    old = {"tiers": {"disk": {"chunks": 3, "bytes": 90, "tenants": {"acme": 2}}}}
    assert contents_in(answer(old)) == Contents({"acme": TenantFigures(disk_bytes=60)})


@pytest.mark.parametrize(
    "hostile",
    [
        b"",
        b"[" * 100_000,
        b'{"replicas": {}}',
        b'{"replicas": [{"tiers": {"ram": {"tenants": {"acme": "<b>"}}}}]}',
        answer(core({"acme": -1}, {})),
        answer(core({"acme": 10**30}, {})),
        answer(core({"a" * 129: 1}, {})),
        answer(core({}, {str(number): 1 for number in range(caches._MAX_COUNTS + 1)})),
    ],
)
def test_an_answer_that_no_server_gives_has_no_contents(hostile: bytes) -> None:
    """Other types, numbers below 0 or too large, names that are too long, and too many of them."""
    assert contents_in(hostile) is None


def test_names_that_no_tenant_has_are_left_out() -> None:
    """Control characters and those that turn the direction of writing; any others are text, whatever they look like."""
    found = contents_in(answer(core({"a\nb": 1, "\N{RIGHT-TO-LEFT OVERRIDE}x": 1, "<b>x</b>": 1}, {})))
    assert found is not None and found.tenants == {"<b>x</b>": TenantFigures(10)}


@given(st.binary(max_size=200), st.sampled_from(PAGE.splitlines()))
def test_no_answer_is_an_error(noise: bytes, line: str) -> None:
    """Whatever a replica answers, what is told of it is JSON."""
    pages = [noise, PAGE.encode() + noise, line.rpartition(" ")[0].encode() + b" " + noise]
    figures = {str(number): figures_in(page) or "missing" for number, page in enumerate(pages)}
    stored = dict.fromkeys(figures, contents_in(noise) or "missing")
    orjson.dumps(tiers_together(figures, stored) | tenants_together(stored))


# -- all replicas ------------------------------------------------------------------------------------------------------


def test_tiers_are_summed_over_the_replicas_that_have_figures() -> None:
    """Those without are named with the reason; a tier that some have counts these."""
    ram = ReplicaFigures(1000.0, {RAM: TierFigures(1.0, 2.0, 100.0, evicted_chunks=3.0)})
    found = tiers_together({"a": FIGURES, "b": ram, "c": "does not answer"}, {"a": "x", "b": "x", "c": "x"})
    assert found["lookup_tokens"] == 11_000
    assert [each["tier"] for each in found["tiers"]] == ["gpu", "ram", "l2"]
    both = {"tier": "ram", "replicas": 2, "replicas_up": 2, "hit_tokens": 3100, "used_bytes": 31, "capacity_bytes": 202}
    assert tier(found, RAM) == both | {"evicted_chunks": 15}
    assert tier(found, L2)["evicted_chunks"] is None, "its store evicts by itself"
    assert (tier(found, GPU)["replicas"], tier(found, GPU)["used_bytes"]) == (1, 50_000)
    assert (tier(found, L2)["replicas"], tier(found, L2)["replicas_up"]) == (1, 0)
    assert [each["missing"] for each in found["replicas"]] == ["", "", "does not answer"]
    hits = {"gpu": 300, "ram": 3000, "l2": 500}
    assert (found["replicas"][0]["lookup_tokens"], found["replicas"][0]["hit_tokens"]) == (10_000, hits)
    assert "hit_tokens" not in found["replicas"][2]


def test_what_replicas_evict_from_a_store_is_added_up() -> None:
    """Each reports what it deleted itself, also where all report the bytes of one store."""
    replicas = {
        name: ReplicaFigures(1.0, {L2: TierFigures(5.0, 9.0, 1.0, True, n)}) for name, n in (("a", 0), ("b", 4))
    }
    found = tiers_together(replicas, {name: Contents({}, "s") for name in replicas})
    assert (tier(found, L2)["used_bytes"], tier(found, L2)["evicted_chunks"]) == (5.0, 4)


@pytest.mark.parametrize(
    ("stores", "used", "count", "is_assumed"),
    [
        (("s", "s", "s"), 30, 1, False),
        (("s", "t", "s"), 50, 2, False),
        (("s", "t", "u"), 60, 3, False),
        (("", "", ""), 30, 1, True),
        (("", "t", "s"), 50, 2, True),
    ],
)
def test_a_shared_l2_counts_once(stores: tuple[str, ...], used: int, count: int, is_assumed: bool) -> None:
    """Of each store the largest count; who does not name its store is taken to share the first one's. Hits add up."""
    stored = {str(number): Contents({}, store) for number, store in enumerate(stores)}
    figures = {str(number): l2(10.0 * (number + 1), 100.0) for number in range(3)}
    found = tier(tiers_together(figures, stored), L2)
    assert (found["used_bytes"], found["capacity_bytes"], found["stores"]) == (used, 100 * count, count)
    assert (found["is_assumed"], found["hit_tokens"]) == (is_assumed, 30)


def test_one_l2_is_not_shared() -> None:
    """Nothing is assumed of a store that one replica has."""
    found = tier(tiers_together({"a": l2(5.0), "b": FIGURES}, {"a": Contents({}), "b": Contents({})}), L2)
    assert found["is_assumed"] is True
    found = tier(tiers_together({"a": l2(5.0), "b": "is down"}, {"a": Contents({}), "b": "is down"}), L2)
    assert (found["stores"], found["is_assumed"]) == (1, False)


def test_tenants_are_summed_over_the_replicas_that_tell() -> None:
    """The most bytes first, then the most tokens; a replica without tenants adds nothing."""
    a = Contents({"acme": TenantFigures(10, 5, 256), "globex": TenantFigures(1, 1, 999)})
    b = Contents({"globex": TenantFigures(20, 0, 1), "idle": TenantFigures(hit_tokens=7), "new": TenantFigures()})
    found = tenants_together({"a": a, "b": b, "c": Contents({}), "d": "does not answer"})
    assert found["tenant_count"] == 4
    assert found["tenants"] == [
        {"tenant": "globex", "ram_bytes": 21, "disk_bytes": 1, "hit_tokens": 1000},
        {"tenant": "acme", "ram_bytes": 10, "disk_bytes": 5, "hit_tokens": 256},
        {"tenant": "idle", "ram_bytes": 0, "disk_bytes": 0, "hit_tokens": 7},
        {"tenant": "new", "ram_bytes": 0, "disk_bytes": 0, "hit_tokens": 0},
    ]


def test_what_is_told_is_bounded() -> None:
    """However many tenants there are, and whatever they are said to have: the largest, and how many there are."""
    most = TenantFigures(*3 * [caches._MAX_COUNT])
    stored = {str(n): Contents({f"{n}-{m}": most for m in range(500)} | {"all": most}) for n in range(40)}
    found = tenants_together(stored)
    assert (len(found["tenants"]), found["tenant_count"]) == (caches.MAX_TENANTS, 40 * 500 + 1)
    assert len(orjson.dumps(found)) < 20_000
    (both,) = tenants_together({name: Contents({"all": most}) for name in "ab"})["tenants"]
    assert tuple(both.values()) == ("all", *most)


# -- reading -----------------------------------------------------------------------------------------------------------


class Replicas:
    """In the place of connections: what each replica answers, and what it was asked."""

    def __init__(self, **answers: tuple[int, bytes] | Exception) -> None:
        self.answers = answers
        self.asked: list[tuple[str, str, Any]] = []

    async def fetch(self, name: str, path: str, *, headers: Any, within_s: float, max_bytes: int) -> tuple[int, bytes]:
        self.asked.append((name, path, headers))
        found = self.answers[name]
        if isinstance(found, Exception):
            raise found
        return found if path == "/hotspan/cache" else (200, PAGE.encode())

    def reader(self, clock: SimulatedClock | None = None, down: str = "") -> FleetCaches:
        """What reads them."""
        return FleetCaches(self.answers, self, lambda name: name == down, clock or SimulatedClock())  # type: ignore[arg-type]


async def test_replicas_are_read_while_somebody_looks() -> None:
    """Never unasked; metrics and contents not more often than each holds, and anew for who shows another token."""
    clock, behind = SimulatedClock(), Replicas(a=(200, answer(core({"acme": 1}, {}))))
    reader = behind.reader(clock)
    assert not behind.asked
    metrics, contents = (("a", path, [("authorization", "Bearer t")]) for path in ("/metrics", "/hotspan/cache"))
    for seconds, asked in ((0.0, [metrics, contents]), (1.0, []), (1.0, [metrics]), (9.0, [metrics, contents])):
        clock.advance(seconds)
        behind.asked.clear()
        found = await reader.read("Bearer t")
        assert behind.asked == asked and found["tenant_count"] == 1
    behind.asked.clear()
    await reader.read("")
    assert behind.asked == [("a", "/metrics", []), ("a", "/hotspan/cache", [])]


async def test_replicas_that_do_not_tell_are_named() -> None:
    """With the reason; one whose health check fails is not asked, and nothing of an answer is repeated."""
    behind = Replicas(
        ok=(200, answer(core({"acme": 1}, {}))),
        gone=UnreachedError("<b>"),
        broken=BrokenError("<b>"),
        locked=(401, b"<b>"),
        plain=(409, b"<b>"),
        other=(200, b"<b>"),
        old=(404, b"<b>"),
        down=(200, b""),
    )
    found = await behind.reader(down="down").read("")
    assert {each["replica"]: each["tenants_missing"] for each in found["replicas"]} == {
        "ok": "",
        "gone": "does not answer",
        "broken": "sent a broken answer, or too large a one",
        "locked": "wants an admin token: start router and replicas with the same one",
        "plain": "has no cache",
        "other": "sent no contents, or those of too many tenants",
        "old": "answers with status 404",
        "down": "is down",
    }
    missing = {each["replica"]: each["missing"] for each in found["replicas"] if each["missing"]}
    assert missing == {"gone": "does not answer", "broken": found["replicas"][2]["tenants_missing"], "down": "is down"}
    assert "down" not in [name for name, _, _ in behind.asked] and b"<b>" not in orjson.dumps(found)


async def test_the_router_tells_of_all_replicas() -> None:
    """Of real ones: two with one L2, one without metrics and one that is gone; the token reaches them."""
    contents = answer(core({"acme": 3}, {"acme": 256}, "store")).decode()
    async with replicas(say(200, contents), say(200, contents), say(404)) as fakes:
        one, two, three = fakes
        one.metrics = two.metrics = PAGE
        gone = Fake(url="http://127.0.0.1:1")
        async with routed([one, two, three, gone], admin_token="t") as at:
            await until_async(lambda: at.router.health[gone.url].health.value == "down")
            assert not [each for fake in fakes for each in fake.asked]
            token = {"authorization": "Bearer t"}
            async with at.client.get(at.url + "/router/cache", headers=token) as reply:
                found = await reply.json()
        assert one.asked[0][:2] == ("GET", "/hotspan/cache") and one.asked[0][2]["authorization"] == "Bearer t"
    assert found["lookup_tokens"] == 20_000 and tier(found, RAM)["used_bytes"] == 60
    assert (tier(found, L2)["used_bytes"], tier(found, L2)["hit_tokens"], tier(found, L2)["stores"]) == (800, 1000, 1)
    assert found["tenants"] == [{"tenant": "acme", "ram_bytes": 60, "disk_bytes": 0, "hit_tokens": 512}]
    whys = {each["replica"]: each["missing"] for each in found["replicas"]}
    assert whys == {one.url: "", two.url: "", three.url: "answers with status 404", gone.url: "is down"}


async def test_a_large_answer_is_cut_off() -> None:
    """A replica that sends more than a server ever does is left out, and the others are told of."""

    async def endless(request: web.Request, body: bytes) -> web.StreamResponse:
        return web.Response(text=" " * (caches._MAX_BYTES[request.path] + 1))

    async with replicas(endless, say(200, answer(core({"acme": 1}, {})).decode())) as fakes, routed(fakes) as at:
        for fake in fakes:
            fake.metrics = PAGE
        async with at.client.get(at.url + "/router/cache") as reply:
            found = await reply.json()
    assert [each["tenants_missing"] for each in found["replicas"]] == ["sent a broken answer, or too large a one", ""]
    assert found["tenant_count"] == 1 and tier(found, RAM)["replicas"] == 2
