"""The figures of docs/blending.md are those of the result files that it names."""

import json
import re
from pathlib import Path
from statistics import mean
from typing import Any

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "blending.md").read_text()
RESULTS = ROOT / "benchmarks" / "results"
SUMMARY = json.loads((RESULTS / "blend-quality.json").read_text())["summary"]
LONG, SHORT = "5 x 1600", "5 x 400"
NAMES = {"full prefill": "full", "nothing computed again": "naive", "`first_k`, 16 tokens": "first_k 16"}
RECOMMENDED = {
    "`--blend first_k`": ("first_k 16", 0),
    "`--blend deviation --blend-recompute-ratio 0.05`": ("deviation 5%, layer 2", 1),
}
"""By what the page recommends: its name in the results, and whether for facts, 0, or for what depends on the order."""


def figures(length: str, way: str) -> tuple[float, float, float]:
    """Right answers about facts, about the order, and how many times sooner the first token comes."""
    quality: dict[str, Any] = SUMMARY["quality"][length][way]
    facts, order = (mean(quality[f"{kind}: is right"] for kind in kinds) for kinds in (("one", "two"), ("nth", "last")))
    return facts, order, SUMMARY["speed"][length][way]["full's TTFT over it"]


def test_each_mode_has_its_figures() -> None:
    """Right answers and speed stand in one row, and no row is of another measurement."""
    cell = r"([\d.]+)(?: %)?"
    rows = re.findall(rf"^\| (.+?) \| {cell} \| {cell} \| {cell} \| {cell} \| {cell} \| {cell} \|$", PAGE, re.MULTILINE)
    assert len(rows) == len(SUMMARY["quality"][SHORT])
    for said, *given in rows:
        way = NAMES.get(said) or re.sub(r"`(\w+)`, (\d+) %", r"\1 \2%", said)
        for length, (facts, order, sooner) in ((SHORT, given[:3]), (LONG, given[3:])):
            found = figures(length, way)
            assert (int(facts), int(order)) == (round(100 * found[0]), round(100 * found[1])), said
            assert float(sooner) == round(found[2], 1), said


def test_what_is_recommended_loses_nothing() -> None:
    """Each recommendation answers its kind of question as often right as a full prefill at both lengths, and is at
    least 1.8 times as fast at 8,000 tokens; quality and speed are on the page beside each other.
    """
    for said, (way, kind) in RECOMMENDED.items():
        pattern = rf"\| {re.escape(said)} \| the same: (\d+) % and (\d+) % \| ([\d.]+), ([\d.]+) \|"
        row = re.search(pattern, PAGE)
        assert row is not None, said
        for place, length in enumerate((LONG, SHORT)):
            found, full = figures(length, way), figures(length, "full")
            assert full[kind] - found[kind] <= 0.01 and int(row[1 + place]) == round(100 * found[kind])
            assert float(row[3 + place]) == round(found[2], 1)
        assert figures(LONG, way)[2] >= 1.8


def test_the_workloads_have_their_figures() -> None:
    """How much is reused, and how many times sooner the first token comes, at least 1.8 times."""
    text = " ".join(PAGE.split())
    for name, times in (("blend-permutator", r"3\.8 s: ([\d.]+) times sooner"), ("blend-rag", r"comes ([\d.]+) times")):
        summary = json.loads((RESULTS / f"{name}.json").read_text())["summary"]
        sooner = summary["off"]["TTFT p50, ms"] / summary["first_k"]["TTFT p50, ms"]
        said = re.search(times, text)
        assert said is not None and float(said[1]) == round(sooner, 1) >= 1.8
        for part in ("taken from windows", "prefix caches"):
            assert f"{summary['first_k'][part]:.0%}".replace("%", " %") in text
