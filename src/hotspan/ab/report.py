"""Tables of a comparison for the terminal and a page, and the page."""

from collections.abc import Iterator
from html import escape
from pathlib import Path

from hotspan.ab.result import AbResult, Difference, SameResult, Verdict
from hotspan.ab.statistics import Interval, Share
from hotspan.bench.page import Card, card_section, facts, folded, section, table_section, write_page
from hotspan.bench.tables import NO_VALUE, Cell, Group, Table

_STYLES = {Verdict.PASS: "good", Verdict.DRIFT: "bad", Verdict.UNKNOWN: "poor"}
_SHOWN_CHARS = 1000


def ab_tables(result: AbResult) -> list[Table]:
    """Answers, drift, scores and times, each figure with its interval."""
    found = [
        _answers_table(result),
        _drift_table(result),
        _agreement_table(result),
        _scores_table(result),
        _figures_table(result),
    ]
    return [table for table in found if table is not None]


def _answers_table(result: AbResult) -> Table:
    rows = [(each.pair, _share_cells(each.different)) for each in result.agreements]
    return Table("Answers", [Group("", ["different", "95 % interval"])], rows, "pair")


def _agreement_table(result: AbResult) -> Table:
    """How close the answers are; with KL where there are log probabilities."""
    has_kl = any(each.kl for each in result.agreements)
    groups = [Group("Tokens agreed", ["share", "95 % interval"])]
    groups += [Group("Top-k KL", ["mean", "95 % interval"])] if has_kl else []
    rows = [
        (each.pair, [*_interval_cells(each.tokens, "{:.2%}"), *(_interval_cells(each.kl, "{:.1e}") if has_kl else ())])
        for each in result.agreements
    ]
    note = (
        "A token agrees if it stands before the first difference. Top-k KL, in nats per token, is a lower bound of the "
        "KL divergence: see docs/ab.md."
    )
    return Table("Agreement", groups, rows, "pair", note)


def _drift_table(result: AbResult) -> Table:
    rows = [
        ("A against B, above A against itself", _difference_cells(result.drift)),
        ("B against itself, above A against itself", _difference_cells(result.repeat_drift)),
    ]
    needed = "more than a million" if result.needed is None else f"{result.needed:,}"
    note = f"{result.compared:,} items; a drift of {result.detect:.2%} needs about {needed} with this noise floor."
    return Table(f"Drift (maximum {result.max_drift:.2%})", [Group("", ["drift", "95 % interval"])], rows, "", note)


def _scores_table(result: AbResult) -> Table | None:
    if result.scores is None:
        return None
    scores = result.scores
    rows = [
        ("A", _share_cells(scores.a)),
        ("B", _share_cells(scores.b)),
        ("B less A", _difference_cells(scores.gain)),
    ]
    note = f"{scores.a.total:,} items with an expected answer."
    return Table("Right answers", [Group("", ["share", "95 % interval"])], rows, "side", note)


def _figures_table(result: AbResult) -> Table | None:
    if not result.figures:
        return None
    note = "Means per request. Items that measured the noise floor are left out: B was not asked beside them."
    rows = [
        (
            f"{each.name} ({each.unit})",
            [Cell(f"{each.a:,.2f}"), Cell(f"{each.b:,.2f}"), *_interval_cells(each.ratio, "{:.3f}")],
        )
        for each in result.figures
    ]
    return Table("Times", [Group("", ["A", "B", "B / A", "95 % interval"])], rows, "figure", note)


def _share_cells(share: Share) -> list[Cell]:
    return [Cell(f"{share.count} of {share.total}", "strong"), Cell(f"{share.low:.2%} to {share.high:.2%}")]


def _difference_cells(each: Interval) -> list[Cell]:
    return [Cell(f"{each.value:+.2%}", "strong"), Cell(f"{each.low:+.2%} to {each.high:+.2%}")]


def _interval_cells(each: Interval | None, shown: str) -> list[Cell]:
    if each is None:
        return [NO_VALUE, NO_VALUE]
    return [Cell(shown.format(each.value), "strong"), Cell(f"{shown.format(each.low)} to {shown.format(each.high)}")]


def verdict_line(result: AbResult | SameResult) -> str:
    """The verdict and its reason."""
    if isinstance(result, AbResult):
        return f"{result.verdict}: {result.why}"
    worst = max(result.conditions, key=lambda each: each.different.high)
    reason = f"{worst.different.count} of {worst.different.total} items differ at worst ({worst.title})"
    reason += f": at most {worst.different.high:.2%}; the maximum is {result.max_drift:.2%}"
    return f"{result.verdict}: {reason}" + ("; requests failed" if result.failures else "")


def verdict_style(result: AbResult | SameResult) -> str:
    return {"good": "green", "bad": "red", "poor": "yellow"}[_STYLES[result.verdict]]


def same_table(result: SameResult) -> Table:
    """What differs under each condition."""
    columns = ["different items", "95 % interval", "first difference", "from a cache"]
    rows = [
        (
            each.title,
            [
                *_share_cells(each.different),
                NO_VALUE if each.at is None else Cell(f"token {each.at:g}"),
                Cell(f"{each.cached:.1%}"),
            ],
        )
        for each in result.conditions
    ]
    note = "Compared with the first answers, which were computed alone. First difference: the median, from 0."
    return Table("Reproducibility", [Group("", columns)], rows, "condition", note)


# -- page --------------------------------------------------------------------------------------------------------------


def ab_sections(result: AbResult) -> list[str]:
    """The comparison as sections of a page."""
    return [
        card_section(list(_cards(result))),
        _failures(result.failures),
        *map(table_section, ab_tables(result)),
        _differences(result),
    ]


def write_ab_report(path: Path, result: AbResult | SameResult) -> None:
    """Write the page of one comparison or check."""
    if isinstance(result, AbResult):
        title, lead = "Comparison of two servers", f"A: {result.titles[0]}. B: {result.titles[1]}."
        sections = ab_sections(result)
    else:
        title, lead = "Reproducibility of a server", f"{result.title}: {verdict_line(result)}."
        sections = [_failures(result.failures), table_section(same_table(result))]
    sections += [
        section("Machine", "", facts(list(result.machine.items()))),
        section("Command", "", f"<pre>{escape(result.command)}</pre>"),
    ]
    write_page(path, title, lead, sections)


def _cards(result: AbResult) -> Iterator[Card]:
    yield Card("Verdict", str(result.verdict), result.why)
    drift = result.drift
    yield Card("Drift", f"{drift.value:+.2%}", f"{drift.low:+.2%} to {drift.high:+.2%}, above the noise floor")
    noise = result.agreements[0].different
    yield Card("Noise floor", f"{noise.value:.2%}", f"A against itself: {noise.count} of {noise.total} items differ")
    if result.scores:
        gain = result.scores.gain
        yield Card("Right answers", f"{gain.value:+.2%}", f"B less A: {gain.low:+.2%} to {gain.high:+.2%}")


def _failures(lines: tuple[str, ...]) -> str:
    if not lines:
        return ""
    return f'<div class="alarm"><strong>Failed requests.</strong><br>{"<br>".join(map(escape, lines))}</div>'


def _differences(result: AbResult) -> str:
    if not result.differences:
        return ""
    return folded(f"Different answers ({len(result.differences)})", "".join(map(_difference, result.differences)))


def _difference(each: Difference) -> str:
    kept = "each side repeats its answer" if each.is_kept else "a side differs from itself, too"
    shown = "".join(f"<pre>{escape(text[:_SHOWN_CHARS])}</pre>" for text in (each.a, each.b))
    return f'<div class="soft">{escape(each.item)}: from token {each.at} on; {kept}</div>{shown}'
