"""The figures of docs/blending.md are those of the result file that it names."""

import json
import re
from pathlib import Path
from statistics import mean
from typing import Any

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "blending.md").read_text()
SUMMARY = json.loads((ROOT / "benchmarks" / "results" / "blend-quality.json").read_text())["summary"]
NAMES = {"full prefill": "full", "nothing computed again": "naive", "`first_k`, 16 tokens": "first_k 16"}


def figures(length: str, way: str) -> tuple[float, float, float]:
    """Right answers about facts, about the order, and how many times sooner the first token comes."""
    quality: dict[str, Any] = SUMMARY["quality"][length][way]
    facts, order = (mean(quality[f"{kind}: is right"] for kind in kinds) for kinds in (("one", "two"), ("nth", "last")))
    return facts, order, SUMMARY["speed"][length][way]["full's TTFT over it"]


def test_each_mode_has_its_figures() -> None:
    """Right answers and speed stand in one row, and no row is of another measurement."""
    rows = re.findall(r"^\| (.+?) \| (\d+) % \| (\d+) % \| ([\d.]+) \|$", PAGE, re.MULTILINE)
    assert len(rows) == 8
    for said, facts, order, sooner in rows:
        way = NAMES.get(said) or re.sub(r"`(\w+)`, (\d+) %", r"\1 \2%", said)
        found = figures("5 x 1600", way)
        assert (int(facts), int(order)) == (round(100 * found[0]), round(100 * found[1])), said
        assert float(sooner) in (round(found[2], 1), round(found[2])), said


def test_what_is_recommended_loses_nothing() -> None:
    """The mode that is recommended for facts answers as often right as a full prefill, and is 1.8 times as fast."""
    sooner = re.search(r"\| `--blend first_k` \| the same: 100 % and 100 % \| ([\d.]+), ([\d.]+) \|", PAGE)
    assert sooner is not None
    for length, said in zip(("5 x 1600", "5 x 400"), sooner.groups(), strict=True):
        facts, _, times = figures(length, "first_k 16")
        assert facts == figures(length, "full")[0] == 1.0 and times >= 1.8 and round(times, 1) == float(said)


def test_no_mode_is_recommended_for_what_depends_on_the_order() -> None:
    """Of all measured, none loses at most a point and is 1.8 times as fast; the page says what the best one does."""
    for length, ways in SUMMARY["quality"].items():
        full = figures(length, "full")[1]
        assert not [way for way in ways if full - figures(length, way)[1] <= 0.01 and figures(length, way)[2] >= 1.8]
    loss = figures("5 x 400", "full")[1] - figures("5 x 400", "query 50%")[1]
    assert f"at 2,000 it loses {round(100 * loss)} points" in PAGE
