"""Whether a tier compresses: where that makes loads faster, by what was measured."""

import pytest

from hotspan.core.types import MIB
from hotspan.tiers.compressing import Compressing

CHUNK = 8 * MIB
DECODED = 1.5e9
"""Bytes a second."""


def measured(rate: float, *, ratio: float = 1.4, latency_s: float = 0.0, moving: int = 1) -> Compressing:
    """A tier of two lanes whose link carries `rate` bytes a second, of whose chunks eight were loaded."""
    compressing = Compressing("auto", 2)
    for _ in range(8):
        if latency_s:
            compressing.asked(latency_s)
        compressing.crossed(CHUNK, latency_s + moving * CHUNK / rate, moving, is_load=True)
        compressing.encoded(CHUNK, int(CHUNK / ratio) if ratio > 1 else 0)
        compressing.decoded(CHUNK, CHUNK / DECODED)
    return compressing


@pytest.mark.parametrize(("rate", "is_on"), [(5e7, True), (2e8, True), (2e9, False), (1e10, False)])
@pytest.mark.parametrize("moving", [1, 2, 4])
def test_a_slow_link_compresses_and_a_fast_one_does_not(rate: float, is_on: bool, moving: int) -> None:
    """At 200 MB/s and below it does, at 2 GB/s and above it does not; transfers that share a link do not slow it."""
    assert measured(rate, moving=moving).wants() is is_on


def test_the_faster_form_is_chosen() -> None:
    """Wherever the link lies: on if the compressed form loads a tenth faster, off if it is slower."""
    for rate in (1e8 * 1.1**n for n in range(40)):
        compressing = measured(rate)
        plain, compressed = compressing.speeds()
        if compressing.wants():
            assert compressed > 1.1 * plain
        else:
            assert compressed < 1.12 * plain
        assert plain == pytest.approx(rate)


def test_latency_is_not_taken_for_a_slow_link() -> None:
    """Small transfers over a far and fast link are slow for their latency, which compression does not shorten."""
    assert not measured(5e9, latency_s=0.050).wants()
    assert measured(1e8, latency_s=0.050).wants()


def test_nothing_is_compressed_before_the_link_is_known() -> None:
    """The first chunk is stored plain, and shows how fast the link is."""
    compressing = Compressing("auto", 2)
    assert not compressing.wants() and compressing.speeds() == (0.0, 0.0)
    compressing.crossed(CHUNK, CHUNK / 1e8, 1, is_load=False)
    assert compressing.wants()
    for _ in range(3):
        compressing.crossed(CHUNK, CHUNK / 5e9, 1, is_load=True)
    assert not compressing.wants()  # loads count, once there are any


def test_what_does_not_shrink_is_tried_seldom() -> None:
    """Chunks without a ratio are left as they are; one in 32 is tried, so that a change is noticed."""
    compressing = measured(1e8, ratio=1.0)
    assert sum(compressing.wants() for _ in range(320)) == 10
    for _ in range(16):
        compressing.encoded(CHUNK, int(CHUNK / 1.4))
    assert compressing.wants()


def test_the_mode_is_kept_to() -> None:
    """Never and always, whatever was measured."""
    for mode, is_on in (("never", False), ("always", True)):
        compressing = Compressing(mode, 2)  # type: ignore[arg-type]
        for rate in (1e7, 1e10):
            compressing.crossed(CHUNK, CHUNK / rate, 1, is_load=True)
            assert compressing.wants() is is_on
