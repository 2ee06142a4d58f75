"""Java's properties files: serving.properties and config.properties."""

import re
from pathlib import Path

from hotspan.config.origin import Entry
from hotspan.core.documents import read_text
from hotspan.core.errors import ConfigError

_BLANK = " \t\f"
_LINE_END = re.compile(r"\r\n|\n|\r")
_ESCAPES = {"t": "\t", "n": "\n", "r": "\r", "f": "\f"}
_HEX = re.compile(r"[0-9a-fA-F]{4}")


def read_properties(path: Path) -> tuple[Entry, ...]:
    """The entries of a file in its order.

    Raises: ConfigError if it can't be read, is no UTF-8 text or has a broken escape.
    """
    text = read_text(path, remedy="write other letters as \\uXXXX, or give another file")
    return parse_properties(text.removeprefix("\ufeff"), str(path))


def parse_properties(text: str, place: str) -> tuple[Entry, ...]:
    """The entries of a text; `place` names it in errors.

    A line ends an entry unless an odd number of backslashes is before its end. `#` and `!` begin comments. The name
    ends at the first `=`, `:` or blank that no backslash is before.
    """
    found: list[Entry] = []
    logical, began = "", 0
    for number, line in enumerate(_LINE_END.split(text), 1):
        line = line.lstrip(_BLANK)
        if not logical and (not line or line[0] in "#!"):
            continue
        began = began or number
        logical += line
        if (len(logical) - len(logical.rstrip("\\"))) % 2:
            logical = logical[:-1]
            continue
        found.append(_entry(logical, began, place))
        logical, began = "", 0
    if logical:
        found.append(_entry(logical, began, place))
    return tuple(found)


def _entry(line: str, number: int, place: str) -> Entry:
    end = 0
    while end < len(line) and line[end] not in "=:" + _BLANK:
        end += 2 if line[end] == "\\" else 1
    rest = line[end:].lstrip(_BLANK)
    if rest[:1] in ("=", ":"):
        rest = rest[1:].lstrip(_BLANK)
    where = f"{place}:{number}"
    return Entry(_unescaped(line[:end], where), _unescaped(rest, where), where)


def _unescaped(text: str, where: str) -> str:
    parts, at = [], 0
    while (slash := text.find("\\", at)) >= 0:
        parts.append(text[at:slash])
        letter, at = text[slash + 1 : slash + 2], slash + 2
        if letter == "u":
            digits = _HEX.match(text, at)
            if digits is None:
                raise ConfigError(
                    f"{where}: \\u needs four hexadecimal digits, as in \\u00e9 (a backslash itself is \\\\)"
                )
            parts.append(chr(int(digits[0], 16)))
            at += 4
        else:
            parts.append(_ESCAPES.get(letter, letter))
    parts.append(text[at:])
    # Java writes what is beyond its 16-bit characters as two escapes.
    return "".join(parts).encode("utf-16", "surrogatepass").decode("utf-16", "replace")
