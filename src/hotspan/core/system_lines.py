"""Lines of system prompts that change in each request, such as a date or an id: dropped, or moved to the end.

A line in front that changes makes all that follows another text, of which nothing is a hit. Which lines these are only
who runs the server can know: patterns are of Python's `re`, and match the beginning of a line.

The lines are clients', so that the work is bounded: a pattern that can match a line in very many ways is refused, lines
longer than `MAX_LINE` are left as they are, and so is what comes after `MAX_STEPS` ways were to be tried in one prompt.
"""

import re
import re._constants as ops  # type: ignore[import-not-found]
import re._parser as parser  # type: ignore[import-not-found]
from collections.abc import Iterable, Sequence
from typing import Any, Final

MAX_LINE: Final = 200
"""Characters of a line that is looked at."""

MAX_PATTERN: Final = 200
MAX_PATTERNS: Final = 8
MAX_WAYS: Final = (MAX_LINE + 1) ** 2
"""Ways in which a pattern may match one line: two repetitions without an end, such as `.*`, are as many."""

MAX_STEPS: Final = 2_000_000

_LEAVES: Final = (ops.LITERAL, ops.NOT_LITERAL, ops.ANY, ops.IN, ops.AT)
_REPEATS: Final = (ops.MAX_REPEAT, ops.MIN_REPEAT)


class SystemLines:
    """Which lines go, and which are moved to the end of their text.

    dropped, moved: how many were, so far.
    Raises: ValueError that says what would do, for a pattern that is none or could take long.
    """

    def __init__(self, drop: Sequence[str] = (), move: Sequence[str] = ()) -> None:
        self._drop = [_compiled(each) for each in drop]
        self._move = [_compiled(each) for each in move]
        if len(drop) > MAX_PATTERNS or len(move) > MAX_PATTERNS:
            raise ValueError(f"at most {MAX_PATTERNS} patterns")
        self._ways = sum(ways for _, ways in (*self._drop, *self._move))
        self.dropped = self.moved = 0

    def __bool__(self) -> bool:
        """Whether there are any patterns."""
        return bool(self._ways)

    def applied(self, texts: Sequence[str]) -> list[str]:
        """The texts of one system prompt as the model is to read them; what is moved is at the end of the last."""
        moved, steps, shown = list[str](), 0, list[str]()
        for text in texts:
            kept = list[str]()
            for line in text.splitlines(keepends=True):
                steps += self._ways
                if len(line) > MAX_LINE or steps > MAX_STEPS:
                    kept.append(line)
                elif _matches(self._drop, line):
                    self.dropped += 1
                elif _matches(self._move, line):
                    moved.append(line.rstrip("\r\n"))
                else:
                    kept.append(line)
            shown.append("".join(kept))
        if moved:
            self.moved += len(moved)
            last = shown[-1]
            shown[-1] = last + ("\n" if last and not last.endswith("\n") else "") + "\n".join(moved)
        return shown


def _matches(patterns: Iterable[tuple[re.Pattern[str], int]], line: str) -> bool:
    return any(pattern.match(line) for pattern, _ in patterns)


def _compiled(pattern: str) -> tuple[re.Pattern[str], int]:
    """A pattern, and in how many ways it can match a line at most."""
    if not pattern or len(pattern) > MAX_PATTERN:
        raise ValueError(f"patterns of 1 to {MAX_PATTERN} characters")
    try:
        compiled = re.compile(pattern)
        ways = _ways(parser.parse(pattern))
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"a regular expression ({error})") from error
    if ways > MAX_WAYS:
        raise ValueError(
            "a pattern that can match a line in few ways: with at most two repetitions without an end, such as .*, and "
            "none inside another"
        )
    return compiled, ways


def _ways(items: Iterable[tuple[Any, Any]]) -> int:
    """In how many ways a pattern can match a line: more than MAX_WAYS is not counted further."""
    found = 1
    for op, of in items:
        found *= _ways_of(op, of)
        if found > MAX_WAYS:
            break
    return found


def _ways_of(op: Any, of: Any) -> int:
    if op in _LEAVES:
        return 1
    if op is ops.SUBPATTERN:
        return _ways(of[-1])
    if op is ops.BRANCH:
        return sum(map(_ways, of[1]))
    if op in _REPEATS:
        least, most = min(int(of[0]), MAX_LINE), min(int(of[1]), MAX_LINE)
        inner = _ways(of[2])
        if inner > 1 or _varies(of[2]):
            return MAX_WAYS + 1 if most > 1 else 1 + inner
        return most - least + 1
    return MAX_WAYS + 1  # back references, looks ahead and behind: not counted


def _varies(items: Iterable[tuple[Any, Any]]) -> bool:
    """Whether a repetition is inside: of what has an end alone, the ways are counted."""
    return any(op in _REPEATS for op, _ in items)
