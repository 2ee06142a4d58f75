"""A run in the terminal: its progress, as `runner.Progress`."""

from types import TracebackType
from typing import Self

from rich.console import Console

from hotspan.bench.records import RequestRecord, RoundName
from hotspan.bench.runner import Progress
from hotspan.core import progress


class TerminalProgress(Progress):
    """A bar for each round; in a log, a line every ten seconds. Use it as a context manager."""

    def __init__(self, console: Console, title: str = "") -> None:
        self._title = f"{title}: " if title else ""
        self._shown = progress.Progress(f"{self._title}connecting", unit="requests", console=console)
        self._console = console
        self._answered = self._failed = 0
        self._ttft_s = 0.0

    def __enter__(self) -> Self:
        self._shown.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._shown.__exit__(kind, error, trace)

    def preparing(self, what: str) -> None:
        self._shown.begin(self._title + what)

    def found(self, what: str) -> None:
        self._console.print(f"{self._title}{what}", style="dim", markup=False, highlight=False, soft_wrap=True)

    def round_started(self, name: RoundName, expected: int) -> None:
        self._answered, self._failed, self._ttft_s = 0, 0, 0.0
        self._shown.begin(self._title + name.value, expected)

    def request_finished(self, name: RoundName, record: RequestRecord) -> None:
        self._answered += record.successful
        self._ttft_s += record.ttft
        self._failed += not record.successful
        mean = f", mean TTFT {self._ttft_s / self._answered:.3f} s" if self._answered else ""
        failed = f", {self._failed} failed" if self._failed else ""
        self._shown.advance()
        self._shown.doing(f"{self._title}{name.value}{mean}{failed}")
