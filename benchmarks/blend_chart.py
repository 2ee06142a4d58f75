"""The frontier of blending, quality against speed, drawn from benchmarks/results/blend-quality.json.

usage: python -m benchmarks.blend_chart   (`make blend-quality` does it)
"""

import json
import math
import sys
from pathlib import Path
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "blend-quality.json"
CHART = ROOT / "docs" / "images" / "blend-frontier.svg"

_PANELS = {
    "one": "one fact",
    "two": "two facts of two documents",
    "nth": "by the document's number",
    "last": "the last of several",
}
_COLOURS = {"full": "#111111", "naive": "#c0392b", "first_k": "#e08e0b", "deviation": "#2f6fb5", "query": "#1b8a5a"}
_TITLE = "Right answers of the recall model, over the gain in time to first token against a full prefill"
_SLOWEST = 0.8
_WIDTH, _HEIGHT, _LEFT, _TOP, _GAP = 330, 200, 56, 84, 66


class Point(NamedTuple):
    """A way: how often it answers right, how many times as fast as a full prefill it is, what it computes again."""

    way: str
    right: float
    speed_up: float

    @property
    def mode(self) -> str:
        return self.way.split()[0]

    @property
    def label(self) -> str:
        return self.way.partition(",")[0].split()[-1] if self.mode in ("deviation", "query") else ""

    @property
    def is_shallow(self) -> bool:
        """Whether its check layer is 1."""
        return self.way.endswith("layer 1")


def points(summary: dict[str, Any], length: str, kind: str) -> list[Point]:
    """Of all ways that were blended, on contexts of that length."""
    quality, speed = summary["quality"][length], summary["speed"][length]
    found = []
    for way, figures in quality.items():
        right = figures.get(f"{kind}: is right")
        if right is not None and way in speed:
            found.append(Point(way, right, speed[way]["full's TTFT over it"]))
    return found


def panel(title: str, found: list[Point], x: float, y: float, fastest: float) -> list[str]:
    """One kind of question: lines through the shares of a mode, dashed for check layer 1. Speed is logarithmic."""

    def across(times: float) -> float:
        return x + _WIDTH * math.log(times / _SLOWEST) / math.log(fastest / _SLOWEST)

    def at(point: Point) -> tuple[float, float]:
        return across(point.speed_up), y + _HEIGHT * (1 - point.right)

    lines = [
        f'<text x="{x}" y="{y - 10}" style="font-weight: bold">{escape(title)}</text>',
        f'<rect x="{x}" y="{y}" width="{_WIDTH}" height="{_HEIGHT}" fill="none" stroke="#9aa5b1"/>',
    ]
    for share in (0.0, 0.5, 1.0):
        lines.append(
            f'<text x="{x - 6}" y="{y + _HEIGHT * (1 - share) + 4}" text-anchor="end" fill="#52606d">{share:.0%}</text>'
        )
    for times in (1, 1.5, 2, 3, 5, 7, 10):
        if times > fastest:
            break
        place = across(times)
        lines.append(f'<line x1="{place}" y1="{y}" x2="{place}" y2="{y + _HEIGHT}" stroke="#e4e7eb"/>')
        lines.append(f'<text x="{place}" y="{y + _HEIGHT + 15}" text-anchor="middle" fill="#52606d">{times:g}x</text>')
    for mode, colour in _COLOURS.items():
        for is_shallow in (False, True):
            own = [point for point in found if (point.mode, point.is_shallow) == (mode, is_shallow)]
            own.sort(key=lambda point: point.speed_up)
            path = " ".join(f"{px:.1f},{py:.1f}" for px, py in map(at, own))
            if len(own) > 1:
                dashes = ' stroke-dasharray="4 3"' if is_shallow else ""
                lines.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"{dashes}/>')
            for point in own:
                px, py = at(point)
                fill = "#ffffff" if is_shallow else colour
                lines.append(f'<circle cx="{px:.1f}" cy="{py:.1f}" r="4" fill="{fill}" stroke="{colour}"/>')
                lines.append(f'<text x="{px + 6:.1f}" y="{py + 13:.1f}" fill="{colour}">{escape(point.label)}</text>')
    return lines


def chart(results: dict[str, Any]) -> str:
    """An SVG: a row for each length of the contexts, a panel for each kind of question."""
    summary = results["summary"]
    lengths = list(summary["quality"])
    width = _LEFT + len(_PANELS) * (_WIDTH + _GAP)
    height = _TOP + len(lengths) * (_HEIGHT + _GAP) + 20
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}">',
        "<style>text { font: 12px sans-serif }</style>",
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="16" y="26" style="font: bold 16px sans-serif">{_TITLE}</text>',
    ]
    for number, (mode, colour) in enumerate(_COLOURS.items()):
        lines.append(f'<circle cx="{22 + 130 * number}" cy="46" r="5" fill="{colour}"/>')
        said = {"full": "full prefill", "naive": "naive reuse"}.get(mode, mode)
        lines.append(f'<text x="{32 + 130 * number}" y="50">{said}</text>')
    for row, length in enumerate(lengths):
        fastest = 1.15 * max(each["full's TTFT over it"] for each in summary["speed"][length].values())
        for column, (kind, title) in enumerate(_PANELS.items()):
            x, y = _LEFT + column * (_WIDTH + _GAP), _TOP + row * (_HEIGHT + _GAP)
            lines += panel(f"{title}, {length} tokens", points(summary, length, kind), x, y, fastest)
    machine = results["machine"]
    commit = machine.get("Commit", "unknown").rstrip("+")
    caption = f"{machine['CPU']}, commit {commit}; speed: the demo's model; dashed: check layer 1, else 2"
    lines.append(f'<text x="16" y="{height - 8}" style="font-size: 11px" fill="#52606d">{escape(caption)}</text>')
    return "\n".join([*lines, "</svg>", ""])


if __name__ == "__main__":
    CHART.parent.mkdir(exist_ok=True)
    CHART.write_text(chart(json.loads(RESULTS.read_text())))
    sys.stdout.write(f"{CHART.relative_to(ROOT)}\n")
