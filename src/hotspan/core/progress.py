"""What takes minutes shows that it goes on: a bar on a terminal, a line every ten seconds in a log."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Final, Self

from rich.console import Console

from hotspan.core.threads import start

EVERY_S: Final = 10.0


class Lines:
    """Prints `text()` every ten seconds while it is entered, from a thread of its own."""

    def __init__(self, console: Console, text: Callable[[], str], every_s: float = EVERY_S) -> None:
        self._console = console
        self._text = text
        self._every_s = every_s
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        self._thread = start("progress", self._print)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()

    def _print(self) -> None:
        while not self._ended.wait(self._every_s):
            self._console.print(self._text(), markup=False, highlight=False, soft_wrap=True)


class Progress:
    """How far something has come.

    total: how many `unit`s there are; None where that is not known.
    From any thread. console: stderr if none is given, so that what a command prints stays as it is.
    """

    def __init__(
        self,
        what: str,
        total: float | None = None,
        unit: str = "",
        *,
        console: Console | None = None,
        every_s: float = EVERY_S,
    ) -> None:
        self._what = what
        self._total = total
        self._unit = unit
        self._done = 0.0
        self._console = console or Console(stderr=True)
        self._shown: Any = self._bar() if self._console.is_terminal else Lines(self._console, self._line, every_s)

    def __enter__(self) -> Self:
        self._began_s = time.monotonic()
        self._shown.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._shown.__exit__(kind, error, trace)

    def advance(self, count: float = 1) -> None:
        """So many more are done."""
        self._done += count
        if self._console.is_terminal:
            self._shown.advance(self._task, count)

    def doing(self, what: str) -> None:
        """It is at something else now."""
        self._what = what
        if self._console.is_terminal:
            self._shown.update(self._task, description=what)

    def begin(self, what: str, total: float | None = None) -> None:
        """It is at something else now, of which nothing is done yet."""
        self._what, self._total, self._done = what, total, 0.0
        if self._console.is_terminal:
            self._shown.reset(self._task, description=what, total=total)

    def of(self, total: float) -> None:
        """There are so many."""
        self._total = total
        if self._console.is_terminal:
            self._shown.update(self._task, total=total)

    def _line(self) -> str:
        of = f" of {self._total:,g}" if self._total is not None else ""
        count = f": {self._done:,g}{of}" if of or self._done else ""
        unit = f" {self._unit}" if count and self._unit else ""
        return f"{self._what}{count}{unit}, {time.monotonic() - self._began_s:.0f} s"

    def _bar(self) -> Any:
        from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bars

        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(bar_width=30), MofNCompleteColumn())
        bars = Bars(*columns, TextColumn(self._unit), TimeElapsedColumn(), console=self._console, transient=True)
        self._task = bars.add_task(self._what, total=self._total)
        return bars


@contextmanager
def waiting(console: Console, text: str, every_s: float = EVERY_S) -> Iterator[Callable[[str], None]]:
    """A line that stands on the terminal while something is waited for; in a log it comes every ten seconds.

    Yields what changes the line.
    """
    shown = text
    if console.is_terminal:
        with console.status(text) as status:
            yield status.update
        return

    def change(to: str) -> None:
        nonlocal shown
        shown = to

    with Lines(console, lambda: shown, every_s):
        yield change
