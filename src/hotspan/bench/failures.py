"""The first of what failed, in words."""

from collections.abc import Iterable

from hotspan.bench.records import RoundResult


def failures(rounds: Iterable[RoundResult], limit: int = 5) -> list[str]:
    """One line for each of the first failed requests."""
    lines = [f"{record.request_id}: {record.error}" for r in rounds for record in r.records if not record.successful]
    return first_lines(lines, limit)


def first_lines(lines: list[str], limit: int) -> list[str]:
    """The first of some lines, and how many there are more."""
    return lines[:limit] + ([f"... and {len(lines) - limit} more"] if len(lines) > limit else [])
