"""A formatter, what it is told besides the payload or answer, and the decorators that mark functions as formatters."""

import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

_Function = TypeVar("_Function", bound=Callable[..., Any])
_REQUEST_ID_HEADERS = ("x-request-id", "x-amzn-sagemaker-inference-id")


class Phase(StrEnum):
    """Which way a formatter stands in."""

    INPUT = "input"
    OUTPUT = "output"


MARKS = MappingProxyType({Phase.INPUT: "is_input_formatter", Phase.OUTPUT: "is_output_formatter"})
"""What the decorators set on a function. LMI's `djl_python` sets the same, so each reads the other's `model.py`."""


@dataclass(frozen=True, slots=True)
class Context:
    """What a formatter may know of the request besides its payload or answer.

    adapter: None for the base model.
    headers: the request's, names in lower case.
    time_s:  when the formatter is called, in seconds since 1970.
    """

    adapter: str | None
    headers: Mapping[str, str]
    tokenizer: Any
    time_s: float

    @property
    def request_id(self) -> str | None:
        """The id that the client gave the request."""
        return next((self.headers[name] for name in _REQUEST_ID_HEADERS if name in self.headers), None)


@dataclass(frozen=True, slots=True)
class Formatter:
    """One function that changes payloads or answers.

    name:     where it stands, as clients are told: the directory's name, the file, and the function or section.
    file:     where it stands.
    apply:    the changed value, or an awaitable of it if the formatter is async; raises what the user's code raises.
    is_async: whether `apply` gives an awaitable.
    """

    phase: Phase
    name: str
    file: Path
    apply: Callable[[Any, Context], Any]
    is_async: bool = False


def line_in(file: Path, error: BaseException) -> str:
    """Where in `file` an exception came from, as " in line 12"; empty if it came from elsewhere."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == str(file)]
    if isinstance(error, SyntaxError) and error.filename == str(file):
        lines.append(error.lineno)
    return f" in line {lines[-1]}" if lines else ""


def input_formatter(function: _Function) -> _Function:
    """`function`, marked as what every request's payload goes through before its schema is chosen."""
    setattr(function, MARKS[Phase.INPUT], True)
    return function


def output_formatter(function: _Function) -> _Function:
    """`function`, marked as what every answer goes through, or every chunk of a streamed one."""
    setattr(function, MARKS[Phase.OUTPUT], True)
    return function
