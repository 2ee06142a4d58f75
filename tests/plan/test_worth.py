"""What tiers are worth on machines that were published, and the verdict on a working set."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from hotspan.core.errors import ConfigError
from hotspan.core.types import GIB, Tier
from hotspan.plan.advice import Advice, advise
from hotspan.plan.machines import machine, price
from hotspan.plan.measured import measured
from hotspan.plan.rates import Rates
from hotspan.plan.shape import ModelShape
from hotspan.plan.tiers import DiskChoice, TierPlan, choose_tiers
from hotspan.plan.worth import cost, judge, missing_options

from . import models

P4DE = machine("p4de.24xlarge")
QWEN_1B = {**models.QWEN_7B, "num_attention_heads": 12, "num_key_value_heads": 2, "hidden_size": 1536}
QWEN_72B = {
    **models.QWEN_7B,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "hidden_size": 8192,
}
QWEN3_8B = {
    **models.QWEN_7B,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
}
WEIGHTS_1B, WEIGHTS_8B, WEIGHTS_72B = 3_087_467_144, 16_381_516_776, 145_412_407_296
"""Bytes of the published files."""


def on_p4de(config: models.Config, weights: int, ranks: int, tokens: int = 10_000, users: int = 46) -> Advice:
    """The machine of the published table, at its --gpu-memory-utilization."""
    shape = ModelShape.from_config(config, tensor_parallel=ranks)
    plan = choose_tiers(P4DE.host(), shape)
    return advise(
        *(plan, shape),
        users=users,
        tokens=tokens,
        gb_s={Tier.RAM: P4DE.gpu.host_gb_s * ranks, Tier.DISK: 10.0},
        prefill_tokens_per_s=P4DE.prefill_tokens_per_s(weights, ranks),
        pool_bytes=P4DE.pool_bytes(weights, ranks, 0.9),
    )


@pytest.mark.parametrize(("config", "kib"), [(QWEN_1B, 28), (models.QWEN_7B, 56), (QWEN_72B, 320)])
def test_a_token_takes_what_was_published(config: models.Config, kib: int) -> None:
    """Qwen2.5 with 1.5, 7 and 72 billion parameters keeps 28, 56 and 320 KiB of a token, exactly."""
    assert ModelShape.from_config(config).kv_bytes_per_token == kib * 1024


@pytest.mark.parametrize(
    ("config", "weights", "ranks", "tokens"),
    [(QWEN_1B, WEIGHTS_1B, 1, 2_600_000), (QWEN_72B, WEIGHTS_72B, 4, 480_000)],
)
def test_the_engines_pool_is_the_published_one(config: models.Config, weights: int, ranks: int, tokens: int) -> None:
    """On A100s with 80 GB the pool holds 2.6M tokens of the small model, and 480K of the large one on four."""
    pool = on_p4de(config, weights, ranks).holdings[0]
    assert pool.tier is Tier.GPU
    assert float(f"{pool.tokens:.1e}") == tokens  # two digits were published


PUBLISHED: Mapping[str, tuple[models.Config, int, int, float, float]] = {
    # of the published table: from how many tokens on RAM, and disk, where the two ranges overlap in the middle
    "1B": (QWEN_1B, WEIGHTS_1B, 1, 2e6, 27.5e6),
    "8B": (QWEN3_8B, WEIGHTS_8B, 1, 250e3, 7e6),
    "72B": (QWEN_72B, WEIGHTS_72B, 4, 250e3, 2.75e6),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_recommendations_are_within_a_row_of_the_published_table(name: str) -> None:
    """For any amount of repeated text, and the same row in the middle of each."""
    config, weights, ranks, ram_from, disk_from = PUBLISHED[name]
    pool, ram, disk = on_p4de(config, weights, ranks).holdings
    assert ram.pays_from == pool.tokens and disk.pays_from == ram.tokens

    def row(tokens: float, *starts: float | None) -> int:
        return sum(start is not None and tokens >= start for start in starts)

    for step in range(61):
        tokens = 1e5 * 10 ** (step / 20)
        assert abs(row(tokens, ram.pays_from, disk.pays_from) - row(tokens, ram_from, disk_from)) <= 1
    middles = (ram_from / 4, (ram_from * disk_from) ** 0.5, disk_from * 4)
    assert [row(each, ram.pays_from, disk.pays_from) for each in middles] == [0, 1, 2]


def test_what_the_pool_holds_needs_no_tiers() -> None:
    """The published 460,000 tokens fit the pool of the small model: the verdict is that tiers will not help."""
    advice = on_p4de(QWEN_1B, WEIGHTS_1B, 1)
    verdict = judge(advice, 1.0)
    assert not verdict.helps and "own pool" in str(verdict) and "will not help you" in str(verdict)
    assert (advice.hit_rate, verdict.saved) == (1.0, 0.0)


def of(ram_gib: float, *, pool_gib: float = 4, rate: float = 5000, gb_s: float = 20, tokens: int = 10_240) -> Advice:
    """100 texts of 560 MiB each over these tiers."""
    shape = ModelShape.from_config(models.QWEN_7B)
    return advise(
        *(TierPlan(int(ram_gib * GIB), None, None, None, ()), shape),
        users=100,
        tokens=tokens,
        gb_s={Tier.RAM: gb_s},
        prefill_tokens_per_s=rate,
        pool_bytes=int(pool_gib * GIB),
    )


@pytest.mark.parametrize(
    ("advice", "reuse", "why"),
    [
        (of(100), 0.0, "no text is asked for twice"),
        (of(0), 1.0, "no room for a tier"),
        (of(100, tokens=100), 1.0, "shorter than one chunk"),
        (of(100, rate=1e6), 1.0, "as long as computing"),
        (of(100), 0.03, "only 2.7%"),
        (of(5), 1.0, "only 1"),
    ],
)
def test_it_says_when_tiers_do_not_help(advice: Advice, reuse: float, why: str) -> None:
    """Each reason for which they do not, in the words of the verdict."""
    verdict = judge(advice, reuse)
    assert not verdict.helps and why in verdict.why


def test_what_is_saved_follows_from_hits_and_rates() -> None:
    """Half of the texts in RAM, loaded in a tenth of the time that computing takes, save 45 % of it."""
    shape = ModelShape.from_config(models.QWEN_7B)
    gb_s = 10 * shape.kv_bytes_per_token * 5000 / 1e9
    advice = of(50 * 560 / 1024, pool_gib=1e-9, gb_s=gb_s)
    verdict = judge(advice, 1.0)
    assert verdict.helps and verdict.saved == pytest.approx(0.45)
    paid = cost(advice, 1.0, 3600.0 * 5, requests_per_hour=10, extra_usd=100)
    assert paid is not None
    assert paid.without == pytest.approx(5 / 5000 * 1e6) and paid.with_tiers == pytest.approx(paid.without * 0.55)
    per_hour = 10 * 10_240 * 0.45 * 5 / 5000
    assert paid.saved_per_month == pytest.approx(per_hour * 730)
    assert paid.engines == pytest.approx(10 * 10_240 / 5000 / 3600)
    assert paid.engines_with_tiers == pytest.approx(0.55 * 10 * 10_240 / 5000 / 3600)
    assert paid.payback_days == pytest.approx(100 / per_hour / 24)


def test_without_rates_there_is_a_verdict_but_no_cost() -> None:
    """It is that tiers may help: hits are known, and the options are named without which the time saved is not."""
    shape = ModelShape.from_config(models.QWEN_7B)
    advice = advise(
        TierPlan(GIB * 30, DiskChoice(Path("/kv"), 60 * GIB), None, None, ()), shape, users=100, tokens=10_240
    )
    verdict = judge(advice, 1.0)
    assert verdict.helps is None and verdict.saved is None
    assert str(verdict).startswith("This may help: ")
    assert "unknown without --prefill-rate, --ram-rate and --disk-rate" in verdict.why
    assert cost(advice, 1.0, 10.0) is None


def test_an_unknown_pool_bounds_what_is_saved() -> None:
    """The engine's own pool may hold what the tiers do: they may help, and save at most so much."""
    verdict = judge(of(50, pool_gib=0), 1.0)
    assert verdict.helps is None and verdict.saved is not None and verdict.saved > 0.5
    assert f"up to {verdict.saved:.0%} of the prefill time" in verdict.why and "pool, which is unknown" in verdict.why
    assert judge(of(50, pool_gib=4), 1.0).helps


def test_measured_hits_take_the_place_of_the_working_sets() -> None:
    """Of each tier below the pool, also of an L2 of unknown size; saved time and cost follow from them."""
    shape = ModelShape.from_config(models.QWEN_7B)
    gb_s = 10 * shape.kv_bytes_per_token * 5000 / 1e9  # a tenth of the time that computing takes

    def advice(ram: float, l2: float) -> Advice:
        return advise(
            *(TierPlan(500 * GIB, None, None, None, ()), shape),
            users=100,
            tokens=10_240,
            gb_s={Tier.RAM: gb_s, Tier.L2: gb_s},
            prefill_tokens_per_s=5000,
            pool_bytes=900 * GIB,
            hits={Tier.GPU: 0.2, Tier.RAM: ram, Tier.L2: l2},
        )

    much, little = judge(advice(0.3, 0.1), 1.0), judge(advice(0.001, 0.0), 1.0)
    assert much.helps and much.saved == pytest.approx(0.4 * 0.9 / 0.8)
    assert little.helps is False and "only 0.1% of the prefill time" in little.why
    paid = cost(advice(0.001, 0.0), 1.0, 3600.0)
    assert paid is not None and paid.with_tiers == pytest.approx(paid.without * (1 - 0.0009 / 0.8))
    assert paid.without == pytest.approx(0.8 / 5000 * 1e6)


def test_a_slow_disk_says_nothing_of_ram() -> None:
    """Where RAM's rate is unknown, a disk that is slower than computing does not decide that tiers will not help."""
    shape = ModelShape.from_config(models.QWEN_7B)
    plan = TierPlan(30 * GIB, DiskChoice(Path("/kv"), 90 * GIB), None, None, ())
    advice = advise(plan, shape, users=100, tokens=10_240, gb_s={Tier.DISK: 0.01}, prefill_tokens_per_s=5000)
    assert judge(advice, 1.0).helps is None and "--ram-rate" in judge(advice, 1.0).why


def test_a_tier_in_which_nothing_is_found_needs_no_rate() -> None:
    """A disk of unknown speed below RAM for all texts leaves the cost known; one that is needed does not."""
    shape = ModelShape.from_config(models.QWEN_7B)

    def advice(ram_gib: int) -> Advice:
        plan = TierPlan(GIB * ram_gib, DiskChoice(Path("/kv"), 900 * GIB), None, None, ())
        return advise(
            *(plan, shape), users=100, tokens=10_240, gb_s={Tier.RAM: 20.0}, prefill_tokens_per_s=5000, pool_bytes=GIB
        )

    assert missing_options(advice(100)) == "" and missing_options(advice(30)) == "--disk-rate"
    enough = cost(advice(100), 1.0, 10.0, requests_per_hour=10)
    assert enough is not None and enough.payback_days is None
    assert cost(advice(30), 1.0, 10.0) is None


def test_a_tier_pays_for_texts_above_its_latency() -> None:
    """5 ms of latency against 0.1 ms saved per token: texts of a chunk pay, and with 100 ms those of 1,000."""
    shape = ModelShape.from_config(models.QWEN_7B)
    gb_s = shape.kv_bytes_per_token * 10_000 / 1e9  # 0.1 ms per token
    for latency_s, shortest in ((0.005, 128), (0.1, 1000)):
        advice = advise(
            *(TierPlan(GIB, None, None, None, ()), shape),
            users=1,
            tokens=25_600,
            l2_bytes=GIB,
            prefill_tokens_per_s=5000,
            gb_s={Tier.L2: gb_s},
            latency_s={Tier.L2: latency_s},
        )
        assert advice.holdings[-1].text_from == pytest.approx(shortest, abs=1)


def test_prices_have_a_source_and_a_date(tmp_path: Path) -> None:
    """Shipped ones say where they are from; a given price and a user's file come first; nothing is made up."""
    shipped = price("p4de.24xlarge", None, None)
    assert shipped is not None and shipped.source and shipped.date in str(shipped)
    assert price("p4de.24xlarge", 12.5, None) == price(None, 12.5, None)
    assert price("g5.12xlarge", None, None) is None and price(None, None, None) is None
    file = tmp_path / "prices.toml"
    file.write_text('[prices."p4de.24xlarge"]\nusd_per_hour = 20\nsource = "our contract"\ndate = "2026-01-01"\n')
    ours = price("p4de.24xlarge", None, file)
    assert ours is not None and str(ours) == "20.00 USD per hour (our contract, 2026-01-01)"
    with pytest.raises(ConfigError, match="has no"):
        price("p5.48xlarge", None, file)
    file.write_text('[prices."p4de.24xlarge"]\nusd_per_hour = "much"\n')
    with pytest.raises(ConfigError, match="usd_per_hour, source and date"):
        price("p4de.24xlarge", None, file)


def test_a_machine_that_is_not_known_is_refused() -> None:
    """With what was probably meant; more ranks than GPUs and weights that do not fit are refused, too."""
    with pytest.raises(ConfigError, match=r"p4de\.24xlarge"):
        machine("p4de.24xlrge")
    with pytest.raises(ConfigError, match="8 GPUs"):
        P4DE.pool_bytes(0, 16)
    with pytest.raises(ConfigError, match="do not fit"):
        P4DE.pool_bytes(WEIGHTS_72B, 1)


PAGE = """
hotspan_cache_token_bytes{engine="0"} 1000.0
hotspan_cache_token_bytes{engine="1"} 1000.0
hotspan_cache_capacity_bytes{engine="0",tier="ram"} 500000.0
hotspan_cache_capacity_bytes{engine="1",tier="ram"} 500000.0
hotspan_cost_prefill_tokens_per_second{engine="0"} 4000.0
hotspan_cost_bytes_per_second{engine="0",tier="disk"} 2e9
hotspan_cost_latency_seconds{engine="0",tier="disk"} 0.002
hotspan_cache_lookup_tokens_total{engine="0"} 1000.0
hotspan_cache_hit_tokens_total{engine="0",tier="ram"} 250.0
vllm:prefix_cache_hits_total{engine="0"} 100.0
vllm:cache_config_info{engine="0",kv_cache_size_tokens="4096"} 1.0
"""


def test_a_servers_metrics_are_read() -> None:
    """Rates, sizes in tokens and hit rates, summed over its engines; another page is refused."""
    told = measured(PAGE)
    assert told.prefill_tokens_per_s == 4000 and told.gb_s == {Tier.DISK: 2.0} and told.latency_s == {Tier.DISK: 0.002}
    assert told.capacity_tokens == {Tier.RAM: 1000, Tier.GPU: 4096}
    assert told.hits == {Tier.RAM: 0.25, Tier.GPU: 0.1}
    assert measured(PAGE.replace("250.0", "0.0")).hits == {Tier.RAM: 0.0, Tier.GPU: 0.1}, "none is a measurement"
    assert measured(PAGE.replace('lookup_tokens_total{engine="0"} 1000', "lookup_tokens_total 0")).hits is None
    with pytest.raises(ConfigError, match="hotspan serve"):
        measured(json.dumps({}))


@pytest.mark.parametrize(
    ("lines", "gb_s"),
    [
        ("vllm:kv_offload_load_bytes_total 6e9\nvllm:kv_offload_load_time_total 2.0\n", 3.0),
        ('vllm:kv_offload_load_bytes_total{engine="0"} 6e9\nvllm:kv_offload_load_time_total{engine="0"} 0.0\n', None),
        (
            (
                'vllm:kv_offload_total_bytes_total{transfer_type="CPU_to_GPU"} 8e9\n'
                'vllm:kv_offload_total_bytes_total{transfer_type="GPU_to_CPU"} 9e9\n'
                'vllm:kv_offload_total_time_total{transfer_type="CPU_to_GPU"} 2.0\n'
                'vllm:kv_offload_total_time_total{transfer_type="GPU_to_CPU"} 9.0\n'
            ),
            4.0,
        ),
        ("", None),
    ],
)
def test_a_servers_copies_out_of_ram_are_a_rate(lines: str, gb_s: float | None) -> None:
    """Bytes by seconds of all loads so far, under both names that vLLM has for them; stores are none."""
    assert measured(PAGE + lines).gb_s.get(Tier.RAM) == gb_s


@pytest.mark.parametrize(("ram", "is_said"), [(2.0, True), (4.0, True), (4.1, False), (None, False)])
def test_a_ram_that_is_no_faster_than_the_disk_is_explained(ram: float | None, is_said: bool) -> None:
    """In a line of the plan; a rate that is not known is compared with nothing."""
    rates = Rates(gb_s={Tier.DISK: 4.0} | ({} if ram is None else {Tier.RAM: ram}), sources={"disk rate": "measured"})
    rates = replace(rates, sources={"disk rate": "measured", "RAM rate": "measured by the server"})
    said = [reason for reason in rates.reasons() if reason.what == "RAM and disk"]
    assert bool(said) == is_said and all("a text on disk takes both" in reason.why for reason in said)
