"""`hotspan cache`: look at a running server's cache, verify it, forget parts of it; remove a directory."""

from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hotspan.cli.admin_client import StatsOptions, each_replica, reading
from hotspan.cli.controls import health, lookup, pin, prefetch
from hotspan.cli.invalidate import invalidate, show_receipts
from hotspan.cli.options import runs
from hotspan.cli.output import confirm, print_json, stdout_console
from hotspan.config.control import SCHEME
from hotspan.config.environment import environment
from hotspan.config.options import option
from hotspan.core.documents import read_text
from hotspan.core.errors import ConfigError
from hotspan.core.types import GIB

if TYPE_CHECKING:
    from rich.table import Table

    from hotspan.http.warming import Room, Warmed

cache = typer.Typer(help="Show, verify, warm, pin, invalidate and remove cached data.", no_args_is_help=True)
cache.command("invalidate")(invalidate)
cache.command("lookup")(lookup)
cache.command("prefetch")(prefetch)
cache.command("pin")(pin)
cache.command("health")(health)

_CHECK_S = 24 * 3600.0
_WARM_S = 3600.0
_YES = "Do not ask for confirmation."


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckOptions(StatsOptions):
    """What to check."""

    disk: Path | None = option(
        None, "Directory of a disk tier to check, instead of a server. No server may use it at the same time."
    )
    kek: str = option("", "With --disk: key-encryption key of --key-store.")
    key_store: Path | None = option(None, "With --disk: directory of the key store.")

    def __post_init__(self) -> None:
        if self.disk is None and (self.kek or self.key_store is not None):
            raise ConfigError("--kek and --key-store go with --disk: a running server has its own")
        if bool(self.kek) != (self.key_store is not None):
            raise ConfigError("--kek and --key-store go together: give both for an encrypted directory")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClearOptions(StatsOptions):
    """What to clear."""

    yes: bool = option(False, _YES)


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoveOptions:
    """How to remove a directory."""

    yes: bool = option(False, _YES)


@cache.command("stats")
@runs(StatsOptions)
def stats(options: StatsOptions) -> None:
    """Show the content of each tier, by tenant."""
    answer = options.admin.get("/hotspan/cache")
    with each_replica(options.admin.address, answer) as told:
        shown = [(f"{name}: {_kind(replica)}", _usage(replica["tiers"])) for name, replica in told]
    if options.json:
        print_json(answer)
        return
    for title, table in shown:
        _show(title, table)


@cache.command("check")
@runs(CheckOptions)
def check(options: CheckOptions) -> None:
    """Read and verify all data on disk. Corrupt data is quarantined and never used. Exit status 1 if any was found."""
    from hotspan.core.progress import Progress

    if options.disk is not None:
        tiers = {"disk": _check_offline(options.disk, options.kek, options.key_store)}
        answer: dict[str, Any] = {"replicas": [{"replica": str(options.disk), "tiers": tiers}]}
    else:
        with Progress(f"checking what {options.admin.address} has on disk"):
            answer = options.admin.post("/hotspan/cache/check", {}, _CHECK_S)
    with each_replica("" if options.disk is not None else options.admin.address, answer) as checked:
        shown = [(name, _findings(replica["tiers"])) for name, replica in checked]
        is_corrupt = any(tier["corrupt"] for _, replica in checked for tier in replica["tiers"].values())
    if options.json:
        print_json(answer)
    for title, table in () if options.json else shown:
        _show(title, table)
    if is_corrupt:
        raise typer.Exit(1)


@cache.command("clear")
@runs(ClearOptions)
def clear(options: ClearOptions) -> None:
    """Remove the cached data of all tenants from all tiers."""
    confirm(f"Forget all that {options.admin.address} has cached, of everybody?", "clearing the cache", yes=options.yes)
    show_receipts(options, options.admin.post("/hotspan/cache/clear", {}))


@cache.command("remove")
@runs(RemoveOptions)
def remove(
    options: RemoveOptions,
    directory: Annotated[Path, typer.Argument(help="Directory of a disk tier, as given with --disk.")],
) -> None:
    """Remove the directory of a disk tier. No server may use it. Only hotspan's files are removed."""
    from hotspan.tiers.directory import remove_directory

    confirm(f"Remove {directory} with all the KV in it?", "removing a directory", yes=options.yes)
    freed = remove_directory(directory.expanduser())
    typer.echo(f"removed {directory}: {freed / GIB:.2f} GiB freed")


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmOptions(StatsOptions):
    """What every text's request has, and when it is sent."""

    model: str = option("", "Model name of the requests, or an adapter's. Default: the first one of /v1/models.")
    template: Path | None = option(
        None,
        "File with the template of prompts of /v1/completions: {document} stands for the text; what comes from "
        "{question} on is left out. For chats give `messages` in a .jsonl file.",
    )
    tag: tuple[str, ...] = option(
        (), "Tag of all texts, beside the name of their file. May be repeated.", also="--tags"
    )
    ttl: str = option("", "Time to live, such as 12h or 7d. Default: until it is evicted, or by a retention rule.")
    api_key: str = option("", "API key of the tenant. Default: OPENAI_API_KEY, else the admin token.")
    wait_for_idle: bool = option(
        True,
        "Send each text when the server has no other request, as its metrics show (for the administrator).",
        also="--no-wait-for-idle",
    )
    priority: int | None = option(
        None, "Priority of the requests, for a server with --scheduling-policy priority; higher is later."
    )

    def common(self) -> dict[str, Any]:
        """The fields of every request but its model."""
        common: dict[str, Any] = {"max_tokens": 1, "temperature": 0}
        common |= {} if self.priority is None else {"priority": self.priority}
        return common | ({"kv_transfer_params": {"ttl": self.ttl}} if self.ttl else {})


@cache.command("warm")
@runs(WarmOptions)
def warm(
    options: WarmOptions,
    paths: Annotated[
        list[Path], typer.Argument(help="Files and directories with documents. A .jsonl file has a text per line.")
    ],
) -> None:
    """Compute documents or prompts on a running server while it is idle, so that their first question is a hit.

    Running it again resumes it: what is cached already is only looked up. Exit status 1 if a text was refused.
    """
    import asyncio

    from hotspan.core.progress import Progress
    from hotspan.http import warming

    texts = warming.warmups(paths, None if options.template is None else read_text(options.template), options.tag)
    admin = options.admin
    if admin.address.startswith(SCHEME):
        raise ConfigError("an engine's own socket takes no texts: give --server URL of the vLLM server before it")
    key = options.api_key or environment().get("OPENAI_API_KEY", "")
    client = replace(admin, server=admin.address, token=key) if key else admin
    page = (lambda: admin.text("/metrics")) if options.wait_for_idle else None

    async def post(path: str, body: dict[str, Any]) -> Any:
        return client.post(path, body, _WARM_S)

    models: Any = None if options.model else client.get("/v1/models")
    with reading(admin.address):
        common = options.common() | {"model": options.model or models["data"][0]["id"]}
    with Progress(f"warming {admin.address}", len(texts), "texts") as progress:
        done = warming.Warmed()
        with reading(admin.address):
            asyncio.run(warming.warm(texts, warming.Server(post, page), common, done, advance=progress.advance))
    try:
        room = warming.room_of(admin.text("/metrics"))
    except ConfigError:  # they are the administrator's
        room = warming.Room()
    _show_warmed(done, room, options)
    if done.failed:
        raise typer.Exit(1)


def _show_warmed(done: "Warmed", room: "Room", options: WarmOptions) -> None:
    size, lives = done.tokens * room.token_bytes, f"for {options.ttl} at most" if options.ttl else "until evicted"
    if options.json:
        print_json(asdict(done) | {"bytes": round(size) if room.token_bytes else None, "lives": lives})
        return
    for failure in done.failed:
        typer.secho(f"not warmed: {failure}", fg="yellow")
    shown = (
        f"{size / GIB:.3f} GiB of KV in each tier" if room.token_bytes else "size unknown: /metrics does not show it"
    )
    computed = done.tokens - done.cached
    typer.echo(
        f"{done.texts} texts, {done.tokens:,} tokens: {computed:,} computed, {done.cached:,} cached before; "
        f"{shown}; kept {lives}; a retention rule may shorten that"
    )
    if size > room.capacity_bytes > 0:
        typer.secho(f"the largest tier has {room.capacity_bytes / GIB:.3f} GiB: some are evicted again", fg="yellow")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainOptions(StatsOptions):
    """Whose requests."""

    tenant: str = option("", "Tenant. Default: all tenants.")


@cache.command("explain")
@runs(ExplainOptions)
def explain(
    options: ExplainOptions,
    request: Annotated[
        str, typer.Argument(help="ID of an answer, or X-Request-Id of its request. Default: the last requests.")
    ] = "",
) -> None:
    """Show why a request was not a hit: how far it agreed with an earlier one, and why the rest was computed."""
    from hotspan.cli.explain import explained, shown

    body = {name: value for name, value in (("request", request), ("tenant", options.tenant)) if value}
    answer = options.admin.post("/hotspan/cache/explain", body)
    with each_replica(options.admin.address, answer) as told:
        found = explained([replica for _, replica in told])
        said = "\n\n".join(map(shown, found))
    if options.json:
        print_json(found)
    elif not found:
        typer.echo(
            "no such request is known: those of each tenant's last ones that began to run are (--explain-requests)"
        )
    else:
        typer.echo(said)
    if request and not found:
        raise typer.Exit(1)


def _check_offline(disk: Path, kek: str, key_store: Path | None) -> dict[str, Any]:
    from hotspan.keyring.keyring import open_keyring
    from hotspan.keyring.store import KeyStore
    from hotspan.tiers.check import check_offline

    if key_store is None:
        return check_offline(disk, None)
    with ExitStack() as stack:
        keyring = stack.enter_context(open_keyring(key_store, kek, environment()))
        with KeyStore(key_store) as store:
            tenants = store.tenants()
        late = keyring.prepare(tenants, 30.0)
        if late:
            raise ConfigError(f"the keys of {', '.join(late)} can't be had: see to the key-encryption key, then again")
        return check_offline(disk, keyring)


def _kind(replica: dict[str, Any]) -> str:
    encrypted = "encrypted" if replica["is_encrypted"] else "not encrypted"
    return encrypted + (f", chunks of {replica['chunk_tokens']} tokens" if "chunk_tokens" in replica else "")


def _usage(tiers: dict[str, Any]) -> "Table":
    from rich.table import Table

    table = Table("tier", "chunks", "of", "GiB", "of", "by tenant", "state")
    for name, tier in tiers.items():
        owners = ", ".join(f"{tenant} {chunks:,}" for tenant, chunks in sorted(tier["tenants"].items()))
        counts = (_count(tier, part) for part in ("chunks", "capacity_chunks"))
        sizes = (f"{tier[part] / GIB:.2f}" for part in ("bytes", "capacity_bytes"))
        table.add_row(name, *counts, *sizes, owners, "up" if tier.get("is_up", True) else "DOWN")
    return table


def _count(tier: dict[str, Any], part: str) -> str:
    """Of a store that says how many bytes it has, and not how many chunks these are, none is known."""
    return f"{tier[part]:,}" if tier[part] or not tier["bytes"] else "-"


def _findings(tiers: dict[str, Any]) -> "Table":
    from rich.table import Table

    table = Table("tier", "chunks", "whole", "corrupt", "expired", "locked", "unreadable", "bad slots", "seconds")
    for name, tier in tiers.items():
        corrupt = ", ".join(f"{count} {fault}" for fault, count in tier["corrupt"].items()) or "0"
        counts = (f"{tier[part]:,}" for part in ("expired", "locked", "unreadable", "bad_slots"))
        table.add_row(name, f"{tier['chunks']:,}", f"{tier['whole']:,}", corrupt, *counts, f"{tier['seconds']:.1f}")
    return table


def _show(title: str, table: "Table") -> None:
    console = stdout_console()
    console.print(title, style="bold", markup=False, highlight=False)
    console.print(table)
