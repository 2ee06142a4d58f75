"""A comparison as one HTML file: table, plots, settings, machine and command, readable without a network."""

import json
import sys
from collections.abc import Sequence
from html import escape
from pathlib import Path

from hotspan.bench.machine import machine_facts
from hotspan.bench.report import Card, card_section, html_page, plot_section
from hotspan.simulate import figures
from hotspan.simulate.compare import Comparison, Line
from hotspan.simulate.show import QUANTILES, describe
from hotspan.simulate.trace import Facts

_NOT_DRAWN = 100.0
"""Times the least mean: a strategy so far off would press all others together."""


def write_report(path: Path, comparison: Comparison, lines: Sequence[Line], facts: dict[str, list[Facts]]) -> None:
    """Write the page."""
    body = [
        "<h1>Routing, simulated</h1>",
        f'<p class="lead">{escape(_lead(comparison))}</p>',
        *(_trace(name, [line for line in lines if line.trace == name], found) for name, found in facts.items()),
        _environment(comparison),
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(html_page("Routing, simulated", body), encoding="utf-8")


def _lead(comparison: Comparison) -> str:
    costs = comparison.setup.costs
    return (
        f"{comparison.setup.replicas} simulated replicas that prefill {costs.prefill_tokens_per_s:,.0f} tokens/s each. "
        "The strategies of the router run the router's own code, and see only what they send, its first bytes and "
        "ends, and the replicas' events."
    )


def _trace(name: str, lines: Sequence[Line], facts: Sequence[Facts]) -> str:
    first = lines[0].sizes
    same = [line for line in lines if line.sizes == first]
    least = min(line.ttft_s("mean") for line in same)
    drawn = [line for line in same if line.ttft_s("mean") <= _NOT_DRAWN * least]
    seen = [line for line in lines if line.policy in {each.policy for each in drawn}]
    left = [line.policy for line in same if line not in drawn]
    note = f" Not drawn, being a hundred times off: {', '.join(left)}." if left else ""
    tiers = f"{name}, {first.label()}."
    return "\n".join(
        (
            _cards(name, same),
            _table(name, lines, facts),
            plot_section(
                "Time to first token", f"{tiers} The trace of the first seed.{note}", figures.ttft_distribution(drawn)
            ),
            plot_section(
                "Found against waited",
                f"{tiers} A point is a seed. What finds most is not what waits least: it waits where it finds.{note}",
                figures.hit_against_ttft(drawn),
            ),
            plot_section(
                "The busiest replica",
                f"{tiers} Requests there that have not ended. Click a name to hide it.{note}",
                figures.load_over_time(drawn),
            ),
            plot_section("Sizes of the tiers", f"{name}. Means over the seeds.{note}", figures.sizes_sweep(seen)),
        )
    )


def _cards(name: str, lines: Sequence[Line]) -> str:
    """What `auto` gains over the best of the others; nothing where it is not compared."""
    auto = next((line for line in lines if line.policy == "auto"), None)
    others = [line for line in lines if not line.policy.startswith("auto")]
    if auto is None or not others:
        return ""
    cards = []
    for figure in ("mean", "p99"):
        best = min(others, key=lambda line: line.ttft_s(figure))
        times = best.ttft_s(figure) / auto.ttft_s(figure)
        detail = f"{auto.ttft_s(figure):.2f} s, against {best.ttft_s(figure):.2f} s of {best.policy}, the next best"
        cards.append(Card(f"{name}: TTFT, {figure}", f"{times:.2f}x", detail, "faster with auto"))
    return '<div class="cards">' + "".join(card_section(card) for card in cards) + "</div>"


def _table(name: str, lines: Sequence[Line], facts: Sequence[Facts]) -> str:
    heads = ("strategy", "tiers", "hit rate", *(f"TTFT {each} (s)" for each in QUANTILES), "TPOT (ms)", "imbalance")
    rows = []
    for line in lines:
        tpot = "-" if line.tpot_s is None else f"{line.tpot_s * 1000:.1f}"
        times = [f"{line.ttft_s(figure):,.2f}" for figure in QUANTILES]
        cells = [line.policy, line.sizes.label(), f"{line.hit_rate:.3f}", *times, tpot, f"{line.imbalance:.2f}"]
        rows.append("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>")
    head = "".join(f"<th>{escape(each)}</th>" for each in heads)
    return (
        f'<section><h2>{escape(name)}</h2><p class="note">{escape(describe(facts))}. Imbalance is the time that the '
        "busiest replica prefilled, by that of the average one.</p>"
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div></section>"
    )


def _environment(comparison: Comparison) -> str:
    machine = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in machine_facts().items())
    settings = escape(json.dumps(comparison.settings(), indent=1))
    command = escape(" ".join(["hotspan", *sys.argv[1:]]))
    return (
        "<section><details><summary>Settings and machine</summary>"
        f"<dl>{machine}</dl><pre>{command}</pre><pre>{settings}</pre></details></section>"
    )
