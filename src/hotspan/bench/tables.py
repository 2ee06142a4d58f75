"""Tables that are declared once and shown in two places: on a terminal and in an HTML page."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Final, NamedTuple

from rich import box
from rich import table as rich
from rich.text import Text

COLOURS: Final = ("#6b7280", "#0072b2", "#009e73", "#e69f00", "#cc79a7", "#56b4e9", "#d55e00")
"""Okabe and Ito's palette, which colour-blind readers can tell apart; the first row is grey: it is the reference."""

_STYLES: Final = {"strong": "bold", "soft": "dim", "good": "green", "poor": "yellow", "bad": "red"}
"""Of cells: their names in a page's style sheet, and what they are on a terminal."""


def colour_of(index: int) -> str:
    return COLOURS[index % len(COLOURS)]


class Cell(NamedTuple):
    """A cell. style: one of _STYLES, or none; hint: what a page shows when a pointer is over it."""

    text: str
    style: str = ""
    hint: str = ""


NO_VALUE: Final = Cell("-", "soft")


class Group(NamedTuple):
    """Columns under one heading."""

    title: str
    columns: Sequence[str]


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of figures, each after its name.

    head:    of the column of names.
    note:    what a page says above it.
    is_keyed: whether a page shows each row's colour, which is its colour in the page's plots.
    """

    title: str
    groups: Sequence[Group]
    rows: Sequence[tuple[str, Sequence[Cell]]]
    head: str = ""
    note: str = ""
    is_keyed: bool = False

    def terminal(self) -> rich.Table:
        """The table as rich prints it."""
        table = rich.Table(
            title=self.title,
            title_justify="left",
            title_style="bold",
            box=box.SIMPLE_HEAD,
            show_edge=False,
            pad_edge=False,
        )
        table.add_column(self.head, vertical="bottom", overflow="fold")
        headings = [f"{g.title}\n{column}" if g.title else column for g in self.groups for column in g.columns]
        for at, heading in enumerate(headings):
            # On a narrow terminal words are wrapped, and figures stay whole.
            is_words = any(cells[at].text[:1].isalpha() for _, cells in self.rows)
            table.add_column(heading, justify="right", vertical="bottom", no_wrap=not is_words, overflow="fold")
        for name, cells in self.rows:
            table.add_row(Text(name), *(Text(cell.text, style=_STYLES.get(cell.style, "")) for cell in cells))
        return table

    def html(self) -> str:
        """The table as an element of a page."""
        over = "".join(f'<th class="begin" colspan="{len(g.columns)}">{escape(g.title)}</th>' for g in self.groups)
        groups = f'<tr class="groups"><th></th>{over}</tr>' if any(group.title for group in self.groups) else ""
        under = self._html_cells([Cell(column) for group in self.groups for column in group.columns], "th")
        rows = "".join(
            f"<tr><td>{self._key(index)}{escape(name)}</td>{self._html_cells(cells)}</tr>"
            for index, (name, cells) in enumerate(self.rows)
        )
        return (
            f'<div class="scroll"><table><thead>{groups}<tr><th>{escape(self.head)}</th>{under}</tr></thead>'
            f"<tbody>{rows}</tbody></table></div>"
        )

    def _html_cells(self, cells: Sequence[Cell], tag: str = "td") -> str:
        """The cells of a row; the first of each group has a line on its left."""
        firsts = {sum(len(group.columns) for group in self.groups[:n]) for n in range(len(self.groups))}
        shown = []
        for at, cell in enumerate(cells):
            text = f'<span title="{escape(cell.hint)}">{escape(cell.text)}</span>' if cell.hint else escape(cell.text)
            style = " ".join(filter(None, (cell.style, "begin" if at in firsts and len(firsts) > 1 else "")))
            shown.append(f'<{tag} class="{style}">{text}</{tag}>' if style else f"<{tag}>{text}</{tag}>")
        return "".join(shown)

    def _key(self, index: int) -> str:
        return f'<span class="dot" style="background:{colour_of(index)}"></span>' if self.is_keyed else ""
