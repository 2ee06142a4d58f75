"""`hotspan cache invalidate`: by a running server or engine, in an L2's log, or in a directory of a disk tier."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import typer

from hotspan.cli.admin_client import StatsOptions, said_by_each
from hotspan.cli.options import runs
from hotspan.cli.output import print_json
from hotspan.config.environment import environment
from hotspan.config.kinds import NATURAL, PAIRS
from hotspan.config.options import option
from hotspan.config.secrets import resolved
from hotspan.core.clock import SystemClock
from hotspan.core.directives import parse_directives
from hotspan.core.documents import read_text
from hotspan.core.errors import ConfigError
from hotspan.core.redaction import redacted_text
from hotspan.core.terms import Scope, adapter_label, tag_labels, tenant_label


@dataclass(frozen=True, slots=True, kw_only=True)
class Invalidation:
    """What is invalidated, as POST /hotspan/cache/invalidate has it."""

    tag: tuple[str, ...] = option(
        (), "Tag, such as a document. May be repeated: only data with all tags matches.", also="--tags"
    )
    session: str = option("", "Session ID.")
    tenant: str = option("", "Tenant. Default: all tenants.")
    adapter: str = option("", "Name of an adapter.")
    this_model: bool = option(False, "Only data of the model that is being served.")
    tokens_from: int | None = option(
        None, "Index of the first token to invalidate. Default: 0, the whole prompt.", kind=NATURAL
    )
    cache_salt: str = option("", "`cache_salt` of the requests with the prompt.")


@dataclass(frozen=True, slots=True, kw_only=True)
class InvalidateOptions(StatsOptions):
    """An invalidation, and where it is sent."""

    scope: Invalidation = field(default_factory=Invalidation)
    prompt_file: Path | None = option(None, "File with a prompt, tokenized as in /v1/completions.")
    tokens_file: Path | None = option(None, "File with a prompt as a JSON list of token IDs.")
    batch_file: Path | None = option(
        None, "File with a JSON list of invalidations (POST /hotspan/cache/invalidate). All are applied together."
    )
    l2: str = option(
        "",
        "URL of a shared L2, or of its --l2-log: write the invalidation to its log instead of asking a server. All "
        "replicas of that L2 follow it. For tags, sessions, tenants and adapters.",
    )
    l2_option: Mapping[str, str] | None = option(
        None, "Option of the client of --l2, such as password=file:PATH. May be repeated.", kind=PAIRS
    )
    directory: Path | None = option(
        None,
        "Directory of a disk tier that no server uses, or of an L2 (file://): invalidate there instead of asking a "
        "server. For tags, sessions, tenants and adapters.",
    )

    def body(self) -> dict[str, Any]:
        """The request, with what is given. Raises: ConfigError for a file that can't be read."""
        body = asdict(self.scope)
        body["tags"], body["model"] = body.pop("tag"), body.pop("this_model")
        body["prompt"] = self.prompt_file and read_text(self.prompt_file)
        body["tokens"] = self.tokens_file and listed(self.tokens_file, int, "whole numbers: write [1, 2, 3]")
        body["batch"] = self.batch_file and listed(
            self.batch_file, dict, 'objects: write [{"tags": ["a"]}, {"session": "b"}]'
        )
        return {name: value for name, value in body.items() if value is not None and value not in ("", (), False)}

    def scopes(self) -> list[Scope]:
        """The same without a server. Raises: ConfigError for what only an engine can name, or nothing at all."""
        body = self.body()
        batch: list[dict[str, Any]] = body.pop("batch", None) or [{}]
        return [_scope(body | each) for each in batch]


def _scope(body: Mapping[str, Any]) -> Scope:
    if unknown := sorted(body.keys() - {"tags", "session", "tenant", "adapter"}):
        raise ConfigError(
            f"{', '.join(unknown)} can be told by a running engine alone: give --server, or name tags, a session, a "
            "tenant or an adapter"
        )
    if not any(body.values()):
        raise ConfigError("this names nothing to forget: give tags, a session, a tenant or an adapter")
    try:
        parse_directives({name: body[name] for name in ("tags", "session") if name in body})
        tenant, adapter = body.get("tenant"), body.get("adapter")
        return Scope(
            tenant=None if tenant is None else tenant_label(tenant),
            adapter=None if adapter is None else adapter_label(adapter),
            labels=tag_labels(body.get("tags") or (), body.get("session")),
        )
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"tags, sessions, tenants and adapters are names: {error}") from error


@runs(InvalidateOptions)
def invalidate(options: InvalidateOptions) -> None:
    """Invalidate cached data that matches all given options, and all data that depends on it, on all tiers.

    With --l2 or --directory no server is asked: the log that running replicas follow gets an entry, or a directory
    that no server uses is changed.
    """
    places = [name for name in ("l2", "directory") if getattr(options, name)]
    if options.admin.server:
        places.append("server")
    if len(places) > 1:
        raise ConfigError(f"{' and '.join(f'--{name}' for name in places)} are all places to invalidate at: give one")
    if options.l2_option and not options.l2:
        raise ConfigError("--l2-option belongs to an L2: name it with --l2")
    if options.l2:
        _in_log(options, options.l2)
    elif options.directory is not None:
        _in_directory(options, options.directory.expanduser().absolute())
    else:
        show_receipts(options, options.admin.post("/hotspan/cache/invalidate", options.body()))


def _in_directory(options: InvalidateOptions, directory: Path) -> None:
    from hotspan.tiers.invalidating import invalidate_unused

    if (directory / "epochs").is_dir():  # a shared one, as --l2 file:// has
        if (directory / "table").exists():
            raise ConfigError(
                f"{directory} has the table of a disk tier and the epochs of an L2: give --l2 file://{directory} if "
                "replicas share it as an L2; else move what is no disk tier's"
            )
        _in_log(options, f"file://{directory}")
        return
    removed = invalidate_unused(directory, options.scopes(), SystemClock())
    if options.json:
        print_json({"directory": str(directory), "removed": {"disk_chunks": removed}, "is_durable": True})
    else:
        typer.echo(f"forgotten: {removed:,} chunks in {directory}, durable")


def _in_log(options: InvalidateOptions, url: str) -> None:
    from hotspan.l2.invalidating import invalidate_shared
    from hotspan.l2.open import open_store

    scopes = options.scopes()
    store = open_store("--l2", url, resolved(options.l2_option or {}, environment()))
    try:
        done = invalidate_shared(store, redacted_text(url), scopes, SystemClock())
    except OSError as error:
        raise ConfigError(
            f"{redacted_text(url)} can't be written ({error}): nothing is known to be forgotten"
        ) from error
    finally:
        store.close()
    if options.json:
        said = {"log": {"epoch": done.epoch.hex(), "generation": done.generation}, "is_durable": True}
        print_json(said | {"replicas": done.replicas, "replicas_missing": done.missing})
        return
    typer.echo(f"written to the log of {redacted_text(url)} as {done.generation}, durable there")
    following = len(done.replicas) + len(done.missing)
    if following:
        read = ", ".join(done.replicas) or "none of them yet"
        typer.echo(f"replicas that follow this log now: {following}; read by {read}")
    else:
        typer.echo(
            "no replica follows this log now: replicas that are given it when they start read it before they find "
            "anything. If replicas run now, they use another L2 or log, and have forgotten nothing: give their URL"
        )
    for name in done.missing:
        typer.echo(f"{name} has not read it yet: it finds nothing in the L2 before it has")


def listed(path: Path, of: type, what: str) -> list[Any]:
    """A JSON list of values of that type, at least one. Raises: ConfigError for anything else."""
    try:
        found = json.loads(read_text(path))
    except ValueError:
        found = None
    if not isinstance(found, list) or not found or any(type(each) is not of for each in found):
        raise ConfigError(f"{path} is no JSON list of {what}")
    return found


def show_receipts(options: StatsOptions, answer: dict[str, Any]) -> None:
    """Print what a server answered to an invalidation."""
    lines: list[str] = []
    with said_by_each(options.admin.address, answer) as servers:
        for name, receipt in servers:
            lines += [f"{name}:"] if name else []
            lines += _receipt_lines(receipt)
        for name in answer.get("follows", ()):
            lines.append(f"{name} is down: it gets no request before it has done what the log of the L2 says")
    if options.json:
        print_json(answer)
    else:
        typer.echo("\n".join(lines))


def _receipt_lines(receipt: dict[str, Any]) -> list[str]:
    removed = ", ".join(f"{count:,} {kind.replace('_', ' ')}" for kind, count in receipt["removed"].items())
    in_flight = receipt["requests_in_flight"]
    lines = [f"forgotten: {removed}; requests in flight whose results are not kept: {in_flight}"]
    if receipt.get("widened"):
        lines.append(f"more than asked for was forgotten of {', '.join(receipt['widened'])}: the text had no names")
    return [*lines, f"receipt {receipt['receipt']}, durable on {', '.join(receipt['replicas'])}"]
