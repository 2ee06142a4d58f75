"""`hotspan adapters`: the LoRA adapters of a running server."""

from dataclasses import dataclass, field
from typing import Annotated, Any
from urllib.parse import quote, urlencode

import typer

from hotspan.cli.admin_client import Admin, reading
from hotspan.cli.options import runs
from hotspan.cli.output import Printing, print_json, stdout_console
from hotspan.config.options import option

adapters = typer.Typer(help="List, register, update and remove the LoRA adapters of a server.", no_args_is_help=True)

_LOAD_S = 600.0
_PATH = "/adapters"

Name = Annotated[str, typer.Argument(help="Name of the adapter.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """A server, and whose adapters are meant."""

    admin: Admin = field(default_factory=Admin)
    tenant: str = option("", "Tenant that owns the adapter. Default: the administrator.")

    def path(self, *parts: str, **query: str) -> str:
        """A path of the server's, with the tenant."""
        given = {name: value for name, value in {**query, "tenant": self.tenant}.items() if value}
        path = "/".join((_PATH, *(quote(part, safe="") for part in parts)))
        return f"{path}?{urlencode(given)}" if given else path


@dataclass(frozen=True, slots=True, kw_only=True)
class ListOptions(ServerOptions):
    """What is listed, and how."""

    printing: Printing = field(default_factory=Printing)


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisterOptions(ServerOptions):
    """How an adapter is registered."""

    lazy: bool = option(False, "Load the adapter at its first request. Default: now.")
    pin: bool = option(False, "Keep the adapter in its slot.")


@adapters.command("list")
@runs(ListOptions)
def list_adapters(options: ListOptions) -> None:
    """List the adapters of a server."""
    found: list[dict[str, Any]] = []
    token = "0"
    while token:
        page = options.admin.get(options.path(next_page_token=token))
        with reading(options.admin.address):
            found += page["adapters"]
            token = page.get("nextPageToken", "")
    from rich.table import Table

    table = Table("name", "tenant", "loaded", "pinned", "digest", "src")
    with reading(options.admin.address):
        for each in found:
            marks = ("yes" if each[part] else "no" for part in ("loaded", "pin"))
            table.add_row(each["name"], each.get("tenant", ""), *marks, each["digest"][:12], each.get("src", ""))
    if options.printing.json:
        print_json({"adapters": found})
    else:
        stdout_console().print(table)


@adapters.command("register")
@runs(RegisterOptions)
def register(
    options: RegisterOptions,
    name: Name,
    src: Annotated[str, typer.Argument(help="Directory of the adapter, relative to the server's --adapters.")],
) -> None:
    """Register an adapter. Without --lazy, the command ends when the adapter is loaded."""
    body = {"name": name, "src": src, "preload": not options.lazy, "pin": options.pin}
    _show_status(options, options.admin.post(options.path(), body, _LOAD_S))


@adapters.command("update")
@runs(ServerOptions)
def update(
    options: ServerOptions,
    name: Name,
    src: Annotated[str, typer.Argument(help="Directory of the new files. Default: the present one.")] = "",
) -> None:
    """Read an adapter's files again, or those of another directory. Requests in flight end with the old ones."""
    _show_status(options, options.admin.post(options.path(name, "update"), {"src": src} if src else {}, _LOAD_S))


@adapters.command("remove")
@runs(ServerOptions)
def remove(options: ServerOptions, name: Name) -> None:
    """Unregister an adapter. Its files stay."""
    _show_status(options, options.admin.delete(options.path(name), _LOAD_S))


def _show_status(options: ServerOptions, answer: Any) -> None:
    with reading(options.admin.address):
        typer.echo(answer["status"])
