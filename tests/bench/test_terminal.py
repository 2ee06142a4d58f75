import io
import sys
from dataclasses import replace

import pytest
from fabricated import fabricated_round
from rich.console import Console

from hotspan.bench.records import Quantiles, RoundName, RoundResult
from hotspan.bench.report import rounds_table
from hotspan.bench.tables import Cell, Group, Table
from hotspan.cli.output import stdout_console


class Terminal(io.StringIO):
    """A stdout that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_files_and_pipes_get_100_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where stdout is no terminal the width is 100; a terminal has its own."""
    monkeypatch.setenv("COLUMNS", "61")
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert stdout_console().width == 100
    monkeypatch.setattr(sys, "stdout", Terminal())
    assert stdout_console().width == 61


def table_of(*rounds: RoundResult) -> str:
    console = Console(record=True, width=100, quiet=False, file=io.StringIO())
    console.print(rounds_table(rounds).terminal())
    return console.export_text()


def test_a_row_is_shown_where_a_round_has_its_figure() -> None:
    """ITL and TPOT have their percentiles; lateness, goodput and turns not sent only show where there are some."""
    plain = fabricated_round(RoundName.QUERY, 4, 1.0, {})
    shown = table_of(plain)
    assert all(f"{name} {p} (ms)" in shown for name in ("inter-token", "TPOT") for p in ("mean", "p50", "p90", "p99"))
    assert not any(name in shown for name in ("from due", "goodput", "not sent"))
    late = Quantiles(1.5, 1.25, 2.0, 3.0)
    summary = replace(plain.summary, late_s=late, ttft_from_due_s=late, unsent=3, within_slo=2)
    paced = replace(plain, summary=summary)
    shown = table_of(replace(plain, name=RoundName.WARM_UP), paced)
    rows = {
        line.rstrip().rsplit(maxsplit=2)[0]: line.split()[-2:] for line in shown.splitlines() if len(line.split()) > 2
    }
    assert rows["TTFT from due p50 (s)"] == ["-", "1.250"] and rows["due, not sent"] == ["-", "3"]
    assert float(rows["goodput (requests/s)"][1]) == pytest.approx(2 / plain.summary.elapsed_s, abs=1e-3)
    assert plain.pacing == ""
    assert "1.250 s (p50) and 3.000 s (p99)" in paced.pacing and "3 that were due" in paced.pacing


@pytest.mark.parametrize("width", [60, 80, 100])
def test_figures_are_whole_on_a_narrow_terminal(width: int) -> None:
    """Names and other words are wrapped; of a figure nothing is left out."""
    figures = ("12.34", "13.32 s", "0.93", "-")
    words = "memcpy, a chunk at a time"
    cells = [*map(Cell, figures), Cell(words)]
    groups = [Group("", ("GB/s", "limit GB/s", "ratio", "goal", "limit"))]
    console = Console(width=width, file=io.StringIO())
    console.print(Table("storage", groups, [("engine to slab, 10 x 92 KiB a block", cells)], "what").terminal())
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    assert all(figure in shown for figure in figures) and "…" not in shown
    assert set(words.split()) < set(shown.split())
