"""What `hotspan plan` found: tables and a picture on the terminal, a page that needs no network, and JSON."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from rich.console import Console
from rich.text import Text

from hotspan.bench.tables import NO_VALUE, Cell, Group, Table
from hotspan.core.types import GIB, Tier
from hotspan.plan.advice import Advice, print_plan
from hotspan.plan.machines import Price
from hotspan.plan.rates import Rates
from hotspan.plan.tiers import TierPlan
from hotspan.plan.worth import Cost, Verdict, missing_options

if TYPE_CHECKING:
    import plotly.graph_objects as go

_NAMES = {Tier.GPU: "engine's pool", Tier.RAM: "RAM", Tier.DISK: "disk", Tier.L2: "L2"}
_COLOURS = {Tier.GPU: "#56b4e9", Tier.RAM: "#0072b2", Tier.DISK: "#e69f00", Tier.L2: "#cc79a7"}
_COMPUTED = "#9ca3af"
_WIDTH = 50
_NO_PRICE = "unknown: give --hourly-price, the price of this machine per hour"


@dataclass(frozen=True, slots=True)
class Report:
    """All of one plan.

    where:    what the tiers are on, in words.
    rates:    what was reckoned with.
    engines:  that share the machine: its RAM, drives and price.
    by_users: the same text for other numbers of users.
    measured: hit rates that a server measured, by tier; empty without one.
    """

    model: str
    where: str
    plan: TierPlan
    rates: Rates
    engines: int
    advice: Advice
    by_users: tuple[Advice, ...]
    verdict: Verdict
    price: Price | None
    cost: Cost | None
    measured: dict[Tier, float]

    def to_json(self) -> dict[str, Any]:
        """All figures: bytes, tokens, seconds, USD."""
        built: dict[str, Any] = msgspec.to_builtins(
            {
                "model": self.model,
                "reasons": self.plan.reasons,
                "rates": self.rates,
                "engines_on_machine": self.engines,
                "working_set": self.advice,
                "hit_rates_by_users": {
                    str(each.users): {held.tier.value: held.hit_rate for held in each.holdings}
                    for each in self.by_users
                },
                "verdict": self.verdict,
                "price": self.price,
                "cost": self.cost,
                "measured_hit_rates": {tier.value: rate for tier, rate in self.measured.items()},
            }
        )
        return built

    def print(self, console: Console) -> None:
        """Tables, the picture and the verdict."""
        print_plan(self.plan, console, f"Tiers of one engine on {self.where}")
        console.print()
        holdings = self.holdings()
        console.print(holdings.terminal())
        console.print(holdings.note, style="dim", highlight=False)
        console.print()
        for line in self._picture():
            console.print(line)
        console.print()
        for name, value in self.money():
            console.print(f"{name}: {value}", markup=False, highlight=False, soft_wrap=True)
        style = "bold green" if self.verdict.helps else "bold yellow"
        console.print(str(self.verdict), style=style, markup=False, highlight=False, soft_wrap=True)

    def holdings(self) -> Table:
        """What each tier holds, from how much text on it pays, and what loading costs beside computing."""
        advice = self.advice
        rows, digits = [], 1 if advice.is_measured else 0
        for held in advice.holdings:
            cells = (
                Cell(f"{held.tokens:,}") if held.bytes else NO_VALUE,
                Cell(f"{held.texts:,}") if held.bytes else NO_VALUE,
                Cell(f"{held.hit_rate:.{digits}%}"),
                NO_VALUE if held.load_s is None else Cell(_time(held.load_s)),
                NO_VALUE if held.pays_from is None else Cell(f"{held.pays_from:,}"),
                NO_VALUE if held.text_from is None else Cell(f"{held.text_from:,}"),
            )
            rows.append((_NAMES[held.tier], cells))
        computed = NO_VALUE if advice.compute_s is None else Cell(_time(advice.compute_s))
        rows.append(
            (
                "computed",
                (Cell(""), Cell(""), Cell(f"{max(0.0, 1 - advice.hit_rate):.{digits}%}"), computed, Cell(""), Cell("")),
            )
        )
        texts = f"{advice.users:,} text{'s' if advice.users != 1 else ''} of {advice.tokens:,} tokens"
        hits = "; hits as the server measured" if advice.is_measured else ""
        title = f"{texts}: {advice.working_set_bytes / GIB:,.1f} GiB of KV{hits}"
        columns = ("tokens", "texts", "hits", "time per text", "pays from", "texts from")
        note = (
            "Pays from: tokens of repeated text that no longer fit the tiers above. "
            "Texts from: tokens of the shortest text that loads faster than it is computed. -: unknown, or none."
        )
        return Table(title, (Group("", columns),), tuple(rows), "tier", note)

    def money(self) -> list[tuple[str, str]]:
        """Price, cost of prefill, savings and payback in words."""
        said = [("Price", str(self.price) if self.price is not None else _NO_PRICE)]
        if self.measured:
            rates = ", ".join(f"{_NAMES[tier]} {self.measured[tier]:.1%}" for tier in Tier if tier in self.measured)
            unused = "" if self.advice.is_measured else "; not used, since --reuse is given"
            said.insert(0, ("Measured hit rates", f"{rates}{unused}"))
        if self.price is not None or self.engines > 1:
            said.append(("Share of one engine", self._share()))
        if self.cost is None:
            missing = missing_options(self.advice)
            return [*said, ("Prefill cost and savings", f"unknown: give {missing}")] if missing else said
        alone = "with the engine's pool alone" if self.advice.is_pool_known else "without any cache"
        per = f"{self.cost.without:.3f} USD {alone}, {self.cost.with_tiers:.3f} USD with tiers"
        said.append(("Prefill per million prompt tokens", per))
        if self.cost.engines is not None:
            load = f"{self.cost.engines:.2g} {alone}, {self.cost.engines_with_tiers:.2g} with tiers"
            said.append(("Engines busy with prefill", load))
        if self.cost.saved_per_month is not None:
            said.append(("Saved per month", f"{_usd(self.cost.saved_per_month)} of GPU time"))
        if self.cost.payback_days is not None:
            said.append(("Payback", f"{self.cost.payback_days:,.1f} days"))
        return said

    def _share(self) -> str:
        """What one engine has of the machine, and pays."""
        usd = "" if self.price is None else f": {self.price.usd_per_hour / self.engines:.2f} USD per hour"
        if self.engines == 1:
            return f"all of the machine's RAM, drives and price{usd}"
        return f"1/{self.engines} of the machine's RAM, drives and price, for {self.engines} engines (--workers){usd}"

    def write_page(self, path: Path) -> None:
        """Write the page."""
        from hotspan.bench.page import Card, card_section, facts, plot_section, section, table_section, write_page

        saved = self.verdict.saved
        cards = [
            Card("Verdict", self.verdict.word, self.verdict.why),
            Card(
                "Found in a cache",
                f"{self.advice.hit_rate:.0%}",
                "of the prompt tokens" if self.advice.is_measured else "of the prompt tokens of this working set",
            ),
            Card("Prefill time saved", "-" if saved is None else f"{saved:.0%}", "against the engine's pool alone"),
        ]
        parts = [
            card_section(cards),
            table_section(self.holdings()),
            plot_section(
                f"Hit rate by number of users{self._estimated}",
                "Every user is as likely to return as any other.",
                self._plot(),
            ),
            section("Cost", "Prefill only; answers cost the same.", facts(self.money())),
            section(
                f"Tiers of one engine on {self.where}",
                "",
                facts([(r.what, f"{r.value}: {r.why}") for r in self.plan.reasons]),
            ),
        ]
        write_page(path, f"Plan for {self.model}", str(self.verdict), parts)

    @property
    def _estimated(self) -> str:
        return ", estimated" if self.advice.is_measured else ""

    def _picture(self) -> list[Text]:
        """A bar for each number of users: where their tokens are found."""
        lines = [Text(f"Hit rate by number of users{self._estimated}", style="bold")]
        for each in self.by_users:
            line = Text(f"{each.users:>9,} ")
            done = 0
            at = 0.0
            for held in each.holdings:
                at += held.hit_rate
                end = round(at * _WIDTH)
                line.append("█" * (end - done), style=_COLOURS[held.tier])
                done = end
            line.append("░" * (_WIDTH - done), style=_COMPUTED)
            lines.append(line.append(f" {each.hit_rate:.0%}"))
        legend = Text(" " * 10)
        for tier in dict.fromkeys(held.tier for each in self.by_users for held in each.holdings):
            legend.append("█ ", style=_COLOURS[tier]).append(f"{_NAMES[tier]}  ")
        return [*lines, legend.append("░ ", style=_COMPUTED).append("computed")]

    def _plot(self) -> "go.Figure":
        import plotly.graph_objects as go

        from hotspan.bench.page import styled

        figure = go.Figure()
        users = [f"{each.users:,}" for each in self.by_users]
        for tier in dict.fromkeys(held.tier for each in self.by_users for held in each.holdings):
            rates = [next((h.hit_rate for h in each.holdings if h.tier is tier), 0.0) for each in self.by_users]
            figure.add_bar(x=users, y=rates, name=_NAMES[tier], marker={"color": _COLOURS[tier]})
        left = [max(0.0, 1 - each.hit_rate) for each in self.by_users]
        figure.add_bar(x=users, y=left, name="computed", marker={"color": "#e5e7eb"})
        figure.update_layout(barmode="stack")
        figure.update_xaxes(title="users", type="category")
        figure.update_yaxes(title="share of the prompt tokens", tickformat=".0%", range=[0, 1])
        return styled(figure, height=340)


def numbers_of_users(asked: int) -> Sequence[int]:
    """The numbers to show beside the one that was asked for: powers of ten around it."""
    middle = round(math.log10(asked))
    return sorted({asked, *(10**power for power in range(max(0, middle - 2), middle + 3))})


def _usd(amount: float) -> str:
    return f"{amount:,.0f} USD" if amount >= 100 else f"{amount:,.2f} USD"


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{math.ceil(seconds * 1000)} ms"
