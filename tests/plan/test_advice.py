"""What tiers do for a working set."""

import io
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from hotspan.core.types import GIB, Tier
from hotspan.plan.advice import Advice, advise, print_plan
from hotspan.plan.shape import ModelShape
from hotspan.plan.tiers import DiskChoice, Reason, TierPlan

from . import models

QWEN = ModelShape.from_config(models.QWEN_7B)


def tiers(ram_gib: float, disk_gib: float = 0) -> TierPlan:
    disk = DiskChoice(Path("/kv"), int(disk_gib * GIB)) if disk_gib else None
    return TierPlan(int(ram_gib * GIB), disk, None, None, ())


def by_tier(advice: Advice) -> dict[Tier, float]:
    return {held.tier: held.hit_rate for held in advice.holdings}


def test_texts_of_whole_chunks_fill_the_tiers() -> None:
    """A text of 10,240 tokens at 56 KiB is 560 MiB: 8 GiB hold 14 of them, and 32 GiB 58."""
    advice = advise(tiers(8, 32), QWEN, users=100, tokens=10_240)
    assert advice.text_bytes == 560 << 20
    assert [held.texts for held in advice.holdings] == [14, 58]
    assert advice.holdings[0].tokens == 8 * GIB // (14 << 20) * 256
    rates = by_tier(advice)
    assert rates[Tier.RAM] == pytest.approx(8 / 54.7, rel=0.01)
    assert rates[Tier.DISK] == pytest.approx(24 / 54.7, rel=0.01)
    assert advice.hit_rate == pytest.approx(32 / 54.7, rel=0.01)


def test_ranks_that_hold_the_same_share_a_tiers_copy() -> None:
    """Eight ranks' pools hold eight copies of a latent, RAM and disk one; from RAM each rank loads its own."""
    shape = ModelShape.from_config(models.DEEPSEEK_V3, tensor_parallel=8)
    rates = {Tier.RAM: 100.0, Tier.DISK: 10.0}
    advice = advise(tiers(8, 80), shape, users=100, tokens=10_240, gb_s=rates, pool_bytes=64 * GIB)
    tokens = {held.tier: held.tokens for held in advice.holdings}
    assert tokens[Tier.GPU] == tokens[Tier.RAM] == 8 * GIB // shape.chunk_bytes * shape.chunk_tokens
    times = {held.tier: held.load_s for held in advice.holdings}
    assert times[Tier.DISK] == pytest.approx(10_240 * 70_272 / 10e9)
    assert times[Tier.RAM] == pytest.approx(8 * 10_240 * 70_272 / 100e9)


def test_what_fits_is_all_found() -> None:
    """A working set that RAM holds is a hit every time, and the disk adds nothing."""
    assert by_tier(advise(tiers(100, 200), QWEN, users=10, tokens=2560)) == {Tier.RAM: 1.0, Tier.DISK: 0.0}


def test_a_text_shorter_than_a_chunk_is_never_found() -> None:
    """Nothing is kept of 100 tokens, so nothing is promised."""
    advice = advise(tiers(8), QWEN, users=10, tokens=100)
    assert (advice.hit_rate, advice.holdings[0].texts) == (0.0, 0)


def test_times_follow_from_the_rates_that_are_known() -> None:
    """Loading is bytes over GB/s, computing tokens over their rate; without a rate no time is said."""
    advice = advise(tiers(8, 32), QWEN, users=10, tokens=10_000, gb_s={Tier.DISK: 3.0}, prefill_tokens_per_s=5000)
    assert [held.load_s for held in advice.holdings] == [None, pytest.approx(10_000 * 57344 / 3e9)]
    assert advice.compute_s == 2.0
    assert advise(tiers(8), QWEN, users=10, tokens=10_000).compute_s is None


def test_the_table_prints_brackets_and_its_title() -> None:
    """It goes to the console that is given, and an IPv6 address is not taken for markup."""
    console = Console(file=io.StringIO(), width=120)
    reason = Reason("L2", "sagemaker-hyperpod://[fe80::1]:9200", "no answer from [fe80::1]:9200")
    print_plan(TierPlan(0, None, None, None, (reason,)), console, "Tiers on [a] machine")
    assert isinstance(console.file, io.StringIO)
    for text in (reason.value, reason.why, "Tiers on [a] machine"):
        assert text in console.file.getvalue()


def test_without_tiers_everything_is_computed() -> None:
    """No RAM tier, no holdings, no hits."""
    advice = advise(tiers(0), QWEN, users=10, tokens=10_000)
    assert (advice.holdings, advice.hit_rate) == ((), 0.0)


@settings(deadline=None)
@given(st.floats(0, 500), st.floats(0, 500), st.integers(1, 10_000), st.integers(1, 200_000))
def test_hits_are_a_share_and_grow_with_the_tiers(ram: float, disk: float, users: int, tokens: int) -> None:
    """Whatever the tiers are, hits are between none and all, and more room is never fewer."""
    advice = advise(tiers(ram, disk), QWEN, users=users, tokens=tokens)
    assert all(held.hit_rate >= 0 for held in advice.holdings)
    assert 0 <= advice.hit_rate <= 1 + 1e-9
    assert advise(tiers(ram + 1, disk + 1), QWEN, users=users, tokens=tokens).hit_rate >= advice.hit_rate - 1e-9
