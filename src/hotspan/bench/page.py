"""HTML pages that need no network: one style sheet, plotly.js, and cards, tables and plots."""

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Final, NamedTuple

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from hotspan.bench.tables import Table

STYLE: Final = """
:root { --ink: #111827; --soft: #6b7280; --line: #e5e7eb; --paper: #ffffff; --back: #f6f7f9; --accent: #0072b2;
        --good: #04724d; --poor: #b45309; --bad: #b91c1c; }
* { box-sizing: border-box; }
body { margin: 0; background: var(--back); color: var(--ink); line-height: 1.5;
       font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 36px 24px 64px; }
h1 { font-size: 28px; line-height: 1.2; margin: 0 0 6px; letter-spacing: -0.01em; }
h2 { font-size: 18px; margin: 0 0 2px; }
.lead { color: var(--soft); margin: 0 0 24px; max-width: 140ch; }
.note { color: var(--soft); font-size: 13px; margin: 0 0 10px; max-width: 160ch; }
section { background: var(--paper); border: 1px solid var(--line); border-radius: 12px; padding: 18px 20px;
          margin: 16px 0; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(195px, 1fr)); gap: 14px; }
.card { background: var(--paper); border: 1px solid var(--line); border-radius: 12px; padding: 14px 18px 16px;
        border-top: 3px solid var(--accent); }
.card .label { color: var(--soft); font-size: 13px; }
.card .figure { font-size: 30px; line-height: 1.25; font-weight: 650; letter-spacing: -0.02em; white-space: nowrap; }
.card .figure small { font-size: 16px; font-weight: 600; letter-spacing: 0; color: var(--soft); }
.card .detail { font-size: 13px; color: var(--soft); }
.alarm { border: 1px solid #fecaca; background: #fef2f2; color: var(--bad); border-radius: 12px; padding: 12px 18px;
         margin: 16px 0; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; font-size: 14px; }
th, td { text-align: right; padding: 7px 10px; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { color: var(--soft); font-weight: 600; font-size: 12.5px; }
thead tr.groups th { text-align: right; border-bottom: none; padding-bottom: 0; color: var(--ink); }
th:first-child, td:first-child { text-align: left; }
tbody tr:last-child td { border-bottom: none; }
td.left, th.left { text-align: left; white-space: normal; }
.begin { border-left: 1px solid var(--line); }
.dot { display: inline-block; width: 10px; height: 10px; border-radius: 50%; margin-right: 8px; }
.strong { font-weight: 650; } .good { color: var(--good); font-weight: 650; } .poor { color: var(--poor); }
.bad { color: var(--bad); font-weight: 650; } .soft { color: var(--soft); }
pre { background: #f3f4f6; border-radius: 8px; padding: 10px 12px; margin: 4px 0 14px; overflow-x: auto;
      font-size: 12.5px;
      white-space: pre-wrap; overflow-wrap: anywhere; font-family: ui-monospace, "DejaVu Sans Mono", monospace; }
details summary { cursor: pointer; font-weight: 600; font-size: 18px; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 2px 18px; margin: 8px 0 4px; font-size: 14px; }
dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; }
.two { display: grid; grid-template-columns: 1fr 1fr; gap: 16px; } .two section { margin: 0; min-width: 0; }
@media (max-width: 900px) { .two { grid-template-columns: 1fr; } }
@media print { body { background: #fff; } section, .card { break-inside: avoid; } }
"""


class Card(NamedTuple):
    """One headline figure."""

    label: str
    figure: str
    detail: str
    unit: str = ""


def write_page(path: Path, title: str, lead: str, sections: Sequence[str]) -> None:
    """Write a page of these parts."""
    head = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        # An icon of nothing: without one, browsers ask the server of the page for it.
        '<link rel="icon" href="data:,">'
        f"<title>{escape(title)}</title><style>{STYLE}</style><script>{get_plotlyjs()}</script></head>\n"
    )
    body = "\n".join([f"<h1>{escape(title)}</h1>", f'<p class="lead">{escape(lead)}</p>', *sections])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{head}<body><main>\n{body}\n</main></body></html>\n", encoding="utf-8")


def section(title: str, note: str, body: str) -> str:
    """A part of a page under a heading. note: text; body: HTML."""
    shown = f'<p class="note">{escape(note)}</p>' if note else ""
    return f"<section><h2>{escape(title)}</h2>{shown}{body}</section>"


def folded(title: str, body: str) -> str:
    """HTML that a reader has to unfold."""
    return f"<section><details><summary>{escape(title)}</summary>{body}</details></section>"


def table_section(table: Table) -> str:
    """A table under its title."""
    return section(table.title, table.note, table.html())


def card_section(cards: Sequence[Card]) -> str:
    """The cards side by side."""
    return f'<div class="cards">{"".join(map(_card, cards))}</div>'


def _card(card: Card) -> str:
    unit = f" <small>{escape(card.unit)}</small>" if card.unit else ""
    return (
        f'<div class="card"><div class="label">{escape(card.label)}</div>'
        f'<div class="figure">{escape(card.figure)}{unit}</div><div class="detail">{escape(card.detail)}</div></div>'
    )


def facts(pairs: Sequence[tuple[str, str]]) -> str:
    """Names and what they stand for, as HTML."""
    return "<dl>" + "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in pairs) + "</dl>"


def plot_section(title: str, note: str, figure: go.Figure | None) -> str:
    """A plot under a heading; "" without a figure."""
    if figure is None:
        return ""
    config = {"displaylogo": False, "responsive": True, "modeBarButtonsToRemove": ["lasso2d", "select2d"]}
    return section(title, note, figure.to_html(full_html=False, include_plotlyjs=False, config=config))


def styled(figure: go.Figure, height: int, *, legend: bool = True) -> go.Figure:
    """The figure, in the look of all reports."""
    figure.update_layout(
        template="plotly_white",
        height=height,
        margin={"l": 12, "r": 24, "t": 24, "b": 12},
        font={"family": "system-ui, -apple-system, 'Segoe UI', sans-serif", "size": 13, "color": "#1f2937"},
        legend={"orientation": "h", "yanchor": "bottom", "y": 1.02, "xanchor": "left", "x": 0, "traceorder": "normal"},
        showlegend=legend,
        hoverlabel={"font": {"size": 13}},
    )
    figure.update_xaxes(automargin=True, gridcolor="#eef0f3", zerolinecolor="#d1d5db")
    figure.update_yaxes(automargin=True, gridcolor="#eef0f3", zerolinecolor="#d1d5db", ticklabelstandoff=6)
    return figure
