"""`hotspan config`: what `hotspan serve` would do with the same words, and where each value comes from."""

from dataclasses import Field
from typing import Any

import typer

from hotspan.cli.flags import ENGINE_OPTIONS, Model, load, show_warnings
from hotspan.cli.options import built, takes
from hotspan.cli.output import Printing, explained, print_json
from hotspan.config.keys import FLAGS, KEYS
from hotspan.config.options import Option, options_of
from hotspan.config.origin import Given, Setting, Source, shown
from hotspan.l2.options import STORE_OPTIONS
from hotspan.l2.options import options_of as store_options

config = typer.Typer(help="Show and validate a configuration.", no_args_is_help=True)


@config.command("explain", context_settings=ENGINE_OPTIONS)
@takes((*FLAGS, *options_of(Printing)))
def explain(context: typer.Context, model: Model = None, **_flags: Any) -> None:
    """Show every value, its origin and what it overrides, for the given options of `hotspan serve`.

    Engine options are shown as written; `hotspan config check` validates them.
    """
    with explained():
        configuration = load(context, model)
    # What somebody wrote comes first.
    settings = sorted(configuration.settings.items(), key=lambda pair: (_is_default(pair[1]), pair[0]))
    if built(Printing, context).json:
        notes = [
            {"where": note.where, "text": note.text, "is_warning": note.is_warning} for note in configuration.notes
        ]
        rows = [{"key": name, **_row(setting)} for name, setting in settings]
        print_json({"settings": rows, "notes": notes})
        return
    for name, setting in settings:
        is_open = name == "ram_gib" and configuration.extent is not None and _is_default(setting)
        typer.echo("ram_gib = chosen at the start  (default)" if is_open else "\n".join(_lines(name, setting)))
    if configuration.cache is not None and not configuration.cache.ram_bytes:
        typer.echo("note: the tiers that nobody named are chosen at the start: `hotspan plan MODEL` shows which")
    for note in configuration.notes:
        typer.echo(f"{'warning' if note.is_warning else 'note'}: {note}")


@config.command("check", context_settings=ENGINE_OPTIONS)
@takes(FLAGS)
def check(context: typer.Context, model: Model = None, **_flags: Any) -> None:
    """Validate the options of `hotspan serve` and the files they name, without starting. Exit status 2: invalid.

    All values that are wrong by themselves are named at once, then the first that do not go together. Values that do
    not act are named on stderr. The free space of disks and memory is not checked, and model.py is not executed.
    """
    with explained():
        from hotspan.cli.checking import checked

        configuration = checked(context, model)
    show_warnings(configuration)
    if configuration.cache is not None and configuration.cache.blend is not None:
        typer.echo("note: with --blend, answers to prompts with reused text are approximate (docs/blending.md)")
    written = sum(not _is_default(setting) for setting in configuration.settings.values())
    typer.echo(f"the configuration is sound: {configuration.model}, {written} values given")


@config.command("keys")
def keys() -> None:
    """Print every key with its names in each format, and every option of an L2, as Markdown tables."""
    typer.echo(f"{key_table()}\n\n{store_table()}")


def key_table() -> str:
    """Every key with its names in each format, in Markdown."""
    head = "| flag or YAML key | default | type | in properties files | variables | LMCache | meaning |"
    return "\n".join([head, "|---|---|---|---|---|---|---|", *(_key_row(key) for key in KEYS)])


def store_table() -> str:
    """Every NAME of --l2-option that hotspan knows, by the kind of L2, in Markdown."""
    rows = [_store_row(kind, option) for kind, options in STORE_OPTIONS.items() for option in store_options(options)]
    return "\n".join(["| L2 | NAME of `--l2-option` | default | meaning |", "|---|---|---|---|", *rows])


def _store_row(kind: str, option: Field[Any]) -> str:
    default = "" if option.default is None else str(option.default).lower()
    return f"| {kind} | `{option.name}` | {default} | {option.metadata['help']} |"


def _key_row(option: Option) -> str:
    name = "MODEL, `model`" if option.name == "model" else f"`{option.flag}`"
    default = option.shown or ("" if option.default is None else str(option.default).lower())
    lmi = ", ".join(f"`{spelling.name}`" for spelling in option.lmi or option.spellings)
    variables = [f"`{spelling.name}`" for spelling in option.variables]
    if option.is_own:
        variables.insert(0, f"`HOTSPAN_{option.name.upper()}`")
    lmcache = f"`{option.lmcache.name}`" if option.lmcache else ""
    return f"| {name} | {default} | {option.kind.name} | {lmi} | {', '.join(variables)} | {lmcache} | {option.help} |"


def _is_default(setting: Setting) -> bool:
    return setting.source is Source.DEFAULT


def _lines(name: str, setting: Setting) -> list[str]:
    first = f"{name} = {shown(name, setting.value)}"
    if _is_default(setting) and not setting.overridden:
        return [f"{first}  (default)"]
    over = [f"    over {shown(name, given.value)} from {given.origin}" for given in setting.overridden]
    return [first, f"    from {setting.given.origin}", *over]


def _row(setting: Setting) -> dict[str, Any]:
    return _said(setting.given) | {"overrode": [_said(given) for given in setting.overridden]}


def _said(given: Given) -> dict[str, Any]:
    value = given.value if isinstance(given.value, bool | int | float | None) else shown(given.key, given.value)
    return {"value": value, "origin": given.origin, "source": given.source.name.lower()}
