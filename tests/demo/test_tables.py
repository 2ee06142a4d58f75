from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table

from hotspan.bench.compare import NamedRun
from hotspan.bench.records import BenchResult, CacheUse, RequestRecord, RoundName, RoundResult
from hotspan.bench.report import ReportContext, comparison_tables
from hotspan.bench.summary import summarize
from hotspan.demo.model import DemoModel
from hotspan.demo.plan import MODE_NAMES, DemoRequest, DemoSizes, plan_modes
from hotspan.demo.results import DemoResult

CHECK_S = 55.5


def played(name: RoundName, ttft_s: float, cpu_s: float, hits: dict[str, float]) -> RoundResult:
    """A round of 12 requests of 8,000 tokens."""
    records = tuple(
        RequestRecord(f"doc{i}", i, True, float(i), i + ttft_s, i + ttft_s + 1.0, 8000, 16, answer=f"{i}")
        for i in range(12)
    )
    use = CacheUse({tier: rate * 96_000 for tier, rate in hits.items()})
    return RoundResult(name, summarize(records, 12 * ttft_s, cpu_s, use), records)


def result(mode: str, slow: float) -> BenchResult:
    """One repetition on a machine that is `slow` times as slow as it could be."""
    ttft, cpu = {"none": (30.0, 480.0), "bound": (1.0, 10.0)}.get(mode, (2.0, 12.5))
    hits = {"gpu": 0.25, "external": 0.0} | ({} if mode in ("none", "bound") else {"ram": 0.005, "disk": 0.742})
    rounds = (
        played(RoundName.PRE_WARM_UP, 0.3 * slow, 1.0 * slow, {}),
        played(RoundName.WARM_UP, 20.0 * slow, (300.0 if mode == "none" else 330.0) * slow, {}),
        played(RoundName.QUERY, ttft * slow, cpu * slow, hits),
        played(RoundName.CHECK, CHECK_S, 1.0, hits),
    )
    names = next(m.rounds for m in plan_modes(DemoSizes(), 10_240, Path("kv")) if m.name == mode)
    return BenchResult({}, tuple(r for r in rounds if r.name in names))


@pytest.fixture
def demo() -> DemoResult:
    """All modes, nine times, on a machine whose speed varies from one repetition to the next."""
    modes = plan_modes(DemoSizes(), 10_240, Path("kv"))
    speeds = (1.0, 1.5, 9.0, 2.0, 1.1, 1.2, 1.3, 1.6, 1.7)
    runs = [NamedRun(m.name, m.title, tuple(result(m.name, slow) for slow in speeds), note=m.note) for m in modes]
    model = DemoModel(Path("m"), "demo", 1, 10_240, 1, 1, 1)
    return DemoResult(request=DemoRequest(repetitions=9), model=model, runs=runs, serve={})


def lines(table: Table, width: int = 80) -> list[str]:
    console = Console(record=True, width=width, quiet=False)
    console.print(table)
    return console.export_text().splitlines()


def tables(demo: DemoResult) -> list[Table]:
    """What the demo prints: first token, total latency, CPU time, cache and answers."""
    bound = demo.bound.name if demo.bound else ""
    context = ReportContext(bound=bound, answer_reference=bound, answer_label="as the engine's own hit")
    return [table.terminal() for table in comparison_tables(demo.runs, context)]


def rows(table: Table) -> dict[str, list[str]]:
    """Words after the mode, by mode."""
    found = [line.split("  ", 1) for line in lines(table) if "  " in line.strip()]
    return {mode.strip(): rest.split() for mode, rest in found}


def test_tables_fit_into_80_columns(demo: DemoResult) -> None:
    """At 80 columns no word is cut and no line is folded: the tables are those of a wide terminal."""
    for table in tables(demo):
        narrow, wide = ([line.rstrip() for line in lines(table, width)] for width in (80, 200))
        assert narrow == wide
        assert "\N{HORIZONTAL ELLIPSIS}" not in "".join(narrow)
        assert "disk (restarted)" in "\n".join(narrow)


def test_the_tables_have_the_medians_and_ratios(demo: DemoResult) -> None:
    """Medians over the repetitions, ratios within one; the check round's times and unused tiers are in no table."""
    ttft, total, cpu, cache = (rows(table) for table in tables(demo))
    assert ttft["RAM"] == ["0.450", "30.000", "3.000", "15.00\u00d7"]
    assert total["RAM"] == ["5.40", "360.00", "36.00", "15.00\u00d7"]
    assert cpu["RAM"] == ["1.5", "495.0", "18.8", "1.10\u00d7", "1.25\u00d7"]
    assert cache["RAM"] == ["25.0%", "0.5%", "74.2%", "108", "of", "108"]
    assert ttft["disk (restarted)"][:2] == ["0.450", "-"] and cpu["disk (restarted)"][-2] == "-"
    assert cache["no hotspan"][-1] == "-" and cache["bound"][-1] == "itself"
    shown = "\n".join(line for table in tables(demo) for line in lines(table))
    assert "outside the engine" not in shown and "55.5" not in shown


def test_modes_that_were_not_run_leave_their_columns_out(demo: DemoResult) -> None:
    """Without the bound there is nothing to compare answers with, and CPU time is compared with the first mode."""
    without = replace(demo, runs=[run for run in demo.runs if run.name != "bound"])
    shown = "\n".join(line for table in tables(without) for line in lines(table))
    assert "bound" not in shown and "answers" not in shown and "1.10\u00d7" in shown
    assert tuple(run.name for run in without.runs) == MODE_NAMES[:-1]
