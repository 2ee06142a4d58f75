import re
from pathlib import Path

import pytest
from fabricated import fabricated_result
from plotly.offline import get_plotlyjs

from hotspan.bench.compare import TIMES, AnswerMatch, match_answers, speed_up
from hotspan.bench.report import NamedRun, ReportContext, write_report
from hotspan.core.errors import ConfigError


def three_runs() -> list[NamedRun]:
    return [
        NamedRun("none", "no hotspan", fabricated_result(8.0, {"gpu": 0.06}, answers="cold"), "serve --no-cache"),
        NamedRun("ram", "RAM <big>", fabricated_result(1.0, {"gpu": 0.1, "ram": 0.87}), "serve --ram-gib 2"),
        NamedRun("bound", "bound", fabricated_result(0.8, {"gpu": 0.97}), "serve --pool big"),
    ]


def page_of(path: Path, runs: list[NamedRun], context: ReportContext) -> str:
    """The page without the inlined plotly.js."""
    write_report(path, "Long {texts} & more", runs, context)
    text = path.read_text()
    assert text.count(get_plotlyjs()) == 1
    return text.replace(get_plotlyjs(), "")


def test_the_page_loads_nothing(tmp_path: Path) -> None:
    """The page holds plotly.js once and names no address that a browser would load."""
    page = page_of(tmp_path / "r.html", three_runs(), ReportContext(answer_references=("bound", "none")))
    assert not re.search(r"https?://", page)
    assert not re.search(r"<link[^>]+stylesheet|<script[^>]+src|<img|@import|url\(", page)
    assert page.count("Plotly.newPlot(") == 4


def test_the_page_has_the_figures(tmp_path: Path) -> None:
    """Speed-ups, hit rates, CPU-seconds, identical answers, machine and commands are in the page as measured."""
    runs = three_runs()
    context = ReportContext(command="hotspan demo", headline="ram", answer_references=("bound", "none"))
    page = page_of(tmp_path / "r.html", runs, context)
    faster = speed_up(runs[1].result, runs[0].result)
    assert faster.ttft is not None and faster.total is not None
    for figure in (f"{faster.ttft:.2f}{TIMES}", f"{faster.total:.2f}{TIMES}", "87.0%", "16 of 16", "0 of 16", "160.0"):
        assert figure in page, figure
    for text in ("A processor", "hotspan demo", "serve --ram-gib 2", "Long {texts} &amp; more", "RAM &lt;big&gt;"):
        assert text in page, text
    assert "<big>" not in re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)


def test_one_run_without_counters_makes_a_page(tmp_path: Path) -> None:
    """A run alone, with no hit rates by tier, makes a page without empty tables."""
    page = page_of(tmp_path / "r.html", [NamedRun("run", "run", fabricated_result(1.0, {}))], ReportContext())
    assert "Speed-up" not in page and "Same answers" not in page


def test_a_name_that_is_no_run_is_refused(tmp_path: Path) -> None:
    """A headline or reference that isn't among the runs, or no run at all, is an error."""
    with pytest.raises(ConfigError, match="no run 'disk'"):
        write_report(tmp_path / "r.html", "t", three_runs(), ReportContext(headline="disk"))
    with pytest.raises(ConfigError, match="at least one"):
        write_report(tmp_path / "r.html", "t", [], ReportContext())


def test_answers_match_by_request() -> None:
    """Answers are compared request by request, and only those that both runs answered."""
    cold, ram, bound = (run.result for run in three_runs())
    assert match_answers(ram, bound) == AnswerMatch(16, 16)
    assert match_answers(ram, cold) == AnswerMatch(0, 16)
    assert str(AnswerMatch(0, 0)) == "-" and not AnswerMatch(0, 0).all_same
