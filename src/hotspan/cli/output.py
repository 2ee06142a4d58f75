"""What commands print, and how one ends whose request can't work: one sentence, exit status 2, no traceback."""

import contextlib
import json
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import typer

from hotspan.config.options import json_option
from hotspan.core.errors import ConfigError, HotspanError
from hotspan.core.extras import naming_extra
from hotspan.core.redaction import redacted

if TYPE_CHECKING:
    from rich.console import Console

_WIDTH_OF_FILES: Final = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Printing:
    """How a command prints what it found."""

    json: bool = json_option()


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Turn hotspan's errors, and a missing package of an extra, into a line on stderr and exit status 2."""
    try:
        with naming_extra():
            yield
    except HotspanError as error:
        typer.secho(f"hotspan: {error}", fg=typer.colors.RED, err=True)
        raise typer.Exit(2) from error


def stdout_console(*, is_json: bool = False) -> "Console":
    """A console as wide as the terminal, or of 100 columns where its output goes to a file or a pipe.

    is_json: stdout is for JSON alone: the console is that of stderr.
    """
    from rich.console import Console

    is_terminal = (sys.stderr if is_json else sys.stdout).isatty()
    return Console(width=None if is_terminal else _WIDTH_OF_FILES, stderr=is_json)


def command_line(arguments: Sequence[str]) -> str:
    """The command as it goes into result files, without API keys, passwords in URLs and other secrets."""
    flags = [each if each.startswith("--") and "=" not in each else "" for each in ("", *arguments)]
    return shlex.join(["hotspan", *(redacted(each, flag) for flag, each in zip(flags, arguments, strict=False))])


def print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2, default=str))


def check_writable(path: Path) -> None:
    """Find out before a run whether its result can be written. Raises: ConfigError if not."""
    is_new = not path.exists()
    if not (is_new or path.is_file() or path.is_dir()):
        return  # a pipe, or /dev/stdout
    if not path.parent.exists():
        raise ConfigError(
            f"{path} can't be written: there is no directory {path.parent}: make it, or give another file"
        )
    try:
        path.open("ab").close()
        if is_new:
            path.unlink()
    except OSError as error:
        raise ConfigError(f"{path} can't be written ({error.strerror}): give another file") from error


def print_written(path: Path, *, is_json: bool = False) -> None:
    """is_json: stdout is for JSON alone."""
    typer.echo(f"written: {path}", err=is_json)


def confirm(question: str, what: str, *, yes: bool) -> None:
    """Ask before something that can't be undone.

    what: it, for the error. yes: --yes was given.
    Raises: ConfigError if nobody is there to be asked, typer.Abort if the answer is no.
    """
    if yes:
        return
    if not sys.stdin.isatty():
        raise ConfigError(f"{what} can't be undone: confirm with --yes")
    typer.confirm(question, abort=True, err=True)
