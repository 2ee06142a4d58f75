"""What `hotspan doctor` finds: a subject, its state, and what to do about it."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum


class Severity(Enum):
    """BAD: somebody has access that they should not have, or the server would not start."""

    OK = "ok"
    WARNING = "warning"
    BAD = "bad"


@dataclass(frozen=True, slots=True)
class Finding:
    """A subject, its state, and a remedy unless it is OK."""

    what: str
    severity: Severity
    state: str
    remedy: str = ""


Findings = Iterator[Finding]


def ok(what: str, state: str) -> Finding:
    return Finding(what, Severity.OK, state)


def warning(what: str, state: str, remedy: str) -> Finding:
    return Finding(what, Severity.WARNING, state, remedy)


def bad(what: str, state: str, remedy: str) -> Finding:
    return Finding(what, Severity.BAD, state, remedy)
