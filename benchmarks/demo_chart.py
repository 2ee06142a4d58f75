"""The README's chart, drawn from the results of the demo: `make chart`."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "long-doc-qa.json"
CHART = ROOT / "docs" / "images" / "demo.svg"

_LABELS = {
    "none": "vLLM alone",
    "ram": "hotspan, RAM",
    "disk": "hotspan, disk",
    "restart": "hotspan, disk after a restart",
    "bound": "lower bound: vLLM, all documents fit",
}
_WIDTH, _ROW, _LEFT, _BAR, _TOP = 760, 34, 300, 330, 46


class Bar(NamedTuple):
    """One mode of the demo. ttft_s: median time to first token of the query round, in seconds."""

    mode: str
    ttft_s: float
    speed_up: float


def bars(results: dict[str, object]) -> list[Bar]:
    """The demo's modes, in the order of `results` (benchmarks/results/long-doc-qa.json).

    Raises: KeyError for a file of another format.
    """
    modes = results["modes"]
    assert isinstance(modes, list)
    return [
        Bar(mode["name"], mode["rounds"]["query"]["ttft_s"]["mean"]["median"], mode["speed_up"]["ttft"]["median"])
        for mode in modes
    ]


def chart(bars: Sequence[Bar], caption: str) -> str:
    """An SVG with one horizontal bar for each mode, on a white background so that it reads in a dark theme."""
    longest = max(bar.ttft_s for bar in bars)
    height = _TOP + _ROW * len(bars) + 30
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}">',
        "<style>text { font: 14px sans-serif }</style>",
        f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>',
        '<text x="16" y="26" style="font: bold 16px sans-serif">Mean time to first token, repeated documents</text>',
    ]
    for number, bar in enumerate(bars):
        y = _TOP + _ROW * number
        colour = {"none": "#9aa5b1", "bound": "#d5dbe1"}.get(bar.mode, "#2f6fb5")
        said = f"{bar.ttft_s:.3f} s" + ("" if bar.mode == "none" else f" ({bar.speed_up:.1f}x faster)")
        width = max(1.0, _BAR * bar.ttft_s / longest)
        lines += [
            f'<text x="{_LEFT - 10}" y="{y + 19}" text-anchor="end">{escape(_LABELS[bar.mode])}</text>',
            f'<rect x="{_LEFT}" y="{y + 4}" width="{width:.1f}" height="22" fill="{colour}"/>',
            f'<text x="{_LEFT + width + 8:.1f}" y="{y + 19}">{said}</text>',
        ]
    lines.append(f'<text x="16" y="{height - 10}" style="font-size: 11px" fill="#52606d">{escape(caption)}</text>')
    return "\n".join([*lines, "</svg>", ""])


def demo_chart() -> str:
    """The chart of the committed results."""
    results = json.loads(RESULTS.read_text())
    sizes = results["sizes"]
    caption = (
        f"{sizes['documents']} documents of {sizes['document_tokens']:,} tokens, {sizes['in_flight']} requests in "
        f"flight, {results['machine']['CPU']}, {results['threads']} threads, commit {results['commit'].rstrip('+')}"
    )
    return chart(bars(results), caption)


if __name__ == "__main__":
    CHART.parent.mkdir(exist_ok=True)
    CHART.write_text(demo_chart())
    sys.stdout.write(f"{CHART.relative_to(ROOT)}\n")
