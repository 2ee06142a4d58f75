"""Figures of servers, from their pages of metrics in Prometheus' text format."""

import math
import re
from collections.abc import Iterator
from typing import Final

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

LOOKUPS: Final = "hotspan_cache_lookup_tokens_total"
HITS: Final = "hotspan_cache_hit_tokens_total"
CAPACITY: Final = "hotspan_cache_capacity_bytes"
TOKEN_BYTES: Final = "hotspan_cache_token_bytes"
POOL_HITS: Final = "vllm:prefix_cache_hits_total"
POOL: Final = "vllm:cache_config_info"
"""vLLM's: the size of its pool in tokens is a label of it."""

Figures = dict[tuple[str, str], float]
"""By the name of the metric, and the label `tier` or ""."""

_MAX_LINE, _MAX_TEXT = 4096, 256 * 1024
"""Characters of a line, and of all lines that are parsed of a page. The time for a line grows with the square of its
labels. vLLM's longest line has about 1,500, and the samples of one engine core about 4,000 together."""


def samples(page: str, names: tuple[str, ...]) -> Iterator[Sample]:
    """The samples whose names begin with one of these. A page has hundreds of lines: no others are parsed.

    Lines that are none are left out, and so is what no server writes: lines that are too long, and what follows once
    many were parsed. Whoever wrote the page can't make this slow.
    """
    left = _MAX_TEXT
    for match in re.finditer(rf"^(?:{'|'.join(map(re.escape, names))}).*", page, re.MULTILINE):
        line = match[0]
        if len(line) > _MAX_LINE:
            continue
        if (left := left - len(line)) < 0:
            return
        try:
            found = [sample for family in text_string_to_metric_families(line + "\n") for sample in family.samples]
        except (ValueError, LookupError):
            continue
        yield from found


def figures(page: str, names: tuple[str, ...]) -> tuple[Figures, Figures]:
    """Finite figures above 0: their sums over all engines, and the largest ones."""
    sums: Figures = {}
    largest: Figures = {}
    for sample in samples(page, names):
        value = _tokens(sample) if sample.name == POOL else sample.value
        if math.isfinite(value) and value > 0:
            at = (sample.name, sample.labels.get("tier", ""))
            sums[at] = sums.get(at, 0.0) + value
            largest[at] = max(largest.get(at, 0.0), value)
    return sums, largest


def _tokens(sample: Sample) -> float:
    said = sample.labels.get("kv_cache_size_tokens", "")
    return float(said) if said.isdecimal() and len(said) <= 15 else 0.0
