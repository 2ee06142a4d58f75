"""The two decorators by which `model.py` says which of its functions are formatters.

What they leave on a function is what LMI's own `djl_python` leaves there: a `model.py` that got its decorators from
there, or wrote them itself, is understood as well, and ours are understood by LMI.
"""

from collections.abc import Callable
from types import MappingProxyType
from typing import Any, TypeVar

from hotspan.formatters.formatter import Phase

MARKS = MappingProxyType({Phase.INPUT: "is_input_formatter", Phase.OUTPUT: "is_output_formatter"})

_Function = TypeVar("_Function", bound=Callable[..., Any])


def input_formatter(function: _Function) -> _Function:
    """`function`, marked as what every request's payload goes through before its schema is chosen."""
    setattr(function, MARKS[Phase.INPUT], True)
    return function


def output_formatter(function: _Function) -> _Function:
    """`function`, marked as what every answer goes through, or every chunk of a streamed one."""
    setattr(function, MARKS[Phase.OUTPUT], True)
    return function
