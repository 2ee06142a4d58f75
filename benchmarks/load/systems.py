"""The systems under load: hotspan with its tiers in three ways, its peers, and the engine alone."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from benchmarks.peers.systems import HOTSPAN, SYSTEMS, System

TIERS: Final = ("disk", "file", "redis", "daemon", "s3")
ALWAYS: Final = ("benchmarks.load.always", "serve")
NAMES: Final = ("hotspan", "hotspan-always", "hotspan-never", "vllm-fs", "lmcache-disk", "none")
"""What is compared by default."""


def systems(tier: str) -> Mapping[str, System]:
    """All systems by name; `tier` is the lower tier of hotspan's."""
    below = replace(SYSTEMS[f"hotspan-{tier}"], title=f"hotspan, RAM and {tier}")
    ours = {
        "hotspan": below,
        "hotspan-always": replace(below, title=f"{below.title}, loads all that is there", program=ALWAYS),
        "hotspan-never": System(
            title="hotspan, RAM alone",
            program=HOTSPAN,
            arguments=lambda place: ("--ram-gib", str(place.sizes.in_flight)),
        ),
    }
    return {**SYSTEMS, **ours, "none": replace(SYSTEMS["none"], title="vLLM alone")}


def is_ours(name: str) -> bool:
    return name.startswith("hotspan")
