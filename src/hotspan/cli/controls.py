"""`hotspan cache lookup`, `prefetch`, `pin` and `health`: what is cached of a text, and what is to stay."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from hotspan.cli.admin_client import StatsOptions, each_replica, said_by_each
from hotspan.cli.invalidate import listed
from hotspan.cli.options import runs
from hotspan.cli.output import print_json, stdout_console
from hotspan.config.kinds import NOT_NEGATIVE, POSITIVE
from hotspan.config.options import option
from hotspan.core.documents import read_text
from hotspan.core.errors import ConfigError
from hotspan.http.paths import LOOKUP, PIN, PREFETCH

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """A text, or what carries a session's or tags' names."""

    prompt_file: Path | None = option(None, "File with a prompt, tokenized as in /v1/completions.")
    tokens_file: Path | None = option(None, "File with a prompt as a JSON list of token IDs.")
    tag: tuple[str, ...] = option((), "Tag. May be repeated: what is on disk and carries all of them.", also="--tags")
    session: str = option("", "Session ID: what its requests left on disk.")
    tenant: str = option("", "Tenant. Default: the one of requests without an API key.")
    model: str = option("", "Model name of its requests, or an adapter's, with a prompt.")
    cache_salt: str = option("", "With a prompt: `cache_salt` of its requests.")

    def body(self) -> dict[str, Any]:
        """The request, with what is given. Raises: ConfigError for a file that can't be read, or two names."""
        if self.prompt_file is not None and self.tokens_file is not None:
            raise ConfigError("--prompt-file and --tokens-file both name a text: give one of them")
        body: dict[str, Any] = {"tags": list(self.tag), "session": self.session, "tenant": self.tenant}
        body |= {"model": self.model, "cache_salt": self.cache_salt}
        if self.prompt_file is not None:
            body["prompt"] = read_text(self.prompt_file)
        elif self.tokens_file is not None:
            body["prompt"] = listed(self.tokens_file, int, "whole numbers: write [1, 2, 3]")
        return {name: value for name, value in body.items() if value}


@dataclass(frozen=True, slots=True, kw_only=True)
class LookupOptions(StatsOptions):
    """What is looked up, and where."""

    text: Named = field(default_factory=Named)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefetchOptions(LookupOptions):
    """What is brought into RAM, and for how long."""

    hold_s: float = option(30.0, "Seconds for which it is held in RAM for its request, at most 600.", kind=POSITIVE)


@dataclass(frozen=True, slots=True, kw_only=True)
class PinOptions(StatsOptions):
    """What is evicted last."""

    tag: tuple[str, ...] = option((), "Tag. May be repeated: only data with all tags is pinned.", also="--tags")
    gib: float = option(1.0, "At most so many GiB of it in each tier; 0 ends the pin of these tags.", kind=NOT_NEGATIVE)
    hold_s: float = option(3600.0, "For how long, in seconds.", kind=POSITIVE)
    tenant: str = option("", "Tenant. Default: the one of requests without an API key.")


@runs(LookupOptions)
def lookup(options: LookupOptions) -> None:
    """Show how much of a text each tier has, without loading it. The engine's own prefix cache is not asked.

    Chunks count in the fastest tier that has them, as far as all before them are there. Exit status 1 if nothing is.
    """
    answer = options.admin.post(LOOKUP, options.text.body())
    with each_replica(options.admin.address, answer) as told:
        table, is_there = _found(told), any(replica["found"] for _, replica in told)
    if options.json:
        print_json(answer)
    else:
        stdout_console().print(table)
    if not is_there:
        raise typer.Exit(1)


@runs(PrefetchOptions)
def prefetch(options: PrefetchOptions) -> None:
    """Move what disk and L2 have of a text into RAM, before its request."""
    answer = options.admin.post(PREFETCH, options.text.body() | {"hold_s": options.hold_s})
    with each_replica(options.admin.address, answer) as told:
        lines = [_started(name, replica) for name, replica in told]
    if options.json:
        print_json(answer)
        return
    typer.echo("\n".join(lines))


@runs(PinOptions)
def pin(options: PinOptions) -> None:
    """Have what carries some tags evicted last, within the tenant's floor."""
    if not options.tag:
        raise ConfigError("a pin is of tags: give --tag")
    body: dict[str, Any] = {"tags": list(options.tag), "gib": options.gib, "hold_s": options.hold_s}
    answer = options.admin.post(PIN, body | ({"tenant": options.tenant} if options.tenant else {}))
    with each_replica(options.admin.address, answer) as told:
        for _, replica in told:
            float(replica["bytes"]), float(replica["hold_s"])  # an answer without them is that of another program
    if options.json:
        print_json(answer)
    elif options.gib:
        typer.echo(
            f"pinned: {', '.join(options.tag)}, at most {options.gib:g} GiB in each tier, for {options.hold_s:g} s"
        )
    else:
        typer.echo(f"no longer pinned: {', '.join(options.tag)}")


@runs(StatsOptions)
def health(options: StatsOptions) -> None:
    """Show whether each engine core answers and each of its tiers is up. Exit status 1 if a tier is down."""
    answer = options.admin.get("/hotspan/cache")
    with said_by_each(options.admin.address, answer) as servers:
        if not all(said["replicas"] for _, said in servers):
            raise ValueError("a server without an engine core")
        told = [(name, replica) for name, said in servers for replica in said["replicas"]]
        rows = [
            {
                "server": name,
                "replica": replica["replica"],
                "tiers": {
                    tier: "up" if usage.get("is_up", True) else "down" for tier, usage in replica["tiers"].items()
                },
            }
            for name, replica in told
        ]
    if options.json:
        print_json(rows)
    else:
        for row in rows:
            states = ", ".join(f"{tier} {state}" for tier, state in row["tiers"].items())
            typer.echo(f"{row['server']} {row['replica']}: answers; {states}".lstrip())
    if any("down" in row["tiers"].values() for row in rows):
        raise typer.Exit(1)


def _started(name: str, replica: dict[str, Any]) -> str:
    tokens, hold_s = replica["started"]["tokens"], replica["hold_s"]
    return f"{name}: {tokens:,} tokens are moved into RAM, and held there for {hold_s:g} s"


def _found(told: list[tuple[str, dict[str, Any]]]) -> "Table":
    from rich.table import Table

    table = Table("replica", "tier", "chunks", "tokens", "of")
    for name, replica in told:
        asked = replica["asked"]["tokens"]
        for tier, amount in replica["found"].items() or [("none", {"chunks": 0, "tokens": 0})]:
            table.add_row(name, tier, f"{amount['chunks']:,}", f"{amount['tokens']:,}", f"{asked:,}")
    return table
