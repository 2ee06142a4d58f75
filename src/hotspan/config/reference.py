"""The tables of keys and of an L2's options as the documentation has them."""

from hotspan.config.keys import KEYS
from hotspan.config.options import Option
from hotspan.l2.options import STORE_OPTIONS, StoreOption


def key_table() -> str:
    """Every key with its names in each format, in Markdown."""
    head = "| flag or YAML key | default | type | in properties files | variables | LMCache | meaning |"
    return "\n".join([head, "|---|---|---|---|---|---|---|", *(_row(key) for key in KEYS)])


def store_table() -> str:
    """Every NAME of --l2-option that hotspan knows, by the kind of L2, in Markdown."""
    rows = [_store_row(kind, option) for kind, options in STORE_OPTIONS.items() for option in options]
    return "\n".join(["| L2 | NAME of `--l2-option` | default | meaning |", "|---|---|---|---|", *rows])


def _store_row(kind: str, option: StoreOption) -> str:
    default = "" if option.default is None else str(option.default).lower()
    return f"| {kind} | `{option.name}` | {default} | {option.meaning} |"


def _row(key: Option) -> str:
    name = "MODEL, `model`" if key.name == "model" else f"`{key.flag}`"
    default = key.shown or ("" if key.default is None else str(key.default).lower())
    lmi = ", ".join(f"`{spelling.name}`" for spelling in key.lmi or key.spellings)
    variables = [f"`{spelling.name}`" for spelling in key.variables]
    if key.is_own:
        variables.insert(0, f"`HOTSPAN_{key.name.upper()}`")
    lmcache = f"`{key.lmcache.name}`" if key.lmcache else ""
    return f"| {name} | {default} | {key.kind.name} | {lmi} | {', '.join(variables)} | {lmcache} | {key.help} |"
