"""The command lines of benchmarks. hotspan.bench.machine writes their results."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from types import GenericAlias
from typing import Any, get_args


def arguments(doc: str | None, words: Sequence[str] | None = None, **flags: Any) -> argparse.Namespace:
    """The flags of a benchmark, and --output FILE.

    doc:   what --help shows: the module's docstring.
    flags: the default of each. A type stands for one without a default, a list for several values, list[int] for
           several or none without a default, a tuple for choices of which the first is the default.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in flags.items():
        flag = "--" + name.replace("_", "-")
        if isinstance(default, GenericAlias):
            parser.add_argument(flag, type=get_args(default)[0], nargs="*")
        elif isinstance(default, type):
            parser.add_argument(flag, type=default)
        elif isinstance(default, list):
            parser.add_argument(flag, type=type(default[0]), nargs="+", default=default)
        elif isinstance(default, tuple):
            parser.add_argument(flag, choices=default, default=default[0])
        else:
            parser.add_argument(flag, type=type(default), default=default)
    parser.add_argument("--output", type=Path)
    return parser.parse_args(words)
