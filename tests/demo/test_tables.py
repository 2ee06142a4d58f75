from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table

from hotspan.bench.compare import NamedRun
from hotspan.bench.records import BenchResult, CacheUse, RequestRecord, RoundName, RoundResult
from hotspan.bench.summary import summarize
from hotspan.demo.model import DemoModel
from hotspan.demo.plan import MODE_NAMES, DemoSizes, plan_modes
from hotspan.demo.results import DemoResult
from hotspan.demo.tables import cache_table, earlier_rounds_table, latency_table

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
    return DemoResult(
        command="hotspan demo",
        sizes=DemoSizes(),
        threads=2,
        dtype="bfloat16",
        repetitions=9,
        model=model,
        runs=runs,
        serve={},
    )


def lines(table: Table, width: int = 80) -> list[str]:
    console = Console(record=True, width=width, quiet=False)
    console.print(table)
    return console.export_text().splitlines()


def test_tables_fit_into_80_columns(demo: DemoResult) -> None:
    """At 80 columns no word is cut and no line is folded: the tables are those of a wide terminal."""
    for table in (latency_table(demo), earlier_rounds_table(demo.runs), cache_table(demo)):
        narrow, wide = ([line.rstrip() for line in lines(table, width)] for width in (80, 200))
        assert narrow == wide
        assert "\N{HORIZONTAL ELLIPSIS}" not in "".join(narrow)
        assert "disk (restarted)" in "\n".join(narrow)


def test_the_tables_have_the_medians_and_ratios(demo: DemoResult) -> None:
    """Medians over the repetitions, ratios within one; the check round's times and unused tiers are in no table."""
    latency, cache = ("\n".join(lines(table)) for table in (latency_table(demo), cache_table(demo)))
    earlier = "\n".join(lines(earlier_rounds_table(demo.runs)))
    (ram,) = (line.split() for line in latency.splitlines() if line.startswith("RAM"))
    assert ram == ["RAM", "30.000", "3.000", "36.00", "15.0\u00d7", "15.0\u00d7"]
    (ram,) = (line.split() for line in cache.splitlines() if line.startswith("RAM"))
    assert ram == ["RAM", "25.0%", "0.5%", "74.2%", "18.8", "1.25\u00d7", "1.10\u00d7", "108", "of", "108"]
    (restarted,) = (line.split() for line in earlier.splitlines() if line.startswith("disk (restarted)"))
    assert restarted == ["disk", "(restarted)", "0.450", "5.40", "-", "-", "-"]
    (none,) = (line.split() for line in cache.splitlines() if line.startswith("no hotspan"))
    assert none[-1] == "-"
    assert "external" not in cache and "55.5" not in latency + earlier


def test_modes_that_were_not_run_leave_their_columns_out(demo: DemoResult) -> None:
    """Without the bound there is nothing to compare answers and CPU time of the query round with."""
    without = replace(demo, runs=[run for run in demo.runs if run.name != "bound"])
    shown = "\n".join(lines(cache_table(without)))
    assert "bound" not in shown and "answers" not in shown and "1.10\u00d7" in shown
    assert tuple(run.name for run in without.runs) == MODE_NAMES[:-1]
