"""Spellings that commands had before, still accepted and shown nowhere."""

from collections.abc import Iterator, Sequence
from typing import Any

from typer.core import TyperCommand


def old_spellings(**renamed: str) -> type[TyperCommand]:
    """The class of a command whose --json was once given a file, which is --output now.

    renamed: its other old flags and what they are called now, both without dashes and with underscores.
    """
    flags = {_flag(old): _flag(new) for old, new in renamed.items()}

    class Command(TyperCommand):
        def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
            now = []
            for word in args:
                name, equals, value = word.partition("=")
                now.append(flags.get(name, name) + equals + value)
            return super().parse_args(ctx, _with_output(now, self.params))

    return Command


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _with_output(words: list[str], declared: Sequence[Any]) -> list[str]:
    """The same, with `--output FILE` for `--json FILE`: a file that no argument of the command takes."""
    arguments = sum(each.param_type_name == "argument" for each in declared)
    has_more = len(list(_positionals(words, declared))) > arguments
    now = list(words)
    for at, word in enumerate(words):
        if word.startswith("--json="):
            now[at] = word.replace("--json", "--output", 1)
        elif word == "--json" and has_more and words[at + 1 : at + 2] and _is_file(words[at + 1]):
            now[at] = "--output"
    return now


def _is_file(word: str) -> bool:
    return word.endswith(".json") or word.startswith("/dev/")


def _positionals(words: Sequence[str], declared: Sequence[Any]) -> Iterator[str]:
    """The words that are neither options nor their values."""
    with_value = {name for each in declared if not getattr(each, "is_flag", True) for name in each.opts}
    rest = iter(words)
    for word in rest:
        if word in with_value:
            next(rest, None)
        elif not word.startswith("-"):
            yield word
