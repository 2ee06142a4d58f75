"""Types of values: each reads text as well as what YAML gives, and says what it wants."""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hotspan.config.origin import shown
from hotspan.core.errors import ConfigError, did_you_mean
from hotspan.core.system_lines import SystemLines
from hotspan.core.types import MIB

_INTEGER = re.compile(r"[+-]?[0-9]+")
_ADDRESS = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^\s:\[\]/@]+):([0-9]{1,5})")
_TRUTHS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
_DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
_RUNNERS = {
    "auto": "auto",
    **dict.fromkeys(("generate", "text-generation", "chat"), "generate"),
    **dict.fromkeys(
        ("embed", "embedding", "embeddings", "text_embedding", "feature-extraction", "sentence-similarity"), "pooling"
    ),
    **dict.fromkeys(("pooling", "score", "classify", "reward", "text-classification"), "pooling"),
}


class _Wanted(ValueError):
    """What is wrong, where more can be said of what to give."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A type of values.

    read:  the value, from text or from what YAML made of it; ValueError for anything else.
    wants: what to give, for who gave something else.
    is_repeated: its flag may be given several times.
    is_verbatim: blanks around a text belong to it.
    write: a value as it is to be given.
    """

    name: str
    read: Callable[[Any], Any]
    wants: str
    is_repeated: bool = False
    is_verbatim: bool = False
    write: Callable[[Any], str] = str

    def parse(self, raw: Any, where: str) -> Any:
        """The value. Raises: ConfigError that names `where` it stands, what stands there and what would do."""
        try:
            return self.read(raw.strip() if isinstance(raw, str) and not self.is_verbatim else raw)
        except ValueError as error:
            name = where.rpartition(" ")[2]
            wants = str(error) if isinstance(error, _Wanted) else self.wants
            raw = raw[0] if self.is_repeated and isinstance(raw, Sequence) and len(raw) == 1 else raw
            raise ConfigError(f"{where} is {shown(name, repr(raw))}: give {wants}") from None


def _integer(raw: Any) -> int:
    if isinstance(raw, str) and _INTEGER.fullmatch(raw):
        return int(raw)
    if isinstance(raw, float) and raw.is_integer():
        return int(raw)
    if isinstance(raw, bool) or not isinstance(raw, int):
        raise ValueError
    return raw


def _number(raw: Any) -> float:
    if isinstance(raw, bool) or not isinstance(raw, int | float | str):
        raise ValueError
    value = float(raw)  # ValueError for text that is none
    if not math.isfinite(value) or (isinstance(raw, str) and "_" in raw):
        raise ValueError
    return value


def _share(raw: Any) -> float:
    """A share from `5%` or `0.05`."""
    is_percent = isinstance(raw, str) and raw.endswith("%")
    value = _number(raw[:-1].strip()) / 100 if is_percent else _number(raw)
    if not 0 <= value <= 1:
        raise ValueError
    return value


def _boolean(raw: Any) -> bool:
    if isinstance(raw, bool):
        return raw
    value = _TRUTHS.get(str(raw).lower())
    if value is None:
        raise ValueError
    return value


def _text(raw: Any) -> str:
    if isinstance(raw, bool) or not isinstance(raw, str | int | float) or raw == "":
        raise ValueError
    return str(raw)


def _object(raw: Any) -> dict[str, Any]:
    value = json.loads(raw) if isinstance(raw, str) else raw
    if not isinstance(value, Mapping):
        raise ValueError
    return {str(name): inner for name, inner in value.items()}


def _texts(raw: Any) -> tuple[str, ...]:
    texts = [raw] if isinstance(raw, str) else raw
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
        raise ValueError
    return tuple(text.strip() for text in texts)


def _verbatim(raw: Any) -> tuple[str, ...]:
    texts = (raw,) if isinstance(raw, str) else raw
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) and text for text in texts):
        raise ValueError
    return tuple(texts)


def _patterns(raw: Any) -> tuple[str, ...]:
    found = _verbatim(raw)
    try:
        SystemLines(found)
    except ValueError as error:
        raise _Wanted(str(error)) from error
    return found


def _pairs(raw: Any) -> dict[str, str]:
    if isinstance(raw, Mapping):
        return {str(name): str(value).lower() if isinstance(value, bool) else str(value) for name, value in raw.items()}
    words = raw.split(",") if isinstance(raw, str) else raw
    if not isinstance(words, Sequence) or not all(isinstance(word, str) for word in words):
        raise ValueError
    pairs = [word.partition("=") for word in words]
    if not all(name.strip() and equals for name, equals, _ in pairs):
        raise ValueError
    return {name.strip(): value.strip() for name, _, value in pairs}


def _first_number(raw: Any) -> float:
    if isinstance(raw, str):
        raw = raw.strip("[] ").split(",")
    return _number((raw[0].strip() if isinstance(raw[0], str) else raw[0]) if isinstance(raw, list) and raw else raw)


def _listing(raw: Any) -> str:
    """As vLLM takes lists of text: JSON in one word."""
    if isinstance(raw, str):
        raw = json.loads(raw) if raw.startswith("[") else [part.strip() for part in raw.split(",") if part.strip()]
    if not isinstance(raw, list) or not raw or not all(isinstance(each, str) for each in raw):
        raise ValueError
    return json.dumps(raw)


def _any(raw: Any) -> Any:
    """As vLLM is to get it: what looks like a truth is one."""
    if isinstance(raw, str):
        return {"true": True, "false": False}.get(raw.lower(), raw)
    if raw == []:
        raise ValueError
    return raw


def _at_least(least: float, read: Callable[[Any], Any], *, is_above: bool = False) -> Callable[[Any], Any]:
    """Reads numbers that are not below `least`; with `is_above`, not `least` itself."""

    def bounded(raw: Any) -> Any:
        value = read(raw)
        if value < least or (is_above and value == least):
            raise ValueError
        return value

    return bounded


_count = _at_least(1, _integer)
_positive = _at_least(0, _number, is_above=True)


def _degree(raw: Any) -> int | str:
    value: int | str = "max" if str(raw).lower() == "max" else _count(raw)
    return value


def _gib(raw: Any) -> float:
    match = re.fullmatch(r"([0-9.]+) *([kmgt]i?b?)", raw, re.IGNORECASE) if isinstance(raw, str) else None
    if match is not None:
        factor = {"k": 2**-20, "m": 2**-10, "g": 1.0, "t": 1024.0}[match[2][0].lower()]
        raise _Wanted(f"GiB as a plain number, without a unit: {float(match[1]) * factor:g}")
    return _number(raw)


def _known(names: Mapping[str, str]) -> Callable[[Any], str]:
    def read(raw: Any) -> str:
        value = names.get(str(raw).lower())
        if value is None:
            raise ValueError
        return value

    return read


def several(kind: Kind) -> Kind:
    """One or more such values."""

    def read(raw: Any) -> tuple[Any, ...]:
        return tuple(kind.read(each) for each in (raw if isinstance(raw, list | tuple) else [raw]))

    return Kind(kind.name, read, kind.wants, is_repeated=True)


def between(least: float, most: float, read: Callable[[Any], Any] = _integer) -> Kind:
    """A number of this range, which is whole if nothing else is said."""

    def bounded(raw: Any) -> Any:
        value = read(raw)
        if not least <= value <= most:
            raise ValueError
        return value

    what = "whole number" if read is _integer else "number"
    return Kind("integer" if read is _integer else "number", bounded, f"a {what} from {least:g} to {most:g}")


def one_of(*names: str) -> Kind:
    """One of these words, in any case; the first is the default."""
    wants = " or ".join((", ".join((f"{names[0]} (the default)", *names[1:-1])), names[-1]))

    def read(raw: Any) -> str:
        name = str(raw).lower()
        if name not in names and (hint := did_you_mean(name, names)):
            raise _Wanted(f"{wants}: {hint}")
        return names[names.index(name)]  # ValueError if there is none

    return Kind(" or ".join(names) if len(names) < 3 else "name", read, wants)


def _address(raw: Any) -> str:
    found = _ADDRESS.fullmatch(_text(raw))
    if found is None or not 0 < int(found[2]) < 1 << 16:
        raise ValueError
    return found[0]


INTEGER = Kind("integer", _integer, "a whole number")
COUNT = Kind("count", _count, "a whole number above 0")
NATURAL = Kind("count", _at_least(0, _integer), "a whole number, 0 or more")
NOT_NEGATIVE = Kind("number", _at_least(0, _number), "a number, 0 or more")
POSITIVE = Kind("number", _positive, "a number above 0")
NUMBER = Kind("number", _number, "a number")
SHARE = Kind(
    "share", _share, "a share, such as 5% or 0.05", write=lambda value: f"{value:.4%}".rstrip("0%").rstrip(".") + "%"
)
FRACTION = between(0, 1, _number)
GIB = Kind("GiB", _gib, "GiB as a plain number, such as 5.0")
SECONDS = Kind("seconds", _positive, "seconds, above 0")
BOOLEAN = Kind("true or false", _boolean, "true or false")
BLENDING = Kind("true or false", lambda raw: "deviation" if _boolean(raw) else "off", "true or false")
FIRST_NUMBER = Kind("numbers", _first_number, "a number, or a list of numbers, of which the first one is taken")
FIRST_INTEGER = Kind(
    "numbers",
    lambda raw: _integer(int(_first_number(raw)) if _first_number(raw).is_integer() else raw),
    "a whole number, or a list of them, of which the first one is taken",
)
INVERTED = Kind("true or false, inverted", lambda raw: not _boolean(raw), "true or false")
ADDRESS = Kind("HOST:PORT", _address, "HOST:PORT, such as 127.0.0.1:8081 or [::1]:8081")
TEXT = Kind("text", _text, "text (in YAML, quote what looks like something else)")
PATH = Kind("path", lambda raw: _text(str(raw) if isinstance(raw, Path) else raw), "a path")
JSON = Kind("JSON object", _object, 'a JSON object, such as {"name": "value"}')
TEXTS = Kind("text", _texts, "a text, or a list of texts", is_repeated=True)
VERBATIM = Kind("text", _verbatim, "a text, or a list of texts", is_repeated=True, is_verbatim=True)
PATTERNS = Kind(
    "regular expression", _patterns, "a regular expression, or a list of them", is_repeated=True, is_verbatim=True
)
PAIRS = Kind("NAME=VALUE", _pairs, "NAME=VALUE, with commas between several", is_repeated=True)
LISTING = Kind("list of text", _listing, "texts, with commas between several")
ANY = Kind("as vLLM takes it", _any, "a value")
DEGREE = Kind("count or max", _degree, "a whole number above 0, or max")
MEBIBYTES = Kind(
    "MiB", lambda raw: _count(raw) * MIB, "a whole number of MiB above 0", write=lambda size: str(size // MIB)
)
DTYPE = Kind("dtype", lambda raw: _DTYPES.get(_text(raw).lower(), _text(raw)), "a dtype such as bf16 or float16")
TASK = Kind("task", _known(_RUNNERS), f"one of {', '.join(_RUNNERS)}")
NORMALIZE = Kind("true or false", lambda raw: {"use_activation": _boolean(raw)}, "true or false")
OCTAL = Kind(
    "octal", lambda raw: int(_text(raw), 8), "an octal number like 600 or 660", write=lambda value: f"{value:o}"
)
