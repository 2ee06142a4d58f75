"""`hotspan keys`: the keys of encryption at rest, of a running server or in a store that none is using."""

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import MISSING, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import typer

from hotspan.cli.admin_client import Admin, said_by_each
from hotspan.cli.options import runs
from hotspan.cli.output import confirm
from hotspan.config.admin_token import AdminToken
from hotspan.config.environment import environment
from hotspan.config.options import option
from hotspan.core.clock import SystemClock
from hotspan.core.errors import ConfigError

keys = typer.Typer(help="Create, rotate and destroy the keys of encryption at rest.", no_args_is_help=True)

_STORE = "Directory of the key store."


@dataclass(frozen=True, slots=True, kw_only=True)
class InitOptions:
    """A store to create."""

    store: Path = option(MISSING, _STORE)
    kek: str = option(MISSING, "Key-encryption key: file:PATH, env:NAME or aws-kms:KEY[?region=..&endpoint=..].")
    new_kek: bool = option(False, "Create the key file of --kek file:PATH.")


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ChangeOptions(AdminToken):
    """A store that no server uses, or the server that uses it."""

    store: Path | None = option(None, f"{_STORE} No server may use it at the same time.")
    kek: str = option("", "Key-encryption key of --store: file:PATH, env:NAME or aws-kms:KEY.")
    server: str = option("", "URL of a running server whose key store to change, instead of --store and --kek.")

    def offline(self) -> tuple[Path, str]:
        """The store and its key-encryption key. Raises: ConfigError if one of them is missing."""
        if self.store is None or not self.kek:
            raise ConfigError("give --store and --kek of a key store that no server uses, or --server of a running one")
        return self.store, self.kek

    @contextlib.contextmanager
    def asked(self, path: str, tenant: str) -> Iterator[list[Any]]:
        """A block that reads what the server answers, or each replica behind a router. Raises: as `said_by_each`."""
        if self.store is not None or self.kek:
            raise ConfigError("--server has its own key store: leave --store and --kek out")
        admin = Admin(server=self.server, token=self.token, admin_token_file=self.admin_token_file)
        with said_by_each(self.server, admin.post(path, {"tenant": tenant})) as answers:
            yield [answer for _, answer in answers]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class RotateOptions(ChangeOptions):
    """What to replace."""

    tenant: str = option("", "Tenant that gets a new root key. Stored data is not rewritten.")
    new_kek: str = option("", "New key-encryption key: wrap all tenants' keys with it instead of --kek.")

    def __post_init__(self) -> None:
        if not self.tenant and not self.new_kek:
            raise ConfigError("nothing to rotate: give --tenant NAME, --new-kek REF or both")
        if self.server and (self.new_kek or not self.tenant):
            raise ConfigError("a running server rotates a tenant's key only: stop it for --new-kek")


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ShredOptions(ChangeOptions):
    """Whose keys to destroy."""

    tenant: str = option(MISSING, "Tenant whose keys to destroy.")
    yes: bool = option(False, "Do not ask for confirmation.")

    def confirm(self) -> None:
        question = f"Destroy the keys of tenant {self.tenant!r}? This can't be undone"
        confirm(question, f"destroying the keys of tenant {self.tenant!r}", yes=self.yes)


@dataclass(frozen=True, slots=True, kw_only=True)
class ListOptions:
    """A store to look at."""

    store: Path = option(MISSING, _STORE)


@keys.command("init")
@runs(InitOptions)
def init(options: InitOptions) -> None:
    """Create an empty key store and test its key-encryption key."""
    from hotspan.keyring.records import StoreHeader
    from hotspan.keyring.store import create_store
    from hotspan.keyring.wrap import create_kek, open_wrapper, try_wrapper

    with _disk_errors():
        if options.new_kek:
            if not options.kek.startswith("file:"):
                raise ConfigError("--new-kek makes a file: give --kek file:PATH with it")
            create_kek(Path(options.kek.removeprefix("file:")))
            typer.echo(f"made {options.kek}: keep a copy of it apart from the store, without it nothing can be read")
        wrapper = open_wrapper(options.kek, environment())
        try_wrapper(wrapper)
        create_store(options.store, StoreHeader(wrapper.id, SystemClock().unix()))
    typer.echo(f"made the key store {options.store}, wrapped by {wrapper.id}")


@keys.command("rotate")
@runs(RotateOptions)
def rotate(options: RotateOptions) -> None:
    """Create a new root key for a tenant, or replace the key-encryption key."""
    from hotspan.keyring.keyring import open_keyring
    from hotspan.keyring.wrap import open_wrapper, try_wrapper

    said = f"tenant {options.tenant!r} writes under the new root"
    if options.server:
        with options.asked("/hotspan/keys/rotate", options.tenant) as answers:
            roots = ", ".join(root for answer in answers for root in answer["roots"])
        typer.echo(f"{said} {roots} now")
        return
    with _disk_errors(), open_keyring(*options.offline(), environment(), exclusive=True) as keyring:
        if options.new_kek:
            wrapper = open_wrapper(options.new_kek, environment())
            try_wrapper(wrapper)
            count = keyring.rewrap(wrapper)
            typer.echo(f"the keys of {count} tenants are wrapped by {wrapper.id} now: start servers with it")
        if options.tenant:
            typer.echo(f"{said} {keyring.rotate(options.tenant)} now")


@keys.command("shred")
@runs(ShredOptions)
def shred(options: ShredOptions) -> None:
    """Destroy the keys of a tenant. All stored data of the tenant, copies included, becomes unreadable for good."""
    from hotspan.keyring.keyring import open_keyring

    if options.server:
        options.confirm()
        with options.asked("/hotspan/keys/shred", options.tenant) as answers:
            done = [answer["shredded"] for answer in answers]
            roots = [root for each in done for root in each["roots"]]
            if not any(each["had_keys"] for each in done):
                raise ConfigError(f"tenant {options.tenant!r} has no keys at {options.server}: see `hotspan keys list`")
            _show_shred(options.tenant, max(each["at"] for each in done), dict.fromkeys(roots))
        return
    path, kek = options.offline()
    with _disk_errors(), open_keyring(path, kek, environment(), exclusive=True) as keyring:
        if not keyring.has(options.tenant):
            raise ConfigError(f"tenant {options.tenant!r} has no keys in {path}: see `hotspan keys list`")
        options.confirm()
        receipt = keyring.shred(options.tenant)
    _show_shred(receipt.tenant, receipt.at_s, receipt.roots)


@keys.command("list")
@runs(ListOptions)
def list_tenants(options: ListOptions) -> None:
    """List the tenants that have keys, and the age of the keys."""
    from hotspan.keyring.store import KeyStore

    with _disk_errors(), KeyStore(options.store) as opened:
        now_s = SystemClock().unix()
        typer.echo(f"{options.store}: made {_date(opened.header.created_s)}, wrapped by {opened.header.wrapper_id}")
        rows = [("TENANT", "ROOTS", "OLDEST", "NEWEST")]
        for tenant in opened.tenants():
            stored = opened.read(tenant)
            if stored is not None:
                ages = [f"{max(0.0, now_s - root.created_s) / 86400:.1f} d" for root in stored.record.roots]
                rows.append((repr(tenant), str(len(ages)), ages[0], ages[-1]))
    width = max(len(row[0]) for row in rows)
    for row in rows:
        typer.echo(f"{row[0]:<{width}}  {row[1]:>5}  {row[2]:>10}  {row[3]:>10}")


def _show_shred(tenant: str, at_s: float, roots: Iterable[str]) -> None:
    typer.echo(f"shredded tenant {tenant!r} at {_date(at_s)}")
    for root in roots:
        typer.echo(f"  root {root}")


@contextlib.contextmanager
def _disk_errors() -> Iterator[None]:
    """What the disk refuses is one line and exit status 2, as other errors are."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"the key store could not be changed ({error}): see to the disk, then again") from error


def _date(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).isoformat(timespec="seconds")
