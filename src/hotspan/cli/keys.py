"""`hotspan keys`: the keys of encryption at rest, of a running server or in a store that none is using."""

import contextlib
import sys
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from hotspan.cli.errors import explained

keys = typer.Typer(help="Create, rotate and destroy the keys of encryption at rest.", no_args_is_help=True)

OptionalStore = Annotated[
    Path | None, typer.Option(help="Directory of the key store. No server may use it at the same time.")
]
OptionalKek = Annotated[
    str | None, typer.Option(help="Key-encryption key of --store: file:PATH, env:NAME or aws-kms:KEY.")
]
Server = Annotated[
    str | None, typer.Option(help="URL of a running server whose key store to change, instead of --store and --kek.")
]
Token = Annotated[
    str | None, typer.Option(envvar="HOTSPAN_ADMIN_TOKEN", show_default=False, help="Admin token of --server.")
]

Store = Annotated[Path, typer.Option(help="Directory of the key store.")]
Kek = Annotated[
    str, typer.Option(help="Key-encryption key: file:PATH, env:NAME or aws-kms:KEY[?region=..&endpoint=..].")
]


@keys.command("init")
def init(
    store: Store,
    kek: Kek,
    new_kek: Annotated[bool, typer.Option("--new-kek", help="Create the key file of --kek file:PATH.")] = False,
) -> None:
    """Create an empty key store and test its key-encryption key."""
    from hotspan.config.environment import environment
    from hotspan.core.clock import SystemClock
    from hotspan.core.errors import ConfigError
    from hotspan.keyring.records import StoreHeader
    from hotspan.keyring.store import create_store
    from hotspan.keyring.wrap import create_kek, open_wrapper, try_wrapper

    with _explained():
        if new_kek:
            if not kek.startswith("file:"):
                raise ConfigError("--new-kek makes a file: give --kek file:PATH with it")
            create_kek(Path(kek.removeprefix("file:")))
            typer.echo(f"made {kek}: keep a copy of it apart from the store, without it nothing can be read")
        wrapper = open_wrapper(kek, environment())
        try_wrapper(wrapper)
        create_store(store, StoreHeader(wrapper.id, SystemClock().unix()))
    typer.echo(f"made the key store {store}, wrapped by {wrapper.id}")


@keys.command("rotate")
def rotate(
    store: OptionalStore = None,
    kek: OptionalKek = None,
    tenant: Annotated[
        str | None, typer.Option(help="Tenant that gets a new root key. Stored data is not rewritten.")
    ] = None,
    new_kek: Annotated[
        str | None, typer.Option(help="New key-encryption key: wrap all tenants' keys with it instead of --kek.")
    ] = None,
    server: Server = None,
    token: Token = None,
) -> None:
    """Create a new root key for a tenant, or replace the key-encryption key."""
    from hotspan.config.environment import environment
    from hotspan.core.errors import ConfigError
    from hotspan.keyring.keyring import open_keyring
    from hotspan.keyring.wrap import open_wrapper, try_wrapper

    with _explained():
        if tenant is None and new_kek is None:
            raise ConfigError("nothing to rotate: give --tenant NAME, --new-kek REF or both")
        if server is not None:
            if tenant is None or new_kek is not None:
                raise ConfigError("a running server rotates a tenant's key only: stop it for --new-kek")
            answer = _ask_server(server, token, store, kek, "/hotspan/keys/rotate", tenant)
            typer.echo(f"tenant {tenant!r} writes under the new root {', '.join(answer['roots'])} now")
            return
        path, reference = _offline(store, kek)
        with open_keyring(path, reference, environment(), exclusive=True) as keyring:
            if new_kek is not None:
                wrapper = open_wrapper(new_kek, environment())
                try_wrapper(wrapper)
                count = keyring.rewrap(wrapper)
                typer.echo(f"the keys of {count} tenants are wrapped by {wrapper.id} now: start servers with it")
            if tenant is not None:
                root = keyring.rotate(tenant)
                typer.echo(f"tenant {tenant!r} writes under the new root {root} now")


@keys.command("shred")
def shred(
    tenant: Annotated[str, typer.Option(help="Tenant whose keys to destroy.")],
    store: OptionalStore = None,
    kek: OptionalKek = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
    server: Server = None,
    token: Token = None,
) -> None:
    """Destroy the keys of a tenant. All stored data of the tenant, copies included, becomes unreadable for good."""
    from hotspan.config.environment import environment
    from hotspan.core.errors import ConfigError
    from hotspan.keyring.keyring import open_keyring

    with _explained():
        if server is not None:
            _confirm_shred(tenant, yes)
            done = _ask_server(server, token, store, kek, "/hotspan/keys/shred", tenant)["shredded"]
            _show_shred(done["tenant"], done["at"], done["roots"])
            return
        path, reference = _offline(store, kek)
        with open_keyring(path, reference, environment(), exclusive=True) as keyring:
            if not keyring.has(tenant):
                raise ConfigError(f"tenant {tenant!r} has no keys in {path}: see `hotspan keys list`")
            _confirm_shred(tenant, yes)
            receipt = keyring.shred(tenant)
    _show_shred(receipt.tenant, receipt.at_s, receipt.roots)


@keys.command("list")
def list_tenants(store: Store) -> None:
    """List the tenants that have keys, and the age of the keys."""
    from hotspan.core.clock import SystemClock
    from hotspan.keyring.store import KeyStore

    with _explained(), KeyStore(store) as opened:
        now_s = SystemClock().unix()
        typer.echo(f"{store}: made {_date(opened.header.created_s)}, wrapped by {opened.header.wrapper_id}")
        rows = [("TENANT", "ROOTS", "OLDEST", "NEWEST")]
        for tenant in opened.tenants():
            stored = opened.read(tenant)
            if stored is not None:
                ages = [f"{max(0.0, now_s - root.created_s) / 86400:.1f} d" for root in stored.record.roots]
                rows.append((repr(tenant), str(len(ages)), ages[0], ages[-1]))
    width = max(len(row[0]) for row in rows)
    for row in rows:
        typer.echo(f"{row[0]:<{width}}  {row[1]:>5}  {row[2]:>10}  {row[3]:>10}")


def _offline(store: Path | None, kek: str | None) -> tuple[Path, str]:
    from hotspan.core.errors import ConfigError

    if store is None or kek is None:
        raise ConfigError("give --store and --kek of a key store that no server uses, or --server of a running one")
    return store, kek


def _ask_server(server: str, token: str | None, store: Path | None, kek: str | None, path: str, tenant: str) -> Any:
    from hotspan.cli.admin_client import AdminClient
    from hotspan.core.errors import ConfigError

    if store is not None or kek is not None:
        raise ConfigError("--server has its own key store: leave --store and --kek out")
    return AdminClient(server, token).post(path, {"tenant": tenant})


def _confirm_shred(tenant: str, yes: bool) -> None:
    from hotspan.core.errors import ConfigError

    if yes:
        return
    if not sys.stdin.isatty():
        raise ConfigError(f"destroying the keys of tenant {tenant!r} can't be undone: confirm with --yes")
    typer.confirm(f"Destroy the keys of tenant {tenant!r}? This can't be undone", abort=True)


def _show_shred(tenant: str, at_s: float, roots: Iterable[str]) -> None:
    typer.echo(f"shredded tenant {tenant!r} at {_date(at_s)}")
    for root in roots:
        typer.echo(f"  root {root}")


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """As `explained`, and what the disk refuses is a line and exit status 2 as well."""
    from hotspan.core.errors import ConfigError

    with explained():
        try:
            yield
        except OSError as error:
            raise ConfigError(f"the key store could not be changed ({error}): see to the disk, then again") from error


def _date(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).isoformat(timespec="seconds")
