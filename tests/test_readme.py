"""README and the results page: short, and true to the result files that they cite."""

import json
import re
from pathlib import Path

from benchmarks.demo_chart import CHART, RESULTS, bars, demo_chart

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGE = ROOT / "docs" / "benchmarks.md"

LINK = re.compile(r"\]\(([^)#\s]+)")


def test_readme_is_short() -> None:
    """README has under 900 words: two screens."""
    assert len(README.read_text().split()) < 900


def test_links_lead_to_files() -> None:
    """Every relative link of README and of the pages under docs/ names a file of the repository."""
    pages = [README, *sorted((ROOT / "docs").rglob("*.md"))]
    broken = [
        f"{page.relative_to(ROOT)}: {target}"
        for page in pages
        for target in LINK.findall(page.read_text())
        if "://" not in target and not (page.parent / target).exists()
    ]
    assert not broken


def test_chart_is_drawn_from_the_results() -> None:
    """README's chart is what `make chart` draws from the committed results."""
    assert CHART.read_text() == demo_chart()


def test_table_of_the_demo_agrees_with_its_results() -> None:
    """Each mode's time to first token and speed-up stand on the results page as in the file that it cites."""
    page = PAGE.read_text()
    results = json.loads(RESULTS.read_text())
    for bar in bars(results):
        assert f"{bar.ttft_s:.3f} s" in page
        assert bar.mode == "none" or f"{bar.speed_up:.1f}x" in page


def test_every_result_file_is_cited() -> None:
    """A result that no page cites is either forgotten or not needed."""
    pages = "".join(page.read_text() for page in [PAGE, *(ROOT / "docs").rglob("*.md")])
    files = [path.name for path in (ROOT / "benchmarks" / "results").glob("*.json")]
    assert [name for name in files if name not in pages] == []
