"""Options: each is declared once, as a field of the frozen dataclass that holds its value.

    @dataclass(frozen=True, slots=True, kw_only=True)
    class DaemonOptions:
        port: int = option(9200, "Port to listen on; 0 takes a free one.")

The flag and its help (cli/options.py), the names in files and variables, `hotspan config explain` and the table in
docs/configuration.md follow from the declaration.
"""

from collections.abc import Iterator, Mapping
from dataclasses import Field, dataclass, field, fields, is_dataclass
from enum import StrEnum
from pathlib import Path
from types import UnionType
from typing import Any, Literal, TypeVar, get_args, get_origin

from hotspan.config import kinds
from hotspan.config.kinds import Kind
from hotspan.config.origin import Given, Source, said

T = TypeVar("T")

_KINDS: Mapping[Any, Kind] = {
    bool: kinds.BOOLEAN,
    int: kinds.INTEGER,
    float: kinds.NUMBER,
    str: kinds.TEXT,
    Path: kinds.PATH,
    tuple[str, ...]: kinds.TEXTS,
}
_DECLARED = "option"


@dataclass(frozen=True, slots=True)
class Spelling:
    """Another name of an option: in serving.properties or config.properties, or of a variable.

    kind:  how it is written there, if not as the option itself.
    order: of names that one source has for one option, the lower one counts; equals that differ are an error.
    """

    name: str
    kind: Kind | None = None
    order: int = 0


@dataclass(frozen=True, slots=True)
class Option:
    """One option of a command.

    name:      its flag, without dashes and with underscores; of an engine option, vLLM's name.
    default:   MISSING if it has to be given; None leaves it to vLLM, or off.
    shown:     the default in help and documentation, if it is not shown as it is.
    panel:     its section in the help.
    lmi:       LMI's names in its properties files. OPTION_* and SERVING_* follow from them.
    variables: names of variables that follow from nothing.
    lmcache:   its name in LMCache's configuration, and how it is written there.
    is_own:    it is hotspan's and not vLLM's.
    also:      another flag: the one for false if it is true or false and this has two dashes, else one that means the
               same.
    """

    name: str
    kind: Kind
    help: str
    default: Any = None
    shown: str = ""
    panel: str | None = None
    lmi: tuple[Spelling, ...] = ()
    variables: tuple[Spelling, ...] = ()
    lmcache: Spelling | None = None
    is_own: bool = True
    also: str = ""

    @property
    def flag(self) -> str:
        """Its name on a command line."""
        return "--" + self.name.replace("_", "-")

    def given(
        self, raw: Any, source: Source, written: str, place: str, spelling: Spelling | None = None, text: Any = None
    ) -> Given:
        """A value as somebody wrote it, read. Raises: ConfigError for a value of the wrong type."""
        kind = self.kind if spelling is None or spelling.kind is None else spelling.kind
        value = kind.parse(raw, said(place, written))
        return Given(self.name, value, source, written, place, text, 0 if spelling is None else spelling.order)

    @property
    def spellings(self) -> tuple[Spelling, ...]:
        """All its names in LMI's properties files: `option.` and its own name always is one."""
        plain = Spelling(f"option.{self.name}")
        return self.lmi if plain in self.lmi else (*self.lmi, plain)


def option(default: Any, help: str, **more: Any) -> Any:
    """A dataclass field that is an option.

    more: what else `Option` has; `name` and `kind` follow from the field's name and type if they are not given.
    """
    metadata = {_DECLARED: {"default": default, "help": help, **more}}
    if isinstance(default, Mapping):
        return field(default_factory=lambda: default, metadata=metadata)
    return field(default=default, metadata=metadata)


def json_option(**more: Any) -> Any:
    """The --json of any command: a flag for the result as JSON on stdout, where nothing else is then."""
    return option(False, "Print the result as JSON on stdout, and nothing else there.", **more)


def names(*written: str | Spelling) -> tuple[Spelling, ...]:
    """Other names of an option, those of its own kind as plain text."""
    return tuple(Spelling(name) if isinstance(name, str) else name for name in written)


def options_of(settings: type, prefix: str = "", panel: str | None = None) -> tuple[Option, ...]:
    """The options of a dataclass, and of the dataclasses that are its fields, in the order of the fields.

    prefix: what their names begin with. panel: their section in the help.
    """
    return tuple(
        option
        for each in fields(settings)
        for option in (options_of(_type(each), prefix, panel) if _is_nested(each) else _declared(each, prefix, panel))
    )


def build(settings: type[T], values: Mapping[str, Any], prefix: str = "", **more: Any) -> T:
    """The dataclass with these values, by the names of its options; where there is none, the default stands.

    more:   other fields. Names of options that it does not have are let pass.
    Raises: ConfigError, as the dataclass does, for values that do not fit together.
    """
    for each in fields(settings):  # type: ignore[arg-type]
        if _is_nested(each):
            more.setdefault(each.name, build(_type(each), values, prefix))
        for option in _declared(each, prefix):
            if option.name in values:
                value = values[option.name]
                is_path = option.kind is kinds.PATH and value is not None
                more[each.name] = Path(value).expanduser() if is_path else value
    return settings(**more)


def check(settings: Any, prefix: str = "") -> None:
    """Raise ConfigError for a value that its option's kind refuses, in settings that code made.

    Not for kinds whose values are written in another unit than they are kept in (MEBIBYTES, OCTAL).
    """
    for each in fields(settings):
        for option in _declared(each, prefix):
            value = getattr(settings, each.name)
            if value is not None and value != option.default:
                option.kind.parse(value, option.flag)


def _declared(each: Field[Any], prefix: str, panel: str | None = None) -> Iterator[Option]:
    """The option that a field is, if it is one."""
    if _DECLARED in each.metadata:
        declared: dict[str, Any] = {"kind": _kind(_type(each)), "panel": panel, **each.metadata[_DECLARED]}
        yield Option(**{**declared, "name": prefix + declared.get("name", each.name)})


def _is_nested(each: Field[Any]) -> bool:
    kind = _type(each)
    return is_dataclass(kind) and any(_DECLARED in inner.metadata for inner in fields(kind))


def _type(each: Field[Any]) -> Any:
    """What a field holds if it is not None."""
    if isinstance(each.type, UnionType):
        return next(part for part in get_args(each.type) if part is not type(None))
    return each.type


def _kind(wanted: Any) -> Kind:
    """The kind of values that a type asks for; ANY for a type that has none."""
    if get_origin(wanted) is Literal:
        return kinds.one_of(*get_args(wanted))
    if isinstance(wanted, type) and issubclass(wanted, StrEnum):
        return kinds.one_of(*wanted)
    return _KINDS.get(wanted, kinds.ANY)
