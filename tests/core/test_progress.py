"""What takes long shows that it goes on."""

import io
import threading

from rich.console import Console

from hotspan.core.progress import Lines, Progress, waiting


class Heard(io.StringIO):
    """A log that says when it has a line."""

    def __init__(self) -> None:
        super().__init__()
        self.lines = threading.Semaphore(0)

    def write(self, text: str) -> int:
        count = super().write(text)
        if "\n" in text:
            self.lines.release()
        return count

    def wait(self) -> str:
        assert self.lines.acquire(timeout=60), "no line came"
        return self.getvalue()


def test_a_log_gets_lines() -> None:
    """Without a terminal there is a line again and again: what is done, of how much, since when."""
    log = Heard()
    with Progress("fetching the model", 8, "MiB", console=Console(file=log, width=40), every_s=0.01) as progress:
        log.wait()
        progress.advance(3)
        while "fetching the model: 3 of 8 MiB, " not in log.wait():
            pass
        progress.doing("checking it [bold]")
        progress.of(20)
        while "checking it [bold]: 3 of 20 MiB, " not in log.wait():
            pass
    ended = log.getvalue()
    assert ended == log.getvalue() and all(line.endswith(" s") for line in ended.splitlines())


def test_a_terminal_gets_a_bar() -> None:
    """On a terminal the count is drawn, and nothing is left of it afterwards."""
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=100)
    with Progress("checking", 4, "chunks", console=console) as progress:
        progress.advance(4)
        progress.doing("sealing")
        progress.of(4)
    assert "sealing" in screen.getvalue() and "4/4" in screen.getvalue()


def test_a_wait_says_what_it_waits_for() -> None:
    """The line that changes is what a log gets; a terminal shows it while it lasts."""
    log = Heard()
    with waiting(Console(file=log), "starting", every_s=0.01) as change:
        log.wait()
        change("still starting")
        while "still starting" not in log.wait():
            pass
    screen = io.StringIO()
    with waiting(Console(file=screen, force_terminal=True), "starting") as change:
        change("still starting")
    assert "start" in screen.getvalue()


def test_nothing_is_printed_of_what_is_quick() -> None:
    """What ends before the first ten seconds leaves no line."""
    log = io.StringIO()
    with Lines(Console(file=log), lambda: "never"):
        pass
    with Progress("quick", console=Console(file=log)) as progress:
        progress.advance()
    assert log.getvalue() == ""
