"""Servers that a comparison starts itself: both at once, or one after the other."""

import shlex
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil
from rich.console import Console

from hotspan.config.configuration import visible_gpus
from hotspan.config.environment import environment
from hotspan.core.addresses import free_port
from hotspan.core.aftermath import Aftermath
from hotspan.core.errors import ConfigError
from hotspan.core.progress import waiting
from hotspan.demo.server import ServerProcess, serve_command

_SPARE: Final = 1.25
"""Free memory, in sizes of the first server, that a second one is started beside it with."""

_SET_HERE: Final = ("--port", "--host", "--uds")


@dataclass(frozen=True, slots=True)
class Serving:
    """A server to start: `arguments` are a model and options of `hotspan serve`."""

    title: str
    arguments: tuple[str, ...]
    log: Path

    @classmethod
    def parse(cls, title: str, text: str, flag: str, logs: Path) -> "Serving":
        """Raises: ConfigError for a text without a model, or with an option that is set here."""
        try:
            words = shlex.split(text)
        except ValueError as error:
            raise ConfigError(f"{flag} {text!r} can't be read: {error}") from error
        if not words or words[0].startswith("-"):
            raise ConfigError(f"{flag} {text!r} begins with no model: write MODEL and then options of `hotspan serve`")
        if found := next((word for word in words if word.partition("=")[0] in _SET_HERE), None):
            raise ConfigError(f"{flag}: leave {found} out: the server gets a free port of this machine")
        return cls(title, tuple(words), logs / f"server-{title.lower()}.log")

    @contextmanager
    def running(self, aftermath: Aftermath, timeout_s: float, console: Console) -> Iterator[str]:
        """The URL of the server once it is ready; leaving the block stops it. Raises: EngineError."""
        port = free_port()
        model, *options = self.arguments
        command = serve_command(Path(model), (*options, "--host", "127.0.0.1", "--port", str(port)))
        with ServerProcess(command, {}, port, self.log, aftermath) as server:
            with waiting(console, f"starting server {self.title}") as change:
                server.wait_until_ready(
                    timeout_s, lambda waited, _: change(f"starting server {self.title} ({waited:.0f} s)")
                )
            yield server.url


@contextmanager
def beside(
    first: Serving, second: Serving, start: str, aftermath: Aftermath, timeout_s: float, console: Console
) -> Iterator[tuple[str, str | None]]:
    """The URLs of both servers; None for the second where only one can run at a time, which then has to be started."""
    with ExitStack() as stack:
        before = psutil.virtual_memory().available
        url = stack.enter_context(first.running(aftermath, timeout_s, console))
        after = psutil.virtual_memory().available
        if start == "in-turn" or (start == "auto" and not _fits(before - after, after)):
            yield url, None
            return
        yield url, stack.enter_context(second.running(aftermath, timeout_s, console))


def _fits(taken: int, free: int) -> bool:
    """Whether a server of the same size fits beside the first. On GPUs an engine takes nearly all of the memory."""
    return not visible_gpus(environment()) and free > _SPARE * max(taken, 0)
