"""A store of models that are fakes, behind the real front: in this event loop, or as a process of its own."""

import asyncio
import contextlib
import os
import secrets
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from hotspan.config.tenants import Tenants
from hotspan.server.models.assignment import Assignment
from hotspan.server.models.front import StoreFront
from hotspan.server.models.served import ChildCommand, ModelState, ServedModel
from hotspan.server.policy import Gate, access_table
from hotspan.server.principal import Credentials, Link
from kit.waiting import until_async
from tests.server.lmi.serving import serving, split
from tests.server.test_principal import known

ROOT = Path(__file__).parents[3]
CHILD = (sys.executable, "-m", "tests.server.models.fake_child")
ADMIN_TOKEN = "the-token-of-who-runs-this"
KEYS = {"acme": "key-of-acme-0123456789", "zeta": "key-of-zeta-0123456789"}


def child_variables(book: Path, **variables: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HOTSPAN_")}
    return kept | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}", "FAKE_BOOK": str(book)} | variables


@dataclass
class Store:
    """A running store and a client of it."""

    models: tuple[ServedModel, ...]
    front: StoreFront
    port: int
    http: httpx.AsyncClient
    book_file: Path
    keepers: "list[asyncio.Task[None]]" = field(default_factory=list)

    def hold(self, name: str) -> None:
        """From now on this model does not come up."""
        self.book_file.with_name(f"{name}.held").touch()

    def let_go(self, name: str) -> None:
        """It comes up after all."""
        self.book_file.with_name(f"{name}.held").unlink()

    @property
    def book(self) -> list[str]:
        """What the fakes noted."""
        return self.book_file.read_text().splitlines() if self.book_file.exists() else []

    def __getitem__(self, name: str) -> ServedModel:
        return next(model for model in self.models if model.name == name)

    async def ask(self, path: str = "/invocations", **body: Any) -> httpx.Response:
        return await self.http.post(path, json=body)

    async def ready(self) -> None:
        await until_async(lambda: all(model.state is ModelState.READY for model in self.models), within_s=120)


@contextlib.contextmanager
def runtime() -> Iterator[Path]:
    """A directory whose name is short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="hs-") as directory:
        yield Path(directory)


@contextlib.asynccontextmanager
async def store(
    *models: str,
    names: dict[str, tuple[str, ...]] | None = None,
    has_keys: bool = False,
    default: str | None = None,
    is_partial: bool = False,
    is_waited_for: bool = True,
    at_once: int = 8,
    startup_timeout_s: float = 120.0,
    answer_s: float = 60.0,
    held: Sequence[str] = (),
    **variables: str,
) -> AsyncIterator[Store]:
    """A store whose front is served on a port of this event loop."""
    with runtime() as directory:
        book = directory / "book"
        for name in held:
            (directory / f"{name}.held").touch()
        served = []
        for name in models:
            link = Link(str(directory / name), secrets.token_urlsafe(32))
            reason = directory / f"{name}.reason"
            told = Assignment("/none", False, link, {}, (), str(reason)).to_json().encode()
            command = ChildCommand((*CHILD, name), told, child_variables(book, **variables), reason)
            all_names = (name, *(names or {}).get(name, ()))
            served.append(
                ServedModel(
                    all_names,
                    link,
                    command,
                    startup_timeout_s=startup_timeout_s,
                    answer_s=answer_s,
                    is_partial=is_partial,
                )
            )
        front = StoreFront(served, *split(default_model=default), has_keys=has_keys)
        tenants = known(**KEYS) if has_keys else Tenants()
        gate = Gate(front, access_table(has_keys=has_keys, has_given_token=True), Credentials(tenants, ADMIN_TOKEN))
        turns = asyncio.Semaphore(at_once)
        keepers = [asyncio.create_task(model.keep(turns)) for model in served]
        try:
            async with (
                serving(gate) as port,
                httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as http,
            ):
                running = Store(tuple(served), front, port, http, book, keepers)
                if is_waited_for:
                    await running.ready()
                yield running
        finally:
            for keeper in keepers:
                keeper.cancel()
            await asyncio.gather(*keepers, return_exceptions=True)
            await asyncio.gather(*(model.stop(5.0) for model in served))


def bearer(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


def served_by(replies: Sequence[httpx.Response]) -> list[str]:
    """Which models answered."""
    return [reply.json()["served_by"] for reply in replies]
