import re
from dataclasses import replace
from pathlib import Path

import pytest
from fabricated import fabricated_result
from plotly.offline import get_plotlyjs

from hotspan.bench.compare import TIMES, NamedRun, speed_up
from hotspan.bench.records import CacheUse, Quantiles, TimedUse
from hotspan.bench.report import ReportContext, write_report
from hotspan.core.errors import ConfigError


def three_runs() -> list[NamedRun]:
    return [
        NamedRun("none", "no hotspan", (fabricated_result(8.0, {"gpu": 0.06}, answers="cold"),), "serve --no-cache"),
        NamedRun("ram", "RAM <big>", (fabricated_result(1.0, {"gpu": 0.1, "ram": 0.87}),), "serve --ram-gib 2"),
        NamedRun("bound", "bound", (fabricated_result(0.8, {"gpu": 0.97}),), "serve --pool big"),
    ]


def page_of(path: Path, runs: list[NamedRun], context: ReportContext) -> str:
    """The page without the inlined plotly.js."""
    write_report(path, "Long {texts} & more", runs, context)
    text = path.read_text()
    assert text.count(get_plotlyjs()) == 1
    return text.replace(get_plotlyjs(), "")


def test_the_page_loads_nothing(tmp_path: Path) -> None:
    """The page holds plotly.js once and names no address that a browser would load."""
    page = page_of(tmp_path / "r.html", three_runs(), ReportContext(answer_reference="bound"))
    assert not re.search(r"https?://", page)
    assert not re.search(r"<link[^>]+stylesheet|<script[^>]+src|<img|@import|url\(", page)
    assert page.count("Plotly.newPlot(") == 6


def test_the_page_has_a_timeline_by_tier(tmp_path: Path) -> None:
    """Each sample is a bar of its width: tokens per second from each tier, and computed; no samples, no timeline."""
    result = fabricated_result(1.0, {"gpu": 0.1, "ram": 0.5})
    uses = (
        TimedUse(1.0, CacheUse({"gpu": 100.0, "ram": 500.0}, 1000.0)),
        TimedUse(3.0, CacheUse({"gpu": 0.0, "ram": 400.0}, 3000.0)),
    )
    rounds = tuple(replace(each, timeline=uses) if each is result.query else each for each in result.rounds)
    run = NamedRun("ram", "RAM", (replace(result, rounds=rounds),))
    page = page_of(tmp_path / "r.html", [run], ReportContext()).replace(" ", "")
    for name, y in (("engine'sown", "[100.0,0.0]"), ("RAM", "[500.0,200.0]"), ("computed", "[400.0,1300.0]")):
        assert f'"name":"{name}"' in page and f'"y":{y}' in page, name
    assert page.count('"x":[0.5,2.0]') == 3 and page.count('"width":[1.0,2.0]') == 3
    assert "Timelinebytier:RAM" in page
    bare = page_of(tmp_path / "bare.html", [NamedRun("ram", "RAM", (result,))], ReportContext())
    assert "Timeline by tier" not in bare and "Throughput over time" in bare


@pytest.mark.parametrize("figure", ["cpu_s", "elapsed_s", "ttft_s"])
@pytest.mark.parametrize("of", [0, 1, 2])
def test_a_page_is_written_of_figures_that_are_zero(tmp_path: Path, figure: str, of: int) -> None:
    """A figure that is zero, or that a repetition lacks, in any mode leaves out what rests on it, and no page fails."""
    runs = three_runs()
    result = runs[of].results[0]
    zero = {"ttft_s": None}.get(figure, 0.0)
    rounds = tuple(replace(each, summary=replace(each.summary, **{figure: zero})) for each in result.rounds)
    runs = [NamedRun(run.name, run.title, run.results * 2) for run in runs]
    runs[of] = NamedRun(runs[of].name, runs[of].title, (replace(result, rounds=rounds), result))
    context = ReportContext(headline="ram", bound="bound", answer_reference="bound")
    assert "RAM" in page_of(tmp_path / "r.html", runs, context)


def test_the_page_has_the_figures(tmp_path: Path) -> None:
    """Speed-ups, hit rates, CPU-seconds, identical answers, machine and commands are in the page as measured."""
    runs = three_runs()
    context = ReportContext(command="hotspan demo", headline="ram", bound="bound", answer_reference="bound")
    page = page_of(tmp_path / "r.html", runs, context)
    faster = speed_up(runs[1], runs[0])
    assert faster.ttft is not None and faster.total is not None
    figures = (f"{faster.ttft.median:.2f}{TIMES}", f"{faster.total.median:.2f}{TIMES}", "87.0%", "160.0")
    for figure in (*figures, "16 of 16", "0 of 16", "query\n/ bound", f"1.25{TIMES}", f"10.00{TIMES}"):
        assert figure in page, figure
    for text in ("A processor", "hotspan demo", "serve --ram-gib 2", "Long {texts} &amp; more", "RAM &lt;big&gt;"):
        assert text in page, text
    assert "<big>" not in re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)


def test_a_schedule_that_was_not_kept_is_said(tmp_path: Path) -> None:
    """The page of a run with times says what its loop was and how late it was, and has TTFT from due and goodput."""
    result = fabricated_result(1.0, {})
    late = Quantiles(1.5, 1.25, 2.0, 3.125)
    summary = replace(result.query.summary, late_s=late, ttft_from_due_s=late, within_slo=2, elapsed_s=16.0)
    query = replace(result.query, summary=summary)
    paced = replace(result, rounds=(*result.rounds[:2], query))
    page = page_of(tmp_path / "r.html", [NamedRun("run", "run", (paced,))], ReportContext())
    assert "Closed loop" in page and "coordinated omission" in page
    assert "<td>3.125</td>" in page and "<td>0.125</td>" in page and "goodput" in page
    plain = page_of(tmp_path / "r.html", [NamedRun("run", "run", (result,))], ReportContext())
    assert "loop" not in re.sub(r"<script.*?</script>", "", plain, flags=re.DOTALL)


def test_one_run_without_counters_makes_a_page(tmp_path: Path) -> None:
    """A run alone, with no hit rates by tier, makes a page without empty tables."""
    page = page_of(tmp_path / "r.html", [NamedRun("run", "run", (fabricated_result(1.0, {}),))], ReportContext())
    assert "Speed-up" not in page and "Same answers" not in page and "Ratio" not in page


def test_a_name_that_is_no_run_is_refused(tmp_path: Path) -> None:
    """A headline or reference that isn't among the runs, or no run at all, is an error."""
    with pytest.raises(ConfigError, match="no run 'disk'"):
        write_report(tmp_path / "r.html", "t", three_runs(), ReportContext(headline="disk"))
    with pytest.raises(ConfigError, match="at least one"):
        write_report(tmp_path / "r.html", "t", [], ReportContext())


def test_answers_are_those_that_were_asked_one_at_a_time(tmp_path: Path) -> None:
    """With check rounds the page compares those, says why, and has their times in no latency or CPU table."""
    checked = [
        NamedRun("none", "no hotspan", (fabricated_result(8.0, {"gpu": 0.06}, answers="cold"),)),
        NamedRun("ram", "RAM", (fabricated_result(1.0, {"ram": 0.9}, answers="batched", check="alone"),)),
        NamedRun("bound", "bound", (fabricated_result(0.8, {"gpu": 0.9}, check="alone"),)),
    ]
    context = ReportContext(answer_reference="bound", answer_label="as the engine's own hit", answer_note="They < say")
    page = page_of(tmp_path / "r.html", checked, context)
    tables, folded = page.split("Every round in figures")
    assert "16 of 16" in tables and "0 of 16" not in tables and "They &lt; say" in tables
    assert "check" not in re.sub(r"<script.*?</script>", "", tables, flags=re.DOTALL) and "check" in folded


def test_repetitions_are_medians_with_their_range(tmp_path: Path) -> None:
    """A run that was repeated shows medians; the range is what a pointer over one shows."""
    runs = [
        NamedRun("none", "none", tuple(fabricated_result(8.0, {}, warm_up_s=s) for s in (1.0, 2.0, 6.0))),
        NamedRun("ram", "RAM", tuple(fabricated_result(1.0, {}, warm_up_s=s) for s in (2.0, 3.0, 6.0))),
    ]
    page = page_of(tmp_path / "r.html", runs, ReportContext())
    assert '<span title="20.0 to 120.0">40.0</span>' in page
    assert f'<span title="1.00{TIMES} to 2.00{TIMES}">1.50{TIMES}</span>' in page
    assert "Medians of 3 repetitions" in page
    assert page.count("<th>warm-up</th>") == 9 and "<h3>RAM, 3</h3>" in page


def test_a_tier_that_gave_nothing_is_no_tier(tmp_path: Path) -> None:
    """What every engine calls external is shown only where something came from it."""
    for rate, shown in ((0.0, False), (0.4, True)):
        runs = [NamedRun("run", "run", (fabricated_result(1.0, {"gpu": 0.1, "external": rate}),))]
        assert ("outside the engine" in page_of(tmp_path / "r.html", runs, ReportContext())) is shown
