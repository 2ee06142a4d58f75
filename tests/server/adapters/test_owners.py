"""Whose adapters are: what each principal sees, uses and changes, through the policy of routes and a fake engine."""

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from hotspan.config.tenants import Tenants
from hotspan.server.adapters.registry import AdapterRegistry
from hotspan.server.adapters.routes import adapter_router
from hotspan.server.front import Front
from hotspan.server.policy import Gate, access_table
from hotspan.server.principal import Credentials
from kit.waiting import until_async
from tests.server.lmi.fake_engine import FakeEngine
from tests.server.lmi.serving import split
from tests.server.test_principal import ADMIN_TOKEN, known

from .rig import Rig, write_adapter

KEYS = {"acme": "key-a", "globex": "key-b", "admin": ADMIN_TOKEN}


class Served:
    """A server with the adapters of a rig."""

    def __init__(self, registry: AdapterRegistry, *, is_open: bool = True, is_keyed: bool = True) -> None:
        self.engine = FakeEngine()
        app = self.engine.app()
        app.include_router(adapter_router(registry, {"lmi"}, is_open=is_open))
        front = Front(app, *split(), is_alive=lambda: True, adapters=registry)
        table = access_table(has_keys=is_keyed, has_given_token=False, has_client_adapters=is_open)
        tenants = known(acme="key-a", globex="key-b") if is_keyed else Tenants()
        transport = httpx.ASGITransport(Gate(front, table, Credentials(tenants, ADMIN_TOKEN)))
        self.http = httpx.AsyncClient(transport=transport, base_url="http://hotspan")

    async def ask(self, who: str, method: str, path: str, **options: object) -> httpx.Response:
        headers = {"authorization": f"Bearer {KEYS[who]}"} if who in KEYS else {}
        return await self.http.request(method, path, headers=headers, **options)  # type: ignore[arg-type]

    async def register(self, who: str, name: str, src: str, **more: object) -> int:
        body = {"name": name, "src": src, "preload": False, **more}
        return (await self.ask(who, "POST", "/adapters", json=body)).status_code

    async def names(self, who: str) -> list[str]:
        return [one["name"] for one in (await self.ask(who, "GET", "/adapters")).json()["adapters"]]

    async def model(self, who: str, adapter: str) -> str | None:
        """What the engine is asked for when `who` invokes an adapter; None if there is none."""
        reply = await self.ask(who, "POST", "/invocations", json={"inputs": "Say", "adapters": adapter})
        assert reply.status_code in (200, 404), reply.text
        return str(self.engine.seen[-1][1]["model"]) if reply.status_code == 200 else None


@pytest.fixture
async def rig(tmp_path: Path) -> Rig:
    rig = Rig(tmp_path)
    rig.write("shared")
    for tenant in ("acme", "globex"):  # the same bytes under the same name
        write_adapter(rig.root / tenant / "mine", 1)
    return rig


@pytest.fixture
async def served(rig: Rig) -> AsyncIterator[Served]:
    served = Served(rig.registry)
    assert await served.register("admin", "shared", "shared") == 200
    yield served
    await served.http.aclose()


async def test_tenants_have_adapters_of_their_own(rig: Rig, served: Served) -> None:
    """Two tenants' adapters of one name and content are two: neither sees, uses, updates or removes the other's."""
    assert await served.register("acme", "legal", "mine") == 200
    assert await served.names("acme") == ["legal", "shared"] and await served.names("globex") == ["shared"]
    assert await served.model("acme", "legal") and await served.model("globex", "legal") is None
    for method, path in (("GET", "/adapters/legal"), ("POST", "/adapters/legal/update"), ("DELETE", "/adapters/legal")):
        assert (await served.ask("globex", method, path)).status_code == 404
    assert await served.register("globex", "legal", "mine") == 200
    models = [await served.model(who, "legal") for who in ("acme", "globex")]
    assert models[0] != models[1] and set(rig.formats.added) == {"shared"}
    assert (await served.ask("globex", "DELETE", "/adapters/legal")).status_code == 200
    await rig.settle()
    assert await served.model("acme", "legal") == models[0] and await served.model("globex", "legal") is None
    assert models[0] in rig.engine.loaded and models[1] not in rig.engine.loaded


@pytest.mark.parametrize("name", ["legal@acme", "legal@0123456789ab", "legal@", "@acme"])
async def test_no_name_leads_to_anothers(served: Served, name: str) -> None:
    """What the registry or the engine call an adapter is no name for clients."""
    assert await served.register("acme", "legal", "mine") == 200
    own = await served.model("acme", "legal")
    for asked in (name, str(own)):
        assert await served.model("globex", asked) is None
        assert (await served.ask("globex", "GET", f"/adapters/{asked}")).status_code == 404
        assert (await served.ask("globex", "DELETE", f"/adapters/{asked}")).status_code == 404
    assert await served.register("globex", name, "mine") == 400


async def test_the_servers_adapters_are_for_all_and_change_for_none(served: Served) -> None:
    """A tenant uses the administrator's adapter, and does not know its source; its own of that name comes first."""
    common = await served.model("acme", "shared")
    assert common == await served.model("globex", "shared") is not None
    for who in ("acme", "globex"):
        assert "src" not in (await served.ask(who, "GET", "/adapters/shared")).json()
        assert all("src" not in one for one in (await served.ask(who, "GET", "/adapters")).json()["adapters"])
        assert (await served.ask(who, "POST", "/adapters/shared/update", json={"src": "mine"})).status_code == 403
        assert (await served.ask(who, "DELETE", "/adapters/shared")).status_code == 403
    assert await served.register("acme", "shared", "mine") == 200
    assert await served.model("acme", "shared") != common == await served.model("globex", "shared")
    assert await served.names("acme") == ["shared"]


async def test_the_administrator_sees_and_changes_all(served: Served) -> None:
    """With their sources and tenants; a tenant's adapter is changed by naming the tenant, which nobody else may."""
    assert await served.register("acme", "legal", "mine") == 200
    listed = (await served.ask("admin", "GET", "/adapters")).json()["adapters"]
    assert [(one["name"], one.get("tenant"), one["src"]) for one in listed] == [
        ("legal", "acme", "mine"),
        ("shared", None, "shared"),
    ]
    assert await served.register("admin", "legal", "mine", tenant="globex") == 200
    assert await served.model("globex", "legal") is not None
    assert (await served.ask("globex", "DELETE", "/adapters/legal?tenant=acme")).status_code == 403
    assert (await served.ask("admin", "DELETE", "/adapters/legal?tenant=acme")).status_code == 200
    assert await served.model("acme", "legal") is None and await served.model("globex", "legal") is not None


async def test_tenants_sources_are_their_own(rig: Rig, served: Served, tmp_path: Path) -> None:
    """A tenant's adapters come from its own directory, and pins are the administrator's."""
    write_adapter(tmp_path / "outside")
    (rig.root / "globex" / "link").symlink_to(rig.root / "acme" / "mine")
    (rig.root / "globex" / "file").mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (rig.root / "globex" / "file" / name).symlink_to(rig.root / "acme" / "mine" / name)
    foreign = ["shared", "../acme/mine", str(rig.root / "acme" / "mine"), str(rig.root / "shared"), "link", "file"]
    for src in [*foreign, "../../outside", ".."]:
        assert await served.register("globex", "x", src) == 400
    assert await served.register("globex", "x", "mine", preload=True, pin=True) == 403
    assert await served.register("globex", "x", str(rig.root / "globex" / "mine")) == 200


async def test_without_the_switch_adapters_are_the_administrators(rig: Rig) -> None:
    """With keys or without: clients look, see no source, and change nothing."""
    for is_keyed in (True, False):
        served = Served(rig.registry, is_open=False, is_keyed=is_keyed)
        assert await served.register("admin", "a", "shared") == 200
        for who in ("acme", "nobody"):
            looks = (await served.ask(who, "GET", "/adapters/a")).status_code
            assert looks == (401 if is_keyed and who == "nobody" else 200)
            for method, path in (("POST", "/adapters"), ("POST", "/adapters/a/update"), ("DELETE", "/adapters/a")):
                assert (await served.ask(who, method, path)).status_code in (401, 403)
        assert "src" not in (await served.ask("acme", "GET", "/adapters/a")).json()
        assert (await served.ask("admin", "GET", "/adapters/a")).json()["src"] == "shared"
        assert (await served.ask("admin", "DELETE", "/adapters/a")).status_code == 200
        await served.http.aclose()


async def test_a_platform_without_a_token(rig: Rig) -> None:
    """With the switch and without keys, whoever reaches the port registers, sees the source, updates and removes."""
    served = Served(rig.registry, is_keyed=False)
    assert await served.register("nobody", "a", "shared") == 200
    assert (await served.ask("nobody", "GET", "/adapters/a")).json()["src"] == "shared"
    update = await served.ask("nobody", "POST", "/adapters/a/update", json={"src": "acme/mine"})
    assert update.status_code == 200 and await served.model("nobody", "a") is not None
    assert (await served.ask("nobody", "DELETE", "/adapters/a")).status_code == 200
    await served.http.aclose()


async def test_a_tenant_registers_so_many(tmp_path: Path) -> None:
    """One more than --max-client-adapters is a 400 that copies no file; other tenants and the administrator go on."""
    rig = Rig(tmp_path, max_of_clients=2)
    for name in ("acme/mine", "globex/mine", "shared"):
        write_adapter(rig.root / name, 1)
    served = Served(rig.registry)
    assert [await served.register("acme", f"a{n}", "mine") for n in range(2)] == [200, 200]
    copies = rig.snapshots()
    body = {"name": "one-more", "src": "mine", "preload": False}
    refused = await served.ask("acme", "POST", "/adapters", json=body)
    assert refused.status_code == 400 and "--max-client-adapters" in refused.text, refused.text
    assert rig.snapshots() == copies and await served.model("acme", "one-more") is None
    assert await served.register("globex", "a0", "mine") == 200
    for n in range(3):  # the administrator's own, and those that it gives a tenant, count for nobody
        assert await served.register("admin", f"s{n}", "shared") == 200
        assert await served.register("admin", f"t{n}", "mine", tenant="globex") == 200
    assert await served.register("globex", "a1", "mine") == 200 and await served.register("globex", "a2", "mine") == 400
    update = await served.ask("acme", "POST", "/adapters/a0/update", json={"src": "mine"})
    assert update.status_code == 200 and await served.register("acme", "one-more", "mine") == 400
    assert (await served.ask("acme", "DELETE", "/adapters/a0")).status_code == 200
    assert await served.register("acme", "one-more", "mine") == 200
    await served.http.aclose()


async def test_changes_of_tenants_are_made_in_turns(rig: Rig, served: Served) -> None:
    """However many adapters one tenant registers, another's is the next but one."""
    rig.engine.open.clear()
    tasks = [asyncio.create_task(served.register("acme", f"a{n}", "mine", preload=True)) for n in range(6)]
    waiting = rig.registry._changes._budget
    await until_async(lambda: waiting.used == 6)
    tasks.append(asyncio.create_task(served.register("globex", "g", "mine", preload=True)))
    await until_async(lambda: waiting.used == 7 and len(rig.engine.loads) == 1)
    rig.engine.open.set()
    assert await asyncio.gather(*tasks) == [200] * 7
    names = [name.partition("@")[0] for name in rig.engine.loads]
    assert len(names) == 7 and names.index("g") <= 2


async def test_clients_without_keys_register_so_many_together(tmp_path: Path) -> None:
    """Where nobody has a key, clients are one principal: what each registers counts for all."""
    rig = Rig(tmp_path, max_of_clients=2)
    rig.write("shared")
    served = Served(rig.registry, is_keyed=False)
    assert [await served.register("nobody", name, "shared") for name in "abc"] == [200, 200, 400]
    assert await served.register("admin", "c", "shared") == 200
    await served.http.aclose()


async def test_tenants_directories_are_no_adapters(rig: Rig) -> None:
    """A tenant that writes an adapter to the top of its directory does not give it, or its code, to all at a start."""
    rig.write("globex", 2)
    (rig.root / "globex" / "model.py").touch()
    await rig.registry.autoload(rig.root, tenants=("acme", "globex"))
    assert [one.name for one in rig.registry.seen_by("")] == ["shared"] and set(rig.formats.added) == {"shared"}
    assert "the directory of the tenant 'globex'" in rig.registry._refused["globex"]


@pytest.mark.parametrize("name", ["model.py", "formatter.yaml", "formatter.yml"])
async def test_no_tenant_brings_code(rig: Rig, served: Served, name: str) -> None:
    """A formatter in a tenant's directory is refused, also after its adapter was registered; nothing of it is read."""
    mine = rig.root / "acme" / "mine"
    assert await served.register("acme", "legal", "mine") == 200
    os.mkfifo(mine / name)  # who opened it would wait for ever
    assert await served.register("acme", "other", "mine") == 403
    assert (await served.ask("acme", "POST", "/adapters/legal/update", json={})).status_code == 403
    assert await served.names("acme") == ["legal", "shared"] and set(rig.formats.added) == {"shared"}
