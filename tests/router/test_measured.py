"""What replicas measured themselves reaches the fleet."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotspan.router.measured import rate_of

from .rig import replicas, routed, say_ok

NAME = b"hotspan_cost_prefill_tokens_per_second"


@pytest.mark.parametrize(
    ("page", "rate"),
    [
        (b"", None),
        (b"# TYPE x gauge\nhotspan_cost_prefill_tokens_per_second 1500.5\nother 1\n", 1500.5),
        (b'%b{engine="0"} 1e3\n%b{engine="1"} 2e3' % (NAME, NAME), 3e3),
        (b"hotspan_cost_prefill_tokens_per_second 0.0\n", None),
        (b"xhotspan_cost_prefill_tokens_per_second 5\n", None),
        (b"hotspan_cost_prefill_tokens_per_second 1.2.3\n", None),
    ],
)
def test_the_rate_is_found(page: bytes, rate: float | None) -> None:
    """The gauge of all engines adds up; a page without one, or with 0 (not measured yet), tells nothing."""
    assert rate_of(page) == rate


@given(st.binary(max_size=200))
def test_no_page_is_an_error(page: bytes) -> None:
    """Whatever a replica answers, the rate is one or there is none."""
    rate = rate_of(b"hotspan_cost_prefill_tokens_per_second " + page)
    assert rate is None or rate > 0


async def test_replicas_are_asked() -> None:
    """A replica that says 12,345 tokens/s is taken at its word; one that says nothing keeps the guess."""
    async with replicas(say_ok, say_ok) as (one, two):
        one.metrics = "hotspan_cost_prefill_tokens_per_second 12345\n"
        async with routed([one, two]) as at:
            async with asyncio.timeout(5):
                while await at.metric("replica_tokens_per_second", replica=one.url) != 12345:
                    await asyncio.sleep(0.01)
            assert await at.metric("replica_tokens_per_second", replica=two.url) == 8000
            assert (one.works, two.works) == (0, 0)
