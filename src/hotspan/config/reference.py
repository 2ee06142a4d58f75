"""The table of keys as the documentation has it."""

from hotspan.config.keys import KEYS, Key


def key_table() -> str:
    """Every key with its names in each format, in Markdown."""
    head = "| flag or YAML key | default | type | in properties files | variables | LMCache | meaning |"
    return "\n".join([head, "|---|---|---|---|---|---|---|", *(_row(key) for key in KEYS)])


def _row(key: Key) -> str:
    name = "MODEL, `model`" if key.name == "model" else f"`{key.flag}`"
    default = "" if key.default is None else str(key.default).lower()
    lmi = ", ".join(f"`{spelling.name}`" for spelling in key.lmi or key.spellings)
    variables = [f"`{spelling.name}`" for spelling in key.variables]
    if key.is_own:
        variables.insert(0, f"`HOTSPAN_{key.name.upper()}`")
    lmcache = f"`{key.lmcache.name}`" if key.lmcache else ""
    return f"| {name} | {default} | {key.kind.name} | {lmi} | {', '.join(variables)} | {lmcache} | {key.meaning} |"
