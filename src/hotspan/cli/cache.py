"""`hotspan cache`: look at a running server's cache, verify it, forget parts of it; remove a directory."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hotspan.cli.errors import explained

if TYPE_CHECKING:
    from rich.table import Table

cache = typer.Typer(help="Show, verify, invalidate and remove cached data.", no_args_is_help=True)

Server = Annotated[str, typer.Option(help="URL of the server.")]
Token = Annotated[
    str | None,
    typer.Option(
        envvar="HOTSPAN_ADMIN_TOKEN",
        show_default=False,
        help="Admin token of the server. Default: the token that a server of this user on this host has generated.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]

_HERE = "http://127.0.0.1:8080"
_CHECK_S = 24 * 3600.0


@cache.command("stats")
def stats(server: Server = _HERE, token: Token = None, as_json: Json = False) -> None:
    """Show the content of each tier, by tenant."""
    from hotspan.cli.admin_client import AdminClient

    with explained():
        answer = AdminClient(server, token).get("/hotspan/cache")
    if as_json:
        typer.echo(json.dumps(answer, indent=2))
        return
    for replica in answer["replicas"]:
        encrypted = "encrypted" if replica["is_encrypted"] else "not encrypted"
        _show(f"{replica['replica']}: {encrypted}", _usage(replica["tiers"]))


@cache.command("check")
def check(
    server: Server = _HERE,
    token: Token = None,
    disk: Annotated[
        Path | None,
        typer.Option(
            help="Directory of a disk tier to check, instead of a server. No server may use it at the same time."
        ),
    ] = None,
    kek: Annotated[str | None, typer.Option(help="With --disk: key-encryption key of --key-store.")] = None,
    key_store: Annotated[Path | None, typer.Option(help="With --disk: directory of the key store.")] = None,
    as_json: Json = False,
) -> None:
    """Read and verify all data on disk. Corrupt data is quarantined and never used. Exit status 1 if any was found."""
    from hotspan.cli.admin_client import AdminClient
    from hotspan.core.errors import ConfigError
    from hotspan.core.progress import Progress

    with explained():
        if disk is not None:
            answer: dict[str, Any] = {
                "replicas": [{"replica": str(disk), "tiers": {"disk": _check_offline(disk, kek, key_store)}}]
            }
        elif kek is not None or key_store is not None:
            raise ConfigError("--kek and --key-store go with --disk: a running server has its own")
        else:
            with Progress(f"checking what {server} has on disk"):
                answer = AdminClient(server, token).post("/hotspan/cache/check", {}, _CHECK_S)
    reports: dict[str, dict[str, Any]] = {replica["replica"]: replica["tiers"] for replica in answer["replicas"]}
    if as_json:
        typer.echo(json.dumps(answer, indent=2))
    else:
        for name, tiers in reports.items():
            _show(name, _findings(tiers))
    if any(tier["corrupt"] for tiers in reports.values() for tier in tiers.values()):
        raise typer.Exit(1)


@cache.command("clear")
def clear(
    server: Server = _HERE,
    token: Token = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
    as_json: Json = False,
) -> None:
    """Remove the cached data of all tenants from all tiers."""
    from hotspan.cli.admin_client import AdminClient
    from hotspan.core.errors import ConfigError

    with explained():
        client = AdminClient(server, token)
        if not yes:
            if not sys.stdin.isatty():
                raise ConfigError("clearing the cache can't be undone: confirm with --yes")
            typer.confirm(f"Forget all that {server} has cached, of everybody?", abort=True)
        receipt = client.post("/hotspan/cache/clear", {})
    _show_receipt(receipt, as_json)


@cache.command("remove")
def remove(
    directory: Annotated[Path, typer.Argument(help="Directory of a disk tier, as given with --disk.")],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
) -> None:
    """Remove the directory of a disk tier. No server may use it. Only hotspan's files are removed."""
    from hotspan.core.errors import ConfigError
    from hotspan.core.types import GIB
    from hotspan.tiers.directory import remove_directory

    with explained():
        if not yes:
            if not sys.stdin.isatty():
                raise ConfigError("removing a directory can't be undone: confirm with --yes")
            typer.confirm(f"Remove {directory} with all the KV in it?", abort=True)
        freed = remove_directory(directory.expanduser())
    typer.echo(f"removed {directory}: {freed / GIB:.2f} GiB freed")


@cache.command("invalidate")
def invalidate(
    server: Server = _HERE,
    token: Token = None,
    tag: Annotated[
        list[str] | None,
        typer.Option(
            "--tag", "--tags", help="Tag, such as a document. May be repeated: only data with all tags matches."
        ),
    ] = None,
    session: Annotated[str | None, typer.Option(help="Session ID.")] = None,
    tenant: Annotated[str | None, typer.Option(help="Tenant. Default: all tenants.")] = None,
    adapter: Annotated[str | None, typer.Option(help="Name of an adapter.")] = None,
    model: Annotated[bool, typer.Option("--model", help="Only data of the model that is being served.")] = False,
    prompt_file: Annotated[
        Path | None, typer.Option(help="File with a prompt, tokenized as in /v1/completions.")
    ] = None,
    tokens_file: Annotated[Path | None, typer.Option(help="File with a prompt as a JSON list of token IDs.")] = None,
    tokens_from: Annotated[
        int | None, typer.Option(min=0, help="Index of the first token to invalidate. Default: 0, the whole prompt.")
    ] = None,
    cache_salt: Annotated[str | None, typer.Option(help="`cache_salt` of the requests with the prompt.")] = None,
    batch_file: Annotated[
        Path | None,
        typer.Option(
            help="File with a JSON list of invalidations (POST /hotspan/cache/invalidate). All are applied together."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Invalidate cached data that matches all given options, and all data that depends on it, on all tiers."""
    from hotspan.cli.admin_client import AdminClient

    with explained():
        body: dict[str, Any] = {"tags": tag, "session": session, "tenant": tenant, "adapter": adapter, "model": model}
        body |= {"tokens_from": tokens_from, "cache_salt": cache_salt}
        if prompt_file is not None:
            body["prompt"] = _text(prompt_file)
        if tokens_file is not None:
            body["tokens"] = _tokens(tokens_file)
        if batch_file is not None:
            body["batch"] = _batch(batch_file)
        given = {name: value for name, value in body.items() if value not in (None, [], False)}
        receipt = AdminClient(server, token).post("/hotspan/cache/invalidate", given)
    _show_receipt(receipt, as_json)


def _check_offline(disk: Path, kek: str | None, key_store: Path | None) -> dict[str, Any]:
    from contextlib import ExitStack

    from hotspan.config.environment import environment
    from hotspan.core.errors import ConfigError
    from hotspan.keyring.keyring import open_keyring
    from hotspan.keyring.store import KeyStore
    from hotspan.tiers.check import check_offline

    if (kek is None) != (key_store is None):
        raise ConfigError("--kek and --key-store go together: give both for an encrypted directory")
    if kek is None or key_store is None:
        return check_offline(disk, None)
    with ExitStack() as stack:
        keyring = stack.enter_context(open_keyring(key_store, kek, environment()))
        with KeyStore(key_store) as store:
            tenants = store.tenants()
        late = keyring.prepare(tenants, 30.0)
        if late:
            raise ConfigError(f"the keys of {', '.join(late)} can't be had: see to the key-encryption key, then again")
        return check_offline(disk, keyring)


def _text(path: Path) -> str:
    from hotspan.core.errors import ConfigError

    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} can't be read as UTF-8 text ({error}): give another file") from error


def _batch(path: Path) -> list[dict[str, Any]]:
    from hotspan.core.errors import ConfigError

    try:
        batch = json.loads(_text(path))
    except ValueError:
        batch = None
    if not isinstance(batch, list) or not batch or any(not isinstance(each, dict) for each in batch):
        raise ConfigError(f'{path} is no JSON list of objects: write [{{"tags": ["a"]}}, {{"session": "b"}}]')
    return batch


def _tokens(path: Path) -> list[int]:
    from hotspan.core.errors import ConfigError

    try:
        tokens = json.loads(_text(path))
    except ValueError:
        tokens = None
    if not isinstance(tokens, list) or any(not isinstance(token, int) or isinstance(token, bool) for token in tokens):
        raise ConfigError(f"{path} is no JSON list of whole numbers: write [1, 2, 3]")
    return tokens


def _usage(tiers: dict[str, Any]) -> "Table":
    from rich.table import Table

    from hotspan.core.types import GIB

    table = Table("tier", "chunks", "of", "GiB", "of", "by tenant", "state")
    for name, tier in tiers.items():
        owners = ", ".join(f"{tenant} {chunks:,}" for tenant, chunks in sorted(tier["tenants"].items()))
        counts = (f"{tier[part]:,}" for part in ("chunks", "capacity_chunks"))
        sizes = (f"{tier[part] / GIB:.2f}" for part in ("bytes", "capacity_bytes"))
        table.add_row(name, *counts, *sizes, owners, "up" if tier.get("is_up", True) else "DOWN")
    return table


def _findings(tiers: dict[str, Any]) -> "Table":
    from rich.table import Table

    table = Table("tier", "chunks", "whole", "corrupt", "expired", "locked", "unreadable", "seconds")
    for name, tier in tiers.items():
        corrupt = ", ".join(f"{count} {fault}" for fault, count in tier["corrupt"].items()) or "0"
        counts = (f"{tier[part]:,}" for part in ("expired", "locked", "unreadable"))
        table.add_row(name, f"{tier['chunks']:,}", f"{tier['whole']:,}", corrupt, *counts, f"{tier['seconds']:.1f}")
    return table


def _show(title: str, table: "Table") -> None:
    from hotspan.bench.terminal import stdout_console

    console = stdout_console()
    console.print(title, style="bold", markup=False, highlight=False)
    console.print(table)


def _show_receipt(receipt: dict[str, Any], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(receipt, indent=2))
        return
    removed = ", ".join(f"{count:,} {kind.replace('_', ' ')}" for kind, count in receipt["removed"].items())
    typer.echo(f"forgotten: {removed}; requests in flight whose results are not kept: {receipt['requests_in_flight']}")
    if receipt.get("widened"):
        typer.echo(f"more than asked for was forgotten of {', '.join(receipt['widened'])}: the text had no names")
    typer.echo(f"receipt {receipt['receipt']}, durable on {', '.join(receipt['replicas'])}")
