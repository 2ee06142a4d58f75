"""Figures out of pages of metrics: sums and largest ones by tier, and no line that spoils others."""

from hotspan.core import metrics_page
from hotspan.core.metrics_page import POOL, figures, samples

PAGE = f"""# TYPE load gauge
load{{engine="0",tier="ram"}} 2.0
load{{engine="1",tier="ram"}} 3.0
load 1.2.3
load{{tier="disk"}} NaN
load{{tier="l2"}} -1
load{{tier=
other 7
{POOL}{{kv_cache_size_tokens="400"}} 1.0
{POOL}{{kv_cache_size_tokens="None"}} 1.0
"""


def test_figures_are_sums_and_largest_of_what_can_be() -> None:
    """Broken lines, and figures that are not above 0 or not finite, are left out; the pool's size is a label."""
    assert figures(PAGE, ("load", POOL)) == (
        {("load", "ram"): 5.0, (POOL, ""): 400.0},
        {("load", "ram"): 3.0, (POOL, ""): 400.0},
    )


def test_only_what_is_asked_for_is_read() -> None:
    """Samples of other names are not among them."""
    assert [sample.value for sample in samples(PAGE, ("other",))] == [7.0]


def test_no_page_takes_long() -> None:
    """A line that is too long is not parsed, and of too many only the first ones are."""
    labels = ",".join(f'label_{number}="x"' for number in range(1000))
    assert len(labels) > metrics_page._MAX_LINE
    assert [sample.value for sample in samples(f"load{{{labels}}} 1\nload 2\n", ("load",))] == [2.0]
    most = metrics_page._MAX_TEXT // len("load 1")
    assert len(list(samples((most + 5) * "load 1\n", ("load",)))) == most
