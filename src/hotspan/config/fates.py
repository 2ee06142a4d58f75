"""What becomes of a name that another program's users have written: it acts, or it is noted, or it is refused.

A name acts if it is a key (keys.py). All others are declared with a `Foreign`; nothing that is accepted is dropped
without a word at the start.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from hotspan.config.kinds import Kind
from hotspan.config.origin import Note, shown
from hotspan.core.errors import ConfigError

_NOTHING = frozenset({"", "none", "null", "false", "[]", "{}"})


class Fate(Enum):
    """What becomes of a name. ACTS: it changes the configuration."""

    ACTS = "acts"
    NOTED = "noted"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Foreign:
    """A name that is accepted and sets nothing.

    instead: what happens instead; of one that is refused, what to do.
    as_is:   values, in lower case, that ask for what happens anyway: nothing is said of them at the start. What turns
             something off that hotspan has not (false, none, or no value) is such a value of every name, unless
             `has_off` says that hotspan always has it.
    """

    kind: Kind
    instead: str
    fate: Fate = Fate.NOTED
    as_is: frozenset[str] = frozenset()
    has_off: bool = True

    def settle(self, name: str, raw: Any, where: str) -> Note:
        """What there is to say of this value.

        Raises: ConfigError for a value of the wrong type, or one that is refused.
        """
        value = None if raw is None else self.kind.parse(raw, where)
        text = str(value).strip().lower()
        is_asked = text not in self.as_is and not (self.has_off and text in _NOTHING)
        if is_asked and self.fate is Fate.REFUSED:
            raise ConfigError(f"{where} is {shown(name, value)}, which hotspan does not do: {self.instead}")
        return Note(where, self.instead, is_warning=is_asked)


def foreign(
    kind: Kind, instead: str, names: str, as_is: str = "", *, fate: Fate = Fate.NOTED, has_off: bool = True
) -> Mapping[str, Foreign]:
    """One declaration for several names; `names` and `as_is` are separated by blanks."""
    declared = Foreign(kind, instead, fate, frozenset(as_is.split()), has_off)
    return dict.fromkeys(names.split(), declared)


def table(*parts: Mapping[str, Foreign]) -> Mapping[str, Foreign]:
    """All declarations; a name that is declared twice is an error of whoever wrote them."""
    whole: dict[str, Foreign] = {}
    for part in parts:
        if twice := whole.keys() & part.keys():
            raise ValueError(f"declared twice: {', '.join(sorted(twice))}")
        whole.update(part)
    return whole
