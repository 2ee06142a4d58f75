"""Every error that hotspan raises on purpose.

    HotspanError
     +-- ConfigError            what the user wrote can't work; the message says what to write instead
     |    +-- DirectoryError    a disk directory can't be used: full, read-only, in use, made for other chunks
     |    +-- RefusedError      another server's answer is an error
     |    +-- NoAnswerError     another server gave no answer in time
     |    +-- UnsupportedModelError  a model's template or tokenizer is none that the router can do the work of
     +-- EngineError            the engine could not be started or is not what was expected
     +-- KeyUnavailable         an encryption key can't be had: KMS out of reach, wrapped by another KEK, damaged
     +-- FormatterError         a formatter of the user's failed on a request

A miss is a value and not an error (`core.types.Lookup`), and so is a fault of a tier: it becomes a miss in one place,
`cache.tiered`, which counts it.
"""

import difflib
from collections.abc import Iterable

MALFORMED = (KeyError, TypeError, ValueError, OverflowError, RecursionError)
"""What Python raises while it reads values from foreign JSON: `1e999` overflows an int, and deep nesting recurses."""


class HotspanError(Exception):
    """The root: anything hotspan raises on purpose."""


class ConfigError(HotspanError):
    """What the user asked for can't work; the message says what happened, to what, and what to do."""


class UnsupportedModelError(ConfigError):
    """A model's chat template or tokenizer is sound, but not one whose work can be done without the engine."""


class RefusedError(ConfigError):
    """A server's answer is an error. `body`: its JSON; None if it is none. `status`: that of HTTP; 0 if unknown."""

    def __init__(self, message: str, body: object, status: int = 0) -> None:
        super().__init__(message)
        self.body = body
        self.status = status


class NoAnswerError(ConfigError):
    """A server gave no answer in time: it may be busy, and answer the next time."""


class DirectoryError(ConfigError):
    """A disk tier's directory can't be used."""


class EngineError(HotspanError):
    """The engine could not be started, or its interface is not the one hotspan was built for."""


class KeyUnavailable(HotspanError):
    """An encryption key can't be had; what needs it is a miss until it can. The message never holds a secret."""


class FormatterError(HotspanError):
    """A formatter of the user's failed; the message says which, where and why.

    phase: "input" or "output". name: the formatter. status: what the client is answered.
    about: as an HttpError has it: the formatter belongs to one model or adapter, unless its caller is over a limit.
    """

    def __init__(self, message: str, *, phase: str, name: str, status: int = 500, about: str = "model") -> None:
        super().__init__(message)
        self.about = about
        self.phase = phase
        self.name = name
        self.status = status


def did_you_mean(name: str, known: Iterable[str], otherwise: str = "", *, count: int = 1, cutoff: float = 0.6) -> str:
    """A question that names the known names most like `name`, at most `count`; `otherwise` if none is like it."""
    near = difflib.get_close_matches(name, list(dict.fromkeys(known)), count, cutoff)
    return f"did you mean {' or '.join(near)}?" if near else otherwise
